"""The report: one HTML file about one or several experiments that needs nothing else to be read."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from treetune.episode_generators.numbers import Number, declared
from treetune.reports.charts import Series, interval_mark, line_chart, number, stacked_bars
from treetune.reports.diagnostics import diagnostics_html
from treetune.reports.episodes import EpisodeSample, episodes_html, sample_episodes
from treetune.reports.experiment import Experiment, read_experiment
from treetune.reports.number_curves import number_curves_html

N_COLOURS = 8

PHASES = ("generation", "credit", "training", "choice", "sync", "evaluation", "commit", "other")

CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward of the sampled answers", ("episodes/reward",)),
    ("rounds of sampling until enough groups were mixed", ("rollout/rounds",)),
    ("share of sampled groups without spread of score", ("rollout/groups_dropped",)),
    ("share of trained tokens whose advantage is 0", ("credit/advantage_zero",)),
    ("loss", ("train/loss",)),
    ("KL to the reference", ("train/kl",)),
    ("entropy (nats per token)", ("train/entropy",)),
    ("gradient norm", ("train/grad_norm",)),
    ("clip fraction", ("train/clip_fraction",)),
    ("share of pairs that the policy prefers as it should", ("preference/accuracy",)),
    (
        "implicit reward: better answers, and in grey the others",
        ("preference/chosen_reward", "preference/rejected_reward"),
    ),
    ("response length (tokens)", ("episodes/response_tokens",)),
    ("share unfinished", ("episodes/unfinished",)),
    ("learning rate", ("train/learning_rate",)),
    ("critic: mean squared error", ("critic/mse",)),
    ("engine: sampled tokens per second", ("engine/tokens_per_second",)),
    (
        "|engine − trainer log-prob|: mean, and in grey the largest",
        ("engine/logprob_gap_mean", "engine/logprob_gap_max"),
    ),
    ("canary gap after each sync", ("engine/canary_gap",)),
)
"""Title and the metrics in it. What an experiment did not record has no chart."""

SHAPING = "shaping/"
"""Its metrics are named after the parts of `shaping`, which may be anyone's: a chart for each."""

FROM_ZERO = {
    "share unfinished",
    "clip fraction",
    "engine: sampled tokens per second",
    "rounds of sampling until enough groups were mixed",
    "share of sampled groups without spread of score",
    "share of trained tokens whose advantage is 0",
}


def write_report(directories: Sequence[Path], output: Path | None = None) -> Path:
    """Writes the report and returns where it is.

    Without `output` it is ``report.html``: in the experiment's directory, or for several in the
    directory above the first one. Raises ValueError for a directory that holds no experiment.
    """
    from treetune.runtime.directory import write_text

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
    measured = [
        summary for one in experiments for along in one.evaluations.values() for summary in along.values()
    ]
    numbers = {
        name: number
        for name, number in declared().items()
        if number.label is not None and any(_number(summary, name) is not None for summary in measured)
    }
    heads += [str(number.label) for number in numbers.values()]
    rows = []
    for i, one in enumerate(experiments):
        chip = f'<span class="chip {_colour(i)}"></span>{escape(one.name)}'
        for label, summaries in one.evaluations.items():
            summary = summaries[max(summaries)]
            cells = [chip, escape(label), *_result_cells(summary, _colour(i))]
            cells += [_number_cell(_number(summary, name), of) for name, of in numbers.items()]
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


def _number(summary: Mapping[str, Any], name: str) -> float | None:
    group, _, short = name.partition("/")
    return (summary.get(group) or {}).get(short)


def _number_cell(value: float | None, of: Number) -> str:
    return "–" if value is None else f"{value:.3f}" if of.share else f"{value:.1f}"


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
    missing = list(one.missing)
    sample: EpisodeSample | None = sample_episodes(one.path, missing)
    parts = [f'<h2><span class="chip {colour}"></span>{escape(one.name)}</h2>', _facts(one)]
    if missing:
        items = "".join(f"<li>{escape(words)}</li>" for words in missing)
        parts.append(f'<div class="missing">Not here (yet):<ul>{items}</ul></div>')
    charts = _curves(one, colour)
    if charts:
        parts.append(f'<h3>Training</h3><div class="charts">{"".join(charts)}</div>')
    parts.append(number_curves_html(one, colour))
    parts.append(diagnostics_html(one))
    parts.append(_times(one))
    if sample is not None:
        parts.append(f"<h3>Episodes</h3>{episodes_html(sample)}")
    return "".join(parts)


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


def _curves(one: Experiment, colour: str) -> list[str]:
    charts = []
    recorded = sorted({key for row in one.metrics for key in row if key.startswith(SHAPING)})
    shaping = [(f"what shaping added: {key.removeprefix(SHAPING)}", (key,)) for key in recorded]
    for title, keys in (*CURVES[:1], *shaping, *CURVES[1:]):
        # A second metric in one chart has the neutral colour: mean and largest.
        series = [
            Series(key.split("/", 1)[1], one.curve(key), colour if n == 0 else "c5")
            for n, key in enumerate(keys)
        ]
        if any(each.points for each in series):
            charts.append(line_chart(title, series, from_zero=title in FROM_ZERO))
    return charts


def _times(one: Experiment) -> str:
    """Seconds by phase: shares of the whole run, and a bar per iteration."""
    by_phase = {phase: dict(one.curve(f"seconds/{phase}")) for phase in PHASES}
    totals = {phase: math.fsum(points.values()) for phase, points in by_phase.items()}
    whole = math.fsum(totals.values())
    if whole <= 0:
        return ""
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
        f"<h3>Time by phase</h3><p>{number(whole)} s in {len(rows)} iterations.</p>"
        f'<div class="share">{shares}</div><div class="legend">{legend}</div><div class="wide">{bars}</div>'
    )
