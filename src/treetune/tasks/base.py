"""Tasks: problems in splits, demonstrations, step boundaries, and a grader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from annotated_types import Gt
from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.tasks.drawing import Drawing, draw_problems, further_problems
from treetune.tasks.graders.base import Grader
from treetune.tasks.steps import as_if_going_on, ends_of_lines
from treetune.vocabulary import Metrics, Problem

Split = Literal["train", "validation", "test"]
Params = TypeVar("Params")


def check_split(split: str) -> None:
    """Raises ValueError for a word that is no split."""
    if split not in get_args(Split):
        raise ValueError(f"no split {split!r}: choose one of {', '.join(get_args(Split))}")


class Task(Registrable):
    """A source of problems. Sub-classes are frozen dataclasses whose fields are configuration."""

    grader: Grader

    def problems(self, split: Split) -> Sequence[Problem]:
        """Returns all problems of a split, always in the same order; never empty (ValueError)."""
        raise NotImplementedError

    def size(self, split: Split) -> int | None:
        """Returns how many problems a split has, or None where counting them takes reading.

        Raises NoSplit for a split that the configuration doesn't have.
        """
        return None

    def of(self, problem: Problem) -> Task:
        """Returns the task that a problem belongs to: this one, or in a mixture the domain's. Callers that
        need the steps, the demonstration or the sampling of a problem ask that one."""
        return self

    def parts(self) -> Sequence[Task]:
        """Returns all tasks that `of` may return."""
        return (self,)

    @property
    def remembers_pass_rates(self) -> bool:
        """True where `draw` reads how earlier iterations did on single problems."""
        return False

    def domain_names(self) -> Sequence[str] | None:
        """Returns the domains of its problems: empty where there are none, None where only rows know."""
        return ()

    def sampling(self, params: Params) -> Params:
        """Returns how answers are sampled, given the rollout's `SamplingParams`: in a mixture a domain has
        its own stop strings and budget of tokens."""
        return params

    def draw(self, problems: Sequence[Problem], count: int, drawing: Drawing) -> list[Problem]:
        """Draws an iteration's problems from all training problems; see `draw_problems`."""
        return draw_problems(problems, count, drawing.seed, drawing.iteration, drawing.replacement)

    def draw_further(
        self, problems: Sequence[Problem], taken: Sequence[Problem], drawing: Drawing
    ) -> list[Problem]:
        """Returns the problems that the iteration has not `taken`, in the order in which it may ask for
        more."""
        return further_problems(problems, taken, drawing.seed, drawing.iteration)

    def drawing_metrics(self, problems: Sequence[Problem], drawing: Drawing) -> Metrics:
        """Returns metrics of how problems are drawn."""
        return {}

    def examples(self, count: int) -> Sequence[Problem]:
        """Returns up to `count` problems of this kind that are made or read at once; perhaps none."""
        return ()

    def check_demonstrations(self) -> None:
        """Raises ValueError for a task without demonstrations, as far as its configuration says."""
        if type(self).demonstration is Task.demonstration:
            raise ValueError(f"task {type(self).__name__} has no demonstrations to learn from")

    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns a response to learn from, sampled with `seed` where the teacher is noisy.

        Raises ValueError for a task that has none.
        """
        raise ValueError(f"task {type(self).__name__} has no demonstrations to learn from")

    def sequential_demonstration(self, problem: Problem, seed: int) -> str:
        """Returns a response without threads, whatever form demonstrations have: the baseline for the
        latency of answers that fork.

        Raises ValueError for a task that has no demonstrations.
        """
        return self.demonstration(problem, seed)

    def step_boundaries(self, response: str) -> list[int]:
        """Returns character offsets between steps: strictly rising from 0 to ``len(response)``.

        Lossless for every string; an empty response gives ``[0]``.
        """
        raise NotImplementedError

    def answer_boundaries(self, response: str) -> list[int]:
        """Returns the boundaries of an answer that ends here, from 0 to ``len(response)``: those that it
        would have if it went on in another line. A boundary at its very end is listed twice, since the end
        token is then a step of its own.

        A token's baseline may not depend on which token it is: where another one would have begun a step,
        the end token does.
        """
        return as_if_going_on(self.step_boundaries, response)

    @property
    def boundaries_look_back(self) -> bool:
        """Whether `answer_boundaries` depend on nothing behind them, so that Monte-Carlo credit that goes by
        them has the policy's gradient."""
        return True

    def alphabet(self) -> str:
        """Returns every character that prompts and responses may hold, for the character tokenizer.

        Raises ValueError for a task in natural language.
        """
        raise ValueError(f"task {type(self).__name__} has no small alphabet: use a real tokenizer")


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """Problems made on the spot. The splits are stretches of one sequence of different problems, of which
    the held-out ones come first: they stay when `train_size` changes."""

    train_size: Annotated[int, Gt(0)]
    """Problems to train on."""
    validation_size: Annotated[int, Gt(0)]
    """Problems of the validation split."""
    test_size: Annotated[int, Gt(0)]
    """Problems of the test split."""

    ranges: ClassVar[tuple[str, ...]] = ()
    """The keys that are pairs of the fewest and the most, or of the smallest and the largest."""

    def __post_init__(self) -> None:
        for name in self.ranges:
            least, most = getattr(self, name)
            if least > most:
                raise ValueError(f"{name} is [{least}, {most}]: give the smaller one first")

    def generate(self, count: int) -> Sequence[Any]:
        """Returns what the first `count` problems of all splits are made from. The first ones don't depend
        on `count`. Raises ValueError where there are fewer."""
        raise NotImplementedError

    def problem(self, id: str, generated: Any) -> Problem:
        """Returns the problem that is made from one of these."""
        raise NotImplementedError

    def sizes(self) -> dict[Split, int]:
        return {"test": self.test_size, "validation": self.validation_size, "train": self.train_size}

    @override
    def size(self, split: Split) -> int:
        return self.sizes()[split]

    @override
    def problems(self, split: Split) -> Sequence[Problem]:
        check_split(split)
        return _problems(self, split)

    def made(self, split: Split) -> Sequence[Problem]:
        """Makes the problems of a split; `problems` keeps them."""
        start = 0
        for name, size in self.sizes().items():
            if name == split:
                break
            start += size
        generated = self.generate(sum(self.sizes().values()))[start : start + self.size(split)]
        return [self.problem(f"{split}/{index}", puzzle) for index, puzzle in enumerate(generated)]

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        return [self.problem(f"example/{index}", puzzle) for index, puzzle in enumerate(self.generate(count))]

    @override
    def step_boundaries(self, response: str) -> list[int]:
        """Returns the ends of lines: a step is a line with the newline that ends it."""
        return ends_of_lines(response)


@lru_cache(maxsize=64)
def _problems(task: GeneratedTask, split: Split) -> tuple[Problem, ...]:
    return tuple(task.made(split))
