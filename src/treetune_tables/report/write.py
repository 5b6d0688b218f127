"""The command `make_table`: a table in all its forms, from what lies on disk. Nothing is run."""

from __future__ import annotations

import os
import platform
import shutil
import time
from pathlib import Path

from treetune.inference.cores import GIB, host_memory
from treetune.runtime.console import duration
from treetune.runtime.machine import processor, versions
from treetune.store.files import write_json, write_text
from treetune_tables.base import Table
from treetune_tables.experiments import ExperimentsTable
from treetune_tables.report.as_json import as_json
from treetune_tables.report.curves import curves, curves_json
from treetune_tables.report.experiments import write_experiments_table
from treetune_tables.report.figures import draw_curves, draw_panels, draw_table
from treetune_tables.report.latex import as_latex
from treetune_tables.report.markdown import as_markdown
from treetune_tables.report.measure import measure
from treetune_tables.report.page import as_html
from treetune_tables.report.panels import panel_curves, panels_json
from treetune_tables.runs import Plan, make_plan
from treetune_tables.settings import Reproduction
from treetune_tables.until import grown


def make_table(table: Table, command: str, output: Path | None = None) -> int:
    """Writes the table and copies its files to the folder `output` as well; the exit code.

    `command` is how it is made again. Raises ValueError where a required row has nothing to show.
    """
    if isinstance(table, ExperimentsTable):
        written = write_experiments_table(table)
    else:
        assert isinstance(table, Reproduction)
        written = write_runs_table(grown(make_plan(table)), command)
    copy(written, output)
    return 0


def write_runs_table(plan: Plan, command: str) -> list[Path]:
    """Every form of a table of runs, and its figures."""
    table = plan.table
    results, along, panels = measure(plan), curves(plan), panel_curves(plan)
    account = account_of(plan, command)
    figure = f"{table.name}_panels.png" if any(len(curve.points) > 1 for curve in panels) else None
    markdown = as_markdown(results, account, panels, figure)
    folder = Path(table.directory)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def place(ending: str) -> Path:
        written.append(folder / f"{table.name}{ending}")
        return written[-1]

    write_json(
        place(".json"),
        {**as_json(results, account), "curves": curves_json(along), "panels": panels_json(panels)},
    )
    write_text(place(".md"), markdown)
    write_text(place(".tex"), as_latex(results))
    write_text(place(".html"), as_html(results, along, account, panels))
    draw_table(results, place(".png"))
    if any(len(curve.points) > 1 for curve in along):
        draw_curves(results, along, [place("_curves.png"), place("_curves.svg")])
    if figure is not None:
        draw_panels(results, panels, [place("_panels.png"), place("_panels.svg")])
    print(markdown.split("\n## ")[0].strip())
    return written


def copy(written: list[Path], output: Path | None) -> None:
    """Copies the files of a table to a folder, if there is one to copy to, and says where they are."""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        written = [Path(shutil.copyfile(path, output / path.name)) for path in written]
    print(f"\nwritten: {', '.join(map(str, written))}", flush=True)


def account_of(plan: Plan, command: str) -> dict[str, str]:
    """Command, machine, time: what somebody needs who wants the same again."""
    seconds = sum(float(one.get("seconds") or 0.0) for run in plan.runs for one in run.attempts())
    finished = sum(status.state == "finished" for status in plan.statuses.values())
    memory = host_memory() / GIB
    name, _, _ = processor()[0].partition(",")
    return {
        "command": command,
        "runs": f"{finished} of {len(plan.runs)} finished",
        "time": f"{duration(seconds)} for all runs, start-up and evaluation included",
        "machine": f"{name}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB memory",
        "system": platform.platform(),
        "versions": ", ".join(
            f"{name} {version}"
            for name, version in {"Python": platform.python_version(), **versions()}.items()
        ),
        "written": time.strftime("%Y-%m-%d %H:%M %Z"),
    }
