"""The command `reproduce_table`: shows, starts, resumes or hands on what a table lacks."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from treetune.files import write_text
from treetune.runtime import lifeline
from treetune.sweeps.batch import launch_lines, slurm_script
from treetune.sweeps.launch import Launcher, carry_out
from treetune.sweeps.overview import plan_text
from treetune.tables.check import refuse_unwritten
from treetune.tables.runs import Plan, make_plan, refreshed
from treetune.tables.settings import Reproduction

Write = Callable[[Plan], object]
"""Shows what lies on disk: a report's business, which this room knows nothing of."""


def run(table: Reproduction, options: Any, write: Write) -> int:
    """The command with its options; the exit code."""
    if options.plan:
        say(plan_text(make_plan(table)))
    elif options.launch_lines:
        say("\n".join(launch_lines(make_plan(table), Launcher.of_this_machine())))
    elif options.slurm is not None:
        write_text(options.slurm, slurm_script(make_plan(table), Launcher.of_this_machine(), Path.cwd()))
        say(f"bash {options.slurm} submits it")
    else:
        return reproduce(table, write)
    return 0


def reproduce(table: Reproduction, write: Write, launcher: Launcher | None = None) -> int:
    """Runs what is missing and writes the table; 1 if a run could not be finished."""
    lifeline.exit_on_signals()
    with _alone(Path(table.directory)):
        plan = make_plan(table)
        refuse_unwritten(plan)
        unfinished = carry_out(plan, launcher or Launcher.of_this_machine(), say)
        write(refreshed(plan))
    return 1 if unfinished else 0


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
