"""Puzzles made on the spot, of logic, grids and programs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import and_
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.domains.graders.tagged import Tagged
from treetune.seeds import derived_random
from treetune.tasks.base import GeneratedTask
from treetune.vocabulary import Problem

Wording = Literal["words", "symbols"]
Clue = TypeVar("Clue")

_VAIN = 2000
"""Draws one after the other that gave no new puzzle, after which there are taken to be no more."""


class Puzzle(NamedTuple):
    """A puzzle with one answer. `key` is the same for two that ask the same; the teacher solves it from
    `data`."""

    prompt: str
    gold: str
    key: object
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Puzzles(GeneratedTask):
    """Puzzles that are drawn until there are enough, no two alike, in whichever splits. Raises ValueError
    where too few different ones are found.

    **Demonstrations** are worked solutions, a step a line, and the answer as the grader reads it.
    """

    wording: Wording = "words"
    """With ``words`` a puzzle is told in English, for a model that reads it; with ``symbols`` in as few
    characters as can be, for one that learns from nothing."""
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    """The teacher's probability of a slip on each step."""
    train_size: Annotated[int, Gt(0)] = 10_000
    validation_size: Annotated[int, Gt(0)] = 500
    test_size: Annotated[int, Gt(0)] = 1000
    seed: int = 0
    """Decides which puzzles are held out, and is not the run's."""
    grader: Tagged

    kind: ClassVar[str]
    """Goes into derived seeds, to tell kinds of puzzles apart."""

    def draw_puzzle(self, generator: random.Random) -> Puzzle | None:
        """Draws a puzzle; None where this draw led to none."""
        raise NotImplementedError

    def solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        """Yields the teacher's lines, and last the answer; slips and choices come from the generator."""
        raise NotImplementedError

    def symbols(self) -> str:
        """Returns the characters of prompts and solutions in symbols, without the grader's tags."""
        raise NotImplementedError

    def slips(self, generator: random.Random) -> bool:
        return generator.random() < self.demonstration_noise

    @override
    def generate(self, count: int) -> Sequence[Puzzle]:
        return _distinct(self, count)

    @override
    def problem(self, id: str, generated: Puzzle) -> Problem:
        return Problem(id=id, prompt=generated.prompt, gold=generated.gold, data=generated.data)

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        generator = derived_random(seed, problem.id, "demonstration")
        *lines, answer = self.solution(problem, generator)
        return "".join(f"{line}\n" for line in lines) + self.grader.tagged(answer)

    @override
    def alphabet(self) -> str:
        if self.wording == "words":
            return super().alphabet()
        written = self.symbols() + self.grader.opening + self.grader.closing
        return "".join(sorted(set(written + "\n")))


@lru_cache(maxsize=8)
def _distinct(task: Puzzles, count: int) -> Sequence[Puzzle]:
    """Returns `count` puzzles, no two with the same key. The first ones don't depend on `count`."""
    generator = derived_random(task.seed, task.kind)
    made: dict[object, Puzzle] = {}
    vain = 0
    while len(made) < count:
        puzzle = task.draw_puzzle(generator)
        if puzzle is not None and made.setdefault(puzzle.key, puzzle) is puzzle:
            vain = 0
            continue
        vain += 1
        if vain == _VAIN:
            raise ValueError(
                f"{count} puzzles are asked for (train_size + validation_size + test_size), and {len(made)}"
                f" different ones were found, the last {vain} draws giving no new one: ask for fewer, or for"
                " larger or more varied puzzles"
            )
    return tuple(made.values())


def needed_clues(generator: random.Random, clues: Sequence[tuple[Clue, int]], target: int) -> list[Clue]:
    """Returns the clues in a random order, without superfluous ones. Each comes with the set of arrangements
    of which it is true, a bit each; together they leave the set `target`."""
    chosen = list(clues)
    for one in clues:
        if reduce(and_, (true for other, true in chosen if other is not one[0]), -1) == target:
            chosen.remove(one)
    generator.shuffle(chosen)
    return [clue for clue, _ in chosen]
