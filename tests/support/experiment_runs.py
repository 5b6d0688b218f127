"""Runs the small experiment as a person would, stops it at a chosen point, and looks what is left.

Points are recognised by what the run writes. When one is reached, the ranks are stopped where they
are (SIGSTOP), so that the point can't pass before the blow.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tests.support.fork_server import MAIN, ROOT, ForkedCommand, run_forked_ranks, start_forked
from treetune.engine.guard import find_descendants
from treetune.processes.lifetime import ProcessIdentity, process_fields
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.weights_folder import read_name_file
from treetune.store.journal import read_journal

TOOLS = Path(sys.executable).parent
"""The folder of the `deepspeed` command."""
CONFIG = Path(__file__).with_name("small.jsonnet")
ITERATIONS = 4

Victim = Literal["launcher", "rank", "engine"]
Phase = Literal["generation", "credit", "training", "sync", "commit"]

RUN_DEADLINE_S = 900.0
GONE_WITHIN_S = 90.0
POLL_S = 0.001
"""Points pass quickly, so that they are looked for this often."""
END_POLL_S = 0.02
LOOK_S = 0.25


class PointMissed(Exception):
    """The point passed before the ranks could be stopped there."""


@dataclass(frozen=True)
class Experiment:
    """The small experiment in a directory of its own."""

    base: Path
    name: str = "small"
    ranks: int = 1
    config: Path = CONFIG
    deepspeed: bool = False
    """DeepSpeed's own command starts the ranks, and not `treetune run`."""
    forked: bool = False
    """The ranks are forked off a process that has everything imported, which saves half of their time.
    Several ranks have no launcher then, and can only be run to their end (`run`)."""

    @property
    def directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.base / self.name)

    @property
    def weights_folder(self) -> Path:
        """The folder of weights that the run's present start has made, or the last one did."""
        remembered = list(self.directory.path.glob(".treetune-*"))
        there = [folder for file in remembered if (folder := read_name_file(file)) is not None]
        return there[0] if there else self.directory.path / "no weights folder"

    def start(self, command: str = "run_iteration_loop", *overrides: str) -> Running:
        """Starts the command as the README says, in a process group of its own."""
        self.base.mkdir(parents=True, exist_ok=True)
        output = self.base / f"{self.name}.output"
        with output.open("ab") as file:
            begins = file.tell()
            if self.forked:
                assert self.ranks == 1 and not self.deepspeed, "several forked ranks can only be run"
                arguments = self._arguments(command, overrides)
                process = start_forked(arguments, cwd=ROOT, environment=self._environment(), output=file)
                return Running(self, process, output, begins)
            process = subprocess.Popen(
                self._command_line(command, overrides),
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                # Under nohup the tests ignore SIGHUP, and so would the run, which some of them hang up on.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )
        return Running(self, process, output, begins)

    def _command_line(self, command: str, overrides: Sequence[str]) -> list[str]:
        arguments = self._arguments(command, overrides)
        if self.deepspeed:
            launcher = [str(TOOLS / "deepspeed"), "--no_local_rank", f"--num_gpus={self.ranks}"]
            return [*launcher, f"--master_port={_free_port()}", str(MAIN), *arguments]
        return [sys.executable, str(MAIN), *arguments]

    def _arguments(self, command: str, overrides: Sequence[str]) -> list[str]:
        """Returns the arguments of main.py."""
        has_launcher_of_ours = not self.deepspeed and not (self.forked and self.ranks > 1)
        arguments = ["run", command, f"--ranks={self.ranks}"] if has_launcher_of_ours else [command]
        arguments += ["--configs", str(self.config)]
        for override in overrides:
            arguments += ["--override", override]
        return arguments

    def _environment(self) -> dict[str, str]:
        of_others = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "APP_SEED")
        inherited = {name: value for name, value in os.environ.items() if name not in of_others}
        return inherited | {
            "APP_DIRECTORY": str(self.base),
            "APP_EXPERIMENT_NAME": self.name,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
        }

    def run(self, command: str = "run_iteration_loop", *overrides: str) -> str:
        """Runs the command to its end; what it printed. Fails where the exit code is not 0."""
        if self.forked and self.ranks > 1:
            self.base.mkdir(parents=True, exist_ok=True)
            outputs = Path(tempfile.mkdtemp(prefix="ranks-", dir=self.base))
            variables = {"APP_DIRECTORY": str(self.base), "APP_EXPERIMENT_NAME": self.name}
            run_forked_ranks(MAIN, self._arguments(command, overrides), self.ranks, outputs, variables)
            return (outputs / "rank-0.log").read_text()
        running = self.start(command, *overrides)
        before = running.output.stat().st_size
        code = running.wait()
        with running.output.open("rb") as file:
            file.seek(before)
            printed = file.read().decode(errors="replace")
        assert code == 0, f"{command} ended with {code}:\n{printed[-4000:]}"
        running.assert_all_gone()
        return printed

    def policy(self, iteration: int = ITERATIONS) -> bytes:
        """The stored weights, whole."""
        return (self.directory.checkpoint_folder(iteration) / "policy" / "model.safetensors").read_bytes()

    def copy(self, base: Path) -> Experiment:
        shutil.copytree(self.directory.path, base / self.name)
        return replace(self, base=base)

    def forget_training(self) -> None:
        """Leaves what was sampled, and nothing of what was trained."""
        shutil.rmtree(self.directory.path / "checkpoints", ignore_errors=True)
        self.directory.metrics_file.unlink(missing_ok=True)
        for path in self.directory.path.glob("iterations/*/metrics.json"):
            path.unlink()

    def journals(self) -> dict[str, list[str]]:
        """The requests that were answered, by journal, in the order of their answers."""
        found = {}
        for path in sorted(self.directory.path.glob("iterations/*/journal/*.jsonl")):
            found[f"{path.parts[-3]}/{path.name}"] = [row[0] for row in read_journal(path)]
        return found

    def assert_consistent(self, undisturbed: Experiment) -> None:
        """The same weights, each iteration's metrics once, no request answered twice."""
        assert self.policy() == undisturbed.policy(), "the weights differ from the undisturbed run's"
        iterations = [row["iteration"] for row in self.directory.read_metrics()]
        assert iterations == list(range(ITERATIONS)), f"metrics.jsonl has the iterations {iterations}"
        assert self.directory.checkpoints()[-1] == ITERATIONS
        for name, requests in self.journals().items():
            twice = [key for key, count in Counter(requests).items() if count > 1]
            assert not twice, f"{name}: {len(twice)} requests were sampled twice"
        assert not self.weights_folder.exists(), f"{self.weights_folder} was left behind"


@dataclass
class Running:
    """A command that goes on, and all processes that were ever seen below it."""

    experiment: Experiment
    launcher: subprocess.Popen | ForkedCommand
    output: Path
    begins: int
    """Bytes of the output that earlier commands had written."""
    seen: dict[ProcessIdentity, str] = field(default_factory=dict)
    _looked: float = 0.0

    def look(self) -> None:
        """Remembers the processes below the launcher; at most every `LOOK_S`."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        for pid in (self.launcher.pid, *find_descendants(self.launcher.pid)):
            process = ProcessIdentity.of(pid)
            if process is not None:
                self.seen[process] = _title(pid)
        self._looked = time.monotonic()

    def wait(self, deadline_s: float = RUN_DEADLINE_S) -> int:
        """Its exit code."""
        self.until(lambda: self.launcher.poll() is not None, deadline_s, "the command's end", END_POLL_S)
        return self.launcher.wait()

    def until(
        self, condition: Callable[[], bool], deadline_s: float, what: str, poll_s: float = POLL_S
    ) -> None:
        """Waits until the condition holds. Fails after the deadline."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            self.look()
            if time.monotonic() > deadline:
                self.kill_everything()
                raise AssertionError(f"no {what} within {deadline_s:.0f} s:\n{self.tail()}")
            time.sleep(poll_s)

    def reach(self, phase: Phase, iteration: int) -> None:
        """Stops the ranks inside of the phase. Raises PointMissed if it was over by then."""
        mark, over = _mark(self.experiment, phase, iteration), _end(self.experiment, phase, iteration)
        self.freeze(mark, over, f"{phase} of iteration {iteration}")

    def freeze(self, mark: Callable[[], bool], over: Callable[[], bool], what: str) -> None:
        """Stops the ranks as soon as `mark` says so. Raises PointMissed if it is `over` then."""
        self.until(lambda: mark() or self.launcher.poll() is not None, RUN_DEADLINE_S, what)
        assert self.launcher.poll() is None, f"the run ended before {what}:\n{self.tail()}"
        self.signal_ranks(signal.SIGSTOP)
        if over():
            self.signal_ranks(signal.SIGCONT)
            raise PointMissed(what)
        self._looked = 0.0
        self.look()

    def kill(self, victim: Victim) -> None:
        """SIGKILL to the victim; the others go on."""
        for process in self.victims(victim):
            os.kill(process.pid, signal.SIGKILL)
        self.signal_ranks(signal.SIGCONT)

    def victims(self, victim: Victim) -> list[ProcessIdentity]:
        if victim == "launcher":
            return [process for process in self.seen if process.pid == self.launcher.pid]
        found = self.ranks() if victim == "rank" else self._titled("VLLM::EngineCore")
        assert found, f"there is no {victim} among {sorted(self.seen.values())}"
        return found[:1] if victim == "rank" else found

    def ranks(self) -> list[ProcessIdentity]:
        """The processes that train. A single rank is the process that was started."""
        programs = [
            process
            for process in self._titled("main.py")
            if "deepspeed" not in self.seen[process] and "guard.py" not in self.seen[process]
        ]
        started = [process for process in programs if process.pid != self.launcher.pid]
        return started or programs

    def _titled(self, part: str) -> list[ProcessIdentity]:
        return [process for process, title in self.seen.items() if part in title and process.is_alive()]

    def signal_ranks(self, number: int) -> None:
        for process in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def assert_all_gone(self) -> None:
        """Fails if a process that was ever seen is still there after a while."""
        self.look()
        deadline = time.monotonic() + GONE_WITHIN_S
        while left := [self.seen[process] for process in self.seen if process.is_alive()]:
            self.launcher.poll()
            if time.monotonic() > deadline:
                now = [process_fields(process.pid)[:3] for process in self.seen if process.is_alive()]
                self.kill_everything()
                raise AssertionError(
                    f"{len(left)} processes were left behind: {left}; state, parent and group of each: {now}"
                )
            time.sleep(0.05)

    def kill_everything(self) -> None:
        self._looked = 0.0
        self.look()
        for process in self.seen:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.launcher.wait(10)

    def tail(self) -> str:
        """The end of what this command has printed so far."""
        return self.output.read_bytes()[self.begins :].decode(errors="replace")[-4000:]


def _mark(experiment: Experiment, phase: Phase, iteration: int) -> Callable[[], bool]:
    folder = experiment.directory.iteration_folder(iteration)
    done = iteration + 1
    place = experiment.directory.checkpoint_folder(done)

    def weights_are_written() -> bool:
        # Looked up each time: a start gives its folder a new name, which it may not have done yet.
        return any((experiment.weights_folder / f"{done:04d}").glob("model*.safetensors"))

    marks: dict[Phase, Callable[[], bool]] = {
        "generation": lambda: _has_lines(folder / "journal" / "rollout-0.jsonl"),
        "credit": lambda: _has_lines(folder / "journal" / "credit-0.jsonl"),
        "training": (folder / "episodes.arrow").is_file,
        "sync": weights_are_written,
        "commit": place.with_name(f".{place.name}.partial").is_dir,
    }
    return marks[phase]


def _end(experiment: Experiment, phase: Phase, iteration: int) -> Callable[[], bool]:
    folder = experiment.directory.iteration_folder(iteration)
    done = iteration + 1

    def training_is_over() -> bool:
        weights = experiment.weights_folder / f"{done:04d}"
        return weights.exists() or (folder / "metrics.json").is_file()

    ends: dict[Phase, Callable[[], bool]] = {
        "generation": (folder / "rollout.json").is_file,
        "credit": (folder / "credit.json").is_file,
        "training": training_is_over,
        "sync": (folder / "metrics.json").is_file,
        "commit": experiment.directory.checkpoint_folder(done).is_dir,
    }
    return ends[phase]


def _has_lines(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
