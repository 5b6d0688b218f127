"""Measures an iteration of the quickstart's SFT, alone and next to four busy processes.

    python benchmarks/busy_machine.py --output docs/results/busy_machine.md

A run trains two iterations alone, then the busy processes start, and it trains two more. The second and the
fourth are compared: the first warms up, and the busy processes start in the third.

The fair share is measured, too: as many processes as the run has threads, which compute and never wait,
alone and next to the same four. A run whose threads lose nothing by waiting for each other slows down by that
ratio. All processes belong to one session, since some schedulers share the cores among sessions first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BUSY_PROCESSES = 4
COUNTING_S = 10.0
"""Seconds for which the processes that never wait count."""
ITERATION_DEADLINE_S = 3600.0
END_DEADLINE_S = 120.0
SPIN = "while True: pass"
COUNT_FOR = """
import sys, time
end, count = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    count += 1
print(count)
"""

VARIANTS: dict[str, dict[str, str]] = {
    "as treetune sets it": {},
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "sleeping at once": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
}
"""Environment variables that say how OpenMP's threads wait for each other."""
VARIABLES_OF_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")

PAGE = """# An iteration beside other work

`python benchmarks/busy_machine.py --turns {turns} --problems {problems} --threads {threads}` on {cores}
cores, where others' load was {load:.1f} at the beginning.

An iteration of the quickstart's SFT on {problems} problems with {threads} threads, alone and beside {busy}
processes that start after it. Medians of {turns} turns. Beside the same processes, {threads} processes that
wait for nobody take {fair:.2f} times as long as alone: that is the fair share.

| how threads wait | alone | beside {busy} | times as long | times the fair share |
|---|---:|---:|---:|---:|
"""


class Seconds(NamedTuple):
    """The seconds of an iteration."""

    alone: float
    beside_others: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--problems", type=int, default=6400, help="of an iteration; at least 1280")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()

    load = os.getloadavg()[0]
    fair_ratios = []
    seconds_of_variants: dict[str, list[Seconds]] = {name: [] for name in VARIANTS}
    for _ in range(options.turns):
        fair_ratios.append(measure_fair_ratio(options.threads))
        for name, settings in VARIANTS.items():
            environment = settings | {"OMP_NUM_THREADS": str(options.threads)}
            seconds = measure_run(environment, options.problems)
            seconds_of_variants[name].append(seconds)
            print(f"{name}: {seconds}", file=sys.stderr, flush=True)

    fair = median(fair_ratios)
    text = PAGE.format(
        turns=options.turns,
        problems=options.problems,
        threads=options.threads,
        cores=len(os.sched_getaffinity(0)),
        load=load,
        busy=BUSY_PROCESSES,
        fair=fair,
    )
    for name, turns in seconds_of_variants.items():
        alone = median(seconds.alone for seconds in turns)
        beside = median(seconds.beside_others for seconds in turns)
        ratio = median(seconds.beside_others / seconds.alone for seconds in turns)
        text += f"| {name} | {alone:.1f} s | {beside:.1f} s | {ratio:.2f} | {ratio / fair:.2f} |\n"
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text)


def measure_run(settings: dict[str, str], problems: int) -> Seconds:
    """Trains four iterations, the last two of them next to busy processes.

    Args:
        settings: Environment variables of the run.
        problems: The problems of an iteration.
    """
    override = {"iterations": 4, "problems_per_iteration": problems, "evaluation+": {"sets": []}}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ}
        for name in VARIABLES_OF_WAITING:
            environment.pop(name, None)
        environment |= settings | {"APP_DIRECTORY": folder, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-m", "treetune.main", "run"]
        command += ["--configs", str(ROOT / "configs/quickstart/sft.jsonnet")]
        command += ["--override", as_jsonnet(override)]
        metrics = Path(folder) / "quickstart/sft/metrics.jsonl"
        run = subprocess.Popen(command, env=environment)
        try:
            # An iteration's seconds are those between its end and the end of the iteration before.
            ends = [wait_for_iteration(metrics, run, iterations) for iterations in (1, 2)]
            with start_busy_processes():
                ends += [wait_for_iteration(metrics, run, iterations) for iterations in (3, 4)]
            run.wait(END_DEADLINE_S)
        finally:
            run.kill()
            run.wait()
    return Seconds(alone=ends[1] - ends[0], beside_others=ends[3] - ends[2])


def as_jsonnet(override: dict[str, object]) -> str:
    """Returns an object in Jsonnet. A key ``name+`` adds to the object ``name``: ``{"name"+: …}``."""
    return json.dumps(override).replace('+":', '"+:')


def wait_for_iteration(metrics: Path, run: subprocess.Popen[bytes], iterations: int) -> float:
    """Waits until metrics.jsonl has so many iterations, and returns the time.

    Raises:
        RuntimeError: if the run ends before, or takes too long.
    """
    deadline = time.monotonic() + ITERATION_DEADLINE_S
    while count_lines(metrics) < iterations:
        # The last line may have been written after it was looked for, and before the run ended.
        if run.poll() is not None and count_lines(metrics) < iterations:
            raise RuntimeError(f"the run ended with {run.returncode} before iteration {iterations}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"iteration {iterations} took longer than {ITERATION_DEADLINE_S:.0f} s")
        time.sleep(0.05)
    return time.monotonic()


def count_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.is_file() else 0


@contextmanager
def start_busy_processes() -> Iterator[None]:
    """Runs processes that compute without end, until the end of the block."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(BUSY_PROCESSES)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_fair_ratio(processes: int) -> float:
    """Returns how many times as long processes that never wait take next to the busy ones."""
    alone = measure_counting(processes)
    with start_busy_processes():
        beside_others = measure_counting(processes)
    return alone / beside_others


def measure_counting(processes: int) -> float:
    """Returns how far so many processes count together in `COUNTING_S` seconds."""
    command = [sys.executable, "-c", COUNT_FOR, str(COUNTING_S)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return float(sum(int(process.communicate()[0]) for process in started))


if __name__ == "__main__":
    main()
