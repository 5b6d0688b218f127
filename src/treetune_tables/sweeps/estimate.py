"""What a table's runs may still cost."""

from __future__ import annotations

from dataclasses import dataclass

from treetune_tables.runs import TO_DO, Plan, PlannedRun


@dataclass(frozen=True)
class Estimate:
    """Seconds that a run still needs; None where nobody knows. `basis` says where that is from."""

    seconds: float | None
    basis: str


def estimate(plan: Plan, run: PlannedRun) -> Estimate:
    """From finished runs of other seeds, else from measured iterations of this run or of other seeds, else
    from what the table states."""
    status = plan.statuses[run.key]
    if status.state not in TO_DO:
        return Estimate(0.0, "")
    if status.state == "missing":
        whole = {other.seed: seconds for other in plan.of(run.name) if (seconds := _whole(plan, other))}
        if whole:
            each = sum(whole.values()) / len(whole)
            seeds = ", ".join(map(str, whole))
            return Estimate(each, f"{each:.0f} s a run in seed{'s' if len(whole) > 1 else ''} {seeds}")
        if run.recipe.seconds_per_run is not None:
            return _stated(run, run.recipe.seconds_per_run, "a run")
    left = run.iterations - status.done
    if status.state == "unmeasured":
        return Estimate(None, "evaluation alone")
    peers = [other for other in plan.runs if other.name == run.name and other.template]
    peers.sort(key=lambda other: other.seed != run.seed)  # its own iterations first
    for peer in peers:
        if plan.statuses[peer.key].state == "different":
            continue
        totals = [row["seconds/total"] for row in peer.directory.read_metrics() if "seconds/total" in row]
        if totals:
            each = sum(totals) / len(totals)
            return Estimate(left * each, f"{each:.1f} s an iteration in seed {peer.seed}")
    if run.recipe.seconds_per_iteration is not None:
        return _stated(run, run.recipe.seconds_per_iteration, "an iteration", left)
    if run.recipe.seconds_per_run is not None:
        return _stated(run, run.recipe.seconds_per_run, "a run")
    return Estimate(None, "nothing measured or stated")


def _stated(run: PlannedRun, each: float, of: str, times: int = 1) -> Estimate:
    source = f", {run.recipe.estimated_from}" if run.recipe.estimated_from else ""
    return Estimate(times * each, f"{each:g} s {of} stated{source}")


def _whole(plan: Plan, run: PlannedRun) -> float:
    """What a finished run took with its start and its evaluations; 0 where nobody knows."""
    if plan.statuses[run.key].state != "finished":
        return 0.0
    return sum(float(attempt.get("seconds") or 0.0) for attempt in run.attempts())
