"""The report: one HTML file about one or several experiments that needs nothing else to be read."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.store.files import write_text
from treetune_view.report.charts import Series, accuracy_chart
from treetune_view.report.experiment import Experiment, read_experiment
from treetune_view.report.pages import colour_of, page
from treetune_view.report.sections.base import sections
from treetune_view.report.sections.domains import domains_of, series_of


def write_report(directories: Sequence[Path], output: Path | None = None) -> Path:
    """Writes the report and returns where it is.

    Without `output` it is ``report.html``: in the experiment's directory, or for several in the
    directory above the first one. Raises ValueError for a directory that holds no experiment.
    """
    if not directories:
        raise ValueError("a report is about one experiment's directory, or several")
    experiments = [read_experiment(Path(directory)) for directory in directories]
    if output is None:
        first = experiments[0].path
        output = (first if len(experiments) == 1 else first.resolve().parent) / "report.html"
    write_text(output, report_of(experiments))
    return output


def report_of(experiments: Sequence[Experiment]) -> str:
    """The whole document."""
    results = [
        _result(one, colour_of(i), label) for i, one in enumerate(experiments) for label in one.evaluations
    ]
    return page(
        "report.html",
        title=", ".join(one.name for one in experiments),
        now=time.strftime("%Y-%m-%d %H:%M %Z"),
        results=results,
        further=list(dict.fromkeys(head for result in results for head in result["further"])),
        colours={one.name: colour_of(i) for i, one in enumerate(experiments)},
        curves=_evaluation_curves(experiments),
        experiments=[_about(one, colour_of(i)) for i, one in enumerate(experiments)],
        paths=", ".join(str(one.path) for one in experiments),
    )


def _result(one: Experiment, colour: str, label: str) -> dict[str, Any]:
    """The last measured checkpoint on an evaluation set."""
    summaries = one.evaluations[label]
    summary = {
        "ci_low": None,
        "ci_high": None,
        "majority_vote": None,
        "unfinished": None,
        "mean_tokens": None,
    }
    summary |= summaries[max(summaries)]
    columns = [section.columns(summary) for section in sections()]
    return {
        "experiment": one.name,
        "colour": colour,
        "set": label,
        "summary": summary,
        "k": max(summary.get("pass_at_k") or (), key=int, default=None),
        "further": {head: text for own in columns for head, text in own.items()},
    }


def _evaluation_curves(experiments: Sequence[Experiment]) -> list[str]:
    """pass@1 over iterations, one chart per evaluation set, all experiments in it.

    An experiment that was measured once is a level to compare with. Sets on which all were measured
    once have no chart: the table says it all.
    """
    charts = []
    for label in sorted({label for one in experiments for label in one.evaluations}):
        series = []
        for i, one in enumerate(experiments):
            summaries = one.evaluations.get(label, {})
            interval = {
                float(n): (float(s["ci_low"]), float(s["ci_high"]))
                for n, s in summaries.items()
                if s.get("ci_low") is not None and s.get("ci_high") is not None
            }
            points = [(float(n), float(s["pass_at_1"])) for n, s in summaries.items()]
            series.append(Series(one.name, points, colour_of(i), interval, is_level=len(points) == 1))
        if any(len(one.points) > 1 for one in series):
            title = f"pass@1 on {label}"
            charts.append(accuracy_chart(title, series))
        if len(experiments) > 1:
            charts += _domain_curves(experiments, label)
    return charts


def _domain_curves(experiments: Sequence[Experiment], label: str) -> list[str]:
    """The same for each domain of the set."""
    found = [one.evaluations.get(label, {}) for one in experiments]
    names = sorted({name for points in found for summary in points.values() for name in domains_of(summary)})
    charts = []
    for name in names:
        series = [
            series_of(one.name, points, name, colour_of(i))
            for i, (one, points) in enumerate(zip(experiments, found, strict=True))
        ]
        if any(len(one.points) > 1 for one in series):
            title = f"pass@1 on {label}, domain {name}"
            charts.append(accuracy_chart(title, series))
    return charts


def _about(one: Experiment, colour: str) -> dict[str, Any]:
    """All that there is about one experiment, and what is missing: sections add to that."""
    found = [(section.title, section.html(one)) for section in sections() if section.applies(one)]
    return {
        "name": one.name,
        "colour": colour,
        "facts": _facts(one),
        "config": json.dumps(one.config, indent=1, ensure_ascii=False) if one.config else "",
        "missing": one.missing,
        "sections": [(title, inner) for title, inner in found if inner],
    }


def _facts(one: Experiment) -> Mapping[str, Any]:
    manifest, config = one.manifest, one.config
    bits = manifest.get("bits_rest_on") or manifest  # runs of earlier versions have it there
    planned = one.expected_iterations
    state = "running" if one.running else "finished" if planned == len(one.metrics) else "not finished"
    if one.stopped:
        state = "stopped by a collapse sign"
    facts = {
        "iterations": f"{len(one.metrics)} of {planned if planned is not None else '?'} ({state})",
        "method": _listed(one.method, " · "),
        "configuration (hash)": manifest.get("config"),
        "seed": manifest.get("seed", config.get("seed")),
        "code (git commit)": manifest.get("commit"),
        "versions": _listed(bits.get("packages") or {}),
        "machine": ", ".join(
            str(there[key])
            for there, key in ((bits, "processor"), (manifest, "system"), (bits, "machine"), (bits, "python"))
            if there.get(key)
        ),
        "data (hashes)": _listed(manifest.get("data") or {}),
        "directory": str(one.path),
    }
    return {key: value for key, value in facts.items() if value not in (None, "")}


def _listed(facts: Mapping[str, Any], between: str = ", ") -> str:
    return between.join(f"{key} {value}" for key, value in facts.items() if value)
