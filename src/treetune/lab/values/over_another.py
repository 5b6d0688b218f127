"""Estimators that work on the values of another estimator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated

from annotated_types import Ge, Lt
from typing_extensions import override

from treetune.rollouts.base import CriticSettings
from treetune.rollouts.metrics import mean, pooled
from treetune.rollouts.valuation import FreshContinuations, StepValues, Valuation, Value, ValueEstimator
from treetune.rollouts.values import Budget


@dataclass(frozen=True, kw_only=True)
class OverAnother(ValueEstimator):
    """An estimator that requests the same continuations as another one, and changes its values."""

    over: ValueEstimator = field(default_factory=FreshContinuations)
    """The estimator whose values it works on."""

    @property
    @override
    def continues(self) -> bool:
        return self.over.continues

    @property
    @override
    def critic_settings(self) -> CriticSettings | None:
        return self.over.critic_settings

    @override
    def budget(self, samples: int) -> Budget:
        return self.over.budget(samples)

    @override
    def first_states(self, states: int) -> Sequence[int]:
        return self.over.first_states(states)


class Sums:
    """Sums of rows of numbers, a row for each problem, from which one row can be taken out exactly.

    They are kept as fractions. A float that is added and subtracted again leaves its rounding error in the
    sum. Where two gains tie, this error would decide between them, and so would the samples of the problem
    that was to be left out."""

    def __init__(self, rows: Iterable[Sequence[float]], columns: int) -> None:
        self._exact = [Fraction() for _ in range(columns)]
        for row in rows:
            for column in range(columns):
                self._exact[column] += Fraction(row[column])

    def rounded(self) -> list[float]:
        return [float(total) for total in self._exact]

    def without(self, row: Sequence[float]) -> list[float]:
        """Returns the sums over all problems but the one with this row."""
        return [float(total - Fraction(number)) for total, number in zip(self._exact, row, strict=True)]


LEAST_STEP_VARIANCE = 1e-4
"""The least variance of a step of the walk: of a hundredth of the range of rewards."""

LAGS = (1, 2, 3, 4)
"""Distances, in steps, between the states that are compared to estimate the walk's variance."""


@ValueEstimator.register("smoothed")
@dataclass(frozen=True, kw_only=True)
class Smoothed(OverAnother):
    """Treats the values of another estimator as noisy observations of a random walk, and returns the walk's
    expectation at every state (Kalman's filter, and the backward pass of Rauch, Tung and Striebel, AIAA
    Journal 3(8), 1965). The answer's reward counts as one more continuation of its last state.

    The variance of the walk's steps and the noise of the observations are estimated from the whole iteration:
    the further apart two states are, the more the walk moves between them, while the noise stays the same.
    The noise of single observations is in proportion to their binomial variances.

    **Biased**: a value depends on what came after it, and jumps are flattened. It lowers the error most where
    there are few continuations. On the tests' language, three steps long, values are off by 0.05 to 0.06, and
    the expected gradient has half its length and nearly its direction (cosine 0.98 to 0.99). Normalised
    advantages don't depend on that length."""

    unbiased = False
    learns_from_others = True

    @override
    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        values_by_tree = self.over.values(valuation)
        squared_differences: dict[str, list[float]] = {str(lag): [] for lag in LAGS}
        variances: list[float] = []
        for values in itertools.chain.from_iterable(values_by_tree):  # answer by answer
            variances += [value.variance for value in values if value is not None]
            for lag in LAGS:
                for earlier, later in zip(values, values[lag:]):
                    if earlier is not None and later is not None:
                        squared_differences[str(lag)].append((later.value - earlier.value) ** 2)
        columns = squared_differences | {"variance": variances}
        of_all_ranks = pooled(valuation.context, "value-walks", columns)
        step_variance, noise_scale = _estimate_walk(of_all_ranks)

        smooth_by_tree: list[list[StepValues]] = []
        for values_of_tree, tree in zip(values_by_tree, valuation.trees, strict=True):
            smooth_of_tree: list[StepValues] = []
            for values, leaf in zip(values_of_tree, tree.leaves, strict=True):
                observations = _noisy_observations(values, leaf.reward, noise_scale)
                *smooth_values, _ = smooth_walk(observations, step_variance)  # the last is the reward's
                smooth_of_tree.append(smooth_values)
            smooth_by_tree.append(smooth_of_tree)
        return smooth_by_tree


def _estimate_walk(of_all_ranks: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Returns the variance of a step of the walk, and the factor that turns the binomial variances of the
    observations into their noise.

    Takes squared differences of observations by their distance in steps (the keys "1", "2", …), and the
    observations' binomial variances (the key "variance"). The mean squared difference of two observations at
    a distance of m steps is m · step variance + 2 · noise: a line in m, fitted by least squares.
    """
    mean_square_by_lag = {lag: mean(of_all_ranks[str(lag)]) for lag in LAGS if of_all_ranks.get(str(lag))}
    if len(mean_square_by_lag) < 2:
        return LEAST_STEP_VARIANCE, 1.0  # one point fits no line
    mean_lag = mean(list(mean_square_by_lag))
    spread = sum((lag - mean_lag) ** 2 for lag in mean_square_by_lag)
    slope = sum((lag - mean_lag) * square for lag, square in mean_square_by_lag.items()) / spread
    # A slope or a height below 0 is noise of the fit: variances aren't negative, and 0 is divided by.
    step_variance = max(slope, LEAST_STEP_VARIANCE)
    height = mean(list(mean_square_by_lag.values())) - step_variance * mean_lag
    noise = max(height / 2, LEAST_STEP_VARIANCE)
    return step_variance, noise / mean(of_all_ranks["variance"])


def _noisy_observations(values: StepValues, reward: float, noise_scale: float) -> StepValues:
    """Returns the values of an answer with the estimated noise as their variance, and after them the reward
    with the noise of one continuation of the last valued state."""
    observations: StepValues = []
    for value in values:
        if value is not None:
            value = value._replace(variance=value.variance * noise_scale)
        observations.append(value)
    last = next((value for value in reversed(observations) if value is not None), None)
    if last is None:
        return [*observations, None]
    variance_of_one_sample = last.variance * last.samples
    return [*observations, Value(reward, variance_of_one_sample)]


def smooth_walk(path: Sequence[Value | None], step_variance: float) -> StepValues:
    """Returns the expectation of a random walk wherever it was observed, given all observations.

    None in `path` is a step without an observation, and stays None. Let P⁻ be the variance of a prediction,
    R an observation's, and P that of the filtered value, all along the walk:

    * forward (Kalman): x⁻ = x_before, P⁻ = P_before + steps · `step_variance`, gain K = P⁻ / (P⁻ + R),
      x = x⁻ + K · (observation − x⁻), P = (1 − K) · P⁻;
    * backward (Rauch, Tung and Striebel): C = P / P⁻_next, x_smooth = x + C · (x_smooth_next − x⁻_next),
      P_smooth = P + C² · (P_smooth_next − P⁻_next).
    """
    observed = [(index, value) for index, value in enumerate(path) if value is not None]
    filtered: list[Value] = []
    predictions: list[Value] = []  # of each observation, from those before it
    for number, (index, observation) in enumerate(observed):
        if number == 0:
            predictions.append(observation)
            filtered.append(observation)
            continue
        before = filtered[-1]
        steps = index - observed[number - 1][0]
        prediction = Value(before.value, before.variance + step_variance * steps)
        gain = prediction.variance / (prediction.variance + observation.variance)
        value = prediction.value + gain * (observation.value - prediction.value)
        predictions.append(prediction)
        filtered.append(Value(value, (1 - gain) * prediction.variance))
    smooth = list(filtered)
    for number in reversed(range(len(observed) - 1)):
        current, next_prediction, next_smooth = filtered[number], predictions[number + 1], smooth[number + 1]
        back = current.variance / next_prediction.variance
        smooth[number] = Value(
            current.value + back * (next_smooth.value - next_prediction.value),
            current.variance + back**2 * (next_smooth.variance - next_prediction.variance),
        )
    result: StepValues = [None] * len(path)
    for (index, _), value_there in zip(observed, smooth, strict=True):
        result[index] = value_there
    return result


GAINS = tuple(tenth / 10 for tenth in range(10))
"""Gains that are tried: 0, 0.1, …, 0.9. A gain is the share of a value that comes from its neighbour."""


@ValueEstimator.register("filtered")
@dataclass(frozen=True, kw_only=True)
class Filtered(OverAnother):
    """Smooths another estimator's values V̂ with two filters: the value after a step uses only later values,
    the baseline before it only earlier ones.

    * The value after a step: q_i = (1 − g)·V̂_i + g·q_{i+1}, with the reward after the last state. Values
      along an answer are a martingale, so each later one has the mean V(s_i).
    * Its baseline: f_i = (1 − h)·V̂_i + h·f_{i−1}. It doesn't depend on the action taken in s_i, and for any
      such f, ∇log π(a|s)·f has the mean 0.

    A step's advantage is q_{i+1} − f_i. It is as unbiased as the other estimator, whereas `smoothed` uses
    earlier and later values for both.

    g (`behind`) and h (`before`), where they are null, are those of `GAINS` whose filtered values predict the
    neighbouring V̂ best: q_{i+1} predicts V̂_i, and f_i predicts V̂_{i+1}. The noise of V̂ is independent of the
    prediction, so the best prediction is the filter with the least variance. Both are learnt from the
    iteration's other problems, which share no sample with this one; with one problem alone both are 0.
    ``credit/filter_behind`` and ``credit/filter_before`` are those of all problems together. A learnt gain
    over an estimator that itself learns from other problems is **biased** by the weight of one problem among
    them."""

    behind: Annotated[float, Ge(0), Lt(1)] | None = None
    """The gain g; null: it is learnt."""
    before: Annotated[float, Ge(0), Lt(1)] | None = None
    """The gain h; null: it is learnt."""

    @property
    @override
    def learns_from_others(self) -> bool:  # type: ignore[override]
        return self.over.learns_from_others or None in (self.behind, self.before)

    @property
    @override
    def unbiased(self) -> bool:  # type: ignore[override]
        learns = None in (self.behind, self.before)
        return self.over.unbiased and not (learns and self.over.learns_from_others)

    @override
    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        values_by_tree = self.over.values(valuation)
        errors_by_problem: list[list[float]] = []
        for values_of_tree, tree in zip(values_by_tree, valuation.trees, strict=True):
            errors_by_answer = [
                _prediction_errors(values, leaf.reward)
                for values, leaf in zip(values_of_tree, tree.leaves, strict=True)
            ]
            errors_by_problem.append(Sums(errors_by_answer, 2 * len(GAINS)).rounded())
        errors_by_rank = valuation.context.ranks.exchange("value-misses", errors_by_problem)
        errors_of_all = Sums(itertools.chain.from_iterable(errors_by_rank), 2 * len(GAINS))

        behind, before = self._choose_gains(errors_of_all.rounded())
        valuation.metrics |= {"credit/filter_behind": behind, "credit/filter_before": before}

        filtered_by_tree: list[list[StepValues]] = []
        for values_of_tree, tree, errors in zip(
            values_by_tree, valuation.trees, errors_by_problem, strict=True
        ):
            # Gains that depended on the problem's own samples would bias its gradient.
            behind, before = self._choose_gains(errors_of_all.without(errors))
            filtered_by_tree.append(
                [
                    filter_values(values, leaf.reward, behind, before)
                    for values, leaf in zip(values_of_tree, tree.leaves, strict=True)
                ]
            )
        return filtered_by_tree

    def _choose_gains(self, errors: Sequence[float]) -> tuple[float, float]:
        """Returns g and h: the configured ones, or else those with the least error; the smaller of equals.

        `errors` are sums of squares as of `_prediction_errors`."""
        errors_behind, errors_before = errors[: len(GAINS)], errors[len(GAINS) :]
        behind, before = self.behind, self.before
        if behind is None:
            behind = GAINS[errors_behind.index(min(errors_behind))]
        if before is None:
            before = GAINS[errors_before.index(min(errors_before))]
        return behind, before


def _observations(values: StepValues, reward: float) -> list[float]:
    """Returns V̂ of an answer's valued states, and its reward at the end."""
    return [*(value.value for value in values if value is not None), reward]


def _baselines(values: StepValues) -> list[float]:
    return [value.baseline_or_value for value in values if value is not None]


def _prediction_errors(values: StepValues, reward: float) -> list[float]:
    """Returns the squared errors of both filters in one answer, summed over its states, for each of `GAINS`:
    first of q_{i+1} as a prediction of V̂_i, then of f_i as a prediction of V̂_{i+1}."""
    observations = _observations(values, reward)
    baselines = _baselines(values)
    errors_behind, errors_before = [], []
    for gain in GAINS:
        # The last q is the reward itself, which no gain changes.
        next_filtered = _filter_backward(observations, gain)[1:-1]
        errors_behind.append(_squared_error(next_filtered, observations))
        filtered = _filter_forward(baselines, gain)
        errors_before.append(_squared_error(filtered, observations[1:]))
    return errors_behind + errors_before


def _squared_error(predictions: Sequence[float], observations: Sequence[float]) -> float:
    """Returns the sum over the predictions; there may be more observations."""
    return math.fsum((predicted - observed) ** 2 for predicted, observed in zip(predictions, observations))


def _filter_backward(observations: Sequence[float], gain: float) -> list[float]:
    """Returns q_i = (1 − g)·V̂_i + g·q_{i+1}, which is the last observation at the end."""
    filtered = [observations[-1]]  # from the end to the beginning
    for observation in reversed(observations[:-1]):
        filtered.append((1 - gain) * observation + gain * filtered[-1])
    return filtered[::-1]


def _filter_forward(observations: Sequence[float], gain: float) -> list[float]:
    """Returns f_i = (1 − h)·V̂_i + h·f_{i−1}, which is the first observation at the beginning."""
    filtered: list[float] = []
    for observation in observations:
        if filtered:
            filtered.append((1 - gain) * observation + gain * filtered[-1])
        else:
            filtered.append(observation)
    return filtered


def filter_values(values: StepValues, reward: float, behind: float, before: float) -> StepValues:
    """Returns the values of an answer filtered with the gains g (`behind`) and h (`before`)."""
    filtered = iter(_filter_backward(_observations(values, reward), behind))
    baselines = iter(_filter_forward(_baselines(values), before))
    result: StepValues = []
    for value in values:
        if value is not None:
            value = value._replace(value=next(filtered), baseline=next(baselines))
        result.append(value)
    return result
