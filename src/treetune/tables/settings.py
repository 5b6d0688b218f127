"""The configurations of tables: `experiments` shows experiments that were run, `reproduction` runs its
own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from typing_extensions import override

from treetune.config.errors import did_you_mean
from treetune.config.registrable import Registrable
from treetune.contracts import Finding, Root
from treetune.tables.check import check_table
from treetune.tables.columns import MeasuredColumn, Name, Panel
from treetune.tables.statistics import (
    CONFIDENCE_LEVEL,
    MeanWithInterval,
    confidence_sequence,
    normal_sequence,
)


class Table(Registrable, Root, root="a table"):
    """The root of a table's configuration."""

    @override
    def examine(self, plain: Mapping[str, Any]) -> Iterable[str]:
        self.check_experiments()  # takes long, because it evaluates every experiment's configuration
        return ()  # no notes

    def check_experiments(self) -> None:
        """Checks the table against its experiments' configurations. Raises ConfigError with all mistakes."""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """An experiment of a table."""

    name: Annotated[str, MinLen(1)]
    """The title of the row, in its first cell."""
    experiment: Annotated[str, MinLen(1)]
    """The experiment's folder below the table's directory."""
    published: Annotated[float, Ge(0), Le(1)] | None = None
    """A published pass@1 to show next to the measured one."""
    source: str | None = None
    """The publication that has the published number."""
    optional: bool = False
    """Whether the row is left out where its experiment has not been evaluated. If false, this is an error."""


@Table.register("experiments")
@dataclass(frozen=True, kw_only=True)
class ExperimentsTable(Table):
    """Rows of experiments, each with one evaluation of one checkpoint."""

    rows: Annotated[tuple[TableRow, ...], MinLen(1)]
    output: str = "table.json"
    """The table's JSON file below `directory`. The same table as Markdown is written next to it."""
    title: str = ""
    """The title above the table."""
    directory: str = "experiments"
    """The folder of runs and of the table's files."""
    evaluation: str = "test"
    """The name of the evaluation set."""
    checkpoint: Literal["last", "best"] = "last"
    """The checkpoint that is reported: the last one that was measured on the set, or the best one by pass@1
    on `best_on`."""
    best_on: str = "validation"
    """The set on which the best checkpoint is chosen. It must differ from the reported set: a checkpoint that
    was chosen on the reported set looks better than it is."""

    @override
    def check(self, table: ExperimentsTable) -> Iterable[Finding]:
        """Yields the findings about this table. `table` is the configuration's root, which is `self`."""
        names = [row.name for row in self.rows]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            yield Finding(
                f"two rows have the same name: {', '.join(repeated)}", "rows", "give each its own name"
            )
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
    """An experiment that is run once for every seed of the table.

    The `seconds_…` state its cost, for estimates before any cost has been measured."""

    configs: Annotated[tuple[Name, ...], MinLen(1)]
    """The files of its configuration, as for ``--configs``."""
    overrides: tuple[str, ...] = ()
    """Jsonnet objects that are added to the configuration, as for ``--override``."""
    needs: tuple[Name, ...] = ()
    """The table's experiments that must finish first, such as the one that makes the start weights."""
    fork: Name | None = None
    """The experiment of `needs` that this one continues, by the command `fork`. Each run begins at the end of
    the other experiment's run with the same seed, with its weights, optimiser, problems and seeds. Its cost
    includes that of the run that it continues."""
    shared: bool = False
    """Whether the experiment is run only once, with `seed`, below ``<directory>/shared``, so that all methods
    and seeds start from it. In the experiments that name it in `needs`, paths into its folder, such as
    ``$.directory + '/sft/checkpoints/last/policy'``, lead there."""
    seed: Annotated[int, Ge(0)] = 1
    """The seed of a shared experiment. All other experiments have the table's seeds."""
    seconds_per_iteration: Annotated[float, Gt(0)] | None = None
    """The seconds that an iteration takes."""
    seconds_per_run: Annotated[float, Gt(0)] | None = None
    """The seconds that a run takes, with its start and its evaluations."""
    estimated_from: str | None = None
    """The source of `seconds_per_iteration` and `seconds_per_run`, shown with estimates."""


@dataclass(frozen=True, kw_only=True)
class CellSource:
    """The content of a row's cell in one column, where the cell doesn't just show the row's experiment.

    Example: `{experiment: "ppo_MATH", published: 0.181, source: "VinePPO, Table 1"}`.
    """

    experiment: Name | None = None
    """The experiment that fills the cell; null: the row's experiment."""
    value: Name | None = None
    """The key path of the cell's number in the analysis that the column shows; null: the column's key
    path."""
    published: float | None = None
    """A published number in the column's unit, with shares between 0 and 1 (0.534, not 53.4 percent)."""
    source: str | None = None
    """The publication that has the published number."""


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """A method of the table, such as PPO, with the experiments that measure it."""

    name: Name
    """The title of the row, in its first cell."""
    experiment: Name | None = None
    """The experiment of every column whose cell names no other one."""
    cells: Mapping[str, CellSource] = field(default_factory=dict)
    """The cells that differ from this, by the name of their column."""

    def cell(self, column: str) -> CellSource:
        """Returns the cell of a column. It is filled by the row's experiment unless it names another one.

        The `experiment` of the cell is None where nothing is measured.
        """
        cell = self.cells.get(column, CellSource())
        return replace(cell, experiment=cell.experiment or self.experiment)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two rows to compare."""

    row: Name
    """The row whose difference is shown."""
    to: Name
    """The row that it is compared with."""


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """The limits of how many of the table's seeds a row has. A row has the first seeds of the table's
    list."""

    at_least: Annotated[int, Ge(2)]
    """The smallest number of seeds."""
    at_most: Annotated[int, Ge(2)] | None = None
    """The largest number of seeds; null: all seeds of the table."""


@dataclass(frozen=True, kw_only=True)
class Until:
    """Adds seeds, in the table's order, until differences are measured precisely enough.

    The differences are those of `rows` to the `baseline`, or else the table's `comparisons`. A difference has
    enough seeds when its 95 % confidence sequence in `column` (null: the table's first column) has a
    half-width of at most `difference`. This is tested after each seed, from number `at_least` on. No seeds
    are added after the first with which there are enough, or after number `at_most`.

    A confidence sequence is valid at every look, so stopping early is allowed. It is also valid for every
    distribution: a row that collapses in one run of ten does not count as precise after eight runs that
    didn't. This costs seeds: for shares (`bound` 1) and seeds whose differences are all equal, the half-width
    is 0.28 with 16 seeds, 0.08 with 64 and 0.03 with 180. A smaller `bound` reduces it in proportion;
    ``assume: 'normal'`` needs fewer seeds still.

    The confidence sequence is about training on these problems; the table's interval covers other problems,
    too. The mean at the stopping point has a small bias, which the interval allows for.
    """

    difference: Annotated[float, Gt(0)]
    """The half-width to reach."""
    assume: Literal["bounded", "normal"] = "bounded"
    """``bounded`` is valid for every distribution of differences within `bound`. ``normal`` assumes a normal
    distribution of unknown spread, in which rare events such as a collapse don't occur. It needs far fewer
    seeds: with eight, its half-width is 4.4 standard errors."""
    stop_losers: bool = False
    """Whether a row gets no further seeds once the confidence sequence shows that it is worse than the other
    row."""
    bound: Annotated[float, Gt(0)] = 1.0
    """The largest possible difference between two runs, in either direction, even if one collapses."""
    rows: tuple[Name, ...] = ()
    """The rows whose differences to the baseline are measured; empty: the table's `comparisons` are."""
    seeds: Seeds
    """The limits of the number of seeds."""
    column: Name | None = None
    """The column in which differences are measured; null: the table's first column."""

    def sequence(self, differences: Sequence[float], level: float = CONFIDENCE_LEVEL) -> MeanWithInterval:
        """Returns the mean of the differences with the confidence sequence that `assume` names."""
        if self.assume == "normal":
            return normal_sequence(differences, level)
        return confidence_sequence(differences, self.bound, level)


@Table.register("reproduction")
@dataclass(frozen=True, kw_only=True)
class Reproduction(Table):
    """A table of methods (rows) by evaluation sets or analyses (columns); each cell is a mean over all seeds.

    Runs are in ``<directory>/seed-<seed>/<experiment_name>``, and those of shared experiments in
    ``<directory>/shared/<experiment_name>``. Tables with the same directory share their runs.
    """

    name: Name
    """The name of the table's files."""
    seeds: Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1)]
    """The seeds of the runs. Every experiment that isn't shared runs once with each seed. With `until`, only
    as many of them are run, in this order, as are needed."""
    experiments: Annotated[Mapping[str, TableExperiment], MinLen(1)]
    """The experiments to run, by their names in the table."""
    rows: Annotated[tuple[MethodRow, ...], MinLen(1)]
    columns: Annotated[tuple[MeasuredColumn, ...], MinLen(1)]
    title: str = ""
    """The title above the table."""
    directory: Name = "experiments"
    """The folder of runs and of the table's files."""
    panels: tuple[Panel, ...] = ()
    """The panels of one figure along training."""
    panels_over: PanelAxis = "iterations"
    """The x axis of the panels' figure."""
    baseline: Name | None = None
    """The row to which the differences of all other rows are shown, paired by seed and problem."""
    pairs: tuple[Pair, ...] = ()
    """Further differences to show, between any two rows."""
    comparisons: Annotated[tuple[Pair, ...], MaxLen(3)] = ()
    """The differences that answer the table's question, declared before anything runs. They need `until`. If
    there are any, only these differences are called better or worse, by confidence sequences that are valid
    at every look and hold together at 95 %."""
    until: Until | None = None
    """The rule that adds seeds. All rows have the first ``until.seeds.at_least`` seeds."""
    on_failure: Literal["go_on", "stop"] = "go_on"
    """What happens after a run has failed: the other runs go on, or everything stops."""
    interval: Literal["bootstrap", "student"] = "student"
    """The kind of intervals, see `statistics.interval_over_seeds_and_problems`."""
    deadline_hours: Annotated[float, Gt(0)] = 240.0
    """The hours after which a command of a run is ended, because it seems to hang."""
    notes: tuple[str, ...] = ()
    """Texts below the table."""

    @override
    def check(self, table: Reproduction) -> Iterable[Finding]:
        """Yields the findings about this table. `table` is the configuration's root, which is `self`."""
        yield from self._check_repeated_names()
        if "/" in self.name or self.name.startswith(".") or not self.name.isprintable():
            yield Finding(
                f"name {self.name!r} is not a plain file name, but the table's files are named after it",
                "name",
                "use letters, digits, '-' and '_'",
            )
        yield from self._check_named_rows()
        for number, row in enumerate(self.rows):
            yield from self._check_row(number, row)
        if self.until is not None:
            yield from self._check_until(self.until)
        elif self.comparisons:
            yield Finding(
                "comparisons decide how many seeds are run, but the table has no `until`",
                "comparisons",
                "give until: {difference: …, seeds: {at_least: …, at_most: …}}",
            )
        yield from self._check_needs()

    def _check_repeated_names(self) -> Iterator[Finding]:
        """Yields a finding for each name that two rows, columns, seeds or panels share."""
        names_by_key = {
            "rows": [row.name for row in self.rows],
            "columns": [column.name for column in self.columns],
            "seeds": list(map(str, self.seeds)),
            "panels": [panel.name for panel in self.panels],
        }
        for key, names in names_by_key.items():
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                yield Finding(
                    f"two {key} have the same name: {', '.join(repeated)}", key, "give each its own name"
                )

    def _check_named_rows(self) -> Iterator[Finding]:
        """Yields a finding for each setting that names an unknown row, and for each column whose row `over`
        has no experiment."""
        rows = [row.name for row in self.rows]
        # The key of each setting that may name a row, and the row that it names.
        named_rows: list[tuple[str, str | None]] = [("baseline", self.baseline)]
        for key, pairs in (("pairs", self.pairs), ("comparisons", self.comparisons)):
            for number, pair in enumerate(pairs):
                named_rows += [(f"{key}.{number}.row", pair.row), (f"{key}.{number}.to", pair.to)]
        for number, column in enumerate(self.columns):
            speedup_of = None if column.speedup is None else column.speedup.of
            named_rows.append((f"columns.{number}.speedup.of", speedup_of))
            named_rows.append((f"columns.{number}.over", column.over))
            if column.over in rows and self._experiment_of(column.over, column.name) is None:
                yield Finding(
                    f"column {column.name!r} is over the row {column.over!r}, which has no experiment",
                    f"columns.{number}.over",
                    "name a row with an experiment",
                )
        for key, named_row in named_rows:
            if named_row is not None and named_row not in rows:
                yield _finding_of_unknown_row(named_row, key, rows)

    def _check_needs(self) -> Iterator[Finding]:
        """Yields the findings about the experiments that other experiments need."""
        for name, experiment in self.experiments.items():
            if experiment.fork is not None and experiment.fork not in experiment.needs:
                yield Finding(
                    f"{name!r} continues from {experiment.fork!r}, which is not in its needs",
                    ("experiments", name, "fork"),
                    f"write needs: ['{experiment.fork}']",
                )
            for number, needed in enumerate(experiment.needs):
                need = ("experiments", name, "needs", str(number))
                yield from self._check_name(needed, need)
                if experiment.shared and needed in self.experiments and not self.experiments[needed].shared:
                    yield Finding(
                        f"{name!r} is shared by all seeds, but each seed has its own {needed!r}",
                        need,
                        f"make {needed!r} shared as well, or {name!r} not",
                    )
        all_needs: set[str] = set()
        for experiment in self.experiments.values():
            all_needs |= set(experiment.needs)
        try:
            if all_needs <= self.experiments.keys():  # unknown names have had their own findings
                self._sorter(list(self.experiments))  # raises CycleError for a circle
        except CycleError as error:
            _, circle = error.args  # the names in the circle; the first is also the last
            yield Finding(
                f"experiments need each other in a circle: {' → '.join(circle)}",
                ("experiments", circle[0], "needs"),
                "remove one of the needs",
            )

    def _check_row(self, number: int, row: MethodRow) -> Iterator[Finding]:
        columns = {column.name: column for column in self.columns}
        yield from self._check_name(row.experiment, ("rows", str(number), "experiment"))
        for name, cell in row.cells.items():
            key = ("rows", str(number), "cells", name)
            if name not in columns:
                yield Finding(
                    f"row {row.name!r} has a cell in column {name!r}, which does not exist",
                    key,
                    did_you_mean(name, list(columns)),
                )
                continue
            if cell.value is not None and columns[name].analysis is None:
                yield Finding(
                    f"a cell's value is a key path in an analysis, but column {name!r} shows no analysis",
                    (*key, "value"),
                    "remove the value, or give the column an analysis",
                )
            yield from self._check_name(cell.experiment, (*key, "experiment"))

    def _check_until(self, until: Until) -> Iterator[Finding]:
        rows, columns = [row.name for row in self.rows], [column.name for column in self.columns]
        for number, name in enumerate(until.rows):
            if name not in rows:
                yield _finding_of_unknown_row(name, f"until.rows.{number}", rows)
        # Seeds are added until the intervals of some differences are narrow: either those between the rows of
        # `until` and the baseline, or those of the table's comparisons.
        has_both = bool(until.rows) and bool(self.comparisons)
        has_neither = not until.rows and not self.comparisons
        if has_both or has_neither:
            yield Finding(
                "until adds seeds for its rows or for the table's comparisons, but there are "
                + ("both" if has_both else "neither"),
                "until.rows",
                "declare comparisons: [{row: …, to: …}], or name rows to compare with the baseline",
            )
        if until.rows and (self.baseline is None or self.baseline in until.rows):
            yield Finding(
                "until compares its rows with the baseline, but "
                + ("the table has none" if self.baseline is None else "the baseline is one of its rows"),
                "baseline" if self.baseline is None else "until.rows",
                "name another row as the baseline",
            )
        if until.column is not None and until.column not in columns:
            remedy = did_you_mean(until.column, columns)
            yield Finding(f"there is no column {until.column!r}", "until.column", remedy)
        else:
            yield from self._check_judged_rows(until)
        fewest_seeds = until.seeds.at_least
        most_seeds = len(self.seeds) if until.seeds.at_most is None else until.seeds.at_most
        if not fewest_seeds <= most_seeds <= len(self.seeds):
            yield Finding(
                f"until asks for {fewest_seeds} to {most_seeds} seeds, but the table has {len(self.seeds)}",
                "seeds",
                "name at least at_most seeds, and set at_least to at most at_most",
            )
            return
        # Can any result be narrow enough? Equal differences have the narrowest interval. With 'normal', its
        # half-width is 0, so it is always narrow enough.
        if until.assume == "normal":
            return
        # Here all differences are 0, so the interval lies around 0, and its upper end is its half-width.
        narrowest = confidence_sequence([0.0] * most_seeds, until.bound)
        if narrowest.high is not None and narrowest.high > until.difference:
            yield Finding(
                f"even {most_seeds} seeds with equal differences give a half-width of {narrowest.high:.2g}"
                f" with bound {until.bound:g}, and not {until.difference:g}: all seeds would always be run",
                "until.difference",
                "set a larger difference, name more seeds, set a smaller `bound` if runs can't differ as"
                " much, or remove `until` and name the seeds to run",
            )

    def _check_judged_rows(self, until: Until) -> Iterator[Finding]:
        """Yields a finding for each compared row that has no experiment in the column of `until`.

        Nothing is measured for such a row. So its difference to another row would never be known, and no seed
        would be added. The property `judged_column` is the column of `until`.
        """
        keys = {f"until.rows.{number}": name for number, name in enumerate(until.rows)}
        if until.rows and self.baseline is not None:
            keys["baseline"] = self.baseline
        for number, pair in enumerate(self.comparisons):
            keys |= {f"comparisons.{number}.row": pair.row, f"comparisons.{number}.to": pair.to}
        row_names = [row.name for row in self.rows]
        for key, name in keys.items():
            if name in row_names and self._experiment_of(name, self.judged_column.name) is None:
                yield Finding(
                    f"until compares the row {name!r} in column {self.judged_column.name!r}, where it has no"
                    " experiment",
                    key,
                    "give the row an experiment there, or compare another row",
                )

    def _experiment_of(self, row_name: str, column_name: str) -> str | None:
        """Returns the experiment that fills a row's cell, or None where nothing is measured."""
        row = next(row for row in self.rows if row.name == row_name)
        return row.cell(column_name).experiment

    @property
    def judged_column(self) -> MeasuredColumn:
        """The column whose differences decide how many seeds a row needs."""
        name = self.until.column if self.until is not None else None
        return next((column for column in self.columns if column.name == name), self.columns[0])

    @property
    def decisive_pairs(self) -> list[tuple[str, str]]:
        """The differences that decide how many seeds there are, each as (row, other row)."""
        if self.until is not None and self.baseline is not None and self.until.rows:
            return [(row, self.baseline) for row in self.until.rows]
        return [(pair.row, pair.to) for pair in self.comparisons]

    @property
    def level(self) -> float:
        """The level of each comparison's interval at which all of them together hold at 95 % (Bonferroni)."""
        return 1 - (1 - CONFIDENCE_LEVEL) / max(1, len(self.comparisons))

    @property
    def start_experiments(self) -> set[str]:
        """The experiments that others start from, such as an SFT."""
        names: set[str] = set()
        for experiment in self.experiments.values():
            names |= set(experiment.needs)
        return names

    @property
    def seeds_of_all_rows(self) -> tuple[int, ...]:
        """The seeds that every row has, without those that `until` adds to some rows."""
        return self.seeds if self.until is None else self.seeds[: self.until.seeds.at_least]

    def _check_name(self, name: str | None, key: tuple[str, ...]) -> Iterator[Finding]:
        if name is not None and name not in self.experiments:
            yield Finding(
                f"{name!r} is not one of the table's experiments",
                key,
                did_you_mean(name, list(self.experiments)),
            )

    @override
    def check_experiments(self) -> None:
        check_table(self)

    def order(self) -> list[str]:
        """Returns the experiments' names, each after those that it needs.

        First come the experiments that need no other, then those that need only these, and so on. Within each
        group the experiments are in the order of the rows, with those that no row shows at the end.
        """
        shown_names: list[str | None] = []
        for row in self.rows:
            shown_names += [row.cell(column.name).experiment for column in self.columns]
        if self.panels:  # they show a row's own experiment, also where all its cells name others
            shown_names += [row.experiment for row in self.rows]
        used_names = [name for name in shown_names if name is not None]
        names = list(dict.fromkeys([*used_names, *self.experiments]))
        sorter = self._sorter(names)
        ordered: list[str] = []
        while sorter.is_active():
            ready_names = sorted(sorter.get_ready(), key=names.index)
            ordered += ready_names
            sorter.done(*ready_names)
        return ordered

    def _sorter(self, names: Sequence[str]) -> TopologicalSorter[str]:
        """Returns a sorter that is ready for use. Raises CycleError where experiments need each other."""
        sorter = TopologicalSorter({name: self.experiments[name].needs for name in names})
        sorter.prepare()
        return sorter


def _finding_of_unknown_row(name: str, key: str, rows: Sequence[str]) -> Finding:
    return Finding(f"there is no row {name!r}", key, did_you_mean(name, rows))
