"""All experiments of the folders: how they stand, what they measured, and several of them to compare."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from starlette.responses import Response

from treetune_view.page import Page, View
from treetune_view.store import Run
from treetune_view.store.standing import Accuracy, Standing, standing

SHOWN = 200
"""Rows of one page."""

SORTED = ("name", "state", "newest", "accuracy")


@dataclass(frozen=True)
class Row:
    run: Run
    standing: Standing | None
    problem: str = ""
    accuracy: Accuracy | None = None


def show(view: View) -> Response:
    """`?search=`, `?state=`, `?sort=`, `?set=` (whose accuracy), `?page=` choose what is listed."""
    rows = [_row(view, run) for run in view.store.runs()]
    measured = Counter(one.label for row in rows if row.standing for one in row.standing.accuracies)
    labels = sorted(measured)
    usual = max(labels, key=lambda label: measured[label], default="")  # what most can be compared by
    chosen_set = view.text("set", usual)
    rows = [
        Row(row.run, row.standing, row.problem, _accuracy(row, chosen_set) if chosen_set else None)
        for row in rows
    ]
    counts = {
        state: sum(_state(row) == state for row in rows)
        for state in ("running", "waiting", "stopped", "finished")
    }
    wanted, state = view.text("search").casefold(), view.text("state")
    kept = [row for row in rows if wanted in _words(row).casefold() and (not state or _state(row) == state)]
    kept.sort(key=_order(view.choice("sort", SORTED)))
    page = view.integer("page", 1, least=1)
    return view.render(
        "experiments.html",
        rows=kept[(page - 1) * SHOWN : page * SHOWN],
        total=len(kept),
        number=page,
        pages=max(1, -(-len(kept) // SHOWN)),
        counts=counts,
        labels=labels,
        chosen_set=chosen_set,
        sorts=SORTED,
        now=time.time(),
    )


def _row(view: View, run: Run) -> Row:
    try:
        return Row(run, standing(view.store, run))
    except (ValueError, OSError) as error:
        return Row(run, None, str(error))


def _accuracy(row: Row, label: str) -> Accuracy | None:
    found = row.standing.accuracies if row.standing else ()
    return next((one for one in found if one.label == label), None)


def _state(row: Row) -> str:
    return row.standing.state if row.standing else "unreadable"


def _words(row: Row) -> str:
    parts = row.standing.parts.values() if row.standing else ()
    return " ".join([row.run.name, _state(row), *parts])


def _order(sort: str) -> Callable[[Row], tuple[float, str]]:
    """A key for sorting: the best, the newest, what runs goes first."""
    states = ("running", "waiting", "stopped", "finished", "unreadable")

    def key(row: Row) -> tuple[float, str]:
        if sort == "state":
            return float(states.index(_state(row))), row.run.name
        if sort == "newest":
            return -((row.standing.wall_time if row.standing else None) or 0.0), row.run.name
        if sort == "accuracy":
            return -(row.accuracy.value if row.accuracy else -1.0), row.run.name
        return 0.0, row.run.name

    return key


PAGE = Page(
    "/", "Experiments", show, place="top", key="e", mark=lambda view: view.store.mark(view.store.runs())
)
