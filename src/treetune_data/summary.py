"""What a folder of `make_threads` holds in the end: the rows, and a summary of solutions and costs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from treetune.store.files import whole_file
from treetune_data.ledger import Ledger
from treetune_data.make_threads import MakeThreads
from treetune_data.rows import Sidecars, solutions

_SUMMED = ("blocks", "threads", "edits", "sequential_characters", "characters", "critical_characters")


def write_rows(
    pipeline: MakeThreads, source: Path, output: Path, sidecars: Sidecars, ledger: Ledger
) -> dict[str, Any]:
    """Writes the rows with threads, in the input's order, and returns the summary."""
    outcomes: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    rows = 0

    with whole_file(output / "threads.jsonl") as file:
        for solution in solutions(source, pipeline.problem_field, pipeline.solution_field):
            rows += 1
            end = sidecars.read(solution)
            if end is None:
                outcomes["unanswered" if sidecars.unanswered(solution) else "open"] += 1
                continue
            outcomes[end["outcome"]] += 1
            dropped.update(block["reason"] for block in end.get("dropped", ()))
            if end["outcome"] != "accepted":
                rejected[end["reason"]] += 1
                continue
            sums.update({name: end["statistics"][name] for name in _SUMMED})
            file.write(json.dumps({**solution.row, pipeline.output_field: end["text"]}) + "\n")
    usage = ledger.total.as_row(pipeline.prices)
    return {
        "solutions": rows,
        **{name: outcomes[name] for name in ("accepted", "rejected", "unanswered", "open")},
        "reasons": dict(rejected.most_common()),
        "blocks_dropped": dict(dropped.most_common()),
        **{name: sums[name] for name in _SUMMED},
        "acceleration_ratio": _ratio(sums["critical_characters"], sums["characters"]),
        "usage": {
            **usage,
            "steps": {name: step.as_row(pipeline.prices) for name, step in ledger.steps.items()},
        },
        "budget": pipeline.budget,
        "budget_spent": ledger.exhausted,
    }


def cost(ledger: Ledger) -> str:
    return f"{ledger.dollars:.4f} $" if ledger.prices else f"{ledger.total.output_tokens} tokens"


def in_words(summary: dict[str, Any], output: Path) -> list[str]:
    """The summary for a person, a line each."""
    usage = summary["usage"]
    lines = [
        f"{summary['accepted']} of {summary['solutions']} solutions have threads now, in"
        f" {output / 'threads.jsonl'}: {summary['blocks']} blocks of {summary['threads']} threads"
    ]
    if summary["accepted"]:
        critical, sequential = summary["critical_characters"], summary["sequential_characters"]
        lines.append(
            f"  their critical paths have {critical / sequential:.1%} of the sequential solutions' characters"
            f" (acceleration ratio {summary['acceleration_ratio']:.3f} of all that is written)"
        )
    lines += [f"  rejected: {count} × {reason}" for reason, count in summary["reasons"].items()]
    lines += [
        f"  block left sequential: {count} × {reason}" for reason, count in summary["blocks_dropped"].items()
    ]
    if summary["unanswered"]:
        lines.append(f"  unanswered: {summary['unanswered']}; the same command asks again")
    lines += [f"  {name:<11}{_usage(step)}" for name, step in usage["steps"].items()]
    lines.append(f"  {'in all':<11}{_usage(usage)}")
    if usage["estimated"]:
        lines.append(
            f"  {usage['estimated']} answers came without usage: their tokens are taken for as many as bytes"
        )
    if summary["failed_attempts"]:
        lines.append(
            f"  {summary['failed_attempts']} attempts of this run failed; what the endpoint asks for them is"
            " not in here"
        )
    if summary["budget_spent"]:
        lines.append(
            f"stopped by the budget of {summary['budget']:g} $: one more request could cost more than is"
            f" left. {summary['open']} solutions are open; raise budget, and the same command goes on"
        )
    return lines


def _usage(usage: dict[str, Any]) -> str:
    dollars = f", {usage['dollars']:.4f} $" if "dollars" in usage else ""
    tokens = f"{usage['input_tokens']} tokens in, {usage['output_tokens']} out"
    return f"{usage['requests']} answers, {tokens}{dollars}"


def _ratio(critical: int, characters: int) -> float:
    return 1 - critical / characters if characters else 0.0
