"""All shapes of golds with drawn numbers, for tests/tasks/labelled/make_labelled_math.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from labelled_math_expressions import fraction_pair, interval, line, quadratic, quotient, rays, square_matrix
from labelled_math_values import (
    Made,
    chain,
    clock,
    length,
    logarithm,
    percent,
    power,
    repeating,
    scientific,
    surd,
    words,
)

SHAPES: list[Callable[[random.Random], Made]] = [
    interval, rays, quadratic, quotient, surd, power, length, clock, words, chain, repeating, percent,
    scientific, line, square_matrix, fraction_pair, logarithm,
]  # fmt: skip


def shapes(count: int, seed: int) -> Iterator[tuple[str, Made]]:
    """`count` golds of each shape with its name."""
    for shape in SHAPES:
        for number in range(count):
            yield shape.__name__.replace("_", " "), shape(random.Random(f"{seed} {shape.__name__} {number}"))
