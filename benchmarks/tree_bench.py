"""Trees against answers that have nothing to do with each other: which gradient is worth its sampled tokens.

    python benchmarks/tree_bench.py --output docs/results

Four languages of the arena, answers of twelve steps. Rollouts and credit are those that train; what a method
gains is told as in the arena: RLOO with eight answers is 1."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import treetune.parts  # noqa: F401  # registers all parts
from treetune.credit.base import Credit
from treetune.credit.rloo import Rloo
from treetune.credit.states.by_tokens import EveryNTokens
from treetune.credit.trees import TreeCredit
from treetune.credit.values.siblings import Siblings
from treetune.credit.vineppo import MonteCarlo
from treetune.lab.arena.gain import gain_table
from treetune.lab.arena.languages import WORDY
from treetune.lab.arena.scores import ScoredMethod, scores, summary_table
from treetune.lab.trees.branching import AtStates, Branching, LeastSure, UpToWidth
from treetune.lab.trees.rollout import TreeRollout
from treetune.rollouts.single_turn import SingleTurn

LONGEST = 37
THIRDS = EveryNTokens(tokens=LONGEST // 3)
SIXTHS = EveryNTokens(tokens=LONGEST // 6)
HALVES = EveryNTokens(tokens=LONGEST // 2)


def answers(samples: int, credit: Credit) -> ScoredMethod:
    return ScoredMethod(credit, SingleTurn(samples=samples, max_tokens=LONGEST))


def tree(samples: int, branching: Branching, credit: Credit | None = None) -> ScoredMethod:
    return ScoredMethod(
        credit or TreeCredit(), TreeRollout(samples=samples, branching=branching, max_tokens=LONGEST)
    )


BY_THIRDS = AtStates(states=THIRDS, ways=(2, 2))
WIDE = UpToWidth(states=SIXTHS, width=16)
UNSURE = LeastSure(positions=3, ways=1)
METHODS: Mapping[str, ScoredMethod] = {
    "RLOO, 8 answers": answers(8, Rloo()),
    "RLOO, 16 answers": answers(16, Rloo()),
    "VinePPO, 4 answers, K = 1": answers(4, MonteCarlo(samples=1)),
    "VinePPO, 4 answers, K = 3": answers(4, MonteCarlo(samples=3)),
    "tree, two ways at each third": tree(4, BY_THIRDS),
    "… with siblings alone (prior 0)": tree(4, BY_THIRDS, TreeCredit(prior=0.0)),
    "… with values of siblings": tree(4, BY_THIRDS, MonteCarlo(values=Siblings(), states=THIRDS)),
    "… local, once (SPO-tree)": tree(4, BY_THIRDS, TreeCredit(advantage="local", weight="once")),
    "tree, three ways at the half": tree(6, AtStates(states=HALVES, ways=(3,))),
    "tree, up to 16 at each sixth": tree(4, WIDE),
    "… subgroups (TreePO)": tree(4, WIDE, TreeCredit(advantage="subgroups", weight="each")),
    "tree, least sure": tree(4, UNSURE),
    "… TreeRL": tree(4, UNSURE, TreeCredit(advantage="global_and_local", weight="each")),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for tree_bench.md and .json")
    parser.add_argument("--languages", nargs="+", default=list(WORDY), choices=WORDY)
    parser.add_argument("--problems", type=int, default=1000)
    options = parser.parse_args()
    found = {}
    for name in options.languages:
        found[name] = scores(WORDY[name](), METHODS, most=options.problems)
        print(f"{name}\n", *gain_table(found[name]), sep="\n", flush=True)
    lines = ["# What trees gain", "", (__doc__ or "").split("\n\n", 2)[2].strip(), "", *summary_table(found)]
    for name, methods in found.items():
        lines += ["", f"## {name}", "", *gain_table(methods)]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "tree_bench.md").write_text("\n".join([*lines, ""]))
    (options.output / "tree_bench.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
