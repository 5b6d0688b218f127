"""A whole accuracy curve as one number: the area under it, and what it costs to reach an accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Points = Sequence[tuple[float, float]]
"""(cost so far, accuracy), by rising cost. Between two measurements accuracy is taken to change evenly."""


class NotReached(ValueError):
    """The accuracy is above every one that was measured."""


def area_under(points: Points, upto: float) -> float:
    """The mean accuracy from no cost to the cost `upto`. Behind the last measurement it stays what it was.

    Raises ValueError where the start was not measured."""
    if not points or points[0][0] > 0:
        raise ValueError("the start model was not measured on the curve's set")
    total = 0.0
    for (begin, low), (end, high) in pairwise([*points, (max(upto, points[-1][0]), points[-1][1])]):
        if begin >= upto or end <= begin:
            continue
        cut = min(end, upto)
        at_cut = low + (high - low) * (cut - begin) / (end - begin)
        total += (cut - begin) * (low + at_cut) / 2
    return total / upto


def cost_to_reach(points: Points, accuracy: float) -> float:
    """The cost at which the curve first comes to an accuracy. Raises NotReached."""
    if points and points[0][1] >= accuracy:
        return points[0][0]
    for (begin, low), (end, high) in pairwise(points):
        if high >= accuracy:
            return begin + (end - begin) * (accuracy - low) / (high - low)
    best = max((accuracy for _, accuracy in points), default=0.0)
    raise NotReached(f"not reached: {best:.3f} at best")
