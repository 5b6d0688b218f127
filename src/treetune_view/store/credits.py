"""What several credit methods made of one answer: the run's own, `replay`'s, the microscope's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.runtime.analysis import read_result
from treetune_lab.analyzers.step_credit import Shown
from treetune_view.report.credit_table import Cell, Method, method_of
from treetune_view.store.catalogue import stat_of
from treetune_view.store.whole_answers import Answer

MICROSCOPE, REPLAY = "result.json", "advantages.jsonl"
"""What each analysis writes into its folder."""


def credits_of(run: Path, answer: Answer) -> list[Method]:
    """All analyses' of an iteration's answer. Those that can't be read are left out."""
    if answer.source.kind != "iteration":
        return []
    found = []
    for folder in sorted((run / "analyses").glob("*")):
        try:
            found += _of_microscope(folder, answer) or _of_replay(folder, answer)
        except (OSError, ValueError, KeyError, TypeError):  # written just now, or by another version
            continue
    return found


def mark_of_credits(run: Path) -> list[object]:
    """Another one as soon as analyses have found anything else."""
    files = [
        folder / name for folder in sorted((run / "analyses").glob("*")) for name in (MICROSCOPE, REPLAY)
    ]
    return [(str(path), stat_of(path)) for path in files]


def _of_microscope(folder: Path, answer: Answer) -> list[Method]:
    path = folder / MICROSCOPE
    if not path.is_file():
        return []
    result = read_result(folder)
    if result.get("analyzer") != "credit_microscope":
        return []
    looked = result["numbers"]["by_iteration"].get(str(answer.source.number - 1))
    rows = [row for row in looked["answers"] if row["answer"] == answer.row["answer"]] if looked else []
    return [
        method_of(name, credit, looked["costs"].get(name), folder.name)
        for row in rows
        for name, credit in row["credit"].items()
    ]


def _of_replay(folder: Path, answer: Answer) -> list[Method]:
    path = folder / REPLAY
    if not folder.name.startswith(f"replay-{answer.source.number:04d}") or not path.is_file():
        return []
    name = json.dumps(answer.row["answer"])
    with path.open() as file:
        for line in file:
            if name in line and (row := json.loads(line))["answer"] == answer.row["answer"]:
                return [
                    Method(f"replay, {variant}", tuple(_plain(row, variant)), folder.name)
                    for variant in row["advantages"]
                ]
    return []


def _plain(row: Mapping[str, Any], variant: str) -> Iterator[Cell]:
    values, advantages = row["values"].get(variant) or (), row["advantages"][variant] or ()
    for step in range(len(row["step_ends"])):
        yield Cell(_shown(values, step), _shown(advantages, step))


def _shown(numbers: Sequence[float | None], step: int) -> Shown | None:
    number = numbers[step] if step < len(numbers) else None
    return None if number is None else Shown(number)
