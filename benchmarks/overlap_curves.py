"""Learning with an overlap of one step beside iterations one after the other, over three seeds.

    python benchmarks/overlap_curves.py [--iterations 16] [--seeds 1 2 3] [--output …/overlap_curves.md]

A tiny model from random weights learns what can be learnt within a minute: not to end its answers before
their limit. GRPO, 16 problems with 8 answers an iteration and one step on them; both sides weigh tokens by
truncated importance, so that the overlap is all that differs. Runs sample by themselves in place of a server
(`treetune.engine.in_process`). `configs/tables/overlap.jsonnet` is the same on real servers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.faults import Experiment  # noqa: E402
from tests.support.forked import Forked  # noqa: E402

SIDES = {"one after the other": "none", "one step": "one_step"}
EVERY = 3
"""Iterations between two columns of the page."""


def settings(overlap: str, seed: int, iterations: int) -> str:
    return f"""{{
      seed: {seed},
      overlap: '{overlap}',
      iterations: {iterations},
      problems_per_iteration: 16,
      rollout+: {{ samples: 8, max_tokens: 24 }},
      credit: {{ type: 'group' }},
      trainer: super.trainer {{
        objective: {{ type: 'ppo', importance_cap: 2 }},
        minibatch_size: null,
        epochs: 1,
      }},
      checkpoints: {{ every: {iterations} }},
    }}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path, help="also write the page there")
    options = parser.parse_args()
    import deepspeed  # noqa: F401  once for all that are forked off
    import transformers  # noqa: F401

    begun = time.monotonic()
    rewards: dict[str, list[list[float]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory(prefix="overlap-curves-") as folder:
        for seed in options.seeds:
            runs = {
                name: Forked(
                    Experiment(Path(folder, f"{overlap}-{seed}")),
                    [settings(overlap, seed, options.iterations)],
                )
                for name, overlap in SIDES.items()
            }
            # Both at once: what else the machine does is the same for both.
            for run, process in [(run, run.start()) for run in runs.values()]:
                run.end(process)
            for name, run in runs.items():
                rows = run.experiment.directory.read_metrics()
                rewards[name].append([row["episodes/reward"] for row in rows])
                print(f"seed {seed}, {name}: {rewards[name][-1]}", flush=True)
    text = page(rewards, options.seeds, (time.monotonic() - begun) / 60)
    if options.output:
        options.output.write_text(text)
    print("\n" + text)


def page(rewards: dict[str, list[list[float]]], seeds: Sequence[int], minutes: float) -> str:
    iterations = len(next(iter(rewards.values()))[0])
    shown = sorted({*range(0, iterations, EVERY), iterations - 1})
    lines = [
        "# Learning with an overlap of one step",
        "",
        f"`python benchmarks/overlap_curves.py --iterations {iterations} --seeds {' '.join(map(str, seeds))}`"
        f", {minutes:.0f} minutes on {len(os.sched_getaffinity(0))} cores. Mean reward of an iteration's 128"
        " answers; a tiny model from random weights learns not to end them. Means over seeds last.",
        "",
        "| | seed | " + " | ".join(f"iteration {one + 1}" for one in shown) + " | mean of all |",
        "|---|---:|" + "---:|" * (len(shown) + 1),
    ]
    for name, curves in rewards.items():
        mean = [fmean(of_seeds) for of_seeds in zip(*curves, strict=True)]
        for seed, curve in [*zip(map(str, seeds), curves, strict=True), ("mean", mean)]:
            cells = " | ".join(f"{curve[one]:.2f}" for one in shown)
            lines.append(f"| {name} | {seed} | {cells} | {fmean(curve):.3f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
