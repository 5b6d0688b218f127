"""Jobs: parallel processes on this machine, or tasks of a SLURM array.

One thread, such as that of `treetune.data.difficulty.watching`, polls the jobs of a folder::

    the command's thread     "local": processes                       "slurm": tasks of an array
    ────────────────────     ──────────────────────────────────       ──────────────────────────────────────
    start(shards)            at most `at_once`; the others wait       sbatch; a busy controller is asked again
                                                                        in `alive`, SUBMIT_PATIENCE_S at most
    alive(), every `poll`    takes the exit codes of jobs that        squeue; OSError if it can't say
                               ended, and starts those that wait
    stop(shard)              SIGTERM, and SIGKILL for what is         scancel
                               left after `lifetime.END_GRACE_S`
    leave()                  the same for each process in turn        nothing: the tasks keep running
    the command dies         the kernel sends SIGTERM to them         nothing: the same command finds them

No call waits for a job's work, and no job has a deadline here: the caller ends the jobs that show no progress
for `silence` seconds, and restarts the jobs that died. A task may be queued for any time. A command of SLURM
may take `slurm.COMMAND_TIMEOUT_S`. If a process ends and its children don't, `alive` gives the children
`lifetime.END_GRACE_S` to end, and then kills them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import subprocess
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, Protocol, TypeVar

from annotated_types import Ge, Gt
from typing_extensions import override

from treetune.cluster import slurm
from treetune.cluster.slurm import SlurmBusy, SlurmRefused
from treetune.config.registrable import Registrable
from treetune.processes.lifetime import end_process_group, start_process_group
from treetune.store.files import write_text

SUBMIT_PATIENCE_S = 3600.0
"""Seconds for which jobs are submitted again to a busy controller."""

K = TypeVar("K", bound=Hashable)


@contextlib.contextmanager
def one_at_work(lock: Path, message: str) -> Iterator[None]:
    """Holds a file's lock for the block. Raises ValueError with `message` if another process holds it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(message) from error
        yield


class Processes(contextlib.ExitStack, Generic[K]):
    """Processes by their keys, each in a process group of its own. The processes that still run at the end of
    the `with` block are ended."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[K, subprocess.Popen[bytes]] = {}
        self._stacks: dict[K, contextlib.ExitStack] = {}
        """For each process, by its key, the stack whose `close` ends the process and closes its log."""

    def start(self, key: K, command: Sequence[str], settings: Mapping[str, str], log: Path) -> None:
        """Starts a process with `settings` in its environment. Its output is added to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        # This process's stack is in the stack of all processes: the process ends if either is closed.
        stack = self.enter_context(contextlib.ExitStack())
        self._stacks[key] = stack
        file = stack.enter_context(log.open("ab"))
        self.running[key] = stack.enter_context(start_process_group(command, settings, file))

    def take_ended(self) -> dict[K, int]:
        """Returns the exit codes of processes that ended since the last call."""
        codes: dict[K, int] = {}
        for key, process in self.running.items():
            code = process.poll()
            if code is not None:
                codes[key] = code
        for key in codes:
            del self.running[key]
            self._stacks.pop(key).close()
        return codes

    def end(self, key: K) -> int:
        """Ends a process and its children, and returns the exit code of the process, or 1 if that is 0."""
        process = self.running.pop(key)
        self._stacks.pop(key).close()  # ends the process group, and closes the log
        # A process that had to be ended did not finish, even if it then exits with 0.
        return process.returncode or 1


class RunningJobs(Protocol):
    """The jobs of a folder, at most one for each shard."""

    def start(self, shards: Sequence[int]) -> None:
        """Starts these shards' jobs, or queues them."""

    def alive(self) -> set[int]:
        """Returns the shards whose job runs or is queued. Raises OSError if that isn't known."""

    def running_shards(self) -> set[int]:
        """Returns the shards whose job runs."""

    def describe_end(self, shard: int) -> str:
        """Returns a message on how a shard's last job ended, as far as is known."""

    def was_taken_away(self, shard: int) -> bool:
        """Returns whether the cluster ended a shard's last job: it was preempted, or its machine failed."""

    def describe_waits(self) -> Mapping[str, str]:
        """Returns messages that say why jobs don't run yet, by the reason. The caller shows the message of
        each reason once."""

    def stop(self, shard: int) -> None:
        """Ends a job that makes no progress."""

    def leave(self) -> str:
        """Ends the jobs, or leaves them running, and returns a message that says which."""


class Jobs(Registrable):
    """The way in which jobs are run. A job that died is restarted at most `restarts` times; a job without
    progress for `silence` seconds counts as dead. The state of jobs is checked every `poll` seconds."""

    restarts: int
    silence: float
    poll: float
    settle: float = 0.0
    """Seconds that a slow file system gets, after a job has ended, to show the files that the job wrote last.
    A job that has left no result by then counts as dead."""

    def begin(self, command: Sequence[str], output: Path) -> RunningJobs:
        """Returns an object that runs the jobs of a folder.

        Args:
            command: The command of a job, without its last argument, which is the number of the job's shard.
            output: The folder of all jobs.
        """
        raise NotImplementedError


@Jobs.register("local")
@dataclass(frozen=True, kw_only=True)
class LocalJobs(Jobs):
    """Processes on this machine. They end with the command."""

    at_once: Annotated[int, Gt(0)] = 1
    """The number of jobs that run at a time."""
    gpus: Annotated[int, Ge(0)] = 0
    """The number of GPUs that each job has to itself; 0: every job sees all GPUs that this process sees."""
    restarts: Annotated[int, Ge(0)] = 3
    """The most times that a job is restarted after it died."""
    silence: Annotated[float, Gt(0)] = 3600.0
    """Seconds without progress after which a job counts as dead."""
    poll: Annotated[float, Gt(0)] = 0.5
    """Seconds between two checks."""

    @override
    def begin(self, command: Sequence[str], output: Path) -> RunningJobs:
        return _Local(self, command, output)


class _Local:
    """Runs the jobs of a folder as processes; see `RunningJobs`."""

    def __init__(self, settings: LocalJobs, command: Sequence[str], output: Path) -> None:
        self._settings, self._command, self._logs = settings, command, output / "shards" / "logs"
        self._waiting: list[int] = []
        """The shards whose jobs wait for others to end."""
        self._processes: Processes[int] = Processes()
        self._slots: dict[int, int] = {}
        """The slot of each shard's job, a number from 0 to `at_once` - 1 that no other running job has. It
        decides which GPUs the job gets."""
        self._exit_codes: dict[int, int] = {}
        """The exit code of each shard's last job."""

    def start(self, shards: Sequence[int]) -> None:
        self._waiting += shards
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Starts as many of the waiting jobs as may run at a time."""
        while self._waiting and len(self._processes.running) < self._settings.at_once:
            taken = {self._slots[shard] for shard in self._processes.running}
            slot = next(slot for slot in range(self._settings.at_once) if slot not in taken)
            shard = self._waiting.pop(0)
            self._slots[shard] = slot
            command, log = [*self._command, str(shard)], self._logs / f"{shard:04d}.out"
            self._processes.start(shard, command, self._gpus_of_slot(slot), log)

    def _gpus_of_slot(self, slot: int) -> dict[str, str]:
        """Returns the environment variable that gives this slot's job its GPUs; an empty dictionary if jobs
        have no GPUs to themselves. Raises ValueError if there are too few GPUs."""
        count = self._settings.gpus
        if not count:
            return {}
        visible_gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        numbers = range(slot * count, (slot + 1) * count)
        # Without the variable, the number of GPUs isn't known here. A job itself finds out whether it has its
        # GPUs.
        if visible_gpus and numbers[-1] >= len(visible_gpus):
            raise ValueError(
                f"jobs.gpus is {count} and jobs.at_once {self._settings.at_once}, and this process sees"
                f" {len(visible_gpus)} GPUs: lower one of them"
            )
        # Where this process sees only some GPUs, the job gets their names, and otherwise plain numbers.
        names = [visible_gpus[number] if visible_gpus else str(number) for number in numbers]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names)}

    def alive(self) -> set[int]:
        self._exit_codes |= self._processes.take_ended()
        self._start_waiting()
        return {*self._processes.running, *self._waiting}

    def running_shards(self) -> set[int]:
        return set(self._processes.running)

    def describe_end(self, shard: int) -> str:
        code = self._exit_codes.get(shard)
        if code is None:
            return "it was not started"
        return f"it was ended by signal {-code}" if code < 0 else f"it ended with code {code}"

    def was_taken_away(self, shard: int) -> bool:
        return False

    def describe_waits(self) -> Mapping[str, str]:
        return {}

    def stop(self, shard: int) -> None:
        if shard in self._processes.running:
            end_process_group(self._processes.running[shard])  # the next `alive` takes its exit code

    def leave(self) -> str:
        count = len(self._processes.running)
        self._processes.close()
        return f"{count} jobs ended"


@Jobs.register("slurm")
@dataclass(frozen=True, kw_only=True)
class SlurmJobs(Jobs):
    """Tasks of a SLURM array. The cluster's machines must see the working directory, the folder of the jobs
    and the rows that they read under the same paths as this machine.

    The jobs of a folder have a unique name. If the command ends or is killed, the jobs keep running, and the
    same command finds them by that name. A task that you submit yourself (``sbatch --array=3
    DIR/jobs/shard.sh``) is watched as well.
    """

    options: tuple[str, ...] = ()
    """Options of sbatch: ``--partition=gpu``, ``--gpus-per-node=8``, ``--time=8:00:00``."""
    setup: str = ""
    """Lines of the shell before the command, such as ``source .venv/bin/activate``."""
    at_once: Annotated[int, Gt(0)] | None = None
    """The most tasks that run at a time; null: as many as SLURM allows."""
    restarts: Annotated[int, Ge(0)] = 3
    """The most times that a job is restarted after it died."""
    silence: Annotated[float, Gt(0)] = 3600.0
    """Seconds without progress after which a job counts as dead."""
    poll: Annotated[float, Gt(0)] = 10.0
    """Seconds between two checks."""
    settle: Annotated[float, Ge(0)] = 20.0
    """Seconds that a slow file system gets, after a job has ended, to show the files that the job wrote last.
    A job that has left no result by then counts as dead. A busy controller is asked again after as many
    seconds, or after `poll` if that is more."""

    def __post_init__(self) -> None:
        reserved_options = ("--array", "-a", "--parsable", "--output", "-o", "--job-name", "-J")
        for option in self.options:
            # Parsed as sbatch reads it from a script, where a line may have several options.
            options, _ = slurm.split_arguments(slurm.arguments_in_script(f"#SBATCH {option}"))
            is_reserved = any(
                slurm.is_option(name, reserved) for name, _ in options for reserved in reserved_options
            )
            if not option.startswith("-") or is_reserved:
                raise ValueError(
                    f"options has {option!r}: give each as one string such as '--partition=gpu'; --array,"
                    " --output, --job-name and --parsable are set by this command"
                )

    @override
    def begin(self, command: Sequence[str], output: Path) -> RunningJobs:
        return _Slurm(self, command, output)


class _Slurm:
    """Runs the jobs of a folder as tasks of SLURM arrays; see `RunningJobs`."""

    def __init__(self, settings: SlurmJobs, command: Sequence[str], output: Path) -> None:
        self._settings = settings
        self._script = output / "jobs" / "shard.sh"
        logs = (output / "shards" / "logs").resolve()
        logs.mkdir(parents=True, exist_ok=True)
        # The jobs of a folder have a name of their own, by which a later start of the command finds them.
        digest = hashlib.blake2b(str(output.resolve()).encode(), digest_size=6).hexdigest()
        self._name = f"difficulty-{digest}"
        self._states: dict[int, str] = {}
        """The state of each shard's job that runs or is queued."""
        self._reasons: dict[int, str] = {}
        """squeue's reason why a shard's task doesn't run yet, by the number of the shard."""
        self._last_jobs: dict[int, str] = {}
        """SLURM's number of each shard's last job."""
        self._end_states: dict[int, str] = {}
        """The state in which a shard's last job ended."""
        self._unsent_shards: set[int] = set()
        """The shards whose jobs a busy controller hasn't accepted yet, as far as is known."""
        self._complaint = ""
        """The controller's last complaint; empty if it has accepted everything."""
        self._time_of_first_attempt = 0.0
        """The time of the first attempt to submit the jobs of `_unsent_shards`, in seconds since 1970.
        SLURM's accounting is asked for jobs from this time on."""
        self._time_of_next_attempt = 0.0
        """The earliest time of the next attempt, by `time.monotonic`."""
        comment = (
            "# Works on one shard, that of its task in the array. estimate_difficulty wrote and submits it."
        )
        log = f"{logs}/slurm-%A_%a.out"
        sources = os.environ.get("PYTHONPATH")  # decides which sources a job imports
        lines = [
            *slurm.script_header(self._name, log, settings.options, comment, Path.cwd()),
            *([f"export PYTHONPATH={shlex.quote(sources)}"] if sources else []),
            *([settings.setup] if settings.setup else []),
            f'exec {shlex.join(command)} "$SLURM_ARRAY_TASK_ID"',
        ]
        write_text(self._script, "\n".join(lines) + "\n")
        self._cluster = slurm.cluster_options([str(self._script)])

    def start(self, shards: Sequence[int]) -> None:
        if not shards:
            return
        if not self._unsent_shards:
            self._time_of_first_attempt = time.time()
        self._unsent_shards |= set(shards)
        self._submit_unsent()

    def _submit_unsent(self) -> None:
        """Submits the jobs of `_unsent_shards`.

        A busy controller may report an error although it has accepted the jobs. So `alive` looks for the jobs
        in the queue before it submits them again.
        """
        array = slurm.array_ranges(sorted(self._unsent_shards))
        if self._settings.at_once:
            array += f"%{self._settings.at_once}"
        try:
            number = slurm.submit_once(["--parsable", f"--array={array}", str(self._script)])
        except SlurmBusy as busy:
            waited = time.time() - self._time_of_first_attempt
            if waited > SUBMIT_PATIENCE_S:
                raise RuntimeError(f"{busy}, for {waited / 60:.0f} minutes") from busy
            self._complaint = str(busy)
            # The pause gives jobs that were accepted in spite of the error time to appear in the queue.
            pause_s = max(self._settings.settle, self._settings.poll)
            self._time_of_next_attempt = time.monotonic() + pause_s
            return
        except ValueError as error:
            raise _suggest_local_jobs(error) from error
        # sbatch may accept the jobs without telling their number. `alive` then finds the number in the queue:
        # accepted jobs are never submitted again.
        if number is not None:
            self._last_jobs.update(dict.fromkeys(self._unsent_shards, number))
        self._unsent_shards, self._complaint = set(), ""

    def alive(self) -> set[int]:
        try:
            tasks = slurm.tasks_in_queue(self._name, self._cluster)
        except SlurmRefused as error:  # which jobs run is unknown for now: the caller asks again
            raise OSError(str(error)) from error
        except ValueError as error:
            raise _suggest_local_jobs(error) from error
        self._states, self._reasons = {}, {}
        for task in tasks:
            self._states[task.number] = task.state
            self._last_jobs[task.number] = task.job
            if task.state not in slurm.RUNNING_STATES:
                self._reasons[task.number] = task.reason
        if self._unsent_shards:
            # A shard in the queue was accepted, though the busy controller did not say so.
            self._unsent_shards -= set(self._states)
            if self._unsent_shards and time.monotonic() >= self._time_of_next_attempt:
                self._find_accepted_jobs()
                if self._unsent_shards:
                    self._submit_unsent()
        # Unsent jobs count as queued, since `_submit_unsent` tries again.
        return set(self._states) | self._unsent_shards

    def _find_accepted_jobs(self) -> None:
        """Removes a shard from `_unsent_shards` if SLURM's accounting has a new job of the shard.

        The queue didn't show this job: it was accepted after the queue was read, or has already ended.
        """
        # A copy: a shard of which a new job was found leaves `_unsent_shards`, but the accounting may list a
        # still newer job of it.
        unsent = frozenset(self._unsent_shards)
        for task in slurm.tasks_in_accounting(self._name, self._time_of_first_attempt, self._cluster):
            # SLURM's job numbers increase, so a number that isn't larger is that of an earlier job.
            is_new = int(task.job) > int(self._last_jobs.get(task.number, 0))
            if task.number not in unsent or not is_new:
                continue
            self._unsent_shards.discard(task.number)
            self._last_jobs[task.number] = task.job
            if task.state not in slurm.ENDED_STATES:
                self._states[task.number] = task.state

    def running_shards(self) -> set[int]:
        return {shard for shard, state in self._states.items() if state in slurm.RUNNING_STATES}

    def describe_waits(self) -> Mapping[str, str]:
        """Returns a message for each reason why jobs don't run yet, by the reason.

        The reason is the controller's complaint for jobs that aren't submitted yet, and squeue's reason for
        jobs in the queue.
        """
        messages: dict[str, str] = {}
        if self._unsent_shards:
            messages[self._complaint] = (
                f"{len(self._unsent_shards)} jobs are not submitted yet ({self._complaint}): they are"
                " submitted again unless they appear in the queue"
            )
        shards_by_reason: dict[str, list[int]] = {}
        for shard, full_reason in self._reasons.items():
            # "ReqNodeNotAvail, UnavailableNodes:…" names other nodes each time: the comma ends the reason.
            # Where squeue gives no reason, the job's state stands for it.
            reason = full_reason.partition(",")[0] or self._states[shard]
            shards_by_reason.setdefault(reason, []).append(shard)
        for reason, shards in shards_by_reason.items():
            count = f"{len(shards)} of the jobs " + ("wait" if len(shards) > 1 else "waits")
            example = shards[0]
            task = f"{self._last_jobs[example]}_{example}"
            remedy = f"; `scontrol release {task}` lets it go" if "held" in reason.casefold() else ""
            messages[reason] = f"{count} in the queue: {self._reasons[example] or reason}{remedy}"
        return messages

    def describe_end(self, shard: int) -> str:
        """Asks the accounting how a shard's last job ended, and keeps its state for `was_taken_away`."""
        self._end_states.pop(shard, None)
        if shard not in self._last_jobs:
            return "it was not submitted"
        task = f"{self._last_jobs[shard]}_{shard}"
        try:
            end_of_task = slurm.end_of_task(task, self._cluster)
        except (SlurmRefused, ValueError) as error:
            return f"job {task} is gone ({error})"
        if end_of_task is None:
            return f"job {task} is gone"
        state, exit_code = end_of_task
        self._end_states[shard] = state
        return f"job {task} ended as {state}, exit code {exit_code}"

    def was_taken_away(self, shard: int) -> bool:
        return self._end_states.get(shard, "").startswith(slurm.TAKEN_AWAY_STATES)

    def stop(self, shard: int) -> None:
        if shard in self._last_jobs:
            with contextlib.suppress(SlurmRefused, ValueError):  # it may have ended meanwhile
                slurm.cancel_task(f"{self._last_jobs[shard]}_{shard}", self._cluster)

    def leave(self) -> str:
        if not self._states:
            return "no job is left"
        return (
            f"{len(self._states)} tasks keep running; the same command watches them again"
            f" (scancel --name={self._name} ends them)"
        )


def _suggest_local_jobs(error: ValueError) -> ValueError:
    return ValueError(f"{error}, or set jobs to {{type: 'local'}}")
