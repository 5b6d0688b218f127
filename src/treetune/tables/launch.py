"""The command `reproduce_table`: runs what a table lacks, each run a process, and writes the table."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.cluster import submission
from treetune.cluster.jobs import Processes, one_at_work, slurm_header
from treetune.config.jsonnet import relative
from treetune.processes.lifetime import exit_on_signals
from treetune.runtime.console import duration
from treetune.runtime.front_door import MAIN, ranks_here, threads_each
from treetune.runtime.machine import gpus
from treetune.store.files import write_json, write_text
from treetune.tables.check import refuse_unwritten
from treetune.tables.runs import (
    MEASURABLE,
    TO_DO,
    Key,
    PlannedRun,
    RunStatus,
    TableRuns,
    inspect,
    make_plan,
    refreshed,
)
from treetune.tables.settings import Reproduction
from treetune.tables.text import until_lines
from treetune.tables.until import grown

POLL_S, PROGRESS_EVERY_S = 0.2, 60.0
TAIL_BYTES, MESSAGE_CHARACTERS = 64 * 1024, 400
FAILURE = re.compile(r" failed: |^wrong configuration")
RAISED = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")
ONE_RANK = ("run_analyzers", "fork")
"""Commands that work in one process, however many ranks train."""

Announce = Callable[[str], None]
Write = Callable[[TableRuns], object]
"""Writes the table from what lies on disk."""


def run(table: Reproduction, options: Any, write: Write) -> int:
    """Carries the command out with its options, and returns the exit code."""
    at_once = options.at_once
    if at_once < 1:
        raise ValueError(f"--at-once is {at_once}: it must be 1 or more")
    if options.plan:
        plan = grown(make_plan(table))
        say("\n".join([plan_text(plan, at_once), *until_lines(plan)]))
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
    """Runs what is missing, so many runs at once, and writes the table; returns 1 if a run could not be
    finished.

    Where the table adds seeds until it knows enough, the results decide which seeds follow.
    """
    launcher = launcher or Launcher.of_this_machine(at_once)
    exit_on_signals()
    folder = Path(table.directory)
    with one_at_work(
        folder / ".reproduction.lock", f"another reproduce_table is at work in {folder}: wait for it to end"
    ):
        plan, finished = grown(make_plan(table)), set[Key]()
        refuse_unwritten(plan)
        say(cost_line(plan, at_once))
        while True:
            unfinished = carry_out(plan, launcher, say, at_once, known=finished)
            plan = refreshed(plan)
            finished = {run.key for run in plan.runs if plan.statuses[run.key].state == "finished"}
            more = grown(plan)
            for line in until_lines(plan):
                say(line)
            if len(more.runs) == len(plan.runs):
                break
            say("more seeds: " + "; ".join(run.label for run in more.runs if run.key not in plan.statuses))
            plan = more
        write(plan)
    return 1 if unfinished else 0


def say(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True)
class Launcher:
    """The way in which a command of an experiment is started: ranks, threads for each, and the program.

    `program` stands for main.py and what starts it; None: this environment's.
    """

    ranks: int
    threads: int
    program: tuple[str, ...] | None = None

    @staticmethod
    def of_this_machine(at_once: int = 1) -> Launcher:
        """Returns run.sh's: all GPUs or one rank on a CPU (NUM_GPUS), the cores shared among the ranks of so
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

    def command(self, run: PlannedRun, command: str, *more: str) -> list[str]:
        program = self.program or ("python", "-u", relative(MAIN))
        if self.ranks > 1 and command not in ONE_RANK:
            program += "run", f"--num_gpus={self.ranks}"
        overrides = [word for text in run.recipe.overrides for word in ("--override", text)]
        return [*program, "--configs", ",".join(run.recipe.configs), *overrides, command, *more]

    def environment(self, run: PlannedRun) -> dict[str, str]:
        """Returns the variables that are set for the run, beside those that it inherits."""
        return {**run.environment, "OMP_NUM_THREADS": str(self.threads)}

    def line(self, run: PlannedRun, command: str, *more: str) -> str:
        """Returns the command as a line of the shell."""
        settings = " ".join(f"{k}={shlex.quote(v)}" for k, v in self.environment(run).items())
        return f"{settings} {shlex.join(self.command(run, command, *more))}"


def commands_of(plan: TableRuns, run: PlannedRun, status: RunStatus) -> list[tuple[str, ...]]:
    """Returns the commands that a run still needs, in order, with what stands behind them."""
    found: list[tuple[str, ...]] = []
    if status.state == "unmeasured":
        found += [("run_evaluation",)] if status.unmeasured else []
        return [*found, ("run_analyzers",)] if status.unanalysed else found
    if status.state == "missing" and run.recipe.fork is not None:
        found += [("fork", str(plan.run(run.recipe.fork, run.seed).directory.path))]
    return [*found, ("run_iteration_loop",)] if status.state in TO_DO else found


class _Attempt:
    """A command of a run at work, which its record and the console follow."""

    def __init__(self, run: PlannedRun, command: str, line: str, label: str, announce: Announce) -> None:
        self.run, self.command, self.label, self.announce = run, command, label, announce
        self.start = self._last_progress = time.monotonic()
        self._earlier = run.attempts()
        self._row = {"command": command, "started": time.time(), "seconds": 0.0, "exit_code": None}
        run.log.parent.mkdir(parents=True, exist_ok=True)
        self.record()
        with run.log.open("ab") as log:
            log.write(f"\n=== {time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n".encode())
            self._log_start = log.tell()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def record(self, **changes: Any) -> None:
        self._row.update(changes, seconds=round(self.seconds, 1))
        write_json(self.run.record, {"attempts": [*self._earlier, self._row]})

    def show_progress(self) -> None:
        if time.monotonic() - self._last_progress <= PROGRESS_EVERY_S:
            return
        self._last_progress = time.monotonic()
        self.record()
        rows, total = self.run.directory.read_metrics(), self.run.iterations
        progress = f"iteration 1 of {total}"
        if rows:
            mean = sum(row.get("seconds/total", 0.0) for row in rows) / len(rows)
            left = duration((total - len(rows)) * mean)
            progress = f"{len(rows)} of {total} iterations, {mean:.1f} s each, about {left} left"
        self.announce(f"{self.label}: {progress}, {self.seconds:.0f} s")

    def error_message(self) -> str:
        """Returns the log's line about what went wrong: main.py's own, a traceback's last, else any last."""
        with self.run.log.open("rb") as file:
            file.seek(max(self._log_start, self.run.log.stat().st_size - TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        lines = [line for line in lines if line]
        failures = [line for line in lines if FAILURE.search(line)][:1]
        raised = [line for line in lines if RAISED.match(line)]
        own = [line for line in lines if "] [launch.py:" not in line]
        return (failures or raised or own or lines or ["it said nothing"])[-1][:MESSAGE_CHARACTERS]


def carry_out(
    plan: TableRuns, launcher: Launcher, announce: Announce, at_once: int = 1, known: Collection[Key] = ()
) -> int:
    """Runs or resumes what is missing, needed runs first and so many at once, and returns how many runs could
    not be finished. Runs that are `known` to be finished are passed over in silence."""
    labels = {run.key: f"[{n}/{len(plan.runs)}] {run.label}" for n, run in enumerate(plan.runs, start=1)}
    waiting, statuses = list(plan.runs), dict(plan.statuses)
    at_work: dict[Key, _Attempt] = {}
    tried: defaultdict[Key, set[tuple[str, ...]]] = defaultdict(set)
    ended: list[tuple[PlannedRun, RunStatus]] = []
    unfinished, deadline_s = 0, plan.table.deadline_hours * 3600

    def go_on(run: PlannedRun, status: RunStatus) -> None:
        """Starts the next command that a run needs; ends it where there is none, or one helped nothing."""
        words, label = next(iter(commands_of(plan, run, status)), ()), labels[run.key]
        if words in tried[run.key]:
            why = f"{words[0]} ended well and left it as it was (log {run.log})"
            status, words = RunStatus("failed", status.done, why), ()
        if not words:
            if status.state != "finished":
                announce(f"{label}: {status.state}: {status.why}")
            ended.append((run, status))
            return
        tried[run.key].add(words)
        what = "continues" if status.state in ("interrupted", "failed") and status.done else "starts"
        announce(f"{label}: {words[0]} {what} (log {run.log})")
        program, *more = launcher.command(run, *words)
        at_work[run.key] = _Attempt(run, words[0], launcher.line(run, *words), label, announce)
        processes.start(run.key, [_program(program), *more], launcher.environment(run), run.log)

    def begin(run: PlannedRun) -> None:
        status, label = inspect(run), labels[run.key]
        lacking = [name for name, seed in run.needs if statuses[name, seed].state not in MEASURABLE]
        if status.state == "finished":
            if run.key not in known:
                announce(f"{label}: finished before")
        elif lacking:
            announce(f"{label}: skipped, for it needs {', '.join(lacking)}")
        elif status.state not in TO_DO:
            announce(f"{label}: {status.state}, {status.why}")
        else:
            return go_on(run, status)
        ended.append((run, status))
        return None

    def end_one(key: Key, code: int, message: str | None = None) -> None:
        attempt = at_work.pop(key)
        attempt.record(exit_code=code, message=message or (attempt.error_message() if code else ""))
        status = inspect(attempt.run)
        if code:
            if status.state != "finished":
                announce(f"{attempt.label}: {status.state}: {status.why}")
            ended.append((attempt.run, status))
        else:
            announce(f"{attempt.label}: {attempt.command} took {attempt.seconds:.0f} s")
            go_on(attempt.run, status)

    with Processes[Key]() as processes:
        while waiting or at_work:
            for run in list(waiting):
                if len(at_work) == at_once:
                    break
                if not {*at_work, *(other.key for other in waiting)} & set(run.needs):
                    waiting.remove(run)
                    begin(run)
                    if ended:
                        break
            for key, code in processes.take_ended().items():
                end_one(key, code)
            for key, attempt in list(at_work.items()):
                if attempt.seconds > deadline_s:
                    late = f"it took longer than {deadline_s / 3600:g} h and was ended"
                    end_one(key, processes.end(key), late)
                else:
                    attempt.show_progress()
            for run, status in ended:
                statuses[run.key] = status
                if status.state != "finished":
                    unfinished += 1
                    if plan.table.on_failure == "stop":
                        announce("stopped there, as on_failure says; the same command goes on")
                        return unfinished
            if not ended:
                time.sleep(POLL_S)
            ended.clear()
    return unfinished


def _program(name: str) -> str:
    """Returns the program of this Python's environment, else that of the PATH."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.is_file() else shutil.which(name)
    if path is None:
        raise ValueError(f"there is no {name} beside {sys.executable} or on the PATH: run ./scripts/setup.sh")
    return path


# For others to run: a command line per run, or a SLURM array


def _waves(plan: TableRuns) -> list[list[PlannedRun]]:
    """Returns the runs to do, each wave needing only what earlier ones make. Blocked runs are left out."""
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


def _line(plan: TableRuns, run: PlannedRun, launcher: Launcher) -> str:
    commands = commands_of(plan, run, plan.statuses[run.key])
    if run.analyses and ("run_analyzers",) not in commands:
        commands.append(("run_analyzers",))
    return " && ".join(launcher.line(run, *words) for words in commands)


def launch_lines(plan: TableRuns, launcher: Launcher) -> list[str]:
    """Returns a line of the shell for each run, with comments on what has to be finished before it."""
    lines: list[str] = []
    for number, wave in enumerate(_waves(plan)):
        after = "when those above have ended" if number else "at once, side by side where the machine allows"
        lines += [f"# {after}:", *(_line(plan, run, launcher) for run in wave)]
    for run in plan.to_do():
        if blocked := plan.blocked_by(run):
            lines.append(f"# {run.label}: blocked by {', '.join(blocked)}")
    return lines or ["# nothing is missing"]


def slurm_script(plan: TableRuns, launcher: Launcher, working_directory: Path) -> str:
    """Returns a script that submits itself: ``bash FILE`` queues one array per wave, each after the last.

    A wave starts when the one before has ended, well or not: a run whose start weights are missing
    then ends at once, and says so, while the others go on.
    """
    table = plan.table
    tasks: list[str] = []
    cases: list[str] = []
    for wave in _waves(plan):
        tasks.append(f"{len(cases)}-{len(cases) + len(wave) - 1}")
        for run in wave:
            cases.append(f"    {len(cases)}) # {run.label}\n        {_line(plan, run, launcher)} ;;")
    if not tasks:
        raise ValueError("nothing is missing: there is no run to put into a SLURM script")
    logs = Path(table.directory) / "logs"
    comment = """\
#
# `bash FILE` submits this file: one array per wave, each when the one before has ended. What follows the
# file's name goes to sbatch (--partition, --time). When all have ended, reproduce_table fills the table."""
    options = (
        "--nodes=1",
        "--ntasks=1",
        f"--gpus-per-node={launcher.ranks}",
        f"--cpus-per-task={launcher.ranks * launcher.threads}",
    )
    lines = slurm_header(table.name, f"{logs}/slurm-%A-%a.out", options, comment, working_directory)
    body = f"""

if [ -z "${{SLURM_ARRAY_TASK_ID:-}}" ]; then
    mkdir -p {shlex.quote(str(logs))}
    after=()
    for wave in {" ".join(tasks)}; do
        job=$({shlex.quote(sys.executable)} {shlex.quote(submission.__file__)} \\
            --parsable "${{after[@]}}" --array="$wave" "$@" "${{BASH_SOURCE[0]}}")
        echo "tasks $wave: job $job"
        after=(--dependency="afterany:$job")
    done
    exit 0
fi

case "$SLURM_ARRAY_TASK_ID" in
"""
    tail = '\n    *) echo "there is no task $SLURM_ARRAY_TASK_ID" >&2; exit 2 ;;\nesac\n'
    return "\n".join(lines) + body + "\n".join(cases) + tail


# The plan as text: states, and the cost of what is left

Cost = tuple[float | None, str]
"""Seconds that a run still needs, None where nobody knows, and where that is from."""


def estimate(plan: TableRuns, run: PlannedRun) -> Cost:
    """Returns the cost from finished runs of other seeds, else from measured iterations of this run or of
    other seeds, else from what the table states."""
    status = plan.statuses[run.key]
    if status.state not in TO_DO:
        return (0.0, "")
    if status.state == "missing":
        finished = [other for other in plan.of(run.name) if plan.statuses[other.key].state == "finished"]
        whole = {other.seed: other.seconds for other in finished if other.seconds}
        if whole:
            each = sum(whole.values()) / len(whole)
            seeds = ", ".join(map(str, whole))
            return (each, f"{each:.0f} s a run in seed{'s' if len(whole) > 1 else ''} {seeds}")
        if run.recipe.seconds_per_run is not None:
            return _stated(run, run.recipe.seconds_per_run, "a run")
    left = run.iterations - status.done
    if status.state == "unmeasured":
        return (None, "evaluation alone")
    peers = [other for other in plan.runs if other.name == run.name and other.template]
    peers.sort(key=lambda other: other.seed != run.seed)  # its own iterations first
    for peer in peers:
        if plan.statuses[peer.key].state == "different":
            continue
        totals = [row["seconds/total"] for row in peer.directory.read_metrics() if "seconds/total" in row]
        if totals:
            each = sum(totals) / len(totals)
            return (left * each, f"{each:.1f} s an iteration in seed {peer.seed}")
    if run.recipe.seconds_per_iteration is not None:
        return _stated(run, run.recipe.seconds_per_iteration, "an iteration", left)
    if run.recipe.seconds_per_run is not None:
        return _stated(run, run.recipe.seconds_per_run, "a run")
    return (None, "nothing measured or stated")


def _stated(run: PlannedRun, each: float, of: str, times: int = 1) -> Cost:
    source = f", {run.recipe.estimated_from}" if run.recipe.estimated_from else ""
    return (times * each, f"{each:g} s {of} stated{source}")


DASH = "–"


def plan_text(plan: TableRuns, at_once: int = 1) -> str:
    """A line for each run, what they may cost with so many at once, and what is wrong with some."""
    rows = [["run", "seed", "state", "iterations", "still needs", "directory"]]
    notes: dict[str, list[str]] = {}
    for run in plan.runs:
        status = plan.statuses[run.key]
        if status.why and status.state != "interrupted":
            notes.setdefault(status.why, []).append(run.label)
        place = str(run.directory.path) if run.template else DASH
        iterations = f"{status.done}/{run.iterations}" if run.template else DASH
        seed = "shared" if run.recipe.shared else str(run.seed)
        rows.append([run.name, seed, status.state, iterations, _needs(plan, run), place])
    reasons = [f"{'; '.join(runs)}:\n  " + "\n  ".join(why.splitlines()) for why, runs in notes.items()]
    return "\n".join([*_aligned(rows), "", cost_line(plan, at_once), *([""] if reasons else []), *reasons])


def cost_line(plan: TableRuns, at_once: int = 1) -> str:
    """Returns the number of runs, their states, and the cost of what is left with so many at once."""
    states = [status.state for status in plan.statuses.values()]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    parts = [f"{len(plan.runs)} runs: {told}"]
    left = [estimate(plan, run)[0] for run in plan.to_do() if not plan.blocked_by(run)]
    if seconds := sum(known for known in left if known is not None):
        together = f", or {duration(seconds / at_once)} with {at_once} at once" if at_once > 1 else ""
        parts.append(f"still about {duration(seconds)} of runs{together}")
    if unknown := left.count(None):
        parts.append(f"{unknown} runs whose cost nobody knows yet")
    return "; ".join(parts)


def _needs(plan: TableRuns, run: PlannedRun) -> str:
    """Returns the cost that a run may still have, and what has to be done before."""
    if plan.statuses[run.key].state not in TO_DO:
        return ""
    if blocked := plan.blocked_by(run):
        return f"blocked by {', '.join(blocked)}"
    seconds, basis = estimate(plan, run)
    cost = f"unknown ({basis})" if seconds is None else f"{duration(seconds)} ({basis})"
    return f"{cost}, after {', '.join(run.recipe.needs)}" if run.needs else cost


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
