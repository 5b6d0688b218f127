"""Half an hour on a GPU: one command that shows what nobody could see without one.

    .venv/bin/python scripts/gpu/half_hour.py               on a GPU, after scripts/setup.sh --dev
    .venv/bin/python scripts/gpu/half_hour.py --rehearse    on a CPU: a tiny model, small counts

It looks at the set-up, runs the tests marked `gpu`, the quickstart (SFT, VinePPO, a kill and what goes on
from it), and a model of half a billion random weights, made from its configuration alone, through every
phase and by each way of weights; it compares plan and measurement, engine and `LLM.generate`, training
and bare PyTorch. No step needs another's success, each has a deadline, and all of it ends after
`--minutes`. What came out is a page, docs/results/gpu.md, and a folder with every log, packed for
sending.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
PAGE = ROOT / "docs/results/gpu.md"
MIB, GIB = 2**20, 2**30
SMALLEST_S = 20.0  # a step with less time than this isn't begun
HEAVY = (".safetensors", ".pt", ".bin")  # isn't sent
POLL_S = 0.5
SLOWER = 2  # times as long as on a GPU a rehearsal's steps may take
Rows = list[tuple[str, str]]
"""What a step found: what, and how much."""


@dataclass
class HalfHour:
    """What is done, where, and until when."""

    folder: Path
    rehearse: bool
    until: float
    vllms_scheduler: bool = False
    only: Sequence[str] = ()
    """Words in the names of the steps that are taken; none: all."""
    steps: list[tuple[str, str, float, Rows]] = field(default_factory=list)
    """Name, outcome, seconds and findings of each."""
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since 1970, and bytes: of the fullest GPU, or on a CPU of all processes below this one."""

    def step(self, name: str, limit: float, work: Callable[..., Rows], *arguments: Any) -> None:
        """Does the work, which is given its seconds, a log and the arguments. What fails is written down."""
        left = min(limit * (SLOWER if self.rehearse else 1), self.until - time.monotonic())
        begun, outcome = time.monotonic(), "no time was left"
        found: Rows = []
        if left >= SMALLEST_S:
            print(f"{name} (at most {left:.0f} s) …", flush=True)
            try:
                log = self.folder / "logs" / f"{name.replace(' ', '_')}.log"
                found, outcome = work(self, left, log, *arguments), "ok"
            except Exception as error:
                outcome = f"FAILED: {type(error).__name__}: {str(error).strip() or 'no message'}"
        seconds = time.monotonic() - begun
        self.steps.append((name, outcome, seconds, found))
        said = [f"{outcome} after {seconds:.0f} s", *(f"{what}: {value}" for what, value in found)]
        print(*("    " + line for line in said), sep="\n", flush=True)
        (self.folder / "steps.json").write_text(json.dumps({"steps": self.steps, "memory": self.memory}))
        (self.folder / "gpu.md").write_text(page(self))

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Starts a command, whose output goes to the log."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": ""}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        if self.rehearse:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with log.open("ab") as file:
            file.write(f"\n$ {' '.join(command)}\n".encode())
            file.flush()
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)

    def run(self, command: Sequence[str], seconds: float, log: Path) -> str:
        """Returns a command's output. Raises RuntimeError if it fails or is late; then all that it started is
        ended."""
        process = self.start(command, log)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {seconds:.0f} s; see {log.name}") from None
        finally:
            if process.poll() is None:
                end_all(process.pid)
        output = log.read_text(errors="replace").rpartition(f"\n$ {' '.join(command)}\n")[2]
        if code:
            raise RuntimeError(f"exit code {code}, see {log.name}: {' '.join(output.split()[-40:])}")
        return output

    def watch_memory(self) -> None:
        """For ever, in a thread."""
        while True:
            # nvidia-smi that is late once is no reason to look no more.
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self.memory.append((time.time(), memory_in_use(self.rehearse)))
            time.sleep(POLL_S)


def end_all(pid: int) -> None:
    """Kills a process and everything below it, as a power cut would."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family, timeout=30)


def memory_in_use(rehearse: bool) -> int:
    if not rehearse:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return max((int(line) for line in done.stdout.split() if line.isdecimal()), default=0) * MIB
    used = 0
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            used += one.memory_info().rss
    return used


# Configurations

OUTLASTS = {"may_outlast_training": True}
FEW = {  # for a rehearsal
    "problems_per_iteration": 16, "iterations": 2, "checkpoints+": {"every": 1},
    "evaluation+": {"sets": [{"split": "validation", "samples": 1, "problems": 8}]},
    "trainer+": {"minibatch_size": 16, "schedule+": OUTLASTS},
}  # fmt: skip


def overlay(day: HalfHour, name: str, changes: dict[str, Any]) -> Path:
    path = day.folder / "configurations" / f"{name}.jsonnet"
    text = json.dumps({"directory": str(day.folder / "experiments"), **changes}, indent=2)
    if day.vllms_scheduler:
        kind = "scheduler.Scheduler" if day.rehearse else "async_scheduler.AsyncScheduler"
        arguments = ["--scheduler-cls", f"vllm.v1.core.sched.{kind}"]
        text += " + " + json.dumps({"engines+": {"policy+": {"extra_arguments": arguments}}})
    path.write_text(text.replace('+": ', '"+: '))
    return path


def quickstart(day: HalfHour, name: str, iterations: int, called: str = "") -> list[str]:
    changes: dict[str, Any] = {"iterations": iterations, "trainer+": {"schedule+": OUTLASTS}}
    if called:
        changes |= {"experiment_name": f"quickstart/{called}", "checkpoints+": {"every": 1}}
    if day.rehearse:
        changes |= FEW
    return ["--configs", f"configs/quickstart/{name}.jsonnet,{overlay(day, called or name, changes)}"]


def large(day: HalfHour, way: str) -> list[str]:
    """VinePPO of the model of random weights, whose answers are rewarded where they are cut off."""
    precise = "float32" if day.rehearse else "bfloat16"
    policy = {"servers": "per_rank", "weight_transfer": way, "gpu_memory_utilization": 0.4, "dtype": precise}
    if way == "nccl":
        policy |= {"servers": "one", "devices": [1]}
    elif not day.rehearse:
        policy |= {"sleep": True, "max_num_seqs": 256}
    trainer = {
        "precision": precise,
        "layout": "packed",
        "gradient_checkpointing": True,
        "minibatch_size": None,
    }
    changes = {
        "experiment_name": f"half_hour/{way}",
        "model": {"type": "pretrained", "name_or_path": str(day.folder / "model"), "dtype": precise},
        "context_length": 256,
        "engines+": {"policy+": policy},
        "rollout+": {"samples": 4, "max_tokens": 128, "unfinished_reward": 1.0},
        "trainer+": {**trainer, "zero_stage": 0 if day.rehearse else 1, "tokens_per_micro_batch": 16384,
                     "schedule+": OUTLASTS},
        "evaluation+": {"sets": [{"split": "validation", "samples": 1, "problems": 16}], "every": 1},
        "iterations": 2,
        "problems_per_iteration": 8 if day.rehearse else 64,
        "checkpoints+": {"every": 2},
    }  # fmt: skip
    return ["--configs", f"configs/quickstart/vineppo.jsonnet,{overlay(day, f'large_{way}', changes)}"]


# Steps


def made(day: HalfHour, seconds: float, log: Path, folder: Path) -> Rows:
    size = ["--small"] if day.rehearse else []
    command = [sys.executable, "scripts/gpu/random_model.py", str(folder), *size]
    return [("it has", day.run(command, seconds, log).splitlines()[-1])]


TREETUNE = [sys.executable, "src/treetune/main.py"]


def metrics_of(day: HalfHour, experiment: str) -> list[dict[str, float]]:
    path = day.folder / "experiments" / experiment / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def canary_rows(rows: list[dict[str, float]]) -> Rows:
    """The engine's log-probs against the trainer's: after each sync, and of all that was sampled."""
    found: Rows = []
    for name, key in (
        ("canary, largest gap", "engine/canary_gap"),
        ("canary, mean gap", "engine/canary_mean_gap"),
        ("sampled tokens, largest gap", "engine/logprob_gap_max"),
        ("restarts", "engine/restarts"),
        ("sync, s", "seconds/sync"),
        ("tokens/s", "engine/tokens_per_second"),
        ("validation accuracy", "evaluation/validation/pass_at_1"),
    ):
        values = [row[key] for row in rows if key in row]
        if values:
            found.append((name, ", ".join(f"{value:.3g}" for value in values[-4:])))
    return found


def set_up(day: HalfHour, seconds: float, log: Path) -> Rows:
    import torch

    said: Rows = [("PyTorch", f"{torch.__version__}, CUDA {torch.version.cuda}")]
    if not day.rehearse:
        asked = "name,driver_version,memory.total,compute_mode"
        told = day.run(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], 60, log)
        said += [("GPU", line) for line in told.splitlines()]
    day.run([*TREETUNE, "doctor"], seconds, log)
    return said


def gpu_tests(day: HalfHour, seconds: float, log: Path) -> Rows:
    which = ["-m", "not gpu", "-k", "not engine"] if day.rehearse else ["-m", "gpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", *which]
    return [("tests", day.run(command, seconds, log).strip().splitlines()[-1].strip("= "))]


def trained(day: HalfHour, seconds: float, log: Path, arguments: list[str], experiment: str) -> Rows:
    # The launcher would show the trainer its own GPU alone.
    how = ["run_iteration_loop"] if experiment.endswith("nccl") else ["run", "--num_gpus", "1"]
    day.run([*TREETUNE, *how, *arguments], seconds, log)
    rows = metrics_of(day, experiment)
    totals = [row["seconds/total"] for row in rows]
    found = [("iterations", str(len(rows))), ("s an iteration", f"{sorted(totals)[len(totals) // 2]:.2f}")]
    return [*found, *canary_rows(rows), *memory_rows(day, experiment)]


def killed(day: HalfHour, seconds: float, log: Path) -> Rows:
    arguments, until = quickstart(day, "vineppo", 3, "killed"), time.monotonic() + seconds
    process = day.start([*TREETUNE, "run", "--num_gpus", "1", *arguments], log)
    while not metrics_of(day, "quickstart/killed") and process.poll() is None and time.monotonic() < until:
        time.sleep(POLL_S)
    end_all(process.pid)
    before = len(metrics_of(day, "quickstart/killed"))
    found = trained(day, until - time.monotonic(), log, arguments, "quickstart/killed")
    return [("killed after iterations", str(before)), *found]


def memory_rows(day: HalfHour, experiment: str) -> Rows:
    """The most memory in each phase of a run."""
    from treetune.store.timeline import read_timeline

    path = day.folder / "experiments" / experiment / "logs/run.timeline.jsonl"
    most: dict[str, int] = {}
    spans = [span for process in read_timeline(path) for span in process.spans] if path.is_file() else []
    for span in spans:
        if span.lane == "phases" and span.end is not None:
            within = [used for at, used in day.memory if span.start <= at <= span.end + POLL_S]
            most[span.name] = max([most.get(span.name, 0), *within])
    return [(f"memory in {name}, GiB", f"{used / GIB:.1f}") for name, used in most.items() if used]


def planned(day: HalfHour, seconds: float, log: Path) -> Rows:
    """The plan of the large model's run beside what came."""
    text = day.run([*TREETUNE, "plan", *large(day, "auto"), "--json"], seconds, log)
    plan, rows = json.loads(text[text.index("{") :]), metrics_of(day, "half_hour/auto")
    if not rows:
        raise RuntimeError("the large model's run has left no metrics to compare with")
    by_phase = {one["phase"]: one["seconds"] for one in plan["seconds"] or ()}
    found = []
    for what, expected, key in (
        ("answers, s", by_phase.get("answers"), "seconds/generation"),
        ("continuations, s", by_phase.get("continuations"), "seconds/credit"),
        ("training, s", by_phase.get("training"), "seconds/training"),
        ("sync, s", by_phase.get("sync"), "seconds/sync"),
        ("tokens sampled", plan["sampled_tokens"], "rollout/sampled_tokens"),
        ("tokens continued", plan["continued_tokens"], "credit/value_tokens"),
    ):
        if expected is not None and key in rows[-1]:
            found.append((what, f"planned {expected:.3g}, measured {rows[-1][key]:.3g}"))
    measured = dict(memory_rows(day, "half_hour/auto"))
    for place in plan["places"]:
        what = f"memory in {place['phase']}, GiB"
        if "GPU" in place["where"] or day.rehearse:
            found.append((what, f"planned {place['needed'] / GIB:.1f}, measured {measured.get(what, '?')}"))
    return found


def compared(day: HalfHour, seconds: float, log: Path, part: str, model: Path) -> Rows:
    command = [
        sys.executable,
        "benchmarks/benchmark.py",
        "--json",
        "--only",
        part,
        "--checkpoint",
        str(model),
    ]
    counts = ["--problems", "8", "--samples", "2", "--repeats", "1"] if day.rehearse else ["--repeats", "3"]
    text = day.run([*command, *counts], seconds, log)
    found = []
    for name, one in json.loads(text[text.index("\n{") :])["measurements"].items():
        ours, theirs, ratio = one["ours"], one["theirs"], one["ratio"]["median"]
        found.append((name, f"ours {ours:.0f} {one['unit']}, theirs {theirs:.0f}, ours / theirs {ratio:.2f}"))
    return found


# The page


def page(day: HalfHour) -> str:
    command = f"python scripts/gpu/half_hour.py{' --rehearse' if day.rehearse else ''}"
    device = "a CPU: a rehearsal, whose numbers say nothing about a GPU" if day.rehearse else "a GPU"
    when = f"{time.strftime('%F')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"
    lines = ["# Half an hour on a GPU", "", f"`{command}` on {device} ({when}).", ""]
    lines += ["Does treetune run on this GPU? Each step has a table of its measurements below.", ""]
    lines += ["| step | outcome | seconds |", "|---|---|---:|"]
    lines += [f"| {name} | {one_line(outcome)} | {seconds:.0f} |" for name, outcome, seconds, _ in day.steps]
    for name, _, _, found in day.steps:
        if found:
            lines += ["", f"## {name[0].upper()}{name[1:]}", "", "| | |", "|---|---|"]
            lines += [f"| {what} | {one_line(value)} |" for what, value in found]
    return "\n".join(lines) + "\n"


def one_line(text: str) -> str:
    return " ".join(text.replace(str(ROOT), "").split()).replace("|", "\\|")[:300]


def options() -> argparse.Namespace:
    head = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=head)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny model")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no step is left running")
    parser.add_argument(
        "--folder", type=Path, default=Path("half_hour"), help="a new one; default: half_hour"
    )
    parser.add_argument(
        "--vllms-scheduler",
        action="store_true",
        help="where servers end in treetune.engine.whole_answers: take vLLM's own scheduler",
    )
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="WORDS", help="steps with one of these words, in their order"
    )
    given = parser.parse_args()
    if given.folder.exists():
        parser.error(f"{given.folder} is there already: delete it, or name another --folder")
    if not given.rehearse and shutil.which("nvidia-smi") is None:
        parser.error("nvidia-smi isn't here, so no GPU: --rehearse runs all of it on the CPU")
    return given


def main() -> int:
    from treetune.processes.lifetime import exit_on_signals

    given = options()
    exit_on_signals()
    folder = given.folder.resolve()
    for name in ("logs", "configurations", "experiments"):
        (folder / name).mkdir(parents=True)
    until = time.monotonic() + 60 * given.minutes
    day = HalfHour(folder, given.rehearse, until, given.vllms_scheduler, given.only)
    threading.Thread(target=day.watch_memory, daemon=True).start()
    try:
        go_through(day)
    finally:  # who stops it, or loses the machine, has what came so far
        for path in (folder / "gpu.md", *([] if day.rehearse else [PAGE])):
            path.write_text(page(day))
        packed = folder.with_suffix(".tar.gz")
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(folder, folder.name, filter=lambda one: None if one.name.endswith(HEAVY) else one)
        print(f"{folder / 'gpu.md'}; to send: {packed}")
    return int(any(outcome != "ok" for _, outcome, _, _ in day.steps))


def go_through(day: HalfHour) -> None:
    folder = day.folder
    model, start = folder / "model", folder / "experiments/quickstart/sft/checkpoints/last/policy"
    ways = ["auto", "file", "shared_memory"]
    if not day.rehearse and len(subprocess.check_output(["nvidia-smi", "-L"]).splitlines()) > 1:
        ways.append("nccl")
    for step in (
        ("set-up", 240, set_up),  # an engine's first start has taken more than 100
        ("tests", 420, gpu_tests),
        ("SFT", 240, trained, quickstart(day, "sft", 12), "quickstart/sft"),
        ("VinePPO", 240, trained, quickstart(day, "vineppo", 8), "quickstart/vineppo"),
        ("large model made", 120, made, model),
        *(
            (f"large model, weights by {way}", 240, trained, large(day, way), f"half_hour/{way}")
            for way in ways
        ),
        ("plan against measured", 60, planned),
        ("training against PyTorch", 180, compared, "training", start),
        ("killed and resumed", 240, killed),
        ("engine against LLM.generate", 300, compared, "generation", start),
        ("large engine against LLM.generate", 300, compared, "generation", model),
        ("large training against PyTorch", 180, compared, "training", model),
    ):
        if not day.only or any(words in step[0] for words in day.only):
            day.step(*step)
    if not day.steps:
        raise SystemExit(f"no step has {' or '.join(day.only)} in its name: {PAGE} lists them")


if __name__ == "__main__":
    sys.exit(main())
