"""The command `reproduce_table`: shows, starts, resumes or hands on what a table lacks."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from treetune.processes import lifetime
from treetune.store.files import write_text
from treetune_tables.check import refuse_unwritten
from treetune_tables.runs import Key, Plan, make_plan, refreshed
from treetune_tables.settings import Reproduction
from treetune_tables.sweeps.batch import launch_lines, slurm_script
from treetune_tables.sweeps.launch import Launcher, carry_out
from treetune_tables.sweeps.overview import cost_line, plan_text
from treetune_tables.until import grown

Write = Callable[[Plan], object]
"""Shows what lies on disk: a report's business, which this room knows nothing of."""


def run(table: Reproduction, options: Any, write: Write) -> int:
    """The command with its options; the exit code."""
    at_once = options.at_once
    if at_once < 1:
        raise ValueError(f"--at-once is {at_once}: it must be 1 or more")
    if options.plan:
        say(plan_text(grown(make_plan(table)), at_once))
    elif options.launch_lines:
        say("\n".join(launch_lines(grown(make_plan(table)), Launcher.of_this_machine())))
    elif options.slurm is not None:
        plan = grown(make_plan(table))
        write_text(options.slurm, slurm_script(plan, Launcher.of_this_machine(), Path.cwd()))
        say(f"bash {options.slurm} submits it")
    else:
        return reproduce(table, write, at_once=at_once)
    return 0


def reproduce(table: Reproduction, write: Write, launcher: Launcher | None = None, at_once: int = 1) -> int:
    """Runs what is missing, so many runs at once, and writes the table; 1 if a run could not be finished.

    Where the table adds seeds until it knows enough, what was found says what is run next.
    """
    launcher = launcher or Launcher.of_this_machine(at_once)
    lifetime.exit_on_signals()
    with _alone(Path(table.directory)):
        plan, finished = grown(make_plan(table)), set[Key]()
        refuse_unwritten(plan)
        say(cost_line(plan, at_once))
        while True:
            unfinished = carry_out(plan, launcher, say, at_once, known=finished)
            plan = refreshed(plan)
            finished = {run.key for run in plan.runs if plan.statuses[run.key].state == "finished"}
            more = grown(plan)
            if len(more.runs) == len(plan.runs):
                break
            say("more seeds: " + "; ".join(run.words for run in more.runs if run.key not in plan.statuses))
            plan = more
        write(plan)
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
