"""Estimators that make more of another estimator's values."""

from __future__ import annotations

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
    """An estimator that requests what another one does, and makes more of its values."""

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
    """Sums over problems, column by column, exact until they are read: `without` a problem, nothing of that
    problem is left. Floats that are added and subtracted again leave its rounding, and where what is learnt
    from sums is decided by a tie, the rounding of the problem's own samples would decide it."""

    def __init__(self, parts: Iterable[Sequence[float]], columns: int) -> None:
        gathered = list(parts)
        self._exact = [sum((Fraction(one[at]) for one in gathered), Fraction()) for at in range(columns)]

    def rounded(self) -> list[float]:
        return [float(one) for one in self._exact]

    def without(self, part: Sequence[float]) -> list[float]:
        """Returns the sums of all problems but one."""
        return [float(one - Fraction(own)) for one, own in zip(self._exact, part, strict=True)]


LEAST_STEP_VARIANCE = 1e-4
"""Of a walk that the estimates don't show to move: a hundredth of the range of rewards a step."""

LAGS = (1, 2, 3, 4)
"""Distances, in steps, of the states that are compared to learn how fast values walk."""


@ValueEstimator.register("smoothed")
@dataclass(frozen=True, kw_only=True)
class Smoothed(OverAnother):
    """Takes the values of another estimator for noisy observations of a random walk, and gives the walk's
    expectation at every state (Kalman's filter, and the pass backwards of Rauch, Tung and Striebel, AIAA
    Journal 3(8), 1965). The answer's reward is one more continuation of its last state.

    How fast the walk goes and how noisy the observations are is learnt from the whole iteration: states
    further apart differ more by what the walk does between them, and equally by noise. How the noise is
    shared among observations is the binomial's.

    **Biased**: a value knows what came after it, and jumps are flattened. It lowers the error of few
    continuations most. On the tests' language, three steps long, values are off by 0.05 to 0.06, and it
    halves the expected gradient and hardly turns it (cosine 0.98 to 0.99); advantages that are normalised
    don't see its length."""

    unbiased = False
    learns_from_others = True

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        estimates = self.over.values(valuation)
        squares: dict[str, list[float]] = {str(lag): [] for lag in LAGS}
        variances: list[float] = []
        for of_answer in estimates:
            variances += [value.variance for value in of_answer if value is not None]
            for lag in LAGS:
                for value, later in zip(of_answer, of_answer[lag:]):
                    if value is not None and later is not None:
                        squares[str(lag)].append((later.value - value.value) ** 2)
        gathered = pooled(valuation.context, "value-walks", squares | {"variance": variances})
        step, scale = _walk(gathered)
        return [
            smooth_walk(_noisy_observations(of_answer, answer.reward, scale), step)[:-1]
            for of_answer, answer in zip(estimates, valuation.answers, strict=True)
        ]


def _walk(gathered: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Returns the variance of a step, and the factor by which the binomial's variances are those of the
    observations.

    The squared difference of two observations at a distance of m steps is on average m steps' variance and
    twice the noise: a line whose slope and height are learnt by least squares.
    """
    line = {lag: mean(gathered[str(lag)]) for lag in LAGS if gathered.get(str(lag))}
    if len(line) < 2:
        return LEAST_STEP_VARIANCE, 1.0
    centre = mean(list(line))
    spread = sum((lag - centre) ** 2 for lag in line)
    slope = sum((lag - centre) * square for lag, square in line.items()) / spread
    step = max(slope, LEAST_STEP_VARIANCE)
    noise = max((mean(list(line.values())) - step * centre) / 2, LEAST_STEP_VARIANCE)
    return step, noise / mean(gathered["variance"])


def _noisy_observations(of_answer: StepValues, reward: float, scale: float) -> StepValues:
    """Returns the values with their noise as it is, and the reward behind the last."""
    observations: StepValues = [
        None if one is None else one._replace(variance=one.variance * scale) for one in of_answer
    ]
    last = next((one for one in reversed(observations) if one is not None), None)
    return [*observations, None if last is None else Value(reward, last.variance * last.samples)]


def smooth_walk(path: Sequence[Value | None], step_variance: float) -> StepValues:
    """Returns the expectation of a random walk wherever it was observed, given all observations."""
    known = [(index, one) for index, one in enumerate(path) if one is not None]
    filtered: list[Value] = []
    predicted: list[Value] = []
    for number, (index, seen) in enumerate(known):
        if not number:
            predicted.append(seen)
            filtered.append(seen)
            continue
        before = filtered[-1]
        prediction = Value(before.value, before.variance + step_variance * (index - known[number - 1][0]))
        gain = prediction.variance / (prediction.variance + seen.variance)
        predicted.append(prediction)
        filtered.append(
            Value(prediction.value + gain * (seen.value - prediction.value), (1 - gain) * prediction.variance)
        )
    for number in reversed(range(len(known) - 1)):
        now, prediction, later = filtered[number], predicted[number + 1], filtered[number + 1]
        back = now.variance / prediction.variance
        filtered[number] = Value(
            now.value + back * (later.value - prediction.value),
            now.variance + back**2 * (later.variance - prediction.variance),
        )
    result: StepValues = [None] * len(path)
    for (index, _), value in zip(known, filtered, strict=True):
        result[index] = value
    return result


GAINS = tuple(tenth / 10 for tenth in range(10))
"""How much of a value may be its neighbour's."""


@ValueEstimator.register("filtered")
@dataclass(frozen=True, kw_only=True)
class Filtered(OverAnother):
    """Smooths another estimator's values in two halves, each from the side that it may know.

    What a step has brought about is seen from behind: q_i = (1 − g)·V̂_i + g·q_{i+1}, with the reward behind
    the last. Values along an answer are a martingale, so that each later one has the mean V(s_i). Its
    baseline is seen from before: f_i = (1 − h)·V̂_i + h·f_{i−1} knows nothing of what was done in s_i, and
    for any such f ∇log π(a|s)·f has the mean 0. A step's advantage is q_{i+1} − f_i: as unbiased as the other
    estimator, where `smoothed` sees both values from both sides.

    g (`behind`) and h (`before`), where they aren't given, are those of `GAINS` that come nearest to V̂ one
    state before and one behind, whose noise is their own, and so the ones with the least variance. They are
    learnt from the iteration's other problems, which share no sample with this one; with one problem alone
    both are 0. ``credit/filter_behind`` and ``credit/filter_before`` are those of all problems together. If
    one is learnt over an estimator that itself learns from other problems, it is **biased** by as much as
    one problem weighs among them."""

    behind: Annotated[float, Ge(0), Lt(1)] | None = None
    """The gain g; None: it is learnt."""
    before: Annotated[float, Ge(0), Lt(1)] | None = None
    """The gain h; None: it is learnt."""

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
    def values(self, valuation: Valuation) -> list[StepValues]:
        estimates = self.over.values(valuation)
        misses = [
            _misses(of_answer, answer.reward)
            for of_answer, answer in zip(estimates, valuation.answers, strict=True)
        ]
        by_tree = [Sums(of_tree, 2 * len(GAINS)).rounded() for of_tree in valuation.by_tree(misses)]
        gathered = valuation.context.ranks.exchange("value-misses", by_tree)
        total = Sums((of_tree for of_rank in gathered for of_tree in of_rank), 2 * len(GAINS))
        behind, before = self._gains(total.rounded())
        valuation.metrics |= {"credit/filter_behind": behind, "credit/filter_before": before}
        # The gains of each tree's answers are learnt from all other trees.
        gains = [self._gains(total.without(of_tree)) for of_tree in by_tree]
        return [
            filter_values(of_answer, answer.reward, *gains[answer.states[0].tree])
            for of_answer, answer in zip(estimates, valuation.answers, strict=True)
        ]

    def _gains(self, misses: Sequence[float]) -> tuple[float, float]:
        """Returns the gains that are given, or else those that miss least; the smallest of equals."""
        sides = misses[: len(GAINS)], misses[len(GAINS) :]
        behind, before = (GAINS[min(range(len(GAINS)), key=side.__getitem__)] for side in sides)
        return (
            behind if self.behind is None else self.behind,
            before if self.before is None else self.before,
        )


def _observations(of_answer: StepValues, reward: float) -> list[float]:
    return [*(one.value for one in of_answer if one is not None), reward]


def _misses(of_answer: StepValues, reward: float) -> list[float]:
    """Returns sums of squares for each of `GAINS`: of what is seen from behind less the value before it, and
    then of what is seen from before less the next."""
    observations = _observations(of_answer, reward)
    baselines = [one.baseline_or_value for one in of_answer if one is not None]
    behind, before = [], []
    for gain in GAINS:
        after = _from_behind(observations, gain)
        behind.append(math.fsum((one - observed) ** 2 for one, observed in zip(after[1:-1], observations)))
        prediction = _from_before(baselines, gain)
        before.append(math.fsum((one - observed) ** 2 for one, observed in zip(prediction, observations[1:])))
    return behind + before


def _from_behind(observations: Sequence[float], gain: float) -> list[float]:
    estimates = [observations[-1]]
    for observed in reversed(observations[:-1]):
        estimates.append((1 - gain) * observed + gain * estimates[-1])
    return estimates[::-1]


def _from_before(observations: Sequence[float], gain: float) -> list[float]:
    estimates: list[float] = []
    for observed in observations:
        estimates.append((1 - gain) * observed + gain * estimates[-1] if estimates else observed)
    return estimates


def filter_values(of_answer: StepValues, reward: float, behind: float, before: float) -> StepValues:
    """Returns the values of an answer with these gains."""
    values = iter(_from_behind(_observations(of_answer, reward), behind))
    baselines = iter(_from_before([one.baseline_or_value for one in of_answer if one is not None], before))
    return [
        None if one is None else one._replace(value=next(values), baseline=next(baselines))
        for one in of_answer
    ]
