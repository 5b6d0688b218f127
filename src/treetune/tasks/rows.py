"""Tasks whose problems are rows of data sets, whatever a row says."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt

from treetune.contracts import Finding
from treetune.seeds import derived_random
from treetune.tasks.base import NoSplit, Split, Task
from treetune.tasks.sources import Row, Source, count_rows, json_lines, read_rows
from treetune.vocabulary import Problem

QUICKLY_READ = 4_000_000
"""Bytes of a file that is read while a configuration is checked."""

log = logging.getLogger(__name__)


class BadRow(ValueError):
    """A row that is no problem of its task; says what it lacks."""


@dataclass(frozen=True, kw_only=True)
class RowsTask(Task):
    """Problems from files, with one JSON object a line or in Parquet (``.parquet``), or from a data set.

    `train`, `validation` and `test` name the files of each split, relative to the working
    directory; several files are read one after the other. Where `source` is given (a Hugging Face
    data set, on disk or from the hub), all splits come from there and no file is read. With
    `validation_size`, the validation split is that many problems held out of train, chosen with
    `split_seed`, which is not the run's seed: every run is measured on the same problems. Both
    parts keep the order of the rows.

    A row that is no problem stops the run, or is left out with a warning where `bad_rows` is ``skip``.
    """

    train: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    source: Source | None = None
    validation_size: Annotated[int, Gt(0)] | None = None
    split_seed: int = 0
    bad_rows: Literal["stop", "skip"] = "stop"

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
        rows = self._rows(split)
        if rows is None or held_out is None:
            return rows
        return rows - held_out if rows > held_out else None  # `check` tells that it holds out too many

    def check(self, experiment: Any) -> Iterator[Finding]:
        rows = self._rows("train") if self.train and self.validation_size else None
        if rows is not None and self.validation_size is not None:
            try:
                _check_held_out(self.validation_size, rows)
            except ValueError as error:
                yield Finding.of(error, "validation_size")

    def _rows(self, split: Split) -> int | None:
        """How many rows there are, where they are counted at once. Raises ValueError for no such split."""
        if self.source is not None:
            self.source.name_of(split)
            return None
        files = [Path(name) for name in _files(self, split)]
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
                except ValueError:  # told with its place when the split is read
                    return ()
        return ()

    @property
    def columns(self) -> tuple[str, ...] | None:
        """What is read of a row where columns are apart; None: all of it."""
        return None

    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        """Raises BadRow for a row that holds none."""
        raise NotImplementedError

    def problems(self, split: Split) -> Sequence[Problem]:
        """Raises ValueError for a split that is missing or holds no problem, and for a bad row."""
        if split not in get_args(Split):
            raise ValueError(f"no split {split!r}: choose one of {', '.join(get_args(Split))}")
        return _problems(self, split)


@lru_cache(maxsize=64)
def _problems(task: RowsTask, split: Split) -> tuple[Problem, ...]:
    if split == "validation" and task.validation_size is not None:
        return tuple(_part(task, held_out=True))
    if split == "train" and task.validation_size is not None:
        return tuple(_part(task, held_out=False))
    return tuple(_read(task, split))


def _part(task: RowsTask, held_out: bool) -> list[Problem]:
    """The train problems that are, or are not, the validation split. Ids stay those of the row."""
    problems = _read(task, "train")
    size = task.validation_size
    assert size is not None
    _check_held_out(size, len(problems))
    chosen = derived_random(task.split_seed, "validation").sample(range(len(problems)), size)
    out = set(chosen)
    return [problem for index, problem in enumerate(problems) if (index in out) is held_out]


def _check_held_out(size: int, problems: int) -> None:
    if size >= problems:
        raise ValueError(
            f"validation_size is {size}, but the train split holds {problems} problems: "
            "hold out fewer than there are"
        )


def _read(task: RowsTask, split: Split) -> list[Problem]:
    problems: list[Problem] = []
    place = ""
    for place, row in task.source.rows(split) if task.source else _from_files(task, split):
        problem = _problem(task, row, f"{split}/{len(problems)}", place)
        if problem is not None:
            problems.append(problem)
    if not problems:
        where = f"no good row up to {place}" if place else "there are no rows in it"
        raise ValueError(f"the {split} split is empty: {where}")
    return problems


def _from_files(task: RowsTask, split: Split) -> Iterator[Row]:
    for name in _files(task, split):
        yield from file_rows(Path(name), task.columns)


def file_rows(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    """Raises ValueError for a file that is not there or can't be read."""
    return read_rows(path, columns) if path.suffix == ".parquet" else json_lines(path)


def is_quickly_read(path: Path) -> bool:
    """Whether the first rows and the number of rows are known at once."""
    return path.is_file() and (path.suffix == ".parquet" or path.stat().st_size <= QUICKLY_READ)


def _files(task: RowsTask, split: Split) -> tuple[str, ...]:
    names: tuple[str, ...] = {"train": task.train, "validation": task.validation, "test": task.test}[split]
    if not names:
        remedy = " or set validation_size, to hold problems out of train" if split == "validation" else ""
        raise NoSplit(f"the task has no {split} split: name its files under {split!r}{remedy}")
    return names


def _problem(task: RowsTask, row: dict[str, Any], id: str, place: str) -> Problem | None:
    try:
        return task.problem_of(row, id)
    except BadRow as error:
        message = f"{place}: {error}"
        if task.bad_rows == "stop":
            raise ValueError(f"{message}; put it right, or set bad_rows to 'skip'") from None
        log.warning("%s; left out", message)
        return None
