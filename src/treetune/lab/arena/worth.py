"""Finds the credit assignment that learns most per second of a run: the gains and costs of several methods,
weighed by the run's own seconds of sampling and training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from treetune.lab.arena.gain import best_at, gain_table
from treetune.runtime.analysis import read_result
from treetune.runtime.directory import ExperimentDirectory

ANALYSIS_NAME = "credit_worth"
"""The name of the analysis that is described, and of the folder of its result."""


def describe_worth(directory: ExperimentDirectory) -> list[str]:
    """Returns lines about the analysis `ANALYSIS_NAME`: for each checkpoint a table, and the conclusion from
    it.

    A method's gain says how many times less noise (variance and bias) its gradient has than RLOO's."""
    lines = []
    rho = measured_ratio(directory.read_metrics())
    by_checkpoint = read_result(directory.analysis_folder(ANALYSIS_NAME))["numbers"]["by_checkpoint"]
    for point, numbers in by_checkpoint.items():
        methods = numbers["methods"]
        lines += [f"after {point} iterations ({numbers['solved']:.0%} solved):", *gain_table(methods)]
        if all(score["gain"]["value"] is None for score in methods.values()):
            lines.append("no method has a gain here: all answers to each problem have the same reward")
            continue
        if rho is None:
            lines.append("ρ is unknown, as no iteration recorded its seconds: read the column of your ρ")
            continue
        # Methods are compared by the low ends of their intervals, so that a wide interval doesn't win.
        best, low_end = best_at(methods, rho, by="low")
        lines.append(f"In this run, training a token took {rho:.2g} times as long as sampling one (ρ).")
        if round(low_end, 2) > 1:  # rounded as in the line below, which never says "1.00 times"
            lines.append(f"So {best} has the highest gain per cost: at least {low_end:.2f} times RLOO's.")
        else:
            lines.append("No method has a higher gain per cost than RLOO beyond sampling error.")
    return lines


def measured_ratio(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns ρ: the seconds that training a token takes, divided by the seconds that sampling one takes.

    It is the median over iterations. Returns None where no iteration both sampled and trained. The tokens and
    seconds of credit count as sampling, since credit spends its time on sampling continuations.

    Args:
        rows: The metrics of each iteration, by name.
    """
    ratios = []
    for row in rows:
        tokens_per_answer = row.get("episodes/response_tokens", 0.0)
        sampled_tokens = tokens_per_answer * row.get("episodes/count", 0.0)
        sampled_tokens += row.get("credit/value_tokens", 0.0)
        trained_tokens = tokens_per_answer * row.get("selection/kept", 0.0)
        sampling_seconds = row.get("seconds/generation", 0.0) + row.get("seconds/credit", 0.0)
        training_seconds = row.get("seconds/training", 0.0)
        if sampled_tokens and trained_tokens and sampling_seconds:
            seconds_per_trained_token = training_seconds / trained_tokens
            seconds_per_sampled_token = sampling_seconds / sampled_tokens
            ratios.append(seconds_per_trained_token / seconds_per_sampled_token)
    return median(ratios) if ratios else None
