"""Where the time went: seconds by phase of the loop."""

from __future__ import annotations

import math

from treetune.reports.charts import number, stacked_bars
from treetune.reports.experiment import Experiment
from treetune.reports.sections.base import ReportSection

PHASES = ("generation", "credit", "training", "choice", "sync", "evaluation", "commit", "other")


class TimesSection(ReportSection):
    title = "Time by phase"

    def applies(self, experiment: Experiment) -> bool:
        return any(y > 0 for phase in PHASES for _, y in experiment.curve(f"seconds/{phase}"))

    def html(self, experiment: Experiment) -> str:
        return _times(experiment)


def _times(one: Experiment) -> str:
    """Seconds by phase: shares of the whole run, and a bar per iteration."""
    by_phase = {phase: dict(one.curve(f"seconds/{phase}")) for phase in PHASES}
    totals = {phase: math.fsum(points.values()) for phase, points in by_phase.items()}
    whole = math.fsum(totals.values())
    rows = []
    for x in sorted({x for points in by_phase.values() for x in points}):
        rows.append((f"{x:.0f}", {phase: max(0.0, points.get(x, 0.0)) for phase, points in by_phase.items()}))
    used = [phase for phase in PHASES if totals[phase] > 0]
    shares = "".join(
        f'<span class="{phase}" style="width:{100 * totals[phase] / whole:.2f}%"></span>' for phase in used
    )
    legend = "".join(
        f'<span><span class="chip {phase}"></span>{phase} {number(totals[phase])} s'
        f" ({100 * totals[phase] / whole:.1f} %)</span>"
        for phase in used
    )
    bars = stacked_bars("seconds per iteration", rows, "s")
    return (
        f"<p>{number(whole)} s in {len(rows)} iterations.</p>"
        f'<div class="share">{shares}</div><div class="legend">{legend}</div><div class="wide">{bars}</div>'
    )
