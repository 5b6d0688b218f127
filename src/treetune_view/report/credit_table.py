"""What credit methods gave the steps of one answer, as `credits` in ``parts.html`` shows it side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from treetune_lab.analyzers.step_credit import Shown


@dataclass(frozen=True)
class Cell:
    """Of one step: the value before it and its advantage, each with its 95 % interval where one is known."""

    value: Shown | None
    advantage: Shown | None


@dataclass(frozen=True)
class Method:
    """What one method gives the steps of an answer. `found_by` names the analysis, and `cost` is what it
    sampled for an answer."""

    name: str
    cells: tuple[Cell, ...]
    found_by: str = ""
    cost: str = ""

    @property
    def scale(self) -> float:
        """Methods have units of their own: each is coloured fully at its largest advantage."""
        sizes = [abs(one.advantage.value) for one in self.cells if one.advantage is not None]
        return max(sizes, default=0.0) or 1.0


def method_of(name: str, credit: Mapping[str, Any], cost: Mapping[str, float] | None, by: str = "") -> Method:
    """From what `StepCredit.plain` gave, as the credit microscope writes it."""
    words = f"{cost['tokens_per_answer']:.0f} tokens an answer" if cost else ""
    return Method(name, tuple(_cells(credit)), by, words)


def _cells(credit: Mapping[str, Any]) -> Iterator[Cell]:
    for value, advantage in zip(credit["values"], credit["advantages"], strict=True):
        yield Cell(value and Shown(**value), Shown(**advantage))
