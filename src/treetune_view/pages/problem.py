"""One problem along training: every answer to it, file after file, in one experiment or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from treetune.vocabulary import CORRECT_SCORE
from treetune_view.page import Page, View, digest
from treetune_view.pages.answers import whole
from treetune_view.store import NotThere, Run
from treetune_view.store.sources import Source

MOST, LEAST = 2000, 16
"""Answers that are shown of an experiment, and of one file where that has so many files."""


@dataclass(frozen=True)
class Row:
    """The answers to the problem in one file: how many, how many are right, and those that are shown."""

    source: Source
    total: int
    right: int
    answers: list[dict[str, Any]]


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
    sources = answers.sources()
    found = answers.sql(
        """
        SELECT *, count(*) OVER own AS total, count(*) FILTER (score >= ?) OVER own AS right_ones
        FROM answers WHERE problem = ? WINDOW own AS (PARTITION BY source)
        QUALIFY row_number() OVER (PARTITION BY source ORDER BY row) <= ? ORDER BY row
        """,
        [CORRECT_SCORE, problem, max(LEAST, MOST // max(1, len(sources)))],
    )
    by_source: dict[str, list[dict[str, Any]]] = {}
    for row in whole(found):
        by_source.setdefault(row["source"], []).append(row)
    return [
        Row(source, own[0]["total"], own[0]["right_ones"], sorted(own, key=lambda row: row["sample"] or 0))
        for source in sources
        if (own := by_source.get(source.name))
    ]


def mark_of_answers(view: View) -> str:
    """Of pages about the answers of all experiments in the address."""
    return digest([view.store.answers(run).mark() for run in view.runs], view.request.url.query)


PAGE = Page("/problem", "Problem", show, mark=mark_of_answers)
