"""A finished iteration in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treetune.rollouts.metrics import name_in
from treetune.rollouts.numbers import in_words
from treetune.runtime.console import duration

SHOWN_SECONDS = 0.05
"""Phases shorter than this are left out."""


MOST_DOMAINS = 8
"""Of more, the line says nothing: the report does."""


def summary_line(row: Mapping[str, Any], iterations: int) -> str:
    """One finished iteration for a person: what it earned, how it moved, where its time went."""
    parts = [f"iteration {row['iteration'] + 1}/{iterations}"]
    was_shaped = row.get("episodes/score") != row.get("episodes/reward")
    if was_shaped and "episodes/score" in row:
        parts.append(f"score {row['episodes/score']:.3f}")
    for name, key, form in (
        ("reward", "episodes/reward", "{:.3f}"),
        ("unfinished", "episodes/unfinished", "{:.1%}"),
        ("loss", "train/loss", "{:.4f}"),
        ("KL", "train/kl", "{:.4f}"),
        ("tokens/s", "engine/tokens_per_second", "{:.0f}"),
    ):
        if key in row:
            parts.append(f"{name} {form.format(row[key])}")
        if name == "reward" and (of_domains := _rewards_of_domains(row)):
            parts.append(f"({', '.join(of_domains)})")
    parts += in_words(row)
    named = [(key.split("/"), value) for key, value in row.items() if key.endswith("/pass_at_1")]
    scores = [f"{steps[1]} {value:.3f}" for steps, value in named if len(steps) == 3]  # of all domains
    phases = {key.removeprefix("seconds/"): row[key] for key in row if key.startswith("seconds/")}
    total = phases.pop("total")
    times = [f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= SHOWN_SECONDS]
    parts += [*scores, f"{total:.1f} s ({', '.join(times)})"]
    if left := (iterations - row["iteration"] - 1) * total:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def _rewards_of_domains(row: Mapping[str, Any]) -> list[str]:
    found = {of[0]: value for key, value in row.items() if (of := name_in(key)) and of[1] == "reward"}
    return [f"{name} {value:.3f}" for name, value in found.items()] if len(found) <= MOST_DOMAINS else []
