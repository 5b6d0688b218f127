"""Measures what it costs to score an answer by reasoning_gym in the sandbox, beside the library's own call.

    python benchmarks/library_scorers.py [--answers 40] [--repeats 5] [--only NAME …]

Three sides take turns on the same golds, so that what the machine does besides cancels in the ratios of a
turn: the library's function in this process (which nothing guards), the sandbox as it is, and the sandbox
with a process for each answer, whatever is proven of its scorer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.pairs import in_turns, timed  # noqa: E402
from treetune.domains.graders.reasoning_gym import ReasoningGymGrader  # noqa: E402
from treetune.domains.puzzles.reasoning_gym import ReasoningGym  # noqa: E402
from treetune.domains.sandbox import inside  # noqa: E402
from treetune.domains.sandbox.inside import reasoning_gym_scores  # noqa: E402
from treetune.domains.sandbox.served import LibraryScorer  # noqa: E402
from treetune.vocabulary import Problem  # noqa: E402

COMPARED = ("chain_sum", "spell_backward", "zebra_puzzles", "sudoku")
EVALUATED = ("countdown", "n_queens", "polynomial_multiplication", "simple_integration")
DISTINCT = 10
"""Problems of a data set, which are scored in turn."""

SCORES, WITHOUT_PROOFS = "reasoning_gym_scores", "reasoning_gym_scores_without_proofs"
PROVE_NOTHING = "\n\ndef _only_compares(data_set):\n    return False\n"
HEAD = """\
| data set | call, ms | in the sandbox, ms | a process each, ms | sandbox / call | process each / sandbox |
|---|---:|---:|---:|---:|---:|"""

Score = Callable[[str, Mapping[str, Any]], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--answers", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[*COMPARED, *EVALUATED])
    arguments = parser.parse_args()
    source = inside.source

    def source_with_another(name: str) -> str:
        return source(SCORES) + PROVE_NOTHING if name == WITHOUT_PROOFS else source(name)

    inside.source = source_with_another  # type: ignore[assignment]
    grader = ReasoningGymGrader()
    print(HEAD)
    for name in arguments.only:
        problems = ReasoningGym(dataset=name, train_size=1, validation_size=1, test_size=DISTINCT).made(
            "test"
        )
        as_it_is, forked = (
            LibraryScorer(grader.sandbox, grader.limits, scores, "reasoning_gym")
            for scores in (SCORES, WITHOUT_PROOFS)
        )
        sides = {
            "call": timed(lambda _, problems=problems: score_all(call, problems, arguments.answers)),
            "sandbox": timed(
                lambda _, s=as_it_is, problems=problems: score_all(s.score, problems, arguments.answers)
            ),
            "forked": timed(
                lambda _, s=forked, problems=problems: score_all(s.score, problems, arguments.answers)
            ),
        }
        seconds = in_turns(sides, arguments.repeats)
        as_it_is.close()
        forked.close()
        print(row(name, seconds, arguments.answers), flush=True)


def score_all(score: Score, problems: list[Problem], answers: int) -> None:
    for place in range(answers):
        problem = problems[place % len(problems)]
        score(problem.gold, {key: problem.data[key] for key in ("dataset", "config", "question", "entry")})


def call(answer: str, problem: Mapping[str, Any]) -> float:
    data_set = reasoning_gym_scores._data_set(problem["dataset"], problem["config"])
    entry = {"question": problem["question"], **reasoning_gym_scores.unpacked(problem["entry"])}
    return float(data_set.score_answer(answer, entry))


def row(name: str, seconds: Mapping[str, list[float]], answers: int) -> str:
    milliseconds = {side: 1000 * median(turns) / answers for side, turns in seconds.items()}
    cost = median(ours / theirs for ours, theirs in zip(seconds["sandbox"], seconds["call"], strict=True))
    gain = median(before / now for before, now in zip(seconds["forked"], seconds["sandbox"], strict=True))
    cells = " | ".join(f"{milliseconds[side]:.3f}" for side in ("call", "sandbox", "forked"))
    return f"| `{name}` | {cells} | {cost:.1f} | {gain:.1f} |"


if __name__ == "__main__":
    main()
