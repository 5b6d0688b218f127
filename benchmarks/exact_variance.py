"""Sampled variances of unbiased credits' gradients beside the exact ones, in languages that are enumerated.

    python benchmarks/exact_variance.py --output docs/results

Two answers to a problem; problems are added until the 95 % interval of the sampled variance is within 1 %."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from benchmarks.pairs import publish  # noqa: E402
from tests.analyzers.test_arena import SMALL, UNBIASED, exact_variance  # noqa: E402
from treetune.rollouts.single_turn import SingleTurn  # noqa: E402
from treetune_lab.arena import languages  # noqa: E402
from treetune_lab.arena.scores import Method, gradients_of  # noqa: E402

AT_ONCE, HALF_WIDTH, SIZE = 5000, 0.01, 2
LANGUAGES = SMALL | {"all of 2": languages.every_choice(2), "last of 4": languages.decision(4, 3)}
NO_EXACT_ROW = """The suite holds the mean gradients of these credits to the language's own, to a
millionth. There is no exact row for gains that `filtered` learns (here they are fixed), for
`control_variate`, which learns from other problems, for `sequential` with a pilot, which decides how
often it samples, and for trees."""


def row(name: str, label: str) -> dict[str, Any]:
    """Returns a credit's exact variance in a language, the sampled one, and half the width of that one's
    interval as a share of the exact one."""
    language, credit = LANGUAGES[name], UNBIASED[label]
    exact = exact_variance(language, credit, SIZE)[0]
    gradients, half = np.empty((0, 0)), math.inf
    while half > HALF_WIDTH:
        context = languages.context_of(language, AT_ONCE, seed=1 + len(gradients))
        trees, _ = SingleTurn(samples=SIZE, max_tokens=8).run(context, context.task.problems("train"))
        own, _ = gradients_of(language, context, Method(credit), trees)
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
        " `tests/analyzers/test_arena.py`, whose answers are enumerated, and two more; two answers each."
        " V is the trace of the covariance of a problem's gradient, of which gains are made.\nProblems were"
        " added until half the width of the sampled V's 95 % interval was 1 % of the exact one.\n",
        f"Sampled V / exact V: {within} of {len(rows)} intervals have the exact value in them; {near} sampled"
        f" V are within 1 % of it, and all within {max(abs(ratio - 1) for ratio in ratios):.1%}.\n",
        f"| language | {' | '.join(UNBIASED)} |",
        f"|---|{'---:|' * len(UNBIASED)}",
    ]
    ratio_of = {(one["language"], one["credit"]): ratio for ratio, one in zip(ratios, rows, strict=True)}
    for name in LANGUAGES:
        lines.append(f"| {name} | {' | '.join(f'{ratio_of[name, label]:.4f}' for label in UNBIASED)} |")
    return "\n".join([*lines, "", NO_EXACT_ROW, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="folder for exact_variance.md and its numbers")
    output = parser.parse_args().output
    with Pool() as pool:
        rows = pool.starmap(row, itertools.product(LANGUAGES, UNBIASED), chunksize=1)
    publish(page(rows), {"rows": rows}, output, "exact_variance")


if __name__ == "__main__":
    main()
