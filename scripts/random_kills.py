"""Kills a run with an overlap of one step at random instants, and compares what it comes to, bit for bit.

    python scripts/random_kills.py [--kills 10] [--seed 1] [--output docs/results/random_kills.md]

The small experiment with ``overlap: 'one_step'`` is run once undisturbed and once with blows: `kill -9` of
its process, at an instant drawn from the seconds after it has gone on with its work. The same run is then
started again, until all blows have fallen and it ends. So that a dozen starts take seconds, processes are
forked off this one, and sample by themselves in place of a server (`treetune.inference.in_process`): the
loop, journals, files and training are the real ones. `scripts/fault_matrix.py --overlap` kills launchers,
ranks and servers.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from treetune.episode_generators.storage import read_episodes  # noqa: E402
from treetune.testing.faults import Experiment  # noqa: E402
from treetune.testing.forked import Forked, until  # noqa: E402

ITERATIONS = 24
OVERRIDE = f"""{{
  overlap: 'one_step',
  iterations: {ITERATIONS},
  trainer+: {{ objective+: {{ importance_cap: 2 }} }},
}}"""
WITHIN = 0.12
"""A blow falls within this share of the undisturbed run's seconds after a start has begun its work."""


@dataclass(frozen=True)
class Blow:
    """How long after that start's first work, and what of the run was there then."""

    seconds: float
    recorded: int
    """Iterations with metrics."""
    sampled: int
    """Iterations whose episodes were whole."""

    def row(self, number: int) -> str:
        return f"| {number} | {self.seconds:.1f} | {self.recorded} | {self.sampled} |"


def strike(run: Forked, within: float, draw: random.Random) -> Blow | None:
    """Starts it and kills it; None where it came to its end before."""
    experiment, before = run.experiment, work(run.experiment)
    process = run.start()
    code = until(lambda: work(experiment) != before, process)
    seconds = draw.uniform(0, within)
    at = time.monotonic() + seconds
    code = until(lambda: time.monotonic() >= at, process) if code is None else code
    if code is not None:
        return None
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return Blow(seconds, count(experiment, "metrics.json"), count(experiment, "episodes.arrow"))


def work(experiment: Experiment) -> tuple[int, int]:
    """Changes whenever something was sampled or an iteration recorded."""
    journals = experiment.directory.path.glob("iterations/*/journal/*.jsonl")
    recorded = experiment.directory.path.glob("iterations/*/metrics.json")
    return sum(path.stat().st_size for path in journals), sum(path.stat().st_mtime_ns for path in recorded)


def count(experiment: Experiment, name: str) -> int:
    return len(list(experiment.directory.path.glob(f"iterations/*/{name}")))


def differences(experiment: Experiment, undisturbed: Experiment) -> list[str]:
    """What isn't as in the undisturbed run, in words."""
    found = []
    if experiment.policy(ITERATIONS) != undisturbed.policy(ITERATIONS):
        found.append("the weights differ")
    for iteration in range(ITERATIONS):
        one, other = (
            read_episodes(each.directory.iteration(iteration) / "episodes.arrow")
            for each in (experiment, undisturbed)
        )
        if one != other:
            found.append(f"the episodes of iteration {iteration + 1} differ")
    if [row["iteration"] for row in experiment.directory.read_metrics()] != list(range(ITERATIONS)):
        found.append("metrics.jsonl has not each iteration once")
    for name, requests in experiment.journals().items():
        if twice := sum(times > 1 for times in Counter(requests).values()):
            found.append(f"{name}: {twice} requests were sampled twice")
    return found


def page(blows: list[Blow], found: list[str], seed: int, seconds: float, within: float) -> str:
    good = "Weights and episodes are the undisturbed run's to the bit; no journal has a request twice."
    lines = [
        "# A run with an overlap of one step that was killed at random instants",
        "",
        f"`python scripts/random_kills.py --kills {len(blows)} --seed {seed}`: the small experiment"
        f" (`src/treetune/testing/small.jsonnet`: VinePPO) with {ITERATIONS} iterations, a checkpoint every"
        f" 2, `overlap: 'one_step'`, sampled by the run's own process in place of a server. {len(blows)}"
        f" times `kill -9`, each at an instant drawn from the first {within:.0f} seconds of work of that"
        " start."
        f" {seconds / 60:.0f} minutes in all, Python {platform.python_version()}, CPU.",
        "",
        "| blow | seconds of work | iterations recorded by then | sampled by then |",
        "|---:|---:|---:|---:|",
        *(blow.row(number) for number, blow in enumerate(blows, start=1)),
        "",
        f"**Wrong**: {'; '.join(found)}." if found else good,
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the instants")
    parser.add_argument("--output", type=Path, help="also write the page there")
    options = parser.parse_args()
    import deepspeed  # noqa: F401  once for all that are forked off
    import transformers  # noqa: F401

    begun, draw = time.monotonic(), random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="random-kills-") as folder:
        undisturbed = Forked(Experiment(Path(folder, "undisturbed")), [OVERRIDE])
        undisturbed.end(undisturbed.start())
        within = WITHIN * (time.monotonic() - begun)
        killed, blows = Forked(Experiment(Path(folder, "killed")), [OVERRIDE]), list[Blow]()
        while len(blows) < options.kills and (blow := strike(killed, within, draw)) is not None:
            blows.append(blow)
            print(blow.row(len(blows)), flush=True)
        killed.end(killed.start())
        found = differences(killed.experiment, undisturbed.experiment)
    text = page(blows, found, options.seed, time.monotonic() - begun, within)
    if options.output:
        options.output.write_text(text)
    print("\n" + text)
    return 1 if found or len(blows) < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
