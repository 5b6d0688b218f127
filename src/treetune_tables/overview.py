"""A table's runs as text: states, and what is left to do may cost."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.runtime.console import duration
from treetune_tables.runs import TO_DO, Plan, PlannedRun

Cost = tuple[float | None, str]
"""Seconds that a run still needs, None where nobody knows, and where that is from."""


def estimate(plan: Plan, run: PlannedRun) -> Cost:
    """Returns the cost from finished runs of other seeds, else from measured iterations of this run or of
    other seeds, else from what the table states."""
    status = plan.statuses[run.key]
    if status.state not in TO_DO:
        return (0.0, "")
    if status.state == "missing":
        whole = {other.seed: seconds for other in plan.of(run.name) if (seconds := _whole(plan, other))}
        if whole:
            each = sum(whole.values()) / len(whole)
            seeds = ", ".join(map(str, whole))
            return (each, f"{each:.0f} s a run in seed{'s' if len(whole) > 1 else ''} {seeds}")
        if run.recipe.seconds_per_run is not None:
            return _stated(run, run.recipe.seconds_per_run, "a run")
    left = run.iterations - status.done
    if status.state == "unmeasured":
        return (None, "evaluation alone")
    peers = [other for other in plan.runs if other.name == run.name and other.template]
    peers.sort(key=lambda other: other.seed != run.seed)  # its own iterations first
    for peer in peers:
        if plan.statuses[peer.key].state == "different":
            continue
        totals = [row["seconds/total"] for row in peer.directory.read_metrics() if "seconds/total" in row]
        if totals:
            each = sum(totals) / len(totals)
            return (left * each, f"{each:.1f} s an iteration in seed {peer.seed}")
    if run.recipe.seconds_per_iteration is not None:
        return _stated(run, run.recipe.seconds_per_iteration, "an iteration", left)
    if run.recipe.seconds_per_run is not None:
        return _stated(run, run.recipe.seconds_per_run, "a run")
    return (None, "nothing measured or stated")


def _stated(run: PlannedRun, each: float, of: str, times: int = 1) -> Cost:
    source = f", {run.recipe.estimated_from}" if run.recipe.estimated_from else ""
    return (times * each, f"{each:g} s {of} stated{source}")


def _whole(plan: Plan, run: PlannedRun) -> float:
    """Returns the seconds of a finished run with its start and its evaluations; 0 where nobody knows."""
    if plan.statuses[run.key].state != "finished":
        return 0.0
    return sum(float(attempt.get("seconds") or 0.0) for attempt in run.attempts())


DASH = "–"


def plan_text(plan: Plan, at_once: int = 1) -> str:
    """A line for each run, what they may cost with so many at once, and what is wrong with some."""
    rows = [["run", "seed", "state", "iterations", "still needs", "directory"]]
    notes: dict[str, list[str]] = {}
    for run in plan.runs:
        status = plan.statuses[run.key]
        if status.why and status.state != "interrupted":
            notes.setdefault(status.why, []).append(run.label)
        place = str(run.directory.path) if run.template else DASH
        iterations = f"{status.done}/{run.iterations}" if run.template else DASH
        seed = "shared" if run.recipe.shared else str(run.seed)
        rows.append([run.name, seed, status.state, iterations, _needs(plan, run), place])
    reasons = [f"{'; '.join(runs)}:\n  " + "\n  ".join(why.splitlines()) for why, runs in notes.items()]
    return "\n".join([*_aligned(rows), "", cost_line(plan, at_once), *([""] if reasons else []), *reasons])


def cost_line(plan: Plan, at_once: int = 1) -> str:
    """Returns the number of runs, their states, and the cost of what is left with so many at once."""
    states = [status.state for status in plan.statuses.values()]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    parts = [f"{len(plan.runs)} runs: {told}"]
    left = [estimate(plan, run)[0] for run in plan.to_do() if not plan.blocked_by(run)]
    if seconds := sum(known for known in left if known is not None):
        together = f", or {duration(seconds / at_once)} with {at_once} at once" if at_once > 1 else ""
        parts.append(f"still about {duration(seconds)} of runs{together}")
    if unknown := left.count(None):
        parts.append(f"{unknown} runs whose cost nobody knows yet")
    return "; ".join(parts)


def _needs(plan: Plan, run: PlannedRun) -> str:
    """Returns the cost that a run may still have, and what has to be done before."""
    if plan.statuses[run.key].state not in TO_DO:
        return ""
    if blocked := plan.blocked_by(run):
        return f"blocked by {', '.join(blocked)}"
    seconds, basis = estimate(plan, run)
    cost = f"unknown ({basis})" if seconds is None else f"{duration(seconds)} ({basis})"
    return f"{cost}, after {', '.join(run.recipe.needs)}" if run.needs else cost


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
