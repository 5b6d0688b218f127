"""The command `make_table`: writes a table in all its forms from the results on disk, and runs nothing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.engine.settings import GIB, read_host_memory
from treetune.runtime.console import format_duration
from treetune.runtime.machine import read_processor, read_versions
from treetune.store.files import write_json, write_text
from treetune.tables.curves import Curve, curves_json, make_column_curves, make_panel_curves, panel_notes
from treetune.tables.experiments_table import write_experiments_table
from treetune.tables.figures import (
    curve_charts,
    draw_curves,
    draw_panels,
    draw_table,
    panel_charts,
    row_colours,
)
from treetune.tables.measure import CellResult, Comparison, Results, measure_cells
from treetune.tables.runs import TableRuns, make_plan
from treetune.tables.settings import ExperimentsTable, Reproduction, Table
from treetune.tables.statistics import MeanWithInterval
from treetune.tables.text import (
    COST_NOTE,
    HEAD_OF_FATES,
    MARKS_OF_DIFFERENCES,
    as_latex,
    as_markdown,
    cost_grid,
    difference_grid,
    has_published,
    interval_text,
    legend_lines,
    number_text,
    pair_grid,
    panel_grid,
    seeds_grid,
    seeds_note,
    why_empty,
)
from treetune.tables.until import add_needed_seeds, judge_differences
from treetune.view.charts import line_chart
from treetune.view.templates import render_document


def make_table(table: Table, command: str, output: Path | None = None) -> int:
    """Writes the table, copies its files to the folder `output` as well, and returns the exit code.

    `command` is the command line that writes the table again. Raises ValueError where a required row has no
    results.
    """
    if isinstance(table, ExperimentsTable):
        written_files = write_experiments_table(table)
    else:
        assert isinstance(table, Reproduction)
        written_files = write_runs_table(add_needed_seeds(make_plan(table)), command)
    copy_files(written_files, output)
    return 0


def write_runs_table(plan: TableRuns, command: str) -> list[Path]:
    """Writes every form of a table of runs and its figures, and returns the files."""
    table = plan.table
    results, column_curves, panels = measure_cells(plan), make_column_curves(plan), make_panel_curves(plan)
    account = _make_account(plan, command)
    # A curve of a single point is drawn as a horizontal line, to compare the other curves with. A figure that
    # has only such lines isn't drawn.
    has_curves = any(len(curve.points) > 1 for curve in column_curves)
    figure = f"{table.name}_panels.png" if any(len(curve.points) > 1 for curve in panels) else None
    markdown = as_markdown(results, account, panels, figure)
    folder = Path(table.directory)
    folder.mkdir(parents=True, exist_ok=True)
    written_files: list[Path] = []

    def file_to_write(ending: str) -> Path:
        """Returns the path of a file of the table, and adds it to `written_files`."""
        path = folder / f"{table.name}{ending}"
        written_files.append(path)
        return path

    data = as_json(results, account) | {
        "curves": curves_json(column_curves, column="name", evaluation="evaluation"),
        "panels": curves_json(panels, panel="name", metric="metric", evaluation="evaluation", value="value"),
    }
    write_json(file_to_write(".json"), data)
    write_text(file_to_write(".md"), markdown)
    write_text(file_to_write(".tex"), as_latex(results))
    write_text(file_to_write(".html"), as_html(results, column_curves, account, panels))
    draw_table(results, file_to_write(".png"))
    if has_curves:
        draw_curves(results, column_curves, [file_to_write("_curves.png"), file_to_write("_curves.svg")])
    if figure is not None:
        draw_panels(results, panels, [file_to_write("_panels.png"), file_to_write("_panels.svg")])
    main_part, *_ = markdown.split("\n## ")  # the title, the table and its legend
    print(main_part.strip())
    return written_files


def copy_files(written_files: list[Path], output: Path | None) -> None:
    """Copies the files of a table to the folder `output`, if there is one, and prints where they are."""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        written_files = [Path(shutil.copyfile(path, output / path.name)) for path in written_files]
    print(f"\nwritten: {', '.join(map(str, written_files))}", flush=True)


def _make_account(plan: TableRuns, command: str) -> dict[str, str]:
    """Returns how the table was made: command, time, machine and versions."""
    seconds = sum(run.seconds for run in plan.runs)
    finished = sum(status.state == "finished" for status in plan.statuses.values())
    description, _ = read_processor()
    processor = description.split(",")[0]  # without family, model, stepping and cache
    cores = len(os.sched_getaffinity(0))
    packages = {"Python": platform.python_version(), **read_versions()}
    return {
        "command": command,
        "runs": f"{finished} of {len(plan.runs)} finished",
        "time": f"{format_duration(seconds)} for all runs, start-up and evaluation included",
        "machine": f"{processor}, {cores} cores, {read_host_memory() / GIB:.0f} GiB memory",
        "system": platform.platform(),
        "versions": ", ".join(f"{package} {version}" for package, version in packages.items()),
        "written": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


def as_json(results: Results, account: Mapping[str, str]) -> dict[str, Any]:
    """Returns the table as JSON, for programs."""
    table = results.plan.table
    pairs = []
    for comparison in results.pairs:
        names = {"row": comparison.row, "to": comparison.to, "column": comparison.column.name}
        pairs.append(names | {"seeds": comparison.seeds} | _comparison_json(comparison))
    return {
        "name": table.name,
        "title": table.title,
        "seeds": list(table.seeds),
        "baseline": table.baseline,
        "interval": table.interval,
        "cells": [_cell_json(cell) for cell in results.cells.values()],
        "pairs": pairs,
        "comparisons": results.comparisons,
        "failed_and_collapsed": dict(results.fates),
        # The verdicts of the rule `until`, which decides when there are enough seeds. `known` is the
        # difference with its confidence sequence.
        "until": [
            vars(verdict) | {"known": _estimate_json(verdict.known)}
            for verdict in judge_differences(results.plan)
        ],
        "costs": {name: [vars(cost) for cost in costs] for name, costs in results.costs.items()},
        "account": dict(account),
    }


def _cell_json(cell: CellResult) -> dict[str, Any]:
    return {
        "row": cell.row.name,
        "column": cell.column.name,
        "measured": _estimate_json(cell.estimate),
        **_comparison_json(cell.comparison_to_baseline),
        "published": cell.published,
        "source": cell.source,
        "experiment": cell.experiment,
        "seeds": [
            {
                "seed": result.seed,
                "value": result.value,
                "directory": result.directory,
                "config_hash": result.config_hash,
                "iteration": result.iteration,
                "problems": None if result.by_problem is None else len(result.by_problem),
                "samples": result.samples,
            }
            for result in cell.seeds
        ],
        "absent": {str(seed): why for seed, why in cell.absent.items()},
        "notes": list(cell.notes),
    }


def _comparison_json(comparison: Comparison | None) -> dict[str, Any]:
    """Returns a comparison as JSON. Without a comparison, every entry is null."""
    if comparison is None:
        return dict.fromkeys(("difference", "p", "p_holm", "declared", "called"))
    return {
        "difference": _estimate_json(comparison.difference),
        "p": comparison.p,
        "p_holm": comparison.adjusted,
        "declared": comparison.declared,  # whether the table declared it before anything ran
        "called": comparison.significant_direction,  # such as "better"; null if it isn't significant
    }


def _estimate_json(estimate: MeanWithInterval | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {"mean": estimate.mean, "ci_low": estimate.low, "ci_high": estimate.high}


def as_html(
    results: Results,
    curves: Sequence[Curve],
    account: Mapping[str, str],
    panels: Sequence[Curve] = (),
) -> str:
    """Returns a self-contained page with numbers, differences, curves, costs and origins."""
    table, colours = results.plan.table, row_colours(results.plan.table)
    settings = {name: vars(experiment) for name, experiment in table.experiments.items()}
    rows = []
    for row in table.rows:
        cells = [_cell_values(results.cells[row.name, column.name]) for column in table.columns]
        fate = results.fates[row.name]  # how many runs failed, and how many collapsed
        rows.append({"name": row.name, "colour": colours[row.name], "cells": cells, "fate": fate})
    return render_document(
        "table.html",
        title=table.title or table.name,
        heads=[(column.name, has_published(results, column)) for column in table.columns],
        fate_head=HEAD_OF_FATES,
        rows=rows,
        legend=legend_lines(results),
        over_training=_over_training(results, curves, panels),
        baseline=table.baseline,
        differences=_html(difference_grid(results)),
        pairs=_html(pair_grid(results)),
        costs=_html(cost_grid(results)),
        cost_note=COST_NOTE,
        origins=_html(seeds_grid(results)),
        account=account,
        experiments=json.dumps(settings, indent=1, ensure_ascii=False),
    )


def _cell_values(cell: CellResult) -> dict[str, Any]:
    """Returns what the template table.html shows of a cell."""
    column, estimate = cell.column, cell.estimate
    values: dict[str, Any] = {
        "published": number_text(cell.published, column),
        "source": cell.source,
        "is_measured": estimate is not None,
    }
    if estimate is None:
        reasons = [f"seed {seed}: {reason}" for seed, reason in cell.absent.items()]
        return values | {"text": why_empty(cell), "title": "\n".join(reasons)}
    low = estimate.mean if estimate.low is None else estimate.low
    high = estimate.mean if estimate.high is None else estimate.high
    # The template draws an interval on a scale from 0 to 1, so only shares have a drawing.
    drawing = (estimate.mean, max(0.0, low), min(1.0, high)) if column.in_percent else None
    seed_values = [f"seed {result.seed}: {result.value:.4g} ({result.directory})" for result in cell.seeds]
    direction = cell.significant_direction  # of the difference to the baseline; None if it isn't significant
    return values | {
        "text": number_text(estimate.mean, column),
        "title": "\n".join(seed_values),
        "mark": MARKS_OF_DIFFERENCES[direction],
        "interval": interval_text(estimate, column),
        "seeds": seeds_note(cell),
        "interval_drawing": drawing,
    }


def _over_training(
    results: Results, curves: Sequence[Curve], panels: Sequence[Curve]
) -> dict[str, Any] | None:
    """Returns what the template table.html shows along training: the charts of panels and curves with one
    legend, notes, and every method's first and last point in the panels. Returns None where there is nothing
    to show."""
    charts = [*panel_charts(results, panels), *curve_charts(results, curves)]
    drawn_rows: set[str] = set()
    for chart in charts:
        drawn_rows |= {series.name for series in chart.series}
    notes = panel_notes(results.plan, panels)
    if not drawn_rows and not notes:
        return None
    colours = row_colours(results.plan.table)
    return {
        "notes": notes or ["Means over seeds; bands are their range."],
        "colours": {name: colour for name, colour in colours.items() if name in drawn_rows},
        "charts": [line_chart(chart) for chart in charts if chart.series],
        "ends": _html(panel_grid(results, panels)),
    }


def _html(grid: Any) -> str:
    return grid.to_html(index=False, border=0, classes="list", justify="unset") if len(grid) else ""
