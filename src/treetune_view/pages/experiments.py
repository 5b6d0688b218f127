"""All experiments of the folders; and one of them, or several over and beside each other: status, curves with
events, time by phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.responses import Response

from treetune.runtime.console import duration
from treetune.runtime.directory import SAMPLED_TOKENS, VALUE_TOKENS
from treetune_view.charts import Better, number, thinned
from treetune_view.curves import (
    PHASES,
    bunches,
    chosen_charts,
    evaluation_charts,
    events_of,
    events_of_several,
    metric_names,
    phase_seconds,
    phase_totals,
    setting_of,
    usual_charts,
)
from treetune_view.experiment import Accuracy, Experiment, Status
from treetune_view.page import Page, View, paged
from treetune_view.pages.configuration import flat
from treetune_view.store import Run

SHOWN = 200
"""Rows of one page."""

SORTED = ("name", "state", "newest", "accuracy")
STATES = ("running", "waiting", "stopped", "finished", "unreadable")


@dataclass(frozen=True)
class Listed:
    """An experiment of the list; `problem` is what is wrong with one that can't be read."""

    run: Run
    state: str
    status: Status | None
    accuracy: Accuracy | None = None
    problem: str = ""


def show(view: View) -> Response:
    """`?search=`, `?state=`, `?sort=`, `?set=` (whose accuracy), `?page=` choose what is listed."""
    statuses: dict[Run, Status | str] = {}
    for run in view.store.runs():
        try:
            statuses[run] = view.store.status(run)
        except (ValueError, OSError) as error:
            statuses[run] = str(error)
    measured = Counter(
        one.label for own in statuses.values() if isinstance(own, Status) for one in own.accuracies
    )
    labels = sorted(measured)
    usual = max(labels, key=lambda label: measured[label], default="")  # what most can be compared by
    chosen_set = view.text("set", usual)
    rows = []
    for run, status in statuses.items():
        if isinstance(status, str):
            rows.append(Listed(run, "unreadable", None, problem=status))
            continue
        accuracies = {one.label: one for one in status.accuracies}
        rows.append(Listed(run, status.state, status, accuracies.get(chosen_set)))
    search, state = view.text("search").casefold(), view.text("state")

    def matches(row: Listed) -> bool:
        parts = row.status.parts.values() if row.status else ()
        described = " ".join([row.run.name, row.state, *parts]).casefold()
        return search in described and (not state or row.state == state)

    sort = view.choice("sort", SORTED)

    def rank(row: Listed) -> tuple[float, str]:
        """The best, the newest, what runs goes first."""
        ranks = {
            "name": 0.0,
            "state": float(STATES.index(row.state)),
            "newest": -((row.status.wall_time if row.status else None) or 0.0),
            "accuracy": -(row.accuracy.value if row.accuracy else -1.0),
        }
        return ranks[sort], row.run.name

    return view.render(
        "experiments.html",
        listed=paged(view, sorted(filter(matches, rows), key=rank), SHOWN),
        counts={one: sum(row.state == one for row in rows) for one in STATES[:-1]},
        labels=labels,
        chosen_set=chosen_set,
        sorts=SORTED,
    )


def show_run(view: View) -> Response:
    """`?run=` (also several), `?metric=` (also several: their curves alone), `?seeds=together`."""
    first = view.store.experiment(view.run)
    experiments = {run.name: view.store.experiment(run) for run in view.runs}
    together = view.choice("seeds", ("apart", "together")) == "together"
    made = bunches(experiments, together)
    events = events_of(first) if len(experiments) == 1 else events_of_several(experiments)
    statuses = {run.name: view.store.status(run) for run in view.runs}
    names = [name for name in view.request.query_params.getlist("metric") if name]
    # Seconds by phase: of all iterations, and bars of each (of neighbours, where there are many).
    rows = phase_seconds(first)
    totals, bars = phase_totals(rows), thinned(rows)
    times = {
        "totals": totals,
        "words": PHASES,
        "whole": math.fsum(totals.values()),
        "iterations": len(rows),
        "bars": bars,
        "longest": max((math.fsum(own.values()) for _, own in bars), default=0.0),
    }
    return view.render(
        "run.html",
        experiment=first,
        statuses=statuses,
        beside=side_by_side(experiments, statuses) if len(experiments) > 1 else [],
        made=made,
        measured=[] if names else evaluation_charts(made, events),
        charts=chosen_charts(made, names, events) if names else usual_charts(made, events),
        names=names,
        metrics=metric_names(experiments.values()),
        seeds=_other_seeds(view, first) if len(experiments) == 1 else [],
        together=together,
        times=times,
        events=events,
    )


def _other_seeds(view: View, one: Experiment) -> list[str]:
    """Returns the names of experiments that differ from this one in their seed alone."""
    setting, names = setting_of(one.config), []
    for other in view.store.runs():
        try:
            if other != view.run and setting_of(view.store.experiment(other).config) == setting:
                names.append(other.name)
        except ValueError:  # holds nothing that can be read: the list of experiments says so
            continue
    return names


# Side by side

COSTS: Sequence[tuple[str, str, str, Better]] = (
    ("optimiser steps", "train/steps", "total", ""),
    ("sampled tokens of answers", SAMPLED_TOKENS, "total", ""),
    ("sampled tokens of continuations", VALUE_TOKENS, "total", ""),
    ("trained tokens", "train/tokens", "total", ""),
    ("time in iterations", "seconds/total", "seconds", "down"),
    ("tokens of an answer, newest", "episodes/response_tokens", "newest", ""),
    ("reward, newest", "episodes/reward", "newest", "up"),
)
"""Name, metric, what is shown of it, and which way is better."""

Cell = tuple[str, str]
"""A text, and a smaller remark behind it."""


@dataclass(frozen=True)
class Comparison:
    """A quantity or key, with a cell for each experiment; None where it has none. `kind` is ``result``,
    ``cost`` or ``setting``."""

    name: str
    kind: str
    cells: Sequence[Cell | None]
    better: Better = ""


def side_by_side(experiments: Mapping[str, Experiment], statuses: Mapping[str, Status]) -> list[Comparison]:
    """Returns results first, then costs, then the keys that differ. Rows that nobody has anything in are left
    out."""
    rows = [*_results(statuses), *_costs(list(experiments.values()))]
    settings = [flat(one.config) for one in experiments.values()]
    for name in dict.fromkeys(key for own in settings for key in own):
        # Names and folders differ between any two experiments, and say nothing of them.
        if name not in ("experiment_name", "directory") and len({own.get(name) for own in settings}) > 1:
            cells = [(own[name], "") if name in own else None for own in settings]
            rows.append(Comparison(name, "setting", cells))
    return [row for row in rows if any(row.cells)]


def _results(statuses: Mapping[str, Status]) -> list[Comparison]:
    rows = []
    for label in sorted({one.label for own in statuses.values() for one in own.accuracies}):
        cells: list[Cell | None] = []
        for own in statuses.values():
            accuracy = next((one for one in own.accuracies if one.label == label), None)
            if accuracy is None:
                cells.append(None)
                continue
            bounds = f"[{accuracy.low:.3f}, {accuracy.high:.3f}] " if accuracy.low is not None else ""
            cells.append((f"{accuracy.value:.3f}", f"{bounds}after {accuracy.iteration} iterations"))
        rows.append(Comparison(f"pass@1 on {label}", "result", cells, "up"))
    return rows


def _costs(experiments: Sequence[Experiment]) -> list[Comparison]:
    """Returns sums and newest values of what was recorded; None where an experiment has none."""
    counts: list[Cell | None] = [(str(len(one.metrics)), "") for one in experiments]
    rows = [Comparison("finished iterations", "cost", counts)]
    for name, metric, kind, better in COSTS:
        cells: list[Cell | None] = []
        for one in experiments:
            values = [row[metric] for row in one.metrics if metric in row]
            total = math.fsum(values)
            if not values:
                cells.append(None)
            elif kind == "seconds":
                cells.append((duration(total), f"{number(total / len(one.metrics))} s an iteration"))
            else:
                cells.append((f"{total:,.0f}" if kind == "total" else number(values[-1]), ""))
        rows.append(Comparison(name, "cost", cells, better))
    return rows


PAGES = (
    Page(
        "/",
        "Experiments",
        show,
        place="top",
        key="e",
        mark=lambda view: view.store.mark(view.store.runs()),
    ),
    Page("/run", "Run", show_run, place="run", key="r"),
)
