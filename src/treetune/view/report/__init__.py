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
    """Writes the report, and returns its path.

    Without `output` it is ``report.html`` in the experiment's directory, or for several experiments in the
    directory above the first one. Raises ValueError for a directory that is not an experiment's.
    """
    if not directories:
        raise ValueError("a report is about one experiment's directory, or several")
    experiments = [read_experiment(Path(directory)) for directory in directories]
    if output is None:
        first = experiments[0].path
        output = (first if len(experiments) == 1 else first.resolve().parent) / "report.html"
    results = [
        _result(experiment, colour_of(i), label)
        for i, experiment in enumerate(experiments)
        for label in experiment.evaluations
    ]
    further_heads: dict[str, None] = {}
    for result in results:
        further_heads |= dict.fromkeys(result["further"])
    document = page(
        "report.html",
        title=", ".join(experiment.name for experiment in experiments),
        now=time.strftime("%Y-%m-%d %H:%M %Z"),
        results=results,
        further=list(further_heads),
        colours={experiment.name: colour_of(i) for i, experiment in enumerate(experiments)},
        curves=_accuracy_curves(experiments),
        experiments=[_about(experiment, colour_of(i)) for i, experiment in enumerate(experiments)],
        paths=", ".join(str(experiment.path) for experiment in experiments),
    )
    write_text(output, document)
    return output


def _result(experiment: StoredExperiment, colour: str, label: str) -> dict[str, Any]:
    """Returns the last measured checkpoint on an evaluation set."""
    summaries = experiment.evaluations[label]
    optional = ("ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
    summary = {**dict.fromkeys(optional), **summaries[max(summaries)]}
    columns = [section.columns(summary) for section in all_sections()]
    return {
        "experiment": experiment.name,
        "colour": colour,
        "set": label,
        "summary": summary,
        "k": max(summary.get("pass_at_k") or (), key=int, default=None),
        "further": {head: text for further in columns for head, text in further.items()},
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


def _about(experiment: StoredExperiment, colour: str) -> dict[str, Any]:
    """Returns all that there is about one experiment, and what is missing: sections add to that."""
    written = [
        (section.title, section.html(experiment)) for section in all_sections() if section.applies(experiment)
    ]
    return {
        "name": experiment.name,
        "colour": colour,
        "facts": _facts(experiment),
        "config": json.dumps(experiment.config, indent=1, ensure_ascii=False) if experiment.config else "",
        "missing": experiment.missing,
        "sections": [(title, inner) for title, inner in written if inner],
    }


def _facts(experiment: StoredExperiment) -> Mapping[str, Any]:
    def listed(facts: Mapping[str, Any], between: str = ", ") -> str:
        return between.join(f"{key} {value}" for key, value in facts.items() if value)

    manifest, config, environment = experiment.manifest, experiment.config, experiment.bits_rest_on
    planned = experiment.expected_iterations
    state = (
        "running"
        if experiment.running
        else "finished"
        if planned == len(experiment.metrics)
        else "not finished"
    )
    if experiment.stopped:
        state = "stopped by a collapse sign"
    machine = (
        environment.get("processor"),
        manifest.get("system"),
        environment.get("machine"),
        environment.get("python"),
    )
    facts = {
        "iterations": f"{len(experiment.metrics)} of {planned if planned is not None else '?'} ({state})",
        "method": listed(experiment.method, " · "),
        "configuration (hash)": manifest.get("config"),
        "seed": manifest.get("seed", config.get("seed")),
        "code (git commit)": manifest.get("commit"),
        "versions": listed(environment.get("packages") or {}),
        "machine": ", ".join(str(part) for part in machine if part),
        "data (hashes)": listed(manifest.get("data") or {}),
        "directory": str(experiment.path),
    }
    return {key: value for key, value in facts.items() if value not in (None, "")}
