"""Any metric and any evaluation set along training, a panel each, with a line for every method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treetune.config.errors import did_you_mean
from treetune_tables.report.curves import AXES, Curve, as_json, curve_of, finished
from treetune_tables.runs import Plan
from treetune_tables.settings import PanelAxis

AXIS_WORDS: dict[PanelAxis, str] = {"iterations": "iterations", **{axis: AXES[axis] for axis in AXES}}


def panel_curves(plan: Plan) -> list[Curve]:
    """Panel after panel, of every row with an experiment of its own and a finished run that has it.

    What an experiment that others start from recorded while it was trained is not beside theirs: it
    came before. What is measured of its weights is where they begin.
    """
    before = {name for experiment in plan.table.experiments.values() for name in experiment.needs}
    found = [
        curve_of(plan, row, panel, row.experiment)
        for panel in plan.table.panels
        for row in plan.table.rows
        if panel.metric is None or row.experiment not in before
    ]
    return [curve for curve in found if curve is not None]


def panel_notes(plan: Plan, found: Sequence[Curve]) -> list[str]:
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
            for run in finished(plan, row.experiment)
            for line in run.directory.read_metrics()[:1]
            for key in line
        }
        if known:
            notes.append(
                f"No finished run recorded {panel.metric} ({panel.name}):"
                f" {did_you_mean(panel.metric, sorted(known))}"
            )
    return notes


def panels_json(found: Sequence[Curve]) -> list[dict[str, Any]]:
    return as_json(
        found,
        panel=lambda curve: curve.panel.name,
        metric=lambda curve: curve.panel.metric,
        evaluation=lambda curve: curve.panel.evaluation,
        value=lambda curve: curve.panel.value,
    )
