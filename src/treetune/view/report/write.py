"""Writes the report about one or several experiments: a single HTML file that needs no other file."""

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
from treetune.view.report.episodes import EpisodesSection, MicroscopeSection, TreeSection
from treetune.view.report.recorded import (
    DiagnosticsSection,
    DomainsSection,
    NumbersSection,
    TimesSection,
    TrainingSection,
    accuracy_charts,
    domain_series,
    domains_of,
)
from treetune.view.report.sections import ReportSection, registered_sections
from treetune.view.templates import colour_of, render_document

SECTIONS: tuple[type[ReportSection], ...] = (
    TrainingSection,
    DomainsSection,
    NumbersSection,
    DiagnosticsSection,
    TimesSection,
    MicroscopeSection,
    TreeSection,
    EpisodesSection,
)
"""The sections of this package, in the order of the page."""


def all_sections() -> list[ReportSection]:
    """Returns all sections in the order of the page: those of this package, then those that users defined."""
    users_sections = [section for section in registered_sections() if type(section) not in SECTIONS]
    return [*(section_class() for section_class in SECTIONS), *users_sections]


def write_report(directories: Sequence[Path], output: Path | None = None) -> Path:
    """Writes a report about the experiments in `directories`, and returns its path.

    If `output` is None, the report is ``report.html`` in the experiment's directory, or for several
    experiments in the directory above that of the first. Raises ValueError for a directory that is not an
    experiment's.
    """
    if not directories:
        raise ValueError("a report is about one experiment's directory, or several")
    experiments = [read_experiment(Path(directory)) for directory in directories]
    if output is None:
        directory = experiments[0].path
        if len(experiments) > 1:
            directory = directory.resolve().parent  # resolved first, because Path(".").parent is Path(".")
        output = directory / "report.html"
    results = []
    for i, experiment in enumerate(experiments):
        results += [_make_table_row(experiment, colour_of(i), label) for label in experiment.evaluations]
    further_heads: dict[str, None] = {}  # a dictionary as an ordered set
    for result in results:
        further_heads |= dict.fromkeys(result["further"])
    document = render_document(
        "report.html",
        title=", ".join(experiment.name for experiment in experiments),
        now=time.strftime("%Y-%m-%d %H:%M %Z"),
        results=results,
        further=list(further_heads),
        colours={experiment.name: colour_of(i) for i, experiment in enumerate(experiments)},
        curves=_accuracy_curves(experiments),
        experiments=[
            _make_experiment_values(experiment, colour_of(i)) for i, experiment in enumerate(experiments)
        ],
        paths=", ".join(str(experiment.path) for experiment in experiments),
    )
    write_text(output, document)
    return output


def _make_table_row(experiment: StoredExperiment, colour: str, label: str) -> dict[str, Any]:
    """Returns the table row of an experiment's newest evaluation on a set."""
    summaries = experiment.evaluations[label]
    optional_names = ("ci_low", "ci_high", "majority_vote", "unfinished", "mean_tokens")
    newest_summary = summaries[max(summaries)]  # the summaries are by iteration
    summary = {**dict.fromkeys(optional_names), **newest_summary}
    further_columns: dict[str, str] = {}
    for section in all_sections():
        further_columns |= section.columns(summary)
    return {
        "experiment": experiment.name,
        "colour": colour,
        "set": label,
        "summary": summary,
        # The largest k of pass@k, as text: the keys of `pass_at_k` are "1", "8" and so on.
        "k": max(summary.get("pass_at_k") or (), key=int, default=None),
        "further": further_columns,
    }


def _accuracy_curves(experiments: Sequence[StoredExperiment]) -> list[str]:
    """Returns a chart of pass@1 over iterations for each evaluation set, with a line for each experiment.

    Several experiments also have a chart for each domain of a set. A single experiment has those in its
    section on domains.
    """
    # A bunch has the experiments that one curve is drawn from. Here each curve is of a single experiment.
    bunches = [Bunch(experiment.name, i, [experiment]) for i, experiment in enumerate(experiments)]
    # The charts by evaluation set. A chart's title is "pass@1 on SET".
    charts = {chart.title.removeprefix("pass@1 on "): chart for chart in evaluation_charts(bunches)}
    labels: set[str] = set()
    for experiment in experiments:
        labels |= set(experiment.evaluations)
    curves = []
    for label in sorted(labels):
        if label in charts:
            curves.append(line_chart(charts[label]))
        if len(experiments) == 1:
            continue
        domains: set[str] = set()
        for experiment in experiments:
            for summary in experiment.evaluations.get(label, {}).values():
                domains |= set(domains_of(summary))
        for domain in sorted(domains):
            series = []
            for i, experiment in enumerate(experiments):
                summaries = experiment.evaluations.get(label, {})
                series.append(domain_series(experiment.name, summaries, domain, colour_of(i)))
            curves += accuracy_charts(f"pass@1 on {label}, domain {domain}", series)
    return curves


def _make_experiment_values(experiment: StoredExperiment, colour: str) -> dict[str, Any]:
    """Returns the template's values for an experiment's part of the page."""
    # Sections are rendered before `experiment.missing` is used, because they add messages to it.
    sections = []
    for section in all_sections():
        html = section.html(experiment) if section.applies(experiment) else ""
        if html:
            sections.append((section.title, html))
    return {
        "name": experiment.name,
        "colour": colour,
        "facts": _list_facts(experiment),
        "config": json.dumps(experiment.config, indent=1, ensure_ascii=False) if experiment.config else "",
        "missing": experiment.missing,
        "sections": sections,
    }


def _list_facts(experiment: StoredExperiment) -> Mapping[str, Any]:
    """Returns the facts on an experiment that its files record, by the names that the page shows."""

    def join_facts(facts: Mapping[str, Any], separator: str = ", ") -> str:
        """Returns the facts as a text, such as "torch 2.9.0, vllm 0.12.0", without empty ones."""
        return separator.join(f"{key} {value}" for key, value in facts.items() if value)

    manifest, config, environment = experiment.manifest, experiment.config, experiment.environment
    planned = experiment.expected_iterations
    if experiment.stopped:
        state = "stopped by a sign of collapse"
    elif experiment.running:
        state = "running"
    elif planned == len(experiment.metrics):
        state = "finished"
    else:
        state = "not finished"
    machine = (
        environment.get("processor"),
        manifest.get("system"),
        environment.get("machine"),
        environment.get("python"),
    )
    facts = {
        "iterations": f"{len(experiment.metrics)} of {planned if planned is not None else '?'} ({state})",
        "method": join_facts(experiment.method, " · "),
        "configuration (hash)": manifest.get("config"),
        "seed": manifest.get("seed", config.get("seed")),
        "code (git commit)": manifest.get("commit"),
        "versions": join_facts(environment.get("packages") or {}),
        "machine": ", ".join(str(part) for part in machine if part),
        "data (hashes)": join_facts(manifest.get("data") or {}),
        "directory": str(experiment.path),
    }
    return {key: value for key, value in facts.items() if value not in (None, "")}
