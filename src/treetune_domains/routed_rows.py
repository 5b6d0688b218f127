"""Rows of many data sets, each graded by what its ``data_source`` says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import MinLen

from treetune.config.errors import nearest
from treetune.contracts import Finding
from treetune.tasks.base import NoSplit, Split, Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.rows import QUICKLY_READ, BadRow, RowsTask, file_rows, is_quickly_read
from treetune.tasks.sources import InFiles, values_of
from treetune.tasks.steps.base import StepSplitter
from treetune.tasks.steps.lines import Lines
from treetune.vocabulary import Problem
from treetune_domains.domain_rows import (
    ABILITY,
    APPLY_CHAT_TEMPLATE,
    DATA_SOURCE,
    EXTRA_INFO,
    HIGH_PASS_RATE,
    LOW_PASS_RATE,
    PROMPT,
    RAW_PROMPT,
    REWARD_MODEL,
    domain_of,
    normalised,
    problem_of,
)
from treetune_domains.graders.routed import BySource

LINES = Lines()

SCHEMA = (DATA_SOURCE, PROMPT, RAW_PROMPT, ABILITY, APPLY_CHAT_TEMPLATE, REWARD_MODEL, EXTRA_INFO)


@Task.register("rows")
@dataclass(frozen=True, kw_only=True)
class RoutedRows(RowsTask):
    """Rows as verl and Reasoning360 have them: `data_source`, `prompt` (messages), `ability`, `reward_model`
    with its `ground_truth`, `extra_info`, `apply_chat_template`. Where they come from, and what is held out,
    is said in `RowsTask`.

    `routes` are graders by the beginning of a row's ``data_source``: of those that fit, the longest is its
    grader (an empty one fits all). A source without one is told before the run. `domain` is what a row's
    metrics are also taken by: what stands before ``__`` in its ``data_source``, its ``ability``, a name by
    the beginning of its source (the longest that fits), or nothing. As a domain of a mixture, rows are of
    that domain.

    A row whose ``apply_chat_template`` is false is asked as it is (its ``raw_prompt``, where there is one);
    others as a chat, where the model has a chat template. `Problem.data` holds the row's ``extra_info`` under
    its own names, its source, its ability, and those of its columns that `keep` names.

    `demonstration_field` names what SFT learns from, among what `Problem.data` holds. `stop` are the strings
    that end an answer; a rollout names them as its own `stop`.
    """

    routes: Annotated[Mapping[str, Grader], MinLen(1)] = field(hash=False)
    domain: Mapping[str, str] | Literal["data_source", "ability"] | None = field(
        default="data_source", hash=False
    )
    keep: tuple[str, ...] = (LOW_PASS_RATE, HIGH_PASS_RATE)
    demonstration_field: str | None = None
    steps: StepSplitter = LINES
    """How answers are cut into steps."""
    stop: tuple[str, ...] = ()

    @cached_property
    def grader(self) -> Grader:  # type: ignore[override]
        return BySource(routes=self.routes)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*SCHEMA, *self.keep)

    def check(self, experiment: Any) -> Iterator[Finding]:
        yield from super().check(experiment)
        found: dict[str, Path] = {}
        for path in self._at_hand():
            try:
                sources = values_of(path, DATA_SOURCE)
                wrong = self._first_bad_row(path)
            except ValueError as error:
                yield Finding.of(error, "train")
                return
            if wrong:
                yield Finding(wrong, "train", "put the row right, or set bad_rows to 'skip'")
                return
            found = dict.fromkeys(sources, path) | found
        unknown = [source for source in found if self._route(source) is None]
        if unknown:
            shown = ", ".join(f"{source!r}{self._near(source)}" for source in unknown)
            yield Finding(
                f"no route fits the data_source {shown}, first in {found[unknown[0]]}; the rows' sources are"
                f" {', '.join(sorted(found))}, and routes are {self._shown_routes()}",
                "routes",
                "give it a grader by the beginning of its name, or '' one for all others",
            )

    def domain_names(self) -> Sequence[str] | None:
        if self.domain is None:
            return ()
        return sorted(set(self.domain.values())) if isinstance(self.domain, Mapping) else None

    def _at_hand(self) -> list[Path]:
        """The files whose sources are looked at before anything starts."""
        given = [Path(name) for name in (*self.train, *self.validation, *self.test)]
        if self.source is not None:
            given = []
        if isinstance(self.source, InFiles):
            for split in get_args(Split):
                with contextlib.suppress(ValueError):  # told when the split is asked for
                    given += self.source.files(split)
        return [path for path in given if is_quickly_read(path)]

    def _first_bad_row(self, path: Path) -> str:
        """Its place and what it lacks; empty where there is none, bad rows are left out, or the file is
        large: then the run tells."""
        if self.bad_rows == "stop" and path.stat().st_size <= QUICKLY_READ:
            for place, row in file_rows(path, self.columns):
                try:
                    normalised(row)
                except ValueError as error:
                    return f"{place}: {error}"
        return ""

    def _route(self, source: str) -> Grader | None:
        return BySource(routes=self.routes).route(source)

    def _near(self, source: str) -> str:
        """The route that may have been meant, in brackets; nothing where none is near."""
        near = [route for route in self.routes if nearest(source[: len(route)], [route])]
        return f" (did you mean the route {max(near, key=len)!r}?)" if near else ""

    def _shown_routes(self) -> str:
        return ", ".join(map(repr, sorted(self.routes)))

    def _domain(self, row: Mapping[str, Any]) -> str:
        if self.domain == "data_source":
            return domain_of(row[DATA_SOURCE])
        if self.domain == "ability":
            return str(row[ABILITY])
        if self.domain is None:
            return ""
        assert isinstance(self.domain, Mapping)
        fitting = [prefix for prefix in self.domain if row[DATA_SOURCE].startswith(prefix)]
        return self.domain[max(fitting, key=len)] if fitting else ""

    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        try:
            row = normalised(row)
        except ValueError as error:
            raise BadRow(str(error)) from error
        source = row[DATA_SOURCE]
        if self._route(source) is None:
            raise ValueError(
                f"no route fits the data_source {source!r}{self._near(source)} of {id}, and routes are"
                f" {self._shown_routes()}: give it a grader under routes"
            )
        made = problem_of(row, id)
        kept = {name: row[name] for name in self.keep if name in row}
        return replace(made, data={**made.data, **kept}, domain=self._domain(row))

    def check_demonstrations(self) -> None:
        if self.demonstration_field is None:
            raise ValueError(
                "these rows have no demonstrations to learn from: name a key of their extra_info as"
                " demonstration_field"
            )

    def demonstration(self, problem: Problem, seed: int) -> str:
        self.check_demonstrations()
        found = problem.data.get(str(self.demonstration_field))
        if not isinstance(found, str):
            there = ", ".join(map(repr, problem.data))
            raise ValueError(
                f"problem {problem.id!r} has no text under {self.demonstration_field!r} to learn from: name"
                f" one of {there} as demonstration_field"
            )
        return found

    def step_boundaries(self, response: str) -> list[int]:
        return self.steps.boundaries(response)

    def answer_boundaries(self, response: str) -> list[int]:
        return self.steps.answer_boundaries(response)

    def alphabet(self) -> str:
        """What stands in prompts, golds and demonstrations, where the files are small and have these."""
        files = [Path(name) for name in (*self.train, *self.validation, *self.test)]
        if absent := self.missing():
            raise ValueError(
                f"{absent[0]} isn't there yet, whose characters the model would need: make it first"
            )
        small = all(file.stat().st_size <= QUICKLY_READ for file in files)
        if not files or self.source is not None or self.demonstration_field is None or not small:
            raise ValueError(
                "these rows may hold any character: name those of prompts and answers in model.alphabet, or"
                " use a real tokenizer"
            )
        found: set[str] = set()
        for split in get_args(Split):
            with contextlib.suppress(NoSplit):
                for problem in self.problems(split):
                    found.update(problem.prompt, problem.gold, self.demonstration(problem, 0))
        return "".join(sorted(found))
