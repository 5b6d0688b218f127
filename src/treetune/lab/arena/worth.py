"""What credit is worth to one run: its gain and cost, held against what training cost in the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from treetune.lab.arena.gain import best_at, gain_table
from treetune.runtime.analysis import read_result
from treetune.runtime.directory import ExperimentDirectory

NAME = "credit_worth"


def words_of(directory: ExperimentDirectory) -> list[str]:
    """Returns lines about the analysis of that name: a table for each checkpoint, and what follows."""
    lines = []
    rho = measured_ratio(directory.read_metrics())
    for point, found in read_result(directory.analysis(NAME))["numbers"]["by_checkpoint"].items():
        lines += [f"after {point} iterations ({found['solved']:.0%} solved):", *gain_table(found["methods"])]
        if all(one["gain"]["value"] is None for one in found["methods"].values()):
            lines.append("no method has a gain here: all answers to each problem earned the same")
            continue
        if rho is None:
            lines.append("no iteration of the run says what its training cost: take the column of your ρ")
            continue
        best, least = best_at(found["methods"], rho, by="low")
        lines.append(f"In this run a trained token cost as much as {rho:.2g} sampled ones (ρ).")
        if round(least, 2) > 1:
            lines.append(f"So {best} learns most for the money: at least {least:.2f} times what RLOO does.")
        else:
            lines.append("No method surely learns more for the money than RLOO does.")
    return lines


def measured_ratio(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns ρ, the seconds of training a token over those of sampling one, as the median over the
    iterations; None where none sampled and trained."""
    found = []
    for row in rows:
        answer_tokens = row.get("episodes/response_tokens", 0.0)
        sampled = answer_tokens * row.get("episodes/count", 0.0) + row.get("credit/value_tokens", 0.0)
        trained = answer_tokens * row.get("selection/kept", 0.0)
        sampling = row.get("seconds/generation", 0.0) + row.get("seconds/credit", 0.0)
        if sampled and trained and sampling:
            found.append(row.get("seconds/training", 0.0) / trained / (sampling / sampled))
    return median(found) if found else None
