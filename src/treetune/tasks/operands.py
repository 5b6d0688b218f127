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


def selections(values: range, count: int, first: range | None = None) -> int:
    """How many different ones `distinct_operands` can choose from."""
    if first is None:
        return math.comb(len(values) + count - 1, count)
    return len(first) * selections(values, count - 1)


@lru_cache(maxsize=16)
def distinct_operands(
    values: range, count: int, wanted: int, seed: int, first: range | None = None
) -> Sequence[tuple[int, ...]]:
    """`wanted` selections of `count` numbers from `values`, no two of them equal up to order.

    With `first`, which has no number in common with `values`, the first number is from there. The first
    selections do not depend on `wanted`, so that a larger request extends a smaller one.
    """
    space = selections(values, count, first)
    assert wanted <= space, f"{wanted} of only {space} selections"
    generator = derived_random(seed, "operands", values.start, values.stop, count)
    others = count if first is None else count - 1
    chosen: list[tuple[int, ...]] = []
    if space <= _ENUMERABLE:
        unordered = itertools.combinations_with_replacement(values, others)
        heads: list[tuple[int, ...]] = [()] if first is None else [(number,) for number in first]
        listed = list(itertools.product(heads, unordered))
        generator.shuffle(listed)
        for head, selection in listed:
            order = list(selection)
            generator.shuffle(order)
            chosen.append((*head, *order))
        return tuple(chosen[:wanted])
    seen: set[tuple[int, ...]] = set()
    while len(chosen) < wanted:
        head = () if first is None else (generator.choice(first),)
        numbers = tuple(generator.choices(values, k=others))
        key = (*head, *sorted(numbers))
        if key not in seen:
            seen.add(key)
            chosen.append((*head, *numbers))
    return tuple(chosen)
