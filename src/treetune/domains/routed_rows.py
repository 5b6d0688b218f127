"""A task of rows from many data sets, each of which is graded according to its ``data_source``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import MinLen
from typing_extensions import override

from treetune.config.errors import nearest
from treetune.contracts import Feature, Finding, TaskDemonstrations
from treetune.domains.domain_rows import (
    ABILITY,
    DATA_SOURCE,
    HIGH_PASS_RATE,
    LOW_PASS_RATE,
    SCHEMA,
    domain_of,
    domain_row,
    normalise_row,
    write_parquet,
)
from treetune.domains.domain_rows import problem_of as problem_of_normal_row
from treetune.domains.graders.routed import BySource
from treetune.domains.mixture import DomainTask
from treetune.exceptions import BadRow, NoSplit
from treetune.tasks.base import Split, Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.mixed import TaskWithDomains, task_of
from treetune.tasks.rows import QUICKLY_READ_BYTES, RowsTask, check_stop, is_quickly_read, read_file_rows
from treetune.tasks.sources import InFiles, distinct_texts
from treetune.vocabulary import Problem


@Task.register("rows")
@dataclass(frozen=True, kw_only=True)
class RoutedRows(RowsTask, TaskWithDomains):
    """Rows in the schema of verl and Reasoning360: `data_source`, `prompt` (messages), `ability`,
    `reward_model` with its `ground_truth`, `extra_info`, `apply_chat_template`. `RowsTask` explains where
    they come from and how some are held out.

    If a row's ``apply_chat_template`` is false, its ``raw_prompt`` (or, if that is missing, its prompt) is
    the text that the model reads. Other rows are a chat if the model has a chat template. `Problem.data` has
    the keys of the row's ``extra_info``, its source, its ability, and the columns that `keep` names.
    """

    routes: Annotated[Mapping[str, Grader], MinLen(1)] = field(hash=False)
    """Graders by the beginning of a row's ``data_source``. The longest beginning that matches decides, and an
    empty one matches all. A source without a route is reported before the run."""
    domain: Mapping[str, str] | Literal["data_source", "ability"] | None = field(
        default="data_source", hash=False
    )
    """The domain of a row, for which metrics are also reported: its ``data_source`` up to ``__``, its
    ``ability``, a name by the beginning of its source (the longest that matches), or none. In a mixture, rows
    belong to the mixture's domain."""
    keep: tuple[str, ...] = (LOW_PASS_RATE, HIGH_PASS_RATE)
    """Columns outside of the schema that go into `Problem.data`."""
    demonstration_field: str | None = None
    """The key of `Problem.data` with the demonstration for SFT."""
    stop: tuple[str, ...] = ()
    """The strings that end an answer if this task is a domain of a mixture. Outside of a mixture only the
    rollout's own `stop` counts: name them there."""

    @cached_property
    @override
    def grader(self) -> Grader:  # type: ignore[override]
        return BySource(routes=self.routes)

    @property
    @override
    def columns(self) -> tuple[str, ...]:
        return (*SCHEMA, *self.keep)

    @override
    def check(self, experiment: Any) -> Iterator[Finding]:
        yield from check_stop(self, self.stop, experiment)
        findings_of_rows = list(super().check(experiment))
        yield from findings_of_rows
        if any(finding.level == "error" for finding in findings_of_rows):
            return  # the files below can't be read
        first_files: dict[str, Path] = {}  # the first file that has each source, for the message
        # Large files, except Parquet files, are not read while a configuration is checked.
        for path in filter(is_quickly_read, self._list_files()):
            try:
                sources = distinct_texts(path, DATA_SOURCE)
                # Of a large Parquet file, only the column of the sources is read.
                if self.bad_rows == "stop" and path.stat().st_size <= QUICKLY_READ_BYTES:
                    _check_rows(path, self.columns)
            except BadRow as error:
                yield Finding(str(error), "train", "fix the row, or set bad_rows to 'skip'")
                return
            except ValueError as error:
                yield Finding.of(error, "train")
                return
            first_files = dict.fromkeys(sources, path) | first_files  # an earlier file takes precedence
        unknown = [source for source in first_files if BySource(routes=self.routes).route(source) is None]
        if unknown:
            unknown_sources = ", ".join(f"{source!r}{self._suggest_route(source)}" for source in unknown)
            yield Finding(
                f"no route matches the data_source {unknown_sources}, first in {first_files[unknown[0]]};"
                f" the rows' sources are {', '.join(sorted(first_files))}, and routes are"
                f" {', '.join(map(repr, sorted(self.routes)))}",
                "routes",
                "add a route with the beginning of its name, or '' for all other sources",
            )

    @override
    def domain_names(self) -> Sequence[str] | None:
        if self.domain is None:
            return ()
        # None: only the rows themselves have the names.
        return sorted(set(self.domain.values())) if isinstance(self.domain, Mapping) else None

    def _list_files(self) -> list[Path]:
        """Returns the files of all splits; none if the rows come from elsewhere, as from a hub."""
        if self.source is None:
            return [Path(name) for name in (*self.train, *self.validation, *self.test)]
        paths: list[Path] = []
        if isinstance(self.source, InFiles):
            for split in get_args(Split):
                with contextlib.suppress(ValueError):  # reported when the split is read
                    paths += self.source.files(split)
        return paths

    def _suggest_route(self, source: str) -> str:
        """Returns `` (did you mean the route 'math'?)`` for a route that is similar to the beginning of the
        source; an empty text if there is none."""
        # A route is the beginning of a source, so only as many characters of the source are compared.
        similar = [route for route in self.routes if nearest(source[: len(route)], [route])]
        return f" (did you mean the route {max(similar, key=len)!r}?)" if similar else ""

    def _domain_of_row(self, row: Mapping[str, Any]) -> str:
        """Returns the domain of a row according to the setting `domain`; an empty text if the row has
        none."""
        if self.domain == "data_source":
            return domain_of(row[DATA_SOURCE])  # "math" of the source "math__dapo"
        if self.domain == "ability":
            return str(row[ABILITY])
        if self.domain is None:
            return ""
        # The setting has domains by the beginnings of sources. The longest beginning decides.
        prefixes = [prefix for prefix in self.domain if row[DATA_SOURCE].startswith(prefix)]
        return self.domain[max(prefixes, key=len)] if prefixes else ""

    @override
    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        try:
            row = normalise_row(row)
        except ValueError as error:
            raise BadRow(str(error)) from error
        source = row[DATA_SOURCE]
        if BySource(routes=self.routes).route(source) is None:
            # No BadRow: the setting `bad_rows` may skip bad rows, but here `routes` is at fault.
            raise ValueError(
                f"no route matches the data_source {source!r}{self._suggest_route(source)} of {id}, and"
                f" routes are {', '.join(map(repr, sorted(self.routes)))}: add a grader for it to routes"
            )
        problem = problem_of_normal_row(row, id)
        further_data = {name: row[name] for name in self.keep if name in row}
        return replace(problem, data={**problem.data, **further_data}, domain=self._domain_of_row(row))

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        if self.demonstration_field is None:
            why_none = "demonstration_field is null: set it to a key of the rows' extra_info"
            return (TaskDemonstrations(why_none),)
        return (TaskDemonstrations(),)

    @override
    def demonstration(self, problem: Problem, seed: int) -> str:
        if self.demonstration_field is None:
            raise ValueError(
                "these rows have no demonstrations to learn from: name a key of their extra_info as"
                " demonstration_field"
            )
        demonstration = problem.data.get(self.demonstration_field)
        if not isinstance(demonstration, str):
            keys = ", ".join(map(repr, problem.data))
            raise ValueError(
                f"problem {problem.id!r} has no text under {self.demonstration_field!r} to learn from: name"
                f" one of {keys} as demonstration_field"
            )
        return demonstration

    @override
    def alphabet(self) -> str:
        """Returns the characters of prompts, golds and demonstrations. All rows are read for this.

        Raises ValueError for large files, for rows that don't come from files in `train`, `validation` and
        `test`, and for rows without demonstrations.
        """
        files = [Path(name) for name in (*self.train, *self.validation, *self.test)]
        if absent := [finding.what for finding in self.missing_rows()]:
            raise ValueError(f"{absent[0]}; a model of characters needs those of this file")
        are_small = all(file.stat().st_size <= QUICKLY_READ_BYTES for file in files)
        are_in_files = bool(files) and self.source is None
        if not are_in_files or not are_small or self.demonstration_field is None:
            raise ValueError(
                "these rows may contain any character: name those of prompts and answers in model.alphabet,"
                " or use a real tokenizer"
            )
        characters: set[str] = set()
        for split in get_args(Split):
            with contextlib.suppress(NoSplit):
                for problem in self.problems(split):
                    # A row's demonstration doesn't depend on the seed.
                    characters.update(problem.prompt, problem.gold, self.demonstration(problem, seed=0))
        return "".join(sorted(characters))


def _check_rows(path: Path, columns: Sequence[str]) -> None:
    """Raises BadRow, with the location, for the first row of a file that doesn't match the schema."""
    for file_and_line, row in read_file_rows(path, columns):
        try:
            normalise_row(row)
        except ValueError as error:
            raise BadRow(f"{file_and_line}: {error}") from error


def export_rows(task: Task, split: Split, path: Path) -> int:
    """Writes a split of any task to a Parquet file, with a row for each problem, and returns their number.

    A row's ``data_source`` is that of the problem. For a problem without a source, it is the domain and the
    type of the task (``logic__countdown``). ``extra_info`` has the problem's `data`, its ``split``, ``index``
    and ``id``. Raises ValueError for a split that the task doesn't have.
    """
    rows = []
    for index, problem in enumerate(task.problems(split)):
        data = dict(problem.data)
        task_of_problem = task_of(task, problem)
        if isinstance(task_of_problem, DomainTask):  # the wrapper of a mixture's task, which has no type
            task_of_problem = task_of_problem.task
        name = type(task_of_problem).registered_name()
        source = data.pop(DATA_SOURCE, None) or f"{problem.domain or 'task'}__{name}"
        ability = data.pop(ABILITY, "") or problem.domain
        # Pass rates are separate columns, and not keys of `extra_info`.
        rates = {key: data.pop(key) for key in (LOW_PASS_RATE, HIGH_PASS_RATE) if key in data}
        row = domain_row(
            source,
            [vars(message) for message in problem.messages] or problem.prompt,
            problem.gold,
            ability=ability,
            extra_info={**data, "split": split, "index": index, "id": problem.id},
            # A prompt that the model gets as it is, without a chat template, is a text.
            raw_prompt=problem.prompt if problem.as_is else "",
            apply_chat_template=not problem.as_is,
        )
        rows.append({**row, **rates})
    write_parquet(path, rows)
    return len(rows)
