"""How the values of a column lie: counts in bins whose bounds are round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treetune_view.store.questions import Filter
from treetune_view.store.tables import CHARACTERS, Table

if TYPE_CHECKING:
    import duckdb

MOST_BARS = 24
RATE_STEP = 0.05
"""Of what lies between 0 and 1, such as pass rates; a rate of exactly 1 has a bar of its own."""

HAIR = 1e-9
"""Of a bin: a value that should be on its lower bound and isn't for the last bit is in it all the same."""


@dataclass(frozen=True)
class Bar:
    """`count` values are at least `low` and below `high`."""

    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Histogram:
    """Of `counted` values; `missing` rows have none, or one that is no finite number."""

    column: str
    bars: Sequence[Bar]
    counted: int
    missing: int
    mean: float
    median: float

    @property
    def unit(self) -> str:
        """What the values are counted in."""
        name = self.column.casefold()
        if name.endswith(CHARACTERS):
            return "characters"
        if "token" in name:
            return "tokens"
        return "share of answers that are right" if "pass_rate" in name else "value"

    @property
    def highest(self) -> int:
        return max(bar.count for bar in self.bars)


def histograms(
    table: Table, columns: Sequence[str], filters: Sequence[Filter], search: str
) -> list[Histogram]:
    """Of the columns' values in the rows that are like that, without those that have none. Raises ValueError
    for a column that isn't numeric."""
    check_numeric(table, columns)
    key = "histograms", tuple(columns), tuple(filters), search
    return table.remembered(key, lambda: _histograms(table, columns, filters, search)) if columns else []


def check_numeric(table: Table, columns: Sequence[str]) -> None:
    """Raises ValueError for a column that isn't numeric."""
    for name in columns:
        if name not in table.numeric():
            raise ValueError(f"{name!r} is no column of numbers: there are {', '.join(table.numeric())}")


def _histograms(
    table: Table, columns: Sequence[str], filters: Sequence[Filter], search: str
) -> list[Histogram]:
    numbers = table.numbers(columns, filters, search)
    found = [_histogram(numbers, name, f"x{i}") for i, name in enumerate(columns)]
    return [one for one in found if one is not None]


def _histogram(numbers: duckdb.DuckDBPyConnection, column: str, x: str) -> Histogram | None:
    facts = numbers.execute(
        f"SELECT count(*), count({x}), min({x}), max({x}), avg({x}), median({x}), bool_and({x} = floor({x}))"
        " FROM numbers"
    ).fetchone()
    assert facts is not None
    everything, counted, low, high, mean, median, whole = facts
    if not counted:
        return None
    step = bin_step(low, high, whole=whole)
    first = math.floor(low / step + HAIR)
    found = numbers.execute(
        f"SELECT floor({x} / {step!r} + {HAIR!r}) AS bin, count(*) FROM numbers"
        f" WHERE {x} IS NOT NULL GROUP BY bin"
    ).fetchall()
    counts = {int(bin) - first: count for bin, count in found}
    bars = [
        Bar(round_to((first + i) * step, step), round_to((first + i + 1) * step, step), counts.get(i, 0))
        for i in range(max(counts) + 1)
    ]
    return Histogram(column, bars, counted, everything - counted, mean, median)


def bin_step(low: float, high: float, *, whole: bool) -> float:
    """The width of bins: 1, 2 or 5 times a power of ten, and a whole number for whole numbers."""
    if not whole and low >= 0 and high <= 1:
        return RATE_STEP
    span = high / MOST_BARS - low / MOST_BARS  # not (high - low), which may be beyond what a float holds
    if span <= 0:
        return 1.0 if whole else 10.0 ** math.floor(math.log10(abs(high)))
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span * (1 - HAIR))
    return max(1.0, step) if whole else step


def round_to(value: float, step: float) -> float:
    """Without what multiplying has added: 0.15 and not 0.15000000000000002."""
    return round(value, max(0, 1 - math.floor(math.log10(step))))
