"""A few of the newest answers, read from the beginning of their file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from treetune.runtime.directory import verify_answers
from treetune_view.store import Run
from treetune_view.store.batches import walk
from treetune_view.store.sources import Source, sources


@dataclass(frozen=True)
class Answer:
    """`score` is None where nobody could grade."""

    problem: str
    sample: int
    score: float | None
    outcome: str
    text: str


def newest_answers(run: Run, count: int) -> tuple[str, list[Answer]]:
    """In words what they are (of the newest iteration, else the newest evaluation), and `count` of them.

    One of each problem as far as there are so many in what is read. Raises ValueError for a damaged file.
    """
    found = sources(run)
    if not found:
        return "", []
    sampled = [one for one in found if one.kind == "iteration"]
    chosen = (sampled or found)[-1]
    read = _lines(chosen) if chosen.kind == "evaluation" else _batches(chosen)
    first: dict[str, Answer] = {}
    for answer in read:
        first.setdefault(answer.problem, answer)
        if len(first) == count:
            break
    return f"{chosen.things} of {chosen.words}", list(first.values())


def _lines(source: Source) -> Iterator[Answer]:
    verify_answers(source.path)
    with source.path.open(encoding="utf-8") as file:
        for line in islice(file, 1000):
            row = json.loads(line)
            known = (row["problem"], row["sample"], row.get("reward"), row.get("outcome", ""))
            yield Answer(*known, row.get("text") or "")


def _batches(source: Source) -> Iterator[Answer]:
    """Of the first batch; episodes of demonstrations have a group where answers have a problem."""
    walking = walk(source.path, ["problem", "sample", "grade", "text", "group", "reward"])
    next(walking)
    for batch, _ in islice(walking, 1):
        for row in batch.to_pylist():
            yield _answer(row)


def _answer(row: Mapping[str, Any]) -> Answer:
    if "problem" not in row:
        return Answer(row.get("group") or "", 0, row.get("reward"), "", row.get("text") or "")
    grade = row["grade"]
    score = None if grade["outcome"] == "unavailable" else grade["reward"]
    return Answer(row["problem"]["id"], row["sample"], score, grade["outcome"], row.get("text") or "")
