"""A data set as a table: its rows filtered, searched and sorted by DuckDB, on the file where it lies."""

from __future__ import annotations

import glob
import json
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treetune_view.store.data_sets import DataSet
from treetune_view.store.queries import as_rows, connected, conversation, literal, quoted
from treetune_view.store.questions import Filter, Found, Question, condition, order

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

CHARACTERS = ".characters"
"""Behind the name of a column of text: how long each is."""

BEGINNING = 160
"""Characters of a text that a list of rows gets."""
DEEPEST_LINE = 100
"""Levels within a line of JSON: DuckDB refuses more than 128."""
LONGEST_LINE = 64 * 2**20
"""Bytes of a line of JSON."""
DEEPEST, MOST = 2, 400
"""Levels of fields within fields that are columns of their own, and how many columns there are at most."""

REMEMBERED = 64
"""Counts and histograms of a data set that are kept."""
SEARCHES = 3
"""Searches whose rows are kept: each may have as many as the data set."""

ROW = "row number"
"""Under which a row has its number in the file, from 0."""

Value = TypeVar("Value")

_WHOLE = {"tinyint", "smallint", "integer", "bigint", "utinyint", "usmallint", "uinteger", "ubigint"}
_BROKEN = {"float", "double", "decimal", "hugeint", "uhugeint"}
_AS_TEXT = {"date", "time", "timestamp", "timestamp with time zone", "uuid"}


@dataclass(frozen=True)
class Column:
    """A column by its name: `kind` is what it is compared as (VARCHAR, BOOLEAN, BIGINT, DOUBLE), `type` what
    the file has, empty for what is counted here. `depth` is 0 for a column of the file."""

    name: str
    type: str
    kind: str
    sql: str
    depth: int = 0


@dataclass(frozen=True)
class _Wanted:
    """Which rows: what stands behind WHERE, what its `?` stand for, and the table `matching` in it."""

    text: str
    values: list[Any]
    matching: pa.Table | None = None


class Table:
    """The rows of a data set, numbered from 0 in the file's order. Safe for several threads.

    Raises ValueError for a file that can't be read.
    """

    def __init__(self, data: DataSet) -> None:
        import duckdb

        self.data = data
        self._lock = threading.Lock()
        self._connection = connected()
        self._remembered: OrderedDict[Hashable, Any] = OrderedDict()
        self._matches: OrderedDict[Hashable, Any] = OrderedDict()
        self._whole: Any = None
        """Of lines, of which some are bad: a copy without these, which goes with this object."""
        self.arrow: pa.Table | None = None
        """Of what no query reads where it lies."""
        try:
            self._from, self.note = self._source()
            self.columns = {one.name: one for one in self._columns()}
            [total] = self._execute(f"SELECT count(*) FROM {self._from}").fetchone() or (0,)
        except (duckdb.Error, RuntimeError) as error:  # the latter of a name that is no text
            raise ValueError(f"{data.path} can't be read: {error}") from error
        self.total: int = total
        self.kinds = {name: one.kind for name, one in self.columns.items()}
        self._relation = ", ".join(f"{one.sql} AS {quoted(one.name)}" for one in self.columns.values())

    def names(self) -> list[str]:
        """The file's own columns."""
        return [one.name for one in self.columns.values() if not one.depth]

    def numeric(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind not in ("VARCHAR", "BOOLEAN")]

    def ask(self, question: Question, shown: Sequence[str]) -> Found:
        """A page of rows: of each its number, under `ROW`, and the columns `shown`, of texts the beginnings.
        Raises ValueError for a column or an operator that isn't there."""
        wanted = self._wanted(question.filters, question.search)
        by = order(question, self.kinds, self.kinds, quoted(ROW), "rows")
        skipped = (question.page - 1) * question.size
        # First which, then what they say: what is sorted and passed over has few columns.
        asked = f"SELECT {quoted(ROW)} {self._those(wanted)} ORDER BY {by}"
        found = self._query(f"{asked} LIMIT {question.size} OFFSET {skipped}", wanted).fetchall()
        return Found(self._rows([number for (number,) in found], shown), self._count(question, wanted), True)

    def numbers(
        self, columns: Sequence[str], filters: Sequence[Filter], search: str
    ) -> duckdb.DuckDBPyConnection:
        """A connection with the temporary table `numbers`: these columns of the rows that are like that, as
        x0, x1, …, null for what is no finite number. The file is gone through once."""
        wanted = self._wanted(filters, search)
        given = [f"CAST({quoted(name)} AS DOUBLE) AS x{i}" for i, name in enumerate(columns)]
        finite = [f"if(isfinite(x{i}), x{i}, NULL) AS x{i}" for i in range(len(columns))]
        return self._query(
            f"CREATE TEMP TABLE numbers AS SELECT {', '.join(finite)}"
            f" FROM (SELECT {', '.join(given)} {self._those(wanted)})",
            wanted,
        )

    def row(self, number: int) -> dict[str, Any] | None:
        """All columns of one row; None where there is none of that number."""
        rows = as_rows(self._query(f"SELECT * FROM ({self._all()}) WHERE {quoted(ROW)} = {number}"))
        return rows[0] if rows else None

    def _wanted(self, filters: Sequence[Filter], search: str) -> _Wanted:
        """The rows that are like that, and in a text of which stands what is searched for."""
        text, values = condition(filters, self.kinds, self.kinds, "rows")
        wanted = _Wanted(text, values)
        if not search:
            return wanted
        key = "matching", tuple(filters), search
        matching = self.remembered(key, lambda: self._matching(wanted, search), self._matches)
        return _Wanted(f"{quoted(ROW)} IN (SELECT {quoted(ROW)} FROM matching)", [], matching)

    def _matching(self, wanted: _Wanted, search: str) -> pa.Table:
        """Their numbers: texts are gone through once for all that is asked of these rows."""
        texts = [name for name in self.names() if self.kinds[name] == "VARCHAR"]
        holds = [f"contains(lower({quoted(name)}), lower(?))" for name in texts] or ["false"]
        both = _Wanted(f"{wanted.text} AND ({' OR '.join(holds)})", [*wanted.values, *[search] * len(texts)])
        import pyarrow as pa

        return pa.table(self._query(f"SELECT {quoted(ROW)} {self._those(both)}", both).fetchnumpy())

    def _count(self, question: Question, wanted: _Wanted) -> int:
        if wanted.matching is not None:
            return wanted.matching.num_rows
        if not question.filters:
            return self.total
        counted = f"SELECT count(*) {self._those(wanted)}"
        key = "total", tuple(question.filters)
        return self.remembered(key, lambda: self._query(counted, wanted).fetchone()[0])

    def _those(self, wanted: _Wanted) -> str:
        return f"FROM ({self._all()}) WHERE {wanted.text}"

    def remembered(
        self, key: Hashable, make: Callable[[], Value], among: OrderedDict[Hashable, Any] | None = None
    ) -> Value:
        """What `make` gives, made once as long as the file is the same and not much else is asked."""
        kept, most = (self._remembered, REMEMBERED) if among is None else (among, SEARCHES)
        with self._lock:
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
        value = make()
        with self._lock:
            kept[key] = value
            while len(kept) > most:
                kept.popitem(last=False)
        return value

    def _all(self) -> str:
        return f"SELECT {quoted(ROW)}, {self._relation} FROM {self._from}"

    def _rows(self, numbers: Sequence[int], shown: Sequence[str]) -> list[dict[str, Any]]:
        if not numbers:
            return []
        cut = [
            f"left({quoted(name)}, {BEGINNING + 1}) AS {quoted(name)}"
            if self.kinds[name] == "VARCHAR"
            else quoted(name)
            for name in shown
        ]
        chosen = ", ".join(map(str, numbers))
        text = (
            f"SELECT {', '.join([quoted(ROW), *cut])} FROM ({self._all()}) WHERE {quoted(ROW)} IN ({chosen})"
        )
        found = {row[ROW]: row for row in as_rows(self._query(text))}
        return [found[number] for number in numbers if number in found]

    # DuckDB

    def _query(self, text: str, wanted: _Wanted | None = None) -> Any:
        import duckdb

        wanted = wanted or _Wanted("true", [])
        try:
            cursor = self._cursor()
            if wanted.matching is not None:
                cursor.register("matching", wanted.matching)
            return cursor.execute(text, wanted.values)
        except duckdb.Error as error:  # the file was written anew, or is torn where nobody has looked yet
            raise ValueError(f"{self.data.path} can't be read: {error}") from error

    def _execute(self, text: str) -> duckdb.DuckDBPyConnection:
        return self._cursor().execute(text)

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            cursor = self._connection.cursor()
        if self.arrow is not None:
            cursor.register("arrow_table", self.arrow)
        return cursor

    def _source(self) -> tuple[str, str]:
        """What stands behind FROM, with the rows' numbers; and what is to be said of it."""
        path = self.data.path
        if self.data.kind == "parquet":
            name = literal(glob.escape(str(path)))
            file = f"read_parquet({name}, file_row_number=true, hive_partitioning=false)"
            own = f"SELECT * EXCLUDE (file_row_number), file_row_number AS {quoted(ROW)} FROM {file}"
            return f"({own})", ""
        if self.data.kind == "lines":
            return self._lines()
        if self.data.kind == "estimate":
            from treetune_view.store.estimates import rates

            text, note = rates(path, ROW)
            return f"({text})", note
        from treetune_view.store.arrow_tables import saved, wandb_table

        self.arrow = _numbered(saved(path) if self.data.kind == "saved" else wandb_table(path))
        return "arrow_table", ""

    def _lines(self) -> tuple[str, str]:
        import duckdb

        path = self.data.path
        try:
            types = self._types_of_lines(path)
        except duckdb.Error:  # what is nested deeper than DuckDB reads
            types = {}
        if list(types) in ([], ["json"]):  # a line that is no object hides the columns of all others
            self._whole = _without_bad_lines(path)
            path = Path(self._whole.name)
            types = self._types_of_lines(path)
        # Text that looks like a date stays the text that it is.
        spelt = {name: "VARCHAR" if kind.lower() in _AS_TEXT else kind for name, kind in types.items()}
        columns = ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in spelt.items())
        file = (
            f"(SELECT *, row_number() OVER () - 1 AS {quoted(ROW)}"
            f" FROM {_read_lines(path)}, records=true, columns={{{columns}}}))"
        )
        nothing = " AND ".join(f"{quoted(name)} IS NULL" for name in spelt)
        unread = self._execute(
            f"SELECT {quoted(ROW)}, count(*) OVER () FROM {file} WHERE {nothing} ORDER BY 1 LIMIT 3"
        ).fetchall()
        places = ", ".join(str(number) for number, _ in unread)
        note = (
            f"{unread[0][1]} of its lines hold no object that can be read (torn, another value, nested too"
            f" deep, not in UTF-8, or with half a character), and stand here as empty rows: {places}"
            f"{', …' if unread[0][1] > len(unread) else ''}"
            if unread
            else ""
        )
        return file, note

    def _types_of_lines(self, path: Path) -> dict[str, str]:
        found = self._execute(f"DESCRIBE SELECT * FROM {_read_lines(path)}, sample_size=-1, maximum_depth=6)")
        return {name: kind for name, kind, *_ in found.fetchall()}

    # Columns

    def _columns(self) -> Iterator[Column]:
        relation = self._cursor().sql(f"SELECT * EXCLUDE ({quoted(ROW)}) FROM {self._from}")
        described = list(zip(relation.columns, relation.types, strict=True))
        taken = {name.casefold() for name, _ in described}
        count = 0
        for name, kind in described:
            for one in _fields(name, quoted(name), kind, 0):
                key = one.name.casefold()
                if one.depth and (key in taken or count >= MOST):
                    continue  # the file has a column of that name
                taken.add(key)
                count += 1
                yield one


def _read_lines(path: Path) -> str:
    """The beginning of what reads JSON lines in SQL."""
    return (
        f"read_json({literal(glob.escape(str(path)))}, format='newline_delimited', ignore_errors=true,"
        f" maximum_object_size={LONGEST_LINE}"
    )


def _without_bad_lines(path: Path) -> Any:
    """A copy, gone with the object, in which an empty object stands for each line that holds none, or one
    that DuckDB can't tell columns of. Raises ValueError for a file without a row."""
    copied = tempfile.NamedTemporaryFile(suffix=".jsonl")  # noqa: SIM115 (it is read as long as the table)
    whole = 0
    with path.open("rb") as file:
        for line in filter(bytes.strip, file):
            try:
                row = json.loads(line)
                good = isinstance(row, dict) and "" not in row and _depth(row) <= DEEPEST_LINE
            except (ValueError, RecursionError):
                good = False
            whole += good
            copied.write(line if good else b"{}\n")
    copied.flush()
    if not whole:
        raise ValueError(f"{path} has no row: none of its lines is a JSON object")
    return copied


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _fields(name: str, sql: str, kind: Any, depth: int) -> Iterator[Column]:
    """A column, what is counted of it, and the fields in it."""
    made = _column(name, sql, kind, depth)
    yield made
    if depth < DEEPEST and (kind.id == "varchar" or _is_conversation(kind)):
        yield Column(name + CHARACTERS, "", "BIGINT", f"length({made.sql})", depth + 1)
    if kind.id == "struct" and depth < DEEPEST:
        for field, own in kind.children:
            yield from _fields(f"{name}.{field}", f"struct_extract({sql}, {literal(field)})", own, depth + 1)


def _column(name: str, sql: str, kind: Any, depth: int) -> Column:
    words = str(kind)
    to_sql: Callable[[str], str]
    if kind.id == "boolean":
        as_kind, to_sql = "BOOLEAN", str
    elif kind.id in _WHOLE:
        as_kind, to_sql = "BIGINT", str
    elif kind.id in _BROKEN:
        as_kind, to_sql = "DOUBLE", "CAST({} AS DOUBLE)".format
    elif words == "JSON":
        as_kind, to_sql = "VARCHAR", "({} ->> '$')".format
    elif _is_conversation(kind):
        as_kind, to_sql = "VARCHAR", conversation
    elif kind.id in ("struct", "list", "map", "array", "union"):
        as_kind, to_sql = "VARCHAR", "CAST(to_json({}) AS VARCHAR)".format
    else:
        as_kind, to_sql = "VARCHAR", "CAST({} AS VARCHAR)".format
    return Column(name, words, as_kind, to_sql(sql), depth)


def _is_conversation(kind: Any) -> bool:
    """Whether it is a list of messages, such as a prompt: their contents are its text."""
    if kind.id != "list":
        return False
    [(_, one)] = kind.children
    return one.id == "struct" and {field for field, own in one.children if own.id == "varchar"} >= {
        "role",
        "content",
    }


def _numbered(table: pa.Table) -> pa.Table:
    import numpy as np
    import pyarrow as pa

    return table.append_column(ROW, pa.array(np.arange(table.num_rows, dtype=np.int64)))
