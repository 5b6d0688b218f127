"""One experiment, or several over and beside each other: standing, curves with events, time by phase."""

from __future__ import annotations

import math

from starlette.responses import Response

from treetune_view.page import Page, View
from treetune_view.report.charts import thinned
from treetune_view.report.experiment import Experiment
from treetune_view.report.sections.times import PHASES, phase_seconds, phase_totals
from treetune_view.store import Run
from treetune_view.store.curves import (
    bunches,
    chosen_charts,
    evaluation_charts,
    events_of,
    events_of_several,
    metric_names,
    setting_of,
    usual_charts,
)
from treetune_view.store.side_by_side import side_by_side
from treetune_view.store.standing import standing


def show(view: View) -> Response:
    """`?run=` (also several), `?metric=` (also several: their curves alone), `?seeds=together`."""
    view.run  # noqa: B018  (raises where none is named)
    experiments = {run.name: view.store.experiment(run) for run in view.runs}
    together = view.choice("seeds", ("apart", "together")) == "together"
    made = bunches(experiments, together)
    first = experiments[view.run.name]
    events = events_of(first) if len(experiments) == 1 else events_of_several(experiments)
    standings = {run.name: standing(view.store, run) for run in view.runs}
    names = [name for name in view.request.query_params.getlist("metric") if name]
    return view.render(
        "run.html",
        experiment=first,
        standings=standings,
        beside=side_by_side(experiments, standings) if len(experiments) > 1 else [],
        made=made,
        measured=[] if names else evaluation_charts(made, events),
        charts=chosen_charts(made, names, events) if names else usual_charts(made, events),
        names=names,
        metrics=metric_names(experiments.values()),
        seeds=[run.name for run in other_seeds(view, view.run)] if len(experiments) == 1 else [],
        together=together,
        times=_times(first),
        events=events,
    )


def _times(one: Experiment) -> dict[str, object]:
    """Seconds by phase: of all iterations, and bars of each (of neighbours, where there are many)."""
    rows = phase_seconds(one)
    totals = phase_totals(rows)
    bars = thinned(rows)
    return {
        "totals": totals,
        "words": PHASES,
        "whole": math.fsum(totals.values()),
        "iterations": len(rows),
        "bars": bars,
        "longest": max((math.fsum(own.values()) for _, own in bars), default=0.0),
    }


def other_seeds(view: View, run: Run) -> list[Run]:
    """Experiments that differ from this one in their seed alone."""
    own = setting_of(view.store.experiment(run).config)
    found = []
    for other in view.store.runs():
        try:
            if other != run and setting_of(view.store.experiment(other).config) == own:
                found.append(other)
        except ValueError:  # holds nothing that can be read: the list of experiments says so
            continue
    return found


PAGE = Page("/run", "Run", show, place="run", key="r")
