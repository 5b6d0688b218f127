"""Values smoothed along the answer: a Kalman filter forwards, and the pass of Rauch, Tung and Striebel back.

Kalman 1960; Rauch, Tung and Striebel, AIAA Journal 3(8), 1965. The values along an answer are modelled as a
random walk that is observed with noise. Example: the noisy values ``0.4, 0.9, 0.5`` become about ``0.5, 0.6,
0.6`` if the steps of the walk are small and the noise is large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from treetune.credit.values.base import StepValues, Valuation, Value, ValueEstimator
from treetune.credit.values.over_another import OverAnother
from treetune.rollouts.metrics import mean, pool_columns

LEAST_STEP_VARIANCE = 1e-4
"""The smallest variance of a step of the walk, and of the noise, where the estimates show none: a standard
deviation of a hundredth of the range of rewards."""

FITTED_LAGS = (1, 2, 3, 4)
"""Distances in steps. The values of states at these distances are compared to learn the variance of a step of
the walk."""


@ValueEstimator.register("smoothed")
@dataclass(frozen=True, kw_only=True)
class Smoothed(OverAnother):
    """Treats the values of another estimator as noisy observations of a random walk, and returns the walk's
    expectation at every state (Kalman's filter, and the pass backwards of Rauch, Tung and Striebel, AIAA
    Journal 3(8), 1965). The answer's reward counts as one more continuation of its last state.

    The variance of the walk's steps and that of the noise are learnt from the whole iteration. The two can be
    told apart: the walk's part of a difference between states grows with their distance, the noise's doesn't.
    The noise is distributed among the observations in proportion to their binomial variances.

    **Biased**: a value depends on what came after it, and jumps are flattened. Smoothing lowers the errors of
    values most if there are few continuations. On the tests' language, whose answers have three steps, values
    are off by 0.05 to 0.06. The expected gradient has half of its true length and almost its true direction
    (cosine 0.98 to 0.99). The length doesn't matter if advantages are normalised."""

    unbiased = False
    learns_from_others = True

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        """Returns the values of the estimator `over`, smoothed as noisy observations of a random walk."""
        estimates = self.over.values(valuation)  # `over` is the estimator whose values are smoothed
        # `pool_columns` exchanges columns between ranks by name, so lags are names here: "1", "2", …
        squares_by_lag: dict[str, list[float]] = {str(lag): [] for lag in FITTED_LAGS}
        variances: list[float] = []
        for step_values in estimates:
            variances += [value.variance for value in step_values if value is not None]
            for lag in FITTED_LAGS:
                for value, later in zip(step_values, step_values[lag:]):
                    if value is not None and later is not None:
                        squares_by_lag[str(lag)].append((later.value - value.value) ** 2)
        columns = pool_columns(valuation.context, "value-walks", squares_by_lag | {"variance": variances})
        pooled_squares_by_lag = {lag: columns[str(lag)] for lag in FITTED_LAGS}
        step_variance, noise_scale = _fit_walk(pooled_squares_by_lag, columns["variance"])
        smoothed = []
        for step_values, answer in zip(estimates, valuation.answers, strict=True):
            observations = _noisy_observations(step_values, answer.reward, noise_scale)
            *values, _ = smooth_walk(observations, step_variance)  # the last one is that of the reward
            smoothed.append(values)
        return smoothed


def _fit_walk(
    squares_by_lag: Mapping[int, Sequence[float]], binomial_variances: Sequence[float]
) -> tuple[float, float]:
    """Returns the variance of a step of the walk, and the noise scale: the factor that turns the binomial
    variances of observations into the variances of their noise.

    The squared difference of two observations m steps apart is on average m times the variance of a step,
    plus twice the variance of the noise. As a function of m this is a line. Its slope and intercept are
    fitted by least squares.

    Args:
        squares_by_lag: For each lag, the squared differences of observations that are this many steps apart.
        binomial_variances: The variance of each observation, as the estimator of the values gives it.
    """
    mean_square_by_lag = {lag: mean(squares) for lag, squares in squares_by_lag.items() if squares}
    if len(mean_square_by_lag) < 2:  # too few points for a line
        return LEAST_STEP_VARIANCE, 1.0
    mean_lag = mean(list(mean_square_by_lag))
    spread = sum((lag - mean_lag) ** 2 for lag in mean_square_by_lag)
    covariation = sum((lag - mean_lag) * mean_square for lag, mean_square in mean_square_by_lag.items())
    slope = covariation / spread
    # By chance, the fitted slope or intercept may be negative, but a variance has to be positive.
    step_variance = max(slope, LEAST_STEP_VARIANCE)
    mean_over_lags = mean(list(mean_square_by_lag.values()))
    intercept = mean_over_lags - step_variance * mean_lag  # the line goes through the point of the means
    noise_variance = max(intercept / 2, LEAST_STEP_VARIANCE)
    return step_variance, noise_variance / mean(binomial_variances)


def _noisy_observations(step_values: StepValues, reward: float, noise_scale: float) -> StepValues:
    """Returns the values with the fitted variance of their noise, followed by the reward.

    Args:
        noise_scale: The factor by which the variances in `step_values` are multiplied to get those of the
            noise.
    """
    observations: StepValues = []
    last_observation: Value | None = None
    for value in step_values:
        if value is None:
            observations.append(None)
            continue
        last_observation = value._replace(variance=value.variance * noise_scale)
        observations.append(last_observation)
    # The value of the last state is the mean of n rewards, so a single reward has n times the variance of
    # this mean.
    observed_reward = None
    if last_observation is not None:
        observed_reward = Value(reward, last_observation.variance * last_observation.samples)
    observations.append(observed_reward)
    return observations


def smooth_walk(path: Sequence[Value | None], step_variance: float) -> StepValues:
    """Returns the expectation of a random walk wherever it was observed, given all observations.

    Args:
        path: The observations, one for each step of time; None where nothing was observed.
        step_variance: The variance of a step of the walk.
    """
    observed = [(time, value) for time, value in enumerate(path) if value is not None]

    # Forwards (Kalman's filter): the expectation at each time, given the observations up to then. The first
    # observation is taken as it is, since nothing is known before it. A `Value` holds an expectation and its
    # variance here.
    filtered: list[Value] = []
    predicted: list[Value] = []  # the expectation at the same times, given only the observations before
    for index, (time, observation) in enumerate(observed):
        if index == 0:
            predicted.append(observation)  # there is no prediction yet, and this entry is never read
            filtered.append(observation)
            continue
        previous_value = filtered[-1]
        previous_time, _ = observed[index - 1]
        steps = time - previous_time
        prediction = Value(previous_value.value, previous_value.variance + step_variance * steps)
        gain = prediction.variance / (prediction.variance + observation.variance)
        predicted.append(prediction)
        filtered.append(
            Value(
                prediction.value + gain * (observation.value - prediction.value),
                (1 - gain) * prediction.variance,
            )
        )

    # Backwards (the pass of Rauch, Tung and Striebel): from the end on, each expectation is corrected by the
    # one after it.
    smoothed = list(filtered)
    for index in reversed(range(len(observed) - 1)):
        current_value, prediction, next_value = filtered[index], predicted[index + 1], smoothed[index + 1]
        backward_gain = current_value.variance / prediction.variance
        smoothed[index] = Value(
            current_value.value + backward_gain * (next_value.value - prediction.value),
            current_value.variance + backward_gain**2 * (next_value.variance - prediction.variance),
        )

    expectations: StepValues = [None] * len(path)
    for (time, _), value in zip(observed, smoothed, strict=True):
        expectations[time] = value
    return expectations
