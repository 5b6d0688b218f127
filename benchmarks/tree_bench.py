"""Trees against answers that have nothing to do with each other: which gradient is worth its sampled tokens.

    python benchmarks/tree_bench.py --output docs/results

Four languages (`tests.support.chains`), answers of twelve steps. Each method samples, problem after
problem, until it has spent the same number of tokens, for answers and credit together, and takes one
gradient. The policies are tables, so that the exact gradient is known; rollouts and credit are those that
train. The table has the mean cosine to the exact gradient over batches, with a bootstrap interval of 95 %."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from tests.support import chains  # noqa: E402
from treetune.inference.base import SamplingParams  # noqa: E402
from treetune.rollouts.base import Credit, Rollout  # noqa: E402
from treetune.rollouts.credit import Rloo  # noqa: E402
from treetune.rollouts.monte_carlo import MonteCarlo  # noqa: E402
from treetune.rollouts.single_turn import SingleTurn  # noqa: E402
from treetune.seeds import derive_seed, derived_random  # noqa: E402
from treetune_lab.trees.branching import AtStates, Branching, LeastSure, UpToWidth  # noqa: E402
from treetune_lab.trees.credit import TreeCredit  # noqa: E402
from treetune_lab.trees.rollout import TreeRollout  # noqa: E402
from treetune_lab.values.sampled import Siblings  # noqa: E402
from treetune_lab.values.states import EveryNTokens  # noqa: E402

STEPS = 12
LONGEST = STEPS * chains.WORDS_OF_STEP + 1
THIRDS = EveryNTokens(tokens=LONGEST // 3)
SIXTHS = EveryNTokens(tokens=LONGEST // 6)
HALVES = EveryNTokens(tokens=LONGEST // 2)
RESAMPLED = 1000

Method = tuple[Rollout, Credit]


def answers(samples: int, credit: Credit) -> Method:
    return SingleTurn(samples=samples, max_tokens=LONGEST), credit


def tree(samples: int, branching: Branching, credit: Credit | None = None) -> Method:
    return TreeRollout(samples=samples, branching=branching, max_tokens=LONGEST), credit or TreeCredit()


BY_THIRDS = AtStates(states=THIRDS, ways=(2, 2))
WIDE = UpToWidth(states=SIXTHS, width=16)
UNSURE = LeastSure(positions=3, ways=1)
METHODS: Mapping[str, Method] = {
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


def batch(method: Method, language: chains.Language, skill: float, tokens: int, seed: int) -> chains.Gradient:
    """The gradient of so many sampled tokens, or of some more: the last problem is brought to its end."""
    rollout, credit = method
    task = chains.ChainTask(language=language, steps=STEPS, skill=skill, count=4)
    context = replace(chains.context_of(task, seed), sampling=SamplingParams(max_tokens=LONGEST))
    total: chains.Gradient = {}
    assert context.engine is not None
    for turn in itertools.count():
        own = replace(context, seed=derive_seed(seed, turn))
        for problem in task.problems("train"):
            if context.engine.tokens >= tokens:
                return total
            trees, _ = rollout.run(own, [problem])
            leaves = {leaf.id: leaf for one in trees for leaf in one.leaves}
            for row in credit.assign(own, trees)[0]:
                assert row.advantages is not None
                trained = replace(row, advantages=row.advantages * row.trained)
                for slot, value in chains.gradient(leaves[row.trajectory], trained).items():
                    total[slot] = total.get(slot, 0.0) + value
    raise AssertionError("it ends with the tokens")


def cosines(
    languages: Sequence[chains.Language], skill: float, tokens: int, batches: int
) -> Iterator[tuple[str, str, list[float]]]:
    for language in languages:
        exact = chains.exact_gradient(chains.ChainTask(language=language, steps=STEPS, skill=skill, count=4))
        for name, method in METHODS.items():
            found = [
                chains.cosine(batch(method, language, skill, tokens, derive_seed(number, language)), exact)
                for number in range(batches)
            ]
            yield language, name, found


def told(values: Sequence[float]) -> str:
    """Their mean, with the interval of 95 % of the means of as many drawn from them."""
    rng = derived_random(0, "bootstrap")
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(RESAMPLED))
    low, high = means[RESAMPLED // 40], means[-1 - RESAMPLED // 40]
    return f"{sum(values) / len(values):.3f} [{low:.3f}, {high:.3f}]"


def page(found: Mapping[str, Mapping[str, Sequence[float]]], tokens: int) -> str:
    columns = [f"{language} ↑" for language in found]
    lines = ["# Trees and their gradients", "", (__doc__ or "").split("\n\n", 2)[2].strip(), ""]
    lines += [f"| method, {tokens:,} tokens a batch | " + " | ".join(columns) + " | mean ↑ |"]
    lines += ["|---" * (len(found) + 2) + "|"]
    for name in METHODS:
        of_method = [of_language[name] for of_language in found.values()]
        pooled = sum(sum(one) / len(one) for one in of_method) / len(of_method)
        lines.append(f"| {name} | " + " | ".join(map(told, of_method)) + f" | {pooled:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for tree_bench.md and .json")
    parser.add_argument("--languages", nargs="+", default=list(chains.LANGUAGES), choices=chains.LANGUAGES)
    parser.add_argument("--skill", type=float, default=0.45, help="of the policy, at most 1")
    parser.add_argument("--tokens", type=int, default=8000, help="sampled for a batch")
    parser.add_argument("--batches", type=int, default=16)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for language, name, values in cosines(options.languages, options.skill, options.tokens, options.batches):
        found.setdefault(language, {})[name] = values
        print(f"{language:8} {name:34} cosine {told(values)}", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "tree_bench.md").write_text(page(found, options.tokens))
    (options.output / "tree_bench.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
