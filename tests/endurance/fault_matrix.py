"""Kills a run at fifteen points, one run each, and compares its weights with an undisturbed run's.

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
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.experiment_runs import Experiment, Phase, PointMissed, Victim  # noqa: E402

WHERE: dict[Phase, int] = {"generation": 2, "credit": 1, "training": 2, "sync": 1, "commit": 3}
"""The iteration in which each phase is killed, counted from 0: some come before the first checkpoint."""
TRIES = 3
OVERLAP = "{ overlap: 'one_step', trainer+: { objective+: { importance_cap: 2 } } }"
POINTS = {f"{victim}/{phase}": (victim, phase) for victim in get_args(Victim) for phase in get_args(Phase)}
PAGE = """# Runs that were killed

`kill -9` at each point of the small experiment (`tests/support/small.jsonnet`: VinePPO, 4
iterations, a checkpoint every 2, one rank and one vLLM server), with the rank stopped at that
point before the kill. The *launcher* is the `deepspeed` command, the *engine* the server's
`VLLM::EngineCore`. The last columns say whether the run then ended with the undisturbed run's
policy weights, bit for bit, with each iteration's metrics once, with no request sampled twice
and no process or shared memory left behind; and the seconds from the first start to the last end.

{good} of {points} points are as they should be. Made by `tests/endurance/fault_matrix.py` on {day}, Python
{python}, CPU.

| killed | in | of iteration | the command | same weights, all clean | seconds |
|---|---|---|---|---|---|
{rows}
"""


def kill_at_point(
    victim: Victim, phase: Phase, undisturbed: Experiment, base: Path, overrides: Sequence[str]
) -> tuple[str, str]:
    """Kills a run at one point, in an experiment of its own, and resumes it.

    Returns:
        The row of the page, and the problem (empty if there is none).
    """
    started, command, problem = time.monotonic(), "", ""
    try:
        experiment, code = run_and_kill(victim, phase, base, overrides)
        # The run replaces a dead engine by itself; after other kills, the command is given again.
        command = "goes on by itself" if code == 0 else f"ends with {code}, is given again"
        if code != 0:
            experiment.run("run_iteration_loop", *overrides)
        experiment.assert_consistent(undisturbed)
        assert (code == 0) == (victim == "engine"), f"exit code {code}"
    except (AssertionError, PointMissed) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    same = f"**no**: {problem}" if problem else "yes"
    cells = (victim, phase, WHERE[phase] + 1, command, same, round(time.monotonic() - started))
    return f"| {' | '.join(map(str, cells))} |", problem


def run_and_kill(
    victim: Victim, phase: Phase, base: Path, overrides: Sequence[str]
) -> tuple[Experiment, int]:
    """Starts a run, kills it at a point, and returns it with its exit code.

    A point that passes before the ranks can be stopped is tried again.
    """
    for attempt in range(TRIES):
        experiment = Experiment(base / f"{victim}-{phase}-{attempt}")
        running = experiment.start("run_iteration_loop", *overrides)
        try:
            running.reach(phase, WHERE[phase])
        except PointMissed:
            running.kill_everything()
            continue
        running.kill(victim)
        code = running.wait()
        running.assert_all_gone()
        return experiment, code
    raise PointMissed(f"{phase} passed {TRIES} times before the ranks could be stopped in it")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the table there")
    parser.add_argument("--only", nargs="+", choices=POINTS, default=list(POINTS), help="some of the points")
    parser.add_argument("--overlap", action="store_true", help="sample an iteration while one is trained")
    options = parser.parse_args()
    overrides = [OVERLAP] if options.overlap else []
    rows, problems = [], []
    with tempfile.TemporaryDirectory(prefix="fault-matrix-") as folder:
        undisturbed = Experiment(Path(folder, "undisturbed"))
        undisturbed.run("run_iteration_loop", *overrides)
        for name in options.only:
            row, problem = kill_at_point(*POINTS[name], undisturbed, Path(folder), overrides)
            rows.append(row)
            problems += [problem] if problem else []
            print(row, flush=True)
    good, day = len(rows) - len(problems), time.strftime("%Y-%m-%d")
    text = PAGE.format(
        good=good, points=len(rows), day=day, python=platform.python_version(), rows="\n".join(rows)
    )
    if options.output:
        options.output.write_text(text)
    print("\n" + text)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
