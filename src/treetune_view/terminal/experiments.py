"""The first page: all experiments of the folders, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from treetune.runtime.console import duration
from treetune_view.store import Run, Store
from treetune_view.store.standing import Standing, standing
from treetune_view.terminal.words import accuracy, progress, shown, state

NARROW, WIDE = 66, 110
"""Below the one, only what can't be missed; from the other on, all."""


@dataclass(frozen=True)
class Row:
    """An experiment and how it stands, or what is wrong with its files."""

    run: Run
    standing: Standing | None
    fault: str = ""


def rows_of(store: Store) -> list[Row]:
    """Of all experiments, by name; one that can't be read is a row that says so."""
    found = []
    for run in store.runs():
        try:
            found.append(Row(run, standing(store, run)))
        except (ValueError, OSError) as error:
            found.append(Row(run, None, str(error)))
    return found


def experiments_table(rows: Sequence[Row], width: int, selected: int | None = None) -> Table:
    """As wide as the terminal; `selected` is marked by a sign and by style."""
    narrow, wide = width < NARROW, width >= WIDE
    heads = ["state", "done", *(["method"] if wide else []), "pass@1", *([] if narrow else ["left"])]
    cells = [_cells(row, narrow, wide) for row in rows]
    taken = sum(max(len(head), *(one[i].cell_len for one in cells), 0) + 1 for i, head in enumerate(heads))
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("experiment", no_wrap=True)
    for head in heads:
        table.add_column(head, no_wrap=True, justify="right" if head in ("done", "left") else "left")
    for i, (row, own) in enumerate(zip(rows, cells, strict=True)):
        mark = "› " if i == selected else "  " if selected is not None else ""
        name = Text(mark + _ending(shown(row.run.name).plain, max(10, width - taken - len(mark) - 1)))
        table.add_row(name, *own, style="reverse" if i == selected else "")
    return table


def _ending(name: str, most: int) -> str:
    """What fits of a name: the end, in which names differ."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def reason(row: Row) -> Text:
    """What isn't finished is at, or why it stopped; what is wrong with files that can't be read."""
    if row.standing is None:
        return shown(row.fault, "red")
    return shown(row.standing.why, "red" if row.standing.state == "stopped" else "dim")


def _cells(row: Row, narrow: bool, wide: bool) -> list[Text]:
    one = row.standing
    if one is None:
        return [Text("! unreadable", style="red"), *[Text("")] * (2 + wide + (not narrow))]
    return [
        state(one),
        Text(progress(one)),
        *([shown(one.method)] if wide else []),
        _accuracies(one, narrow, wide),
        *([] if narrow else [Text("" if one.seconds_left is None else duration(one.seconds_left))]),
    ]


def _accuracies(one: Standing, narrow: bool, wide: bool) -> Text:
    """Of the test set where there is one, else of the first."""
    if not one.accuracies:
        return Text("–", style="dim")
    chosen = next((own for own in one.accuracies if own.label == "test"), one.accuracies[0])
    text = Text(accuracy(chosen, bounds=not narrow))
    return text if narrow else text + shown(f" {chosen.label}", "dim") if wide else text
