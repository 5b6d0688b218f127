"""Numbers for made-up problems, never the same ones twice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from treetune.seeds import derived_random

_ENUMERABLE = 200_000
"""Up to so many selections are listed and shuffled, which also works when all of them are wanted;
beyond, drawing until a new one comes is quicker."""


@lru_cache(maxsize=4)
def distinct_operands(values: range, count: int, wanted: int, seed: int) -> Sequence[tuple[int, ...]]:
    """`wanted` selections of `count` numbers from `values`, no two of them equal up to order.

    The first ones do not depend on `wanted`, so that a larger request extends a smaller one.
    """
    space = math.comb(len(values) + count - 1, count)
    assert wanted <= space, f"{wanted} of only {space} selections"
    generator = derived_random(seed, "operands", values.start, values.stop, count)
    chosen: list[tuple[int, ...]] = []
    if space <= _ENUMERABLE:
        selections = list(itertools.combinations_with_replacement(values, count))
        generator.shuffle(selections)
        for selection in selections:
            order = list(selection)
            generator.shuffle(order)
            chosen.append(tuple(order))
        return tuple(chosen[:wanted])
    seen: set[tuple[int, ...]] = set()
    while len(chosen) < wanted:
        numbers = tuple(generator.choices(values, k=count))
        key = tuple(sorted(numbers))
        if key not in seen:
            seen.add(key)
            chosen.append(numbers)
    return tuple(chosen)
