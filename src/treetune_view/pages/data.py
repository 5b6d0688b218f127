"""Prepared data sets that are known, estimates of difficulty among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from treetune_view.page import Page, View, digest
from treetune_view.store import Run

SHOWN = 100
"""Data sets of one page."""

KINDS = {
    "parquet": "Parquet",
    "lines": "JSON lines",
    "saved": "saved data set",
    "table": "W&B table",
    "estimate": "difficulty",
}


def show(view: View) -> Response:
    """`?search=` in names, `?page=`."""
    wanted = view.text("search").casefold()
    found = [one for one in view.store.data.all() if wanted in f"{one.name} {KINDS[one.kind]}".casefold()]
    page = view.integer("page", 1, least=1)
    return view.render(
        "data.html",
        sets=found[(page - 1) * SHOWN : page * SHOWN],
        total=len(found),
        kinds=KINDS,
        number=page,
        pages=max(1, -(-len(found) // SHOWN)),
        judged=[run for run in view.store.runs() if _is_judged_twice(view, run)],
    )


def _is_judged_twice(view: View, run: Run) -> bool:
    """Whether its configuration has a judge with a rule beside it."""
    try:
        return _has_both(view.store.experiment(run).config)
    except (ValueError, OSError):  # the list of experiments says so
        return False


def _has_both(config: Any) -> bool:
    if isinstance(config, Mapping):
        both = config.get("type") == "judge" and config.get("rule") is not None
        return both or any(map(_has_both, config.values()))
    return isinstance(config, list) and any(map(_has_both, config))


def mark(view: View) -> str:
    sets = [(one.name, one.known_from, one.mark) for one in view.store.data.all()]
    return digest(sets, view.store.mark(view.store.runs()))


PAGE = Page("/data", "Data", show, place="top", key="d", mark=mark)
