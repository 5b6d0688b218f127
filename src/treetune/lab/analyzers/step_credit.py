"""The credit of the steps of an answer with intervals, for pages and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

QUANTILE = 1.959963984540054
"""The quantile of the normal distribution: estimates and so many standard errors to both sides are 95 %
intervals."""


@dataclass(frozen=True)
class Shown:
    """A number and its 95 % interval; without one where nobody knows how sure it is."""

    value: float
    low: float | None = None
    high: float | None = None

    @staticmethod
    def of(value: float, error: float | None, least: float = -math.inf, most: float = math.inf) -> Shown:
        """Returns an interval from its standard error; what lies outside of the possible, from `least` to
        `most`, is cut off."""
        if error is None:
            return Shown(value)
        half = QUANTILE * error
        return Shown(value, min(max(value - half, least), value), max(min(value + half, most), value))


@dataclass(frozen=True)
class StepCredit:
    """The value before each step, None where the credit has no value there, and its advantage."""

    values: tuple[Shown | None, ...]
    advantages: tuple[Shown, ...]

    def plain(self) -> dict[str, Any]:
        """Returns the same in JSON's types."""
        return asdict(self)


def step_credit(
    step_ends: Sequence[int],
    reward: float,
    advantages: Sequence[float],
    own_ends: Sequence[int] = (),
    values: Sequence[float] | None = None,
    errors: Sequence[float] | None = None,
) -> StepCredit:
    """Returns the credit of the steps that end at `step_ends`, from a training row: an advantage for each
    token, and what credit holds the beginnings of its own steps to be worth, which end at `own_ends`.

    The advantage of a step is the mean of its tokens'. Its interval is that of the difference of the values
    around it as if these were independent: too wide where both rest on the same continuations.
    """
    starts = (0, *step_ends[:-1])
    known: dict[int, tuple[float, float | None]] = {}
    if values is not None:
        own_errors = errors if errors is not None else [None] * len(values)
        for start, value, error in zip((0, *own_ends[:-1]), values, own_errors, strict=True):
            if error is None or math.isfinite(error):
                known[start] = value, error
    least, most = min(0.0, reward), max(1.0, reward)
    shown = []
    for start, end in zip(starts, step_ends, strict=True):
        own = advantages[start:end]
        mean = math.fsum(own) / len(own) if len(own) else 0.0
        shown.append(Shown.of(mean, _error_between(known, start, end)))
    return StepCredit(
        tuple(Shown.of(*known[start], least, most) if start in known else None for start in starts),
        tuple(shown),
    )


def _error_between(known: dict[int, tuple[float, float | None]], start: int, end: int) -> float | None:
    """The standard error of the difference of the values around a step; None where it has none, or where a
    value within cuts the step."""
    before = [place for place in known if place <= start]
    if not before or any(start < place < end for place in known):
        return None
    behind = [place for place in known if place >= end]
    errors = [known[max(before)][1], known[min(behind)][1] if behind else 0.0]
    return None if None in errors else math.hypot(*errors)  # type: ignore[arg-type]
