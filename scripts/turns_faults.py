"""Answers of several turns on the real server, in an environment that misbehaves, killed in mid-iteration.

    python scripts/turns_faults.py [--output docs/results/turns_faults.md]

The environment (scripts/turns/unruly_environment.py) hangs, dies, answers a megabyte or isn't there at many
a level. The run must come to its end all the same, with those answers ended as they should be; then it is
killed with `kill -9` in the middle of an iteration's rollout and of another's credit, given again, and must
come to the same weights. A few minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support.faults import Experiment, Missed, Phase  # noqa: E402
from treetune.episode_generators.storage import read_episodes, read_trajectories  # noqa: E402
from treetune.vocabulary import Trajectory  # noqa: E402

CONFIG = ROOT / "scripts/turns/unruly.jsonnet"
POINTS: dict[Phase, int] = {"generation": 2, "credit": 1}
TRIES = 3
GAP = 1e-4
"""Largest difference between the engine's log-probs and the trainer's."""


def answers_of(experiment: Experiment) -> list[Trajectory]:
    """Without what no two runs share: the seconds that grades took, and those that a message names (an
    environment that is brought back to where it was has longer)."""
    files = sorted(experiment.directory.path.glob("iterations/*/trajectories.arrow"))
    answers = [answer for file in files for answer in read_trajectories(file)]
    return [replace(one, grade=replace(one.grade, seconds=0.0, message=None)) for one in answers]


def check_trained(experiment: Experiment) -> int:
    """How many sampled tokens are trained. Fails where one is not, twice, or with another log-prob, and where
    an injected one is."""
    count = 0
    for folder in sorted(experiment.directory.path.glob("iterations/*")):
        answers = {one.id: one for one in read_trajectories(folder / "trajectories.arrow")}
        episodes = read_episodes(folder / "episodes.arrow")
        known = {name for name, one in answers.items() if one.grade.is_known}
        rows = [one.trajectory for one in episodes]
        assert set(rows) <= known and len(set(rows)) == len(rows), "an answer is one row"
        for episode in episodes:
            start = 0
            for segment in answers[episode.trajectory].segments:
                end = start + len(segment.token_ids)
                sampled = segment.origin == "sampled"
                assert episode.trained[start:end].all() == sampled or not len(segment.token_ids)
                assert episode.trained[start:end].any() == sampled
                if segment.logprobs is not None:
                    assert (episode.behaviour_logprobs[start:end] == segment.logprobs).all()
                    count += end - start
                start = end
            assert start == len(episode.response_ids)
    return count


def interrupted(phase: Phase, base: Path) -> tuple[Experiment, int]:
    """A run whose rank was killed in that phase, and its exit code."""
    for attempt in range(TRIES):
        experiment = Experiment(base / f"{phase}-{attempt}", config=CONFIG)
        running = experiment.start()
        try:
            running.reach(phase, POINTS[phase])
        except Missed:
            running.kill_everything()
            continue
        running.kill("rank")
        code = running.wait()
        running.assert_all_gone()
        return experiment, code
    raise Missed(f"{phase} passed {TRIES} times before the rank could be stopped in it")


def told(undisturbed: Experiment, lines: list[str], seconds: float) -> str:
    answers = answers_of(undisturbed)
    moods: dict[str, list[Trajectory]] = {}
    for answer in answers:
        moods.setdefault(answer.problem.gold, []).append(answer)
    rows = []
    for mood, theirs in sorted(moods.items()):
        outcomes = ", ".join(f"{name} ({n})" for name, n in Counter(a.grade.outcome for a in theirs).items())
        longest = max(len(one.response_ids) for one in theirs)
        rows.append(f"| {mood} | {len(theirs)} | {outcomes} | {longest} |")
    gaps = [row["engine/logprob_gap_max"] for row in undisturbed.directory.read_metrics()]
    assert max(gaps) <= GAP, f"engine and trainer differ by {max(gaps)}"
    return "\n".join(
        [
            "# Turns that go wrong, and runs that are killed",
            "",
            "Four iterations of twelve problems with two answers each, and a continuation from each turn's",
            "beginning, on the real server (`scripts/turns/unruly.jsonnet`). In the second turn, the level",
            "says whether the environment hangs, dies, says 2^20 characters, or isn't there.",
            "",
            "| the environment | answers | outcomes | tokens of the longest |",
            "|---|---|---|---|",
            *rows,
            "",
            f"* {check_trained(undisturbed)} sampled tokens, each trained once with the engine's log-prob; no"
            " injected one.",
            f"* Largest difference between the engine's log-probs and the trainer's: {max(gaps):.2g}.",
            *lines,
            "",
            f"Made by `python scripts/turns_faults.py` on {time.strftime('%Y-%m-%d')}, in {seconds:.0f} s.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write it there")
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="turns-faults-") as folder:
        undisturbed = Experiment(Path(folder, "undisturbed"), config=CONFIG)
        undisturbed.run()
        lines = []
        for phase in POINTS:
            experiment, code = interrupted(phase, Path(folder))
            assert code != 0, "the rank was killed"
            experiment.run()
            experiment.assert_consistent(undisturbed)
            for one, other in zip(answers_of(experiment), answers_of(undisturbed), strict=True):
                assert one == other, f"{one} is not {other}"
            lines.append(
                f"* Killed with `kill -9` in the {phase} of iteration {POINTS[phase] + 1} and given again:"
                " the same answers and weights, to the bit; no request sampled twice."
            )
            print(lines[-1], flush=True)
        text = told(undisturbed, lines, time.monotonic() - started)
    if options.output:
        options.output.write_text(text)
    print("\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
