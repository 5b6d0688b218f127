"""How an answer with threads is drawn: what was written side by side stands side by side."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from treetune_view.report.sections.base import AnswerDrawing, Sampled
from treetune_view.report.sections.threads.answer import ThreadedAnswer
from treetune_view.report.sections.threads.drawing import NOTE, threads_html


class ThreadsDrawing(AnswerDrawing):
    note = NOTE

    def applies(self, row: Mapping[str, Any]) -> bool:
        return any(stretch["branch"] for stretch in row.get("stretches") or ())

    def html(self, row: Mapping[str, Any], sampled: Sampled | None, scale: float) -> str:
        if sampled is None:
            return threads_html(ThreadedAnswer(row, None, {}, scale))
        # Only if they are those that the row's stretches were made of.
        ends = list(accumulate(len(segment.token_ids) for segment in sampled.segments))
        segments = sampled.segments if ends == [stretch["end"] for stretch in row["stretches"]] else None
        return threads_html(ThreadedAnswer(row, segments, sampled.numbers, scale))
