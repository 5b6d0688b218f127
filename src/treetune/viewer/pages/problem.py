"""One problem along training: every answer to it, file after file, in one experiment or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from treetune.viewer.page import Page, View, digest
from treetune.viewer.pages.answers import whole
from treetune.viewer.store import NotThere, Run
from treetune.viewer.store.questions import Filter, Question
from treetune.vocabulary import CORRECT_SCORE

MOST = 2000
"""Answers of an experiment that are shown."""


@dataclass(frozen=True)
class Row:
    """The answers to the problem in one file, by sample."""

    words: str
    answers: list[dict[str, Any]]

    @property
    def right(self) -> int:
        return sum((one["score"] or 0.0) >= CORRECT_SCORE for one in self.answers)


def show(view: View) -> Response:
    """`?run=` (also several), `?problem=`."""
    view.run  # noqa: B018  (raises where none is named)
    problem = view.text("problem")
    found = {run.name: _rows(view, run, problem) for run in view.runs}
    if not any(found.values()):
        raise NotThere(f"there is no answer to {problem!r} in {', '.join(found)}")
    asked = next(one["asked"] for rows in found.values() for row in rows for one in row.answers)
    return view.render("problem_answers.html", problem=problem, asked=asked or "", found=found)


def _rows(view: View, run: Run, problem: str) -> list[Row]:
    answers = view.store.answers(run)
    if not answers.columns():
        return []
    asked = answers.ask(Question(filters=(Filter("problem", "=", problem),), size=MOST))
    by_source: dict[str, list[dict[str, Any]]] = {}
    for row in whole(asked.rows):
        by_source.setdefault(row["source"], []).append(row)
    return [
        Row(source.words, sorted(by_source[source.name], key=lambda row: row["sample"] or 0))
        for source in answers.sources()
        if source.name in by_source
    ]


def mark_of_answers(view: View) -> str:
    """Of pages about the answers of all experiments in the address."""
    return digest([view.store.answers(run).mark() for run in view.runs], view.request.url.query)


PAGE = Page("/problem", "Problem", show, mark=mark_of_answers)
