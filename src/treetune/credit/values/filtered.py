"""Values smoothed from one side. A step's advantage is the value after it minus a baseline: here the value is
smoothed with the values of later states, and the baseline with those of earlier states.

`smoothed` uses both sides for both numbers, and is biased. Here each number uses only the side on which it
may depend without bias:

    states      s_0 ──── s_1 ──── s_2 ──── reward
    q_1                   └────────┴─────────┘      the value after step 0: from s_1 and what follows
    f_1          └────────┘                         the baseline of step 1: from s_1 and what precedes it

    A_i = q_{i+1} − f_i
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt
from typing_extensions import override

from treetune.credit.values.base import StepValues, Valuation, ValueEstimator
from treetune.credit.values.over_another import OverAnother, Sums

CANDIDATE_GAINS = tuple(tenth / 10 for tenth in range(10))
"""The gains to choose from. A gain is the share of a smoothed value that comes from its neighbour."""


@ValueEstimator.register("filtered")
@dataclass(frozen=True, kw_only=True)
class Filtered(OverAnother):
    """Smooths another estimator's values V̂ twice: from later states for the value after a step, and from
    earlier states for the baseline before it.

    The value after a step is q_i = (1 − g)·V̂_i + g·q_{i+1}, where the q after the last state is the reward.
    Values along an answer are a martingale, so each later value has the mean V(s_i). The baseline is
    f_i = (1 − h)·V̂_i + h·f_{i−1}. It does not depend on the action in s_i, and for any such f,
    ∇log π(a|s)·f has the mean 0. A step's advantage is q_{i+1} − f_i. It is as unbiased as the other
    estimator, unlike that of `smoothed`, which uses both sides for both numbers.

    A gain that isn't set is learnt: g (`behind`) is the one of `CANDIDATE_GAINS` with which q best predicts V̂
    of the state before, h (`before`) the one with which f best predicts V̂ of the state after. The noise of
    the predicted V̂ is independent of the prediction, so these gains have the least variance. They are learnt
    from the iteration's other problems, which share no sample with this one; if there is no other problem,
    both are 0. ``credit/filter_behind`` and ``credit/filter_before`` are the gains for all problems together.
    If a gain is learnt and the other estimator itself learns from other problems, values are **biased** by as
    much as one problem weighs among them."""

    behind: Annotated[float, Ge(0), Lt(1)] | None = None
    """The gain g; null: it is learnt."""
    before: Annotated[float, Ge(0), Lt(1)] | None = None
    """The gain h; null: it is learnt."""

    @property
    @override
    def learns_from_others(self) -> bool:  # type: ignore[override]
        return self.over.learns_from_others or self._learns_gains

    @property
    @override
    def unbiased(self) -> bool:  # type: ignore[override]
        # If both learn, the other problems' values, from which the gains are learnt, depend on this problem.
        return self.over.unbiased and not (self._learns_gains and self.over.learns_from_others)

    @property
    def _learns_gains(self) -> bool:
        return self.behind is None or self.before is None

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        """Returns the values and baselines of the estimator `over`, smoothed with the gains g and h."""
        estimates = self.over.values(valuation)
        errors_by_answer = []
        for step_values, answer in zip(estimates, valuation.answers, strict=True):
            errors_by_answer.append(_prediction_errors(step_values, answer.reward))
        # For each tree, the sums of its answers' errors. A row of errors has a column for each of
        # `CANDIDATE_GAINS` as g, and then one for each as h.
        columns = 2 * len(CANDIDATE_GAINS)
        errors_by_tree = []
        for rows_of_tree in valuation.by_tree(errors_by_answer):
            errors_by_tree.append(Sums(rows_of_tree, columns).as_floats())
        errors_by_rank = valuation.context.ranks.exchange("value-misses", errors_by_tree)
        all_errors = list(itertools.chain.from_iterable(errors_by_rank))
        sums = Sums(all_errors, columns)
        # The metrics are the gains of all trees together. Nothing is smoothed with them.
        g_of_all, h_of_all = self._choose_gains(sums.as_floats())
        valuation.metrics |= {"credit/filter_behind": g_of_all, "credit/filter_before": h_of_all}
        # The gains for a tree's answers are learnt from all other trees: gains that depend on an answer's own
        # reward would make its values biased.
        gains_by_tree = []
        for errors_of_tree in errors_by_tree:
            errors_of_others = sums.without(errors_of_tree)
            gains_by_tree.append(self._choose_gains(errors_of_others))
        filtered = []
        for step_values, answer in zip(estimates, valuation.answers, strict=True):
            tree_index = answer.states[0].tree  # the same in all states of an answer
            g, h = gains_by_tree[tree_index]
            filtered.append(filter_values(step_values, answer.reward, gain_from_later=g, gain_from_earlier=h))
        return filtered

    def _choose_gains(self, errors: Sequence[float]) -> tuple[float, float]:
        """Returns the gains g (`behind`) and h (`before`).

        A gain that is set is returned as it is. A gain that is learnt is the one of `CANDIDATE_GAINS` with
        the smallest error; if several have it, the smallest of them, which smooths least.

        Args:
            errors: The errors of each of `CANDIDATE_GAINS` as g, and then of each as h
                (`_prediction_errors`).
        """
        g, h = self.behind, self.before
        if g is None:
            g = _choose_best_gain(errors[: len(CANDIDATE_GAINS)])
        if h is None:
            h = _choose_best_gain(errors[len(CANDIDATE_GAINS) :])
        return g, h


def _choose_best_gain(errors: Sequence[float]) -> float:
    """Returns the gain with the smallest error; among equals the smallest gain, since `min` takes the first
    and `CANDIDATE_GAINS` rises."""
    best = min(range(len(CANDIDATE_GAINS)), key=errors.__getitem__)
    return CANDIDATE_GAINS[best]


def _prediction_errors(step_values: StepValues, reward: float) -> list[float]:
    """Returns one answer's sums of squared errors, one for each of `CANDIDATE_GAINS` as g and then one for
    each as h.

    With the gain g, the estimates from state i + 1 on are smoothed to q_{i+1}, which predicts V̂_i. With the
    gain h, the estimates up to state i are smoothed to f_i, which predicts V̂_{i+1}. So no V̂ is among the
    estimates that predict it.
    """
    # V̂ of each state that has a value, and then the reward.
    observations = _observations(step_values, reward)
    baselines = [value.baseline_or_value for value in step_values if value is not None]
    errors_of_g, errors_of_h = [], []
    for gain in CANDIDATE_GAINS:
        # q_1 predicts V̂_0, and so on. The last smoothed value is the reward itself, whatever the gain. So its
        # error in predicting the last V̂ says nothing about gains, and is left out.
        predictions = _smooth_from_later(observations, gain)[1:-1]
        errors = [predicted - observed for predicted, observed in zip(predictions, observations)]
        errors_of_g.append(math.fsum(error**2 for error in errors))
        # f_0 predicts V̂_1, and so on; the last f predicts the reward.
        predictions = _smooth_from_earlier(baselines, gain)
        errors = [predicted - observed for predicted, observed in zip(predictions, observations[1:])]
        errors_of_h.append(math.fsum(error**2 for error in errors))
    return errors_of_g + errors_of_h


def _observations(step_values: StepValues, reward: float) -> list[float]:
    """Returns V̂ of each state that has a value, followed by the reward."""
    return [*(value.value for value in step_values if value is not None), reward]


def _smooth_from_later(observations: Sequence[float], gain: float) -> list[float]:
    """Returns q_i = (1 − g)·V̂_i + g·q_{i+1} for each observation V̂_i. The last one stays as it is."""
    estimates = [observations[-1]]  # from the last to the first
    for observed in reversed(observations[:-1]):
        estimates.append((1 - gain) * observed + gain * estimates[-1])
    return estimates[::-1]


def _smooth_from_earlier(observations: Sequence[float], gain: float) -> list[float]:
    """Returns f_i = (1 − h)·V̂_i + h·f_{i−1} for each observation V̂_i. The first one stays as it is."""
    estimates: list[float] = []
    for observed in observations:
        if estimates:
            estimates.append((1 - gain) * observed + gain * estimates[-1])
        else:
            estimates.append(observed)
    return estimates


def filter_values(
    step_values: StepValues, reward: float, gain_from_later: float, gain_from_earlier: float
) -> StepValues:
    """Returns an answer's values and baselines after smoothing.

    The value of a state is smoothed with the values of later states and the reward, by the gain g
    (`gain_from_later`). The baseline of a state is smoothed with the baselines of earlier states, by the gain
    h (`gain_from_earlier`).
    """
    baselines = [value.baseline_or_value for value in step_values if value is not None]
    # Both have an entry for each state with a value. `smoothed_values` has one more, the reward's.
    smoothed_values = iter(_smooth_from_later(_observations(step_values, reward), gain_from_later))
    smoothed_baselines = iter(_smooth_from_earlier(baselines, gain_from_earlier))
    filtered: StepValues = []
    for value in step_values:
        if value is not None:
            value = value._replace(value=next(smoothed_values), baseline=next(smoothed_baselines))
        filtered.append(value)
    return filtered
