"""Where the time went: seconds by phase of the loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treetune_view.report.charts import stacked_bars
from treetune_view.report.experiment import Experiment
from treetune_view.report.pages import render
from treetune_view.report.sections.base import ReportSection

PHASES: Mapping[str, str] = {
    "generation": "answers are sampled, or demonstrations taken, and graded",
    "credit": "steps are valued and advantages computed",
    "training": "the policy, and a critic where there is one, learn from the answers",
    "choice": "the weights of each epoch are measured",
    "sync": "the new weights go into the engine that samples",
    "evaluation": "checkpoints are measured",
    "commit": "what was done is written to disk",
    "other": "all else",
}
"""What is done in each, in words."""


def phase_seconds(experiment: Experiment) -> list[tuple[str, dict[str, float]]]:
    """Seconds by phase of each iteration, in its order, after the iteration's number."""
    by_phase = {phase: dict(experiment.curve(f"seconds/{phase}")) for phase in PHASES}
    return [
        (f"{x:.0f}", {phase: points.get(x, 0.0) for phase, points in by_phase.items()})
        for x in sorted({x for points in by_phase.values() for x in points})
    ]


def phase_totals(rows: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, float]:
    """Seconds of the phases that took any, over all of these iterations."""
    totals = {phase: math.fsum(own[phase] for _, own in rows) for phase in PHASES}
    return {phase: seconds for phase, seconds in totals.items() if seconds > 0}


class TimesSection(ReportSection):
    title = "Time by phase"

    def applies(self, experiment: Experiment) -> bool:
        return any(y > 0 for phase in PHASES for _, y in experiment.curve(f"seconds/{phase}"))

    def html(self, experiment: Experiment) -> str:
        """Shares of the whole run, and a bar per iteration."""
        rows = phase_seconds(experiment)
        totals = phase_totals(rows)
        return render(
            "times.html",
            totals=totals,
            words=PHASES,
            whole=math.fsum(totals.values()),
            iterations=len(rows),
            bars=stacked_bars("seconds per iteration", rows, "s"),
        )
