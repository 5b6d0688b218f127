"""The credit of an answer's steps, with intervals, for pages and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
    starts = (0, *step_ends[:-1])
    value_by_start: dict[int, tuple[float, float | None]] = {}  # with its standard error
    if values is not None:
        errors_or_none = errors if errors is not None else [None] * len(values)
        for start, value, error in zip((0, *credit_ends[:-1]), values, errors_or_none, strict=True):
            if error is None or math.isfinite(error):
                value_by_start[start] = value, error
    # A value is a mean reward: rewards are from 0 to 1, unless the answer's own is outside of that.
    least, most = min(0.0, reward), max(1.0, reward)
    shown_values: list[Shown | None] = []
    shown_advantages: list[Shown] = []
    for start, end in zip(starts, step_ends, strict=True):
        shown_value = None
        if start in value_by_start:
            value, error = value_by_start[start]
            shown_value = Shown.of(value, error, least, most)
        shown_values.append(shown_value)
        advantages_of_step = advantages[start:end]
        mean = math.fsum(advantages_of_step) / len(advantages_of_step) if len(advantages_of_step) else 0.0
        shown_advantages.append(Shown.of(mean, _error_of_difference(value_by_start, start, end)))
    return StepCredit(tuple(shown_values), tuple(shown_advantages))


def _error_of_difference(
    value_by_start: dict[int, tuple[float, float | None]], start: int, end: int
) -> float | None:
    """Returns the standard error of a step's advantage: the value after the step minus the value before it.

    Credit may merge steps. Then there may be no value at the step's start or end, and the nearest values
    outside of the step count. Returns None where an error is unknown. Also returns None where there is a
    value inside of the step: then credit has cut it into two steps, and there is no single difference.
    """
    positions_before = [position for position in value_by_start if position <= start]
    if not positions_before or any(start < position < end for position in value_by_start):
        return None
    _, error_before = value_by_start[max(positions_before)]
    error_after: float | None = 0.0  # after the last step comes the reward, which is exact
    positions_after = [position for position in value_by_start if position >= end]
    if positions_after:
        _, error_after = value_by_start[min(positions_after)]
    if error_before is None or error_after is None:
        return None
    return math.hypot(error_before, error_after)
