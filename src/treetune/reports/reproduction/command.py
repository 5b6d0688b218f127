"""`reproduce_table`: plans, carries out, and writes a reproduction's table."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from treetune.config.jsonnet import shown
from treetune.reports.reproduction.batch import launch_lines, slurm_script
from treetune.reports.reproduction.curves import curves, curves_json
from treetune.reports.reproduction.figures import draw_curves, draw_panels, draw_table
from treetune.reports.reproduction.formats import as_json, as_markdown
from treetune.reports.reproduction.latex import as_latex
from treetune.reports.reproduction.launch import MAIN, Launcher, carry_out
from treetune.reports.reproduction.measure import measure
from treetune.reports.reproduction.page import as_html
from treetune.reports.reproduction.panels import panel_curves, panels_json
from treetune.reports.reproduction.plan import TO_DO, Plan, estimate, make_plan, refreshed
from treetune.reports.reproduction.settings import Reproduction
from treetune.runtime import lifeline
from treetune.runtime.directory import write_json, write_text
from treetune.runtime.manifest import versions


def check(table: Reproduction) -> None:
    """Raises ValueError that names every experiment whose configuration is wrong."""
    wrong = {run.name: run.wrong for run in make_plan(table).runs if run.wrong}
    if wrong:
        told = "\n\n".join(f"experiment {name!r}: {why}" for name, why in wrong.items())
        raise ValueError(f"{len(wrong)} of the table's experiments can't be run\n\n{told}")


def reproduce(
    table: Reproduction, command: str, output: Path | None, launcher: Launcher | None = None
) -> int:
    """Runs what is missing and writes the table; 1 if a run could not be finished."""
    lifeline.exit_on_sigterm()
    with _alone(Path(table.directory)):
        plan = make_plan(table)
        unfinished = carry_out(plan, launcher or Launcher.of_this_machine(), say)
        write(refreshed(plan), command, output)
    return 1 if unfinished else 0


def write(plan: Plan, command: str, output: Path | None) -> list[Path]:
    """The table from what lies on disk in all its forms, and its figures."""
    table = plan.table
    results, along, panels = measure(plan), curves(plan), panel_curves(plan)
    account = account_of(plan, command)
    figure = f"{table.name}_panels.png" if any(len(curve.points) > 1 for curve in panels) else None
    markdown = as_markdown(results, account, panels, figure)
    folder = Path(table.directory)
    folder.mkdir(parents=True, exist_ok=True)

    def place(ending: str) -> Path:
        written.append(folder / f"{table.name}{ending}")
        return written[-1]

    written: list[Path] = []
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
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        written = [shutil.copyfile(path, output / path.name) for path in written if path.is_file()]
    say(markdown.split("\n## ")[0].strip())
    say(f"\nwritten: {', '.join(map(str, written))}")
    return written


def account_of(plan: Plan, command: str) -> dict[str, str]:
    """Command, machine, time: what somebody needs who wants the same again."""
    seconds = sum(float(one.get("seconds") or 0.0) for run in plan.runs for one in run.attempts())
    finished = sum(status.state == "finished" for status in plan.statuses.values())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "command": f"`{command}`",
        "runs": f"{finished} of {len(plan.runs)} finished",
        "time": f"{duration(seconds)} for all runs, start-up and evaluation included",
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB memory",
        "system": platform.platform(),
        "versions": ", ".join(
            f"{name} {version}"
            for name, version in {"Python": platform.python_version(), **versions()}.items()
        ),
        "written": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def show_plan(table: Reproduction) -> int:
    """Prints every run: what exists, what is missing, and what that may cost. Writes nothing."""
    plan = make_plan(table)
    say(plan_text(plan))
    return 0


def plan_text(plan: Plan) -> str:
    rows, seconds, unknown = [["run", "seed", "state", "iterations", "still needs", "directory"]], 0.0, 0
    notes: dict[str, list[str]] = {}
    for run in plan.runs:
        status = plan.statuses[run.key]
        blocked = plan.blocked_by(run) if status.state in TO_DO else []
        left = estimate(plan, run)
        if blocked:
            cost = f"blocked by {', '.join(blocked)}"
        elif status.state not in TO_DO:
            cost = ""
        elif left.seconds is None:
            cost, unknown = f"unknown ({left.basis})", unknown + 1
        else:
            cost, seconds = f"{duration(left.seconds)} ({left.basis})", seconds + left.seconds
        if run.needs and status.state in TO_DO and not blocked:
            cost += f", after {', '.join(run.recipe.needs)}"
        if status.why and status.state != "interrupted":
            notes.setdefault(status.why, []).append(run.words)
        place = str(run.directory.path) if run.template else DASH
        iterations = f"{status.done}/{run.iterations}" if run.template else DASH
        rows.append([run.name, str(run.seed), status.state, iterations, cost, place])
    states = [status.state for status in plan.statuses.values()]
    total = f"{len(rows) - 1} runs: " + ", ".join(
        f"{states.count(state)} {state}" for state in dict.fromkeys(states)
    )
    left_over = [f"still about {duration(seconds)} of iterations"] if seconds else []
    left_over += [f"{unknown} runs whose cost nobody knows yet"] if unknown else []
    told = [f"{'; '.join(runs)}:\n  " + "\n  ".join(why.splitlines()) for why, runs in notes.items()]
    return "\n".join([*_aligned(rows), "", "; ".join([total, *left_over]), *([""] if told else []), *told])


DASH = "–"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One `reproduce_table` in a directory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".reproduction.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another reproduce_table is at work in {folder}: wait for it to end") from error
        yield


def say(text: str) -> None:
    print(text, flush=True)


def run(table: Reproduction, options: Any) -> int:
    """`make_table` and `reproduce_table` with the command line's options; the exit code."""
    words = shlex.join(["python", shown(MAIN), *sys.argv[1:]])
    if options.command == "make_table":
        write(make_plan(table), words, options.output)
        return 0
    if options.plan:
        return show_plan(table)
    if options.launch_lines:
        say("\n".join(launch_lines(make_plan(table), Launcher.of_this_machine())))
        return 0
    if options.slurm is not None:
        write_text(options.slurm, slurm_script(make_plan(table), Launcher.of_this_machine(), Path.cwd()))
        say(f"bash {options.slurm} submits it")
        return 0
    return reproduce(table, words, options.output)
