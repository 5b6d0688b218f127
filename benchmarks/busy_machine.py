"""Seconds of an iteration of the quickstart's SFT, alone and beside four processes that start after it.

    python benchmarks/busy_machine.py --output docs/results/busy_machine.md

A run trains two iterations alone, then the busy processes start, and it trains two more. The second and the
fourth are compared: the first warms up, and the busy processes start in the third.

The fair share is measured, too: as many processes as the run has threads, which compute and wait for nobody,
alone and beside the same four. A run whose threads lose nothing by waiting for each other slows down by that
ratio. All processes are of one session, so that the scheduler shares the cores among threads, not sessions.
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
YARDSTICK_S = 10.0
RUN_DEADLINE_S, ENDS_WITHIN_S = 3600.0, 120.0
SPIN = "while True: pass"
COUNT_FOR = """
import sys, time
end, count = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    count += 1
print(count)
"""

LIBGOMPS_DEFAULT = {"GOMP_SPINCOUNT": "300000"}
VARIANTS: dict[str, dict[str, str]] = {
    "as treetune sets it": {},
    "libgomp's default": LIBGOMPS_DEFAULT,
    "sleeping at once": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
}

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
    measured: dict[str, list[Seconds]] = {name: [] for name in VARIANTS}
    for _ in range(options.turns):
        fair_ratios.append(fair_ratio(options.threads))
        for name, settings in VARIANTS.items():
            environment = settings | {"OMP_NUM_THREADS": str(options.threads)}
            measured[name].append(measure_run(environment, options.problems))
            print(f"{name}: {measured[name][-1]}", file=sys.stderr, flush=True)

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
    for name, turns in measured.items():
        alone = median(seconds.alone for seconds in turns)
        beside = median(seconds.beside_others for seconds in turns)
        ratio = median(seconds.beside_others / seconds.alone for seconds in turns)
        text += f"| {name} | {alone:.1f} s | {beside:.1f} s | {ratio:.2f} | {ratio / fair:.2f} |\n"
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text)


def measure_run(settings: dict[str, str], problems: int) -> Seconds:
    """Trains four iterations, the last two of them beside busy processes, with these variables set."""
    inherited = {
        name: text
        for name, text in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    }
    override = {"iterations": 4, "problems_per_iteration": problems, "evaluation+": {"sets": []}}
    with tempfile.TemporaryDirectory() as folder:
        environment = inherited | settings | {"APP_DIRECTORY": folder, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-m", "treetune.main", "run"]
        command += ["--configs", str(ROOT / "configs/quickstart/sft.jsonnet")]
        command += ["--override", as_jsonnet(override)]
        metrics = Path(folder) / "quickstart/sft/metrics.jsonl"
        run = subprocess.Popen(command, env=environment)
        try:
            begins = [wait_for_iteration(metrics, run, done) for done in (1, 2)]
            with busy_processes():
                begins += [wait_for_iteration(metrics, run, done) for done in (3, 4)]
            run.wait(ENDS_WITHIN_S)
        finally:
            run.kill()
            run.wait()
    return Seconds(alone=begins[1] - begins[0], beside_others=begins[3] - begins[2])


def as_jsonnet(override: dict[str, object]) -> str:
    """Writes an object whose keys may end with a plus, outside of the quotes."""
    return json.dumps(override).replace('+":', '"+:')


def wait_for_iteration(metrics: Path, run: subprocess.Popen[bytes], done: int) -> float:
    """Waits until `done` iterations are recorded, and returns the time."""
    deadline = time.monotonic() + RUN_DEADLINE_S
    while not metrics.is_file() or metrics.read_text().count("\n") < done:
        if run.poll() is not None and (not metrics.is_file() or metrics.read_text().count("\n") < done):
            raise RuntimeError(f"the run ended with {run.returncode} before iteration {done}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"iteration {done} took longer than {RUN_DEADLINE_S:.0f} s")
        time.sleep(0.05)
    return time.monotonic()


@contextmanager
def busy_processes() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(BUSY_PROCESSES)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def fair_ratio(threads: int) -> float:
    """Returns how many times as long as alone so many processes take beside the busy ones."""
    alone = work_done(threads)
    with busy_processes():
        beside_others = work_done(threads)
    return alone / beside_others


def work_done(processes: int) -> float:
    """Returns what so many processes do together in a while."""
    command = [sys.executable, "-c", COUNT_FOR, str(YARDSTICK_S)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    return float(sum(int(process.communicate()[0]) for process in started))


if __name__ == "__main__":
    main()
