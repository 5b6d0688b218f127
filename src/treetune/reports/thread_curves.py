"""What an experiment recorded of its answers' threads, as a group of charts."""

from __future__ import annotations

from html import escape

from treetune.reports.charts import Series, line_chart
from treetune.reports.experiment import Experiment

THREADS = "threads/"
"""What the names of these metrics begin with."""

THREAD_CURVES = {
    "num_tokens_in_the_longest_thread": "tokens in the longest thread (critical path)",
    "total_num_tokens": "tokens of an answer",
    "acceleration_ratio": "acceleration ratio: 1 − longest/total",
    "with_parallel": "share of answers with threads",
    "parallel_ratio": "share of tokens within blocks",
    "parallel_count": "blocks of an answer",
    "thread_counts_per_block": "threads of a block",
    "avg_tokens_per_parallel_block": "tokens of a block",
    "format_correct": "share with nothing against the grammar",
    "seconds_critical": "seconds on the slowest way through an answer",
    "seconds_sampling": "seconds in all requests for an answer",
}
"""Titles, in their order; others of `THREADS` go by their own names."""


def thread_curves_html(one: Experiment) -> str:
    """What was counted and never happened has no chart."""
    recorded = {key.removeprefix(THREADS) for row in one.metrics for key in row if key.startswith(THREADS)}
    known = {f"{name}{ending}" for name in THREAD_CURVES for ending in ("", "_right", "_max")}
    charts, never = [], []
    for name in (*THREAD_CURVES, *sorted(recorded - known - {"correct"})):
        series = [
            Series(name, one.curve(f"{THREADS}{name}"), "own"),
            Series(f"{name} of right answers", one.curve(f"{THREADS}{name}_right"), "c5"),
        ]
        if name not in known and not any(y for _, y in series[0].points):
            never.append(name.replace("_", " "))
        elif any(each.points for each in series):
            title = THREAD_CURVES.get(name, f"{name.replace('_', ' ')}, per answer")
            charts.append(line_chart(title, series, from_zero=name not in known))
    note = "Means over answers; in grey those over right ones."
    if never:
        note += f" Not once: {', '.join(never)}."
    return f'<p class="note">{escape(note)}</p><div class="charts">{"".join(charts)}</div>'
