"""Rows that a strong model can't solve, and rows that a weak one solves nearly always."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from treetune_data.difficulty.rates import RATES_FILE, Rates
from treetune_data.rules.base import Rows, Rule, RuleContext, Verdict
from treetune_domains.domain_rows import HIGH_PASS_RATE, LOW_PASS_RATE


@Rule.register("pass_rates")
@dataclass(frozen=True, kw_only=True)
class PassRates(Rule):
    """Drops a row if the strong model's pass rate is `low` or less: it can't be solved; or if the weak
    model's is `high` or more: there is nothing to learn.

    `strong` and `weak` are folders (or their rates.parquet) that `estimate_difficulty` wrote; where one is
    null, the rows' own column counts, ``low_pass_rate`` for the strong model and ``high_pass_rate`` for the
    weak one. Rates that are there enter the rows under these names. A row without a rate is never taken for
    one of rate 0: it stays, goes, or stops the command, as `missing` says, and is counted.
    """

    low: Annotated[float, Ge(0), Le(1)] | None = 0.1
    """Strong model's rate at or below which a row goes; null: none goes."""
    high: Annotated[float, Ge(0), Le(1)] | None = 0.9
    """Weak model's rate at or above which a row goes; null: none goes."""
    strong: str | None = None
    weak: str | None = None
    missing: Literal["keep", "drop", "stop"] = "stop"
    name: str | None = None

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("low and high are both null, so that no row would go: set one, or leave it out")

    def reads(self) -> Sequence[Path]:
        return [_file(name) for name in (self.strong, self.weak) if name is not None]

    def judge(self, rows: Rows, context: RuleContext) -> Verdict:
        wanted: list[tuple[str, str, str | None, float | None]] = [
            (LOW_PASS_RATE, "strong", self.strong, self.low),
            (HIGH_PASS_RATE, "weak", self.weak, self.high),
        ]
        found: dict[int, str] = {}
        values: dict[str, dict[int, float]] = {}
        missing: Counter[str] = Counter()
        for column, who, place, bound in wanted:
            rates = None if place is None else Rates.read(_file(place))
            for one in rows:
                rate = rates.of(one.row) if rates is not None else one.row.get(column)
                if rate is None:
                    if bound is None:
                        continue
                    missing[who] += 1
                    why = f"no rate of the {who} model" + (f" in {place}" if place else f": no {column}")
                    if self.missing == "stop":
                        raise ValueError(
                            f"{one.place} has {why}: estimate its difficulty, or say with missing whether"
                            " such rows stay ('keep') or go ('drop')"
                        )
                    if self.missing == "drop":
                        found.setdefault(one.number, why)
                    continue
                if place is not None:
                    values.setdefault(column, {})[one.number] = rate
                if bound is None:
                    continue
                if column == LOW_PASS_RATE and rate <= bound:
                    found.setdefault(one.number, f"too hard: the strong model's rate is {rate:g}")
                elif column == HIGH_PASS_RATE and rate >= bound:
                    found.setdefault(one.number, f"too easy: the weak model's rate is {rate:g}")
        told = Counter(why.partition(":")[0] for why in found.values())
        return Verdict(found, {"why": dict(told.most_common()), "without_a_rate": dict(missing)}, values)


def _file(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise ValueError(
            f"there are no pass rates {name} (looked for in {Path.cwd()}): make them with"
            f" estimate_difficulty --output {name}, or set it to null where the rows hold their rates"
        )
    return path / RATES_FILE if path.is_dir() else path
