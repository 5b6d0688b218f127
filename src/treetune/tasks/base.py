"""Tasks: problems in splits, demonstrations, step boundaries, and a grader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, final, get_args

from annotated_types import Gt
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.contracts import Feature, TaskDemonstrations
from treetune.tasks.drawing import DrawingRule
from treetune.tasks.graders.base import Grader
from treetune.tasks.steps import boundaries_if_continued, ends_of_lines
from treetune.vocabulary import Problem

Split = Literal["train", "validation", "test"]
Params = TypeVar("Params")  # `engine.requests.SamplingParams`, which tasks don't import


def check_split(split: str) -> None:
    """Raises ValueError if `split` isn't the name of a split."""
    if split not in get_args(Split):
        raise ValueError(f"there is no split {split!r}: choose one of {', '.join(get_args(Split))}")


class Task(Registrable):
    """A source of problems. Sub-classes are frozen dataclasses whose fields are configuration.

    Every task has a grader, and overrides `problems` and `step_boundaries`. `tasks/mixed.py` has the base
    classes of tasks whose problems belong to domains, and of tasks that consist of several tasks.
    """

    grader: Grader

    # The problems

    def problems(self, split: Split) -> Sequence[Problem]:
        """Returns all problems of a split, always in the same order. Raises ValueError if there are none."""
        raise NotImplementedError

    def size(self, split: Split) -> int | None:
        """Returns the number of problems in a split. Returns None if counting them would take long.

        Raises NoSplit for a split that the configuration doesn't have.
        """
        return None

    def examples(self, count: int) -> Sequence[Problem]:
        """Returns at most `count` example problems for checks, without slow work. By default, returns
        none."""
        return ()

    def drawing_rule(self) -> DrawingRule:
        """Returns the rule by which an iteration's problems are drawn. By default all problems are equally
        likely."""
        return DrawingRule()

    # Answers

    def adjust_sampling(self, params: Params) -> Params:
        """Returns the `SamplingParams` of this task's answers. `params` are those of the rollout, and are
        returned unchanged by default.

        A task of a mixture may set its own stop strings and its own limit on tokens.
        """
        return params

    def step_boundaries(self, response: str) -> list[int]:
        """Returns the character offsets of the boundaries between steps, strictly rising from 0 to
        ``len(response)``. An empty response gives ``[0]``.

        Example: ``[0, 4, 8]`` for the two lines ``a=1\\nb=2\\n``.
        """
        raise NotImplementedError

    @property
    def boundaries_look_back(self) -> bool:
        """True if each of `answer_boundaries` depends only on the text before it.

        If this is False, Monte Carlo credit with these boundaries has a biased gradient.
        """
        return True

    @final
    def answer_boundaries(self, response: str) -> list[int]:
        """Returns the step boundaries of an answer that ends here, from 0 to ``len(response)``.

        The end token comes after `response`, and isn't in it. It must begin a step if another token after
        `response` would begin a step, since the baseline of a token must not depend on which token it is. So
        this method appends another line to find out whether `response` ends where a step ends. If it does,
        the offset ``len(response)`` is listed twice: the end token is a step of its own.

        Example: ``[0, 4, 8, 8]`` for ``a=1\\nb=2\\n``, and ``[0, 4, 7]`` for ``a=1\\nb=2``.

        If `boundaries_look_back` is False, the end token belongs to the last step.
        """
        if self.boundaries_look_back:
            return boundaries_if_continued(self.step_boundaries, response)
        return self.step_boundaries(response)

    # Demonstrations, and what a small model needs to learn from them

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        """`TaskDemonstrations` if the class overrides `demonstration`."""
        has_demonstrations = type(self).demonstration is not Task.demonstration
        return (TaskDemonstrations(),) if has_demonstrations else ()

    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns a response to imitate. `seed` decides its random errors, if demonstrations have any.

        Raises ValueError for a task without demonstrations.
        """
        raise ValueError(f"task {type(self).__name__} has no demonstrations to learn from")

    def sequential_demonstration(self, problem: Problem, seed: int) -> str:
        """Returns a demonstration in which nothing is written in parallel, even if `demonstration` forks into
        parallel threads. Its latency is the baseline for answers that fork.

        Raises ValueError for a task without demonstrations.
        """
        return self.demonstration(problem, seed)

    def alphabet(self) -> str:
        """Returns every character that prompts and responses may contain, for the character tokenizer.

        Raises ValueError for a task in natural language.
        """
        raise ValueError(f"task {type(self).__name__} has no small alphabet: use a real tokenizer")


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """A task that generates its problems. The splits are consecutive sections of one sequence of different
    problems. The test and validation splits come first, so that they don't depend on `train_size`."""

    train_size: Annotated[int, Gt(0)]
    """The number of problems to train on."""
    validation_size: Annotated[int, Gt(0)]
    """The number of problems of the validation split."""
    test_size: Annotated[int, Gt(0)]
    """The number of problems of the test split."""

    ranges: ClassVar[tuple[str, ...]] = ()
    """The names of fields that are pairs of a minimum and a maximum."""

    def __post_init__(self) -> None:
        for name in self.ranges:
            smallest, largest = getattr(self, name)
            if smallest > largest:
                raise ValueError(f"{name} is [{smallest}, {largest}]: give the smaller one first")

    def generate(self, count: int) -> Sequence[Any]:
        """Returns the raw data of the first `count` problems, such as their operands. The method `problem`
        makes a `Problem` of each item.

        A smaller `count` must give the first items of a larger one. Raises ValueError if there are fewer than
        `count` problems.
        """
        raise NotImplementedError

    def problem(self, id: str, generated: Any) -> Problem:
        """Makes a problem with this id from one item of `generate`."""
        raise NotImplementedError

    def sizes(self) -> dict[Split, int]:
        """Returns the size of each split, in the order of the splits in the generated sequence."""
        return {"test": self.test_size, "validation": self.validation_size, "train": self.train_size}

    @override
    def size(self, split: Split) -> int:
        return self.sizes()[split]

    @override
    def problems(self, split: Split) -> Sequence[Problem]:
        check_split(split)
        return _cached_problems(self, split)

    def make_problems(self, split: Split) -> Sequence[Problem]:
        """Makes the problems of a split. `problems` caches them."""
        # The splits are consecutive slices of one sequence of different problems, so none is in two splits.
        sizes = self.sizes()
        start = 0
        for name, size in sizes.items():
            if name == split:
                break
            start += size
        # Every split asks for the whole sequence, since `generate` may cache its result by the count.
        sequence = self.generate(sum(sizes.values()))
        of_split = sequence[start : start + sizes[split]]
        return [self.problem(f"{split}/{index}", value) for index, value in enumerate(of_split)]

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        generated = self.generate(min(count, sum(self.sizes().values())))
        return [self.problem(f"example/{index}", value) for index, value in enumerate(generated)]

    @override
    def step_boundaries(self, response: str) -> list[int]:
        """Returns the ends of lines. A step is a line with the newline that ends it."""
        return ends_of_lines(response)


@lru_cache(maxsize=64)
def _cached_problems(task: GeneratedTask, split: Split) -> tuple[Problem, ...]:
    return tuple(task.make_problems(split))
