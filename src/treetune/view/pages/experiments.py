"""The list of all experiments, and the page of one or several experiments.

The page has the status, curves with events, and the time by phase.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from markupsafe import Markup
from starlette.responses import Response

from treetune.runtime.console import format_duration
from treetune.runtime.directory import SAMPLED_TOKENS, VALUE_TOKENS
from treetune.runtime.manifest import entries_of_starts
from treetune.view.charts import N_COLOURS, BetterDirection, Chart, Series, format_number
from treetune.view.curves import (
    X_AXES,
    chosen_charts,
    evaluation_charts,
    events_of,
    events_of_several,
    group_into_bunches,
    metric_names,
    setting_without_seed,
    usual_charts,
)
from treetune.view.experiment import Accuracy, RunProgress, StoredExperiment
from treetune.view.page import Page, PageRequest, choose_page
from treetune.view.pages.configuration import flatten_settings
from treetune.view.report.recorded import TimesSection
from treetune.view.store import Run
from treetune.vocabulary import CORRECT_SCORE

ROWS_PER_PAGE = 400
"""The most rows on a page."""

SORT_ORDERS = ("name", "state", "newest", "accuracy")
EXPERIMENT_STATES = ("running", "waiting", "stopped", "finished", "answers", "unreadable")

ACCURACY_PREFIX = "pass@1 on "
"""The prefix of the names of columns with accuracies: "pass@1 on test"."""
ITERATIONS_COLUMN = "finished iterations"
"""The name of the column with the number of finished iterations."""
COST_COLUMNS: Mapping[str, tuple[str, str]] = {
    "optimiser steps": ("train/steps", "total"),
    "sampled tokens of answers": (SAMPLED_TOKENS, "total"),
    "sampled tokens of continuations": (VALUE_TOKENS, "total"),
    "trained tokens": ("train/tokens", "total"),
    "time in iterations": ("seconds/total", "seconds"),
    "tokens per answer, newest": ("episodes/response_tokens", "newest"),
    "reward, newest": ("episodes/reward", "newest"),
}
"""(metric, what is shown of it) by the name of the column. It is the sum over iterations ("total"), the sum
as a duration ("seconds"), or the newest value ("newest").

A column may also be named by any other metric, which shows its newest value, or by a key of the
configuration, which shows the setting."""

GROUPINGS = ("method", "folder", "setting")
"""The ways to group experiments, besides keys of configurations: by method, by the folder in their name, or
by their name without the seed."""
CURVES_OF_ANOTHER: Sequence[tuple[str, str, BetterDirection]] = (
    ("mean reward of the answers", "reward", "up"),
    ("share correct, of the graded answers", "right_share", "up"),
    ("tokens per answer", "tokens", ""),
    ("share unfinished", "unfinished", ""),
    ("share that failed", "failed", ""),
)
"""(title, column of the query, better direction) of each chart over the steps of another program's run."""

NAME_KEYS = ("experiment_name", "directory")
"""Keys of the configuration that differ between any two experiments, so they are not settings to compare."""


@dataclass(frozen=True)
class Cell:
    """A cell of the list."""

    text: str
    remark: str = ""
    """A remark in small type."""
    value: float | None = None
    """The number that the column is sorted by; None if the text is no number."""


@dataclass(frozen=True)
class ListedExperiment:
    """An experiment of the list."""

    run: Run
    state: str
    """One of `EXPERIMENT_STATES`."""
    status: RunProgress | None
    """The status; None if the experiment can't be read, or is another program's run."""
    accuracy: Accuracy | None = None
    """The accuracy on the chosen set; None if it wasn't measured."""
    problem: str = ""
    """The reason why the experiment can't be read; empty if it can."""
    group: str = ""
    cells: Mapping[str, Cell] = field(default_factory=dict)
    """The cells of further columns, by column."""


def show(view: PageRequest) -> Response:
    """Shows the list of all experiments.

    The address has `?search=`, `?state=`, `?sort=` (one of `SORT_ORDERS`, or a column), `?set=` (the
    evaluation set whose accuracy is shown), `?group=` (one of `GROUPINGS`, or a key of the configuration),
    `?column=` (also several) and `?page=`.
    """
    statuses: dict[Run, RunProgress | str] = {}
    settings: dict[Run, Mapping[str, str]] = {}
    for run in view.store.runs():
        try:
            statuses[run] = view.store.status(run)
            settings[run] = _read_settings(view, run)
        except (ValueError, OSError) as error:
            statuses[run] = str(error)
    experiment_count_by_set: Counter[str] = Counter()
    for status in statuses.values():
        if isinstance(status, RunProgress):
            experiment_count_by_set.update(accuracy.label for accuracy in status.accuracies)
    labels = sorted(experiment_count_by_set)
    # The default is the set on which most experiments were measured, so that as many as possible can be
    # compared.
    default_set = max(labels, key=lambda label: experiment_count_by_set[label], default="")
    chosen_set, group = view.text("set", default_set), view.text("group")
    columns = view.request.query_params.getlist("column")
    differing_keys = _differing_keys(list(settings.values()))
    rows = []
    for run, status in statuses.items():
        if isinstance(status, str):
            if run.files:  # a run of another program, which has no status
                rows.append(ListedExperiment(run, "answers", None, problem=""))
            else:
                rows.append(ListedExperiment(run, "unreadable", None, problem=status))
            continue
        accuracies = {accuracy.label: accuracy for accuracy in status.accuracies}
        group_name = _group_of(run, status, settings[run], group)
        cells = cells_of(view, run, columns)
        accuracy = accuracies.get(chosen_set)
        rows.append(ListedExperiment(run, status.state, status, accuracy, group=group_name, cells=cells))
    search, state = view.text("search").casefold(), view.text("state")
    sort = view.choice("sort", (*SORT_ORDERS, *columns))
    matching = [row for row in rows if _row_matches(row, search, state)]
    listed = choose_page(view, sorted(matching, key=lambda row: _sort_key(row, sort)), ROWS_PER_PAGE)
    groups: dict[str, list[ListedExperiment]] = {}
    for row in listed.rows:
        groups.setdefault(row.group, []).append(row)
    return view.render(
        "experiments.html",
        listed=listed,
        groups=groups,
        # For the states that the list can be filtered by: all but the last one, "unreadable".
        counts={state: sum(row.state == state for row in rows) for state in EXPERIMENT_STATES[:-1]},
        labels=labels,
        chosen_set=chosen_set,
        sorts=(*SORT_ORDERS, *columns),
        group=group,
        groupings=(*GROUPINGS, *differing_keys),
        columns=columns,
        known_columns=[
            ITERATIONS_COLUMN,
            *(ACCURACY_PREFIX + label for label in labels),
            *COST_COLUMNS,
            *differing_keys,
        ],
        mean_of=_format_mean_of_column,
    )


def _group_of(run: Run, status: RunProgress, settings: Mapping[str, str], grouping: str) -> str:
    """Returns the name of an experiment's group: for the grouping "folder", for example, its folder."""
    names = {
        "": "",
        "method": status.method,
        "folder": run.name.rpartition("/")[0] or "no folder",
        "setting": re.sub(r"[/_-]?seed[_-]?\d+", "", run.name),
    }
    if grouping in names:
        return names[grouping]
    return settings.get(grouping, "not set")  # a key of the configuration


def _row_matches(row: ListedExperiment, search: str, state: str) -> bool:
    """Returns whether a row contains the searched text and is in the state `state`.

    If `state` is empty, any state will do.
    """
    parts = row.status.parts.values() if row.status else ()
    searched_text = " ".join([row.run.name, row.state, *parts]).casefold()
    return search in searched_text and (not state or row.state == state)


def _sort_key(row: ListedExperiment, sort: str) -> tuple[str, float, str, str]:
    """Returns the key by which a row is sorted: its group, its rank by `sort`, and texts that decide between
    equal ranks.

    In a group, the best, newest or running row comes first, or the row with the largest value of a column.
    """
    cell = row.cells.get(sort)
    newest_time = (row.status.wall_time if row.status else None) or 0.0
    # Large values come first, so they are negated. Rows without the value come last.
    ranks = {
        "name": 0.0,
        "state": float(EXPERIMENT_STATES.index(row.state)),
        "newest": -newest_time,
        "accuracy": -row.accuracy.value if row.accuracy else math.inf,
    }
    rank_in_column = math.inf if cell is None or cell.value is None else -cell.value
    cell_text = cell.text if cell else ""
    return row.group, ranks.get(sort, rank_in_column), cell_text, row.run.name


def _format_mean_of_column(rows: Sequence[ListedExperiment], column: str | None) -> str:
    """Returns the mean of a column over the rows of a group. If `column` is None, it is that of the
    accuracy."""
    if column is None:
        return _format_mean([row.accuracy.value if row.accuracy else None for row in rows])
    return _format_mean([cell.value for row in rows if (cell := row.cells.get(column))])


def _read_settings(view: PageRequest, run: Run) -> Mapping[str, str]:
    """Returns the settings of an experiment by key, as JSON, but texts without quotes.

    They are computed again only when the experiment has changed.
    """
    config = view.store.experiment(run).config

    def without_quotes() -> dict[str, str]:
        return {key: value.strip('"') for key, value in flatten_settings(config).items()}

    return view.store.read_once("settings", run, without_quotes)


def _differing_keys(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the keys whose values differ between the configurations, without those in `NAME_KEYS`."""
    names: dict[str, None] = {}
    for settings_of_run in settings:
        names |= dict.fromkeys(key for key in settings_of_run if key not in NAME_KEYS)
    return [name for name in names if len({settings_of_run.get(name) for settings_of_run in settings}) > 1]


def _format_mean(values: Sequence[float | None]) -> str:
    """Returns the mean and the range of the values as a text: "0.48 [0.46, 0.5]". It is empty if there are no
    values."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    value_range = (
        f" [{format_number(min(numbers))}, {format_number(max(numbers))}]" if len(set(numbers)) > 1 else ""
    )
    return f"{format_number(math.fsum(numbers) / len(numbers))}{value_range}"


def cells_of(view: PageRequest, run: Run, columns: Sequence[str]) -> dict[str, Cell]:
    """Returns the cells of an experiment in further columns of the list, by column.

    A column in which the experiment has no value is left out.
    """
    if not columns:
        return {}
    experiment, settings, cells = view.store.experiment(run), _read_settings(view, run), dict[str, Cell]()
    accuracies = {
        ACCURACY_PREFIX + accuracy.label: accuracy for accuracy in view.store.status(run).accuracies
    }
    for column in columns:
        # A column is an accuracy, the number of iterations, a metric, or a setting. A metric is shown by its
        # newest value. A column of `COST_COLUMNS` shows the newest value of the metric named there, or the
        # metric's sum over all iterations (the kinds "total" and "seconds").
        metric, kind = COST_COLUMNS.get(column, (column, "newest"))
        if column in accuracies:
            accuracy = accuracies[column]
            bounds = f"[{accuracy.low:.3f}, {accuracy.high:.3f}] " if accuracy.low is not None else ""
            remark = f"{bounds}after {accuracy.iteration} iterations"
            cells[column] = Cell(f"{accuracy.value:.3f}", remark, accuracy.value)
        elif column == ITERATIONS_COLUMN:
            cells[column] = Cell(str(len(experiment.metrics)), "", len(experiment.metrics))
        elif values := [y for _, y in experiment.curve(metric)]:
            total = math.fsum(values)
            if kind == "seconds":
                remark = f"{format_number(total / len(experiment.metrics))} s an iteration"
                cells[column] = Cell(format_duration(total), remark, total)
            elif kind == "total":
                cells[column] = Cell(f"{total:,.0f}", "", total)
            else:
                cells[column] = Cell(format_number(values[-1]), "", values[-1])
        elif column in settings:
            try:
                value = float(settings[column])
            except ValueError:  # a text
                value = None
            cells[column] = Cell(settings[column], "", value)
    return cells


def show_run(view: PageRequest) -> Response:
    """Shows one or several experiments or, for a run of another program, statistics of its answers by step.

    The address has `?run=` (also several), `?metric=` (also several: only their curves are drawn), `?over=`
    (one of `X_AXES`) and `?seeds=together` (experiments that differ only in their seed are one curve).
    """
    if view.run.files:  # only a run of another program has a list of files
        return _show_run_of_another(view)
    first = view.store.experiment(view.run)
    experiments = {run.name: view.store.experiment(run) for run in view.runs}
    together = view.choice("seeds", ("apart", "together")) == "together"
    over = view.choice("over", tuple(X_AXES))
    # A bunch is drawn as one curve: an experiment, or with `together` those that differ only in their seed.
    all_bunches = group_into_bunches(experiments, together, over)
    events = events_of(first) if len(experiments) == 1 else events_of_several(experiments)
    if len(all_bunches) == 1:
        # `positions` has the position on the axis `over` for each number of finished iterations.
        events = [replace(event, x=all_bunches[0].positions.get(event.x, event.x)) for event in events]
    elif X_AXES[over]:
        # On any axis but finished iterations, the same number of iterations is at another position in each
        # experiment, so an event has no single position.
        events = []
    statuses = {run.name: view.store.status(run) for run in view.runs}
    names = [name for name in view.request.query_params.getlist("metric") if name]
    return view.render(
        "run.html",
        experiment=first,
        parent=_find_parent(view, first),
        statuses=statuses,
        side_by_side=_side_by_side(view) if len(experiments) > 1 else {},
        made=all_bunches,
        measured=[] if names else evaluation_charts(all_bunches, events),
        charts=chosen_charts(all_bunches, names, events) if names else usual_charts(all_bunches, events),
        names=names,
        metrics=metric_names(experiments.values()),
        seeds=_other_seeds(view, first) if len(experiments) == 1 else [],
        together=together,
        over=over,
        axes=tuple(X_AXES),
        times=Markup(TimesSection().html(first)) if len(experiments) == 1 else "",
        events=events,
    )


def _show_run_of_another(view: PageRequest) -> Response:
    """Shows curves over the steps of another program's run, computed from its answers."""
    answers = view.store.answers(view.run)
    indexed = answers.list_indexed_sources()
    sources = {item.source.name: item.source for item in indexed}  # each source is a file of a step
    mean_tokens = "avg(tokens)" if "tokens" in answers.columns() else "NULL"
    rows = answers.sql(
        f"""
        SELECT source, count(*) AS answers, count(score) AS graded, avg(reward) AS reward,
            avg((score >= ?)::INTEGER) AS right_share, avg(unfinished::INTEGER) AS unfinished,
            {mean_tokens} AS tokens, avg((outcome = 'error')::INTEGER) AS failed
        FROM answers GROUP BY source
        """,
        [CORRECT_SCORE],
    )
    rows.sort(key=lambda row: (sources[row["source"]].number, sources[row["source"]].label))
    charts = list[Chart]()
    for title, column, better in CURVES_OF_ANOTHER:
        # For each label, such as "train", the values by step.
        values_by_label: dict[str, dict[float, float]] = {}
        for row in rows:
            if row[column] is not None:
                source = sources[row["source"]]
                values = values_by_label.setdefault(source.label or "answers", {})
                values[float(source.number)] = row[column]
        lines = []
        for line_number, (label, values) in enumerate(values_by_label.items()):
            # A share that is always 0 has no line, because it says nothing. A reward or an accuracy has one.
            if any(values.values()) or column in ("reward", "right_share"):
                dash, colour = divmod(line_number, N_COLOURS)  # after the last colour, lines are dashed
                lines.append(Series(label, list(values.items()), f"c{colour}", dash=dash))
        if lines:
            charts.append(Chart(title, lines, better, x_name="step"))
    return view.render(
        "run_of_another.html",
        charts=charts,
        steps=[(sources[row["source"]], row) for row in reversed(rows)],
        problems=answers.problems(),
        waiting=[item.source.title for item in indexed if item.is_awaited],
    )


def _other_seeds(view: PageRequest, experiment: StoredExperiment) -> list[str]:
    """Returns the names of experiments that differ from this one only in their seed."""
    setting, names = setting_without_seed(experiment.config), []
    for other in view.store.runs():
        try:
            if other != view.run and setting_without_seed(view.store.experiment(other).config) == setting:
                names.append(other.name)
        except ValueError:  # the other can't be read; the list of experiments says why
            continue
    return names


def _find_parent(view: PageRequest, experiment: StoredExperiment) -> Run | None:
    """Returns the run of the store that an experiment was forked from; None if there is none.

    The run is recognised by its configuration, since its folder may have been moved.
    """
    if experiment.forked is None:
        return None
    for run in view.store.runs():
        try:
            manifest = view.store.experiment(run).manifest
        except (ValueError, OSError):  # the run can't be read; the list of experiments says why
            continue
        # Each start that changed the run's configuration has an entry with its hash.
        hashes = [entry.get("config") for entry in entries_of_starts(manifest)]
        if experiment.forked["config"] in hashes:
            return run
    return None


def _side_by_side(view: PageRequest) -> dict[str, list[Cell | None]]:
    """Returns the rows of a table that compares experiments, each with a cell for every experiment.

    The rows are accuracies, costs, and the settings that differ, by name. The cell of an experiment without a
    value is None, and rows without any value are left out.
    """
    labels: set[str] = set()
    for run in view.runs:
        labels |= {accuracy.label for accuracy in view.store.status(run).accuracies}
    differing_keys = _differing_keys([_read_settings(view, run) for run in view.runs])
    columns = [
        *(ACCURACY_PREFIX + label for label in sorted(labels)),
        ITERATIONS_COLUMN,
        *COST_COLUMNS,
        *differing_keys,
    ]
    cells_by_run = [cells_of(view, run, columns) for run in view.runs]
    table = {column: [cells.get(column) for cells in cells_by_run] for column in columns}
    return {column: cells for column, cells in table.items() if any(cells)}


PAGES = (
    Page(
        "/",
        "Experiments",
        show,
        "top",
        "e",
        fingerprint=lambda view: view.store.fingerprint(view.store.runs()),
    ),
    Page("/run", "Run", show_run, navigation="run", key="r"),
)
