"""DuckDB, as the store asks it: in memory, beside the files, with nothing fetched from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

MEMORY = "400MB"
"""Of one connection: it sorts on disk beyond."""


def connected() -> duckdb.DuckDBPyConnection:
    """A connection of its own; threads ask its cursors."""
    import duckdb

    settings = {
        "threads": 2,
        "memory_limit": MEMORY,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    return duckdb.connect(":memory:", config=settings)


def as_rows(answered: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    names = [column[0] for column in answered.description or ()]
    return [dict(zip(names, row, strict=True)) for row in answered.fetchall()]


def quoted(name: str) -> str:
    """A name of a column in SQL."""
    return '"' + name.replace('"', '""') + '"'


def conversation(sql: str) -> str:
    """The text of a list of messages in SQL: what they say, one after the other."""
    return f"array_to_string(list_transform({sql}, lambda one: one.content), E'\\n\\n')"


def literal(value: str) -> str:
    """A text in SQL."""
    return "'" + value.replace("'", "''") + "'"
