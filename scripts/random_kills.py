"""Kills a run with an overlap of one step at random instants, and compares what it comes to, bit for bit.

    python scripts/random_kills.py [--kills 10] [--seed 1] [--output docs/results/random_kills.md]

The small experiment with ``overlap: 'one_step'`` is run once undisturbed and once with blows: `kill -9` of
its process, at an instant drawn from the seconds after it has gone on with its work. The same run is then
started again, until all blows have fallen and it ends. So that a dozen starts take seconds, processes are
forked off this one, and sample by themselves in place of a server (`treetune.testing.inline_engine`): the
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from treetune.episode_generators.storage import read_episodes  # noqa: E402
from treetune.runtime.base import PolicyIteration, Runtime  # noqa: E402
from treetune.testing.faults import CONFIG, Experiment  # noqa: E402

ITERATIONS = 24
OVERRIDE = f"""{{
  overlap: 'one_step',
  iterations: {ITERATIONS},
  trainer+: {{ objective+: {{ importance_cap: 2 }} }},
}}"""
WITHIN = 0.25
"""A blow falls within this share of the undisturbed run's seconds after a start has begun its work."""
DEADLINE_S = 1800.0


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


def start(experiment: Experiment) -> int:
    """The process that carries the run out, or goes on with it; its id."""
    experiment.base.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with (experiment.base / "output").open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        run(experiment)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def run(experiment: Experiment) -> None:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.build import build
    from treetune.config.explain import Explanation
    from treetune.config.jsonnet import load
    from treetune.inference.settings import Engines
    from treetune.runtime.commands import run_iteration_loop
    from treetune.testing.inline_engine import InlineSettings

    loaded = load([str(CONFIG)], [OVERRIDE, f"{{ directory: '{experiment.base}' }}"], environment_keys=())
    config = build(Runtime, loaded.data, Explanation(loaded))
    assert isinstance(config, PolicyIteration)
    run_iteration_loop(replace(config, engines=Engines(policy=InlineSettings())), loaded.data)


def ended(process: int) -> int | None:
    """Its exit code; None while it runs. To be asked until it has one."""
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def until(condition: Callable[[], bool], process: int) -> int | None:
    """Waits for the condition; the exit code of a process that ends before."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if (code := ended(process)) is not None:
            return code
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            raise SystemExit(f"no word within {DEADLINE_S:.0f} s")
        time.sleep(0.005)
    return None


def whole(experiment: Experiment, process: int) -> None:
    """Waits for its end."""
    code = until(lambda: False, process)
    if code:
        raise SystemExit(f"it ended with {code}:\n{(experiment.base / 'output').read_text()[-4000:]}")


def strike(experiment: Experiment, within: float, draw: random.Random) -> Blow | None:
    """Starts it and kills it; None where it came to its end before."""
    before = work(experiment)
    process = start(experiment)
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
        undisturbed = Experiment(Path(folder, "undisturbed"))
        whole(undisturbed, start(undisturbed))
        within = WITHIN * (time.monotonic() - begun)
        experiment, blows = Experiment(Path(folder, "killed")), list[Blow]()
        while len(blows) < options.kills and (blow := strike(experiment, within, draw)) is not None:
            blows.append(blow)
            print(blow.row(len(blows)), flush=True)
        whole(experiment, start(experiment))
        found = differences(experiment, undisturbed)
    text = page(blows, found, options.seed, time.monotonic() - begun, within)
    if options.output:
        options.output.write_text(text)
    print("\n" + text)
    return 1 if found or len(blows) < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
