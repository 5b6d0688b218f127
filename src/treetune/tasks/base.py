"""What a task is: problems in splits, demonstrations, step boundaries, and a grader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from treetune.config.registrable import Registrable
from treetune.tasks.environments.base import Environment
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Problem

Split = Literal["train", "validation", "test"]


class Task(Registrable):
    """A source of problems. Sub-classes are frozen dataclasses whose fields are configuration."""

    grader: Grader
    environment: Environment | None = None
    """What its problems are played in, where answers have several turns."""

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems of a split, always in the same order; never empty (ValueError)."""
        raise NotImplementedError

    def size(self, split: Split) -> int | None:
        """How many problems a split has, where that is known at once; None where it takes reading.

        Raises ValueError for a split that the configuration doesn't have.
        """
        return None

    def missing(self) -> Sequence[str]:
        """The files that it reads and that aren't there."""
        return ()

    def examples(self, count: int) -> Sequence[Problem]:
        """Up to so many problems of this kind, whichever are made or read at once; perhaps none."""
        return ()

    def check_demonstrations(self) -> None:
        """Raises ValueError for a task that has none, as far as its configuration says."""
        if type(self).demonstration is Task.demonstration:
            raise ValueError(f"task {type(self).__name__} has no demonstrations to learn from")

    def demonstration(self, problem: Problem, seed: int) -> str:
        """A response to learn from, sampled with `seed` where the teacher is noisy.

        Raises ValueError for a task that has none.
        """
        raise ValueError(f"task {type(self).__name__} has no demonstrations to learn from")

    def sequential_demonstration(self, problem: Problem, seed: int) -> str:
        """A response written in one line, whatever form demonstrations have: what the latency of answers
        that fork is measured against.

        Raises ValueError for a task that has no demonstrations.
        """
        return self.demonstration(problem, seed)

    def step_boundaries(self, response: str) -> list[int]:
        """Character offsets between steps: strictly rising from 0 to ``len(response)``.

        Lossless for every string; an empty response gives ``[0]``.
        """
        raise NotImplementedError

    def alphabet(self) -> str:
        """Every character that prompts and responses may hold, for the character tokenizer.

        Raises ValueError for a task in natural language.
        """
        raise ValueError(f"task {type(self).__name__} has no small alphabet: use a real tokenizer")
