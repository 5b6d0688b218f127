"""Questions about rows (filters, search, order, page), and their translation to SQL for DuckDB."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

MEMORY = "400MB"
"""The memory of a connection, beyond which DuckDB sorts on disk."""

OPERATORS = {"=": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "has": "has"}

_CONDITION = re.compile(r"^\s*(\S.*?)\s*(<=|>=|!=|=|<|>|\shas\s)\s*(.+?)\s*$")


@dataclass(frozen=True)
class ColumnFilter:
    """A condition on a column: `ColumnFilter("tokens", ">=", 300.0)`.

    The operator `has` looks for a text within a text, in upper or lower case.
    """

    column: str
    operator: str
    value: str | float | bool


@dataclass(frozen=True)
class RowQuery:
    """A choice of rows, their order, and a page of them.

    Example: `RowQuery(sources=("i4",), filters=(ColumnFilter("score", "=", 0.0),), search="therefore",
    sort="tokens", descending=True, page=2)`.
    """

    sources: tuple[str, ...] = ()
    """Names of sources; empty for all."""
    filters: tuple[ColumnFilter, ...] = ()
    search: str = ""
    """A text that the row's text must contain, in upper or lower case."""
    sort: str = ""
    """A column; empty for the default order."""
    descending: bool = False
    page: int = 1
    size: int = 50
    among: Mapping[str, Sequence[int]] | None = None
    """The only rows that may be chosen, by source; None for all."""

    @property
    def skipped(self) -> int:
        return (self.page - 1) * self.size


@dataclass(frozen=True)
class RowPage:
    """A page of rows, and the number of rows on all pages."""

    rows: list[dict[str, Any]]
    total: int


def parse_conditions(text: str, columns: Mapping[str, str], content: str = "answers") -> list[ColumnFilter]:
    """Reads conditions such as ``tokens >= 300; outcome = timeout``.

    `columns` are the types of all columns by name, and `content` is a word for the rows, for messages. Raises
    ValueError for a text that is not a condition.
    """
    filters = []
    for part in text.split(";"):
        if not part.strip():
            continue
        match = _CONDITION.match(part)
        if match is None:
            raise ValueError(
                f"{part.strip()!r} is not a condition: write a name, one of {' '.join(OPERATORS)}, and a"
                " value, such as tokens >= 300, and ; between two of them"
            )
        name, operator, written = match[1], match[2].strip(), match[3]
        if name not in columns:
            raise ValueError(f"{content} have no {name!r}: there are {', '.join(sorted(columns))}")
        value: str | float | bool = written
        if columns[name] == "BOOLEAN" and operator != "has":
            if written not in ("true", "false"):
                raise ValueError(f"{name} is compared with true or false, and not with {written!r}")
            value = written == "true"
        elif columns[name] != "VARCHAR" and operator != "has":
            try:
                value = float(written)
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                raise ValueError(f"{name} is compared with a number, and not with {written!r}")
        filters.append(ColumnFilter(name, operator, value))
    return filters


def condition_sql(
    filters: Sequence[ColumnFilter],
    all_types: Mapping[str, str],
    chosen_types: Mapping[str, str],
    content: str = "answers",
) -> tuple[str, list[Any]]:
    """Returns the SQL after WHERE, and the values of its `?`.

    `all_types` are the types of all columns, `chosen_types` those of the chosen sources, which may have fewer
    columns. Raises ValueError for a column or an operator that doesn't exist.
    """
    parts, values = ["true"], list[Any]()
    for item in filters:
        if item.column not in all_types:
            raise ValueError(f"{content} have no {item.column!r}: there are {', '.join(sorted(all_types))}")
        if item.operator not in OPERATORS:
            raise ValueError(f"{item.operator!r} is not a comparison: there are {', '.join(OPERATORS)}")
        if item.column not in chosen_types:
            parts.append("false")  # the column is null in all these rows, and null equals nothing
            continue
        name, kind = quoted(item.column), all_types[item.column]
        if chosen_types[item.column] != kind:  # null in all rows of these sources, which then have no type
            name = f"CAST({name} AS {kind})"
        if item.operator == "has":
            parts.append(f"contains(lower({name}::VARCHAR), lower(?))")
            values.append(str(item.value))
        else:
            # As DOUBLE, so that 299.6 isn't rounded to the column's integers.
            compared = kind if kind in ("VARCHAR", "BOOLEAN") else "DOUBLE"
            parts.append(f"{name} {OPERATORS[item.operator]} CAST(? AS {compared})")
            values.append(item.value)
    return " AND ".join(parts), values


def among_sql(rows: Mapping[str, Sequence[int]] | None) -> str:
    """Returns SQL that is true only for these rows of each source; where `rows` is None, for all rows."""
    if rows is None:
        return "true"
    parts = []
    for source, numbers in rows.items():
        if numbers:
            parts.append(f"(source = {literal(source)} AND row IN ({', '.join(map(str, numbers))}))")
    return f"({' OR '.join(parts)})" if parts else "false"


def order_sql(
    question: RowQuery,
    all_types: Mapping[str, str],
    chosen_types: Mapping[str, str],
    last: str = "source, row",
    content: str = "answers",
) -> str:
    """Returns the SQL after ORDER BY; equal rows are ordered by `last`.

    `all_types` are the types of all columns, `chosen_types` those of the chosen sources, which may have fewer
    columns.

    Raises ValueError for a column that doesn't exist.
    """
    if question.sort and question.sort not in all_types:
        raise ValueError(
            f"{content} can't be sorted by {question.sort!r}, but by {', '.join(sorted(all_types))}"
        )
    if question.sort not in chosen_types:  # nothing to sort by, or a column that is null in all these rows
        return last
    direction = "DESC" if question.descending else "ASC"
    return f"{quoted(question.sort)} {direction} NULLS LAST, {last}"


def connect() -> duckdb.DuckDBPyConnection:
    """Opens a database in memory that reads files and fetches nothing from the network.

    Threads must each use a cursor of it.
    """
    import duckdb

    settings = {
        "threads": 2,
        "memory_limit": MEMORY,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    return duckdb.connect(":memory:", config=settings)


def as_rows(cursor: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """Returns the rows of an executed query as dictionaries."""
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def quoted(name: str) -> str:
    """Returns a column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Returns a text in SQL."""
    return "'" + value.replace("'", "''") + "'"


def conversation_sql(sql: str) -> str:
    """Returns SQL for the text of a list of messages: their contents, one after the other."""
    return f"array_to_string(list_transform({sql}, lambda message: message.content), E'\\n\\n')"
