"""Tasks whose problems are rows of data sets: in files of JSON lines or Parquet, or from the hub."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, MinLen

from treetune.contracts import Finding
from treetune.seeds import derived_random
from treetune.tasks.base import NoSplit, Split, Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.numeric import Numeric
from treetune.tasks.sources import Row, Source, count_rows, json_lines, read_rows
from treetune.tasks.steps import Lines, StepSplitter
from treetune.vocabulary import Problem

QUICKLY_READ = 4_000_000
"""Bytes of a file that is read while a configuration is checked."""

PROBLEM = "{problem}"

PROMPT = "[MATH_TASK] Problem:\n{problem}\n\nSolution:"
"""The VinePPO paper's zero-shot prompt. Nothing follows the colon: a response begins with a newline."""

STOP = ("\n\n\nProblem:",)
"""Where the paper's models would go on with a problem of their own making."""

NUMERIC, LINES = Numeric(), Lines()
_CALCULATION = re.compile(r"<<[^<>\n]*>>")

log = logging.getLogger(__name__)


class BadRow(ValueError):
    """A row that is no problem of its task; the message says what it lacks."""


@dataclass(frozen=True, kw_only=True)
class RowsTask(Task):
    """Problems from files, with one JSON object a line or in Parquet (``.parquet``), or from a data set."""

    train: tuple[str, ...] = ()
    """Files to train on, relative to the working directory; several are read one after the other."""
    validation: tuple[str, ...] = ()
    """Files of the validation split."""
    test: tuple[str, ...] = ()
    """Files of the test split."""
    source: Source | None = None
    """A Hugging Face data set, on disk or from the hub: all splits come from there and no file is read."""
    validation_size: Annotated[int, Gt(0)] | None = None
    """Hold so many problems out of train for validation. Both parts keep the order of the rows."""
    split_seed: int = 0
    """Decides which problems are held out. It is not the run's: every run is measured on the same ones."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Whether a row that is no problem stops the run, or is left out with a warning."""
    steps: StepSplitter = LINES
    """How answers are cut into steps."""

    def __post_init__(self) -> None:
        if self.validation and self.validation_size is not None:
            raise ValueError(
                "validation names files and validation_size holds problems out of the train files: "
                "leave one of them out"
            )

    def size(self, split: Split) -> int | None:
        held_out = self.validation_size if split != "test" else None
        if split == "validation" and held_out is not None:
            return held_out
        rows = self._count(split)
        if rows is None or held_out is None:
            return rows
        return rows - held_out if rows > held_out else None  # `check` reports that it holds out too many

    def check(self, experiment: Any) -> Iterator[Finding]:
        rows = self._count("train") if self.train and self.validation_size else None
        if rows is not None and self.validation_size is not None:
            try:
                _check_held_out(self.validation_size, rows)
            except ValueError as error:
                yield Finding.of(error, "validation_size")

    def _count(self, split: Split) -> int | None:
        """Returns how many rows there are, where they are counted at once. Raises NoSplit."""
        if self.source is not None:
            self.source.name_of(split)
            return None
        files = [Path(name) for name in self._files(split)]
        if not all(is_quickly_read(file) for file in files):
            return None
        return sum(map(count_rows, files))

    def missing(self) -> Sequence[str]:
        names = () if self.source else (*self.train, *self.validation, *self.test)
        return [name for name in names if not Path(name).is_file()]

    def examples(self, count: int) -> Sequence[Problem]:
        for name in () if self.source else (*self.train, *self.validation, *self.test):
            if is_quickly_read(path := Path(name)):
                rows = itertools.islice(file_rows(path, self.columns), count)
                try:
                    return [self.problem_of(row, f"example/{number}") for number, (_, row) in enumerate(rows)]
                except ValueError:  # reported with its place when the split is read
                    return ()
        return ()

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns of a Parquet file that are read; None: all of them."""
        return None

    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        """Returns the row's problem. Raises BadRow for a row that holds none."""
        raise NotImplementedError

    def problems(self, split: Split) -> Sequence[Problem]:
        """Returns a split. Raises ValueError for one that is missing or holds no problem, and for a bad
        row."""
        if split not in get_args(Split):
            raise ValueError(f"no split {split!r}: choose one of {', '.join(get_args(Split))}")
        return _problems(self, split)

    def step_boundaries(self, response: str) -> list[int]:
        return self.steps.boundaries(response)

    def answer_boundaries(self, response: str) -> list[int]:
        return self.steps.answer_boundaries(response)

    @property
    def boundaries_look_back(self) -> bool:
        return self.steps.end_token == "own_step"

    def _files(self, split: Split) -> tuple[str, ...]:
        names: tuple[str, ...] = {"train": self.train, "validation": self.validation, "test": self.test}[
            split
        ]
        if not names:
            remedy = " or set validation_size, to hold problems out of train" if split == "validation" else ""
            raise NoSplit(f"the task has no {split} split: name its files under {split!r}{remedy}")
        return names

    def _read(self, split: Split) -> list[Problem]:
        """Reads all problems of the files, or of the data set's split."""
        if self.source is not None:
            rows = self.source.rows(split)
        else:
            files = map(Path, self._files(split))
            rows = itertools.chain.from_iterable(file_rows(path, self.columns) for path in files)
        problems: list[Problem] = []
        place = ""
        for place, row in rows:
            try:
                problems.append(self.problem_of(row, f"{split}/{len(problems)}"))
            except BadRow as error:
                message = f"{place}: {error}"
                if self.bad_rows == "stop":
                    raise ValueError(f"{message}; put it right, or set bad_rows to 'skip'") from None
                log.warning("%s; left out", message)
        if not problems:
            where = f"no good row up to {place}" if place else "there are no rows in it"
            raise ValueError(f"the {split} split is empty: {where}")
        return problems


@lru_cache(maxsize=64)
def _problems(task: RowsTask, split: Split) -> tuple[Problem, ...]:
    size = task.validation_size
    if split == "test" or size is None:
        return tuple(task._read(split))
    problems = task._read("train")
    _check_held_out(size, len(problems))
    held_out = set(derived_random(task.split_seed, "validation").sample(range(len(problems)), size))
    # Ids stay those of the rows.
    return tuple(one for index, one in enumerate(problems) if (index in held_out) is (split == "validation"))


def _check_held_out(size: int, problems: int) -> None:
    if size >= problems:
        raise ValueError(
            f"validation_size is {size}, but the train split holds {problems} problems: "
            "hold out fewer than there are"
        )


def file_rows(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    """Yields the rows of a file. Raises ValueError for one that is not there or can't be read."""
    return read_rows(path, columns) if path.suffix == ".parquet" else json_lines(path)


def is_quickly_read(path: Path) -> bool:
    """Returns whether the first rows and the number of rows are known at once."""
    return path.is_file() and (path.suffix == ".parquet" or path.stat().st_size <= QUICKLY_READ)


@dataclass(frozen=True, kw_only=True)
class JsonLines(RowsTask):
    """Rows with the text of a problem and a gold answer. `RowsTask` explains where rows come from and how
    some are held out."""

    problem_field: Annotated[str, MinLen(1)] = "question"
    """The key of a row's problem."""
    gold_field: Annotated[str, MinLen(1)] = "answer"
    """The key of the gold. It stays as the data set has it, a worked solution or a bare answer: graders take
    the answer out of it."""
    gold_fallback: str | None = None
    """Another key of the gold, for rows that don't have the first one."""
    demonstration_field: str | None = None
    """The key of the demonstration; null: the gold is the demonstration too."""
    keep: tuple[str, ...] = ()
    """Keys of rows that go into `Problem.data` as they are."""
    prompt: str = PROMPT
    """The template, with ``{problem}`` where the problem goes."""
    stop: tuple[str, ...] = STOP
    """The stop strings that go with the template; a rollout names them as its own `stop`."""
    grader: Grader

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt.count(PROBLEM) != 1:
            raise ValueError(f"prompt needs {PROBLEM} exactly once, where the problem goes")
        if "" in self.stop:
            raise ValueError("stop has an empty string, which would end every answer at once")

    def prompted(self, problem: str) -> str:
        """Returns the problem in the template. (Not by `str.format`: problems are full of braces.)"""
        return self.prompt.replace(PROBLEM, problem.strip())

    def demonstration(self, problem: Problem, seed: int) -> str:
        """Returns the data set's own solution, on the line below the prompt; the seed changes nothing."""
        return "\n" + self.solution(str(problem.data["solution"]).strip())

    def solution(self, text: str) -> str:
        """Returns the data set's solution as a model should write it."""
        return text

    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        gold_field, other = self.gold_field, self.gold_fallback
        if other is not None and missing(row, gold_field) and not missing(row, other):
            gold_field = other
        fields = {"problem": self.problem_field, "gold answer": gold_field}
        if self.demonstration_field is not None:
            fields["demonstration"] = self.demonstration_field
        for what, key in fields.items():
            wrong = missing(row, key)
            if wrong is not None:
                raise BadRow(f"a row without a {what}: {wrong}")
        solution = as_text(row[self.demonstration_field or gold_field])
        return Problem(
            id=id,
            prompt=self.prompted(as_text(row[self.problem_field])),
            gold=as_text(row[gold_field]),
            data={**{key: row[key] for key in self.keep if key in row}, "solution": solution},
        )


def missing(row: dict[str, Any], key: str) -> str | None:
    """Returns what is wrong with a row's text under `key`, or None: numbers count as text."""
    if key not in row:
        return f"it has no {key!r} (it has {', '.join(map(repr, sorted(row))) or 'nothing'})"
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return f"its {key!r} is {type(value).__name__}, not text"
    return None if str(value).strip() else f"its {key!r} is empty"


def as_text(value: str | int | float) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@Task.register("gsm8k")
@dataclass(frozen=True, kw_only=True)
class Gsm8k(JsonLines):
    """GSM8K, grade-school word problems (Cobbe et al., 2021, arXiv:2110.14168), in the data set's own files,
    with `question` and `answer` in each row.

    373 of the 7,473 training problems are held out for validation, as many as in the VinePPO
    paper (7,100 / 373 / 1,319), chosen here with `split_seed`: not the paper's own 373.
    Demonstrations have no ``<<1+1=2>>`` calculator notes.
    """

    train: tuple[str, ...] = ("data/gsm8k/train.jsonl",)
    test: tuple[str, ...] = ("data/gsm8k/test.jsonl",)
    validation_size: Annotated[int, Gt(0)] | None = 373
    grader: Grader = NUMERIC

    def solution(self, text: str) -> str:
        return _CALCULATION.sub("", text)
