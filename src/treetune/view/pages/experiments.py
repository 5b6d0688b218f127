"""All experiments of the folders; and one of them, or several over and beside each other: status, curves with
events, time by phase."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from markupsafe import Markup
from starlette.responses import Response

from treetune.runtime.console import duration
from treetune.runtime.directory import SAMPLED_TOKENS, VALUE_TOKENS
from treetune.view.charts import N_COLOURS, Better, Chart, Series, number
from treetune.view.curves import (
    OVER,
    bunches,
    chosen_charts,
    evaluation_charts,
    events_of,
    events_of_several,
    metric_names,
    setting_of,
    usual_charts,
)
from treetune.view.experiment import Accuracy, RunProgress, StoredExperiment
from treetune.view.page import Page, PageRequest, paged
from treetune.view.pages.configuration import flat
from treetune.view.report.recorded import TimesSection
from treetune.view.store import Run
from treetune.vocabulary import CORRECT_SCORE

SHOWN = 400
"""Rows of one page."""

SORTED = ("name", "state", "newest", "accuracy")
STATES = ("running", "waiting", "stopped", "finished", "answers", "unreadable")

PASS = "pass@1 on "
"""Begins the columns of accuracies."""
ITERATIONS = "finished iterations"
COSTS: Mapping[str, tuple[str, str]] = {
    "optimiser steps": ("train/steps", "total"),
    "sampled tokens of answers": (SAMPLED_TOKENS, "total"),
    "sampled tokens of continuations": (VALUE_TOKENS, "total"),
    "trained tokens": ("train/tokens", "total"),
    "time in iterations": ("seconds/total", "seconds"),
    "tokens of an answer, newest": ("episodes/response_tokens", "newest"),
    "reward, newest": ("episodes/reward", "newest"),
}
"""Columns of what iterations recorded: the metric, and what is shown of it. Any other metric has its newest
value, and any key of a configuration its own."""

GROUPINGS = ("method", "folder", "setting")
"""What experiments are grouped by besides keys of configurations: the folder in their name; all but the seed.
"""
CURVES_OF_ANOTHER: Sequence[tuple[str, str, Better]] = (
    ("mean reward of the answers", "reward", "up"),
    ("share of right answers, of those that are graded", "right_share", "up"),
    ("tokens of an answer", "tokens", ""),
    ("share unfinished", "unfinished", ""),
    ("share that failed", "failed", ""),
)
"""What is drawn over the steps of another program's run, and the column of the question."""

NAMES = ("experiment_name", "directory")
"""Keys that differ between any two experiments, and say nothing of them."""


@dataclass(frozen=True)
class Cell:
    """A text, a smaller remark behind it, and what it is sorted by."""

    text: str
    remark: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Listed:
    """An experiment of the list, with a cell for each further column that it has something in; `problem` is
    what is wrong with one that can't be read."""

    run: Run
    state: str
    status: RunProgress | None
    accuracy: Accuracy | None = None
    problem: str = ""
    group: str = ""
    cells: Mapping[str, Cell] = field(default_factory=dict)


def show(view: PageRequest) -> Response:
    """`?search=`, `?state=`, `?sort=` (one of `SORTED`, or a column), `?set=` (whose accuracy), `?group=`
    (one of `GROUPINGS`, or a key of the configuration), `?column=` (also several), `?page=`."""
    statuses: dict[Run, RunProgress | str] = {}
    settings: dict[Run, Mapping[str, str]] = {}
    for run in view.store.runs():
        try:
            statuses[run] = view.store.status(run)
            settings[run] = _settings(view, run)
        except (ValueError, OSError) as error:
            statuses[run] = str(error)
    measured = Counter(
        one.label for own in statuses.values() if isinstance(own, RunProgress) for one in own.accuracies
    )
    labels = sorted(measured)
    usual = max(labels, key=lambda label: measured[label], default="")  # what most can be compared by
    chosen_set, group = view.text("set", usual), view.text("group")
    columns = view.request.query_params.getlist("column")
    different = _differing(list(settings.values()))
    rows = []
    for run, status in statuses.items():
        if isinstance(status, str):
            state = "answers" if run.files else "unreadable"
            rows.append(Listed(run, state, None, problem="" if run.files else status))
            continue
        accuracies = {one.label: one for one in status.accuracies}
        by = {
            "": "",
            "method": status.method,
            "folder": run.name.rpartition("/")[0] or "no folder",
            "setting": re.sub(r"[/_-]?seed[_-]?\d+", "", run.name),
        }
        own_group = by[group] if group in by else settings[run].get(group, "not set")
        cells = cells_of(view, run, columns)
        rows.append(Listed(run, status.state, status, accuracies.get(chosen_set), "", own_group, cells))
    search, state = view.text("search").casefold(), view.text("state")

    def matches(row: Listed) -> bool:
        parts = row.status.parts.values() if row.status else ()
        described = " ".join([row.run.name, row.state, *parts]).casefold()
        return search in described and (not state or row.state == state)

    sort = view.choice("sort", (*SORTED, *columns))

    def rank(row: Listed) -> tuple[str, float, str, str]:
        """The best, the newest, what runs goes first; of a column the greatest."""
        cell = row.cells.get(sort)
        ranks = {
            "name": 0.0,
            "state": float(STATES.index(row.state)),
            "newest": -((row.status.wall_time if row.status else None) or 0.0),
            "accuracy": -(row.accuracy.value if row.accuracy else -1.0),
        }
        known = math.inf if cell is None or cell.value is None else -cell.value
        return row.group, ranks.get(sort, known), cell.text if cell else "", row.run.name

    listed = paged(view, sorted(filter(matches, rows), key=rank), SHOWN)
    return view.render(
        "experiments.html",
        listed=listed,
        groups={name: list(own) for name, own in itertools.groupby(listed.rows, key=lambda row: row.group)},
        counts={one: sum(row.state == one for row in rows) for one in STATES[:-1]},
        labels=labels,
        chosen_set=chosen_set,
        sorts=(*SORTED, *columns),
        group=group,
        groupings=(*GROUPINGS, *different),
        columns=columns,
        known_columns=[ITERATIONS, *(PASS + label for label in labels), *COSTS, *different],
        mean_of=lambda rows, column: _mean(
            [row.accuracy and row.accuracy.value for row in rows]
            if column is None
            else [cell.value for row in rows if (cell := row.cells.get(column))]
        ),
    )


def _settings(view: PageRequest, run: Run) -> Mapping[str, str]:
    config = view.store.experiment(run).config
    return view.store.known("settings", run, lambda: {k: v.strip('"') for k, v in flat(config).items()})


def _differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the keys in which not all configurations are alike."""
    names = dict.fromkeys(key for own in settings for key in own if key not in NAMES)
    return [name for name in names if len({own.get(name) for own in settings}) > 1]


def _mean(values: Sequence[float | None]) -> str:
    """Writes the mean over the experiments that have a value, with their range where they are several."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    spread = f" [{number(min(known))}, {number(max(known))}]" if len({*known}) > 1 else ""
    return f"{number(math.fsum(known) / len(known))}{spread}"


def cells_of(view: PageRequest, run: Run, columns: Sequence[str]) -> dict[str, Cell]:
    """Returns what an experiment has in further columns of the list."""
    if not columns:
        return {}
    one, settings, cells = view.store.experiment(run), _settings(view, run), dict[str, Cell]()
    accuracies = {PASS + own.label: own for own in view.store.status(run).accuracies}
    for column in columns:
        metric, kind = COSTS.get(column, (column, "newest"))
        if column in accuracies:
            own = accuracies[column]
            bounds = f"[{own.low:.3f}, {own.high:.3f}] " if own.low is not None else ""
            cells[column] = Cell(f"{own.value:.3f}", f"{bounds}after {own.iteration} iterations", own.value)
        elif column == ITERATIONS:
            cells[column] = Cell(str(len(one.metrics)), "", len(one.metrics))
        elif values := [y for _, y in one.curve(metric)]:
            total = math.fsum(values)
            if kind == "seconds":
                remark = f"{number(total / len(one.metrics))} s an iteration"
                cells[column] = Cell(duration(total), remark, total)
            elif kind == "total":
                cells[column] = Cell(f"{total:,.0f}", "", total)
            else:
                cells[column] = Cell(number(values[-1]), "", values[-1])
        elif column in settings:
            try:
                value = float(settings[column])
            except ValueError:  # a word
                value = None
            cells[column] = Cell(settings[column], "", value)
    return cells


def show_run(view: PageRequest) -> Response:
    """`?run=` (also several), `?metric=` (also several: their curves alone), `?over=` (one of
    `OVER`), `?seeds=together`. Of another program's run it shows what its answers say of each step."""
    if view.run.files:
        return _show_run_of_another(view)
    first = view.store.experiment(view.run)
    experiments = {run.name: view.store.experiment(run) for run in view.runs}
    together = view.choice("seeds", ("apart", "together")) == "together"
    over = view.choice("over", tuple(OVER))
    made = bunches(experiments, together, over)
    events = events_of(first) if len(experiments) == 1 else events_of_several(experiments)
    if len(made) == 1:
        events = [replace(one, x=made[0].places.get(one.x, one.x)) for one in events]
    elif OVER[over]:  # each experiment had spent something else by then
        events = []
    statuses = {run.name: view.store.status(run) for run in view.runs}
    names = [name for name in view.request.query_params.getlist("metric") if name]
    return view.render(
        "run.html",
        experiment=first,
        statuses=statuses,
        beside=_beside(view) if len(experiments) > 1 else {},
        made=made,
        measured=[] if names else evaluation_charts(made, events),
        charts=chosen_charts(made, names, events) if names else usual_charts(made, events),
        names=names,
        metrics=metric_names(experiments.values()),
        seeds=_other_seeds(view, first) if len(experiments) == 1 else [],
        together=together,
        over=over,
        axes=tuple(OVER),
        times=Markup(TimesSection().html(first)) if len(experiments) == 1 else "",
        events=events,
    )


def _show_run_of_another(view: PageRequest) -> Response:
    """Shows curves over the steps of a run of which there are answers alone."""
    answers = view.store.answers(view.run)
    indexed = answers.indexed()
    steps = {one.source.name: one.source for one in indexed}
    columns = answers.columns()
    tokens = "avg(tokens)" if "tokens" in columns else "NULL"
    rows = answers.sql(
        f"""
        SELECT source, count(*) AS answers, count(score) AS graded, avg(reward) AS reward,
            avg((score >= ?)::INTEGER) AS right_share, avg(unfinished::INTEGER) AS unfinished,
            {tokens} AS tokens, avg((outcome = 'error')::INTEGER) AS failed
        FROM answers GROUP BY source
        """,
        [CORRECT_SCORE],
    )
    rows.sort(key=lambda row: (steps[row["source"]].number, steps[row["source"]].label))
    charts = list[Chart]()
    for title, column, better in CURVES_OF_ANOTHER:
        points: dict[str, dict[float, float]] = {}
        for row in rows:
            if row[column] is not None:
                step = steps[row["source"]]
                points.setdefault(step.label or "answers", {})[float(step.number)] = row[column]
        lines = [
            Series(label, list(own.items()), f"c{place % N_COLOURS}", dash=place // N_COLOURS)
            for place, (label, own) in enumerate(points.items())
            if any(own.values()) or column in ("reward", "right_share")
        ]
        if lines:
            charts.append(Chart(title, lines, better, x_name="step"))
    return view.render(
        "run_of_another.html",
        charts=charts,
        steps=[(steps[row["source"]], row) for row in reversed(rows)],
        problems=answers.problems(),
        waiting=[one.source.title for one in indexed if one.is_awaited],
    )


def _other_seeds(view: PageRequest, one: StoredExperiment) -> list[str]:
    """Returns the names of experiments that differ from this one in their seed alone."""
    setting, names = setting_of(one.config), []
    for other in view.store.runs():
        try:
            if other != view.run and setting_of(view.store.experiment(other).config) == setting:
                names.append(other.name)
        except ValueError:  # holds nothing that can be read: the list of experiments says so
            continue
    return names


def _beside(view: PageRequest) -> dict[str, list[Cell | None]]:
    """Returns by name what the experiments reached, what that cost, and the keys that differ, a cell for
    each; without what none has anything of."""
    labels = sorted({one.label for run in view.runs for one in view.store.status(run).accuracies})
    different = _differing([_settings(view, run) for run in view.runs])
    columns = [*(PASS + label for label in labels), ITERATIONS, *COSTS, *different]
    cells = [cells_of(view, run, columns) for run in view.runs]
    found = {column: [own.get(column) for own in cells] for column in columns}
    return {column: own for column, own in found.items() if any(own)}


PAGES = (
    Page("/", "Experiments", show, "top", "e", mark=lambda view: view.store.mark(view.store.runs())),
    Page("/run", "Run", show_run, place="run", key="r"),
)
