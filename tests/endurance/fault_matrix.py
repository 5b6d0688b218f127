"""Kills a run at fifteen points, one run each, and prints what became of it.

    python tests/endurance/fault_matrix.py [--output PAGE.md] [--only engine/sync …] [--overlap]

A point is a victim (the launcher, a rank, the server's engine process) and a phase (generation,
credit, training, sync, commit). The same command is then given again until it ends with 0, and its
policy weights are compared with an undisturbed run's. With --overlap, iterations overlap by one
step. A server starts one to three times per point: allow half an hour on two cores.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.faults import Experiment, Missed, Phase, Victim  # noqa: E402

WHERE: dict[Phase, int] = {"generation": 2, "credit": 1, "training": 2, "sync": 1, "commit": 3}
"""The iteration that is struck, counted from 0; before the first checkpoint in some, after it in others."""
TRIES = 3
OVERLAP = "{ overlap: 'one_step', trainer+: { objective+: { importance_cap: 2 } } }"


@dataclass(frozen=True)
class Outcome:
    """What became of one point."""

    victim: Victim
    phase: Phase
    command: str
    problem: str
    seconds: float

    def row(self) -> str:
        same = "yes" if not self.problem else f"**no**: {self.problem}"
        iteration = WHERE[self.phase] + 1
        return (
            f"| {self.victim} | {self.phase} | {iteration} | {self.command} | {same} | {self.seconds:.0f} |"
        )


def strike(
    victim: Victim, phase: Phase, undisturbed: Experiment, base: Path, overrides: Sequence[str]
) -> Outcome:
    """One point in an experiment of its own."""
    started = time.monotonic()
    command, problem = "", ""
    try:
        experiment, code = interrupted(victim, phase, base, overrides)
        # The engine's death is the run's own business; the others' need the command once more.
        command = "goes on by itself" if code == 0 else f"ends with {code}, is given again"
        if (code == 0) != (victim == "engine"):
            problem = f"exit code {code}"
        if code != 0:
            experiment.run("run_iteration_loop", *overrides)
        experiment.assert_consistent(undisturbed)
    except (AssertionError, Missed) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return Outcome(victim, phase, command, problem, time.monotonic() - started)


def interrupted(victim: Victim, phase: Phase, base: Path, overrides: Sequence[str]) -> tuple[Experiment, int]:
    """A run that was struck, and its exit code. A point that passed too quickly is tried again."""
    for attempt in range(TRIES):
        experiment = Experiment(base / f"{victim}-{phase}-{attempt}")
        running = experiment.start("run_iteration_loop", *overrides)
        try:
            running.reach(phase, WHERE[phase])
        except Missed:
            running.kill_everything()
            continue
        running.kill(victim)
        code = running.wait()
        running.assert_all_gone()
        return experiment, code
    raise Missed(f"{phase} passed {TRIES} times before the ranks could be stopped in it")


def table(outcomes: list[Outcome]) -> str:
    good = sum(not outcome.problem for outcome in outcomes)
    head = [
        "# Runs that were killed",
        "",
        "`kill -9` at each point of the small experiment (`tests/support/small.jsonnet`: VinePPO, 4",
        "iterations, a checkpoint every 2, one rank and one vLLM server), with the rank stopped at that",
        "point before the blow. The *launcher* is the `deepspeed` command, the *engine* the server's",
        "`VLLM::EngineCore`. The last columns say whether the run then ended with the undisturbed run's",
        "policy weights, bit for bit, with each iteration's metrics once, with no request sampled twice",
        "and no process or shared memory left behind; and the seconds from the first start to the last end.",
        "",
        f"{good} of {len(outcomes)} points are as they should be. Made by `tests/endurance/fault_matrix.py`"
        f" on {time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, CPU.",
        "",
        "| killed | in | of iteration | the command | same weights, all clean | seconds |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(outcome.row() for outcome in outcomes)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the table there")
    parser.add_argument("--only", nargs="+", metavar="VICTIM/PHASE", help="some of the points")
    parser.add_argument("--overlap", action="store_true", help="sample an iteration while one is trained")
    options = parser.parse_args()
    overrides = [OVERLAP] if options.overlap else []
    points = [(victim, phase) for victim in get_args(Victim) for phase in get_args(Phase)]
    if options.only:
        unknown = set(options.only) - {f"{victim}/{phase}" for victim, phase in points}
        if unknown:
            parser.error(f"there is no point {', '.join(sorted(unknown))}")
        points = [point for point in points if "/".join(point) in options.only]
    with tempfile.TemporaryDirectory(prefix="fault-matrix-") as folder:
        undisturbed = Experiment(Path(folder, "undisturbed"))
        undisturbed.run("run_iteration_loop", *overrides)
        outcomes = []
        for victim, phase in points:
            outcomes.append(strike(victim, phase, undisturbed, Path(folder), overrides))
            print(outcomes[-1].row(), flush=True)
    text = table(outcomes)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)
    print("\n" + text)
    return 1 if any(outcome.problem for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
