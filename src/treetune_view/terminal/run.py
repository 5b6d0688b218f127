"""The second page: one experiment, its curves, its time, what happened, and a few answers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from treetune.runtime.console import duration
from treetune_view.report.charts import number
from treetune_view.report.experiment import Experiment
from treetune_view.report.sections.times import phase_seconds, phase_totals
from treetune_view.report.text import cut, visible
from treetune_view.store import Run, Store
from treetune_view.store.curves import (
    Chart,
    bunches,
    chosen_charts,
    evaluation_charts,
    events_of,
    metric_names,
    usual_charts,
)
from treetune_view.store.standing import standing
from treetune_view.terminal.glimpse import Answer, newest_answers
from treetune_view.terminal.plot import bar, bounds, plot
from treetune_view.terminal.words import accuracy, progress, shown, state

HEIGHT = 4
"""Lines of a curve."""
BESIDE = 88
"""From this width on, two curves stand beside each other."""
CURVES, EVENTS, ANSWERS = 4, 5, 5
WHOLE = 4000
"""Characters of an answer that is shown whole."""

BETTER = {"up": "up is better", "down": "down is better", "": ""}


def run_page(
    store: Store,
    run: Run,
    width: int,
    metrics: Sequence[str] = (),
    *,
    braille: bool = True,
    whole: bool = False,
) -> RenderableType:
    """`metrics` are the curves; without them the usual ones. With `whole`, answers have all of their lines.

    Raises ValueError for files that can't be read and for a metric that was not recorded.
    """
    experiment = store.experiment(run)
    parts: list[RenderableType] = [_heading(store, run)]
    charts = charts_of(experiment, metrics)
    if charts:
        parts += [Text(), _curves(charts, width, braille)]
    if any(seconds for _, own in phase_seconds(experiment) for seconds in own.values()):
        parts += [_title("time by phase"), _times(experiment, width, braille)]
    if events := events_of(experiment)[-EVENTS:]:
        lines = [shown(f"after {one.x:.0f}: {one.words}") for one in events]
        parts += [_title("last events"), *lines]
    parts += _answers(run, whole)
    return Group(*parts)


def charts_of(experiment: Experiment, metrics: Sequence[str]) -> list[Chart]:
    """Those of the metrics, or accuracy and the first of the usual ones."""
    made = bunches({experiment.name: experiment}, False)
    if not metrics:
        measured = evaluation_charts(made)
        return [*measured, *usual_charts(made)][: max(CURVES, len(measured) + 2)]
    recorded = metric_names([experiment])
    for name in metrics:
        if name not in recorded:
            there = ", ".join(recorded) or "none yet"
            raise ValueError(f"{experiment.name} has no metric {name!r}; there are {there}")
    return chosen_charts(made, metrics)


def _heading(store: Store, run: Run) -> Group:
    one = standing(store, run)
    lines = [
        shown(run.name, "bold"),
        state(one) + shown(f"  {progress(one)} iterations{_left(one.seconds_left)}"),
    ]
    if one.why:
        lines.append(shown(one.why, "red" if one.state == "stopped" else "dim"))
    about = [one.method, f"seed {one.seed}" if one.seed is not None else "", _ago(one.wall_time)]
    lines.append(shown(" · ".join(part for part in about if part), "dim"))
    for own in one.accuracies:
        over = f" over {own.problems} problems" if own.problems else ""
        words = f"pass@1 on {own.label} after {own.iteration}: {accuracy(own)}"
        lines.append(shown(f"{words} (95 % interval{over})" if own.low is not None else words))
    return Group(*lines)


def _left(seconds: float | None) -> str:
    return f", {duration(seconds)} left" if seconds is not None else ""


def _ago(wall_time: float | None) -> str:
    if wall_time is None:
        return ""
    return f"last iteration {duration(max(0.0, time.time() - wall_time))} ago"


def _title(words: str) -> Text:
    return Text(f"\n{words}", style="bold")


# Curves


def _curves(charts: Sequence[Chart], width: int, braille: bool) -> Table:
    columns = 2 if width >= BESIDE and len(charts) > 1 else 1
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    for _ in range(columns):
        grid.add_column(ratio=1)
    own = width // columns - 2 * (columns > 1)
    cells = [_chart(chart, own, braille) for chart in charts]
    for start in range(0, len(cells), columns):
        grid.add_row(*cells[start : start + columns])
    return grid


def _chart(chart: Chart, width: int, braille: bool) -> Group:
    curves = [
        [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)] for line in chart.lines
    ]
    kept = [curve for curve in curves if curve]
    title = shown(chart.title.partition(":")[0] if len(chart.lines) > 1 else chart.title, "bold")
    title.append(f"  {BETTER[chart.better]}" if chart.better else "", style="dim")
    if not kept:
        return Group(title, Text("no finite value yet", style="dim"))
    low, high = bounds(kept)
    labels = [number(high), *[""] * (HEIGHT - 2), number(low)]
    margin = max(map(len, labels))
    drawn = plot(kept, max(8, width - margin - 1), HEIGHT, braille=braille)
    lines = [Text(f"{label:>{margin}} {line}") for label, line in zip(labels, drawn, strict=True)]
    first, last = min(curve[0][0] for curve in kept), max(curve[-1][0] for curve in kept)
    axis = f"{'':{margin}} {first:.0f} to {last:.0f}; last: {', '.join(_lasts(chart))}"
    return Group(title, *lines, shown(axis, "dim"))


def _lasts(chart: Chart) -> Iterator[str]:
    for line in chart.lines:
        name = f"{line.name.rpartition(': ')[2]} " if len(chart.lines) > 1 else ""
        low, high = (bound[-1] if bound else None for bound in (line.low, line.high))
        between = f" [{number(low)}, {number(high)}]" if low is not None and high is not None else ""
        yield f"{name}{number(line.y[-1])}{between}"


# Time, answers


def _times(experiment: Experiment, width: int, braille: bool) -> Table:
    rows = phase_seconds(experiment)
    totals = phase_totals(rows)
    whole = math.fsum(totals.values())
    grid = Table.grid(padding=(0, 1, 0, 0))
    for phase, seconds in totals.items():
        share = seconds / whole
        drawn = bar(share, max(6, width - 40), braille=braille)
        each = f"{number(seconds / len(rows))} s each"
        grid.add_row(
            Text(phase),
            Text(f"{share:4.0%}" if share >= 0.005 else " <1%"),
            Text(f"{each:>12}"),
            Text(drawn, no_wrap=True),
        )
    return grid


def _answers(run: Run, whole: bool) -> list[RenderableType]:
    try:
        words, answers = newest_answers(run, ANSWERS)
    except (ValueError, KeyError, OSError) as error:
        return [_title("answers"), shown(f"they can't be read: {error}", "red")]
    if not answers:
        return []
    return [_title(words), *(_answer(one, whole) for one in answers)]


def _answer(one: Answer, whole: bool) -> Text:
    score = "?" if one.score is None else number(one.score)
    outcome = "" if one.outcome in ("ok", "") else f" {one.outcome}"
    head = shown(f"{score:>4}{outcome}  {one.problem}#{one.sample}  ", "bold")
    if not whole:
        line = head + shown(one.text)
        line.no_wrap, line.overflow = True, "ellipsis"
        return line
    text, left = cut(one.text, WHOLE)
    rest = f"\n… and {left} characters more" if left else ""
    return head + Text(f"\n{visible(text)}{rest}\n")
