"""Compares the values and advantages that a method gives to steps with the true ones."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from treetune.lab.analyzers.figures import Bootstrap, correlation, mean_of
from treetune.vocabulary import Episode

LEAST_COMPARED_ADVANTAGE = 0.01
"""The least size of a true advantage whose sign is compared; the sign of a smaller one is mostly noise."""


@dataclass(frozen=True)
class Truth:
    """The true values of the states of an answer.

    Example: `Truth("train/17", step_ends=(12, 20), values=(0.5, 0.25), reward=1.0, noise=(2e-4, 3e-4))`.
    """

    problem: Hashable
    """The problem's id. Intervals are over problems, so answers to the same problem must have the same."""
    step_ends: tuple[int, ...]
    values: tuple[float, ...]
    """The true value before each step."""
    reward: float
    noise: tuple[float, ...] = ()
    """The variance of each value's own error where values are estimates; empty for exact values."""

    @property
    def advantages(self) -> list[float]:
        """The true advantage of each step: the value after it minus the value before."""
        values_after = (*self.values[1:], self.reward)
        return [after - before for before, after in zip(self.values, values_after, strict=True)]


def measure_reliability(truths: Sequence[Truth]) -> float | None:
    """Returns the reliability of estimated true advantages: 1 − (variance of their errors) / variance.

    A method's correlation with the estimates is its correlation with the exact advantages, times the square
    root of the reliability. Returns None where the advantages don't vary, and where the true values are
    exact.
    """
    error_variances: list[float] = []  # of each advantage
    advantages: list[float] = []
    for truth in truths:
        advantages += truth.advantages
        if truth.noise:
            # An advantage is the value after a step minus the value before it: the variances of both add up.
            # The value after the last step is the reward, which is exact.
            noise_after = (*truth.noise[1:], 0.0)
            for variance_before, variance_after in zip(truth.noise, noise_after, strict=True):
                error_variances.append(variance_before + variance_after)
    variance = float(np.var(advantages))
    if not variance or not error_variances:
        return None
    return 1.0 - float(np.mean(error_variances)) / variance


@dataclass(frozen=True)
class CreditOfMethod:
    """The credit of a method: an episode for each answer, and the tokens sampled for all of them."""

    episodes: Sequence[Episode]
    tokens: int = 0


class _ComparedStep(NamedTuple):
    """A step's value and advantage by a method, compared with the true ones."""

    problem: Hashable
    value_error: float
    """The value minus the true value; NaN for a step without a value."""
    noise_of_truth: float
    """The variance of the true value's own error."""
    advantage: float
    """The mean over the step's tokens."""
    true_advantage: float
    right_sign: float
    """Whether the advantage of a decisive step has the sign of the true one, as 1 or 0; NaN for others."""


def measure_method(truths: Sequence[Truth], credited: CreditOfMethod, seed: int) -> dict[str, Any]:
    """Returns a method's errors, with 95 % intervals over problems.

    * ``value_bias`` is the mean of value − true value; None for a method without values.
    * ``value_error`` is √(mean of (value − true value)² − variance of the true values' own error); None for a
      method without values.
    * ``advantage_correlation`` is Pearson's correlation of the steps' advantages with the true ones.
    * ``decisive_signs`` is the share of decisive steps whose advantage has the right sign; None without such
      steps. An answer's decisive step is the one with the largest true advantage in size, if that size is at
      least `LEAST_COMPARED_ADVANTAGE`.

    The advantage of a step is the mean over its tokens. A token that isn't trained has the advantage 0.
    """
    steps: list[_ComparedStep] = []
    for truth, episode in zip(truths, credited.episodes, strict=True):
        steps += _compare_steps(truth, episode)
    bootstrap = Bootstrap([step.problem for step in steps], seed)
    value_errors = [step.value_error for step in steps]
    noise_of_truths = np.array([step.noise_of_truth for step in steps])
    # A function of the indices of some steps, which leaves out steps without a value (NaN).
    compute_mean_square = mean_of(np.square(value_errors) - noise_of_truths)
    advantages_S = np.array([step.advantage for step in steps])
    true_advantages_S = np.array([step.true_advantage for step in steps])
    return {
        "value_bias": bootstrap(mean_of(value_errors)),
        # The order of the arguments matters: max(NaN, 0.0) is NaN, and so is the error of a method without
        # values, but max(0.0, NaN) would be 0.0.
        "value_error": bootstrap(lambda rows: math.sqrt(max(compute_mean_square(rows), 0.0))),
        "advantage_correlation": bootstrap(
            lambda rows: correlation(advantages_S[rows], true_advantages_S[rows])
        ),
        "decisive_signs": bootstrap(mean_of([step.right_sign for step in steps])),
        "answers": len(truths),
        "tokens_per_answer": credited.tokens / len(truths),
    }


def _compare_steps(truth: Truth, episode: Episode) -> Iterator[_ComparedStep]:
    """Yields the comparison of each step of an answer."""
    assert episode.advantages is not None, "a method that gives advantages before training"
    true_advantages = truth.advantages
    decisive = max(range(len(true_advantages)), key=lambda step: abs(true_advantages[step]))
    starts = (0, *truth.step_ends[:-1])
    # A method may cut answers into other steps than those of `truth`.
    value_by_start = dict(zip((0, *episode.step_ends[:-1]), episode.step_values or ()))
    for step, (start, end) in enumerate(zip(starts, truth.step_ends, strict=True)):
        trained_advantages = episode.advantages[start:end] * episode.trained[start:end]
        advantage, true_advantage = float(trained_advantages.mean()), true_advantages[step]
        right_sign = math.nan
        if step == decisive and abs(true_advantage) >= LEAST_COMPARED_ADVANTAGE:
            right_sign = float(np.sign(advantage) == np.sign(true_advantage))
        yield _ComparedStep(
            problem=truth.problem,
            value_error=value_by_start.get(start, math.nan) - truth.values[step],
            noise_of_truth=truth.noise[step] if truth.noise else 0.0,
            advantage=advantage,
            true_advantage=true_advantage,
            right_sign=right_sign,
        )
