"""Values smoothed from one side each: what a step brought about from behind it, its baseline from before it.

`smoothed` uses both sides for both numbers, and is biased. Here each number only uses the side that it may:

    states      s_0 ──── s_1 ──── s_2 ──── reward
    q_1                   └────────┴─────────┘      the value after step 0: from s_1 and what follows
    f_1          └────────┘                         the baseline of step 1: from s_1 and what precedes it

    A_i = q_{i+1} − f_i
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt
from typing_extensions import override

from treetune.credit.values.base import StepValues, Valuation, ValueEstimator
from treetune.credit.values.over_another import OverAnother, Sums

GAINS = tuple(tenth / 10 for tenth in range(10))
"""The gains to choose from: the share of a value that comes from its neighbour."""


@ValueEstimator.register("filtered")
@dataclass(frozen=True, kw_only=True)
class Filtered(OverAnother):
    """Smooths another estimator's values in two halves, each from the side that it may depend on.

    The value after a step is smoothed from behind: q_i = (1 − g)·V̂_i + g·q_{i+1}, with the reward after the
    last. Values along an answer are a martingale, so each later one has the mean V(s_i). The baseline is
    smoothed from before: f_i = (1 − h)·V̂_i + h·f_{i−1} does not depend on the action in s_i, and for any
    such f ∇log π(a|s)·f has the mean 0. A step's advantage is q_{i+1} − f_i: as unbiased as the other
    estimator, where `smoothed` uses both sides for both values.

    g (`behind`) and h (`before`), where they aren't set, are those of `GAINS` that predict V̂ one state
    before and one state after best. The noise of that V̂ is independent, so these gains have the least
    variance. They are learnt from the iteration's other problems, which share no sample with this one; with
    one problem alone both are 0. ``credit/filter_behind`` and ``credit/filter_before`` are those of all
    problems together. If one is learnt over an estimator that itself learns from other problems, it is
    **biased** by as much as one problem weighs among them."""

    behind: Annotated[float, Ge(0), Lt(1)] | None = None
    """The gain g; None: it is learnt."""
    before: Annotated[float, Ge(0), Lt(1)] | None = None
    """The gain h; None: it is learnt."""

    @property
    @override
    def learns_from_others(self) -> bool:  # type: ignore[override]
        return self.over.learns_from_others or self._learns_gains

    @property
    @override
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.over.unbiased and not (self._learns_gains and self.over.learns_from_others)

    @property
    def _learns_gains(self) -> bool:
        return self.behind is None or self.before is None

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        estimates = self.over.values(valuation)
        errors = []
        for step_values, answer in zip(estimates, valuation.answers, strict=True):
            errors.append(_prediction_errors(step_values, answer.reward))
        columns = 2 * len(GAINS)
        errors_by_tree = []
        for errors_of_tree in valuation.by_tree(errors):
            errors_by_tree.append(Sums(errors_of_tree, columns).as_floats())
        errors_by_rank = valuation.context.ranks.exchange("value-misses", errors_by_tree)
        all_errors = [errors for errors_of_rank in errors_by_rank for errors in errors_of_rank]
        sums = Sums(all_errors, columns)
        behind, before = self._gains(sums.as_floats())
        valuation.metrics |= {"credit/filter_behind": behind, "credit/filter_before": before}
        # The gains for each tree's answers are learnt from all other trees.
        gains_by_tree = [self._gains(sums.without(errors_of_tree)) for errors_of_tree in errors_by_tree]
        filtered = []
        for step_values, answer in zip(estimates, valuation.answers, strict=True):
            behind, before = gains_by_tree[answer.states[0].tree]
            filtered.append(filter_values(step_values, answer.reward, behind, before))
        return filtered

    def _gains(self, errors: Sequence[float]) -> tuple[float, float]:
        """Returns g and h: those that are set, or those with the smallest errors, and of equals the
        smallest."""
        errors_behind, errors_before = errors[: len(GAINS)], errors[len(GAINS) :]
        best_behind = GAINS[min(range(len(GAINS)), key=errors_behind.__getitem__)]
        best_before = GAINS[min(range(len(GAINS)), key=errors_before.__getitem__)]
        return (
            best_behind if self.behind is None else self.behind,
            best_before if self.before is None else self.before,
        )


def _prediction_errors(step_values: StepValues, reward: float) -> list[float]:
    """Returns sums of squared errors of one answer: for each of `GAINS` as g, of q_{i+1} as a prediction of
    the value before it, and then for each as h, of f_i as a prediction of the value after it."""
    observations = _observations(step_values, reward)
    baselines = [value.baseline_or_value for value in step_values if value is not None]
    errors_behind, errors_before = [], []
    for gain in GAINS:
        smoothed = _smooth_from_behind(observations, gain)
        # The reward itself predicts nothing.
        pairs = zip(smoothed[1:-1], observations)
        errors_behind.append(math.fsum((after - observed) ** 2 for after, observed in pairs))
        pairs = zip(_smooth_from_before(baselines, gain), observations[1:])
        errors_before.append(math.fsum((before - observed) ** 2 for before, observed in pairs))
    return errors_behind + errors_before


def _observations(step_values: StepValues, reward: float) -> list[float]:
    """Returns the values that there are, and the reward after the last."""
    return [*(value.value for value in step_values if value is not None), reward]


def _smooth_from_behind(observations: Sequence[float], gain: float) -> list[float]:
    """Returns q_i = (1 − g)·V̂_i + g·q_{i+1} for each observation V̂_i; the last is its own."""
    estimates = [observations[-1]]  # from the last to the first
    for observed in reversed(observations[:-1]):
        estimates.append((1 - gain) * observed + gain * estimates[-1])
    return estimates[::-1]


def _smooth_from_before(observations: Sequence[float], gain: float) -> list[float]:
    """Returns f_i = (1 − h)·V̂_i + h·f_{i−1} for each observation V̂_i; the first is its own."""
    estimates: list[float] = []
    for observed in observations:
        if estimates:
            estimates.append((1 - gain) * observed + gain * estimates[-1])
        else:
            estimates.append(observed)
    return estimates


def filter_values(step_values: StepValues, reward: float, behind: float, before: float) -> StepValues:
    """Returns the values of an answer, smoothed with these gains."""
    baselines = [value.baseline_or_value for value in step_values if value is not None]
    smoothed_values = iter(_smooth_from_behind(_observations(step_values, reward), behind))
    smoothed_baselines = iter(_smooth_from_before(baselines, before))
    filtered: StepValues = []
    for value in step_values:
        if value is not None:
            value = value._replace(value=next(smoothed_values), baseline=next(smoothed_baselines))
        filtered.append(value)
    return filtered
