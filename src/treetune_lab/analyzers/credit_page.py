"""The numbers of credit methods as a table for readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treetune_lab.analyzers.credit_measures import told

COLUMNS = (
    ("method", "---"),
    ("tokens an answer ↓", "---:"),
    ("correlation ↑", "---:"),
    ("error ↓", "---:"),
    ("bias of values → 0", "---:"),
    ("right signs at the decisive step ↑", "---:"),
    ("cosine of a batch's gradient ↑", "---:"),
    ("its relative variance ↓", "---:"),
    ("seconds", "---:"),
)
MEASURED = ("correlation", "error", "bias", "decisive_signs")


def table(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown, a method in each."""
    lines = [f"| {' | '.join(name for name, _ in COLUMNS)} |", f"|{'|'.join(rule for _, rule in COLUMNS)}|"]
    for name, one in methods.items():
        cells = [
            name,
            f"{one['tokens_per_answer']:.0f}",
            *(told(one, key) for key in MEASURED),
            _plain(one.get("cosine"), 3),
            _plain(one.get("relative_variance"), 2),
            _plain(one["seconds"], 1),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _plain(number: float | None, digits: int) -> str:
    return "–" if number is None else f"{number:.{digits}f}"
