"""The configurations of tables: of experiments that were run, and of ones that the table runs itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from typing_extensions import override

from treetune.config.errors import did_you_mean
from treetune.config.registrable import Registrable
from treetune.contracts import Finding, Root
from treetune.tables.columns import MeasuredColumn, Name, Panel
from treetune.tables.statistics import LEVEL, MeanWithInterval, confidence_sequence, normal_sequence


class Table(Registrable, Root, root="a table"):
    """The root of a table's configuration."""

    @override
    def examine(self, plain: Mapping[str, Any]) -> Iterable[str]:
        self.check_experiments()
        return ()

    def check_experiments(self) -> None:
        """Checks what can't be seen in the table alone. Raises ValueError that names all that is wrong."""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """An experiment of a table."""

    name: Annotated[str, MinLen(1)]
    """Stands in the row's first cell."""
    experiment: Annotated[str, MinLen(1)]
    """The experiment's folder below the table's directory."""
    published: Annotated[float, Ge(0), Le(1)] | None = None
    """A pass@1 to stand beside the measured one."""
    source: str | None = None
    """The place where that was published."""
    optional: bool = False
    """Leaves the row out where its experiment has not been evaluated."""


@Table.register("experiments")
@dataclass(frozen=True, kw_only=True)
class ExperimentsTable(Table):
    """Rows of experiments, each with one evaluation of one checkpoint."""

    rows: Annotated[tuple[TableRow, ...], MinLen(1)]
    output: str = "table.json"
    """A file below `directory`; beside it goes the same table as Markdown."""
    title: str = ""
    """Stands above the table."""
    directory: str = "experiments"
    """The folder of runs and of the table's files."""
    evaluation: str = "test"
    """The name of the evaluation set."""
    checkpoint: Literal["last", "best"] = "last"
    """The last checkpoint that was measured on the set, or the best by pass@1 on `best_on`."""
    best_on: str = "validation"
    """Another set: to choose on the set that is reported would flatter every row."""

    @override
    def check(self, table: ExperimentsTable) -> Iterable[Finding]:
        names = [row.name for row in self.rows]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield Finding(f"two rows are called {', '.join(twice)}", "rows", "give each row its own name")
        if not self.output.endswith(".json"):
            yield Finding(
                f"output {self.output!r} must end in .json; the Markdown file is named after it",
                "output",
                "write e.g. 'table.json'",
            )
        if self.checkpoint == "best" and self.best_on == self.evaluation:
            yield Finding(
                f"best_on is {self.best_on!r}, the set that is reported",
                "best_on",
                "choose the checkpoint on another one",
            )


PanelAxis = Literal["iterations", "tokens", "seconds", "steps"]


@dataclass(frozen=True, kw_only=True)
class TableExperiment:
    """An experiment, run once for every seed of the table, with its cost where none has been measured yet."""

    configs: Annotated[tuple[Name, ...], MinLen(1)]
    """Files, as behind ``--configs``."""
    overrides: tuple[str, ...] = ()
    """Objects, as behind ``--override``."""
    needs: tuple[Name, ...] = ()
    """The table's experiments that must be finished before, such as the one that makes the start weights."""
    fork: Name | None = None
    """The one of `needs`, of the same seed, from whose state it goes on after its last iteration: weights,
    optimiser, problems and seeds (the command `fork`); its own cost has that of the fork's stem in it."""
    shared: bool = False
    """Runs it once in all, with `seed`, below ``<directory>/shared``: a start of every method and seed."""
    seed: Annotated[int, Ge(0)] = 1
    """The seed of an experiment that is shared; others have the table's."""
    seconds_per_iteration: Annotated[float, Gt(0)] | None = None
    """Seconds of an iteration."""
    seconds_per_run: Annotated[float, Gt(0)] | None = None
    """Seconds of a run with its start and its evaluations."""
    estimated_from: str | None = None
    """The source of these seconds."""


@dataclass(frozen=True, kw_only=True)
class CellSource:
    """The content of one column of a row, where that is not the row's own experiment."""

    experiment: Name | None = None
    """The experiment that fills it; None: the row's."""
    value: Name | None = None
    """A key path in the analysis that the column shows, where it isn't the column's."""
    published: float | None = None
    """A published number in the column's own unit: a share (0.534), not percent."""
    source: str | None = None
    """The place where that was published."""


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """A method."""

    name: Name
    """Stands in the row's first cell."""
    experiment: Name | None = None
    """The experiment of every column that has no cell."""
    cells: Mapping[str, CellSource] = field(default_factory=dict)
    """Cells by column name."""

    def cell(self, column: str) -> CellSource:
        """The cell with its experiment filled in; without one where nothing is measured."""
        own = self.cells.get(column, CellSource())
        return CellSource(
            experiment=own.experiment or self.experiment,
            value=own.value,
            published=own.published,
            source=own.source,
        )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two rows to compare."""

    row: Name
    """The row whose difference is shown."""
    to: Name
    """The row that it is compared with."""


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """The number of the table's seeds that a row has: the first `at_least`, and at most `at_most` (None:
    all)."""

    at_least: Annotated[int, Ge(2)]
    at_most: Annotated[int, Ge(2)] | None = None


@dataclass(frozen=True, kw_only=True)
class Until:
    """Adds seeds, in the order of the table's, until differences are known well enough.

    A row of `rows` (its difference to the `baseline`), or else each of the table's `comparisons`, has enough
    seeds when the 95 % confidence sequence of the difference in `column` (None: the table's first) reaches
    no further than `difference` to each side on average: half its width. It is asked after every seed from
    `at_least` on, and stops at the first that is enough or at `at_most`. A confidence sequence holds at every
    look, so wherever that is, and with whatever distribution: a row that collapses in one run of ten is not
    taken for known after eight runs that didn't. That costs seeds: with differences of shares (`bound` 1), of
    seeds that all come out alike, 16 know it to 0.28, 64 to 0.08 and 180 to 0.03. A smaller `bound` makes it
    cheaper in proportion, and `assume` cheaper still. It is of what training gives on these problems; the
    table's interval is of other problems, too. The mean where it stops is not quite unbiased; the interval is
    what holds.
    """

    difference: Annotated[float, Gt(0)]
    assume: Literal["bounded", "normal"] = "bounded"
    """``bounded`` holds whatever the differences' distribution within `bound`. ``normal`` takes them for
    normal with an unknown spread, and knows of nothing rare; it needs far fewer seeds: with eight, half of it
    is 4.4 standard errors."""
    stop_losers: bool = False
    """Whether a row gets no further seeds once its confidence sequence has it worse than the other."""
    bound: Annotated[float, Gt(0)] = 1.0
    """The most that two runs can differ by, to either side, whatever happens to one of them."""
    rows: tuple[Name, ...] = ()
    seeds: Seeds
    column: Name | None = None

    def sequence(self, differences: Sequence[float], level: float = LEVEL) -> MeanWithInterval:
        if self.assume == "normal":
            return normal_sequence(differences, level)
        return confidence_sequence(differences, self.bound, level)


@Table.register("reproduction")
@dataclass(frozen=True, kw_only=True)
class Reproduction(Table):
    """Rows of methods, columns of evaluation sets or analyses, every cell over all seeds.

    Runs go to ``<directory>/seed-<seed>/<experiment_name>``, shared ones to
    ``<directory>/shared/<experiment_name>``; tables may share a directory and with it their runs.
    """

    name: Name
    """The name of the table's files."""
    seeds: Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1)]
    """Every experiment that isn't shared is run once with each; with `until`, those that may be run."""
    experiments: Annotated[Mapping[str, TableExperiment], MinLen(1)]
    """The experiments to run, by their names in the table."""
    rows: Annotated[tuple[MethodRow, ...], MinLen(1)]
    columns: Annotated[tuple[MeasuredColumn, ...], MinLen(1)]
    title: str = ""
    """Stands above the table."""
    directory: Name = "experiments"
    """The folder of runs and of the table's files."""
    panels: tuple[Panel, ...] = ()
    """The panels of one figure along training."""
    panels_over: PanelAxis = "iterations"
    """The axis of that figure."""
    baseline: Name | None = None
    """The row from which differences are taken, paired by seed and problem."""
    pairs: tuple[Pair, ...] = ()
    """Further differences."""
    comparisons: Annotated[tuple[Pair, ...], MaxLen(3)] = ()
    """The differences that the table is made for, named before anything is run; with `until`. They alone are
    called better or worse, by confidence sequences that hold at every look and at 95 % for all together."""
    until: Until | None = None
    """Adds seeds; all rows have the first ``until.seeds.at_least`` of them."""
    on_failure: Literal["go_on", "stop"] = "go_on"
    """Goes on with the other runs after one has failed, or stops."""
    interval: Literal["bootstrap", "student"] = "student"
    """The kind of intervals, see `statistics.over_seeds_and_problems`."""
    deadline_hours: Annotated[float, Gt(0)] = 240.0
    """Hours after which a run that hangs is ended."""
    notes: tuple[str, ...] = ()
    """Stand below the table."""

    @override
    def check(self, table: Reproduction) -> Iterable[Finding]:
        rows, columns = [row.name for row in self.rows], [column.name for column in self.columns]
        named = {"rows": rows, "columns": columns, "seeds": list(map(str, self.seeds))}
        named["panels"] = [panel.name for panel in self.panels]
        for what, names in named.items():
            if twice := sorted({name for name in names if names.count(name) > 1}):
                yield Finding(
                    f"two {what} are called {', '.join(twice)}",
                    what,
                    "name each once: each stands for itself",
                )
        if "/" in self.name or self.name.startswith(".") or not self.name.isprintable():
            yield Finding(
                f"name {self.name!r} is no plain file name, and the table's files are called after it",
                "name",
                "take letters, digits, '-' and '_'",
            )
        named_rows: list[tuple[str, str | None]] = [("baseline", self.baseline)]
        for key, pairs in (("pairs", self.pairs), ("comparisons", self.comparisons)):
            for number, pair in enumerate(pairs):
                named_rows += [(f"{key}.{number}.row", pair.row), (f"{key}.{number}.to", pair.to)]
        for number, one in enumerate(self.columns):
            of = None if one.speedup is None else one.speedup.of
            named_rows += [(f"columns.{number}.speedup.of", of), (f"columns.{number}.over", one.over)]
            if one.over in rows and self.rows[rows.index(one.over)].cell(one.name).experiment is None:
                yield Finding(
                    f"column {one.name!r} is over the row {one.over!r}, which has no experiment there",
                    f"columns.{number}.over",
                    "name a row with one",
                )
        for key, named_row in named_rows:
            if named_row is not None and named_row not in rows:
                yield _no_row(named_row, key, rows)
        for number, row in enumerate(self.rows):
            yield from self._check_row(number, row)
        if self.until is not None:
            yield from self._check_until(self.until)
        elif self.comparisons:
            yield Finding(
                "comparisons are looked at while seeds are run, and the table doesn't say until when",
                "comparisons",
                "give until: {difference: …, seeds: {at_least: …, at_most: …}}",
            )
        for name, experiment in self.experiments.items():
            if experiment.fork is not None and experiment.fork not in experiment.needs:
                yield Finding(
                    f"{name!r} goes on from {experiment.fork!r}, which isn't among what it needs",
                    ("experiments", name, "fork"),
                    f"write needs: ['{experiment.fork}']",
                )
            for number, needed in enumerate(experiment.needs):
                need = ("experiments", name, "needs", str(number))
                yield from self._check_name(needed, need)
                if experiment.shared and needed in self.experiments and not self.experiments[needed].shared:
                    yield Finding(
                        f"{name!r} is shared by all seeds, and every seed has its own {needed!r}",
                        need,
                        f"make {needed!r} shared as well, or {name!r} not",
                    )
        try:
            if all(needed in self.experiments for one in self.experiments.values() for needed in one.needs):
                self._sorter(list(self.experiments))
        except CycleError as error:
            yield Finding(
                f"experiments need each other in a circle: {' → '.join(error.args[1])}",
                ("experiments", error.args[1][0], "needs"),
                "leave one of the needs out",
            )

    def _check_row(self, number: int, row: MethodRow) -> Iterator[Finding]:
        columns = {column.name: column for column in self.columns}
        yield from self._check_name(row.experiment, ("rows", str(number), "experiment"))
        for name, cell in row.cells.items():
            key = ("rows", str(number), "cells", name)
            if name not in columns:
                yield Finding(
                    f"row {row.name!r} has a cell in column {name!r}, which is none",
                    key,
                    did_you_mean(name, list(columns)),
                )
                continue
            if cell.value is not None and columns[name].analysis is None:
                yield Finding(
                    f"a cell's value is a key path in an analysis, and column {name!r} has none",
                    (*key, "value"),
                    "leave it out, or give the column an analysis",
                )
            yield from self._check_name(cell.experiment, (*key, "experiment"))

    def _check_until(self, until: Until) -> Iterator[Finding]:
        rows, columns = [row.name for row in self.rows], [column.name for column in self.columns]
        for number, name in enumerate(until.rows):
            if name not in rows:
                yield _no_row(name, f"until.rows.{number}", rows)
        if bool(until.rows) == bool(self.comparisons):
            yield Finding(
                "until adds seeds to its rows or to the table's comparisons, and there are "
                + ("both" if until.rows else "neither"),
                "until.rows",
                "declare comparisons: [{row: …, to: …}], or name rows to compare with the baseline",
            )
        if until.rows and (self.baseline is None or self.baseline in until.rows):
            yield Finding(
                "until adds seeds until differences to the baseline are known, and "
                + ("the table has none" if self.baseline is None else "the baseline is one of its rows"),
                "baseline" if self.baseline is None else "until.rows",
                "name another row as the baseline",
            )
        if until.column is not None and until.column not in columns:
            remedy = did_you_mean(until.column, columns)
            yield Finding(f"there is no column {until.column!r}", "until.column", remedy)
        least, most = until.seeds.at_least, until.seeds.at_most
        if (most is not None and most < least) or max(least, most or 0) > len(self.seeds):
            yield Finding(
                f"until asks for {least} to {most or len(self.seeds)} seeds, and the table names"
                f" {len(self.seeds)}",
                "seeds",
                "name as many as at_most, and at_least no more than that",
            )
            return
        if until.assume == "normal":
            return
        count = most or len(self.seeds)
        alike = confidence_sequence([0.0] * count, until.bound)
        if alike.high is not None and alike.high > until.difference:
            yield Finding(
                f"{count} seeds that all come out alike, where they could differ by ±{until.bound:g}, tell a"
                f" difference to {alike.high:.2g} and not to {until.difference:g}: all would always be run",
                "until.difference",
                "ask for a larger difference, name more seeds, say a smaller `bound` where runs can't differ"
                " as much, or leave `until` out and name the seeds to be run",
            )

    @property
    def judged(self) -> MeasuredColumn:
        """The column whose differences say how many seeds a row needs."""
        name = self.until.column if self.until is not None else None
        return next((column for column in self.columns if column.name == name), self.columns[0])

    @property
    def decisive_pairs(self) -> list[tuple[str, str]]:
        """The differences, as (row, other row), that say how many seeds there are."""
        rows = () if self.until is None or self.baseline is None else self.until.rows
        pairs = [(row, self.baseline or row) for row in rows]
        return pairs or [(pair.row, pair.to) for pair in self.comparisons]

    @property
    def level(self) -> float:
        """That of each difference's interval, so that those of all comparisons hold at 95 % (Bonferroni)."""
        return 1 - (1 - LEVEL) / max(1, len(self.comparisons))

    @property
    def seeds_of_all_rows(self) -> tuple[int, ...]:
        return self.seeds if self.until is None else self.seeds[: self.until.seeds.at_least]

    def _check_name(self, name: str | None, key: tuple[str, ...]) -> Iterator[Finding]:
        if name is not None and name not in self.experiments:
            yield Finding(
                f"{name!r} is none of the table's experiments",
                key,
                did_you_mean(name, list(self.experiments)),
            )

    @override
    def check_experiments(self) -> None:
        from treetune.tables.check import check

        check(self)

    def order(self) -> list[str]:
        """The experiments' names, each after those that it needs, else in the order of the rows."""
        used = [row.cell(column.name).experiment for row in self.rows for column in self.columns]
        used += [row.experiment for row in self.rows if self.panels]
        names = list(dict.fromkeys([*(name for name in used if name is not None), *self.experiments]))
        sorter = self._sorter(names)
        ordered: list[str] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready(), key=names.index)
            ordered += ready
            sorter.done(*ready)
        return ordered

    def _sorter(self, names: Sequence[str]) -> TopologicalSorter[str]:
        """Raises CycleError."""
        sorter = TopologicalSorter({name: self.experiments[name].needs for name in names})
        sorter.prepare()
        return sorter


def _no_row(name: str, key: str, rows: Sequence[str]) -> Finding:
    return Finding(f"there is no row {name!r}", key, did_you_mean(name, rows))
