"""Tests treetune on a GPU: runs, speeds and plans that a CPU cannot show, most valuable steps first.

    python scripts/gpu/half_hour.py                      # all steps, after scripts/setup.sh --dev
    python scripts/gpu/half_hour.py --only "real model" --minutes 9
    python scripts/gpu/half_hour.py --dry-run            # print the steps and their seconds; needs no GPU
    python scripts/gpu/half_hour.py --rehearse           # on a CPU: tiny models, small counts

Each step has a deadline, and its results are written as soon as it ends. A step that fails stops no other.
A second call with the same folder runs what is not done yet. The results are a page, gpu.md, and all logs,
packed into a file to send.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
MIB, GIB = 2**20, 2**30
SMALLEST_S = 20.0  # no step begins with less time than this
WEIGHTS = (".safetensors", ".pt", ".bin")  # are not packed into the file to send
POLL_S = 0.5
REHEARSAL_FACTOR = 2  # a step of a rehearsal may take this many times as long as on a GPU

Rows = list[tuple[str, str]]
"""What a step measured, such as ``[("seconds per iteration", "4.22")]``."""
Command = tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """Commands that run one after the other, and how their results are read."""

    name: str
    expected_s: float
    """Seconds that it takes on an H100: measured, or estimated from parts that were."""
    limit_s: float
    """Seconds after which it is ended."""
    commands: tuple[Command, ...]
    read: Callable[[HalfHour, str], Rows]
    """Returns the measurements, from what the last command printed and from the files of the run."""
    needs: tuple[str, ...] = ()
    """Names of steps that make what this one reads. They run first, also if `--only` does not name them."""
    kill_after: int | None = None
    """Kills the first command with SIGKILL after so many iterations of `killed_experiment`."""
    killed_experiment: str = ""


@dataclass
class Outcome:
    """How a step ended, such as ``Outcome("SFT", "ok", 157.2, [("iterations", "12")])``."""

    name: str
    outcome: str
    seconds: float
    rows: Rows


@dataclass
class HalfHour:
    """Runs steps in a folder until a time of `time.monotonic()`."""

    folder: Path
    rehearse: bool
    until: float
    vllms_scheduler: bool = False
    results: Path | None = None
    """A folder that gets a copy of the page, the outcomes and the packed logs after each step."""
    outcomes: list[Outcome] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since 1970, and bytes in use: of the fullest GPU, or on a CPU of all processes of this one."""

    def run_step(self, step: Step) -> None:
        """Runs a step within its deadline. A failure becomes its outcome."""
        limit = step.limit_s * (REHEARSAL_FACTOR if self.rehearse else 1)
        seconds_left = min(limit, self.until - time.monotonic())
        begun = time.monotonic()
        rows: Rows = []
        outcome = "no time was left"
        if seconds_left >= SMALLEST_S:
            print(f"{step.name} (at most {seconds_left:.0f} s) …", flush=True)
            try:
                output = self._run_commands(step, begun + seconds_left)
                rows = step.read(self, output)
                outcome = "ok"
            except Exception as error:
                outcome = f"FAILED: {type(error).__name__}: {str(error).strip() or 'no message'}"
        seconds = time.monotonic() - begun
        # An earlier call may have run the step, and failed.
        self.outcomes = [earlier for earlier in self.outcomes if earlier.name != step.name]
        self.outcomes.append(Outcome(step.name, outcome, seconds, rows))
        print(f"    {outcome} after {seconds:.0f} s")
        for name, value in rows:
            print(f"    {name}: {value}", flush=True)
        self.write_results()

    def _run_commands(self, step: Step, until: float) -> str:
        """Returns what the last command printed."""
        log = self.folder / "logs" / f"{step.name.replace(' ', '_').replace(',', '')}.log"
        commands = step.commands
        if step.kill_after is not None:
            self._run_and_kill(step, log, until)
            commands = commands[1:]
        output = ""
        for command in commands:
            output = self.run(command, until - time.monotonic(), log)
        return output

    def _run_and_kill(self, step: Step, log: Path, until: float) -> None:
        process = self.start(step.commands[0], log)
        wanted = step.kill_after or 0
        while len(read_metrics(self, step.killed_experiment)) < wanted:
            if process.poll() is not None or time.monotonic() >= until:
                break
            time.sleep(POLL_S)
        end_all(process.pid)
        process.wait()

    def start(self, command: Command, log: Path) -> subprocess.Popen[bytes]:
        """Starts a command. Its output is appended to the log."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": ""}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        if self.rehearse:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with log.open("ab") as file:
            file.write(f"\n$ {shlex.join(command)}\n".encode())
            file.flush()
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)

    def run(self, command: Command, seconds: float, log: Path) -> str:
        """Returns what a command printed.

        Raises:
            RuntimeError: if it fails or takes longer than `seconds`. Every process that it started is ended.
        """
        process = self.start(command, log)
        try:
            code = process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {seconds:.0f} s; see {log.name}") from None
        finally:
            if process.poll() is None:
                end_all(process.pid)
        output = log.read_text(errors="replace").rpartition(f"\n$ {shlex.join(command)}\n")[2]
        if code:
            raise RuntimeError(f"exit code {code}, see {log.name}: {' '.join(output.split()[-40:])}")
        return output

    def watch_memory(self) -> None:
        """Records the memory in use, without end. A thread runs this."""
        while True:
            # nvidia-smi may fail or be late now and then.
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self.memory.append((time.time(), memory_in_use(self.rehearse)))
            time.sleep(POLL_S)

    def write_results(self) -> None:
        """Writes the page and the outcomes, and packs the logs. A loss of the machine costs one step."""
        content = {"steps": [asdict(outcome) for outcome in self.outcomes], "memory": self.memory}
        (self.folder / "steps.json").write_text(json.dumps(content))
        (self.folder / "gpu.md").write_text(write_page(self))
        packed = self.folder.with_name(f"{self.folder.name}.tar.gz")
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(self.folder, self.folder.name, filter=without_weights)
        if self.results is not None:
            self.results.mkdir(parents=True, exist_ok=True)
            for path in (self.folder / "gpu.md", self.folder / "steps.json", packed):
                shutil.copy(path, self.results)

    def read_results(self) -> None:
        """Reads the outcomes of an earlier call with the same folder."""
        path = self.folder / "steps.json"
        if path.is_file():
            content = json.loads(path.read_text())
            for step in content["steps"]:
                rows = [(name, value) for name, value in step["rows"]]
                self.outcomes.append(Outcome(step["name"], step["outcome"], step["seconds"], rows))
            self.memory = [(seconds, used) for seconds, used in content["memory"]]

    def is_done(self, name: str) -> bool:
        return any(outcome.name == name and outcome.outcome == "ok" for outcome in self.outcomes)


def without_weights(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith(WEIGHTS) else member


def end_all(pid: int) -> None:
    """Kills a process and everything below it with SIGKILL, as a power cut would."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)


def memory_in_use(rehearse: bool) -> int:
    """Returns the bytes in use on the fullest GPU; in a rehearsal, those of all processes of this one."""
    if not rehearse:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return max((int(line) for line in done.stdout.split() if line.isdecimal()), default=0) * MIB
    used = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used += process.memory_info().rss
    return used


# Configurations

TREETUNE: Command = (sys.executable, "src/treetune/main.py")
RUN: Command = (*TREETUNE, "run", "--ranks", "1")  # `--num_gpus` would refuse a rehearsal on a CPU
REAL_MODEL = "pretrained/SmolLM2-135M-Instruct"
RHO = "microsoft/rho-math-1b-v0.1"
OUTLASTS = {"may_outlast_training": True}
REHEARSED = {
    "problems_per_iteration": 16,
    "iterations": 2,
    "checkpoints+": {"every": 1},
    "evaluation+": {"sets": [{"split": "validation", "samples": 1, "problems": 8}]},
    "trainer+": {"minibatch_size": 16, "schedule+": OUTLASTS},
}
"""Changes for a rehearsal on a CPU: small counts."""


LONGER_PROMPTS = {"context_length": 512}
"""The tiny model's tokens are characters, so that a prompt of 170 tokens has 240 in a rehearsal."""


def write_changes(half_hour: HalfHour, name: str, changes: dict[str, Any]) -> Path:
    """Writes a configuration file with changes. A key ``name+`` adds to the object ``name``."""
    folder = half_hour.folder / "configurations"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonnet"
    text = json.dumps({"directory": str(half_hour.folder / "experiments"), **changes}, indent=2)
    if half_hour.vllms_scheduler:
        kind = "scheduler.Scheduler" if half_hour.rehearse else "async_scheduler.AsyncScheduler"
        arguments = ["--scheduler-cls", f"vllm.v1.core.sched.{kind}"]
        text += " + " + json.dumps({"engines+": {"policy+": {"extra_arguments": arguments}}})
    path.write_text(text.replace('+": ', '"+: '))
    return path


def quickstart(half_hour: HalfHour, name: str, iterations: int) -> Command:
    """Returns the arguments that train a quickstart's configuration."""
    changes: dict[str, Any] = {"iterations": iterations, "trainer+": {"schedule+": OUTLASTS}}
    if half_hour.rehearse:
        changes |= REHEARSED
    return ("--configs", f"configs/quickstart/{name}.jsonnet,{write_changes(half_hour, name, changes)}")


def real_model(half_hour: HalfHour, method: str, iterations: int, experiment: str) -> Command:
    """Returns the arguments that train the example on a pretrained model, with vLLM as its engine.

    The model stays in float32, as in the example. Its answers are short: without compilation and CUDA graphs,
    the server starts in half the time.
    """
    policy: dict[str, Any] = {"type": "vllm", "servers": "per_rank", "dtype": "float32"}
    if not half_hour.rehearse:
        policy |= {"gpu_memory_utilization": 0.4, "enforce_eager": True}
    changes: dict[str, Any] = {
        "experiment_name": f"real_model/{experiment}",
        "engines+": {"policy": policy},
        "iterations": iterations,
        "checkpoints+": {"every": 1},
        "evaluation+": {"every": 2},
    }
    if half_hour.rehearse:
        folder = half_hour.folder / "real-model"
        changes |= {
            "model+": {"name_or_path": str(folder)},
            "rollout+": {"samples": 4, "max_tokens": 40, "unfinished_reward": 1.0},
            "plan": {},
            **LONGER_PROMPTS,
            **REHEARSED,
            "problems_per_iteration": 4,
        }
    path = write_changes(half_hour, f"real_model_{experiment}", changes)
    return ("--configs", f"examples/real_model/{method}.jsonnet,{path}")


def benchmarked_configurations(half_hour: HalfHour) -> str:
    """Returns the folder of the configurations that the speeds of the pretrained model are measured with."""
    example = ROOT / "examples/real_model"
    if not half_hour.rehearse:
        return str(example.relative_to(ROOT))
    folder = half_hour.folder / "configurations/benchmarked"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("grpo", "vineppo"):
        text = f"(import '{example / name}.jsonnet') + {json.dumps(LONGER_PROMPTS)}\n"
        (folder / f"{name}.jsonnet").write_text(text)
    return str(folder)


def random_weights(half_hour: HalfHour, way: str) -> Command:
    """Returns the arguments of VinePPO with a model of random weights, and one way of weight transfer.

    An answer that is cut off counts as correct, so that rewards differ.
    """
    precision = "float32" if half_hour.rehearse else "bfloat16"
    policy: dict[str, Any] = {
        "servers": "per_rank",
        "weight_transfer": way,
        "dtype": precision,
        "gpu_memory_utilization": 0.4,
    }
    if way == "nccl":
        policy |= {"servers": "one", "devices": [1]}
    elif not half_hour.rehearse:
        policy |= {"sleep": True, "max_num_seqs": 256}
    trainer = {
        "precision": precision,
        "layout": "packed",
        "gradient_checkpointing": True,
        "minibatch_size": None,
        "zero_stage": 0 if half_hour.rehearse else 1,
        "tokens_per_micro_batch": 16384,
        "schedule+": OUTLASTS,
    }
    changes = {
        "experiment_name": f"random_weights/{way}",
        "model": {
            "type": "pretrained",
            "name_or_path": str(half_hour.folder / "random-model"),
            "dtype": precision,
        },
        "context_length": 256,
        "engines+": {"policy+": policy},
        "rollout+": {"samples": 4, "max_tokens": 128, "unfinished_reward": 1.0},
        "trainer+": trainer,
        "evaluation+": {"sets": [{"split": "validation", "samples": 1, "problems": 16}], "every": 1},
        "iterations": 2,
        "problems_per_iteration": 8 if half_hour.rehearse else 64,
        "checkpoints+": {"every": 2},
    }
    path = write_changes(half_hour, f"random_weights_{way}", changes)
    return ("--configs", f"configs/quickstart/vineppo.jsonnet,{path}")


def paper_sized(half_hour: HalfHour) -> Command:
    """Returns the arguments of one VinePPO iteration as large as the paper's.

    The paper (Kazemnejad et al., arXiv:2410.01679) samples 8 answers to each of 64 problems and 9
    continuations of each state. A model of random weights ends a line after about 15 characters, and hardly
    ever an answer. With 288 tokens an answer, its continuations have about 12 million tokens, as many as
    those of Rho-1B on MATH by `plan`.
    """
    arguments = random_weights(half_hour, "auto")
    changes: dict[str, Any] = {
        "experiment_name": "random_weights/paper",
        "context_length": 512,
        "rollout+": {"samples": 8, "max_tokens": 288},
        "credit+": {"samples": 9},
        "trainer+": {"minibatch_size": 64, "learning_rate": 1e-6},
        "evaluation+": {"sets": []},
        "iterations": 1,
        "problems_per_iteration": 64,
        "checkpoints+": {"every": 1},
        "plan+": {"answer_tokens": 288},
    }
    if half_hour.rehearse:
        changes |= {
            "problems_per_iteration": 2,
            "rollout+": {"samples": 2, "max_tokens": 32},
            "trainer+": {"minibatch_size": None},
        }
    path = write_changes(half_hour, "paper", changes)
    return (arguments[0], f"{arguments[1]},{path}")


# Measurements of a run


def read_metrics(half_hour: HalfHour, experiment: str) -> list[dict[str, float]]:
    """Returns the metrics of each iteration; none if the run has not finished one."""
    path = half_hour.folder / "experiments" / experiment / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


METRICS = (
    ("reward of the sampled answers", "episodes/reward"),
    ("validation accuracy", "evaluation/validation/pass_at_1"),
    ("test accuracy", "evaluation/test/pass_at_1"),
    ("KL to the start model", "train/kl"),
    ("seconds of sampling", "seconds/generation"),
    ("seconds of continuations", "seconds/credit"),
    ("seconds of training", "seconds/training"),
    ("seconds of sync", "seconds/sync"),
    ("sampled tokens per second", "engine/tokens_per_second"),
    ("largest log-prob gap in the check after a sync", "engine/canary_gap"),
    ("mean log-prob gap in the check after a sync", "engine/canary_mean_gap"),
    ("largest log-prob gap of sampled tokens", "engine/logprob_gap_max"),
    ("engine restarts", "engine/restarts"),
)


def read_training(experiment: str) -> Callable[[HalfHour, str], Rows]:
    """Returns a reader of a run's iterations: each metric of `METRICS`, and the memory of each phase."""

    def read(half_hour: HalfHour, output: str) -> Rows:
        iterations = read_metrics(half_hour, experiment)
        if not iterations:
            raise RuntimeError(f"{experiment} has no metrics of an iteration")
        seconds = sorted(row["seconds/total"] for row in iterations)
        median = seconds[len(seconds) // 2]
        rows = [("iterations", str(len(iterations))), ("seconds per iteration, median", f"{median:.2f}")]
        for name, key in METRICS:
            values = [row[key] for row in iterations if key in row]
            if values:
                rows.append((name, ", ".join(f"{value:.3g}" for value in values)))
        return rows + read_memory(half_hour, experiment)

    return read


def read_memory(half_hour: HalfHour, experiment: str) -> Rows:
    """Returns the most memory that was in use in each phase of a run."""
    from treetune.store.timeline import read_timeline

    path = half_hour.folder / "experiments" / experiment / "logs/run.timeline.jsonl"
    spans = [span for process in read_timeline(path) for span in process.spans] if path.is_file() else []
    most: dict[str, int] = {}
    for span in spans:
        if span.lane == "phases" and span.end is not None:
            # Memory is recorded every POLL_S seconds, so the first record after the phase belongs to it.
            until = span.end + POLL_S
            within = [used for seconds, used in half_hour.memory if span.start <= seconds <= until]
            most[span.name] = max([most.get(span.name, 0), *within])
    return [(f"memory in {phase}, GiB", f"{used / GIB:.1f}") for phase, used in most.items() if used]


def read_resumption(killed: str, undisturbed: str) -> Callable[[HalfHour, str], Rows]:
    """Returns a reader of a run that was killed and resumed, next to the one that was not."""

    def read(half_hour: HalfHour, output: str) -> Rows:
        rows = read_training(killed)(half_hour, output)
        rewards = [f"{row['episodes/reward']:.3g}" for row in read_metrics(half_hour, undisturbed)]
        if rewards:
            rows.append(("reward of the sampled answers, not killed", ", ".join(rewards)))
        return rows

    return read


def read_plan(experiment: str) -> Callable[[HalfHour, str], Rows]:
    """Returns a reader that compares what `treetune plan` printed with the last iteration of a run."""

    def read(half_hour: HalfHour, output: str) -> Rows:
        plan = json.loads(output[output.index("{") :])
        iterations = read_metrics(half_hour, experiment)
        if not iterations:
            raise RuntimeError(f"{experiment} has no metrics to compare the plan with")
        by_phase = {phase["phase"]: phase["seconds"] for phase in plan["seconds"] or ()}
        rows: Rows = []
        for name, planned, key in (
            ("seconds of sampling", by_phase.get("answers"), "seconds/generation"),
            ("seconds of continuations", by_phase.get("continuations"), "seconds/credit"),
            ("seconds of training", by_phase.get("training"), "seconds/training"),
            ("seconds of sync", by_phase.get("sync"), "seconds/sync"),
            ("sampled tokens", plan["sampled_tokens"], "rollout/sampled_tokens"),
            ("tokens of continuations", plan["continued_tokens"], "credit/value_tokens"),
        ):
            if planned is not None and key in iterations[-1]:
                rows.append((name, f"planned {planned:.3g}, measured {iterations[-1][key]:.3g}"))
        measured = dict(read_memory(half_hour, experiment))
        for place in plan["places"]:
            name = f"memory in {place['phase']}, GiB"
            if "GPU" in place["where"] or half_hour.rehearse:
                rows.append(
                    (name, f"planned {place['needed'] / GIB:.1f}, measured {measured.get(name, '?')}")
                )
        return rows

    return read


def read_ratios(half_hour: HalfHour, output: str) -> Rows:
    """Reads what benchmarks/benchmark.py --json printed."""
    rows: Rows = []
    for name, measurement in json.loads(output[output.index("\n{") :])["measurements"].items():
        ours, theirs, ratio = measurement["ours"], measurement["theirs"], measurement["ratio"]["median"]
        unit = measurement["unit"]
        rows.append((name, f"ours {ours:.0f} {unit}, theirs {theirs:.0f}, ours / theirs {ratio:.2f}"))
    return rows


def read_last_line(name: str) -> Callable[[HalfHour, str], Rows]:
    """Returns a reader of the last line that a command printed."""

    def read(half_hour: HalfHour, output: str) -> Rows:
        return [(name, output.strip().splitlines()[-1].strip("= "))]

    return read


def read_machine(half_hour: HalfHour, output: str) -> Rows:
    import torch

    rows: Rows = [("PyTorch", f"{torch.__version__}, CUDA {torch.version.cuda}")]
    if not half_hour.rehearse:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        rows += [("GPU", line) for line in done.stdout.splitlines()]
    return rows


# Steps


def list_steps(half_hour: HalfHour, gpus: int) -> list[Step]:
    """Returns all steps, the most valuable first. Writes their configuration files."""
    return [
        *real_model_steps(half_hour),
        *random_weights_steps(half_hour),
        resumption_step(half_hour),
        flash_attention_step(half_hour),
        *other_steps(half_hour, gpus),
    ]


def real_model_steps(half_hour: HalfHour) -> list[Step]:
    """Returns steps with a pretrained model of 135 million weights: curves of GRPO and VinePPO; speeds."""
    model_step = "real model made"  # the other steps need it
    make_rows = (sys.executable, "examples/real_model/make_rows.py")
    make: Command
    if half_hour.rehearse:
        model = half_hour.folder / "real-model"
        make = (sys.executable, "scripts/gpu/random_model.py", str(model), "--small", "--chat")
    else:
        model = ROOT / REAL_MODEL
        make = make_real_model(model)
    iterations = 2 if half_hour.rehearse else 10
    steps = [Step(model_step, 40, 120, (make_rows, make), read_last_line("model"))]
    for title, method in (("GRPO", "grpo"), ("VinePPO", "vineppo")):
        command = (*RUN, *real_model(half_hour, method, iterations, method))
        read = read_training(f"real_model/{method}")
        steps.append(Step(f"real model, {title}", 120, 240, (command,), read, needs=(model_step,)))
    for title, part, expected_s, limit_s in (
        ("engine against LLM.generate", "generation", 200, 300),
        ("training against PyTorch", "training", 60, 180),
        ("iteration against TRL", "iteration", 150, 300),
    ):
        command = benchmark(half_hour, part, model, benchmarked_configurations(half_hour))
        name = f"real model, {title}"
        steps.append(Step(name, expected_s, limit_s, (command,), read_ratios, needs=(model_step,)))
    return steps


def make_real_model(folder: Path) -> Command:
    """Returns the command that makes the pretrained model, from the unpacked packages if there are any."""
    if folder.is_dir():
        return (sys.executable, "-c", f"print({str(folder)!r}, 'exists')")
    unpacked = ROOT / "build/unpacked/model"
    source = ("--packages", str(unpacked)) if unpacked.is_dir() else ()
    return (sys.executable, "scripts/pretrained_135m.py", str(folder), *source)


def benchmark(half_hour: HalfHour, part: str, model: Path, configs: str = "") -> Command:
    """Returns the command that compares `part` with a library on this model.

    Its tasks and settings are those of the folder `configs`; those of the quickstart if it is empty.
    """
    counts = (
        ("--problems", "8", "--samples", "2", "--repeats", "1") if half_hour.rehearse else ("--repeats", "3")
    )
    command = (
        sys.executable,
        "benchmarks/benchmark.py",
        "--json",
        "--only",
        part,
        "--checkpoint",
        str(model),
    )
    return (*command, *(("--configs", configs) if configs else ()), *counts)


def random_weights_steps(half_hour: HalfHour) -> list[Step]:
    """Returns steps with 1.1 billion random weights of Rho-1B's sizes: every phase, and an iteration of the
    paper's size."""
    model_step = "1.1B made"  # the other steps need it
    folder = str(half_hour.folder / "random-model")
    size = ("--small",) if half_hour.rehearse else ("--sizes", RHO)
    make = (sys.executable, "scripts/gpu/random_model.py", folder, *size)
    phases = (*RUN, *random_weights(half_hour, "auto"))
    paper = paper_sized(half_hour)
    plan = (*TREETUNE, "plan", *paper, "--json")
    return [
        Step(model_step, 40, 120, (make,), read_last_line("model")),
        Step(
            "1.1B, all phases with sleep",
            150,
            240,
            (phases,),
            read_training("random_weights/auto"),
            needs=(model_step,),
        ),
        Step(
            "1.1B, an iteration of the paper's size",
            330,
            420,
            ((*RUN, *paper),),
            read_training("random_weights/paper"),
            needs=(model_step,),
        ),
        Step(
            "1.1B, plan against measured",
            10,
            60,
            (plan,),
            read_plan("random_weights/paper"),
            needs=(model_step,),
        ),
    ]


def resumption_step(half_hour: HalfHour) -> Step:
    """Returns the step that kills GRPO of the real model by SIGKILL after two iterations, and resumes it."""
    iterations, kill_after = (2, 1) if half_hour.rehearse else (4, 2)
    command = (*RUN, *real_model(half_hour, "grpo", iterations, "killed"))
    return Step(
        "real model, killed and resumed",
        160,
        300,
        (command, command),
        read_resumption("real_model/killed", "real_model/grpo"),
        needs=("real model made",),
        kill_after=kill_after,
        killed_experiment="real_model/killed",
    )


def flash_attention_step(half_hour: HalfHour) -> Step:
    """Returns the step that tests the kernels of flash-attn. The package index has no wheel of it, and where
    it is not installed, the tests are skipped."""
    marks = ("-m", "not gpu" if half_hour.rehearse else "gpu", "-k", "flash")
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_kernels.py",
        *marks,
    )
    return Step("flash-attn", 20, 60, (command,), read_last_line("tests"))


def other_steps(half_hour: HalfHour, gpus: int) -> list[Step]:
    """Returns steps that have run on a GPU before, and other ways of weight transfer."""
    start = half_hour.folder / "experiments/quickstart/sft/checkpoints/last/policy"
    marks = ("-m", "not gpu", "-k", "not engine") if half_hour.rehearse else ("-m", "gpu")
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", *marks)
    sft = (*RUN, *quickstart(half_hour, "sft", 12))
    vineppo = (*RUN, *quickstart(half_hour, "vineppo", 8))
    steps = [
        # The first start of an engine has taken more than 100 s.
        Step("set-up", 110, 240, ((*TREETUNE, "doctor"),), read_machine),
        Step("tests", 130, 420, (tests,), read_last_line("tests")),
        Step("SFT", 160, 240, (sft,), read_training("quickstart/sft")),
        Step("VinePPO", 140, 240, (vineppo,), read_training("quickstart/vineppo"), needs=("SFT",)),
    ]
    for way in ("file", "shared_memory", *(("nccl",) if gpus > 1 else ())):
        arguments = random_weights(half_hour, way)
        # With NCCL the engine has the second GPU, which the launcher would hide from the trainer.
        command = (*TREETUNE, "run_iteration_loop", *arguments) if way == "nccl" else (*RUN, *arguments)
        read = read_training(f"random_weights/{way}")
        steps.append(Step(f"1.1B, weights by {way}", 150, 240, (command,), read, needs=("1.1B made",)))
    for title, part, limit_s in (
        ("engine against LLM.generate", "generation", 300),
        ("training against PyTorch", "training", 180),
    ):
        command = benchmark(half_hour, part, start)
        steps.append(Step(f"0.9M, {title}", 150, limit_s, (command,), read_ratios, needs=("SFT",)))
    return steps


def choose_steps(steps: Sequence[Step], words: Sequence[str]) -> list[Step]:
    """Returns the steps that have one of the words in their names, and those that they need, in order.

    Raises:
        ValueError: if a word is in no step's name.
    """
    if not words:
        return list(steps)
    for word in words:
        if not any(word in step.name for step in steps):
            names = "\n".join(f"  {step.name}" for step in steps)
            raise ValueError(f"no step has {word!r} in its name; the steps are:\n{names}")
    chosen = {step.name for step in steps if any(word in step.name for word in words)}
    needed = {name for step in steps if step.name in chosen for name in step.needs}
    return [step for step in steps if step.name in chosen | needed]


def describe_steps(steps: Sequence[Step], minutes: float) -> str:
    """Returns what would be run: commands, expected seconds and deadlines."""
    lines = []
    total = 0.0
    for step in steps:
        minutes_before = total / 60
        total += step.expected_s
        late = (
            "" if minutes_before < minutes else f" (begins after {minutes:.0f} minutes, by these estimates)"
        )
        lines.append(f"{step.name}: about {step.expected_s:.0f} s, at most {step.limit_s:.0f} s{late}")
        lines += [f"    {shlex.join(command)}" for command in step.commands]
        if step.kill_after is not None:
            lines.append(f"    (the first is killed with SIGKILL after {step.kill_after} iterations)")
    lines.append(f"all: about {total / 60:.0f} minutes")
    return "\n".join(lines)


# The page


def write_page(half_hour: HalfHour) -> str:
    """Returns the results in Markdown."""
    device = "a CPU: a rehearsal, whose numbers say nothing about a GPU" if half_hour.rehearse else "a GPU"
    when = f"{time.strftime('%F')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"
    option = " --rehearse" if half_hour.rehearse else ""
    lines = ["# On a GPU", "", f"`python scripts/gpu/half_hour.py{option}` on {device} ({when}).", ""]
    lines += ["| step | outcome | seconds |", "|---|---|---:|"]
    for step in half_hour.outcomes:
        lines.append(f"| {step.name} | {to_cell(step.outcome)} | {step.seconds:.0f} |")
    for step in half_hour.outcomes:
        if step.rows:
            lines += ["", f"## {step.name[0].upper()}{step.name[1:]}", "", "| | |", "|---|---|"]
            lines += [f"| {name} | {to_cell(value)} |" for name, value in step.rows]
    return "\n".join(lines) + "\n"


def to_cell(text: str) -> str:
    """Returns text as the cell of a Markdown table."""
    return " ".join(text.replace(str(ROOT), "").split()).replace("|", "\\|")[:300]


# The command line


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny models")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the steps, their commands and their seconds"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no step is left running")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/half_hour"), help="default: build/half_hour"
    )
    parser.add_argument("--results", type=Path, help="a folder that gets the results after each step too")
    parser.add_argument(
        "--vllms-scheduler",
        action="store_true",
        help="use vLLM's own scheduler, for servers that fail in treetune.engine.whole_answers",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="WORDS",
        help="steps whose names contain one of these, in order",
    )
    options = parser.parse_args(arguments)
    if not options.rehearse and not options.dry_run and shutil.which("nvidia-smi") is None:
        parser.error("this machine has no nvidia-smi, so no GPU: --rehearse runs the steps on a CPU")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    if options.dry_run:
        with temporary_half_hour(options) as half_hour:
            try:
                steps = choose_steps(list_steps(half_hour, count_gpus()), options.only)
            except ValueError as error:
                raise SystemExit(str(error)) from None
            print(describe_steps(steps, options.minutes))
        return 0

    from treetune.processes.lifetime import exit_on_signals

    exit_on_signals()
    folder = options.folder.resolve()
    for name in ("logs", "configurations", "experiments"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    half_hour = HalfHour(folder, options.rehearse, until, options.vllms_scheduler, options.results)
    half_hour.read_results()
    try:
        steps = choose_steps(list_steps(half_hour, count_gpus()), options.only)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    threading.Thread(target=half_hour.watch_memory, daemon=True).start()
    try:
        for step in steps:
            if not half_hour.is_done(step.name):
                half_hour.run_step(step)
    finally:  # an interrupted run has results too
        half_hour.write_results()
        print(f"{folder / 'gpu.md'}; to send: {folder.with_name(folder.name + '.tar.gz')}")
    return int(not all(half_hour.is_done(step.name) for step in steps))


@contextlib.contextmanager
def temporary_half_hour(options: argparse.Namespace) -> Iterator[HalfHour]:
    """Yields a `HalfHour` for a dry run. Its folder is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield HalfHour(Path(folder), options.rehearse, time.monotonic(), options.vllms_scheduler)


def count_gpus() -> int:
    """Returns the number of GPUs that nvidia-smi lists, 0 without it."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return len(listed.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
