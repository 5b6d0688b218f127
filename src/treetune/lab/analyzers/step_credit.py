"""The credit of an answer's steps, with intervals, for pages and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

NORMAL_QUANTILE = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution: half the width of a 95 % interval in units of the
standard error."""


@dataclass(frozen=True)
class Shown:
    """A number and its 95 % interval; `low` and `high` are None where the error is unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    @staticmethod
    def of(value: float, error: float | None, least: float = -math.inf, most: float = math.inf) -> Shown:
        """Returns a number with the interval of its standard error, cut off at `least` and `most`.

        The value itself may be outside of these two bounds. Then the interval reaches to the value.
        """
        if error is None:
            return Shown(value)
        half_width = NORMAL_QUANTILE * error
        low = max(value - half_width, least)
        high = min(value + half_width, most)
        return Shown(value, min(low, value), max(high, value))


@dataclass(frozen=True)
class StepCredit:
    """The credit of each step of an answer.

    Example: `StepCredit(values=(Shown(0.5, 0.2, 0.8), None), advantages=(Shown(0.25), Shown(0.25)))`.
    """

    values: tuple[Shown | None, ...]
    """The value before each step; None where credit has no value there."""
    advantages: tuple[Shown, ...]

    def plain(self) -> dict[str, Any]:
        """Returns the credit as dictionaries and tuples, for JSON."""
        return asdict(self)


def make_step_credit(
    step_ends: Sequence[int],
    reward: float,
    advantages: Sequence[float],
    credit_ends: Sequence[int] = (),
    values: Sequence[float] | None = None,
    errors: Sequence[float] | None = None,
) -> StepCredit:
    """Returns the credit of an answer's steps, from the numbers of a training row.

    Credit may cut the answer into other steps than those of `step_ends`, for example where it merges steps.

    Args:
        step_ends: the ends of the steps whose credit is returned.
        reward: the answer's reward.
        advantages: the advantage of each token. A step's advantage is the mean over its tokens.
        credit_ends: the ends of credit's own steps.
        values: the value before each of credit's own steps.
        errors: the standard errors of these values; NaN or infinite for a value that isn't shown.

    The interval of an advantage is that of a difference: the value after the step minus the value before it.
    It is computed as if the errors of these two values were independent. It is too wide where both are
    estimated from the same continuations.
    """
    estimates: dict[int, _Estimate] = {}
    if values is not None:
        estimates = _estimates_by_position(credit_ends, values, errors)
    # A value is a mean reward: rewards are from 0 to 1, unless the answer's own is outside of that.
    least, most = min(0.0, reward), max(1.0, reward)
    shown_values: list[Shown | None] = []
    shown_advantages: list[Shown] = []
    for start, end in zip((0, *step_ends[:-1]), step_ends, strict=True):
        estimate = estimates.get(start)
        shown_value = None if estimate is None else Shown.of(estimate.value, estimate.error, least, most)
        shown_values.append(shown_value)
        of_tokens = advantages[start:end]
        mean = math.fsum(of_tokens) / len(of_tokens) if len(of_tokens) else 0.0
        shown_advantages.append(Shown.of(mean, _error_of_difference(estimates, start, end)))
    return StepCredit(tuple(shown_values), tuple(shown_advantages))


class _Estimate(NamedTuple):
    """The value of a state, with its standard error; None if the error is unknown."""

    value: float
    error: float | None


def _estimates_by_position(
    credit_ends: Sequence[int], values: Sequence[float], errors: Sequence[float] | None
) -> dict[int, _Estimate]:
    """Returns the values that are shown, by the positions of their states in the answer.

    Example: for ``credit_ends=[3, 7], values=[0.5, 1.0], errors=[0.1, nan]`` it is ``{0: _Estimate(0.5,
    0.1)}``.
    """
    estimates = {}
    errors_or_none = errors if errors is not None else [None] * len(values)
    for start, value, error in zip((0, *credit_ends[:-1]), values, errors_or_none, strict=True):
        if error is None or math.isfinite(error):
            estimates[start] = _Estimate(value, error)
    return estimates


def _error_of_difference(estimates: Mapping[int, _Estimate], start: int, end: int) -> float | None:
    """Returns the standard error of the difference of the values after and before a step.

    Returns None where an error is unknown, and where a value inside of the step cuts the step into two.
    """
    positions_before = [position for position in estimates if position <= start]
    if not positions_before or any(start < position < end for position in estimates):
        return None
    error_before = estimates[max(positions_before)].error
    error_after: float | None = 0.0  # after the last step comes the reward, which is exact
    positions_after = [position for position in estimates if position >= end]
    if positions_after:
        error_after = estimates[min(positions_after)].error
    if error_before is None or error_after is None:
        return None
    return math.hypot(error_before, error_after)
