"""What an iteration cost, read from its line of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treetune.runtime.stop_after import ANSWERS, CONTINUATIONS
from treetune_tables.runs import MEASURABLE, Plan


@dataclass(frozen=True)
class Cost:
    """What one run of an experiment took, summed over its iterations."""

    seed: int
    answers: int
    sampled_tokens: int
    gradient_steps: int
    seconds: float


def costs_of(plan: Plan, name: str) -> list[Cost]:
    """Of an experiment's finished runs."""
    found = []
    for run in plan.of(name):
        if run.template is None or plan.statuses[run.key].state not in MEASURABLE:
            continue
        rows = run.directory.read_metrics()
        found.append(
            Cost(
                seed=run.seed,
                answers=round(sum(answers_of(row, run.template) for row in rows)),
                sampled_tokens=round(sum(tokens_of(row, run.template) for row in rows)),
                gradient_steps=round(sum(row.get("train/steps", 0.0) for row in rows)),
                seconds=sum(seconds_of(row) for row in rows),
            )
        )
    return found


def answers_of(row: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Answers sampled to train on; demonstrations are not, nor are continuations for values."""
    sampled = config["rollout"]["type"] != "demonstrations"
    return float(row.get("episodes/count", 0.0)) if sampled else 0.0


def tokens_of(row: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Tokens that the engine sampled, for answers and for their credit."""
    # Runs of earlier versions did not count those of answers.
    counted = answers_of(row, config) * row.get("episodes/response_tokens", 0.0)
    return float(row.get(ANSWERS, counted) + row.get(CONTINUATIONS, 0.0))


def seconds_of(row: Mapping[str, Any]) -> float:
    """Wall-clock without evaluation."""
    return float(row.get("seconds/total", 0.0) - row.get("seconds/evaluation", 0.0))
