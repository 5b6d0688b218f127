"""Answers with threads: what was recorded of them, how evaluations count them, and how one is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from treetune.reports.experiment import Experiment
from treetune.reports.sections.base import AnswerDrawing, ReportSection, Sampled
from treetune.reports.thread_curves import THREADS, thread_curves_html
from treetune.reports.thread_drawing import NOTE, threads_html
from treetune.reports.threads import ThreadedAnswer


class ThreadsSection(ReportSection):
    title = "Threads"

    def applies(self, experiment: Experiment) -> bool:
        return any(key.startswith(THREADS) for row in experiment.metrics for key in row)

    def html(self, experiment: Experiment) -> str:
        return thread_curves_html(experiment)

    def columns(self, summary: Mapping[str, Any]) -> Mapping[str, str]:
        threads = summary.get("threads") or {}
        if not threads:
            return {}
        longest, share = threads.get("num_tokens_in_the_longest_thread"), threads.get("with_parallel")
        return {
            "longest thread": "–" if longest is None else f"{longest:.1f}",
            "with threads": "–" if share is None else f"{share:.3f}",
        }


class ThreadsDrawing(AnswerDrawing):
    note = NOTE

    def applies(self, row: Mapping[str, Any]) -> bool:
        return any(stretch["branch"] for stretch in row.get("stretches") or ())

    def html(self, row: Mapping[str, Any], sampled: Sampled | None, scale: float) -> str:
        segments, notes = None, {}
        if sampled is not None:
            notes = dict(sampled.notes)
            # Only if they are those that the row's stretches were made of.
            ends = list(accumulate(len(segment.token_ids) for segment in sampled.segments))
            segments = sampled.segments if ends == [stretch["end"] for stretch in row["stretches"]] else None
        return threads_html(ThreadedAnswer(row, segments, notes, scale))
