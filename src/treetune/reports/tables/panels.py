"""Any metric and any evaluation set along training, a panel each, with a line for every method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treetune.config.errors import did_you_mean
from treetune.reports.tables.curves import (
    AXES,
    CurvePoint,
    Measured,
    costs_along,
    measured_along,
    over_seeds,
    points_json,
)
from treetune.tables.columns import Panel
from treetune.tables.runs import MEASURABLE, Plan, PlannedRun
from treetune.tables.settings import MethodRow, PanelAxis

AXIS_WORDS: dict[PanelAxis, str] = {"iterations": "iterations", **{axis: AXES[axis] for axis in AXES}}


@dataclass(frozen=True)
class PanelCurve:
    """One row in one panel: what its finished runs recorded, over seeds."""

    panel: Panel
    row: MethodRow
    points: tuple[CurvePoint, ...]
    seeds: tuple[int, ...]

    def xs(self, axis: PanelAxis) -> list[float]:
        return [
            float(point.iteration) if axis == "iterations" else point.costs[axis] for point in self.points
        ]


def panel_curves(plan: Plan) -> list[PanelCurve]:
    """Panel after panel, of every row with an experiment of its own and a finished run that has it.

    What an experiment that others start from recorded while it was trained is not beside theirs: it
    came before. What is measured of its weights is where they begin.
    """
    found = []
    before = {name for experiment in plan.table.experiments.values() for name in experiment.needs}
    for panel in plan.table.panels:
        for row in plan.table.rows:
            if row.experiment is None or (panel.metric is not None and row.experiment in before):
                continue
            by_seed = {
                run.seed: measured
                for run in _finished(plan, row.experiment)
                if (measured := _along(plan, run, panel))
            }
            if by_seed:
                found.append(PanelCurve(panel, row, over_seeds(by_seed), tuple(by_seed)))
    return found


def _finished(plan: Plan, name: str) -> list[PlannedRun]:
    runs = [plan.run(name, seed) for seed in plan.table.seeds]
    return [run for run in runs if plan.statuses[run.key].state in MEASURABLE]


def _along(plan: Plan, run: PlannedRun, panel: Panel) -> Measured:
    """What an iteration recorded stands where the iteration was finished, as in the report."""
    if panel.evaluation is not None:
        return measured_along(plan, run, panel.evaluation, panel.shown)
    assert panel.metric is not None
    rows, costs = costs_along(run)
    values = {done: row.get(panel.metric) for done, row in enumerate(rows, start=1)}
    return {
        done: (costs[done], float(value))
        for done, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def panel_notes(plan: Plan, found: Sequence[PanelCurve]) -> list[str]:
    """What is drawn, and which metrics no finished run has recorded."""
    if not plan.table.panels:
        return []
    notes = ["Means over seeds, with their range, along training."] if found else []
    for panel in plan.table.panels:
        if any(curve.panel == panel for curve in found):
            continue
        if panel.metric is None:
            if panel.value is not None and found:
                notes.append(
                    f"No finished run's measurements on {panel.evaluation} have {panel.value} ({panel.name})."
                )
            continue
        known = {
            key
            for row in plan.table.rows
            if row.experiment is not None
            for run in _finished(plan, row.experiment)
            for line in run.directory.read_metrics()[:1]
            for key in line
        }
        if known:
            notes.append(
                f"No finished run recorded {panel.metric} ({panel.name}):"
                f" {did_you_mean(panel.metric, sorted(known))}"
            )
    return notes


def panels_json(found: Sequence[PanelCurve]) -> list[dict[str, Any]]:
    return [
        {
            "panel": curve.panel.name,
            "metric": curve.panel.metric,
            "evaluation": curve.panel.evaluation,
            "value": curve.panel.value,
            "row": curve.row.name,
            "seeds": list(curve.seeds),
            "points": points_json(curve.points),
        }
        for curve in found
    ]
