"""The value model beside the policy: its settings, and its values as credit may ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.contracts import Experiment, Finding
from treetune.vocabulary import Column, Trajectory


@dataclass(frozen=True)
class Critic:
    """The critic of the run, as it is before the iteration's training: a service of contexts."""

    values: Callable[[Sequence[Trajectory]], list[Column]]
    """Returns for each answer of this rank the value of the state before each response token; nan before
    tokens that nobody sampled. Collective."""


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """How the critic is trained: a copy of the start model with a linear head and an optimiser of its own,
    which has the trainer's schedule, precision and sharding.

    `learning_rate` None is the policy's. `value_clip` bounds how far a value may move from what
    it was before the iteration's training while that still lowers the loss (Schulman et al.'s code of
    PPO); None: there is no bound.
    """

    learning_rate: Annotated[float, Gt(0)] | None = None
    value_clip: Annotated[float, Gt(0)] | None = 0.2


def check_critic_goes_on(experiment: Experiment, what: str, remedy: str) -> Iterator[Finding]:
    """What is wrong where training begins again in every iteration. `what` has the critic; `remedy` is one
    way to do without."""
    if experiment.restart == "every_iteration":
        yield Finding(
            f"restart 'every_iteration' throws away what was trained, and the critic of {what} goes on"
            " learning",
            "$.restart",
            f"set restart to 'never', or {remedy}",
        )
