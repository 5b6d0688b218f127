"""Questions to the answers of an experiment, and what they are in SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treetune_view.store.queries import literal, quoted

OPERATORS = {"=": "=", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "has": "has"}


@dataclass(frozen=True)
class Filter:
    """A condition on a column of the index: `has` is that a text holds another, in letters of any size."""

    column: str
    operator: str
    value: str | float | bool


@dataclass(frozen=True)
class Question:
    """Which answers, in which order: `sources` by name (of none, all), `search` in their text. Where there is
    an `among`, no others than these rows of each source."""

    sources: tuple[str, ...] = ()
    filters: tuple[Filter, ...] = ()
    search: str = ""
    sort: str = ""
    descending: bool = False
    page: int = 1
    size: int = 50
    among: Mapping[str, Sequence[int]] | None = None


@dataclass(frozen=True)
class Found:
    """A page of rows of the index. `total` answers are like that; where not `exact`, about so many: what
    a search has not looked into yet counts as it seems."""

    rows: list[dict[str, Any]]
    total: int
    exact: bool


def condition(
    filters: Sequence[Filter], known: Mapping[str, str], own: Mapping[str, str], of: str = "answers"
) -> tuple[str, list[Any]]:
    """What stands behind WHERE, and what `?` stands for: `known` are the types of all columns, `own` those
    of the chosen sources, `of` what the rows are. Raises ValueError for a column or an operator that isn't
    there."""
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
    """A condition for rows of each source; without any, for none."""
    if rows is None:
        return "true"
    parts = [
        f"(source = {literal(source)} AND row IN ({', '.join(map(str, own))}))"
        for source, own in rows.items()
        if own
    ]
    return f"({' OR '.join(parts)})" if parts else "false"


def order(
    question: Question,
    known: Mapping[str, str],
    own: Mapping[str, str],
    last: str = "source, row",
    of: str = "answers",
) -> str:
    """What stands behind ORDER BY: what is alike is ordered by `last`. Raises ValueError for a column that
    isn't there."""
    if question.sort and question.sort not in known:
        raise ValueError(f"{of} can't be sorted by {question.sort!r}: by {', '.join(sorted(known))}")
    direction = "DESC" if question.descending else "ASC"
    sorts = question.sort in own
    first = f"{quoted(question.sort)} {direction} NULLS LAST, " if sorts else ""
    return first + last
