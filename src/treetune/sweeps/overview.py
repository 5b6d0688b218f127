"""A table's runs as text: what exists, what is missing, and what that may cost."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.sweeps.estimate import estimate
from treetune.tables.runs import TO_DO, Plan, duration

DASH = "–"


def plan_text(plan: Plan) -> str:
    rows, seconds, unknown = [["run", "seed", "state", "iterations", "still needs", "directory"]], 0.0, 0
    notes: dict[str, list[str]] = {}
    for run in plan.runs:
        status = plan.statuses[run.key]
        blocked = plan.blocked_by(run) if status.state in TO_DO else []
        left = estimate(plan, run)
        if blocked:
            cost = f"blocked by {', '.join(blocked)}"
        elif status.state not in TO_DO:
            cost = ""
        elif left.seconds is None:
            cost, unknown = f"unknown ({left.basis})", unknown + 1
        else:
            cost, seconds = f"{duration(left.seconds)} ({left.basis})", seconds + left.seconds
        if run.needs and status.state in TO_DO and not blocked:
            cost += f", after {', '.join(run.recipe.needs)}"
        if status.why and status.state != "interrupted":
            notes.setdefault(status.why, []).append(run.words)
        place = str(run.directory.path) if run.template else DASH
        iterations = f"{status.done}/{run.iterations}" if run.template else DASH
        rows.append([run.name, str(run.seed), status.state, iterations, cost, place])
    states = [status.state for status in plan.statuses.values()]
    total = f"{len(rows) - 1} runs: " + ", ".join(
        f"{states.count(state)} {state}" for state in dict.fromkeys(states)
    )
    left_over = [f"still about {duration(seconds)} of iterations"] if seconds else []
    left_over += [f"{unknown} runs whose cost nobody knows yet"] if unknown else []
    reasons = [f"{'; '.join(runs)}:\n  " + "\n  ".join(why.splitlines()) for why, runs in notes.items()]
    return "\n".join(
        [*_aligned(rows), "", "; ".join([total, *left_over]), *([""] if reasons else []), *reasons]
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
