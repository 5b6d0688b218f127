"""Puzzles made on the spot: what the embedded tasks of logic and grids have in common."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from annotated_types import Ge, Gt, Le

from treetune.seeds import derived_random
from treetune.tasks.base import Split, Task
from treetune.tasks.graders.tagged import Tagged
from treetune.tasks.steps import ends_of_lines
from treetune.vocabulary import Problem

Wording = Literal["words", "symbols"]

_VAIN = 2000
"""Draws one after the other that gave no new puzzle, after which there are taken to be no more."""


@dataclass(frozen=True)
class Puzzle:
    """A puzzle with one answer. `key` is the same for two that ask the same; `data` is what the teacher
    solves it with."""

    prompt: str
    gold: str
    key: object
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Puzzles(Task):
    """Puzzles that are drawn until there are enough, no two alike, in whichever splits.

    With `wording` ``words`` a puzzle is told in English, for a model that reads it; with ``symbols`` in as
    few characters as can be, for one that learns from nothing. `seed` decides what is held out and is not
    the run's; the held-out puzzles don't change with `train_size`. Raises ValueError where too few
    different ones are found.

    **Demonstrations** are worked solutions, a step a line, and the answer as the grader finds it. A teacher
    with `demonstration_noise` p slips on each step with probability p.
    """

    wording: Wording = "words"
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    train_size: Annotated[int, Gt(0)] = 10_000
    validation_size: Annotated[int, Gt(0)] = 500
    """Problems of the validation split."""
    test_size: Annotated[int, Gt(0)] = 1000
    """Problems of the test split."""
    seed: int = 0
    grader: Tagged

    kind: ClassVar[str]
    """Told apart from other kinds where seeds are derived."""

    def _draw(self, generator: random.Random) -> Puzzle | None:
        """A puzzle; None where this draw led to none."""
        raise NotImplementedError

    def _solution(self, problem: Problem, generator: random.Random) -> Iterator[str]:
        """The teacher's lines, and last the answer; slips and choices are drawn from the generator."""
        raise NotImplementedError

    def _letters(self) -> str:
        """Every character of prompts and solutions in symbols, without the grader's tags."""
        raise NotImplementedError

    def _slips(self, generator: random.Random) -> bool:
        return generator.random() < self.demonstration_noise

    def problems(self, split: Split) -> Sequence[Problem]:
        if split not in get_args(Split):
            raise ValueError(f"no split {split!r}: choose one of {', '.join(get_args(Split))}")
        return _problems(self, split)

    def size(self, split: Split) -> int:
        return self._sizes()[split]

    def _sizes(self) -> dict[Split, int]:
        """The held-out splits come first: they stay when train_size changes."""
        return {"test": self.test_size, "validation": self.validation_size, "train": self.train_size}

    def examples(self, count: int) -> Sequence[Problem]:
        return _numbered("example", _distinct(self, count))

    def demonstration(self, problem: Problem, seed: int) -> str:
        generator = derived_random(seed, problem.id, "demonstration")
        *lines, answer = self._solution(problem, generator)
        return "".join(f"{line}\n" for line in lines) + self.grader.tagged(answer)

    def step_boundaries(self, response: str) -> list[int]:
        """A step is a line with the newline that ends it."""
        return ends_of_lines(response)

    def alphabet(self) -> str:
        if self.wording == "words":
            return super().alphabet()
        written = self._letters() + self.grader.opening + self.grader.closing
        return "".join(sorted(set(written + "\n")))


@lru_cache(maxsize=16)
def _problems(task: Puzzles, split: Split) -> tuple[Problem, ...]:
    sizes = task._sizes()
    start = sum(size for name, size in sizes.items() if list(sizes).index(name) < list(sizes).index(split))
    return _numbered(split, _distinct(task, sum(sizes.values()))[start : start + sizes[split]])


def _numbered(place: str, puzzles: Sequence[Puzzle]) -> tuple[Problem, ...]:
    return tuple(
        Problem(id=f"{place}/{index}", prompt=one.prompt, gold=one.gold, data=one.data)
        for index, one in enumerate(puzzles)
    )


@lru_cache(maxsize=8)
def _distinct(task: Puzzles, wanted: int) -> Sequence[Puzzle]:
    """`wanted` puzzles, no two with the same key. The first ones don't depend on `wanted`."""
    generator = derived_random(task.seed, task.kind)
    made: dict[object, Puzzle] = {}
    vain = 0
    while len(made) < wanted:
        puzzle = task._draw(generator)
        if puzzle is not None and made.setdefault(puzzle.key, puzzle) is puzzle:
            vain = 0
            continue
        vain += 1
        if vain == _VAIN:
            raise ValueError(
                f"{wanted} puzzles are asked for (train_size + validation_size + test_size), and {len(made)}"
                f" different ones were found, the last {vain} draws giving no new one: ask for fewer, or for"
                " larger or more varied puzzles"
            )
    return tuple(made.values())
