"""Products written out line by line, and which of the lines don't need each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from treetune.tasks.arithmetic import Line, Solution

Detail = Literal["partials", "digits"]
"""Whether a number times one place of the next is written in one line, or digit by digit."""

_Lines = Generator[Line, int, int]
"""Yields lines, is sent what was written in each, and returns the last of these numbers."""


def folded(numbers: Sequence[int], detail: Detail) -> Solution:
    """The product so far times the next factor, from the left. Each factor makes a block, each of its
    places a thread."""
    product = numbers[0]
    for position, factor in enumerate(numbers[1:], start=1):
        weight = math.prod(numbers[position + 1 :])
        product = yield from _product(product, factor, detail, position, itertools.count(), weight=weight)


def paired(numbers: Sequence[int], detail: Detail, *, thread_per_pair: bool) -> Solution:
    """Factors multiplied in pairs, their products again in pairs, an odd one left for the next level.
    Each level makes a block; each pair is a thread, or each place of each pair's second factor."""
    level = 0
    while len(numbers) > 1:
        threads = itertools.count()
        products = []
        for a, b in zip(numbers[::2], numbers[1::2], strict=False):
            lines = _product(a, b, detail, level, threads)
            products.append((yield from (_as_one_thread(lines, a, b, threads) if thread_per_pair else lines)))
        numbers = [*products, *(numbers[-1:] if len(numbers) % 2 else ())]
        level += 1


def _product(a: int, b: int, detail: Detail, block: int, threads: Iterator[int], weight: int = 0) -> _Lines:
    """`a` times each place of `b`, a thread each, added as they come."""
    total = None
    for part in places(b):
        place = Line(lead="", value=0, weight=weight, block=block, thread=next(threads), topic=f"{a}*{part}")
        partial = yield from _partial(a, part, detail, place)
        if total is None:
            total = partial
        else:
            sum_line = replace(place, lead=f"{total}+{partial}=", value=total + partial)
            total = yield replace(sum_line, thread=None, topic="")
    assert total is not None, "every number has a place"
    return total


def _partial(a: int, part: int, detail: Detail, place: Line) -> _Lines:
    """`a` times a number of one place, in lines that are otherwise like `place`."""
    total = None
    for digit in places(a) if detail == "digits" else [a]:
        product = yield replace(place, lead=f"{digit}*{part}=", value=digit * part)
        if total is None:
            total = product
        else:
            total = yield replace(place, lead=f"{total}+{product}=", value=total + product)
    assert total is not None, "every number has a place"
    return total


def _as_one_thread(lines: _Lines, a: int, b: int, threads: Iterator[int]) -> _Lines:
    thread = next(threads)
    try:
        line = next(lines)
        while True:
            line = lines.send((yield replace(line, thread=thread, topic=f"{a}*{b}")))
    except StopIteration as end:
        return int(end.value)


def places(number: int) -> list[int]:
    """``407`` as ``[400, 7]``, and 0 as itself."""
    digits = str(number)
    return [
        int(digit) * 10 ** (len(digits) - 1 - place) for place, digit in enumerate(digits) if digit != "0"
    ] or [0]
