"""Sampled variances of unbiased credits' gradients beside the exact ones, in languages that are enumerated.

    python benchmarks/exact_variance.py --output docs/results

Two answers to a problem; problems are added until the 95 % interval of the sampled variance is within 1 %.
A credit that learns from other problems has, beside very many of them, the variance of one that knows what it
learns."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.pairs import publish  # noqa: E402
from tests.lab.test_arena import (  # noqa: E402
    OF_TREES,
    SMALL,
    UNBIASED,
    exact_variance,
    exact_variance_of_trees,
)
from treetune.credit.values.critic import ControlVariate  # noqa: E402
from treetune.credit.values.filtered import Filtered  # noqa: E402
from treetune.credit.vineppo import MonteCarlo  # noqa: E402
from treetune.lab.arena import languages  # noqa: E402
from treetune.lab.arena.languages import Language  # noqa: E402
from treetune.lab.arena.scores import ScoredMethod, fitted_critic, gradients_of  # noqa: E402
from treetune.rollouts.context import RolloutContext  # noqa: E402
from treetune.rollouts.single_turn import SingleTurn  # noqa: E402

AT_ONCE, MANY, HALF_WIDTH, SIZE = 5000, 30_000, 0.01, 2
LANGUAGES = SMALL | {"all of 2": languages.every_choice(2), "last of 4": languages.decision(4, 3)}
LEARNING = {
    "filtered, K = 1, learnt": MonteCarlo(samples=1, values=Filtered()),
    "K = 1 and critic": MonteCarlo(samples=1, values=ControlVariate()),
}
METHODS = {label: ScoredMethod(one) for label, one in (UNBIASED | LEARNING).items()} | OF_TREES
NOTES = """The suite holds the mean gradients of these credits to exact ones. Where a credit learns,
the exact variance is that of what it has learnt from 30,000 problems, and it was sampled beside 4,999 others.
Trees begin with two answers, each of which goes on in two ways from its first token. There is no exact row
for `sequential` with a pilot, which decides how often it samples."""


def context_of(language: Language, problems: int, seed: int) -> RolloutContext:
    context = languages.context_of(language, problems, seed)
    return languages.with_critic(context, fitted_critic(language, seed=1))


def exactly(name: str, label: str) -> float:
    """Returns the exact variance, of a credit that learns with what it learns from very many problems."""
    language, method = LANGUAGES[name], METHODS[label]
    if method.rollout is not None:
        return exact_variance_of_trees(language, method)[0]
    if label not in LEARNING:
        return exact_variance(language, method.credit, SIZE)[0]
    credit, context = LEARNING[label], context_of(language, MANY, seed=1)
    trees, _ = SingleTurn(samples=SIZE, max_tokens=8).run(context, context.task.problems("train"))
    learnt = credit.assign(context, trees)[1]
    if isinstance(credit.values, Filtered):
        behind, before = learnt["credit/filter_behind"], learnt["credit/filter_before"]
        known = replace(credit, values=replace(credit.values, behind=behind, before=before))
        return exact_variance(language, known, SIZE)[0]
    with patch("treetune.credit.values.critic._Moments.share", 1 - learnt["credit/critic_weight"]):
        return exact_variance(language, credit, SIZE)[0]


def row(name: str, label: str) -> dict[str, Any]:
    """Returns a credit's exact variance in a language, the sampled one, and half the width of that one's
    interval as a share of the exact one."""
    language, method = LANGUAGES[name], METHODS[label]
    rollout = method.rollout or SingleTurn(samples=SIZE, max_tokens=8)
    exact = exactly(name, label)
    gradients, half = np.empty((0, 0)), math.inf
    while half > HALF_WIDTH:
        context = context_of(language, AT_ONCE, seed=1 + len(gradients))
        trees, _ = rollout.run(context, context.task.problems("train"))
        own, _ = gradients_of(language, context, ScoredMethod(method.credit), trees)
        gradients = np.concatenate([gradients, own]) if len(gradients) else own
        squares = np.square(gradients - gradients.mean(0)).sum(1)
        half = 1.96 * squares.std() / math.sqrt(len(squares)) / exact
    found = float(squares.mean())
    print(f"{name}, {label}: {found / exact:.4f} ± {half:.4f}", file=sys.stderr, flush=True)
    return {
        "language": name,
        "credit": label,
        "exact": exact,
        "sampled": found,
        "half": float(half),
        "problems": len(gradients),
    }


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    ratios = [one["sampled"] / one["exact"] for one in rows]
    within = sum(abs(ratio - 1) < one["half"] for ratio, one in zip(ratios, rows, strict=True))
    near = sum(abs(ratio - 1) < HALF_WIDTH for ratio in ratios)
    lines = [
        "# Sampled and exact variances of a credit's gradient",
        "",
        "`python benchmarks/exact_variance.py --output docs/results`: languages of"
        " `tests/lab/test_arena.py`, whose answers are enumerated, and two more; two answers each."
        " V is the trace of the covariance of a problem's gradient, of which gains are made.\nProblems were"
        " added until half the width of the sampled V's 95 % interval was 1 % of the exact one.\n",
        f"Sampled V / exact V: {within} of {len(rows)} intervals have the exact value in them; {near} sampled"
        f" V are within 1 % of it, and all within {max(abs(ratio - 1) for ratio in ratios):.1%}.\n",
        f"| language | {' | '.join(METHODS)} |",
        f"|---|{'---:|' * len(METHODS)}",
    ]
    ratio_of = {(one["language"], one["credit"]): ratio for ratio, one in zip(ratios, rows, strict=True)}
    for name in LANGUAGES:
        lines.append(f"| {name} | {' | '.join(f'{ratio_of[name, label]:.4f}' for label in METHODS)} |")
    return "\n".join([*lines, "", NOTES, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for exact_variance.md and its numbers")
    output = parser.parse_args().output
    with Pool() as pool:
        rows = pool.starmap(row, itertools.product(LANGUAGES, METHODS), chunksize=1)
    publish(page(rows), {"rows": rows}, output, "exact_variance")


if __name__ == "__main__":
    main()
