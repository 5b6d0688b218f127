"""How a shard's job is carried out: a process here, or a task of a SLURM array."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from annotated_types import Ge, Gt

from treetune.config.registrable import Registrable
from treetune.processes.lifetime import end, started
from treetune.store.files import write_text


class Running(Protocol):
    """Jobs under way, one for each shard at most."""

    def start(self, shards: Sequence[int]) -> None:
        """Begins these shards' jobs, or has them wait for their turn."""

    def alive(self) -> set[int]:
        """Shards whose job is running or waiting for its turn. Raises OSError where nobody can tell."""

    def running(self) -> set[int]:
        """Those of them that run."""

    def why(self, shard: int) -> str:
        """How its last job ended, as far as is known."""

    def stop(self, shard: int) -> None:
        """Ends a job that shows no sign of life."""

    def leave(self) -> str:
        """The command ends before its time: ends the jobs, or leaves them to go on; says what it did."""


class Jobs(Registrable):
    """Where jobs are carried out. A job that died is started again `restarts` times; one that has shown no
    progress for `silence` seconds counts as dead."""

    restarts: int
    silence: float
    poll: float
    settle: float = 0.0
    """Seconds for which a job may be gone before what it wrote last has to be seen."""

    def begin(self, command: Sequence[str], output: Path) -> Running:
        """`command` works on the shard whose number is put behind it."""
        raise NotImplementedError


@Jobs.register("local")
@dataclass(frozen=True, kw_only=True)
class LocalJobs(Jobs):
    """Processes of this machine, `at_once` side by side. With `gpus`, each has so many of this machine's GPUs
    to itself. They end with the command."""

    at_once: Annotated[int, Gt(0)] = 1
    """Jobs side by side."""
    gpus: Annotated[int, Ge(0)] = 0
    """GPUs of a job; 0: all that this process sees."""
    restarts: Annotated[int, Ge(0)] = 3
    silence: Annotated[float, Gt(0)] = 3600.0
    poll: Annotated[float, Gt(0)] = 0.5
    """Seconds between two looks."""

    def begin(self, command: Sequence[str], output: Path) -> Running:
        return _Local(self, list(command), output)


class _Local:
    def __init__(self, settings: LocalJobs, command: list[str], output: Path) -> None:
        self._settings, self._command, self._output = settings, command, output
        self._waiting: list[int] = []
        self._jobs: dict[int, tuple[subprocess.Popen[bytes], contextlib.ExitStack, int]] = {}
        self._ended: dict[int, int] = {}

    def start(self, shards: Sequence[int]) -> None:
        self._waiting += shards
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._jobs) < self._settings.at_once:
            taken = {slot for _, _, slot in self._jobs.values()}
            slot = next(slot for slot in range(self._settings.at_once) if slot not in taken)
            shard = self._waiting.pop(0)
            stack = contextlib.ExitStack()
            log = stack.enter_context(log_file(self._output, shard).open("ab"))
            process = stack.enter_context(started([*self._command, str(shard)], self._gpus(slot), log))
            self._jobs[shard] = process, stack, slot

    def _gpus(self, slot: int) -> dict[str, str]:
        count = self._settings.gpus
        if not count:
            return {}
        seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        mine = range(slot * count, (slot + 1) * count)
        if seen and mine[-1] >= len(seen):
            raise ValueError(
                f"jobs.gpus is {count} and jobs.at_once {self._settings.at_once}, and this process sees"
                f" {len(seen)} GPUs: lower one of them"
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(seen[i] if seen else str(i) for i in mine)}

    def alive(self) -> set[int]:
        for shard, (process, stack, _) in list(self._jobs.items()):
            code = process.poll()
            if code is not None:
                self._ended[shard] = code
                del self._jobs[shard]
                stack.close()
        self._fill()
        return {*self._jobs, *self._waiting}

    def running(self) -> set[int]:
        return set(self._jobs)

    def why(self, shard: int) -> str:
        code = self._ended.get(shard)
        if code is None:
            return "it was not started"
        return f"it was ended by signal {-code}" if code < 0 else f"it ended with code {code}"

    def stop(self, shard: int) -> None:
        if shard in self._jobs:
            end(self._jobs[shard][0])

    def leave(self) -> str:
        count = len(self._jobs)
        for _, stack, _ in self._jobs.values():
            stack.close()
        self._jobs.clear()
        return f"{count} jobs ended"


@Jobs.register("slurm")
@dataclass(frozen=True, kw_only=True)
class SlurmJobs(Jobs):
    """Tasks of a SLURM array, `at_once` side by side (null: as many as SLURM gives). `options` go to sbatch
    (``--partition=gpu``, ``--gpus-per-node=8``, ``--time=8:00:00``); `setup` are lines of the shell before
    the command, such as ``source .venv/bin/activate``. The cluster sees this folder and the rows under the
    same names.

    The jobs of a folder have a name of their own, by which they are known: the command may end, or be ended,
    and the same one watches on. A task that you submit yourself (``sbatch --array=3 DIR/jobs/shard.sh``) is
    watched as well.
    """

    options: tuple[str, ...] = ()
    setup: str = ""
    at_once: Annotated[int, Gt(0)] | None = None
    """Tasks side by side."""
    restarts: Annotated[int, Ge(0)] = 3
    silence: Annotated[float, Gt(0)] = 3600.0
    poll: Annotated[float, Gt(0)] = 10.0
    """Seconds between two looks."""
    settle: Annotated[float, Ge(0)] = 20.0

    def __post_init__(self) -> None:
        ours = ("--array", "-a", "--parsable", "--output", "-o", "--job-name", "-J")
        for option in self.options:
            if option.partition("=")[0] in ours or not option.startswith("-"):
                raise ValueError(
                    f"options has {option!r}: give each as one text such as '--partition=gpu'; --array,"
                    " --output, --job-name and --parsable are set here"
                )

    def begin(self, command: Sequence[str], output: Path) -> Running:
        return _Slurm(self, list(command), output)


class _Slurm:
    def __init__(self, settings: SlurmJobs, command: list[str], output: Path) -> None:
        self._settings = settings
        self._script = output / "jobs" / "shard.sh"
        logs = (output / "shards" / "logs").resolve()
        logs.mkdir(parents=True, exist_ok=True)
        digest = hashlib.blake2b(str(output.resolve()).encode(), digest_size=6).hexdigest()
        self._name = f"difficulty-{digest}"
        self._alive: dict[int, tuple[str, str]] = {}
        self._last: dict[int, str] = {}
        lines = [
            "#!/usr/bin/env bash",
            f"#SBATCH --job-name={self._name}",
            f"#SBATCH --output={logs}/slurm-%A_%a.out",
            *(f"#SBATCH {option}" for option in settings.options),
            "# Works on one shard, that of its task in the array. estimate_difficulty wrote and submits it.",
            "set -euo pipefail",
            f"cd {shlex.quote(str(Path.cwd()))}",
            f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"',
            *(f"export {name}={shlex.quote(value)}" for name, value in _handed_on().items()),
            *([settings.setup] if settings.setup else []),
            f'exec {shlex.join(command)} "$SLURM_ARRAY_TASK_ID"',
        ]
        write_text(self._script, "\n".join(lines) + "\n")

    def start(self, shards: Sequence[int]) -> None:
        if not shards:
            return
        array = ranges(shards) + (f"%{self._settings.at_once}" if self._settings.at_once else "")
        answer = _run(["sbatch", "--parsable", f"--array={array}", str(self._script)])
        number = answer.strip().splitlines()[-1].partition(";")[0] if answer.strip() else ""
        if not number.isdigit():
            raise RuntimeError(f"sbatch answered {answer.strip()[:200]!r}, and no number of a job")
        self._last.update(dict.fromkeys(shards, number))

    def alive(self) -> set[int]:
        try:
            answer = _run(["squeue", "--noheader", "--array", f"--name={self._name}", "--format=%i|%T"])
        except RuntimeError as error:
            raise OSError(str(error)) from error
        self._alive = {}
        for line in answer.splitlines():
            place, _, state = line.strip().partition("|")
            number, _, task = place.partition("_")
            if task.isdigit():
                self._alive[int(task)] = number, state
                self._last[int(task)] = number
        return set(self._alive)

    def running(self) -> set[int]:
        return {shard for shard, (_, state) in self._alive.items() if state in ("RUNNING", "COMPLETING")}

    def why(self, shard: int) -> str:
        if shard not in self._last:
            return "it was not submitted"
        task = f"{self._last[shard]}_{shard}"
        words = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State,ExitCode"]
        try:
            answer = _run([*words, f"--jobs={task}"])
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
            _run(["scancel", f"{self._last[shard]}_{shard}"])

    def leave(self) -> str:
        if not self._alive:
            return "no job is left"
        return (
            f"{len(self._alive)} tasks go on without this command, which watches them again when it is given"
            f" again (scancel --name={self._name} ends them)"
        )


def ranges(shards: Sequence[int]) -> str:
    """``0-2,5`` for 0, 1, 2 and 5."""
    parts: list[list[int]] = []
    for shard in sorted(shards):
        if parts and parts[-1][-1] == shard - 1:
            parts[-1].append(shard)
        else:
            parts.append([shard])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def log_file(output: Path, shard: int) -> Path:
    """What a job on this machine says."""
    path = output / "shards" / "logs" / f"{shard:04d}.out"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _handed_on() -> dict[str, str]:
    """What decides which sources a job imports."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if os.environ.get(name)}


def _run(words: Sequence[str]) -> str:
    """What a command of SLURM answers. Raises RuntimeError with what it complains of."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no {words[0]} here: run this on a machine of the cluster, or set jobs to"
            " {type: 'local'}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{words[0]} said nothing for 120 s") from error
    if done.returncode:
        said = re.sub(r"\s+", " ", done.stderr or done.stdout).strip()
        raise RuntimeError(f"{words[0]}: {said[:300] or f'exit code {done.returncode}'}")
    return done.stdout
