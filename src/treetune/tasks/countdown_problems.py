"""Countdown problems that have a solution, since each is made from one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from treetune.seeds import derived_random

Operator = Literal["+", "-", "*", "/"]

Puzzle = tuple[tuple[int, ...], int]
"""The numbers, in the order in which they are shown, and the target."""

_KNOWN = 20_000
"""Known problems between two new ones after which there are taken to be no more: of a shape with 1,000
problems of equal chances, the last one is missed by so many with a probability of 2e-9."""

_VAIN = 200_000
"""Draws between two new problems, most of them of no value within `targets`, after which the search is
given up: it would take minutes."""


@dataclass(frozen=True)
class Shape:
    """What problems to make: see `Countdown`. Pairs are the smallest and the largest."""

    numbers: tuple[int, int]
    operands: tuple[int, int]
    targets: tuple[int, int]
    operators: tuple[Operator, ...]
    natural: bool


@lru_cache(maxsize=4)
def distinct_problems(shape: Shape, wanted: int, seed: int) -> Sequence[Puzzle]:
    """`wanted` problems, no two with the same target and the same numbers up to order.

    The first ones do not depend on `wanted`. Raises ValueError where so many cannot be found.
    """
    generator = derived_random(seed, "countdown", *map(repr, (shape.numbers, shape.operands, shape.targets)))
    made: list[Puzzle] = []
    seen: set[Puzzle] = set()
    draws = vain = known = 0
    while len(made) < wanted:
        draws += 1
        numbers = [generator.randint(*shape.operands) for _ in range(generator.randint(*shape.numbers))]
        target = _value(generator, shape, numbers)
        key = (tuple(sorted(numbers)), target) if target is not None else None
        if key is None or target is None or key in seen:
            vain += 1
            known += key is not None
            if known == _KNOWN or vain == _VAIN:
                raise ValueError(_too_few(wanted, len(made), draws, vain))
            continue
        vain = known = 0
        seen.add(key)
        made.append((tuple(numbers), target))
    return tuple(made)


def _too_few(wanted: int, found: int, draws: int, vain: int) -> str:
    if not found:
        return (
            f"none of {draws:,} expressions drawn of this shape has a value within targets: it has no"
            " solvable problem, or next to none; widen numbers, operands, targets or operators"
        )
    return (
        f"{wanted} problems are asked for (train_size + validation_size + test_size), and {draws:,}"
        f" expressions drawn of this shape gave {found}, the last {vain:,} draws no new one: ask for fewer,"
        " or widen numbers, operands, targets or operators"
    )


def _value(generator: random.Random, shape: Shape, numbers: Sequence[int]) -> int | None:
    """The value of a random expression of all the numbers; None where it is no target of the shape."""
    left: list[int | Fraction] = list(numbers)
    while len(left) > 1:
        generator.shuffle(left)
        one, other = left.pop(), left.pop()
        operator = generator.choice(shape.operators)
        if operator == "/" and (other == 0 or (shape.natural and one % other)):
            return None
        value = (
            one + other if operator == "+"
            else one - other if operator == "-"
            else one * other if operator == "*"
            else Fraction(one, other)
        )  # fmt: skip
        if shape.natural:
            if value <= 0:
                return None
            value = int(value)  # whole numbers are much quicker than fractions
        left.append(value)
    least, most = shape.targets
    return int(left[0]) if left[0].denominator == 1 and least <= left[0] <= most else None
