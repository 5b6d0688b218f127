"""Jobs: processes of this machine side by side, or tasks of a SLURM array."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, Protocol, TypeVar

from annotated_types import Ge, Gt

from treetune.config.registrable import Registrable
from treetune.processes.lifetime import end, started
from treetune.store.files import write_text

K = TypeVar("K", bound=Hashable)


@contextlib.contextmanager
def one_at_work(lock: Path, message: str) -> Iterator[None]:
    """Holds a file's lock for the block. Raises ValueError with `message` where another process does."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(message) from error
        yield


class Processes(contextlib.ExitStack, Generic[K]):
    """Processes by a key, each in a group of its own; those that still run end with the block."""

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
        codes = {key: code for key, one in self.running.items() if (code := one.poll()) is not None}
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


class Running(Protocol):
    """Jobs under way, one for each shard at most."""

    def start(self, shards: Sequence[int]) -> None:
        """Begins these shards' jobs, or has them wait for their turn."""

    def alive(self) -> set[int]:
        """Returns the shards whose job runs or waits for its turn. Raises OSError where nobody can tell."""

    def running(self) -> set[int]:
        """Returns the shards whose job runs."""

    def why(self, shard: int) -> str:
        """Returns how a shard's last job ended, as far as is known."""

    def stop(self, shard: int) -> None:
        """Ends a job that shows no sign of life."""

    def leave(self) -> str:
        """Ends the jobs before their time, or leaves them to go on, and says which."""


class Jobs(Registrable):
    """The place where jobs are carried out. A job that died is started again `restarts` times; one that has
    shown no progress for `silence` seconds counts as dead."""

    restarts: int
    silence: float
    poll: float
    settle: float = 0.0
    """Seconds for which a job may be gone before what it wrote last has to be seen."""

    def begin(self, command: Sequence[str], output: Path) -> Running:
        """Returns runners of `command` with a shard's number behind it; `output` is the folder of all."""
        raise NotImplementedError


@Jobs.register("local")
@dataclass(frozen=True, kw_only=True)
class LocalJobs(Jobs):
    """Processes of this machine. They end with the command."""

    at_once: Annotated[int, Gt(0)] = 1
    """Jobs side by side."""
    gpus: Annotated[int, Ge(0)] = 0
    """GPUs that each job has to itself; 0: all that this process sees."""
    restarts: Annotated[int, Ge(0)] = 3
    """Times that a job is started again after it died."""
    silence: Annotated[float, Gt(0)] = 3600.0
    """Seconds without progress after which a job counts as dead."""
    poll: Annotated[float, Gt(0)] = 0.5
    """Seconds between two looks."""

    def begin(self, command: Sequence[str], output: Path) -> Running:
        return _Local(self, command, output)


class _Local:
    def __init__(self, settings: LocalJobs, command: Sequence[str], output: Path) -> None:
        self._settings, self._command, self._logs = settings, command, output / "shards" / "logs"
        self._waiting: list[int] = []
        self._processes: Processes[int] = Processes()
        self._slots: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def start(self, shards: Sequence[int]) -> None:
        self._waiting += shards
        self._fill()

    def _fill(self) -> None:
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
        self._ended |= self._processes.take_ended()
        self._fill()
        return {*self._processes.running, *self._waiting}

    def running(self) -> set[int]:
        return set(self._processes.running)

    def why(self, shard: int) -> str:
        code = self._ended.get(shard)
        if code is None:
            return "it was not started"
        return f"it was ended by signal {-code}" if code < 0 else f"it ended with code {code}"

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
    """Tasks of a SLURM array. The cluster sees this folder and the rows under the same names.

    The jobs of a folder have a name of their own, by which they are known: the command may end, or be ended,
    and the same one watches on. A task that you submit yourself (``sbatch --array=3 DIR/jobs/shard.sh``) is
    watched as well.
    """

    options: tuple[str, ...] = ()
    """Options of sbatch: ``--partition=gpu``, ``--gpus-per-node=8``, ``--time=8:00:00``."""
    setup: str = ""
    """Lines of the shell before the command, such as ``source .venv/bin/activate``."""
    at_once: Annotated[int, Gt(0)] | None = None
    """Tasks side by side; null: as many as SLURM gives."""
    restarts: Annotated[int, Ge(0)] = 3
    """Times that a job is started again after it died."""
    silence: Annotated[float, Gt(0)] = 3600.0
    """Seconds without progress after which a job counts as dead."""
    poll: Annotated[float, Gt(0)] = 10.0
    """Seconds between two looks."""
    settle: Annotated[float, Ge(0)] = 20.0
    """Seconds for which a job may be gone before what it wrote last has to be seen."""

    def __post_init__(self) -> None:
        ours = ("--array", "-a", "--parsable", "--output", "-o", "--job-name", "-J")
        for option in self.options:
            if option.partition("=")[0] in ours or not option.startswith("-"):
                raise ValueError(
                    f"options has {option!r}: give each as one text such as '--partition=gpu'; --array,"
                    " --output, --job-name and --parsable are set here"
                )

    def begin(self, command: Sequence[str], output: Path) -> Running:
        return _Slurm(self, command, output)


class _Slurm:
    def __init__(self, settings: SlurmJobs, command: Sequence[str], output: Path) -> None:
        self._settings = settings
        self._script = output / "jobs" / "shard.sh"
        logs = (output / "shards" / "logs").resolve()
        logs.mkdir(parents=True, exist_ok=True)
        digest = hashlib.blake2b(str(output.resolve()).encode(), digest_size=6).hexdigest()
        self._name = f"difficulty-{digest}"
        self._alive: dict[int, str] = {}
        self._last: dict[int, str] = {}
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
        array = ranges(shards) + (f"%{self._settings.at_once}" if self._settings.at_once else "")
        answer = _output_of(["sbatch", "--parsable", f"--array={array}", str(self._script)])
        number = answer.strip().splitlines()[-1].partition(";")[0] if answer.strip() else ""
        if not number.isdigit():
            raise RuntimeError(f"sbatch answered {answer.strip()[:200]!r}, and no number of a job")
        self._last.update(dict.fromkeys(shards, number))

    def alive(self) -> set[int]:
        try:
            answer = _output_of(["squeue", "--noheader", "--array", f"--name={self._name}", "--format=%i|%T"])
        except RuntimeError as error:
            raise OSError(str(error)) from error
        self._alive = {}
        for line in answer.splitlines():
            job, _, state = line.strip().partition("|")
            number, _, task = job.partition("_")
            if task.isdigit():
                self._alive[int(task)] = state
                self._last[int(task)] = number
        return set(self._alive)

    def running(self) -> set[int]:
        return {shard for shard, state in self._alive.items() if state in ("RUNNING", "COMPLETING")}

    def why(self, shard: int) -> str:
        if shard not in self._last:
            return "it was not submitted"
        task = f"{self._last[shard]}_{shard}"
        command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State,ExitCode"]
        try:
            answer = _output_of([*command, f"--jobs={task}"])
        except RuntimeError as error:
            return f"job {task} is gone ({error})"
        for line in answer.splitlines():
            name, _, rest = line.strip().partition("|")
            if name == task:
                state, _, code = rest.partition("|")
                return f"job {task} ended as {state}, exit code {code}"
        return f"job {task} is gone"

    def stop(self, shard: int) -> None:
        with contextlib.suppress(RuntimeError):  # it may have ended meanwhile
            _output_of(["scancel", f"{self._last[shard]}_{shard}"])

    def leave(self) -> str:
        if not self._alive:
            return "no job is left"
        return (
            f"{len(self._alive)} tasks go on without this command, which watches them again when it is given"
            f" again (scancel --name={self._name} ends them)"
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


def _output_of(command: Sequence[str]) -> str:
    """Returns the output of a command of SLURM. Raises RuntimeError with its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no {command[0]} here: run this on a machine of the cluster, or set jobs to"
            " {type: 'local'}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} said nothing for 120 s") from error
    if done.returncode:
        complaint = re.sub(r"\s+", " ", done.stderr or done.stdout).strip()
        raise RuntimeError(f"{command[0]}: {complaint[:300] or f'exit code {done.returncode}'}")
    return done.stdout
