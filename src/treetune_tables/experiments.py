"""A table of experiments that somebody ran: one evaluation of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le, MinLen

from treetune.contracts import Finding
from treetune_tables.base import Table


@dataclass(frozen=True, kw_only=True)
class Row:
    """One experiment. `experiment` is its folder below the table's directory.

    `published` is a pass@1 to stand beside the measured one, and `source` says where it was
    published. An `optional` row is left out where its experiment has not been evaluated.
    """

    name: Annotated[str, MinLen(1)]
    """Stands in the row's first cell."""
    experiment: Annotated[str, MinLen(1)]
    published: Annotated[float, Ge(0), Le(1)] | None = None
    source: str | None = None
    optional: bool = False


@Table.register("experiments")
@dataclass(frozen=True, kw_only=True)
class ExperimentsTable(Table):
    """Rows of experiments, each with one evaluation of one checkpoint.

    `evaluation` is the evaluation set's name. `checkpoint` takes the last one that was measured on
    it, or the best by pass@1 on another set, `best_on`: to choose on the set that is reported
    would flatter every row. `output` is a file below `directory`; beside it goes the same table as
    Markdown.
    """

    rows: Annotated[tuple[Row, ...], MinLen(1)]
    output: str = "table.json"
    title: str = ""
    """Stands above the table."""
    directory: str = "experiments"
    evaluation: str = "test"
    checkpoint: Literal["last", "best"] = "last"
    best_on: str = "validation"

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
