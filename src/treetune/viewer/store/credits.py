"""What several credit methods made of one answer: the run's own, `replay`'s, the microscope's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetune.viewer.store.catalogue import stat_of
from treetune.viewer.store.whole_answers import Answer

MICROSCOPE, REPLAY = "result.json", "advantages.jsonl"
"""What each analysis writes into its folder."""


@dataclass(frozen=True)
class Cell:
    """Of one step: the value before it and its advantage, each with its 95 % interval where one is known."""

    value: float | None
    value_interval: tuple[float, float] | None
    advantage: float | None
    advantage_interval: tuple[float, float] | None


@dataclass(frozen=True)
class Method:
    """What one method gives the steps of an answer, which ends at these tokens where it says so; `found_by`
    names the analysis, and `cost` is what it sampled for an answer."""

    name: str
    found_by: str
    cells: tuple[Cell, ...]
    cost: str = ""

    @property
    def scale(self) -> float:
        """Methods have units of their own: each is coloured fully at its largest advantage."""
        return (
            max((abs(one.advantage) for one in self.cells if one.advantage is not None), default=0.0) or 1.0
        )


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
    result = json.loads(path.read_text())
    if result.get("analyzer") != "credit_microscope":
        return []
    looked = result["numbers"]["by_iteration"].get(str(answer.source.number - 1))
    rows = [row for row in looked["answers"] if row["answer"] == answer.row["answer"]] if looked else []
    return [
        Method(name, folder.name, tuple(_cells(credit)), _cost(looked["costs"].get(name)))
        for row in rows
        for name, credit in row["credit"].items()
    ]


def _cells(credit: Mapping[str, Any]) -> Iterator[Cell]:
    for value, advantage in zip(credit["values"], credit["advantages"], strict=True):
        yield Cell(*_shown(value), *_shown(advantage))


def _shown(one: Mapping[str, Any] | None) -> tuple[float | None, tuple[float, float] | None]:
    if one is None:
        return None, None
    known = one["low"] is not None and one["high"] is not None
    return one["value"], (one["low"], one["high"]) if known else None


def _cost(cost: Mapping[str, float] | None) -> str:
    return f"{cost['tokens_per_answer']:.0f} tokens an answer" if cost else ""


def _of_replay(folder: Path, answer: Answer) -> list[Method]:
    path = folder / REPLAY
    if not folder.name.startswith(f"replay-{answer.source.number:04d}") or not path.is_file():
        return []
    name = json.dumps(answer.row["answer"])
    with path.open() as file:
        for line in file:
            if name in line and (row := json.loads(line))["answer"] == answer.row["answer"]:
                return [
                    Method(f"replay, {variant}", folder.name, tuple(_plain(row, variant)))
                    for variant in row["advantages"]
                ]
    return []


def _plain(row: Mapping[str, Any], variant: str) -> Iterator[Cell]:
    values, advantages = row["values"].get(variant) or (), row["advantages"][variant] or ()
    for step in range(len(row["step_ends"])):
        yield Cell(
            values[step] if step < len(values) else None,
            None,
            advantages[step] if step < len(advantages) else None,
            None,
        )
