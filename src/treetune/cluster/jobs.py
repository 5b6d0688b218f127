"""Jobs: parallel processes on this machine, or tasks of a SLURM array."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, Protocol, TypeVar

from annotated_types import Ge, Gt
from typing_extensions import override

from treetune.cluster.submission import SlurmBusy, SlurmRefused, cluster_options, job_number, output_of
from treetune.config.registrable import Registrable
from treetune.processes.lifetime import end, started
from treetune.store.files import write_text

SUBMIT_PATIENCE_S = 3600.0
"""Seconds for which jobs are submitted again to a busy controller."""

TAKEN_AWAY = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REQUEUED", "REVOKED")
"""States of a job that the cluster ended: another job is started, which doesn't count as a restart."""
ACTIVE = ("RUNNING", "COMPLETING")

_TASK = re.compile(r"(\d+)_(\d+)\|(\w+)(?:\|(.*))?")
_TASKS_TO_COME = re.compile(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]\|(\w+)(?:\|(.*))?")
"""Lines of squeue: of one task of an array, and of tasks that don't run yet."""

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
    """Processes by their keys, each in a process group of its own. At the end of the block, those that still
    run are ended."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[K, subprocess.Popen[bytes]] = {}
        self._stacks: dict[K, contextlib.ExitStack] = {}

    def start(self, key: K, command: Sequence[str], settings: Mapping[str, str], log: Path) -> None:
        """Starts a process with `settings` in its environment, whose output is added to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        stack = self._stacks[key] = self.enter_context(contextlib.ExitStack())
        file = stack.enter_context(log.open("ab"))
        self.running[key] = stack.enter_context(started(command, settings, file))

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
        """Ends a process and its children, and returns its exit code."""
        process = self.running.pop(key)
        self._stacks.pop(key).close()
        return process.returncode or 1


def slurm_header(name: str, log: str, options: Sequence[str], comment: str, folder: Path) -> list[str]:
    """Returns the first lines of a script for sbatch, up to those that prepare the environment."""
    return [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --output={log}",
        *(f"#SBATCH {option}" for option in options),
        *comment.splitlines(),
        "set -euo pipefail",
        f"cd {shlex.quote(str(folder))}",
        f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"',
    ]


class RunningJobs(Protocol):
    """The jobs of a folder, at most one for each shard."""

    def start(self, shards: Sequence[int]) -> None:
        """Starts these shards' jobs, or queues them."""

    def alive(self) -> set[int]:
        """Returns the shards whose job runs or is queued. Raises OSError if that isn't known."""

    def running(self) -> set[int]:
        """Returns the shards whose job runs."""

    def why(self, shard: int) -> str:
        """Returns a message on how a shard's last job ended, as far as is known."""

    def was_taken_away(self, shard: int) -> bool:
        """Returns whether the cluster ended a shard's last job: it was preempted, or its machine failed."""

    def waits(self) -> Mapping[str, str]:
        """Returns messages on why jobs don't run yet, by the reason. Each reason is shown once."""

    def stop(self, shard: int) -> None:
        """Ends a job that makes no progress."""

    def leave(self) -> str:
        """Ends the jobs, or leaves them running, and returns a message that says which."""


class Jobs(Registrable):
    """The way in which jobs are run. A job that died is restarted at most `restarts` times; a job without
    progress for `silence` seconds counts as dead."""

    restarts: int
    silence: float
    poll: float
    settle: float = 0.0
    """Seconds for which a job may be gone before what it wrote last has to be seen."""

    def begin(self, command: Sequence[str], output: Path) -> RunningJobs:
        """Returns the runner of jobs. A job is `command` with the number of its shard as the last argument;
        `output` is the folder of all jobs."""
        raise NotImplementedError


@Jobs.register("local")
@dataclass(frozen=True, kw_only=True)
class LocalJobs(Jobs):
    """Processes on this machine. They end with the command."""

    at_once: Annotated[int, Gt(0)] = 1
    """Jobs that run at a time."""
    gpus: Annotated[int, Ge(0)] = 0
    """GPUs that each job has to itself; 0: all that this process sees."""
    restarts: Annotated[int, Ge(0)] = 3
    """How often a job is restarted after it died."""
    silence: Annotated[float, Gt(0)] = 3600.0
    """Seconds without progress after which a job counts as dead."""
    poll: Annotated[float, Gt(0)] = 0.5
    """Seconds between two checks."""

    @override
    def begin(self, command: Sequence[str], output: Path) -> RunningJobs:
        return _Local(self, command, output)


class _Local:
    def __init__(self, settings: LocalJobs, command: Sequence[str], output: Path) -> None:
        self._settings, self._command, self._logs = settings, command, output / "shards" / "logs"
        self._waiting: list[int] = []
        self._processes: Processes[int] = Processes()
        self._slots: dict[int, int] = {}
        """The number of the place, below `at_once`, at which each shard's job runs. It decides the job's
        GPUs."""
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
            self._processes.start(shard, command, self._gpus(slot), log)

    def _gpus(self, slot: int) -> dict[str, str]:
        count = self._settings.gpus
        if not count:
            return {}
        seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        numbers = range(slot * count, (slot + 1) * count)
        if seen and numbers[-1] >= len(seen):
            raise ValueError(
                f"jobs.gpus is {count} and jobs.at_once {self._settings.at_once}, and this process sees"
                f" {len(seen)} GPUs: lower one of them"
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(seen[i] if seen else str(i) for i in numbers)}

    def alive(self) -> set[int]:
        self._exit_codes |= self._processes.take_ended()
        self._start_waiting()
        return {*self._processes.running, *self._waiting}

    def running(self) -> set[int]:
        return set(self._processes.running)

    def why(self, shard: int) -> str:
        code = self._exit_codes.get(shard)
        if code is None:
            return "it was not started"
        return f"it was ended by signal {-code}" if code < 0 else f"it ended with code {code}"

    def was_taken_away(self, shard: int) -> bool:
        return False

    def waits(self) -> Mapping[str, str]:
        return {}

    def stop(self, shard: int) -> None:
        if shard in self._processes.running:
            end(self._processes.running[shard])

    def leave(self) -> str:
        count = len(self._processes.running)
        self._processes.close()
        return f"{count} jobs ended"


@Jobs.register("slurm")
@dataclass(frozen=True, kw_only=True)
class SlurmJobs(Jobs):
    """Tasks of a SLURM array. The cluster must see this folder and the rows under the same paths.

    The jobs of a folder have a unique name. If the command ends or is killed, the jobs keep running, and the
    same command finds them by that name. A task that you submit yourself (``sbatch --array=3
    DIR/jobs/shard.sh``) is watched as well.
    """

    options: tuple[str, ...] = ()
    """Options of sbatch: ``--partition=gpu``, ``--gpus-per-node=8``, ``--time=8:00:00``."""
    setup: str = ""
    """Lines of the shell before the command, such as ``source .venv/bin/activate``."""
    at_once: Annotated[int, Gt(0)] | None = None
    """Tasks that run at a time; null: as many as SLURM allows."""
    restarts: Annotated[int, Ge(0)] = 3
    """How often a job is restarted after it died."""
    silence: Annotated[float, Gt(0)] = 3600.0
    """Seconds without progress after which a job counts as dead."""
    poll: Annotated[float, Gt(0)] = 10.0
    """Seconds between two checks."""
    settle: Annotated[float, Ge(0)] = 20.0
    """Seconds for which a job may be gone before what it wrote last has to be seen."""

    def __post_init__(self) -> None:
        ours = ("--array", "-a", "--parsable", "--output", "-o", "--job-name", "-J")
        for option in self.options:
            if option.partition("=")[0] in ours or not option.startswith("-"):
                raise ValueError(
                    f"options has {option!r}: give each as one string such as '--partition=gpu'; --array,"
                    " --output, --job-name and --parsable are set by this command"
                )

    @override
    def begin(self, command: Sequence[str], output: Path) -> RunningJobs:
        return _Slurm(self, command, output)


class _Slurm:
    def __init__(self, settings: SlurmJobs, command: Sequence[str], output: Path) -> None:
        self._settings = settings
        self._script = output / "jobs" / "shard.sh"
        logs = (output / "shards" / "logs").resolve()
        logs.mkdir(parents=True, exist_ok=True)
        digest = hashlib.blake2b(str(output.resolve()).encode(), digest_size=6).hexdigest()
        self._name = f"difficulty-{digest}"
        self._cluster = cluster_options(settings.options)
        self._states: dict[int, str] = {}
        """The state of each shard's job that runs or is queued."""
        self._reasons: dict[int, str] = {}
        """Why a shard's task is queued, by squeue's reason."""
        self._last_jobs: dict[int, str] = {}
        """The number of each shard's last job."""
        self._end_states: dict[int, str] = {}
        """The state in which a shard's last job ended."""
        self._unsent: set[int] = set()
        """Shards whose jobs a busy controller hasn't accepted, as far as is known."""
        self._complaint = ""
        self._began_to_send = self._send_again = 0.0
        """The time of the first attempt to submit these, in seconds since 1970, and of the next one, by the
        monotonic clock."""
        comment = (
            "# Works on one shard, that of its task in the array. estimate_difficulty wrote and submits it."
        )
        log = f"{logs}/slurm-%A_%a.out"
        sources = os.environ.get("PYTHONPATH")  # decides which sources a job imports
        lines = [
            *slurm_header(self._name, log, settings.options, comment, Path.cwd()),
            *([f"export PYTHONPATH={shlex.quote(sources)}"] if sources else []),
            *([settings.setup] if settings.setup else []),
            f'exec {shlex.join(command)} "$SLURM_ARRAY_TASK_ID"',
        ]
        write_text(self._script, "\n".join(lines) + "\n")

    def start(self, shards: Sequence[int]) -> None:
        if not shards:
            return
        if not self._unsent:
            self._began_to_send = time.time()
        self._unsent |= set(shards)
        self._send()

    def _send(self) -> None:
        """Submits the jobs of `_unsent`. A busy controller may have accepted them nevertheless, so that
        `alive` looks for them in the queue before they are submitted again."""
        array = ranges(sorted(self._unsent)) + (
            f"%{self._settings.at_once}" if self._settings.at_once else ""
        )
        command = ["sbatch", "--parsable", f"--array={array}", str(self._script)]
        try:
            answer = output_of(command)
        except SlurmBusy as busy:
            waited = time.time() - self._began_to_send
            if waited > SUBMIT_PATIENCE_S:
                raise RuntimeError(f"{busy}, for {waited / 60:.0f} minutes") from busy
            self._complaint = str(busy)
            self._send_again = time.monotonic() + max(self._settings.settle, self._settings.poll)
            return
        except ValueError as error:
            raise _no_slurm(error) from error
        # Without a number, the queue tells it: a job that sbatch accepted is never submitted again.
        if number := job_number(answer):
            self._last_jobs.update(dict.fromkeys(self._unsent, number))
        self._unsent, self._complaint = set(), ""

    def alive(self) -> set[int]:
        form = "--format=%i|%T|%r"
        command = ["squeue", "--noheader", "--array", f"--name={self._name}", form, *self._cluster]
        try:
            answer = output_of(command)
        except SlurmRefused as error:
            raise OSError(str(error)) from error
        except ValueError as error:
            raise _no_slurm(error) from error
        self._states, self._reasons = {}, {}
        for number, shard, state, reason in _tasks_in(answer):
            self._states[shard] = state
            self._last_jobs[shard] = number
            if state not in ACTIVE:
                self._reasons[shard] = reason
        if self._unsent:
            self._unsent -= set(self._states)
            if self._unsent and time.monotonic() >= self._send_again:
                self._unsent -= self._accepted_and_ended()
                if self._unsent:
                    self._send()
        return set(self._states) | self._unsent

    def _accepted_and_ended(self) -> set[int]:
        """Returns the shards of `_unsent` whose jobs were accepted and have already ended."""
        began = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self._began_to_send))
        command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--name={self._name}"]
        try:
            answer = output_of([*command, f"--starttime={began}", "--format=JobID,State", *self._cluster])
        except (SlurmRefused, ValueError):  # a cluster without accounting
            return set()
        ended = set[int]()
        for number, shard, _, _ in _tasks_in(answer):
            if shard in self._unsent and int(number) > int(self._last_jobs.get(shard, 0)):
                self._last_jobs[shard] = number
                ended.add(shard)
        return ended

    def running(self) -> set[int]:
        return {shard for shard, state in self._states.items() if state in ACTIVE}

    def waits(self) -> Mapping[str, str]:
        messages: dict[str, str] = {}
        if self._unsent:
            messages[self._complaint] = (
                f"{len(self._unsent)} jobs are not submitted yet ({self._complaint}): they are submitted"
                " again unless they appear in the queue"
            )
        by_reason: dict[str, list[int]] = {}
        for shard, reason in self._reasons.items():
            # "ReqNodeNotAvail, UnavailableNodes:…" names other nodes each time: the comma ends the reason.
            by_reason.setdefault(reason.partition(",")[0] or self._states[shard], []).append(shard)
        for reason, shards in by_reason.items():
            count = f"{len(shards)} of the jobs " + ("wait" if len(shards) > 1 else "waits")
            task = f"{self._last_jobs[shards[0]]}_{shards[0]}"
            remedy = f"; `scontrol release {task}` lets it go" if "held" in reason.casefold() else ""
            messages[reason] = f"{count} in the queue: {self._reasons[shards[0]] or reason}{remedy}"
        return messages

    def why(self, shard: int) -> str:
        self._end_states.pop(shard, None)
        if shard not in self._last_jobs:
            return "it was not submitted"
        task = f"{self._last_jobs[shard]}_{shard}"
        command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State,ExitCode"]
        try:
            answer = output_of([*command, f"--jobs={task}", *self._cluster])
        except (SlurmRefused, ValueError) as error:
            return f"job {task} is gone ({error})"
        for line in answer.splitlines():
            name, _, rest = line.strip().partition("|")
            if name == task:
                state, _, code = rest.partition("|")
                self._end_states[shard] = state
                return f"job {task} ended as {state}, exit code {code}"
        return f"job {task} is gone"

    def was_taken_away(self, shard: int) -> bool:
        return self._end_states.get(shard, "").startswith(TAKEN_AWAY)

    def stop(self, shard: int) -> None:
        if shard in self._last_jobs:
            with contextlib.suppress(SlurmRefused, ValueError):  # it may have ended meanwhile
                output_of(["scancel", f"{self._last_jobs[shard]}_{shard}", *self._cluster])

    def leave(self) -> str:
        if not self._states:
            return "no job is left"
        return (
            f"{len(self._states)} tasks keep running; the same command watches them again"
            f" (scancel --name={self._name} ends them)"
        )


def ranges(shards: Sequence[int]) -> str:
    """Returns ``0-2,5`` for 0, 1, 2 and 5."""
    parts: list[list[int]] = []
    for shard in sorted(shards):
        if parts and parts[-1][-1] == shard - 1:
            parts[-1].append(shard)
        else:
            parts.append([shard])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _tasks_in(answer: str) -> Iterator[tuple[str, int, str, str]]:
    """Yields the job's number, the task, the state and the reason of each task in the output of squeue or
    sacct. Other lines, such as a site's banner, are ignored."""
    for line in answer.splitlines():
        if task := _TASK.fullmatch(line.strip()):
            yield task[1], int(task[2]), task[3], task[4] or ""
        elif tasks := _TASKS_TO_COME.fullmatch(line.strip()):
            for part in tasks[2].split(","):
                first, _, last = part.partition("-")
                for shard in range(int(first), int(last or first) + 1):
                    yield tasks[1], shard, tasks[3], tasks[4] or ""


def _no_slurm(error: ValueError) -> ValueError:
    return ValueError(f"{error}, or set jobs to {{type: 'local'}}")
