"""What a reproduction is: experiments, seeds, and the table that they fill, as one configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Literal

from annotated_types import Ge, Gt, MinLen

from treetune.config.errors import did_you_mean
from treetune.contracts import Finding
from treetune.tables.base import Table
from treetune.tables.columns import Column, Name, Panel

PanelAxis = Literal["iterations", "tokens", "seconds", "steps"]


@dataclass(frozen=True, kw_only=True)
class TableExperiment:
    """One experiment, run once for every seed of the table: ``--configs`` and ``--override``.

    `needs` are the experiments (by their names in the table) that must be finished before, such as
    the one that makes the start weights. `seconds_per_iteration` is what an iteration may cost
    where none has been measured yet, and `estimated_from` says where that number is from.
    """

    configs: Annotated[tuple[Name, ...], MinLen(1)]
    """Files, as behind ``--configs``."""
    overrides: tuple[str, ...] = ()
    """Objects, as behind ``--override``."""
    needs: tuple[Name, ...] = ()
    seconds_per_iteration: Annotated[float, Gt(0)] | None = None
    estimated_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What stands in one column of a row, where that is not the row's own experiment.

    `published` is in the column's own unit: a share (0.534), not percent. `source` says where.
    """

    experiment: Name | None = None
    """The experiment that fills it; None: the row's."""
    value: Name | None = None
    """A key path in the analysis that the column shows, where it isn't the column's."""
    published: float | None = None
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One method. `experiment` fills every column that `cells` (by column name) doesn't say otherwise."""

    name: Name
    """Stands in the row's first cell."""
    experiment: Name | None = None
    cells: Mapping[str, Cell] = field(default_factory=dict)

    def cell(self, column: str) -> Cell:
        """The cell with its experiment filled in; without one where nothing is measured."""
        own = self.cells.get(column, Cell())
        return Cell(
            experiment=own.experiment or self.experiment,
            value=own.value,
            published=own.published,
            source=own.source,
        )


@Table.register("reproduction")
@dataclass(frozen=True, kw_only=True)
class Reproduction(Table):
    """Rows of methods, columns of evaluation sets or analyses, every cell over all seeds.

    Runs go to ``<directory>/seed-<seed>/<experiment_name>``; tables may share a directory and with
    it their runs. Files of the table are called after `name`. Differences are taken from the row
    `baseline`, paired by seed and problem. `on_failure` says whether the other runs go on after one
    has failed. `interval` is described in `intervals`. `deadline_hours` ends a run that hangs.
    `panels` make one figure along training, over `panels_over`.
    """

    name: Name
    seeds: Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1)]
    """Every experiment is run once with each."""
    experiments: Annotated[Mapping[str, TableExperiment], MinLen(1)]
    rows: Annotated[tuple[MethodRow, ...], MinLen(1)]
    columns: Annotated[tuple[Column, ...], MinLen(1)]
    title: str = ""
    """Stands above the table."""
    directory: Name = "experiments"
    """Where runs and the table's files are kept."""
    panels: tuple[Panel, ...] = ()
    panels_over: PanelAxis = "iterations"
    baseline: Name | None = None
    on_failure: Literal["go_on", "stop"] = "go_on"
    interval: Literal["bootstrap", "student"] = "student"
    deadline_hours: Annotated[float, Gt(0)] = 240.0
    notes: tuple[str, ...] = ()
    """Stand below the table."""

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
        if self.baseline is not None and self.baseline not in rows:
            yield _no_row(self.baseline, "baseline", rows)
        for place, one in enumerate(self.columns):
            if one.speedup is not None and one.speedup.of not in rows:
                yield _no_row(one.speedup.of, f"columns.{place}.speedup.of", rows)
            if one.over is None:
                continue
            if one.over not in rows:
                yield _no_row(one.over, f"columns.{place}.over", rows)
            elif self.rows[rows.index(one.over)].cell(one.name).experiment is None:
                yield Finding(
                    f"column {one.name!r} is over the row {one.over!r}, which has no experiment there",
                    f"columns.{place}.over",
                    "name a row with one",
                )
        for place, row in enumerate(self.rows):
            yield from self._check_row(place, row)
        for name, experiment in self.experiments.items():
            for number, needed in enumerate(experiment.needs):
                yield from self._check_name(needed, ("experiments", name, "needs", str(number)))
        try:
            if all(needed in self.experiments for one in self.experiments.values() for needed in one.needs):
                self._sorter(list(self.experiments))
        except CycleError as error:
            yield Finding(
                f"experiments need each other in a circle: {' → '.join(error.args[1])}",
                ("experiments", error.args[1][0], "needs"),
                "leave one of the needs out",
            )

    def _check_row(self, place: int, row: MethodRow) -> Iterator[Finding]:
        columns = {column.name: column for column in self.columns}
        yield from self._check_name(row.experiment, ("rows", str(place), "experiment"))
        for name, cell in row.cells.items():
            key = ("rows", str(place), "cells", name)
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

    def _check_name(self, name: str | None, key: tuple[str, ...]) -> Iterator[Finding]:
        if name is not None and name not in self.experiments:
            yield Finding(
                f"{name!r} is none of the table's experiments",
                key,
                did_you_mean(name, list(self.experiments)),
            )

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
