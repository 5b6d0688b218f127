"""Puzzles of logic: who stands where in a row, and which node comes next on the only way to another one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import permutations
from typing import Annotated, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Le, MinLen
from typing_extensions import override

from treetune.domains.graders.puzzles import OrderingGrader
from treetune.domains.graders.tagged import OneWord
from treetune.domains.puzzles.base import Puzzle, Puzzles, needed_clues
from treetune.tasks.base import Task
from treetune.vocabulary import Problem

Kind = Literal["left", "next", "between"]
"""Somewhere to the left of another; immediately to its left; with a number of others between the two."""

LETTERS = "abcdefghijkl"
LIST = '["…", "…"]'
ORDERING = OrderingGrader()

THEMES: dict[str, tuple[str, ...]] = {
    "books on a shelf": ("atlas", "novel", "cookbook", "diary", "dictionary", "thriller", "poem", "manual"),
    "birds on a wire": ("sparrow", "crow", "robin", "magpie", "starling", "pigeon", "wren", "swallow"),
    "cars in a row": ("truck", "van", "taxi", "bus", "tractor", "limousine", "pickup", "jeep"),
    "fruits on a stall": ("apple", "mango", "pear", "plum", "kiwi", "melon", "cherry", "lemon"),
    "people in a queue": ("Anna", "Boris", "Chen", "Dalia", "Emil", "Fatima", "Goran", "Hana"),
    "flags on a line": ("red", "blue", "green", "white", "black", "yellow", "orange", "violet"),
}


class OrderingClue(NamedTuple):
    """A clue about the objects `one` and `other`, by number; `apart` is how many stand between them."""

    kind: Kind
    one: int
    other: int
    apart: int = 0


@Task.register("ordering_puzzles")
@dataclass(frozen=True, kw_only=True)
class OrderingPuzzles(Puzzles):
    r"""Put things in order, by clues about two of them at a time.

    A puzzle is drawn as an order and clues that are true of it, until no other order fits all of them; then
    clues without which that stays so are taken away again. In symbols things are letters: ``abc:a<c,b1c>\n``
    asks for the order of a, b and c, with a left of c and one thing between b and c; ``a/c`` says that a is
    immediately to the left of c.

    **Demonstrations** try an order, name the first clue that it breaks, and go on with one that keeps all
    clues named so far: ``cab!a<c\nacb!b1c\nbac`` and so on. With `demonstration_noise` p the teacher passes
    each try that breaks a clue off for the answer with probability p.
    """

    objects: tuple[Annotated[int, Ge(2), Le(7)], Annotated[int, Ge(2), Le(7)]] = (3, 5)
    """The fewest and the most things."""
    clues: Annotated[tuple[Kind, ...], MinLen(1)] = ("left", "next", "between")
    """Kinds of clues: ``left`` (somewhere to the left of), ``next`` (immediately to the left of) and
    ``between`` (how many stand between two)."""
    letters: Annotated[int, Ge(2), Le(len(LETTERS))] = 7
    """How many different letters name things in symbols."""
    grader: OrderingGrader = ORDERING

    kind: ClassVar[str] = "ordering puzzles"
    ranges: ClassVar[tuple[str, ...]] = ("objects",)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.objects[1]
        if set(self.clues) == {"between"}:
            raise ValueError("clues is ['between'] alone, which every order fits as well as its mirror image")
        if self.wording == "symbols" and self.letters < most:
            raise ValueError(f"letters is {self.letters}, too few to name {most} objects")

    @override
    def draw_puzzle(self, generator: random.Random) -> Puzzle:
        count = generator.randint(*self.objects)
        theme = generator.choice(list(THEMES))
        every = THEMES[theme] if self.wording == "words" else LETTERS[: self.letters]
        names = generator.sample(every, count)
        order = generator.randrange(len(_orders(count)))
        chosen = _unique(generator, _true_clues(count, self.clues), order)
        solution = [names[place] for place in _orders(count)[order]]
        mirrored = [generator.random() < 0.5 for _ in chosen]  # in both wordings: puzzles stay the same
        if self.wording == "symbols":
            prompt = f"{''.join(names)}:{','.join(_symbol(clue, names) for clue in chosen)}>\n"
        else:
            listed = "\n".join(
                f"- {_sentence(clue, names, m)}" for clue, m in zip(chosen, mirrored, strict=True)
            )
            prompt = (
                f"There are {len(names)} {theme}: {', '.join(names)}. From left to right:\n{listed}\n"
                "In which order are they, from the leftmost to the rightmost? Think first, and end with a"
                f" list of all {len(names)} names: {self.grader.tagged(LIST)}"
            )
        key = (frozenset(names), frozenset(_symbol(clue, names) for clue in chosen))
        return Puzzle(prompt, json.dumps(solution), key, {"names": names, "clues": [*map(tuple, chosen)]})

    @override
    def solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        names: Sequence[str] = problem.data["names"]
        clues = [OrderingClue(*clue) for clue in problem.data["clues"]]
        symbols = self.wording == "symbols"
        possible_orders = list(_orders(len(names)))
        while True:
            order = generator.choice(possible_orders)
            tried = [names[number] for number in order]
            broken = next((clue for clue in clues if not _fits(clue, order)), None)
            if broken is None or self.slips(generator):
                yield "".join(tried) if symbols else json.dumps(tried)
                return
            if symbols:
                yield f"{''.join(tried)}!{_symbol(broken, names)}"
            else:
                yield f"Not {', '.join(tried)}: {_sentence(broken, names, mirrored=False)}"
            possible_orders = [other for other in possible_orders if _fits(broken, other)]

    @override
    def symbols(self) -> str:
        return LETTERS[: self.letters] + "</!:,>0123456789"


def _unique(
    generator: random.Random, clues: Sequence[tuple[OrderingClue, int]], order: int
) -> Sequence[OrderingClue]:
    """Returns clues that are true of the order with this number and of no other, none of them superfluous."""
    true = [(clue, orders) for clue, orders in clues if orders >> order & 1]
    generator.shuffle(true)
    chosen: list[tuple[OrderingClue, int]] = []
    possible = -1
    for clue, orders in true:
        if possible & orders != possible:
            chosen.append((clue, orders))
            possible &= orders
        if possible == 1 << order:
            break
    assert possible == 1 << order, "left or next alone tells every order from every other"
    return needed_clues(generator, chosen, possible)


@cache
def _orders(count: int) -> Sequence[tuple[int, ...]]:
    """Returns all orders of so many objects, each as the object at each place."""
    return tuple(permutations(range(count)))


@lru_cache(maxsize=64)
def _true_clues(count: int, kinds: tuple[Kind, ...]) -> Sequence[tuple[OrderingClue, int]]:
    """Returns every clue about so many objects, with the orders of which it is true: bit i is order i."""
    clues = [
        OrderingClue(kind, *pair)
        for kind in kinds
        if kind != "between"
        for pair in permutations(range(count), 2)
    ]
    if "between" in kinds:
        for first, second in permutations(range(count), 2):
            if second < first:  # the same pair the other way round says the same
                clues += [OrderingClue("between", first, second, apart) for apart in range(1, count - 1)]
    clues_and_orders = []
    for clue in clues:
        true_orders = sum(1 << number for number, order in enumerate(_orders(count)) if _fits(clue, order))
        clues_and_orders.append((clue, true_orders))
    return tuple(clues_and_orders)


def _fits(clue: OrderingClue, order: Sequence[int]) -> bool:
    distance = order.index(clue.other) - order.index(clue.one)
    if clue.kind == "left":
        return distance > 0
    return distance == 1 if clue.kind == "next" else abs(distance) == clue.apart + 1


def _symbol(clue: OrderingClue, names: Sequence[str]) -> str:
    sign = {"left": "<", "next": "/", "between": str(clue.apart)}[clue.kind]
    return f"{names[clue.one]}{sign}{names[clue.other]}"


def _sentence(clue: OrderingClue, names: Sequence[str], mirrored: bool) -> str:
    first, second = names[clue.one], names[clue.other]
    if clue.kind == "between":
        first, second = (second, first) if mirrored else (first, second)
        return f"{clue.apart} of them {'is' if clue.apart == 1 else 'are'} between {first} and {second}."
    exactly = "immediately" if clue.kind == "next" else "somewhere"
    if mirrored:
        return f"{second} is {exactly} to the right of {first}."
    return f"{first} is {exactly} to the left of {second}."


ONE_WORD = OneWord()
NODES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "zu", "yo")
NAMES = ("Ada", "Ben", "Cem", "Dora", "Ezra", "Fay", "Gil", "Hugo", "Ines", "Jon", "Kai", "Lea")


@Task.register("graph_paths")
@dataclass(frozen=True, kw_only=True)
class GraphPaths(Puzzles):
    r"""Find the first node on the way to a goal. From a start chains of edges lead away, one of them to the
    goal; to see which, one has to go through all its edges.

    In words nodes are made-up adjectives: "Everyone who is bagome is also rufisa." In symbols nodes are
    letters: ``ab,cd,ac,be:a>e\n`` asks for ``b``.

    **Demonstrations** go back from the goal, an edge a line, to the node behind the start. On a slip the
    teacher takes another edge into one of the graph's nodes, and goes back from there.
    """

    lookahead: tuple[Annotated[int, Ge(1), Le(100)], Annotated[int, Ge(1), Le(100)]] = (2, 6)
    """The fewest and the most edges of a chain."""
    paths: Annotated[int, Ge(2), Le(10)] = 4
    """Chains that begin at the start."""
    extra: Annotated[int, Ge(0), Le(100)] = 2
    """Edges more, from one chain to another, none of them towards the goal."""
    parents: Annotated[int, Ge(1), Le(10)] = 3
    """The most edges into a node."""
    grader: OneWord = ONE_WORD

    kind: ClassVar[str] = "graph paths"
    ranges: ClassVar[tuple[str, ...]] = ("lookahead",)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.lookahead[1]
        nodes = 1 + self.paths * most
        if self.wording == "symbols" and nodes > len(NODES):
            raise ValueError(
                f"{self.paths} paths of {most} edges have {nodes} nodes, and there are {len(NODES)} letters"
                " to name them: choose fewer paths or a smaller lookahead"
            )

    @override
    def draw_puzzle(self, generator: random.Random) -> Puzzle:
        length = generator.randint(*self.lookahead)
        names = self._names(generator, 1 + self.paths * length)
        start, *rest = names
        chains = [rest[number * length : (number + 1) * length] for number in range(self.paths)]
        edges: list[tuple[str, str]] = []
        for chain in chains:
            edges += zip([start, *chain], chain, strict=False)
        edges += self._extra(generator, chains, edges)
        generator.shuffle(edges)
        goal, following = chains[0][-1], chains[0][0]
        if self.wording == "symbols":
            prompt = f"{','.join(map(''.join, edges))}:{start}>{goal}\n"
        else:
            name = generator.choice(NAMES)
            facts = "\n".join(f"Everyone who is {source} is also {target}." for source, target in edges)
            prompt = (
                f"{facts}\n{name} is {start}. One can show step by step that {name} is {goal}. Which word"
                f" comes first behind {start!r} in that proof? Think first, and end with the word:"
                f" {self.grader.tagged('…')}"
            )
        data = {"edges": edges, "start": start, "goal": goal}
        return Puzzle(prompt, following, (start, goal, frozenset(edges)), data)

    def _extra(
        self, generator: random.Random, chains: list[list[str]], edges: list[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """Draws edges between chains, from a node to one that stands further along another chain, but never
        to the chain of the goal: the way there stays the only one, and nothing goes in circles."""
        made: list[tuple[str, str]] = []
        entered = {node: 1 for _, node in edges}
        possible = [
            (node, other)
            for number, chain in enumerate(chains)
            for target, others in enumerate(chains[1:], start=1)
            if target != number
            for place, node in enumerate(chain[:-1])
            for other in others[place + 1 :]
            if node != chains[0][-1]
        ]
        generator.shuffle(possible)
        for node, other in possible:
            if len(made) < self.extra and entered[other] < self.parents:
                entered[other] += 1
                made.append((node, other))
        return made

    def _names(self, generator: random.Random, count: int) -> list[str]:
        if self.wording == "symbols":
            return generator.sample(NODES[: 1 + self.paths * self.lookahead[1]], count)
        names: dict[str, None] = {}
        while len(names) < count:
            names["".join(generator.choice(SYLLABLES) for _ in range(3))] = None
        return list(names)

    @override
    def solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        edges, start, node = (problem.data[key] for key in ("edges", "start", "goal"))
        # From the goal back there is one edge into each node; a slip may lead to where there are several.
        while True:
            edge = generator.choice([edge for edge in edges if edge[1] == node])
            if self.slips(generator):
                edge = generator.choice(edges)
            if edge[0] == start:
                yield edge[1]
                return
            yield "".join(edge) if self.wording == "symbols" else f"{edge[1]} follows from {edge[0]}"
            node = edge[0]

    @override
    def symbols(self) -> str:
        return NODES[: 1 + self.paths * self.lookahead[1]] + ",:>"
