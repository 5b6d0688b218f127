"""Which way of a quantity is better, as figures say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Better = Literal["up", "down", ""]
"""More of it is better, less of it, or neither."""

WORDS: Mapping[Better, str] = {
    "up": "↑ more is better",
    "down": "↓ less is better",
    "": "neither way is better",
}

EVALUATION = "evaluation/"

BETTER: Mapping[str, Better] = {
    "episodes/reward": "up",
    "episodes/score": "up",
    "episodes/correct": "up",
    "episodes/unfinished": "down",
    "preference/accuracy": "up",
    "engine/tokens_per_second": "up",
    "engine/logprob_gap_mean": "down",
    "engine/logprob_gap_max": "down",
    "engine/canary_gap": "down",
    "engine/canary_mean_gap": "down",
    "critic/mse": "down",
    "seconds/total": "down",
}
"""Of a metric that has a good direction, which one."""


def better_of(name: str) -> Better:
    """Of a metric by its name in `metrics.jsonl`."""
    if name.startswith(EVALUATION):
        return "up" if name.endswith(("/pass_at_1", "/majority_vote")) else ""
    return BETTER.get(name, "")


def about(better: Better, band: str = "") -> str:
    """What stands behind a figure's title: which way is better, and what its bands are where it has any."""
    return f"{WORDS[better]}; band: {band}" if band else WORDS[better]
