"""Paths in a graph: which node comes next on the only way to another one, many steps ahead."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from treetune.tasks.base import Task
from treetune.tasks.graders.one_word import OneWord
from treetune.vocabulary import Problem
from treetune_domains.puzzles.puzzles import Puzzle, Puzzles

GRADER = OneWord()
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "zu", "yo")
NAMES = ("Ada", "Ben", "Cem", "Dora", "Ezra", "Fay", "Gil", "Hugo", "Ines", "Jon", "Kai", "Lea")


@Task.register("graph_paths")
@dataclass(frozen=True, kw_only=True)
class GraphPaths(Puzzles):
    r"""From a start, `paths` chains of `lookahead` (fewest and most) edges lead away, one of them to the
    goal: which node comes next on the way there? To see it one has to go through all edges of that chain.
    `extra` edges more lead from one chain to another, none of them towards the goal, and no node is entered
    by more than `parents`.

    In words nodes are made-up adjectives: "Everyone who is bagome is also rufisa." In symbols nodes are
    letters: ``ab,cd,ac,be:a>e\n`` asks for ``b``.

    **Demonstrations** go back from the goal, an edge a line, to the node behind the start. On a slip the
    teacher takes another edge into one of the graph's nodes, and goes back from there.
    """

    lookahead: tuple[Annotated[int, Ge(1), Le(100)], Annotated[int, Ge(1), Le(100)]] = (2, 6)
    paths: Annotated[int, Ge(2), Le(10)] = 4
    extra: Annotated[int, Ge(0), Le(100)] = 2
    parents: Annotated[int, Ge(1), Le(10)] = 3
    grader: OneWord = GRADER

    kind: ClassVar[str] = "graph paths"

    def __post_init__(self) -> None:
        least, most = self.lookahead
        if least > most:
            raise ValueError(f"lookahead is [{least}, {most}]: give the smaller one first")
        nodes = 1 + self.paths * most
        if self.wording == "symbols" and nodes > len(LETTERS):
            raise ValueError(
                f"{self.paths} paths of {most} edges have {nodes} nodes, and there are {len(LETTERS)} letters"
                " to name them: choose fewer paths or a smaller lookahead"
            )

    def _draw(self, generator: random.Random) -> Puzzle:
        length = generator.randint(*self.lookahead)
        names = self._names(generator, 1 + self.paths * length)
        start, *rest = names
        chains = [rest[number * length : (number + 1) * length] for number in range(self.paths)]
        edges = [edge for chain in chains for edge in zip([start, *chain], chain, strict=False)]
        edges += self._extra(generator, chains, edges)
        generator.shuffle(edges)
        goal, following = chains[0][-1], chains[0][0]
        if self.wording == "symbols":
            prompt = f"{','.join(map(''.join, edges))}:{start}>{goal}\n"
        else:
            prompt = self._in_words(generator.choice(NAMES), start, goal, edges)
        data = {"edges": edges, "start": start, "goal": goal}
        return Puzzle(prompt, following, (start, goal, frozenset(edges)), data)

    def _extra(
        self, generator: random.Random, chains: list[list[str]], edges: list[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """Edges between chains, from a node to one that stands further along another chain, but never to the
        chain of the goal: the way there stays the only one, and nothing goes in circles."""
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
            return generator.sample(LETTERS[: 1 + self.paths * self.lookahead[1]], count)
        names: dict[str, None] = {}
        while len(names) < count:
            names["".join(generator.choice(SYLLABLES) for _ in range(3))] = None
        return list(names)

    def _in_words(self, name: str, start: str, goal: str, edges: list[tuple[str, str]]) -> str:
        facts = "\n".join(f"Everyone who is {one} is also {other}." for one, other in edges)
        return (
            f"{facts}\n{name} is {start}. One can show step by step that {name} is {goal}. Which word comes"
            f" first behind {start!r} in that proof? Think first, and end with the word:"
            f" {self.grader.tagged('…')}"
        )

    def _solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        edges, start, node = (problem.data[key] for key in ("edges", "start", "goal"))
        # From the goal back there is one edge into each node; a slip may lead to where there are several.
        while True:
            into = [edge for edge in edges if edge[1] == node]
            edge = generator.choice(into)
            if self._slips(generator):
                edge = generator.choice(edges)
            if edge[0] == start:
                yield edge[1]
                return
            yield "".join(edge) if self.wording == "symbols" else f"{edge[1]} follows from {edge[0]}"
            node = edge[0]

    def _letters(self) -> str:
        return LETTERS[: 1 + self.paths * self.lookahead[1]] + ",:>"
