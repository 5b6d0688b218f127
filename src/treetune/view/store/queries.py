"""Questions to rows, as people and addresses ask them, and what they are in SQL; DuckDB, as the store asks
it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb

MEMORY = "400MB"
"""Memory of one connection: it sorts on disk beyond."""

OPERATORS = {"=": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "has": "has"}

_CONDITION = re.compile(r"^\s*(\S.*?)\s*(<=|>=|!=|=|<|>|\shas\s)\s*(.+?)\s*$")


@dataclass(frozen=True)
class ColumnFilter:
    """A condition on a column: `has` is that a text holds another, in letters of any size."""

    column: str
    operator: str
    value: str | float | bool


@dataclass(frozen=True)
class RowQuery:
    """A choice of rows and their order: `sources` by name (of none, all), `search` in their text. Where there
    is an `among`, no others than these rows of each source."""

    sources: tuple[str, ...] = ()
    filters: tuple[ColumnFilter, ...] = ()
    search: str = ""
    sort: str = ""
    descending: bool = False
    page: int = 1
    size: int = 50
    among: Mapping[str, Sequence[int]] | None = None

    @property
    def skipped(self) -> int:
        return (self.page - 1) * self.size


@dataclass(frozen=True)
class RowPage:
    """A page of rows. `total` rows are like that; where not `exact`, about so many: what a search has not
    looked into yet counts as it seems."""

    rows: list[dict[str, Any]]
    total: int
    exact: bool


def parsed(text: str, columns: Mapping[str, str], of: str = "answers") -> list[ColumnFilter]:
    """Reads conditions such as ``tokens >= 300; outcome = timeout``. Raises ValueError for what is none."""
    filters = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _CONDITION.match(part)
        if match is None:
            raise ValueError(
                f"{part!r} is no condition: write a name, one of {' '.join(OPERATORS)}, and a value, such as"
                " tokens >= 300, and ; between two of them"
            )
        name, operator, written = match[1], match[2].strip(), match[3]
        if name not in columns:
            raise ValueError(f"{of} have no {name!r}: there are {', '.join(sorted(columns))}")
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


def condition(
    filters: Sequence[ColumnFilter], known: Mapping[str, str], own: Mapping[str, str], of: str = "answers"
) -> tuple[str, list[Any]]:
    """Returns the text behind WHERE, and the values of its `?`: `known` are the types of all columns, `own`
    those of the chosen sources, `of` what the rows are. Raises ValueError for a column or an operator that
    isn't there."""
    parts, values = ["true"], list[Any]()
    for one in filters:
        if one.column not in known:
            raise ValueError(f"{of} have no {one.column!r}: there are {', '.join(sorted(known))}")
        if one.operator not in OPERATORS:
            raise ValueError(f"{one.operator!r} is no comparison: there are {', '.join(OPERATORS)}")
        if one.column not in own:
            parts.append("false")  # null is like nothing
            continue
        name, kind = quoted(one.column), known[one.column]
        if own[one.column] != kind:  # these sources have null alone in it
            name = f"CAST({name} AS {kind})"
        if one.operator == "has":
            parts.append(f"contains(lower({name}::VARCHAR), lower(?))")
            values.append(str(one.value))
        else:
            # Tokens are compared with 299.6 as it is, and not with 300.
            compared = kind if kind in ("VARCHAR", "BOOLEAN") else "DOUBLE"
            parts.append(f"{name} {OPERATORS[one.operator]} CAST(? AS {compared})")
            values.append(one.value)
    return " AND ".join(parts), values


def among(rows: Mapping[str, Sequence[int]] | None) -> str:
    """Returns a condition for rows of each source; without any, for none."""
    if rows is None:
        return "true"
    parts = [
        f"(source = {literal(source)} AND row IN ({', '.join(map(str, own))}))"
        for source, own in rows.items()
        if own
    ]
    return f"({' OR '.join(parts)})" if parts else "false"


def order(
    question: RowQuery,
    known: Mapping[str, str],
    own: Mapping[str, str],
    last: str = "source, row",
    of: str = "answers",
) -> str:
    """Returns the text behind ORDER BY: equal rows are ordered by `last`. Raises ValueError for a column that
    isn't there."""
    if question.sort and question.sort not in known:
        raise ValueError(f"{of} can't be sorted by {question.sort!r}: by {', '.join(sorted(known))}")
    direction = "DESC" if question.descending else "ASC"
    first = f"{quoted(question.sort)} {direction} NULLS LAST, " if question.sort in own else ""
    return first + last


def connected() -> duckdb.DuckDBPyConnection:
    """Opens a connection in memory, beside the files, with nothing fetched from elsewhere; threads ask its
    cursors."""
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
    """Writes a name of a column in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Writes a text in SQL."""
    return "'" + value.replace("'", "''") + "'"


def conversation(sql: str) -> str:
    """Returns the text of a list of messages in SQL: their contents, one after the other."""
    return f"array_to_string(list_transform({sql}, lambda one: one.content), E'\\n\\n')"
