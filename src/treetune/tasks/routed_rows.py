"""Rows of many data sets, each graded by what its ``data_source`` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from treetune.config.errors import did_you_mean
from treetune.contracts import Finding
from treetune.tasks.base import Task
from treetune.tasks.domain_rows import (
    ABILITY,
    APPLY_CHAT_TEMPLATE,
    DATA_SOURCE,
    EXTRA_INFO,
    GROUND_TRUTH,
    HIGH_PASS_RATE,
    LOW_PASS_RATE,
    PROMPT,
    RAW_PROMPT,
    REWARD_MODEL,
    domain_of,
    normalised,
    prompt_text,
)
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.routed import BySource
from treetune.tasks.rows import BadRow, RowsTask, is_quickly_read
from treetune.tasks.sources import InFiles, values_of
from treetune.tasks.steps.base import StepSplitter
from treetune.tasks.steps.lines import Lines
from treetune.vocabulary import Message, Problem

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
            except ValueError as error:
                yield Finding.of(error, "train")
                return
            found = dict.fromkeys(sources, path) | found
        unknown = [source for source in found if self._route(source) is None]
        if unknown:
            shown = ", ".join(f"{source!r} ({did_you_mean(source, list(self.routes))})" for source in unknown)
            yield Finding(
                f"no route fits the data_source {shown}, first in {found[unknown[0]]}; the rows' sources are"
                f" {', '.join(sorted(found))}",
                "routes",
                "give it a grader by the beginning of its name, or '' one for all others",
            )

    def domain_names(self) -> Sequence[str] | None:
        if self.domain is None:
            return ()
        return sorted(set(self.domain.values())) if isinstance(self.domain, Mapping) else None

    def _at_hand(self) -> list[Path]:
        """The files whose sources are looked at before anything starts."""
        if isinstance(self.source, InFiles):
            given = [name for name in (self.source.train, self.source.validation, self.source.test) if name]
            return [path for name in given for path in sorted(Path().glob(name)) if is_quickly_read(path)]
        if self.source is not None:
            return []
        return [
            path
            for name in (*self.train, *self.validation, *self.test)
            if is_quickly_read(path := Path(name))
        ]

    def _route(self, source: str) -> Grader | None:
        return BySource(routes=self.routes).route(source)

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
            near = did_you_mean(source, list(self.routes))
            raise ValueError(
                f"no route fits the data_source {source!r} of {id} ({near}): give it a grader under routes"
            )
        messages = tuple(Message(one["role"], one["content"]) for one in row[PROMPT])
        asked_alone = [message.role for message in messages] == ["user"]
        as_is = not row[APPLY_CHAT_TEMPLATE]
        kept = {name: row[name] for name in self.keep if name in row}
        return Problem(
            id=id,
            prompt=prompt_text(row),
            gold=row[REWARD_MODEL][GROUND_TRUTH],
            data={**row[EXTRA_INFO], **kept, DATA_SOURCE: source, ABILITY: row[ABILITY]},
            domain=self._domain(row),
            messages=() if as_is or asked_alone else messages,
            as_is=as_is,
        )

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
            raise ValueError(f"problem {problem.id!r} has no text under {self.demonstration_field!r}")
        return found

    def step_boundaries(self, response: str) -> list[int]:
        return self.steps.boundaries(response)
