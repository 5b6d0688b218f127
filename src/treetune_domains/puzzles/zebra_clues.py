"""The clues of zebra puzzles, and which of all arrangements each of them is true of.

A set of arrangements is one number with a bit for each, so that what is true of all clues together is
one ``&`` after the other: a puzzle with half a million arrangements is made in milliseconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from itertools import permutations
from operator import or_
from typing import Literal, NamedTuple

MOST_ARRANGEMENTS = 2_000_000

Kind = Literal[
    "at", "same", "adjacent", "ends", "middle", "between", "parity", "before", "apart", "xor", "or", "nor"
]

KINDS: tuple[Kind, ...] = (
    "at", "same", "adjacent", "ends", "middle", "between", "parity", "before", "apart", "xor", "or", "nor",
)  # fmt: skip
"""From those that say most to those that say least."""

Item = tuple[int, int]
"""The number of an attribute, and the number of one of its values."""


class Clue(NamedTuple):
    """About some items; `places` are positions from 0 (for ``parity`` the remainder by 2 of one)."""

    kind: Kind
    items: tuple[Item, ...]
    places: tuple[int, ...] = ()


def kinds_of(level: int) -> tuple[Kind, ...]:
    """The kinds of a level from 1 to 20: up to 12 one more with each level, then one less, the one that
    says most."""
    return KINDS[:level] if level <= len(KINDS) else KINDS[level - len(KINDS) :]


def arrangements(objects: int, attributes: int) -> int:
    return int(math.factorial(objects) ** attributes)


@dataclass(frozen=True)
class Shape:
    """So many objects in a row, each with a value of so many attributes; no value twice."""

    objects: int
    attributes: int

    @property
    def items(self) -> Sequence[Item]:
        return [(attribute, value) for attribute in range(self.attributes) for value in range(self.objects)]

    def rows(self, arrangement: int) -> list[list[int]]:
        """For each position the values of its attributes, in the arrangement with this number."""
        orders = _orders(self.objects)
        chosen = []
        for _ in range(self.attributes):
            arrangement, order = divmod(arrangement, len(orders))
            chosen.append(orders[order])
        return [[order[place] for order in chosen] for place in range(self.objects)]

    def random_clue(self, generator: random.Random, kind: Kind) -> Clue | None:
        """A clue of the kind, true or not; None where this shape has none."""
        places = range(self.objects)
        if kind in ("at", "ends", "middle", "parity"):
            if (kind == "middle" and self.objects % 2 == 0) or (kind == "ends" and self.objects == 2):
                return None
            limit = {"at": self.objects, "parity": 2}.get(kind)
            return Clue(kind, (generator.choice(self.items),), (generator.randrange(limit),) if limit else ())
        count = 3 if kind == "between" else 2
        if len(self.items) < count or (kind in ("same", "apart") and self.attributes == 1):
            return None
        items = tuple(generator.sample(self.items, count))
        if kind in ("same", "apart") and items[0][0] == items[1][0]:
            return None  # two values of one attribute are never together
        spots = tuple(generator.choice(places) for _ in items) if kind in ("xor", "or", "nor") else ()
        return Clue(kind, items, spots)

    def true_of(self, clue: Clue) -> int:
        """The arrangements that the clue is true of, a bit each."""
        at = _positions(self)
        one = at[clue.items[0]]
        other = at[clue.items[1]] if len(clue.items) > 1 else one
        last = self.objects - 1
        match clue.kind:
            case "at":
                return one[clue.places[0]]
            case "ends":
                return one[0] | one[last]
            case "middle":
                return one[last // 2]
            case "parity":
                return _any(one[place] for place in range(self.objects) if place % 2 == clue.places[0])
            case "same":
                return _any(here & there for here, there in zip(one, other, strict=True))
            case "apart":
                return self.all ^ self.true_of(clue._replace(kind="same"))
            case "adjacent":
                return _any(
                    one[place] & (other[place + 1]) | one[place + 1] & other[place] for place in range(last)
                )
            case "before":
                return _any(one[place] & _any(other[place + 1 :]) for place in range(last))
            case "between":
                third = at[clue.items[2]]
                return _any(
                    one[place]
                    & (
                        _any(other[:place]) & _any(third[place + 1 :])
                        | _any(third[:place]) & _any(other[place + 1 :])
                    )
                    for place in range(1, last)
                )
        here, there = one[clue.places[0]], other[clue.places[1]]
        if clue.kind == "xor":
            return here ^ there
        return here | there if clue.kind == "or" else self.all ^ (here | there)

    @property
    def all(self) -> int:
        return (1 << arrangements(self.objects, self.attributes)) - 1


def unique_clues(
    generator: random.Random, shape: Shape, kinds: Sequence[Kind], arrangement: int, draws: int = 1000
) -> list[Clue] | None:
    """Clues that are true of this arrangement and of no other, none of them superfluous; None where so many
    draws didn't lead there."""
    target = 1 << arrangement
    chosen: list[tuple[Clue, int]] = []
    left = shape.all
    for _ in range(draws):
        clue = shape.random_clue(generator, generator.choice(list(kinds)))
        true = shape.true_of(clue) if clue is not None else 0
        if clue is None or not true & target or left & true == left:
            continue
        chosen.append((clue, true))
        left &= true
        if left == target:
            break
    else:
        return None
    for one in list(chosen):
        others = reduce(
            lambda held, other: held & other[1], (other for other in chosen if other is not one), -1
        )
        if others & shape.all == target:
            chosen.remove(one)
    generator.shuffle(chosen)
    return [clue for clue, _ in chosen]


def random_arrangement(generator: random.Random, among: int) -> int:
    """The number of one of these arrangements, each as likely as the others."""
    number, rank = 0, generator.randrange(among.bit_count())
    width = among.bit_length()
    while width > 1:
        half = width // 2
        low = among & ((1 << half) - 1)
        if rank < low.bit_count():
            among, width = low, half
        else:
            rank -= low.bit_count()
            among, width, number = among >> half, width - half, number + half
    return number


def _any(sets: Sequence[int] | object) -> int:
    return reduce(or_, sets, 0)  # type: ignore[arg-type]


@cache
def _orders(objects: int) -> Sequence[tuple[int, ...]]:
    return tuple(permutations(range(objects)))


@lru_cache(maxsize=8)
def _positions(shape: Shape) -> dict[Item, list[int]]:
    """For each item and each position the arrangements in which it stands there."""
    orders, count = _orders(shape.objects), arrangements(shape.objects, shape.attributes)
    found = {}
    for attribute, value in shape.items:
        stride = len(orders) ** attribute
        period = stride * len(orders)
        every_period = ((1 << count) - 1) // ((1 << period) - 1)
        run = (1 << stride) - 1
        found[attribute, value] = [
            every_period
            * sum(run << (stride * number) for number, order in enumerate(orders) if order[place] == value)
            for place in range(shape.objects)
        ]
    return found
