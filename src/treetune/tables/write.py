"""The command `make_table`: a table in all its forms, from what lies on disk. Nothing is run."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.engine.settings import GIB, host_memory
from treetune.runtime.console import duration
from treetune.runtime.machine import processor, versions
from treetune.store.files import write_json, write_text
from treetune.tables.curves import Curve, curves, curves_json, panel_curves, panel_notes
from treetune.tables.experiments_table import write_experiments_table
from treetune.tables.figures import (
    curve_charts,
    draw_curves,
    draw_panels,
    draw_table,
    panel_charts,
    row_colours,
)
from treetune.tables.measure import CellResult, Comparison, Results, measure
from treetune.tables.runs import TableRuns, make_plan
from treetune.tables.settings import ExperimentsTable, Reproduction, Table
from treetune.tables.statistics import MeanWithInterval
from treetune.tables.text import (
    COST_WORDS,
    FATE,
    MARKS,
    as_latex,
    as_markdown,
    cost_grid,
    difference_grid,
    has_published,
    interval_text,
    legend,
    number_text,
    pair_grid,
    panel_grid,
    seeds_grid,
    seeds_lacking,
    why_empty,
)
from treetune.tables.until import grown, verdicts
from treetune.view.charts import Chart, line_chart
from treetune.view.templates import page


def make_table(table: Table, command: str, output: Path | None = None) -> int:
    """Writes the table, copies its files to the folder `output` as well, and returns the exit code.

    `command` is how it is made again. Raises ValueError where a required row has nothing to show.
    """
    if isinstance(table, ExperimentsTable):
        written = write_experiments_table(table)
    else:
        assert isinstance(table, Reproduction)
        written = write_runs_table(grown(make_plan(table)), command)
    copy(written, output)
    return 0


def write_runs_table(plan: TableRuns, command: str) -> list[Path]:
    """Writes every form of a table of runs and its figures, and returns the files."""
    table = plan.table
    results, along, panels = measure(plan), curves(plan), panel_curves(plan)
    account = _account(plan, command)
    figure = f"{table.name}_panels.png" if any(len(curve.points) > 1 for curve in panels) else None
    markdown = as_markdown(results, account, panels, figure)
    folder = Path(table.directory)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def file(ending: str) -> Path:
        written.append(folder / f"{table.name}{ending}")
        return written[-1]

    whole = as_json(results, account) | {
        "curves": curves_json(along, column="name", evaluation="evaluation"),
        "panels": curves_json(panels, panel="name", metric="metric", evaluation="evaluation", value="value"),
    }
    write_json(file(".json"), whole)
    write_text(file(".md"), markdown)
    write_text(file(".tex"), as_latex(results))
    write_text(file(".html"), as_html(results, along, account, panels))
    draw_table(results, file(".png"))
    if any(len(curve.points) > 1 for curve in along):
        draw_curves(results, along, [file("_curves.png"), file("_curves.svg")])
    if figure is not None:
        draw_panels(results, panels, [file("_panels.png"), file("_panels.svg")])
    print(markdown.split("\n## ")[0].strip())
    return written


def copy(written: list[Path], output: Path | None) -> None:
    """Copies the files of a table to a folder, if there is one to copy to, and says where they are."""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        written = [Path(shutil.copyfile(path, output / path.name)) for path in written]
    print(f"\nwritten: {', '.join(map(str, written))}", flush=True)


def _account(plan: TableRuns, command: str) -> dict[str, str]:
    """Returns command, machine and time, for somebody who wants the same again."""
    seconds = sum(float(one.get("seconds") or 0.0) for run in plan.runs for one in run.attempts())
    finished = sum(status.state == "finished" for status in plan.statuses.values())
    name, _, _ = processor()[0].partition(",")
    packages = {"Python": platform.python_version(), **versions()}
    return {
        "command": command,
        "runs": f"{finished} of {len(plan.runs)} finished",
        "time": f"{duration(seconds)} for all runs, start-up and evaluation included",
        "machine": f"{name}, {len(os.sched_getaffinity(0))} cores, {host_memory() / GIB:.0f} GiB memory",
        "system": platform.platform(),
        "versions": ", ".join(f"{package} {version}" for package, version in packages.items()),
        "written": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


def as_json(results: Results, account: Mapping[str, str]) -> dict[str, Any]:
    """Returns the table for programs."""
    table = results.plan.table
    return {
        "name": table.name,
        "title": table.title,
        "seeds": list(table.seeds),
        "baseline": table.baseline,
        "interval": table.interval,
        "cells": [_cell_json(cell) for cell in results.cells.values()],
        "pairs": [
            {"row": one.row, "to": one.to, "column": one.column.name, "seeds": one.seeds}
            | _comparison_json(one)
            for one in results.pairs
        ],
        "comparisons": results.comparisons,
        "failed_and_collapsed": dict(results.fates),
        "until": [vars(one) | {"known": _estimate_json(one.known)} for one in verdicts(results.plan)],
        "costs": {name: [dict(vars(one)) for one in costs] for name, costs in results.costs.items()},
        "account": dict(account),
    }


def _cell_json(cell: CellResult) -> dict[str, Any]:
    return {
        "row": cell.row.name,
        "column": cell.column.name,
        "measured": _estimate_json(cell.estimate),
        **_comparison_json(cell.against),
        "published": cell.published,
        "source": cell.source,
        "experiment": cell.experiment,
        "seeds": [
            {
                "seed": one.seed,
                "value": one.value,
                "directory": one.directory,
                "config_hash": one.config_hash,
                "iteration": one.iteration,
                "problems": None if one.by_problem is None else len(one.by_problem),
                "samples": one.samples,
            }
            for one in cell.seeds
        ],
        "absent": {str(seed): why for seed, why in cell.absent.items()},
        "notes": list(cell.notes),
    }


def _comparison_json(one: Comparison | None) -> dict[str, Any]:
    if one is None:
        return dict.fromkeys(("difference", "p", "p_holm", "declared", "called"))
    difference = _estimate_json(one.difference)
    told = {"p": one.p, "p_holm": one.adjusted, "declared": one.declared, "called": one.called}
    return {"difference": difference, **told}


def _estimate_json(estimate: MeanWithInterval | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {"mean": estimate.mean, "ci_low": estimate.low, "ci_high": estimate.high}


def as_html(
    results: Results, curves: Sequence[Curve], account: Mapping[str, str], panels: Sequence[Curve] = ()
) -> str:
    """Returns one self-contained page: numbers, differences, curves, costs, origins."""
    table, colours = results.plan.table, row_colours(results.plan.table)
    settings = {name: vars(one) for name, one in table.experiments.items()}
    return page(
        "table.html",
        title=table.title or table.name,
        heads=[(column.name, has_published(results, column)) for column in table.columns],
        fate=FATE,
        rows=[
            {
                "name": row.name,
                "colour": colours[row.name],
                "cells": [_cell(results.cells[row.name, column.name]) for column in table.columns],
                "fate": results.fates[row.name],
            }
            for row in table.rows
        ],
        legend=legend(results),
        along=_along(results, curves, panels),
        baseline=table.baseline,
        differences=_html(difference_grid(results)),
        pairs=_html(pair_grid(results)),
        costs=_html(cost_grid(results)),
        cost_words=COST_WORDS,
        origins=_html(seeds_grid(results)),
        account=account,
        experiments=json.dumps(settings, indent=1, ensure_ascii=False),
    )


def _cell(cell: CellResult) -> dict[str, Any]:
    column, estimate = cell.column, cell.estimate
    shown: dict[str, Any] = {
        "published": number_text(cell.published, column),
        "source": cell.source,
        "found": estimate is not None,
    }
    if estimate is None:
        why = "\n".join(f"seed {seed}: {words}" for seed, words in cell.absent.items())
        return shown | {"words": why_empty(cell), "title": why}
    low, high = (estimate.mean if bound is None else bound for bound in (estimate.low, estimate.high))
    return shown | {
        "words": number_text(estimate.mean, column),
        "title": "\n".join(f"seed {one.seed}: {one.value:.4g} ({one.directory})" for one in cell.seeds),
        "called": MARKS[cell.called],
        "interval": interval_text(estimate, column),
        "seeds": seeds_lacking(cell),
        "mark": (estimate.mean, max(0.0, low), min(1.0, high)) if column.in_percent else None,
    }


def _along(results: Results, curves: Sequence[Curve], panels: Sequence[Curve]) -> dict[str, Any] | None:
    """Returns panels and curves with one legend, and every method's first and last point in the panels."""
    charts = [*panel_charts(results, panels), *curve_charts(results, curves)]
    drawn = {one.name for chart in charts for one in chart.series}
    notes = panel_notes(results.plan, panels)
    if not drawn and not notes:
        return None
    return {
        "notes": notes or ["Means over seeds; bands are their range."],
        "rows": {name: c for name, c in row_colours(results.plan.table).items() if name in drawn},
        "charts": [
            line_chart(Chart(one.title, one.series, one.better, "range over seeds", x_name=one.x_name))
            for one in charts
            if one.series
        ],
        "ends": _html(panel_grid(results, panels)),
    }


def _html(grid: Any) -> str:
    return grid.to_html(index=False, border=0, classes="list", justify="unset") if len(grid) else ""
