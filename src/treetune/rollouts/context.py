"""The context that a run gives rollout, shaping, credit and selection to work with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from treetune.engine.base import ANSWERS, Engine, SamplingParams
from treetune.tasks.base import Task
from treetune.vocabulary import Problem, TextCodec, TokenIds, Trajectory

if TYPE_CHECKING:
    from treetune.tasks.graders.pool import GraderPool

Kind = TypeVar("Kind")


class RankGroup(Protocol):
    """The processes that share the work of a run. All communication between ranks goes through it."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Returns every rank's object, in rank order. Collective."""

    def hand_out(self, name: str, for_ranks: Sequence[Any]) -> list[Any]:
        """Sends an object to each rank, and returns those that all ranks have sent to this one.
        Collective."""


@dataclass(frozen=True)
class OneRank:
    """A process that has no others beside it."""

    rank: int = 0
    world_size: int = 1

    def exchange(self, name: str, value: Any) -> list[Any]:
        return [value]

    def hand_out(self, name: str, for_ranks: Sequence[Any]) -> list[Any]:
        return list(for_ranks)


@dataclass(frozen=True)
class AnswerSettings:
    """The settings of all answers that are made with a context."""

    context_length: int
    """Tokens of prompt and answer together."""
    sampling: SamplingParams | None = None
    """How the policy is sampled; None where nothing samples."""
    unfinished_reward: float | None = 0.0
    """The reward of an answer that the budget cut off; None: it is graded like any other."""
    reads_logprobs: bool = True
    """Whether anybody reads the engine's log-probs of answers. Training does; evaluation and values only
    grade answers, and the engine is not asked for any. A rollout that reads them itself asks anyway."""
    priority: int = ANSWERS
    """The priority of requests for answers, of `ANSWERS` and `CONTINUATIONS`: what is sampled to value
    others' states waits behind answers."""

    def token_budget(self, prompt_ids: TokenIds, max_tokens: int) -> int:
        """Returns how many tokens an answer may have: `max_tokens`, or what the prompt leaves of the context
        if that is less."""
        return min(max_tokens, self.context_length - len(prompt_ids))


@dataclass(frozen=True)
class Log:
    """The run's log, as a part writes to it."""

    say: Callable[[str], None] = lambda message: None
    """Writes a line, once for all ranks."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Shows how much of a phase is done."""


@dataclass(frozen=True)
class RolloutContext:
    """The context of one phase of a run. Its seed is the run's: derive from it and from the iteration.

    No field belongs to one feature: features are services, which a part gets by their type, as in
    ``context.get(TurnJournal)``.
    """

    task: Task
    engine: Engine | None
    """None where nothing samples, as in supervised training."""
    grader: GraderPool
    codec: TextCodec
    seed: int
    iteration: int
    settings: AnswerSettings
    ranks: RankGroup = field(default_factory=OneRank)
    log: Log = field(default_factory=Log)
    services: Sequence[object] = ()
    """Objects that some parts need and most don't; each part gets those that it needs by their type."""

    def find(self, kind: type[Kind]) -> Kind | None:
        """Returns the service of that type; None where there is none."""
        return next((service for service in self.services if isinstance(service, kind)), None)

    def get(self, kind: type[Kind]) -> Kind:
        """Returns the service of that type. Raises LookupError where there is none."""
        if (service := self.find(kind)) is None:
            raise LookupError(f"this phase of the run has no {kind.__name__}")
        return service

    def with_services(self, *services: object, **changes: Any) -> RolloutContext:
        """Returns a context with further services, and with other fields where they are given."""
        return replace(self, services=(*services, *self.services), **changes)


# Services of features


@dataclass(frozen=True)
class FurtherProblems:
    """The training problems that the iteration was not given, for rollouts that sample more of them."""

    draw: Callable[[], Sequence[Problem]]
    """Returns them in an order that seed and iteration decide, the same on all ranks."""


@dataclass(frozen=True)
class CarryOver:
    """Answers that a rollout carries over from one iteration to the next (`Rollout.carries`)."""

    answers: Sequence[Trajectory]
    """All ranks' answers of the iteration before, in rank order."""
    keep: Callable[[Sequence[Trajectory]], None]
    """Takes what this rank carries over, before the rollout's run is over. Collective."""


class ShapingMemory(dict[str, Any]):
    """The memory of parts of shaping, in JSON's types, over iterations: the same on all ranks.

    A part that `remembers` changes the entry under its label, on all ranks alike; the runtime keeps it with
    the iteration.
    """


@dataclass(frozen=True)
class AnswerObserver:
    """Somebody who wants each answer as soon as it is graded, before the others are there."""

    observe: Callable[[Trajectory], Awaitable[None]]
    """Takes a graded answer. May await samples of the same engine; the rollout ends when this has ended."""
