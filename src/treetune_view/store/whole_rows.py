"""One row of a data set, whole, as the file has it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from treetune.tasks.sources import parquet_row
from treetune_view.store.catalogue import NotThere
from treetune_view.store.tables import ROW, Table


def whole_row(table: Table, number: int) -> dict[str, Any]:
    """The row of that number. Fields that it doesn't have are left out, and JSON that stands in a text of a
    prepared file is read. Raises NotThere, and ValueError for one that can't be read."""
    if not 0 <= number < table.total and table.data.kind != "estimate":
        raise NotThere(f"{table.data.name} has no row {number}: it has rows 0 to {table.total - 1}")
    if table.data.kind == "lines":
        return _line(table.data.path, number)
    if table.arrow is not None:
        row = table.arrow.slice(number, 1).drop_columns([ROW]).to_pylist()[0]
        return {name: value for name, value in row.items() if value is not None}
    if table.data.kind == "parquet":
        return parquet_row(table.data.path, number)
    found = table.row(number)
    if found is None:
        raise NotThere(f"{table.data.name} has no rate of row {number} yet")
    rate = {name: found[name] for name in table.names()}
    input_rows = table.data.path / "rows.parquet"
    if not input_rows.is_file():
        return rate
    # The row itself says what is asked, and more.
    counted = {name: value for name, value in rate.items() if name not in ("asked", "gold")}
    return parquet_row(input_rows, number) | counted


def _line(path: Path, number: int) -> dict[str, Any]:
    """Lines that are blank are no rows. What is no object is shown as the text that it is."""
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        line = next(itertools.islice(lines, number, None), b"")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) else {"unreadable line": line.decode("utf-8", "replace")}
