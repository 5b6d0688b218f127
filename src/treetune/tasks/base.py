"""What a task is: problems in splits, demonstrations, step boundaries, and a grader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from treetune.config.registrable import Registrable
from treetune.tasks.drawing import Drawing
from treetune.tasks.graders.base import Grader
from treetune.tasks.sampling import further_problems, sample_problems
from treetune.tasks.steps.base import as_if_going_on
from treetune.vocabulary import Metrics, Problem
from treetune_domains.environments.base import Environment

Split = Literal["train", "validation", "test"]
Params = TypeVar("Params")


class NoSplit(ValueError):
    """A split that the configuration doesn't have."""


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

        Raises NoSplit for a split that the configuration doesn't have.
        """
        return None

    def of(self, problem: Problem) -> Task:
        """The task that a problem is of: itself, or in a mixture the domain's. Whoever needs the steps, the
        demonstration or the sampling of a problem asks that one."""
        return self

    def parts(self) -> Sequence[Task]:
        """All that `of` may give."""
        return (self,)

    @property
    def remembers_pass_rates(self) -> bool:
        """Whether `draw` asks how earlier iterations did on single problems."""
        return False

    def domain_names(self) -> Sequence[str] | None:
        """The domains of its problems, empty where they have none. None: their rows say."""
        return ()

    def sampling(self, params: Params) -> Params:
        """How answers are sampled, given the rollout's `SamplingParams`: in a mixture a domain has stop
        strings and a budget of tokens of its own."""
        return params

    def draw(self, problems: Sequence[Problem], count: int, drawing: Drawing) -> list[Problem]:
        """An iteration's problems, out of all that are trained on; see `sample_problems`."""
        return sample_problems(problems, count, drawing.seed, drawing.iteration, drawing.replacement)

    def draw_further(
        self, problems: Sequence[Problem], taken: Sequence[Problem], drawing: Drawing
    ) -> list[Problem]:
        """Those that the iteration was not given, in the order in which it asks for more."""
        return further_problems(problems, taken, drawing.seed, drawing.iteration)

    def drawing_metrics(self, problems: Sequence[Problem], drawing: Drawing) -> Metrics:
        """What is known of how they are drawn."""
        return {}

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

    def answer_boundaries(self, response: str) -> list[int]:
        """The boundaries of an answer that ends here, from 0 to ``len(response)``: those that it would have
        if it went on in another line. One at its very end is told twice: the end token is a step of its own.

        What a token is held against may not depend on which token it is: where another one would have begun
        a step, the end token does.
        """
        return as_if_going_on(self.step_boundaries, response)

    def alphabet(self) -> str:
        """Every character that prompts and responses may hold, for the character tokenizer.

        Raises ValueError for a task in natural language.
        """
        raise ValueError(f"task {type(self).__name__} has no small alphabet: use a real tokenizer")
