"""The report: one HTML file about one or several experiments that needs nothing else to be read."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.store.files import write_text
from treetune.view.charts import line_chart
from treetune.view.curves import Bunch, evaluation_charts
from treetune.view.experiment import StoredExperiment, read_experiment
from treetune.view.report.sections import all_sections
from treetune.view.templates import colour_of, page


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
    results = [
        _result(one, colour_of(i), label) for i, one in enumerate(experiments) for label in one.evaluations
    ]
    document = page(
        "report.html",
        title=", ".join(one.name for one in experiments),
        now=time.strftime("%Y-%m-%d %H:%M %Z"),
        results=results,
        further=list(dict.fromkeys(head for result in results for head in result["further"])),
        colours={one.name: colour_of(i) for i, one in enumerate(experiments)},
        curves=_accuracy_curves(experiments),
        experiments=[_about(one, colour_of(i)) for i, one in enumerate(experiments)],
        paths=", ".join(str(one.path) for one in experiments),
    )
    write_text(output, document)
    return output


def _result(one: StoredExperiment, colour: str, label: str) -> dict[str, Any]:
    """Returns the last measured checkpoint on an evaluation set."""
    summaries = one.evaluations[label]
    optional = ("ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
    summary = {**dict.fromkeys(optional), **summaries[max(summaries)]}
    columns = [section.columns(summary) for section in all_sections()]
    return {
        "experiment": one.name,
        "colour": colour,
        "set": label,
        "summary": summary,
        "k": max(summary.get("pass_at_k") or (), key=int, default=None),
        "further": {head: text for own in columns for head, text in own.items()},
    }


def _accuracy_curves(experiments: Sequence[StoredExperiment]) -> list[str]:
    """Returns pass@1 over iterations, one chart per evaluation set, all experiments in it; of several
    experiments also one for each domain of the set."""
    from treetune.view.report.recorded import accuracy_charts, domain_series, domains_of

    made = [Bunch(one.name, i, [one]) for i, one in enumerate(experiments)]
    charts = {chart.title.removeprefix("pass@1 on "): chart for chart in evaluation_charts(made)}
    curves = []
    for label in sorted({label for one in experiments for label in one.evaluations}):
        curves += [line_chart(charts[label])] if label in charts else []
        if len(experiments) == 1:
            continue
        measured = [one.evaluations.get(label, {}) for one in experiments]
        domains = {name for points in measured for summary in points.values() for name in domains_of(summary)}
        for name in sorted(domains):
            series = [
                domain_series(one.name, points, name, colour_of(i))
                for i, (one, points) in enumerate(zip(experiments, measured, strict=True))
            ]
            curves += accuracy_charts(f"pass@1 on {label}, domain {name}", series)
    return curves


def _about(one: StoredExperiment, colour: str) -> dict[str, Any]:
    """Returns all that there is about one experiment, and what is missing: sections add to that."""
    written = [(section.title, section.html(one)) for section in all_sections() if section.applies(one)]
    return {
        "name": one.name,
        "colour": colour,
        "facts": _facts(one),
        "config": json.dumps(one.config, indent=1, ensure_ascii=False) if one.config else "",
        "missing": one.missing,
        "sections": [(title, inner) for title, inner in written if inner],
    }


def _facts(one: StoredExperiment) -> Mapping[str, Any]:
    def listed(facts: Mapping[str, Any], between: str = ", ") -> str:
        return between.join(f"{key} {value}" for key, value in facts.items() if value)

    manifest, config, bits = one.manifest, one.config, one.bits_rest_on
    planned = one.expected_iterations
    state = "running" if one.running else "finished" if planned == len(one.metrics) else "not finished"
    if one.stopped:
        state = "stopped by a collapse sign"
    machine = (bits.get("processor"), manifest.get("system"), bits.get("machine"), bits.get("python"))
    facts = {
        "iterations": f"{len(one.metrics)} of {planned if planned is not None else '?'} ({state})",
        "method": listed(one.method, " · "),
        "configuration (hash)": manifest.get("config"),
        "seed": manifest.get("seed", config.get("seed")),
        "code (git commit)": manifest.get("commit"),
        "versions": listed(bits.get("packages") or {}),
        "machine": ", ".join(str(part) for part in machine if part),
        "data (hashes)": listed(manifest.get("data") or {}),
        "directory": str(one.path),
    }
    return {key: value for key, value in facts.items() if value not in (None, "")}
