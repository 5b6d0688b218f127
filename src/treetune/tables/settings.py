"""What a reproduction is: experiments, seeds, and the table that they fill, as one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Literal

from annotated_types import Ge, Gt, MinLen

from treetune.config.errors import did_you_mean
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

    def __post_init__(self) -> None:
        rows, columns = [row.name for row in self.rows], [column.name for column in self.columns]
        named = {"rows": rows, "columns": columns, "seeds": list(map(str, self.seeds))}
        named["panels"] = [panel.name for panel in self.panels]
        for what, names in named.items():
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"two {what} are called {', '.join(twice)}: each stands for itself")
        if "/" in self.name or self.name.startswith("."):
            raise ValueError(
                f"name {self.name!r} must be a plain file name: the table's files are called after it"
            )
        if self.baseline is not None and self.baseline not in rows:
            raise ValueError(
                f"there is no row {self.baseline!r} to be the baseline; {did_you_mean(self.baseline, rows)}"
            )
        for one in self.columns:
            if one.speedup is not None and one.speedup.of not in rows:
                raise ValueError(
                    f"column {one.name!r} compares with the row {one.speedup.of!r}, which is none;"
                    f" {did_you_mean(one.speedup.of, rows)}"
                )
            if one.over is not None:
                if one.over not in rows:
                    raise ValueError(
                        f"column {one.name!r} is over the row {one.over!r}, which is none;"
                        f" {did_you_mean(one.over, rows)}"
                    )
                if self.rows[rows.index(one.over)].cell(one.name).experiment is None:
                    raise ValueError(
                        f"column {one.name!r} is over the row {one.over!r}, which has no experiment there"
                    )
        for row in self.rows:
            for column in row.cells:
                if column not in columns:
                    raise ValueError(
                        f"row {row.name!r} has a cell in column {column!r}, which is none;"
                        f" {did_you_mean(column, columns)}"
                    )
                if (
                    row.cells[column].value is not None
                    and self.columns[columns.index(column)].analysis is None
                ):
                    raise ValueError(
                        f"row {row.name!r}: a cell's value is a key path in an analysis, and column"
                        f" {column!r} has none"
                    )
            for name in columns:
                self._require_experiment(row.cell(name).experiment, f"row {row.name!r}")
        for name, experiment in self.experiments.items():
            for needed in experiment.needs:
                self._require_experiment(needed, f"experiment {name!r}")
        try:
            self.order()
        except CycleError as error:
            raise ValueError(
                f"experiments need each other in a circle: {' → '.join(error.args[1])}"
            ) from error

    def check_experiments(self) -> None:
        from treetune.tables.check import check

        check(self)

    def _require_experiment(self, name: str | None, where: str) -> None:
        if name is not None and name not in self.experiments:
            raise ValueError(
                f"{where} asks for the experiment {name!r}, which is none of the table's experiments;"
                f" {did_you_mean(name, list(self.experiments))}"
            )

    def order(self) -> list[str]:
        """The experiments' names, each after those that it needs, else in the order of the rows."""
        used = [row.cell(column.name).experiment for row in self.rows for column in self.columns]
        used += [row.experiment for row in self.rows if self.panels]
        names = list(dict.fromkeys([*(name for name in used if name is not None), *self.experiments]))
        sorter = TopologicalSorter({name: self.experiments[name].needs for name in names})
        sorter.prepare()
        ordered: list[str] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready(), key=names.index)
            ordered += ready
            sorter.done(*ready)
        return ordered
