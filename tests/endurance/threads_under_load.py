"""Seconds of a training step by OpenMP's threads and waiting policy, beside other processes that compute.

    python tests/endurance/threads_under_load.py --output docs/results/threads_under_load.md

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    names = list(VARIANTS)
    lines = [
        "# Threads beside a load",
        "",
        f"`python tests/endurance/threads_under_load.py --turns {options.turns} --steps {options.steps}` on"
        f" {cores} cores, where others' load was {os.getloadavg()[0]:.1f} at the beginning.",
        "",
        "A training step of four small blocks on 2,048 tokens. Seconds are medians; ratios are of one turn,"
        " to as many threads as cores that wait actively (the libraries' default): median, least and most.",
        "",
        "| own processes that only spin | " + " | ".join(names) + " | ratio, passively | ratio, one thread |",
        "|---|" + "---:|" * (len(names) + 2),
    ]
    for spinning in (0, 1, cores):
        taken = measured(spinning, options.turns, options.steps, cores)
        seconds = [f"{1000 * statistics.median(taken[name]):.1f} ms" for name in names]
        ratios = [_ratios(taken[name], taken[names[0]]) for name in names[1:]]
        lines.append(f"| {spinning} | " + " | ".join([*seconds, *ratios]) + " |")
        print(lines[-1], flush=True)
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n")


def measured(spinning: int, turns: int, steps: int, cores: int) -> dict[str, list[float]]:
    """Seconds of a step in each turn, for all variants, each in a process of its own that waits meanwhile."""
    steppers = {
        name: subprocess.Popen(
            [sys.executable, "-c", STEPPER],
            env={**os.environ, "OMP_NUM_THREADS": str(cores), **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, own in VARIANTS.items()
    }
    spinners: list[subprocess.Popen[bytes]] = []
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    try:
        for stepper in steppers.values():
            assert stepper.stdout is not None
            stepper.stdout.readline()
        spinners = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(spinning)]
        for _ in range(turns):
            for name, stepper in steppers.items():
                assert stepper.stdin is not None and stepper.stdout is not None
                print(steps, file=stepper.stdin, flush=True)
                taken[name].append(float(stepper.stdout.readline()))
    finally:
        for process in [*spinners, *steppers.values()]:
            process.kill()
            process.wait()
    return taken


def _ratios(own: list[float], base: list[float]) -> str:
    ratios = sorted(one / other for one, other in zip(own, base, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"


if __name__ == "__main__":
    main()
