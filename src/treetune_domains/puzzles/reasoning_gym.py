"""The data sets of the library reasoning_gym as tasks."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, MinLen

from treetune.config.errors import nearest
from treetune.contracts import Experiment, Finding
from treetune.seeds import derived_random
from treetune.tasks.base import Split, Task
from treetune.tasks.steps import ends_of_lines
from treetune.vocabulary import Problem
from treetune_domains.graders.reasoning_gym import ReasoningGymGrader
from treetune_domains.puzzles.reasoning_gym_library import (
    COMPOSITE,
    INSTALL,
    NotTaken,
    data_sets,
    made,
    missing_packages,
)

QUESTION = "{question}"
GRADER = ReasoningGymGrader()

PROMPT = (
    "{question}\n\nThink first, and end with the answer alone between <answer> and </answer>. Where an"
    " example is given, write the answer in the form that it has."
)
"""Asks a model that was trained to follow instructions; the chat template goes around it."""


@Task.register("reasoning_gym")
@dataclass(frozen=True, kw_only=True)
class ReasoningGym(Task):
    """Problems that the library reasoning_gym makes on the spot, scored by its own scorers.

    `dataset` is the library's name of a data set, and `config` its settings. How hard it is can also be
    said by the library's levels, where it has some: `level` for all that its curriculum changes, at the most
    up to the last level of each, `levels` for some of it by name. With `level_mode` ``inclusive`` a range
    goes from the easiest level up to the chosen one, with ``upper_bound`` it is the chosen one alone.
    `config` has the last word.

    Each split has derived seeds of its own, and no question is in two splits or twice in one. `seed`
    decides which they are, and is not the run's; those held out don't change with `train_size`. Raises
    ValueError where a data set holds fewer different problems than are asked for.

    A demonstration is the data set's answer alone: there is none for data sets that only score. A
    teacher with `demonstration_noise` p gives the answer to another problem with probability p.

    `prompt` is the template, with ``{question}`` in it. Where `question` is given, a regular expression with
    one group that every question matches somewhere, the prompt holds what the group does: the scorer still
    sees all of it. (A tiny model learns the task from its examples, not from a page of instructions.)
    Of several data sets make a `mixture`.
    """

    dataset: Annotated[str, MinLen(1)]
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    level: Annotated[int, Ge(0)] | None = None
    levels: Mapping[str, int] = field(default_factory=dict, hash=False)
    level_mode: Literal["inclusive", "upper_bound"] = "inclusive"
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    train_size: Annotated[int, Gt(0)] = 2000
    validation_size: Annotated[int, Gt(0)] = 200
    """Problems of the validation split."""
    test_size: Annotated[int, Gt(0)] = 500
    """Problems of the test split."""
    seed: int = 0
    prompt: str = PROMPT
    question: str | None = None
    grader: ReasoningGymGrader = GRADER

    def __post_init__(self) -> None:
        if self.prompt.count(QUESTION) != 1:
            raise ValueError(f"prompt needs {QUESTION} exactly once, where the question goes")
        try:
            groups = 1 if self.question is None else re.compile(self.question).groups
        except re.error as error:
            raise ValueError(f"question is no regular expression ({error})") from error
        if groups != 1:
            raise ValueError(f"question needs one group, for what the prompt holds, and has {groups}")

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        lacking = missing_packages()
        if lacking:
            yield Finding(f"reasoning_gym lacks {', '.join(lacking)}", "type", INSTALL)
            return
        try:
            self._examples(_LOOKED_AT)
        except NotTaken as error:
            yield Finding(error.what, error.key, error.remedy)

    def problems(self, split: Split) -> Sequence[Problem]:
        if split not in get_args(Split):
            raise ValueError(f"no split {split!r}: choose one of {', '.join(get_args(Split))}")
        return _problems(self, split)

    def size(self, split: Split) -> int:
        return self._sizes()[split]

    def examples(self, count: int) -> Sequence[Problem]:
        try:
            return self._examples(max(count, _LOOKED_AT))[:count]
        except NotTaken:
            return ()

    def check_demonstrations(self) -> None:
        if any(not problem.gold for problem in self.examples(1)):
            raise ValueError(
                f"data set {self.dataset!r} has no answers to learn from, it only scores them: choose a"
                " rollout that samples, such as 'single_turn'"
            )

    def demonstration(self, problem: Problem, seed: int) -> str:
        """The answer between the grader's signs; what a noisy teacher says is drawn from `seed`."""
        generator = derived_random(seed, problem.id, "demonstration")
        gold = problem.gold
        if generator.random() < self.demonstration_noise:
            gold = generator.choice(self.problems("train")).gold
        return f"{self.grader.opening}{gold}{self.grader.closing}".rstrip("\n")

    def step_boundaries(self, response: str) -> list[int]:
        """A step is a line with the newline that ends it."""
        return ends_of_lines(response)

    def alphabet(self) -> str:
        """All that can be typed; ValueError where a question or an answer has other signs."""
        typed = set(string.printable) - set("\r\x0b\x0c\t")
        written = "".join(one.prompt + one.gold for one in self.examples(_LOOKED_AT))
        if others := sorted(set(written) - typed):
            raise ValueError(
                f"data set {self.dataset!r} is written with {' '.join(others[:5])} too: use a real tokenizer"
            )
        return "".join(sorted(typed))

    def _examples(self, count: int) -> tuple[Problem, ...]:
        """Raises NotTaken."""
        return self._problems_of(self._made([("example", count)]), "example")

    def _sizes(self) -> dict[Split, int]:
        """The held-out splits come first: they stay when train_size changes."""
        return {"test": self.test_size, "validation": self.validation_size, "train": self.train_size}

    def _made(self, splits: Iterable[tuple[str, int]]) -> dict[str, Any]:
        """Raises NotTaken."""
        if self.dataset not in data_sets():
            raise NotTaken("dataset", *self._unknown())
        request = {
            "dataset": self.dataset,
            "config": self.config,
            "level": self.level,
            "levels": self.levels,
            "level_mode": self.level_mode,
            "seed": self.seed,
        }
        return made(request, list(splits))

    def _unknown(self) -> tuple[str, str]:
        if self.dataset == COMPOSITE:
            return "'composite' is no data set of its own", "make a task 'mixture' of the ones that you want"
        near = nearest(self.dataset, data_sets(), 3)
        return (
            f"reasoning_gym has no data set {self.dataset!r}",
            f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(data_sets())}",
        )

    def _shown(self, question: str) -> str:
        if self.question is None:
            return question
        found = re.search(self.question, question)
        if found is None:
            what = f"{self.question!r} is nowhere in {question!r}"
            raise NotTaken("question", what, "give an expression that every question matches")
        return found[1]

    def _problems_of(self, said: Mapping[str, Any], split: str) -> tuple[Problem, ...]:
        return tuple(
            Problem(
                id=f"{split}/{index}",
                prompt=self.prompt.replace(QUESTION, self._shown(row["question"])),
                gold=row["gold"],
                data={
                    "dataset": self.dataset,
                    "config": said["config"],
                    "question": row["question"],
                    "entry": row["entry"],
                },
            )
            for index, row in enumerate(said["splits"][split])
        )


_LOOKED_AT = 4
"""Problems that a configuration is checked by: they are made once, however often it is asked for some."""


@lru_cache(maxsize=48)
def _problems(task: ReasoningGym, split: Split) -> tuple[Problem, ...]:
    return task._problems_of(task._made(task._sizes().items()), split)
