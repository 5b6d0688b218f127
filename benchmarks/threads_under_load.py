"""Seconds of a training step by OpenMP's threads and waiting policy, beside other processes that compute.

    python benchmarks/threads_under_load.py --output docs/results/threads_under_load.md

All variants take turns, several times; a ratio is of one turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

STEPPER = """
import sys, time, torch
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.RMSNorm(128), torch.nn.Linear(128, 384), torch.nn.SiLU(),
                              torch.nn.Linear(384, 128)) for _ in range(4)]
model = torch.nn.Sequential(*layers)
x = torch.randn(2048, 128)
def step():
    model.zero_grad()
    model(x).square().mean().backward()
step()
print("ready", flush=True)
for line in sys.stdin:
    start = time.monotonic()
    for _ in range(int(line)):
        step()
    print((time.monotonic() - start) / int(line), flush=True)
"""
SPIN = "while True: pass"
VARIANTS: dict[str, dict[str, str]] = {
    "as many threads as cores, waiting actively": {},
    "as many threads as cores, waiting passively": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


PAGE = """# Threads beside a load

`python benchmarks/threads_under_load.py --turns {turns} --steps {steps}` on {cores} cores, where others' load
was {load:.1f} at the beginning.

A training step of four small blocks on 2,048 tokens. Seconds are medians; ratios are of one turn, to as many
threads as cores that wait actively (the libraries' default): median, least and most.

| own processes that only spin | {names} | ratio, passively | ratio, one thread |
|---|---:|---:|---:|---:|---:|
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    text = PAGE.format(**vars(options), cores=cores, load=load, names=" | ".join(VARIANTS))
    print(text, end="")
    for spinning in (0, 1, cores):
        base, *others = taken = measured(spinning, options.turns, options.steps, cores)
        cells = [f"{1000 * statistics.median(seconds):.1f} ms" for seconds in taken]
        for own in others:
            ratios = sorted(one / other for one, other in zip(own, base))
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})")
        text += (line := f"| {spinning} | {' | '.join(cells)} |\n")
        print(line, end="", flush=True)
    if options.output is not None:
        options.output.write_text(text)


def measured(spinning: int, turns: int, steps: int, cores: int) -> list[list[float]]:
    """Seconds of a step in each turn, by variant, each in a process of its own that waits meanwhile."""
    steppers = []
    for own in VARIANTS.values():
        environment = {**os.environ, "OMP_NUM_THREADS": str(cores), **own}
        command = [sys.executable, "-c", STEPPER]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        steppers.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    spinners: list[subprocess.Popen[bytes]] = []
    taken: list[list[float]] = [[] for _ in steppers]
    try:
        for stepper in steppers:
            stepper.stdout.readline()
        spinners += [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(spinning)]
        for _ in range(turns):
            for stepper, seconds in zip(steppers, taken):
                print(steps, file=stepper.stdin, flush=True)
                seconds.append(float(stepper.stdout.readline()))
    finally:
        for process in [*spinners, *steppers]:
            process.kill()
            process.wait()
    return taken


if __name__ == "__main__":
    main()
