"""What a table's runs may still cost."""

from __future__ import annotations

from dataclasses import dataclass

from treetune.tables.runs import TO_DO, Plan, PlannedRun


@dataclass(frozen=True)
class Estimate:
    """Seconds that a run still needs; None where nobody knows. `basis` says where that is from."""

    seconds: float | None
    basis: str


def estimate(plan: Plan, run: PlannedRun) -> Estimate:
    """From measured iterations of this run or of other seeds, else from what the table states."""
    status = plan.statuses[run.key]
    if status.state not in TO_DO:
        return Estimate(0.0, "")
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
        each = run.recipe.seconds_per_iteration
        source = f", {run.recipe.estimated_from}" if run.recipe.estimated_from else ""
        return Estimate(left * each, f"{each:g} s an iteration stated{source}")
    return Estimate(None, "nothing measured or stated")
