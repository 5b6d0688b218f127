"""Generated puzzles of logic, grids and programs."""

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

_MOST_VAIN_DRAWS = 2000
"""The number of draws in a row without a new puzzle after which it is assumed that there are no more."""


class Puzzle(NamedTuple):
    """A puzzle with one answer."""

    prompt: str
    gold: str
    key: object
    """Two puzzles with the same question have the same key."""
    data: Mapping[str, Any]
    """The values from which a demonstration is made."""


@dataclass(frozen=True, kw_only=True)
class Puzzles(GeneratedTask):
    """A task of random puzzles. No puzzle occurs twice, neither in a split nor in two of them. Raises
    ValueError if too few different puzzles are found.

    **Demonstrations** are worked solutions with a line for each step, and at the end the answer in the form
    that the grader reads.
    """

    wording: Wording = "words"
    """``words``: prompts are in English, for pretrained models. ``symbols``: prompts have as few characters
    as possible, for models that are trained from scratch."""
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    """The probability of an error in each step of a demonstration."""
    train_size: Annotated[int, Gt(0)] = 10_000
    validation_size: Annotated[int, Gt(0)] = 500
    test_size: Annotated[int, Gt(0)] = 1000
    seed: int = 0
    """The seed that decides which puzzles are generated and held out. The run's seed doesn't."""
    grader: Tagged

    kind: ClassVar[str]
    """The name of the kind of puzzles. Seeds derive from it, so that different kinds have different seeds."""

    def draw_puzzle(self, generator: random.Random) -> Puzzle | None:
        """Draws a puzzle. Returns None if this draw failed, and another one may succeed."""
        raise NotImplementedError

    def solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        """Yields the lines of a demonstration, and at the end the answer, without the grader's tags. Errors
        and choices are drawn with the generator."""
        raise NotImplementedError

    def symbols(self) -> str:
        """Returns the characters that prompts and solutions have with the wording ``symbols``. Those of the
        grader's tags are added by `alphabet`."""
        raise NotImplementedError

    def draws_error(self, generator: random.Random) -> bool:
        """Returns whether the next step of a demonstration has an error."""
        return generator.random() < self.demonstration_noise

    @override
    def generate(self, count: int) -> Sequence[Puzzle]:
        return _draw_distinct_puzzles(self, count)

    @override
    def problem(self, id: str, generated: Puzzle) -> Problem:
        return Problem(id=id, prompt=generated.prompt, gold=generated.gold, data=generated.data)

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        generator = derived_random(seed, problem.id, "demonstration")
        *lines, answer = self.solution(problem, generator)
        return "".join(f"{line}\n" for line in lines) + self.grader.write_in_tags(answer)

    @override
    def alphabet(self) -> str:
        if self.wording == "words":
            return super().alphabet()
        characters = self.symbols() + self.grader.opening + self.grader.closing
        return "".join(sorted(set(characters + "\n")))


@lru_cache(maxsize=8)
def _draw_distinct_puzzles(task: Puzzles, count: int) -> Sequence[Puzzle]:
    """Returns `count` puzzles with different keys. The first ones don't depend on `count`."""
    generator = derived_random(task.seed, task.kind)
    puzzles: dict[object, Puzzle] = {}
    draws_in_vain = 0
    while len(puzzles) < count:
        puzzle = task.draw_puzzle(generator)
        if puzzle is not None and puzzle.key not in puzzles:
            puzzles[puzzle.key] = puzzle
            draws_in_vain = 0
            continue
        draws_in_vain += 1
        if draws_in_vain == _MOST_VAIN_DRAWS:
            raise ValueError(
                f"the splits need {count} puzzles (train_size + validation_size + test_size), and"
                f" {len(puzzles)} different ones were found, the last {draws_in_vain} draws giving no new"
                " one: ask for fewer, or for larger or more varied puzzles"
            )
    return tuple(puzzles.values())


def needed_clues(generator: random.Random, clues: Sequence[tuple[Clue, int]], target: int) -> list[Clue]:
    """Returns the clues in a random order, without superfluous ones.

    Each clue comes with the set of arrangements for which it is true, as an integer with a bit for each
    arrangement. All clues together are true for the arrangements of the set `target`. A clue is superfluous
    if the other clues without it are true for the same set.
    """
    chosen = list(clues)
    for clue_and_arrangements in clues:
        clue, _ = clue_and_arrangements
        arrangements_of_others = [
            arrangements for other_clue, arrangements in chosen if other_clue is not clue
        ]
        if reduce(and_, arrangements_of_others, -1) == target:  # -1 has all bits: the set of everything
            chosen.remove(clue_and_arrangements)
    generator.shuffle(chosen)
    return [clue for clue, _ in chosen]
