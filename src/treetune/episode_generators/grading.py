"""Grading while others are still sampling."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from treetune.vocabulary import Grade, Problem

if TYPE_CHECKING:
    from treetune.tasks.graders.pool import GraderPool


class Grading:
    """Grades of answers as they come in; equal answers to one problem are graded once.

    Graders are pure, so a repeated answer needs no second verdict: of short answers and of
    continuations from late states most are repeats.
    """

    def __init__(self, pool: GraderPool) -> None:
        self._pool = pool
        self._verdicts: dict[tuple[str, str], Future[Grade]] = {}

    def submit(self, response: str, problem: Problem) -> Future[Grade]:
        key = (problem.id, response)
        if key not in self._verdicts:
            self._verdicts[key] = self._pool.submit(response, problem)
        return self._verdicts[key]
