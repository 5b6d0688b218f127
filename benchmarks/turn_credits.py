"""Exact bias, noise and audit of credits for turns in six small languages; nothing is sampled.

python benchmarks/turn_credits.py --output docs/results
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.pairs import publish  # noqa: E402
from treetune.credit.grpo import Group  # noqa: E402
from treetune.credit.literature.gigpo import GroupInGroup  # noqa: E402
from treetune.credit.rloo import Rloo  # noqa: E402
from treetune.credit.trees import TreeCredit  # noqa: E402
from treetune.credit.values.siblings import Siblings  # noqa: E402
from treetune.credit.vineppo import MonteCarlo  # noqa: E402
from treetune.lab.arena.gain import markdown  # noqa: E402
from treetune.lab.arena.turn_scores import (  # noqa: E402
    TurnScore,
    enumerate_full_trees,
    enumerate_single_branchings,
    expected_influence_estimate,
    influence,
    score_group_credit,
    score_replays,
    score_trees,
    score_true_advantages,
)
from treetune.lab.arena.turn_tables import TurnTable, agreement, turn_tables  # noqa: E402
from treetune.lab.arena.turns import TurnRewardCredit, by_index, by_return, padded  # noqa: E402

ANSWERS = 4
"""Answers in a group."""
ROOTS = 2
"""Answers from the prompt in a tree."""
WAYS = 2
"""Branches at a state."""
ALTERNATIVES = 3
"""Continuations of a state: with the answer's own turn, there are four candidates."""

RLOO = "RLOO"
TRUE = "true advantages"
Scorer = Callable[[TurnTable], TurnScore]


def make_scorers() -> dict[str, Scorer]:
    """Returns the functions that score a credit in a language, by the credits' names on the page."""
    group_credits = {
        RLOO: Rloo(),
        "Dr. GRPO": Group(std=False),
        "GRPO": Group(),
        "GiGPO": GroupInGroup(),
        "GiGPO, γ = 1": GroupInGroup(gamma=1.0),
        "GiGPO, γ = 1, std": GroupInGroup(gamma=1.0, std=True),
        "turn rewards, by index": TurnRewardCredit(baseline=by_index, turns=3),
        "turn rewards, padded": TurnRewardCredit(baseline=padded, turns=3),
        "turn rewards, by return": TurnRewardCredit(baseline=by_return, turns=3),
        "siblings": MonteCarlo(values=Siblings()),
    }
    functions: dict[str, Scorer] = {}
    for name, credit in group_credits.items():
        functions[name] = lambda table, credit=credit: score_group_credit(table, credit, ANSWERS)
    functions["VinePPO, K = 3"] = lambda table: score_replays(table, ANSWERS, ALTERNATIVES, lam=0.0)
    functions["C3's replay, K = 3"] = lambda table: score_replays(table, ANSWERS, ALTERNATIVES, lam=1.0)
    without_parents, with_parents = TreeCredit(prior=0, weight="once"), TreeCredit()

    def branch_everywhere(credit: TreeCredit) -> Scorer:
        return lambda table: score_trees(table, enumerate_full_trees(table, WAYS), ROOTS, credit)

    def branch_once(turn: int, only_contrasts: bool = False) -> Scorer:
        def score(table: TurnTable) -> TurnScore:
            return score_trees(
                table, enumerate_single_branchings(table, turn, WAYS, only_contrasts), ROOTS, with_parents
            )

        return score

    functions["C3's tree"] = branch_everywhere(without_parents)
    functions["C3's tree, reach"] = branch_everywhere(TreeCredit(prior=0))
    functions["tree at all turns"] = branch_everywhere(with_parents)
    functions["tree at turn 2"] = branch_once(1)
    functions["tree at the last turn"] = branch_once(-1)
    functions["the same, only contrasts"] = branch_once(-1, only_contrasts=True)
    functions[TRUE] = lambda table: score_true_advantages(table, ANSWERS)
    return functions


Scores = Mapping[str, Mapping[str, TurnScore]]
"""Scores by credit and language."""


def table_of(scores: Scores, cell: Callable[[TurnScore, TurnScore], str]) -> str:
    """Returns a table in Markdown with a row for each credit and a column for each language.

    Args:
        scores: The scores.
        cell: Returns the text of a cell from the score and RLOO's score in the same language.
    """
    languages = list(scores[RLOO])
    rows = []
    for name, by_language in scores.items():
        cells = [cell(by_language[language], scores[RLOO][language]) for language in languages]
        rows.append([name, *cells])
    return "\n".join(markdown(["credit", *languages], rows))


def bias_text(score: TurnScore, _: TurnScore) -> str:
    return "0" if score.error < 1e-9 else f"{score.error:.2f} ({score.cosine:.3f})"


def gain_text(score: TurnScore, rloo: TurnScore) -> str:
    gain, cost = score.gain(rloo), score.turns / rloo.turns
    return "–" if gain == 0 else f"{gain:.2f} ({gain / cost:.2f})"


def audit_text(score: TurnScore, _: TurnScore) -> str:
    # Without spread, the credit is the same for all actions in a context, and so is its noise.
    noise_share = score.noise / score.spread if score.spread > 1e-12 else 0.0
    return f"{score.fidelity:.2f}, {score.spread:.2f}, {noise_share:.0%}"


def influence_table(tables: Mapping[str, TurnTable]) -> str:
    with_copies = {**tables, "agreement, action 2 ignores action 1": agreement(same=0.5)}
    rows = []
    for name, table in with_copies.items():
        rows.append([name, f"{influence(table):.3f}", f"{expected_influence_estimate(table):.3f}"])
    return "\n".join(markdown(["language", "influence", "estimate, in expectation"], rows))


PAGE = "{bias}\n\n{gain}\n\n{audit}\n\n{influence}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for turn_credits.md and its numbers")
    output = parser.parse_args().output
    tables = turn_tables()
    scores = {
        name: {language: score(table) for language, table in tables.items()}
        for name, score in make_scorers().items()
    }
    text = PAGE.format(
        bias=table_of(scores, bias_text),
        gain=table_of(scores, gain_text),
        audit=table_of(scores, audit_text),
        influence=influence_table(tables),
        answers=ANSWERS,
        alternatives=ALTERNATIVES,
    )
    numbers: dict[str, Any] = {
        name: {language: score._asdict() for language, score in by_language.items()}
        for name, by_language in scores.items()
    }
    publish(text, numbers, output, "turn_credits")


if __name__ == "__main__":
    main()
