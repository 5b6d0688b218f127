"""A table's runs as text: what exists, what is missing, and what that may cost."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.runtime.console import duration
from treetune_tables.runs import TO_DO, Plan, PlannedRun
from treetune_tables.sweeps.estimate import estimate

DASH = "–"


def plan_text(plan: Plan, at_once: int = 1) -> str:
    """A line for each run, what they may cost with so many at once, and what is wrong with some."""
    rows = [["run", "seed", "state", "iterations", "still needs", "directory"]]
    notes: dict[str, list[str]] = {}
    for run in plan.runs:
        status = plan.statuses[run.key]
        if status.why and status.state != "interrupted":
            notes.setdefault(status.why, []).append(run.words)
        place = str(run.directory.path) if run.template else DASH
        iterations = f"{status.done}/{run.iterations}" if run.template else DASH
        seed = "shared" if run.recipe.shared else str(run.seed)
        rows.append([run.name, seed, status.state, iterations, _needs(plan, run), place])
    reasons = [f"{'; '.join(runs)}:\n  " + "\n  ".join(why.splitlines()) for why, runs in notes.items()]
    return "\n".join([*_aligned(rows), "", cost_line(plan, at_once), *([""] if reasons else []), *reasons])


def cost_line(plan: Plan, at_once: int = 1) -> str:
    """How many runs there are, how they stand, and what is left to do with so many at once."""
    states = [status.state for status in plan.statuses.values()]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    parts = [f"{len(plan.runs)} runs: {told}"]
    left = [estimate(plan, run).seconds for run in plan.to_do() if not plan.blocked_by(run)]
    if seconds := sum(known for known in left if known is not None):
        together = f", or {duration(seconds / at_once)} with {at_once} at once" if at_once > 1 else ""
        parts.append(f"still about {duration(seconds)} of runs{together}")
    if unknown := left.count(None):
        parts.append(f"{unknown} runs whose cost nobody knows yet")
    return "; ".join(parts)


def _needs(plan: Plan, run: PlannedRun) -> str:
    """What a run may still cost, and what has to be done before."""
    if plan.statuses[run.key].state not in TO_DO:
        return ""
    if blocked := plan.blocked_by(run):
        return f"blocked by {', '.join(blocked)}"
    left = estimate(plan, run)
    cost = f"unknown ({left.basis})" if left.seconds is None else f"{duration(left.seconds)} ({left.basis})"
    return f"{cost}, after {', '.join(run.recipe.needs)}" if run.needs else cost


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
