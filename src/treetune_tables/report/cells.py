"""What a table's cells hold: numbers by seed, estimates, and how rows differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from treetune_tables.columns import Column
from treetune_tables.intervals import Estimate
from treetune_tables.report.costs import Cost
from treetune_tables.report.paired import LEVEL
from treetune_tables.runs import Plan
from treetune_tables.settings import MethodRow, Reproduction


@dataclass(frozen=True)
class SeedResult:
    """One seed's number. `by_problem` (each problem's mean) where it is a mean over answers."""

    seed: int
    value: float
    directory: str
    config_hash: str
    iteration: int
    by_problem: Mapping[str, float] | None = None
    samples: int | None = None
    bounds: tuple[float, float] | None = None
    """An analysis' own interval, over what it looked at."""


@dataclass(frozen=True)
class Comparison:
    """A row less another one, in one column, over the seeds that both have, paired by seed and problem.

    `p` is that of a mean difference of 0 (None where nothing says how much it varies), and `adjusted` what it
    is among all comparisons of the table.
    """

    row: str
    to: str
    column: Column
    seeds: int
    difference: Estimate
    p: float | None = None
    adjusted: float | None = None

    @property
    def called(self) -> str | None:
        """The way it goes, where its interval leaves out 0 and `adjusted` is below 0.05: "better" or "worse",
        or where neither way is better "higher" or "lower". Elsewhere None: the two are not told apart."""
        if self.adjusted is None or self.adjusted >= LEVEL or not self.difference.excludes_zero:
            return None
        up = self.difference.mean > 0
        if self.column.improves == "neither":
            return "higher" if up else "lower"
        return "better" if up == (self.column.improves == "higher") else "worse"


@dataclass(frozen=True)
class CellResult:
    """One cell. `estimate` is None where no seed is measured; `absent` says why, by seed.

    `against` is how it differs from the baseline's cell in the same column.
    """

    row: MethodRow
    column: Column
    seeds: tuple[SeedResult, ...] = ()
    absent: Mapping[int, str] = field(default_factory=dict)
    estimate: Estimate | None = None
    against: Comparison | None = None
    notes: tuple[str, ...] = ()

    @property
    def published(self) -> float | None:
        return self.row.cell(self.column.name).published

    @property
    def source(self) -> str | None:
        return self.row.cell(self.column.name).source

    @property
    def experiment(self) -> str | None:
        return self.row.cell(self.column.name).experiment

    @property
    def difference(self) -> Estimate | None:
        return None if self.against is None else self.against.difference

    @property
    def called(self) -> str | None:
        return None if self.against is None else self.against.called

    def is_shared(self, table: Reproduction) -> bool:
        """Whether all seeds share the one run that it shows."""
        return self.experiment is not None and table.experiments[self.experiment].shared


@dataclass(frozen=True)
class Results:
    """All cells by (row, column), costs by the table's experiment, comparisons of rows that are not with the
    baseline, and how many comparisons there are in all."""

    plan: Plan
    cells: Mapping[tuple[str, str], CellResult]
    costs: Mapping[str, list[Cost]]
    pairs: Sequence[Comparison] = ()
    comparisons: int = 0
