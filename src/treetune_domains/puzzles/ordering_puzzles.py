"""Ordering puzzles: who stands where in a row, from clues about two of them at a time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import permutations
from typing import Annotated, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Le, MinLen

from treetune.tasks.base import Task
from treetune.vocabulary import Problem
from treetune_domains.graders.ordering import OrderingGrader
from treetune_domains.puzzles.puzzles import Puzzle, Puzzles

Kind = Literal["left", "next", "between"]
"""Somewhere to the left of another; immediately to its left; with a number of others between the two."""

LETTERS = "abcdefghijkl"
LIST = '["…", "…"]'
GRADER = OrderingGrader()

THEMES: dict[str, tuple[str, ...]] = {
    "books on a shelf": ("atlas", "novel", "cookbook", "diary", "dictionary", "thriller", "poem", "manual"),
    "birds on a wire": ("sparrow", "crow", "robin", "magpie", "starling", "pigeon", "wren", "swallow"),
    "cars in a row": ("truck", "van", "taxi", "bus", "tractor", "limousine", "pickup", "jeep"),
    "fruits on a stall": ("apple", "mango", "pear", "plum", "kiwi", "melon", "cherry", "lemon"),
    "people in a queue": ("Anna", "Boris", "Chen", "Dalia", "Emil", "Fatima", "Goran", "Hana"),
    "flags on a line": ("red", "blue", "green", "white", "black", "yellow", "orange", "violet"),
}


class Clue(NamedTuple):
    """About the objects with the numbers `one` and `other`; `apart` is how many stand between them."""

    kind: Kind
    one: int
    other: int
    apart: int = 0


@Task.register("ordering_puzzles")
@dataclass(frozen=True, kw_only=True)
class OrderingPuzzles(Puzzles):
    r"""Put `objects` (fewest and most) things in order, by clues of the kinds `clues`: ``left`` (somewhere to
    the left of), ``next`` (immediately to the left of) and ``between`` (how many stand between two).

    A puzzle is drawn as an order and clues that are true of it, until no other order fits all of them; then
    clues without which that stays so are taken away again. In symbols, with `letters` to name things by:
    ``abc:a<c,b1c>\n`` asks for the order of a, b and c, with a left of c and one thing between b and
    c; ``a/c`` says that a is immediately to the left of c.

    **Demonstrations** try an order, name the first clue that it breaks, and go on with one that keeps all
    clues named so far: ``cab!a<c\nacb!b1c\nbac`` and so on. With `demonstration_noise` p the teacher passes
    each try that breaks a clue off for the answer with probability p.
    """

    objects: tuple[Annotated[int, Ge(2), Le(7)], Annotated[int, Ge(2), Le(7)]] = (3, 5)
    clues: Annotated[tuple[Kind, ...], MinLen(1)] = ("left", "next", "between")
    letters: Annotated[int, Ge(2), Le(len(LETTERS))] = 7
    """How many different letters name things in symbols."""
    grader: OrderingGrader = GRADER

    kind: ClassVar[str] = "ordering puzzles"

    def __post_init__(self) -> None:
        fewest, most = self.objects
        if fewest > most:
            raise ValueError(f"objects is [{fewest}, {most}]: give the smaller one first")
        if set(self.clues) == {"between"}:
            raise ValueError("clues is ['between'] alone, which every order fits as well as its mirror image")
        if self.wording == "symbols" and self.letters < most:
            raise ValueError(f"letters is {self.letters}, too few to name {most} objects")

    def _draw(self, generator: random.Random) -> Puzzle:
        count = generator.randint(*self.objects)
        theme = generator.choice(list(THEMES))
        every = THEMES[theme] if self.wording == "words" else LETTERS[: self.letters]
        names = generator.sample(every, count)
        order = generator.randrange(len(_orders(count)))
        chosen = _unique(generator, _true_clues(count, self.clues), order)
        solution = [names[place] for place in _orders(count)[order]]
        prompt = self._in_words(theme, names, chosen, generator)
        if self.wording == "symbols":
            prompt = f"{''.join(names)}:{','.join(_symbol(clue, names) for clue in chosen)}>\n"
        key = (frozenset(names), frozenset(_symbol(clue, names) for clue in chosen))
        return Puzzle(prompt, json.dumps(solution), key, {"names": names, "clues": [*map(tuple, chosen)]})

    def _in_words(
        self, theme: str, names: Sequence[str], clues: Sequence[Clue], generator: random.Random
    ) -> str:
        listed = "\n".join(f"- {_sentence(clue, names, generator.random() < 0.5)}" for clue in clues)
        return (
            f"There are {len(names)} {theme}: {', '.join(names)}. From left to right:\n{listed}\n"
            "In which order are they, from the leftmost to the rightmost? Think first, and end with a list of"
            f" all {len(names)} names: {self.grader.tagged(LIST)}"
        )

    def _solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        names: Sequence[str] = problem.data["names"]
        clues = [Clue(*clue) for clue in problem.data["clues"]]
        left = list(_orders(len(names)))
        while True:
            order = generator.choice(left)
            said = [names[place] for place in order]
            broken = next((clue for clue in clues if not _fits(clue, order)), None)
            symbols = self.wording == "symbols"
            if broken is None or self._slips(generator):
                yield "".join(said) if symbols else json.dumps(said)
                return
            yield (
                f"{''.join(said)}!{_symbol(broken, names)}"
                if symbols
                else f"Not {', '.join(said)}: {_sentence(broken, names, mirrored=False)}"
            )
            left = [one for one in left if _fits(broken, one)]

    def _letters(self) -> str:
        return LETTERS[: self.letters] + "</!:,>0123456789"


def _unique(generator: random.Random, clues: Sequence[tuple[Clue, int]], order: int) -> Sequence[Clue]:
    """Clues that are true of the order with this number and of no other, none of them superfluous."""
    true = [(clue, orders) for clue, orders in clues if orders >> order & 1]
    generator.shuffle(true)
    chosen: list[tuple[Clue, int]] = []
    left = -1
    for clue, orders in true:
        if left & orders != left:
            chosen.append((clue, orders))
            left &= orders
        if left == 1 << order:
            break
    assert left == 1 << order, "left or next alone tells every order from every other"
    for one in list(chosen):
        without = -1
        for other in chosen:
            without &= -1 if other is one else other[1]
        if without == left:
            chosen.remove(one)
    generator.shuffle(chosen)
    return [clue for clue, _ in chosen]


@cache
def _orders(count: int) -> Sequence[tuple[int, ...]]:
    """All orders of so many objects: which object stands at which place."""
    return tuple(permutations(range(count)))


@lru_cache(maxsize=64)
def _true_clues(count: int, kinds: tuple[Kind, ...]) -> Sequence[tuple[Clue, int]]:
    """Every clue about so many objects, and of which orders it is true: bit i for the order number i."""
    clues = [
        Clue(kind, *pair) for kind in kinds if kind != "between" for pair in permutations(range(count), 2)
    ]
    if "between" in kinds:
        clues += [
            Clue("between", one, other, apart)
            for one in range(count)
            for other in range(one)
            for apart in range(1, count - 1)
        ]
    return tuple(
        (clue, sum(1 << number for number, order in enumerate(_orders(count)) if _fits(clue, order)))
        for clue in clues
    )


def _fits(clue: Clue, order: Sequence[int]) -> bool:
    distance = order.index(clue.other) - order.index(clue.one)
    if clue.kind == "left":
        return distance > 0
    return distance == 1 if clue.kind == "next" else abs(distance) == clue.apart + 1


def _symbol(clue: Clue, names: Sequence[str]) -> str:
    sign = {"left": "<", "next": "/", "between": str(clue.apart)}[clue.kind]
    return f"{names[clue.one]}{sign}{names[clue.other]}"


def _sentence(clue: Clue, names: Sequence[str], mirrored: bool) -> str:
    one, other = names[clue.one], names[clue.other]
    if clue.kind == "between":
        one, other = (other, one) if mirrored else (one, other)
        return f"{clue.apart} of them {'is' if clue.apart == 1 else 'are'} between {one} and {other}."
    exactly = "immediately" if clue.kind == "next" else "somewhere"
    if mirrored:
        return f"{other} is {exactly} to the right of {one}."
    return f"{one} is {exactly} to the left of {other}."
