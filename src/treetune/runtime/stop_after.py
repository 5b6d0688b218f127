"""Runs that end when a budget is spent, whatever number of iterations that takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from treetune.contracts import Finding, Need, Part, SampledAnswers
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import read_record
from treetune.vocabulary import Metrics

if TYPE_CHECKING:
    from treetune.runtime.base import PolicyIteration

ANSWERS, CONTINUATIONS = "rollout/sampled_tokens", "credit/value_tokens"
"""Metrics that say what an iteration sampled; the first counts a token that several answers share once."""


@dataclass(frozen=True, kw_only=True)
class StopAfter(Part):
    """Ends the run when it has sampled so many tokens to train on: those of answers and those of the
    continuations that gave them credit. Evaluations are not among them. `iterations` stays the bound.

    Iterations stay whole. The run ends at that end of an iteration that is nearest to `sampled_tokens`, the
    next iteration being taken to sample as much as the last, so that methods with large and with small
    iterations are on average equally far from the budget.
    """

    sampled_tokens: Annotated[int, Gt(0)]

    @property
    def needs(self) -> tuple[Need, ...]:
        return (Need(SampledAnswers(), "it counts sampled tokens", "leave stop_after out"),)

    def check(self, experiment: PolicyIteration) -> Iterable[Finding]:
        if experiment.length_matters is not None:
            yield Finding(
                f"stop_after ends the run at an iteration that nobody knows, and {experiment.length_matters}",
                "sampled_tokens",
                "choose a constant learning rate after warm-up steps, or leave stop_after out",
            )

    def further_iterations(self, of_iterations: Sequence[int]) -> int | None:
        """How many are still to come, were they all as large as the last, given the sampled tokens of each so
        far; 0 where the run is over, None where there has been none."""
        if not of_iterations:
            return None
        left = self.sampled_tokens - sum(of_iterations)
        return max(0, math.floor(left / max(1, of_iterations[-1]) + 0.5))


def expected_iterations(
    most: int, budget: StopAfter | None, directory: ExperimentDirectory, done: int
) -> int:
    """Of a run that has `done` of at most so many: `done` itself where it is over."""
    if budget is None or done >= most:
        return most
    further = budget.further_iterations(tokens_sampled(directory, done))
    return most if further is None else min(most, done + further)


def tokens_sampled(directory: ExperimentDirectory, done: int) -> list[int]:
    """In each of the first `done` iterations, from what rollout and credit wrote when they were done.

    Raises ValueError where that is gone, or from before tokens were counted."""
    return [_in_iteration(directory.iteration(number)) for number in range(done)]


def _in_iteration(folder: Path) -> int:
    answers = _metrics(folder / "rollout.json")
    if ANSWERS not in answers:
        raise ValueError(
            f"{folder} was sampled by a version that did not count its tokens: leave stop_after out, or begin"
            " again under another experiment_name"
        )
    return round(answers[ANSWERS] + _metrics(folder / "credit.json").get(CONTINUATIONS, 0.0))


def _metrics(path: Path) -> Metrics:
    try:
        return read_record(path, f"delete {path.parent} but for its journal/, and give the command again")[
            "metrics"
        ]
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is gone, which says how many tokens were sampled there: put it back, or leave stop_after"
            " out"
        ) from error
