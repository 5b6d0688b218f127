"""Questions about rows, which consist of filters, a search, an order and a page, and their translation to
DuckDB's SQL."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

MEMORY_LIMIT = "400MB"
"""The most memory of a connection. DuckDB sorts on disk if it needs more."""

SQL_OPERATORS = {"=": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "has": "has"}
"""The operator in SQL of each comparison in a condition. "has" has no operator: see `condition_sql`."""

# A condition: the name of a column, an operator, and a value.
_CONDITION = re.compile(r"^\s*(\S.*?)\s*(<=|>=|!=|=|<|>|\shas\s)\s*(.+?)\s*$")


@dataclass(frozen=True)
class ColumnFilter:
    """A condition on a column: `ColumnFilter("tokens", ">=", 300.0)`.

    The operator `has` is true if the column's text contains the value, whatever the case of the letters.
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
    """The names of the sources whose rows are chosen; empty for all sources."""
    filters: tuple[ColumnFilter, ...] = ()
    """Conditions that the rows must all satisfy."""
    search: str = ""
    """A text that the row's text must contain, whatever the case of the letters."""
    sort: str = ""
    """The column that rows are sorted by; empty for the default order."""
    descending: bool = False
    page: int = 1
    """The number of the page, counted from 1."""
    size: int = 50
    """The number of rows on a page."""
    among: Mapping[str, Sequence[int]] | None = None
    """The numbers of the only rows that may be chosen, by source; None if all may be."""

    @property
    def rows_before_page(self) -> int:
        """The number of rows before the page."""
        return (self.page - 1) * self.size


@dataclass(frozen=True)
class RowPage:
    """A page of rows, and the number of rows on all pages."""

    rows: list[dict[str, Any]]
    total: int


def parse_conditions(text: str, columns: Mapping[str, str], content: str = "answers") -> list[ColumnFilter]:
    """Returns the filters that a text such as ``tokens >= 300; outcome = timeout`` describes.

    Args:
        text: Conditions, separated by semicolons.
        columns: DuckDB's types of all columns, by name.
        content: What messages call the rows.

    Raises:
        ValueError: A part of the text is not a condition, names an unknown column, or compares a column with
            a value of another type.
    """
    filters = []
    for part in text.split(";"):
        if not part.strip():
            continue
        match = _CONDITION.match(part)
        if match is None:
            raise ValueError(
                f"{part.strip()!r} is not a condition: write a name, one of {' '.join(SQL_OPERATORS)}, and a"
                " value, such as tokens >= 300, and ; between two of them"
            )
        name, operator, value_text = match[1], match[2].strip(), match[3]
        if name not in columns:
            raise ValueError(f"{content} have no {name!r}: there are {', '.join(sorted(columns))}")
        value: str | float | bool = value_text
        if columns[name] == "BOOLEAN" and operator != "has":
            if value_text not in ("true", "false"):
                raise ValueError(f"{name} is compared with true or false, and not with {value_text!r}")
            value = value_text == "true"
        elif columns[name] != "VARCHAR" and operator != "has":
            try:
                value = float(value_text)
            except ValueError:
                value = math.nan  # refused below, as infinity is
            if not math.isfinite(value):
                raise ValueError(f"{name} is compared with a number, and not with {value_text!r}")
        filters.append(ColumnFilter(name, operator, value))
    return filters


def condition_sql(
    filters: Sequence[ColumnFilter],
    all_types: Mapping[str, str],
    chosen_types: Mapping[str, str],
    content: str = "answers",
) -> tuple[str, list[Any]]:
    """Returns the SQL after WHERE, and the values of its `?`.

    Args:
        filters: The conditions that rows must all satisfy.
        all_types: The types of the columns that any source has, by name.
        chosen_types: The types of the columns of the chosen sources, which may have fewer columns.
        content: What messages call the rows.

    Raises:
        ValueError: A column or an operator doesn't exist.
    """
    parts = ["true"]  # so that there is a condition even without filters
    values = list[Any]()
    for item in filters:
        if item.column not in all_types:
            raise ValueError(f"{content} have no {item.column!r}: there are {', '.join(sorted(all_types))}")
        if item.operator not in SQL_OPERATORS:
            raise ValueError(f"{item.operator!r} is not a comparison: there are {', '.join(SQL_OPERATORS)}")
        if item.column not in chosen_types:
            parts.append("false")  # the column is null in all these rows, and null equals nothing
            continue
        name, kind = quote_name(item.column), all_types[item.column]
        # A column that is null in all rows of the chosen sources may have another type in them.
        if chosen_types[item.column] != kind:
            name = f"CAST({name} AS {kind})"
        if item.operator == "has":
            parts.append(f"contains(lower({name}::VARCHAR), lower(?))")
            values.append(str(item.value))
        else:
            # Numbers are compared as DOUBLE, so that 299.6 isn't rounded for a column of integers.
            compared_kind = kind if kind in ("VARCHAR", "BOOLEAN") else "DOUBLE"
            parts.append(f"{name} {SQL_OPERATORS[item.operator]} CAST(? AS {compared_kind})")
            values.append(item.value)
    return " AND ".join(parts), values


def among_sql(rows: Mapping[str, Sequence[int]] | None) -> str:
    """Returns SQL that is true only for the rows with these numbers, by source.

    If `rows` is None, it is true for all rows.
    """
    if rows is None:
        return "true"
    parts = []
    for source, numbers in rows.items():
        if numbers:
            parts.append(f"(source = {quote_text(source)} AND row IN ({', '.join(map(str, numbers))}))")
    return f"({' OR '.join(parts)})" if parts else "false"


def order_sql(
    question: RowQuery,
    all_types: Mapping[str, str],
    chosen_types: Mapping[str, str],
    order_of_equals: str = "source, row",
    content: str = "answers",
) -> str:
    """Returns the SQL after ORDER BY.

    Args:
        question: The question, whose column `sort` comes first in the order.
        all_types: The types of the columns that any source has, by name.
        chosen_types: The types of the columns of the chosen sources, which may have fewer columns.
        order_of_equals: The SQL by which rows are sorted that are equal in `sort`.
        content: What messages call the rows.

    Raises:
        ValueError: The column doesn't exist.
    """
    if question.sort and question.sort not in all_types:
        raise ValueError(
            f"{content} can't be sorted by {question.sort!r}, but by {', '.join(sorted(all_types))}"
        )
    if question.sort not in chosen_types:  # nothing to sort by, or a column that is null in all these rows
        return order_of_equals
    direction = "DESC" if question.descending else "ASC"
    return f"{quote_name(question.sort)} {direction} NULLS LAST, {order_of_equals}"


def open_database() -> duckdb.DuckDBPyConnection:
    """Returns a database in memory that can read files, and fetches nothing from the network.

    Each thread must use a separate cursor of it.
    """
    import duckdb

    settings = {
        "threads": 2,
        "memory_limit": MEMORY_LIMIT,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    return duckdb.connect(":memory:", config=settings)


def as_rows(cursor: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """Returns the rows of an executed query as dictionaries."""
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def quote_name(name: str) -> str:
    """Returns a column's name as SQL: in double quotes, with quotes in it doubled."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(value: str) -> str:
    """Returns a text as SQL: in single quotes, with quotes in it doubled."""
    return "'" + value.replace("'", "''") + "'"


def conversation_sql(sql: str) -> str:
    """Returns SQL for the text of a conversation: the contents of its messages, with blank lines between
    them.

    `sql` is the SQL of the column with the list of messages.
    """
    return f"array_to_string(list_transform({sql}, lambda message: message.content), E'\\n\\n')"
