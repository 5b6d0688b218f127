"""Prints tables of credits on the pretrained model, and compares their gains with those in the arena.

    python benchmarks/compare_with_arena.py experiments/real_model/grpo

It takes one or more folders of experiments. It reads their analyses of credit_table.jsonnet or
credit_table_critic.jsonnet, and the tables of docs/results/arena.md. The correlation of the gains is
Spearman's, over the credits that both have, with a 95 % bootstrap interval over these credits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from treetune.lab.arena.gain import TRUE_ADVANTAGES, markdown_table, with_interval
from treetune.runtime.analysis import read_result

ARENA_PAGE = Path(__file__).resolve().parents[1] / "docs/results/arena.md"
ANALYSES = "credits*"
"""A pattern of the names of the analyses with tables."""
RESAMPLES = 2000
FEWEST = 4
"""The fewest credits that a rank correlation is computed of."""

Gains = dict[str, float]
"""A number for each credit, by its name in tables."""


def main() -> None:
    if len(sys.argv) == 1:
        sys.exit("give the folders of experiments, such as experiments/real_model/grpo")
    arena_gains = read_arena(ARENA_PAGE, column=1)
    arena_gains_per_token = read_arena(ARENA_PAGE, column=3)
    results = []
    for experiment in sys.argv[1:]:
        folders = list((Path(experiment) / "analyses").glob(ANALYSES))
        if not folders:
            sys.exit(f"{experiment} has no analyses {ANALYSES}: run_analyzers makes them")
        for folder in folders:
            [(checkpoint, numbers)] = read_result(folder)["numbers"]["by_checkpoint"].items()
            results.append((experiment, int(checkpoint), numbers))
    lines = []
    # The policies of an experiment are in the order of its training.
    for experiment, checkpoint, numbers in sorted(results, key=lambda result: result[:2]):
        lines += [
            "",
            f"{experiment}, after {checkpoint} iterations ({numbers['solved']:.0%} of the answers are"
            f" correct, and the reliability of the true advantages is {numbers['truth_reliability']:.2f}):",
            "",
            *credit_table(numbers["methods"]),
            "",
        ]
        for measure, by_language in (("gain", arena_gains), ("gain_per_token", arena_gains_per_token)):
            gains = {
                name: score[measure]["value"]
                for name, score in numbers["methods"].items()
                if name != TRUE_ADVANTAGES and score[measure]["value"] is not None
            }
            lines += describe_correlations(measure, gains, by_language)
    sys.stdout.write("\n".join(lines) + "\n")


def credit_table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a table in Markdown as lines, a row for each credit, the best gain per token first."""
    heads = ["credit", "error of values ↓", "correlation with true advantages ↑"]
    heads += ["gain per answer ↑", "cost ↓", "gain per token ↑", "bias → 0"]
    rows = []
    by_gain = sorted(methods.items(), key=lambda item: -(item[1]["gain_per_token"]["value"] or 0.0))
    unmeasured = {"value": None}
    for name, score in by_gain:
        rows.append(
            [
                name,
                with_interval(score.get("value_error", unmeasured)),
                with_interval(score.get("advantage_correlation", unmeasured)),
                with_interval(score["gain"]),
                f"{score['cost']:.2f}",
                with_interval(score["gain_per_token"]),
                "–" if score["bias"] is None else f"{score['bias']:.2f}",
            ]
        )
    return markdown_table(heads, rows)


def read_arena(page: Path, column: int) -> dict[str, Gains]:
    """Returns a column of the arena's tables, by language and credit. Gains that the page leaves out are
    missing."""
    by_language: dict[str, Gains] = {}
    language = ""
    for line in page.read_text().splitlines():
        if line.startswith("## "):
            language = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or len(cells) < 8:
            continue
        number = cells[column].partition(" [")[0]
        try:
            gain = float(number)
        except ValueError:
            continue  # the head of a table, its rule, or a gain that could not be measured
        by_language.setdefault(language, {})[cells[0]] = gain
    return by_language


def describe_correlations(measure: str, gains: Gains, by_language: Mapping[str, Gains]) -> list[str]:
    """Returns the correlation with the arena's means over all languages, and with each language."""
    lines = []
    for language, arena_gains in by_language.items():
        shared = sorted(gains.keys() & arena_gains.keys())
        if len(shared) < FEWEST:
            lines.append(f"{measure}, {language}: only {len(shared)} credits are in both")
            continue
        model = np.array([gains[name] for name in shared])
        arena = np.array([arena_gains[name] for name in shared])
        value, low, high = bootstrap_correlation(model, arena)
        lines.append(f"{measure}, {language}: {value:.2f} [{low:.2f}, {high:.2f}] over {len(shared)} credits")
    return lines


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Returns Spearman's rank correlation; NaN where one of both is constant."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    return float(spearmanr(first, second).statistic)


def bootstrap_correlation(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """Returns the rank correlation, and its 95 % interval over resampled credits.

    Args:
        first: A gain of each credit.
        second: Another gain of each credit.
    """
    generator = np.random.default_rng(0)
    credits = len(first)
    correlations = []
    for _ in range(RESAMPLES):
        rows = generator.integers(credits, size=credits)
        correlations.append(rank_correlation(first[rows], second[rows]))
    low = np.nanpercentile(correlations, 2.5)
    high = np.nanpercentile(correlations, 97.5)
    return rank_correlation(first, second), float(low), float(high)


if __name__ == "__main__":
    main()
