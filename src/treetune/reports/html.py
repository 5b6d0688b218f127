"""The report: one HTML file about one or several experiments that needs nothing else to be read."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from treetune.reports.charts import Series, interval_mark, line_chart
from treetune.reports.experiment import Experiment, read_experiment
from treetune.reports.sections.base import sections

N_COLOURS = 8


def write_report(directories: Sequence[Path], output: Path | None = None) -> Path:
    """Writes the report and returns where it is.

    Without `output` it is ``report.html``: in the experiment's directory, or for several in the
    directory above the first one. Raises ValueError for a directory that holds no experiment.
    """
    from treetune.files import write_text

    if not directories:
        raise ValueError("a report is about one experiment's directory, or several")
    experiments = [read_experiment(Path(directory)) for directory in directories]
    if output is None:
        first = experiments[0].path
        output = (first if len(experiments) == 1 else first.resolve().parent) / "report.html"
    write_text(output, page(experiments))
    return output


def page(experiments: Sequence[Experiment]) -> str:
    """The whole document."""
    names = ", ".join(one.name for one in experiments)
    style = (Path(__file__).parent / "report.css").read_text()
    body = [f"<h1>{escape(names)}</h1>", f'<p class="note">Written {time.strftime("%Y-%m-%d %H:%M %Z")}.</p>']
    body.append(_results(experiments))
    body.append(_evaluation_curves(experiments))
    body += [_section(one, _colour(i)) for i, one in enumerate(experiments)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(names)} – treetune</title><style>{style}</style></head>"
        f"<body>{''.join(body)}<footer>treetune report: every figure is read from the experiments’ own files"
        f" ({escape(', '.join(str(one.path) for one in experiments))}).</footer></body></html>\n"
    )


def _colour(i: int) -> str:
    return f"c{i % N_COLOURS}"


def _results(experiments: Sequence[Experiment]) -> str:
    """The last measured checkpoint of every experiment on every evaluation set."""
    heads = ["experiment", "set", "pass@1 [95 % interval]", "0 – 1", "pass@k", "majority", "unfinished"]
    heads += ["tokens", "problems", "iteration"]
    last = [summaries[max(summaries)] for one in experiments for summaries in one.evaluations.values()]
    further = list(dict.fromkeys(head for summary in last for head in _further(summary)))
    heads += map(escape, further)
    rows = []
    for i, one in enumerate(experiments):
        chip = f'<span class="chip {_colour(i)}"></span>{escape(one.name)}'
        for label, summaries in one.evaluations.items():
            summary = summaries[max(summaries)]
            cells = [chip, escape(label), *_result_cells(summary, _colour(i))]
            own = _further(summary)
            cells += [escape(own.get(head, "–")) for head in further]
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    if not rows:
        return '<p class="missing">No checkpoint is measured yet: <code>run_evaluation</code> does.</p>'
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        '<h2>Results</h2><p class="note">The last measured checkpoint; the interval is a bootstrap over'
        " problems.</p>"
        f'<div class="scroll"><table class="results"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _result_cells(summary: Mapping[str, Any], colour: str) -> list[str]:
    def share(value: Any) -> str:
        return f"{value:.3f}" if isinstance(value, int | float) else "–"

    low, high = summary.get("ci_low"), summary.get("ci_high")
    by_k = summary.get("pass_at_k") or {}
    best_k = max(by_k, key=int, default=None)
    tokens = summary.get("mean_tokens")
    return [
        f"<b>{share(summary['pass_at_1'])}</b> [{share(low)}, {share(high)}]",
        "" if low is None or high is None else interval_mark(summary["pass_at_1"], low, high, colour),
        f"{share(by_k[best_k])} (k = {escape(str(best_k))})" if best_k is not None else "–",
        share(summary.get("majority_vote")),
        share(summary.get("unfinished")),
        "–" if tokens is None else f"{tokens:.1f}",
        f"{summary.get('n_problems', '–')} × {summary.get('samples', '–')}",
        str(summary["iteration"]),
    ]


def _further(summary: Mapping[str, Any]) -> dict[str, str]:
    """The columns that sections add."""
    return {head: text for section in sections() for head, text in section.columns(summary).items()}


def _evaluation_curves(experiments: Sequence[Experiment]) -> str:
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
            series.append(Series(one.name, points, _colour(i), interval, is_level=len(points) == 1))
        if all(len(one.points) <= 1 for one in series):
            continue
        charts.append(
            line_chart(f"pass@1 on {label}, with its 95 % interval", series, x_name="finished iterations")
        )
    if not charts:
        return ""
    return f'<h3>Over the run</h3>{_legend(experiments)}<div class="charts">{"".join(charts)}</div>'


def _legend(experiments: Sequence[Experiment]) -> str:
    entries = (
        f'<span><span class="chip {_colour(i)}"></span>{escape(one.name)}</span>'
        for i, one in enumerate(experiments)
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def _section(one: Experiment, colour: str) -> str:
    """All that there is about one experiment, and what is missing."""
    found = [(section.title, section.html(one)) for section in sections() if section.applies(one)]
    shown = [f"<h3>{escape(title)}</h3>{inner}" for title, inner in found if inner]
    parts = [f'<h2><span class="chip own"></span>{escape(one.name)}</h2>', _facts(one)]
    if one.missing:
        items = "".join(f"<li>{escape(words)}</li>" for words in one.missing)
        parts.append(f'<div class="missing">Not here (yet):<ul>{items}</ul></div>')
    return f'<section style="--own: var(--{colour})">{"".join(parts + shown)}</section>'


def _facts(one: Experiment) -> str:
    manifest, config = one.manifest, one.config
    packages = manifest.get("packages") or {}
    planned = one.planned_iterations
    state = "running" if one.running else "finished" if planned == len(one.metrics) else "not finished"
    if one.stopped:
        state = "stopped by a collapse sign"
    methods = {key: (config.get(key) or {}).get("type") for key in ("task", "rollout", "credit", "selection")}
    objective = ((config.get("trainer") or {}).get("objective") or {}).get("type")
    facts = {
        "iterations": f"{len(one.metrics)} of {planned if planned is not None else '?'} ({state})",
        "method": " · ".join(
            f"{key} {value}" for key, value in {**methods, "objective": objective}.items() if value
        ),
        "configuration": manifest.get("config"),
        "seed": manifest.get("seed", config.get("seed")),
        "code": manifest.get("commit"),
        "versions": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "machine": ", ".join(str(manifest[key]) for key in ("machine", "python") if manifest.get(key)),
        "data": ", ".join(
            f"{split} {digest}" for split, digest in (manifest.get("data") or {}).items() if digest
        ),
        "directory": str(one.path),
    }
    rows = "".join(
        f"<dt>{key}</dt><dd>{escape(str(value))}</dd>"
        for key, value in facts.items()
        if value not in (None, "")
    )
    detail = escape(json.dumps(config, indent=1, ensure_ascii=False))
    shown = (
        f"<details><summary>the whole configuration</summary><pre>{detail}</pre></details>" if config else ""
    )
    return f'<dl class="facts">{rows}</dl>{shown}'
