"""Compares sampled variances of unbiased credits' gradients with the exact ones, in enumerable languages.

    python benchmarks/exact_variance.py --output docs/results

There are two answers to a problem. Problems are added until the 95 % interval of the sampled variance is
within 1 % of the exact one. A credit that learns from other problems is compared with the exact variance of a
credit that has learnt from very many problems.
"""

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
from tests.lab.arena.test_arena import (  # noqa: E402
    SMALL,
    TREE_METHODS,
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

ANSWERS = 2
"""Answers to a problem."""
MAX_TOKENS = 8
BATCH = 5000
"""Problems that are added at once."""
LEARNING_PROBLEMS = 30_000
"""Problems from which a credit learns before its exact variance is computed."""
HALF_WIDTH = 0.01
"""Half the width of an interval that is narrow enough, as a share of the exact variance."""
NORMAL_QUANTILE = 1.96
"""A 95 % interval has this many standard errors on each side."""

LANGUAGES = SMALL | {"all of 2": languages.every_choice(2), "last of 4": languages.decision(4, 3)}
LEARNING = {
    "filtered, K = 1, learnt": MonteCarlo(samples=1, values=Filtered()),
    "K = 1 and critic": MonteCarlo(samples=1, values=ControlVariate()),
}
"""Credits that learn from other problems."""
METHODS = {label: ScoredMethod(credit) for label, credit in (UNBIASED | LEARNING).items()} | TREE_METHODS
NOTES = """The suite holds the mean gradients of these credits to exact ones. Where a credit learns,
the exact variance is that of what it has learnt from 30,000 problems, and it was sampled beside 4,999 others.
Trees begin with two answers, each of which goes on in two ways from its first token. There is no exact row
for `sequential` with a pilot, which decides how often it samples."""


def context_of(language: Language, problems: int, seed: int) -> RolloutContext:
    """Returns a context that has a critic."""
    context = languages.context_of(language, problems, seed)
    return languages.with_critic(context, fitted_critic(language, seed=1))


def compute_exact_variance(language_name: str, label: str) -> float:
    """Returns the exact variance of a credit. One that learns has learnt from `LEARNING_PROBLEMS` first."""
    language, method = LANGUAGES[language_name], METHODS[label]
    if method.rollout is not None:
        return exact_variance_of_trees(language, method)[0]
    if label not in LEARNING:
        return exact_variance(language, method.credit, ANSWERS)[0]

    credit = LEARNING[label]
    context = context_of(language, LEARNING_PROBLEMS, seed=1)
    rollout = SingleTurn(samples=ANSWERS, max_tokens=MAX_TOKENS)
    trees, _ = rollout.run(context, context.task.problems("train"))
    _, metrics = credit.assign(context, trees)
    if isinstance(credit.values, Filtered):
        values = replace(
            credit.values,
            behind=metrics["credit/filter_behind"],
            before=metrics["credit/filter_before"],
        )
        return exact_variance(language, replace(credit, values=values), ANSWERS)[0]
    # `ControlVariate` has no setting for the critic's share, so it is patched.
    share = 1 - metrics["credit/critic_weight"]
    with patch("treetune.credit.values.critic._Moments.share", share):
        return exact_variance(language, credit, ANSWERS)[0]


def compare_variances(language_name: str, label: str) -> dict[str, Any]:
    """Samples a credit's variance in a language until its interval is narrow enough.

    Returns:
        The exact variance, the sampled one, and half the width of its interval as a share of the exact one.
    """
    language, method = LANGUAGES[language_name], METHODS[label]
    rollout = method.rollout or SingleTurn(samples=ANSWERS, max_tokens=MAX_TOKENS)
    exact = compute_exact_variance(language_name, label)
    batches: list[np.ndarray] = []
    problems = 0
    half_width = math.inf
    while half_width > HALF_WIDTH:
        context = context_of(language, BATCH, seed=1 + problems)
        trees, _ = rollout.run(context, context.task.problems("train"))
        gradients_of_batch, _ = gradients_of(language, context, ScoredMethod(method.credit), trees)
        batches.append(gradients_of_batch)
        gradients_NP = np.concatenate(batches)  # [problems, parameters]
        problems = len(gradients_NP)
        squared_distances_N = np.square(gradients_NP - gradients_NP.mean(0)).sum(1)
        half_width_of_mean = NORMAL_QUANTILE * squared_distances_N.std() / math.sqrt(problems)
        half_width = float(half_width_of_mean / exact)
    sampled = float(squared_distances_N.mean())
    print(f"{language_name}, {label}: {sampled / exact:.4f} ± {half_width:.4f}", file=sys.stderr, flush=True)
    return {
        "language": language_name,
        "credit": label,
        "exact": exact,
        "sampled": sampled,
        "half": half_width,
        "problems": problems,
    }


def write_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the page in Markdown."""
    ratios = {(row["language"], row["credit"]): row["sampled"] / row["exact"] for row in rows}
    deviations = [abs(ratio - 1) for ratio in ratios.values()]
    half_widths = [row["half"] for row in rows]
    within_interval = sum(deviation < half for deviation, half in zip(deviations, half_widths, strict=True))
    within_1_percent = sum(deviation < HALF_WIDTH for deviation in deviations)
    lines = [
        "# Sampled and exact variances of a credit's gradient",
        "",
        "`python benchmarks/exact_variance.py --output docs/results`: languages of"
        " `tests/lab/arena/test_arena.py`, whose answers are enumerated, and two more; two answers each."
        " V is the trace of the covariance of a problem's gradient, of which gains are made.\nProblems were"
        " added until half the width of the sampled V's 95 % interval was 1 % of the exact one.\n",
        f"Sampled V / exact V: {within_interval} of {len(rows)} intervals have the exact value in them;"
        f" {within_1_percent} sampled V are within 1 % of it, and all within {max(deviations):.1%}.\n",
        f"| language | {' | '.join(METHODS)} |",
        f"|---|{'---:|' * len(METHODS)}",
    ]
    for language in LANGUAGES:
        cells = [f"{ratios[language, label]:.4f}" for label in METHODS]
        lines.append(f"| {language} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", NOTES, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for exact_variance.md and its numbers")
    output = parser.parse_args().output
    with Pool() as pool:
        rows = pool.starmap(compare_variances, itertools.product(LANGUAGES, METHODS), chunksize=1)
    publish(write_page(rows), {"rows": rows}, output, "exact_variance")


if __name__ == "__main__":
    main()
