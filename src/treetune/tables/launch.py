"""The command `reproduce_table`: runs a table's missing experiments, each in a process, and writes the table.

    carry_out ──► begin ──► start_next_command ──► a process (run_iteration_loop, run_evaluation, …)
        ▲                          ▲                       │ ends
        └── poll every 0.2 s ──────┴── end_command ◄───────┘ or passes the deadline, and is ended

A single thread polls the processes. A run gets what it needs from earlier runs only through the files that
they left on disk.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

from treetune.cluster import slurm
from treetune.cluster.jobs import Processes, one_at_work
from treetune.config.layers import shorten_path
from treetune.exceptions import Stopped
from treetune.processes.lifetime import exit_on_signals
from treetune.runtime.console import format_duration
from treetune.runtime.machine import list_gpus
from treetune.runtime.rank_launcher import MAIN_PROGRAM, count_ranks_here, threads_per_process
from treetune.store.files import write_json, write_text
from treetune.tables.check import check_plan
from treetune.tables.runs import (
    STATES_TO_DO,
    TRAINED_STATES,
    PlannedRun,
    RunKey,
    RunStatus,
    TableRuns,
    inspect_again,
    inspect_run,
    make_plan,
)
from treetune.tables.settings import Reproduction
from treetune.tables.text import until_lines
from treetune.tables.until import add_needed_seeds

POLL_S, PROGRESS_EVERY_S = 0.2, 60.0
TAIL_BYTES, MESSAGE_CHARACTERS = 64 * 1024, 400
"""How much of a log's end is searched for an error message, and how much of the message's line is kept."""
FAILURE_LINE = re.compile(r" failed: |^wrong configuration")
"""Is found in a line in which main.py reports a failure."""
EXCEPTION_LINE = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")
"""Matches the beginning of a line that begins with the name of an exception."""
COMMANDS_OF_ONE_RANK = ("run_analyzers", "fork")
"""The commands that run in a single process, however many ranks train."""

Announce = Callable[[str], None]
"""Prints a line for the user."""
Write = Callable[[TableRuns], object]
"""Writes the table from the results on disk."""


def run(table: Reproduction, options: Any, write: Write) -> int:
    """Runs the command with its options, and returns the exit code.

    With `plan`, `launch_lines` or `slurm`, nothing is run, and the exit code is 2 if a run has a wrong
    configuration. Without any of them, the exit code is that of `reproduce`."""
    at_once = options.at_once
    if at_once < 1:
        raise ValueError(f"--at-once is {at_once}: it must be 1 or more")
    if not (options.plan or options.launch_lines or options.slurm is not None):
        return reproduce(table, write, at_once=at_once)
    plan = add_needed_seeds(make_plan(table))
    wrong_runs = [run for run in plan.runs if plan.statuses[run.key].state == "wrong"]
    if options.plan:
        # The text also has the wrong runs, with the reasons.
        say("\n".join([plan_text(plan, at_once), *until_lines(plan)]))
    else:
        _report_wrong_runs(plan, wrong_runs)
    if options.launch_lines:
        say("\n".join(launch_lines(plan, Launcher.of_this_machine())))
    if options.slurm is not None:
        write_text(options.slurm, slurm_script(plan, Launcher.of_this_machine(), Path.cwd()))
        say(f"bash {options.slurm} submits it")
    return 2 if wrong_runs else 0


def _report_wrong_runs(plan: TableRuns, wrong_runs: Sequence[PlannedRun]) -> None:
    """Prints the runs that can't be started because their configuration is wrong, with the reasons."""
    labels_by_reason: dict[str, list[str]] = {}
    for run in wrong_runs:
        labels_by_reason.setdefault(plan.statuses[run.key].why, []).append(run.label)
    for reason, labels in labels_by_reason.items():
        print(f"wrong configuration of {'; '.join(labels)}:\n{indent(reason, '  ')}", file=sys.stderr)


def reproduce(table: Reproduction, write: Write, launcher: Launcher | None = None, at_once: int = 1) -> int:
    """Runs what is missing, at most `at_once` runs at a time, and writes the table.

    If the table has the rule `until`, more seeds are added as long as the results so far call for them.
    Returns 1 if a run could not be finished, else 0.
    """
    launcher = launcher or Launcher.of_this_machine(at_once)
    exit_on_signals()
    folder = Path(table.directory)
    with (
        one_at_work(
            folder / ".reproduction.lock",
            f"another reproduce_table is running in {folder}: wait for it to end",
        ),
        _announce_continuation(),
    ):
        plan = add_needed_seeds(make_plan(table))
        check_plan(plan)
        say(cost_line(plan, at_once))
        finished: set[RunKey] = set()
        while True:
            unfinished = carry_out(plan, launcher, say, at_once, already_announced=finished)
            plan = inspect_again(plan)
            finished = {run.key for run in plan.runs if plan.statuses[run.key].state == "finished"}
            larger_plan = add_needed_seeds(plan)
            for line in until_lines(plan):
                say(line)
            if len(larger_plan.runs) == len(plan.runs):
                break
            added_labels = [run.label for run in larger_plan.runs if run.key not in plan.statuses]
            say("more seeds: " + "; ".join(added_labels))
            plan = larger_plan
        write(plan)
    return 1 if unfinished else 0


@contextmanager
def _announce_continuation() -> Iterator[None]:
    """Tells the user, if a signal ends the block, that the same command continues the work."""
    try:
        yield
    except Stopped as stop:
        print(f"ended by {stop.signal_name}; the same command continues", file=sys.stderr, flush=True)
        raise


def say(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True)
class Launcher:
    """How commands of experiments are started: the number of ranks, the threads of each, and the program.

    `program` is the beginning of the command line, up to main.py. None stands for ``python -u`` and main.py;
    `_find_program` then finds this environment's Python.
    """

    ranks: int
    threads: int
    program: tuple[str, ...] | None = None

    @staticmethod
    def of_this_machine(at_once: int = 1) -> Launcher:
        """Returns a launcher with as many ranks and threads as run.sh takes.

        There is a rank for each GPU, or one rank on a CPU, unless NUM_GPUS says otherwise. The threads of
        each rank are an equal share of the cores, among all ranks of the `at_once` runs.

        Raises ValueError for a NUM_GPUS that `count_ranks_here` refuses, and for several runs at once on
        GPUs: each run takes all of them.
        """
        if at_once > 1 and list_gpus():
            raise ValueError(
                "every run takes all GPUs, so several can't run at once here: distribute them with"
                " --launch-lines or --slurm"
            )
        ranks = count_ranks_here()
        threads = threads_per_process(ranks * at_once)  # a text, as in an environment variable
        return Launcher(ranks, int(threads))

    def command(self, run: PlannedRun, command: str, *arguments: str) -> list[str]:
        """Returns the command line of one of a run's commands. `arguments` are those of the command."""
        program = self.program or ("python", "-u", shorten_path(MAIN_PROGRAM))
        # main.py's command `run` starts the ranks, each with the command that follows.
        if self.ranks > 1 and command not in COMMANDS_OF_ONE_RANK:
            program = (*program, "run", f"--ranks={self.ranks}")
        overrides = []
        for override in run.recipe.overrides:
            overrides += ["--override", override]
        return [*program, "--configs", ",".join(run.recipe.configs), *overrides, command, *arguments]

    def environment(self, run: PlannedRun) -> dict[str, str]:
        """Returns the variables that are set for the run, in addition to those that it inherits."""
        return {**run.environment, "OMP_NUM_THREADS": str(self.threads)}

    def line(self, run: PlannedRun, command: str, *arguments: str) -> str:
        """Returns the command as a line of the shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment(run).items()]
        return f"{' '.join(variables)} {shlex.join(self.command(run, command, *arguments))}"


def commands_of(plan: TableRuns, run: PlannedRun, status: RunStatus) -> list[tuple[str, ...]]:
    """Returns the commands that a run still needs, in order, with their arguments.

    Example: `[("fork", "experiments/sft/seed-1/sft"), ("run_iteration_loop",)]`.
    """
    commands: list[tuple[str, ...]] = []
    if status.state == "unmeasured":
        if status.unmeasured:
            commands.append(("run_evaluation",))
        if status.unanalysed:
            commands.append(("run_analyzers",))
        return commands
    if status.state == "missing" and run.recipe.fork is not None:
        start = plan.run(run.recipe.fork, run.seed)
        commands.append(("fork", str(start.directory.path)))
    if status.state in STATES_TO_DO:
        # This command trains and evaluates, but it doesn't analyse. If the table shows analyses, the state is
        # "unmeasured" afterwards, and `run_analyzers` follows.
        commands.append(("run_iteration_loop",))
    return commands


class _Attempt:
    """An attempt at a run: one command of the run, which is running now.

    It writes the record of the attempt, begins the part of the log for it, and announces its progress."""

    def __init__(
        self, run: PlannedRun, command: str, shell_line: str, label: str, announce: Announce
    ) -> None:
        """Adds the attempt to the run's record, and a heading for the command to the run's log.

        Args:
            run: The run.
            command: The name of the command, such as ``"run_iteration_loop"``, for the record.
            shell_line: The whole line that starts it, with its variables and arguments, for the log.
            label: The name of the run in messages.
            announce: Called with each line about the progress.
        """
        self.run, self.command, self.label, self.announce = run, command, label, announce
        self.start = self._last_progress = time.monotonic()
        self._earlier = run.attempts()  # the rows of earlier attempts, which the record keeps
        self._row = {"command": command, "started": time.time(), "seconds": 0.0, "exit_code": None}
        run.log.parent.mkdir(parents=True, exist_ok=True)
        self.record()
        with run.log.open("ab") as log:
            log.write(f"\n=== {time.strftime('%Y-%m-%d %H:%M:%S')} {shell_line}\n".encode())
            self._log_start = log.tell()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def record(self, **changes: Any) -> None:
        """Writes the record of all attempts at the run, with changes of this attempt's row."""
        self._row.update(changes, seconds=round(self.seconds, 1))
        write_json(self.run.record, {"attempts": [*self._earlier, self._row]})

    def show_progress(self) -> None:
        """Announces how many iterations are done, and records the seconds so far. Does both at most once in
        `PROGRESS_EVERY_S` seconds."""
        if time.monotonic() - self._last_progress <= PROGRESS_EVERY_S:
            return
        self._last_progress = time.monotonic()
        self.record()
        rows, total = self.run.directory.read_metrics(), self.run.iterations
        progress = f"iteration 1 of {total}"
        if rows:
            mean = sum(row.get("seconds/total", 0.0) for row in rows) / len(rows)
            time_left = format_duration((total - len(rows)) * mean)
            progress = f"{len(rows)} of {total} iterations, {mean:.1f} s each, about {time_left} left"
        self.announce(f"{self.label}: {progress}, {self.seconds:.0f} s")

    def error_message(self) -> str:
        """Returns the line of the log that says best what went wrong.

        This is the first line in which main.py reports a failure. If there is none, it is the last line that
        begins with the name of an exception. If there is none either, it is the last line that DeepSpeed's
        launcher didn't write.
        """
        with self.run.log.open("rb") as file:
            file.seek(max(self._log_start, self.run.log.stat().st_size - TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        lines = [line for line in lines if line]
        if not lines:
            return "its log is empty"
        failures = [line for line in lines if FAILURE_LINE.search(line)]
        raised = [line for line in lines if EXCEPTION_LINE.match(line)]
        not_of_launcher = [line for line in lines if "] [launch.py:" not in line]
        if failures:
            message = failures[0]
        else:
            message = (raised or not_of_launcher or lines)[-1]
        return message[:MESSAGE_CHARACTERS]


def carry_out(
    plan: TableRuns,
    launcher: Launcher,
    announce: Announce,
    at_once: int = 1,
    already_announced: Collection[RunKey] = (),
) -> int:
    """Runs or resumes what is missing, at most `at_once` runs at a time, each after those that it needs.

    Finished runs that are in `already_announced` are not announced again. Returns the number of runs that
    could not be finished.
    """
    with Processes[RunKey]() as processes:  # leaving the block ends the commands that still run
        return _Execution(plan, launcher, announce, processes, already_announced).carry_out(at_once)


class _Execution:
    """The runs of a table while they are carried out.

    At first, a run is in `waiting_runs`. While one of its commands runs, it has an attempt in `attempts`.
    After its last command it is in `ended_runs`, until the loop has put its status into `statuses`.
    """

    def __init__(
        self,
        plan: TableRuns,
        launcher: Launcher,
        announce: Announce,
        processes: Processes[RunKey],
        already_announced: Collection[RunKey],
    ) -> None:
        self.plan, self.launcher, self.announce = plan, launcher, announce
        self.processes, self.already_announced = processes, already_announced
        self.labels: dict[RunKey, str] = {}
        """The runs' names in messages: "[2/6] ppo, seed 1"."""
        for number, run in enumerate(plan.runs, start=1):
            self.labels[run.key] = f"[{number}/{len(plan.runs)}] {run.label}"
        self.waiting_runs, self.statuses = list(plan.runs), dict(plan.statuses)
        self.attempts: dict[RunKey, _Attempt] = {}
        """The commands that run now, by the key of the run. A run has only one at a time."""
        self.started_commands: defaultdict[RunKey, set[tuple[str, ...]]] = defaultdict(set)
        """For each run, the commands that were started for it, with their arguments."""
        self.ended_runs: list[tuple[PlannedRun, RunStatus]] = []
        """The runs that ended in this turn of the loop."""

    def carry_out(self, at_once: int) -> int:
        """Carries out all runs, and returns how many of them could not be finished."""
        unfinished = 0
        while self.waiting_runs or self.attempts:
            self.begin_runs(at_once)
            for key, code in self.processes.take_ended().items():
                self.end_command(key, code)
            self.end_late_commands()
            for run, status in self.ended_runs:
                self.statuses[run.key] = status
                if status.state != "finished":
                    unfinished += 1
                    if self.plan.table.on_failure == "stop":
                        self.announce("stopped there, as on_failure says; the same command continues")
                        return unfinished
            if not self.ended_runs:
                time.sleep(POLL_S)
            self.ended_runs.clear()
        return unfinished

    def begin_runs(self, at_once: int) -> None:
        """Begins waiting runs until `at_once` commands run. A run that needs an unfinished run goes on
        waiting."""
        for run in list(self.waiting_runs):
            if len(self.attempts) == at_once:
                return
            unfinished_keys = {*self.attempts, *(other_run.key for other_run in self.waiting_runs)}
            if unfinished_keys & set(run.needs):
                continue
            self.waiting_runs.remove(run)
            self.begin(run)
            # A run may end at once. `carry_out` has to note its status before a run that needs it begins.
            if self.ended_runs:
                return

    def begin(self, run: PlannedRun) -> None:
        """Starts a run's first command; ends the run where it is finished already or can't be run."""
        status, label = inspect_run(run), self.labels[run.key]
        # The needed runs that are not trained to the end.
        unfinished_needs = [
            name for name, seed in run.needs if self.statuses[name, seed].state not in TRAINED_STATES
        ]
        if status.state in STATES_TO_DO:
            if not unfinished_needs:
                self.start_next_command(run, status)
                return
            self.announce(f"{label}: skipped, because it needs {', '.join(unfinished_needs)}")
        elif status.state == "finished":
            if run.key not in self.already_announced:
                self.announce(f"{label}: finished before")
        else:  # it can't be run, for example because its configuration is wrong
            self.announce(f"{label}: {status.state}, {status.why}")
        self.ended_runs.append((run, status))

    def start_next_command(self, run: PlannedRun, status: RunStatus) -> None:
        """Starts the next command that a run needs; ends the run where there is none."""
        commands, label = commands_of(self.plan, run, status), self.labels[run.key]
        was_started = bool(commands) and commands[0] in self.started_commands[run.key]
        if was_started:
            # It succeeded and wrote nothing, so it would be started again without end.
            reason = f"{commands[0][0]} succeeded but changed nothing (log {run.log})"
            status = RunStatus("failed", status.finished_iterations, reason)
        if not commands or was_started:
            if status.state != "finished":
                self.announce(f"{label}: {status.state}: {status.why}")
            self.ended_runs.append((run, status))
            return
        command = commands[0]
        command_name = command[0]  # the arguments follow
        self.started_commands[run.key].add(command)
        is_resumed = status.state in ("interrupted", "failed") and status.finished_iterations > 0
        self.announce(f"{label}: {command_name} {'continues' if is_resumed else 'starts'} (log {run.log})")
        program, *arguments = self.launcher.command(run, *command)
        shell_line = self.launcher.line(run, *command)
        self.attempts[run.key] = _Attempt(run, command_name, shell_line, label, self.announce)
        environment = self.launcher.environment(run)
        self.processes.start(run.key, [_find_program(program), *arguments], environment, run.log)

    def end_command(self, key: RunKey, code: int, message: str | None = None) -> None:
        """Records how a command ended, and starts the run's next one unless it failed."""
        attempt = self.attempts.pop(key)
        if message is None:
            message = attempt.error_message() if code else ""
        attempt.record(exit_code=code, message=message)
        status = inspect_run(attempt.run)
        if code:
            # A run is finished if its directory has all results. The command may have written them before it
            # failed, for example at its deadline. Then there is no failure to announce.
            if status.state != "finished":
                self.announce(f"{attempt.label}: {status.state}: {status.why}")
            self.ended_runs.append((attempt.run, status))
        else:
            self.announce(f"{attempt.label}: {attempt.command} took {attempt.seconds:.0f} s")
            self.start_next_command(attempt.run, status)

    def end_late_commands(self) -> None:
        """Ends the commands that passed the table's deadline, and shows the progress of the others."""
        deadline_s = self.plan.table.deadline_hours * 3600
        for key, attempt in list(self.attempts.items()):
            if attempt.seconds > deadline_s:
                message = f"it took longer than {deadline_s / 3600:g} h and was ended"
                self.end_command(key, self.processes.end(key), message)
            else:
                attempt.show_progress()


def _find_program(name: str) -> str:
    """Returns the path of a program, from this Python's environment or else from the PATH."""
    in_environment = Path(sys.executable).parent / name
    path = str(in_environment) if in_environment.is_file() else shutil.which(name)
    if path is None:
        raise ValueError(
            f"{name} is neither next to {sys.executable} nor on the PATH: run ./scripts/setup.sh"
        )
    return path


# Runs that others start: a command line per run, or a SLURM array


def _group_into_waves(plan: TableRuns) -> list[list[PlannedRun]]:
    """Returns the runs to do, without blocked ones, in waves. A run needs only finished runs and runs of
    earlier waves."""
    wave_numbers: dict[RunKey, int] = {}
    waves: list[list[PlannedRun]] = []
    for run in plan.to_do():  # each after those that it needs
        if plan.blocked_by(run):
            continue
        # A needed run without a number is finished.
        latest_needed = max((wave_numbers.get(key, -1) for key in run.needs), default=-1)
        wave_numbers[run.key] = latest_needed + 1
        if len(waves) <= wave_numbers[run.key]:
            waves.append([])
        waves[wave_numbers[run.key]].append(run)
    return waves


def _shell_line(plan: TableRuns, run: PlannedRun, launcher: Launcher) -> str:
    """Returns a line of the shell with all commands that a run still needs. Each is started if the one before
    it succeeds."""
    commands = commands_of(plan, run, plan.statuses[run.key])
    # `carry_out` looks at the run after training and sees that analyses are missing; a shell doesn't look.
    analyze = ("run_analyzers",)  # a command without arguments
    if run.analyses and analyze not in commands:
        commands.append(analyze)
    return " && ".join(launcher.line(run, *command) for command in commands)


def launch_lines(plan: TableRuns, launcher: Launcher) -> list[str]:
    """Returns a line of the shell for each run, with comments on what has to be finished before it."""
    lines: list[str] = []
    for number, wave in enumerate(_group_into_waves(plan)):
        condition = "when those above have ended" if number else "now, in parallel where the machine allows"
        lines += [f"# {condition}:", *(_shell_line(plan, run, launcher) for run in wave)]
    for run in plan.to_do():
        if blocking := plan.blocked_by(run):
            lines.append(f"# {run.label}: blocked by {', '.join(blocking)}")
    return lines or ["# nothing is missing"]


def slurm_script(plan: TableRuns, launcher: Launcher, working_directory: Path) -> str:
    """Returns a script that submits the missing runs in waves, each of which is one job array.

    A run needs only finished runs and runs of earlier waves. A run whose start weights are missing fails at
    once with a message, and the others continue.
    """
    waves = []
    for wave in _group_into_waves(plan):
        waves.append([slurm.ShellTask(run.label, _shell_line(plan, run, launcher)) for run in wave])
    if not waves:
        raise ValueError("no run is missing: a SLURM script would be empty")
    logs = Path(plan.table.directory) / "logs"
    comment = """\
#
# `bash FILE` submits this file: one array per wave, each when the one before has ended. Options after the
# file's name go to sbatch (--partition, --time). When all have ended, reproduce_table fills the table."""
    options = slurm.node_options(nodes=1, gpus=launcher.ranks, cpus=launcher.ranks * launcher.threads)
    header = slurm.script_header(
        plan.table.name, f"{logs}/slurm-%A-%a.out", options, comment, working_directory
    )
    return slurm.self_submitting_script(header, logs, waves)


# The plan as text: states, and the cost of what is left


class RunCost(NamedTuple):
    """The seconds that a run still needs, and the source of this number.

    Example: ``RunCost(120.0, "60.0 s an iteration in seed 1")``."""

    seconds: float | None
    """None where the cost is unknown."""
    basis: str


def estimate_run(plan: TableRuns, run: PlannedRun) -> RunCost:
    """Estimates the cost of a run from the first of these sources that there is.

    1. Only for a run that has not begun: finished runs of other seeds, then the table's `seconds_per_run`.
    2. Measured iterations of the run itself, then measured iterations of other seeds.
    3. The table's `seconds_per_iteration`, then its `seconds_per_run`.
    """
    status = plan.statuses[run.key]
    if status.state not in STATES_TO_DO:
        return RunCost(seconds=0.0, basis="")
    if status.state == "missing":  # a run that has begun takes less than a whole run
        finished = [
            other_run
            for other_run in plan.runs_of(run.name)
            if plan.statuses[other_run.key].state == "finished"
        ]
        seconds_by_seed = {other_run.seed: other_run.seconds for other_run in finished if other_run.seconds}
        if seconds_by_seed:
            mean = sum(seconds_by_seed.values()) / len(seconds_by_seed)
            seeds = ", ".join(map(str, seconds_by_seed))
            plural = "s" if len(seconds_by_seed) > 1 else ""
            return RunCost(mean, f"{mean:.0f} s a run in seed{plural} {seeds}")
        if run.recipe.seconds_per_run is not None:
            return _stated_cost(run, run.recipe.seconds_per_run, "a run")
    if status.state == "unmeasured":
        return RunCost(seconds=None, basis="evaluation alone")
    iterations_left = run.iterations - status.finished_iterations
    # Without a checked configuration, a run's directory is unknown.
    peers = [other_run for other_run in plan.runs if other_run.name == run.name and other_run.checked_config]
    peers.sort(key=lambda other_run: other_run.seed != run.seed)  # the run's own iterations first
    for peer in peers:
        if plan.statuses[peer.key].state == "different":  # another configuration may be faster or slower
            continue
        totals = [row["seconds/total"] for row in peer.directory.read_metrics() if "seconds/total" in row]
        if totals:
            mean = sum(totals) / len(totals)
            return RunCost(iterations_left * mean, f"{mean:.1f} s an iteration in seed {peer.seed}")
    if run.recipe.seconds_per_iteration is not None:
        return _stated_cost(run, run.recipe.seconds_per_iteration, "an iteration", iterations_left)
    if run.recipe.seconds_per_run is not None:
        return _stated_cost(run, run.recipe.seconds_per_run, "a run")
    return RunCost(seconds=None, basis="nothing measured or stated")


def _stated_cost(run: PlannedRun, seconds: float, unit: str, units: int = 1) -> RunCost:
    source = f", {run.recipe.estimated_from}" if run.recipe.estimated_from else ""
    return RunCost(units * seconds, f"{seconds:g} s {unit} stated{source}")


DASH = "–"


def plan_text(plan: TableRuns, at_once: int = 1) -> str:
    """Returns a text with a line for each run, the cost of all runs, and the reasons why some of them can't
    be run or have failed."""
    rows = [["run", "seed", "state", "iterations", "still needs", "directory"]]
    labels_by_reason: dict[str, list[str]] = {}
    for run in plan.runs:
        status = plan.statuses[run.key]
        # For an interrupted run, `why` says how far it has come, which its row shows already.
        if status.why and status.state != "interrupted":
            labels_by_reason.setdefault(status.why, []).append(run.label)
        # If the configuration is wrong, folder and iterations are unknown.
        folder = str(run.directory.path) if run.checked_config else DASH
        iterations = f"{status.finished_iterations}/{run.iterations}" if run.checked_config else DASH
        seed = "shared" if run.recipe.shared else str(run.seed)
        rows.append([run.name, seed, status.state, iterations, _remaining_need(plan, run), folder])
    lines = [*_align_cells(rows), "", cost_line(plan, at_once)]
    if labels_by_reason:
        lines.append("")
    for reason, labels in labels_by_reason.items():
        lines.append(f"{'; '.join(labels)}:")
        lines += [f"  {line}" for line in reason.splitlines()]
    return "\n".join(lines)


def cost_line(plan: TableRuns, at_once: int = 1) -> str:
    """Returns the number of runs, their states, and the cost of the runs that are left."""
    states = [status.state for status in plan.statuses.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    parts = [f"{len(plan.runs)} runs: {counts}"]
    costs = [estimate_run(plan, run).seconds for run in plan.to_do() if not plan.blocked_by(run)]
    if seconds := sum(cost for cost in costs if cost is not None):
        in_parallel = (
            f", or {format_duration(seconds / at_once)} with {at_once} at once" if at_once > 1 else ""
        )
        parts.append(f"still about {format_duration(seconds)} of runs{in_parallel}")
    if unknown := costs.count(None):
        parts.append(f"{unknown} runs of unknown cost")
    return "; ".join(parts)


def _remaining_need(plan: TableRuns, run: PlannedRun) -> str:
    """Returns a text about the time that a run may still take and the runs that must finish before it. It is
    empty for a run that is not to be run."""
    if plan.statuses[run.key].state not in STATES_TO_DO:
        return ""
    if blocked := plan.blocked_by(run):
        return f"blocked by {', '.join(blocked)}"
    seconds, basis = estimate_run(plan, run)
    cost = f"unknown ({basis})" if seconds is None else f"{format_duration(seconds)} ({basis})"
    needed_names = run.recipe.needs
    return f"{cost}, after {', '.join(needed_names)}" if needed_names else cost


def _align_cells(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line for each row. Cells of a column begin at the same character."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
