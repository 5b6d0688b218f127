"""Puzzles of logic: the order of objects in a row, and the next node on the only path to another node."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise, permutations
from typing import Annotated, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Le, MinLen
from typing_extensions import override

from treetune.domains.graders.puzzles import OrderingGrader
from treetune.domains.graders.tagged import OneWord
from treetune.domains.puzzles.base import Puzzle, Puzzles, needed_clues
from treetune.tasks.base import Task
from treetune.vocabulary import Problem

OrderingKind = Literal["left", "next", "between"]
"""The kinds of clues about two objects. ``left``: the first is somewhere to the left of the second. ``next``:
it is immediately to the left of the second. ``between``: there is a certain number of objects between
them."""

LETTERS = "abcdefghijkl"
EXAMPLE_LIST = '["…", "…"]'
ORDERING_GRADER = OrderingGrader()

THEMES: dict[str, tuple[str, ...]] = {
    "books on a shelf": ("atlas", "novel", "cookbook", "diary", "dictionary", "thriller", "poem", "manual"),
    "birds on a wire": ("sparrow", "crow", "robin", "magpie", "starling", "pigeon", "wren", "swallow"),
    "cars in a row": ("truck", "van", "taxi", "bus", "tractor", "limousine", "pickup", "jeep"),
    "fruits on a stall": ("apple", "mango", "pear", "plum", "kiwi", "melon", "cherry", "lemon"),
    "people in a queue": ("Anna", "Boris", "Chen", "Dalia", "Emil", "Fatima", "Goran", "Hana"),
    "flags on a line": ("red", "blue", "green", "white", "black", "yellow", "orange", "violet"),
}


class OrderingClue(NamedTuple):
    """A clue about two objects, which are given by their numbers.

    Example: ``OrderingClue("left", 0, 2)`` says that object 0 is somewhere to the left of object 2.
    """

    kind: OrderingKind
    first: int
    second: int
    apart: int = 0
    """The number of objects between the two, for ``between``."""


@Task.register("ordering_puzzles")
@dataclass(frozen=True, kw_only=True)
class OrderingPuzzles(Puzzles):
    r"""The answer is the order of some objects in a row, given clues about pairs of them.

    A random order is drawn, and then clues that are true for it, until no other order satisfies all of them.
    Superfluous clues are removed. With the wording ``symbols`` objects are letters: ``abc:a<c,b1c>\n`` asks
    for the order of a, b and c, with a to the left of c, and one object between b and c. ``a/c`` means that a
    is immediately to the left of c.

    **Demonstrations** try an order, name the first clue that it violates, and try another order that
    satisfies all clues named so far: ``cab!a<c\nacb!b1c\nbac`` and so on. With `demonstration_noise` p, an
    order that violates a clue is given as the answer with probability p.
    """

    objects: tuple[Annotated[int, Ge(2), Le(7)], Annotated[int, Ge(2), Le(7)]] = (3, 5)
    """The smallest and the largest number of objects."""
    clues: Annotated[tuple[OrderingKind, ...], MinLen(1)] = ("left", "next", "between")
    """Kinds of clues: ``left`` (somewhere to the left of), ``next`` (immediately to the left of) and
    ``between`` (the number of objects between two)."""
    letters: Annotated[int, Ge(2), Le(len(LETTERS))] = 7
    """The number of different letters for objects in symbols."""
    grader: OrderingGrader = ORDERING_GRADER

    kind: ClassVar[str] = "ordering puzzles"
    ranges: ClassVar[tuple[str, ...]] = ("objects",)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        most_objects = self.objects[1]
        if set(self.clues) == {"between"}:
            raise ValueError(
                "clues is only ['between'], and such clues hold for the mirror image of an order, too: add"
                " another kind"
            )
        if self.wording == "symbols" and self.letters < most_objects:
            raise ValueError(f"letters is {self.letters}, too few to name {most_objects} objects")

    @override
    def draw_puzzle(self, generator: random.Random) -> Puzzle:
        count = generator.randint(*self.objects)
        theme = generator.choice(list(THEMES))
        all_names = THEMES[theme] if self.wording == "words" else LETTERS[: self.letters]
        names = generator.sample(all_names, count)
        order = generator.randrange(len(_all_orders(count)))
        chosen = _unique_clues(generator, _clues_with_orders(count, self.clues), order)
        solution = [names[number] for number in _all_orders(count)[order]]
        # This is drawn with both wordings, although only one uses it, so that both have the same puzzles.
        mirrored = [generator.random() < 0.5 for _ in chosen]
        if self.wording == "symbols":
            prompt = f"{''.join(names)}:{','.join(_write_in_symbols(clue, names) for clue in chosen)}>\n"
        else:
            sentences = [
                f"- {_write_in_words(clue, names, is_mirrored)}"
                for clue, is_mirrored in zip(chosen, mirrored, strict=True)
            ]
            list_of_clues = "\n".join(sentences)
            prompt = (
                f"There are {len(names)} {theme}: {', '.join(names)}. From left to right:\n{list_of_clues}\n"
                "In which order are they, from the leftmost to the rightmost? Think first, and end with a"
                f" list of all {len(names)} names: {self.grader.write_in_tags(EXAMPLE_LIST)}"
            )
        key = (frozenset(names), frozenset(_write_in_symbols(clue, names) for clue in chosen))
        # `solution` makes clues of these tuples again.
        data = {"names": names, "clues": [tuple(clue) for clue in chosen]}
        return Puzzle(prompt, json.dumps(solution), key, data)

    @override
    def solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        names: Sequence[str] = problem.data["names"]
        clues = [OrderingClue(*clue) for clue in problem.data["clues"]]
        symbols = self.wording == "symbols"
        possible_orders = list(_all_orders(len(names)))  # those that satisfy all clues named so far
        while True:
            order = generator.choice(possible_orders)
            tried_names = [names[number] for number in order]
            violated_clue = next((clue for clue in clues if not _is_true(clue, order)), None)
            # `draws_error` says whether the solution has an error in this step. The error is to give an order
            # as the answer although the order violates a clue.
            if violated_clue is None or self.draws_error(generator):
                yield "".join(tried_names) if symbols else json.dumps(tried_names)
                return
            if symbols:
                yield f"{''.join(tried_names)}!{_write_in_symbols(violated_clue, names)}"
            else:
                yield f"Not {', '.join(tried_names)}: {_write_in_words(violated_clue, names, mirrored=False)}"
            possible_orders = [other for other in possible_orders if _is_true(violated_clue, other)]

    @override
    def symbols(self) -> str:
        return LETTERS[: self.letters] + "</!:,>0123456789"


def _unique_clues(
    generator: random.Random, clues: Sequence[tuple[OrderingClue, int]], order: int
) -> Sequence[OrderingClue]:
    """Returns clues that are true only for the order with this number, without superfluous ones.

    Each of the given clues comes with the orders for which it is true, as an integer in which bit i stands
    for order i.
    """
    true_clues = [(clue, orders) for clue, orders in clues if orders >> order & 1]  # true for this order
    generator.shuffle(true_clues)
    chosen: list[tuple[OrderingClue, int]] = []
    possible_orders = -1  # all bits are set
    for clue, orders in true_clues:
        if possible_orders & orders != possible_orders:  # it excludes an order
            chosen.append((clue, orders))
            possible_orders &= orders
        if possible_orders == 1 << order:
            break
    # The kinds include 'left' or 'next': `OrderingPuzzles` refuses 'between' alone.
    assert possible_orders == 1 << order, "clues of the kinds left or next distinguish all orders"
    return needed_clues(generator, chosen, possible_orders)


@cache
def _all_orders(count: int) -> Sequence[tuple[int, ...]]:
    """Returns all orders of so many objects. Each lists the numbers of the objects from left to right."""
    return tuple(permutations(range(count)))


@lru_cache(maxsize=64)
def _clues_with_orders(count: int, kinds: tuple[OrderingKind, ...]) -> Sequence[tuple[OrderingClue, int]]:
    """Returns every clue about `count` objects. Each comes with the orders for which it is true, as an
    integer in which bit i stands for order i."""
    clues: list[OrderingClue] = []
    for kind in kinds:
        if kind != "between":
            clues += [OrderingClue(kind, *pair) for pair in permutations(range(count), 2)]
    # A clue of the kind "between" also has a number of objects (`apart`).
    if "between" in kinds:
        for first, second in permutations(range(count), 2):
            if second < first:  # the reversed pair has the same meaning
                clues += [OrderingClue("between", first, second, apart) for apart in range(1, count - 1)]
    clues_and_orders = []
    for clue in clues:
        orders = sum(1 << number for number, order in enumerate(_all_orders(count)) if _is_true(clue, order))
        clues_and_orders.append((clue, orders))
    return tuple(clues_and_orders)


def _is_true(clue: OrderingClue, order: Sequence[int]) -> bool:
    """Returns whether a clue is true for an order."""
    distance = order.index(clue.second) - order.index(clue.first)
    if clue.kind == "left":
        return distance > 0
    if clue.kind == "next":
        return distance == 1
    return abs(distance) == clue.apart + 1  # between the two are `apart` objects


def _write_in_symbols(clue: OrderingClue, names: Sequence[str]) -> str:
    """Writes a clue in symbols: ``a<c``, ``a/c`` or ``b1c``."""
    sign = {"left": "<", "next": "/", "between": str(clue.apart)}[clue.kind]
    return f"{names[clue.first]}{sign}{names[clue.second]}"


def _write_in_words(clue: OrderingClue, names: Sequence[str], mirrored: bool) -> str:
    """Writes a clue in English. A mirrored one has the same meaning with the objects exchanged: "b is
    somewhere to the right of a" for "a is somewhere to the left of b"."""
    first, second = names[clue.first], names[clue.second]
    if clue.kind == "between":
        first, second = (second, first) if mirrored else (first, second)
        return f"{clue.apart} of them {'is' if clue.apart == 1 else 'are'} between {first} and {second}."
    adverb = "immediately" if clue.kind == "next" else "somewhere"
    if mirrored:
        return f"{second} is {adverb} to the right of {first}."
    return f"{first} is {adverb} to the left of {second}."


ONE_WORD_GRADER = OneWord()
NODE_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "zu", "yo")
PERSON_NAMES = ("Ada", "Ben", "Cem", "Dora", "Ezra", "Fay", "Gil", "Hugo", "Ines", "Jon", "Kai", "Lea")


@Task.register("graph_paths")
@dataclass(frozen=True, kw_only=True)
class GraphPaths(Puzzles):
    r"""The answer is the first node on the path from a start node to a goal. Several chains of edges begin at
    the start node, and one of them leads to the goal. To find out which one, all its edges have to be
    followed.

    With the wording ``words`` nodes are made-up adjectives: "Everyone who is bagome is also rufisa." With
    ``symbols`` they are letters: ``ab,cd,ac,be:a>e\n`` asks for ``b``.

    **Demonstrations** go backwards from the goal, with an edge in each line, to the node after the start. At
    an error, any edge of the graph is taken, and the demonstration continues backwards from it.
    """

    lookahead: tuple[Annotated[int, Ge(1), Le(100)], Annotated[int, Ge(1), Le(100)]] = (2, 6)
    """The smallest and the largest number of edges in a chain."""
    paths: Annotated[int, Ge(2), Le(10)] = 4
    """The number of chains."""
    extra: Annotated[int, Ge(0), Le(100)] = 2
    """The most edges in addition to the chains. Each is from one chain to another, and none leads to the
    goal's chain."""
    parents: Annotated[int, Ge(1), Le(10)] = 3
    """The most edges into a node."""
    grader: OneWord = ONE_WORD_GRADER

    kind: ClassVar[str] = "graph paths"
    ranges: ClassVar[tuple[str, ...]] = ("lookahead",)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        most_edges = self.lookahead[1]
        nodes = 1 + self.paths * most_edges  # the start, and a node after each edge
        if self.wording == "symbols" and nodes > len(NODE_LETTERS):
            raise ValueError(
                f"{self.paths} paths of {most_edges} edges have {nodes} nodes, and there are"
                f" {len(NODE_LETTERS)} letters to name them: choose fewer paths or a smaller lookahead"
            )

    @override
    def draw_puzzle(self, generator: random.Random) -> Puzzle:
        length = generator.randint(*self.lookahead)
        names = self._draw_names(generator, 1 + self.paths * length)
        start, *other_nodes = names
        chains = [other_nodes[number * length : (number + 1) * length] for number in range(self.paths)]
        edges: list[tuple[str, str]] = []
        for chain in chains:
            edges += pairwise([start, *chain])  # (start, b), (b, c) for the chain [b, c]
        edges += self._extra_edges(generator, chains, edges)
        generator.shuffle(edges)
        first_node, goal = chains[0][0], chains[0][-1]
        if self.wording == "symbols":
            prompt = f"{','.join(map(''.join, edges))}:{start}>{goal}\n"
        else:
            name = generator.choice(PERSON_NAMES)
            facts = "\n".join(f"Everyone who is {source} is also {target}." for source, target in edges)
            prompt = (
                f"{facts}\n{name} is {start}. One can show step by step that {name} is {goal}. Which word"
                f" comes first after {start!r} in that proof? Think first, and end with the word:"
                f" {self.grader.write_in_tags('…')}"
            )
        data = {"edges": edges, "start": start, "goal": goal}
        # Puzzles with the same start, goal and edges ask the same question.
        return Puzzle(prompt, first_node, (start, goal, frozenset(edges)), data)

    def _extra_edges(
        self, generator: random.Random, chains: list[list[str]], edges: list[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """Draws edges between chains, each from a node to one with a later position in another chain.

        The first chain is the goal's. None of these edges leads to it, so there is only one path to the goal.
        Positions increase along edges, so there are no circles.
        """
        possible_edges: list[tuple[str, str]] = []
        for source_number, source_chain in enumerate(chains):
            for target_number, target_chain in enumerate(chains[1:], start=1):
                if target_number == source_number:
                    continue
                for position, source in enumerate(source_chain):
                    possible_edges += [(source, target) for target in target_chain[position + 1 :]]
        generator.shuffle(possible_edges)
        extra_edges: list[tuple[str, str]] = []
        edges_into = {node: 1 for _, node in edges}  # how many edges lead into each node
        for source, target in possible_edges:
            # `self.extra` is the number of edges to draw, `self.parents` the most edges into one node.
            if len(extra_edges) < self.extra and edges_into[target] < self.parents:
                edges_into[target] += 1
                extra_edges.append((source, target))
        return extra_edges

    def _draw_names(self, generator: random.Random, count: int) -> list[str]:
        """Draws different names of nodes: letters, or made-up words of three syllables."""
        if self.wording == "symbols":
            # The largest puzzle has the start, and `lookahead[1]` nodes on each of `paths` paths. Only as
            # many letters are used, so that the alphabet is small.
            return generator.sample(NODE_LETTERS[: 1 + self.paths * self.lookahead[1]], count)
        names: dict[str, None] = {}  # as a set, in the order of the draws
        while len(names) < count:
            names["".join(generator.choice(SYLLABLES) for _ in range(3))] = None
        return list(names)

    @override
    def solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        edges, start, node = (problem.data[key] for key in ("edges", "start", "goal"))
        # The solution goes back from the goal to the start, and its answer is the first node after the start.
        # Each node of the goal's chain has one edge into it. An error is to draw from all edges. After
        # an error, `node` may be in another chain, where several edges may lead into a node.
        while True:
            edge = generator.choice([edge for edge in edges if edge[1] == node])
            if self.draws_error(generator):
                edge = generator.choice(edges)
            if edge[0] == start:
                yield edge[1]
                return
            yield "".join(edge) if self.wording == "symbols" else f"{edge[1]} follows from {edge[0]}"
            node = edge[0]

    @override
    def symbols(self) -> str:
        return NODE_LETTERS[: 1 + self.paths * self.lookahead[1]] + ",:>"
