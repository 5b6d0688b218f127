"""The command `reproduce_table`: runs what a table lacks, each run a process, and writes the table."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.config.jsonnet import shown
from treetune.processes.lifetime import end, exit_on_signals, started, wait_a_moment
from treetune.runtime.console import duration
from treetune.runtime.front_door import MAIN, ranks_here, threads_each
from treetune.runtime.machine import gpus
from treetune.store.files import write_json, write_text
from treetune_tables.check import refuse_unwritten
from treetune_tables.overview import cost_line, plan_text
from treetune_tables.runs import (
    MEASURABLE,
    TO_DO,
    Key,
    Plan,
    PlannedRun,
    Status,
    inspect,
    make_plan,
    refreshed,
)
from treetune_tables.settings import Reproduction
from treetune_tables.until import grown

PROGRESS_EVERY_S = 60.0

TAIL_BYTES, MESSAGE_CHARACTERS = 64 * 1024, 400

_FAILURE = re.compile(r" failed: |^wrong configuration")
_RAISED = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")

ONE_RANK = ("run_analyzers",)
"""Commands that work in one process, however many ranks train."""

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Launcher:
    """How a command of an experiment is started: ranks, threads for each, and the program.

    `program` stands for main.py and what starts it; None: this environment's.
    """

    ranks: int
    threads: int
    program: tuple[str, ...] | None = None

    @staticmethod
    def of_this_machine(at_once: int = 1) -> Launcher:
        """As run.sh does: all GPUs or one rank on a CPU (NUM_GPUS), the cores shared among the ranks of so
        many runs at once.

        Raises ValueError for a NUM_GPUS that is no number, and for several runs at once on GPUs, which each
        would take whole.
        """
        if at_once > 1 and gpus():
            raise ValueError(
                "every run takes all GPUs, so several can't be at work at once here: share them out with"
                " --launch-lines or --slurm"
            )
        ranks = ranks_here()
        return Launcher(ranks, int(threads_each(ranks * at_once)))

    def command(self, run: PlannedRun, command: str) -> list[str]:
        program = self.program or ("python", "-u", shown(MAIN))
        if self.ranks > 1 and command not in ONE_RANK:
            program += "run", f"--num_gpus={self.ranks}"
        overrides = [word for text in run.recipe.overrides for word in ("--override", text)]
        return [*program, "--configs", ",".join(run.recipe.configs), *overrides, command]

    def environment(self, run: PlannedRun) -> dict[str, str]:
        """What is set for the run, beside what it inherits."""
        return {**run.environment, "OMP_NUM_THREADS": str(self.threads)}

    def line(self, run: PlannedRun, command: str) -> str:
        """The same for a shell."""
        settings = " ".join(f"{k}={shlex.quote(v)}" for k, v in self.environment(run).items())
        return f"{settings} {shlex.join(self.command(run, command))}"


def commands_of(status: Status) -> list[str]:
    """What a run still needs, in order."""
    if status.state == "unmeasured":
        commands = ["run_evaluation"] if status.unmeasured else []
        return [*commands, "run_analyzers"] if status.unanalysed else commands
    return ["run_iteration_loop"] if status.state in TO_DO else []


Work = Generator[None, None, Status]
"""A run at work: to be asked again and again until it ends with the run's status."""


def carry_out(
    plan: Plan, launcher: Launcher, announce: Announce, at_once: int = 1, known: Collection[Key] = ()
) -> int:
    """Runs or resumes what is missing, needed runs first and so many at once; how many runs could not be
    finished. Of those that are `known` to be finished nothing is said."""
    waiting = dict(enumerate(plan.runs, start=1))
    statuses, at_work = dict(plan.statuses), dict[int, Work]()
    unfinished = 0
    try:
        while waiting or at_work:
            for number, run in list(waiting.items()):
                if len(at_work) == at_once:
                    break
                to_come = {plan.runs[other - 1].key for other in (*at_work, *waiting)}
                if to_come.isdisjoint(run.needs):
                    del waiting[number]
                    place = f"[{number}/{len(plan.runs)}] {run.words}"
                    quiet = run.key in known
                    at_work[number] = _carried_out(plan, run, statuses, launcher, place, announce, quiet)
            for number, work in list(at_work.items()):
                try:
                    next(work)
                except StopIteration as end:
                    del at_work[number]
                    statuses[plan.runs[number - 1].key] = end.value
                    if end.value.state == "finished":
                        continue
                    unfinished += 1
                    if plan.table.on_failure == "stop":
                        announce("stopped there, as on_failure says; the same command goes on")
                        return unfinished
    finally:
        for work in at_work.values():
            work.close()
    return unfinished


def _carried_out(
    plan: Plan,
    run: PlannedRun,
    statuses: Mapping[Key, Status],
    launcher: Launcher,
    place: str,
    announce: Announce,
    quiet: bool,
) -> Work:
    status = inspect(run)
    if status.state == "finished":
        if not quiet:
            announce(f"{place}: finished before")
        return status
    lacking = [name for name, seed in run.needs if statuses[name, seed].state not in MEASURABLE]
    if lacking:
        announce(f"{place}: skipped, for it needs {', '.join(lacking)}")
        return status
    if status.state not in TO_DO:
        announce(f"{place}: {status.state}, {status.why}")
        return status
    status = yield from _finish(run, status, launcher, place, announce, plan.table.deadline_hours)
    if status.state != "finished":
        announce(f"{place}: {status.state}: {status.why}")
    return status


def _finish(
    run: PlannedRun, status: Status, launcher: Launcher, place: str, announce: Announce, deadline_hours: float
) -> Work:
    """Trains, then evaluates and analyses what the table reads and training left out."""
    tried: set[str] = set()
    while (commands := commands_of(status)) and commands[0] not in tried:
        command = commands[0]
        tried.add(command)
        what = "continues" if status.state in ("interrupted", "failed") and status.done else "starts"
        announce(f"{place}: {command} {what} (log {run.log})")
        seconds, code = yield from _attempt(run, command, launcher, place, announce, deadline_hours * 3600)
        status = inspect(run)
        if code:
            return status
        announce(f"{place}: {command} took {seconds:.0f} s")
    if commands:
        return Status(
            "failed", status.done, f"{commands[0]} ended well and left it as it was (log {run.log})"
        )
    return status


def _attempt(
    run: PlannedRun, command: str, launcher: Launcher, place: str, announce: Announce, deadline_s: float
) -> Generator[None, None, tuple[float, int]]:
    """One process to its end: seconds and exit code. It is kept in the run's record."""
    words = launcher.command(run, command)
    words[0] = _program(words[0])
    run.log.parent.mkdir(parents=True, exist_ok=True)
    attempts = run.attempts()
    attempt: dict[str, Any] = {"command": command, "started": time.time(), "seconds": 0.0, "exit_code": None}
    start = time.monotonic()

    def keep(**changes: Any) -> None:
        attempt.update(changes, seconds=round(time.monotonic() - start, 1))
        write_json(run.record, {"attempts": [*attempts, attempt]})

    keep()
    with run.log.open("ab") as log:
        log.write(f"\n=== {time.strftime('%Y-%m-%d %H:%M:%S')} {launcher.line(run, command)}\n".encode())
        log.flush()
        began = log.tell()
        with started(words, launcher.environment(run), log) as process:
            last_progress = start
            while (code := wait_a_moment(process)) is None:
                yield
                now = time.monotonic()
                if now - start > deadline_s:
                    end(process)
                    code = process.returncode or 1
                    keep(exit_code=code, message=f"it took longer than {deadline_s / 3600:g} h and was ended")
                    return now - start, code
                if now - last_progress > PROGRESS_EVERY_S:
                    last_progress = now
                    keep()
                    announce(f"{place}: {_progress(run)}, {now - start:.0f} s")
    keep(exit_code=code, message=_message(run.log, began) if code else "")
    return time.monotonic() - start, code


def _program(name: str) -> str:
    """The launcher of this Python's environment, else that of the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise ValueError(f"there is no {name} beside {sys.executable} or on the PATH: run ./scripts/setup.sh")
    return found


def _progress(run: PlannedRun) -> str:
    rows = run.directory.read_metrics()
    if not rows:
        return f"iteration 1 of {run.iterations}"
    mean = sum(row.get("seconds/total", 0.0) for row in rows) / len(rows)
    left = (run.iterations - len(rows)) * mean
    return f"{len(rows)} of {run.iterations} iterations, {mean:.1f} s each, about {duration(left)} left"


def _message(log: Path, began: int) -> str:
    """The line of the log that says what went wrong: main.py's own, a traceback's last, else any last one."""
    with log.open("rb") as file:
        file.seek(max(began, log.stat().st_size - TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    failures = [line for line in lines if _FAILURE.search(line)][:1]
    raised = [line for line in lines if _RAISED.match(line)]
    own = [line for line in lines if "] [launch.py:" not in line]
    return (failures or raised or own or lines or ["it said nothing"])[-1][:MESSAGE_CHARACTERS]


def waves(plan: Plan) -> list[list[PlannedRun]]:
    """The runs to do, each wave needing only what earlier ones make. Blocked runs are left out."""
    depth: dict[Key, int] = {}
    found: list[list[PlannedRun]] = []
    for run in plan.to_do():
        if plan.blocked_by(run):
            continue
        depth[run.key] = 1 + max((depth.get(needed, -1) for needed in run.needs), default=-1)
        if len(found) <= depth[run.key]:
            found.append([])
        found[depth[run.key]].append(run)
    return found


def launch_lines(plan: Plan, launcher: Launcher) -> list[str]:
    """Shell text: a line for each run, with comments that say what has to be finished before it."""
    lines: list[str] = []
    for number, wave in enumerate(waves(plan)):
        after = (
            "at once, side by side where the machine allows" if number == 0 else "when those above have ended"
        )
        lines.append(f"# {after}:")
        for run in wave:
            lines.append(_line(plan, run, launcher))
    for run in plan.to_do():
        if blocked := plan.blocked_by(run):
            lines.append(f"# {run.words}: blocked by {', '.join(blocked)}")
    return lines or ["# nothing is missing"]


def _line(plan: Plan, run: PlannedRun, launcher: Launcher) -> str:
    commands = commands_of(plan.statuses[run.key])
    if run.analyses and "run_analyzers" not in commands:
        commands.append("run_analyzers")
    return " && ".join(launcher.line(run, command) for command in commands)


def slurm_script(plan: Plan, launcher: Launcher, working_directory: Path) -> str:
    """A script that submits itself: ``bash FILE`` queues one array per wave, each after the last.

    A wave starts when the one before has ended, well or not: a run whose start weights are missing
    then ends at once, and says so, while the others go on.
    """
    table = plan.table
    ranges, cases, first = [], [], 0
    for wave in waves(plan):
        ranges.append(f"{first}-{first + len(wave) - 1}")
        for task, run in enumerate(wave, start=first):
            cases.append(f"    {task}) # {run.words}\n        {_line(plan, run, launcher)} ;;")
        first += len(wave)
    if not ranges:
        raise ValueError("nothing is missing: there is no run to put into a SLURM script")
    logs = shlex.quote(str(Path(table.directory) / "logs"))
    newline = "\n"
    return f"""\
#!/usr/bin/env bash
#SBATCH --job-name={table.name}
#SBATCH --output={Path(table.directory) / "logs"}/slurm-%A-%a.out
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node={launcher.ranks}
#SBATCH --cpus-per-task={launcher.ranks * launcher.threads}
#
# `bash FILE` submits this file: one array per wave, each when the one before has ended. What follows the
# file's name goes to sbatch (--partition, --time). When all have ended, reproduce_table fills the table.
set -euo pipefail
cd {shlex.quote(str(working_directory))}
export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"

if [ -z "${{SLURM_ARRAY_TASK_ID:-}}" ]; then
    mkdir -p {logs}
    after=()
    for wave in {" ".join(ranges)}; do
        job=$(sbatch --parsable "${{after[@]}}" --array="$wave" "$@" "${{BASH_SOURCE[0]}}")
        echo "tasks $wave: job ${{job%%;*}}"
        after=(--dependency="afterany:${{job%%;*}}")
    done
    exit 0
fi

case "$SLURM_ARRAY_TASK_ID" in
{newline.join(cases)}
    *) echo "there is no task $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;
esac
"""


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
    exit_on_signals()
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
