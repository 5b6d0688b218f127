"""A data set as a table: its rows filtered, searched, sorted and counted by DuckDB, on the file where it
lies."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from treetune.exceptions import NotThere
from treetune.tasks.sources import parquet_row
from treetune.view.store.queries import (
    ColumnFilter,
    RowPage,
    RowQuery,
    as_rows,
    condition,
    connected,
    conversation,
    literal,
    order,
    quoted,
)
from treetune.view.store.readers import DataSet, file_in_sql, rates, saved_split, wandb_table

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

CHARACTERS = ".characters"
"""Ends the name of the column with the lengths of a column of text."""

BEGINNING = 160
"""Characters of a text that a list of rows gets."""
DEEPEST_LINE = 100
"""Levels within a line of JSON: DuckDB refuses more than 128."""
LONGEST_LINE = 64 * 2**20
"""Bytes of a line of JSON."""
DEEPEST, MOST = 2, 400
"""Levels of fields within fields that are columns of their own, and how many columns there are at most."""

CACHED, SEARCHES = 64, 3
"""Counts and histograms of a data set that are kept; and searches, each of which may have as many rows as it.
"""

ROW = "row number"
"""The column with a row's number in the file, from 0."""

MOST_BARS = 24
RATE_STEP = 0.05
"""Bin of what lies between 0 and 1, such as pass rates; a rate of exactly 1 has a bar of its own."""

HAIR = 1e-9
"""Share of a bin: a value that should be on its lower bound and isn't for the last bit is in it all the same.
"""

Value = TypeVar("Value")

_WHOLE = {"tinyint", "smallint", "integer", "bigint", "utinyint", "usmallint", "uinteger", "ubigint"}
_BROKEN = {"float", "double", "decimal", "hugeint", "uhugeint"}
_AS_TEXT = {"date", "time", "timestamp", "timestamp with time zone", "uuid"}


@dataclass(frozen=True)
class DataColumn:
    """A column by its name: `kind` is what it is compared as (VARCHAR, BOOLEAN, BIGINT, DOUBLE), `type` what
    the file has, empty for what is counted here. `depth` is 0 for a column of the file."""

    name: str
    type: str
    kind: str
    sql: str
    depth: int = 0


@dataclass(frozen=True)
class HistogramBar:
    """`count` values are at least `low` and below `high`."""

    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Histogram:
    """Counts of `counted` values in a `unit`, the `highest` of one bar; `missing` rows have none, or one that
    is no finite number."""

    column: str
    bars: Sequence[HistogramBar]
    counted: int
    missing: int
    mean: float
    median: float
    unit: str
    highest: int


class DataSetTable:
    """The rows of a data set, numbered from 0 in the file's order. Safe for several threads.

    Raises ValueError for a file that can't be read.
    """

    def __init__(self, data: DataSet) -> None:
        import duckdb

        self.data = data
        self._lock = threading.Lock()
        self._connection = connected()
        self._cache: OrderedDict[Hashable, Any] = OrderedDict()
        self._searches: OrderedDict[Hashable, Any] = OrderedDict()
        self._copy: Any = None
        """A copy of JSON lines without the bad ones, which goes with this object."""
        self._arrow: pa.Table | None = None
        """The rows of what no query reads where it lies."""
        try:
            self._from, self.note = self._source()
            self.columns = {one.name: one for one in self._columns()}
            [total] = self._cursor().execute(f"SELECT count(*) FROM {self._from}").fetchone() or (0,)
        except (duckdb.Error, RuntimeError) as error:  # the latter of a name that is no text
            raise ValueError(f"{data.path} can't be read: {error}") from error
        self.total: int = total
        self.kinds = {name: one.kind for name, one in self.columns.items()}
        columns = ", ".join(f"{one.sql} AS {quoted(one.name)}" for one in self.columns.values())
        self._all = f"(SELECT {quoted(ROW)}, {columns} FROM {self._from})"

    def names(self) -> list[str]:
        """Returns the file's own columns."""
        return [one.name for one in self.columns.values() if not one.depth]

    def numeric(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind not in ("VARCHAR", "BOOLEAN")]

    # Questions

    def ask(self, question: RowQuery, shown: Sequence[str]) -> RowPage:
        """Returns a page of rows: of each its number, under `ROW`, and the columns `shown`, of texts the
        beginnings. Raises ValueError for a column or an operator that isn't there."""
        where, values, matching = self._where(question.filters, question.search)
        by = order(question, self.kinds, self.kinds, quoted(ROW), "rows")
        # First which, then what they say: what is sorted and passed over has few columns.
        numbers = [
            number
            for (number,) in self._query(
                f"SELECT {quoted(ROW)} FROM {self._all} WHERE {where} ORDER BY {by}"
                f" LIMIT {question.size} OFFSET {question.skipped}",
                values,
                matching,
            ).fetchall()
        ]
        rows: dict[int, dict[str, Any]] = {}
        if numbers:
            texts = {name for name in shown if self.kinds[name] == "VARCHAR"}
            cut = [
                f"left({quoted(name)}, {BEGINNING + 1}) AS {quoted(name)}" if name in texts else quoted(name)
                for name in shown
            ]
            chosen = f"{quoted(ROW)} IN ({', '.join(map(str, numbers))})"
            text = f"SELECT {', '.join([quoted(ROW), *cut])} FROM {self._all} WHERE {chosen}"
            rows = {row[ROW]: row for row in as_rows(self._query(text))}
        if matching is not None:
            total = matching.num_rows
        elif question.filters:
            counted = f"SELECT count(*) FROM {self._all} WHERE {where}"
            total = self._cached(
                ("total", tuple(question.filters)), lambda: self._query(counted, values).fetchone()[0]
            )
        else:
            total = self.total
        return RowPage([rows[number] for number in numbers if number in rows], total, True)

    def row(self, number: int) -> dict[str, Any]:
        """Returns the row of that number, whole, as the file has it. Fields that it doesn't have are left
        out, and JSON that stands in a text of a prepared file is read. Raises NotThere, and ValueError for
        one that can't be read."""
        path, kind = self.data.path, self.data.kind
        if not 0 <= number < self.total and kind != "estimate":
            raise NotThere(f"{self.data.name} has no row {number}: it has rows 0 to {self.total - 1}")
        if kind == "parquet":
            return parquet_row(path, number)
        if self._arrow is not None:
            row = self._arrow.slice(number, 1).drop_columns([ROW]).to_pylist()[0]
            return {name: value for name, value in row.items() if value is not None}
        if kind == "lines":
            with path.open("rb") as file:
                lines = (line for line in file if line.strip())  # those that are blank are no rows
                line = next(itertools.islice(lines, number, None), b"")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            return row if isinstance(row, dict) else {"unreadable line": line.decode("utf-8", "replace")}
        rows = as_rows(self._query(f"SELECT * FROM {self._all} WHERE {quoted(ROW)} = {number}"))
        if not rows:
            raise NotThere(f"{self.data.name} has no rate of row {number} yet")
        rate = {name: rows[0][name] for name in self.names()}
        if not (path / "rows.parquet").is_file():
            return rate
        # The row itself says what is asked, and more.
        counted = {name: value for name, value in rate.items() if name not in ("asked", "gold")}
        return parquet_row(path / "rows.parquet", number) | counted

    def check_numeric(self, columns: Sequence[str]) -> None:
        """Raises ValueError for a column that isn't numeric."""
        for name in columns:
            if name not in self.numeric():
                raise ValueError(f"{name!r} is no column of numbers: there are {', '.join(self.numeric())}")

    def histograms(
        self, columns: Sequence[str], filters: Sequence[ColumnFilter], search: str
    ) -> list[Histogram]:
        """Counts the columns' values in the rows that are like that; a column without any has no histogram.
        Raises ValueError for a column that isn't numeric."""
        self.check_numeric(columns)

        def count() -> list[Histogram]:
            where, values, matching = self._where(filters, search)
            rows = f"{self._all} WHERE {where}"
            return histograms_of(lambda text: self._query(text, values, matching), rows, columns)

        key = "histograms", tuple(columns), tuple(filters), search
        return self._cached(key, count) if columns else []

    def _where(self, filters: Sequence[ColumnFilter], search: str) -> tuple[str, list[Any], pa.Table | None]:
        """Returns the text behind WHERE, the values of its `?`, and the table `matching` in it: the numbers
        of the rows in a text of which `search` stands. Texts are gone through once for all that is asked of
        these rows."""
        where, values = condition(filters, self.kinds, self.kinds, "rows")
        if not search:
            return where, values, None

        def look() -> pa.Table:
            import pyarrow as pa

            texts = [name for name in self.names() if self.kinds[name] == "VARCHAR"]
            holds = " OR ".join(f"contains(lower({quoted(name)}), lower(?))" for name in texts) or "false"
            text = f"SELECT {quoted(ROW)} FROM {self._all} WHERE {where} AND ({holds})"
            return pa.table(self._query(text, [*values, *[search] * len(texts)]).fetchnumpy())

        matching = self._cached(("matching", tuple(filters), search), look, searches=True)
        return f"{quoted(ROW)} IN (SELECT {quoted(ROW)} FROM matching)", [], matching

    def _cached(self, key: Hashable, make: Callable[[], Value], *, searches: bool = False) -> Value:
        """Returns what `make` gives, made once as long as the file is the same and not much else is asked."""
        cache, most = (self._searches, SEARCHES) if searches else (self._cache, CACHED)
        with self._lock:
            if key in cache:
                cache.move_to_end(key)
                return cache[key]
        value = make()
        with self._lock:
            cache[key] = value
            while len(cache) > most:
                cache.popitem(last=False)
        return value

    # DuckDB

    def _query(self, text: str, values: Sequence[Any] = (), matching: pa.Table | None = None) -> Any:
        import duckdb

        try:
            cursor = self._cursor()
            if matching is not None:
                cursor.register("matching", matching)
            return cursor.execute(text, list(values))
        except duckdb.Error as error:  # the file was written anew, or is torn where nobody has looked yet
            raise ValueError(f"{self.data.path} can't be read: {error}") from error

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        with self._lock:
            cursor = self._connection.cursor()
        if self._arrow is not None:
            cursor.register("arrow_table", self._arrow)
        return cursor

    def _source(self) -> tuple[str, str]:
        """Returns the text behind FROM, with the rows' numbers; and a remark on the data."""
        import numpy as np
        import pyarrow as pa

        path = self.data.path
        if self.data.kind == "parquet":
            file = f"read_parquet({file_in_sql(path)}, file_row_number=true, hive_partitioning=false)"
            own = f"SELECT * EXCLUDE (file_row_number), file_row_number AS {quoted(ROW)} FROM {file}"
            return f"({own})", ""
        if self.data.kind == "lines":
            return self._lines()
        if self.data.kind == "estimate":
            text, note = rates(path, ROW)
            return f"({text})", note
        table = wandb_table(path) if self.data.kind == "table" else saved_split(path)
        self._arrow = table.append_column(ROW, pa.array(np.arange(table.num_rows, dtype=np.int64)))
        return "arrow_table", ""

    def _lines(self) -> tuple[str, str]:
        import duckdb

        path = self.data.path

        def read() -> str:
            return (
                f"read_json({file_in_sql(path)}, format='newline_delimited', ignore_errors=true,"
                f" maximum_object_size={LONGEST_LINE}"
            )

        def types_of_columns() -> dict[str, str]:
            described = f"DESCRIBE SELECT * FROM {read()}, sample_size=-1, maximum_depth=6)"
            return {name: kind for name, kind, *_ in self._cursor().execute(described).fetchall()}

        try:
            types = types_of_columns()
        except duckdb.Error:  # what is nested deeper than DuckDB reads
            types = {}
        if list(types) in ([], ["json"]):  # a line that is no object hides the columns of all others
            self._copy = _without_bad_lines(path)
            path = Path(self._copy.name)
            types = types_of_columns()
        # Text that looks like a date stays the text that it is.
        spelt = {name: "VARCHAR" if kind.lower() in _AS_TEXT else kind for name, kind in types.items()}
        columns = ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in spelt.items())
        file = (
            f"(SELECT *, row_number() OVER () - 1 AS {quoted(ROW)}"
            f" FROM {read()}, records=true, columns={{{columns}}}))"
        )
        nothing = " AND ".join(f"{quoted(name)} IS NULL" for name in spelt)
        unread = (
            self._cursor()
            .execute(f"SELECT {quoted(ROW)}, count(*) OVER () FROM {file} WHERE {nothing} ORDER BY 1 LIMIT 3")
            .fetchall()
        )
        if not unread:
            return file, ""
        numbers = ", ".join(str(number) for number, _ in unread)
        return file, (
            f"{unread[0][1]} of its lines hold no object that can be read (torn, another value, nested too"
            f" deep, not in UTF-8, or with half a character), and stand here as empty rows: {numbers}"
            f"{', …' if unread[0][1] > len(unread) else ''}"
        )

    def _columns(self) -> Iterator[DataColumn]:
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


def _without_bad_lines(path: Path) -> Any:
    """Returns a copy, gone with the object, in which an empty object stands for each line that holds none, or
    one that DuckDB can't tell columns of. Raises ValueError for a file without a row."""

    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + max(map(depth, inner), default=0)

    copied = tempfile.NamedTemporaryFile(suffix=".jsonl")  # noqa: SIM115 (it is read as long as the table)
    objects = 0
    with path.open("rb") as file:
        for line in filter(bytes.strip, file):
            try:
                row = json.loads(line)
                good = isinstance(row, dict) and "" not in row and depth(row) <= DEEPEST_LINE
            except (ValueError, RecursionError):
                good = False
            objects += good
            copied.write(line if good else b"{}\n")
    copied.flush()
    if not objects:
        raise ValueError(f"{path} has no row: none of its lines is a JSON object")
    return copied


def _fields(name: str, sql: str, kind: Any, depth: int) -> Iterator[DataColumn]:
    """Yields a column, the lengths of its texts, and the fields in it."""
    is_conversation = False  # a list of messages, such as a prompt: their contents are its text
    if kind.id == "list":
        [(_, one)] = kind.children
        texts = {field for field, own in one.children if own.id == "varchar"} if one.id == "struct" else set()
        is_conversation = {"role", "content"} <= texts
    as_kind, to_sql = "VARCHAR", f"CAST({sql} AS VARCHAR)"
    if kind.id == "boolean":
        as_kind, to_sql = "BOOLEAN", sql
    elif kind.id in _WHOLE:
        as_kind, to_sql = "BIGINT", sql
    elif kind.id in _BROKEN:
        as_kind, to_sql = "DOUBLE", f"CAST({sql} AS DOUBLE)"
    elif str(kind) == "JSON":
        to_sql = f"({sql} ->> '$')"
    elif is_conversation:
        to_sql = conversation(sql)
    elif kind.id in ("struct", "list", "map", "array", "union"):
        to_sql = f"CAST(to_json({sql}) AS VARCHAR)"
    yield DataColumn(name, str(kind), as_kind, to_sql, depth)
    if depth < DEEPEST and (kind.id == "varchar" or is_conversation):
        yield DataColumn(name + CHARACTERS, "", "BIGINT", f"length({to_sql})", depth + 1)
    if kind.id == "struct" and depth < DEEPEST:
        for field, own in kind.children:
            yield from _fields(f"{name}.{field}", f"struct_extract({sql}, {literal(field)})", own, depth + 1)


# Histograms


def histograms_of(ask: Callable[[str], Any], rows: str, columns: Sequence[str]) -> list[Histogram]:
    """Counts the columns of the rows, which are a text behind FROM; `ask` has the values of its `?`."""
    # All are gone through once: x0, x1, … are null for what is no finite number.
    given = [f"CAST({quoted(name)} AS DOUBLE) AS x{i}" for i, name in enumerate(columns)]
    finite = [f"if(isfinite(x{i}), x{i}, NULL) AS x{i}" for i in range(len(columns))]
    chosen = f"SELECT {', '.join(given)} FROM {rows}"
    numbers = ask(f"CREATE TEMP TABLE numbers AS SELECT {', '.join(finite)} FROM ({chosen})")
    made = (_histogram(numbers, name, f"x{i}") for i, name in enumerate(columns))
    return [one for one in made if one is not None]


def _histogram(numbers: duckdb.DuckDBPyConnection, column: str, x: str) -> Histogram | None:
    """Counts a column of the table `numbers` in bins whose bounds are round numbers."""
    facts = numbers.execute(
        f"SELECT count(*), count({x}), min({x}), max({x}), avg({x}), median({x}), bool_and({x} = floor({x}))"
        " FROM numbers"
    ).fetchone()
    assert facts is not None
    rows, counted, low, high, mean, median, whole = facts
    if not counted:
        return None
    step = bin_step(low, high, whole=whole)
    first = math.floor(low / step + HAIR)
    binned = numbers.execute(
        f"SELECT floor({x} / {step!r} + {HAIR!r}) AS bin, count(*) FROM numbers"
        f" WHERE {x} IS NOT NULL GROUP BY bin"
    ).fetchall()
    counts = {int(number) - first: count for number, count in binned}
    # Without what multiplying adds: 0.15 and not 0.15000000000000002.
    digits = max(0, 1 - math.floor(math.log10(step)))
    bounds = [round((first + i) * step, digits) for i in range(max(counts) + 2)]
    bars = [
        HistogramBar(low, high, counts.get(i, 0)) for i, (low, high) in enumerate(itertools.pairwise(bounds))
    ]
    name, unit = column.casefold(), "value"
    if name.endswith(CHARACTERS):
        unit = "characters"
    elif "token" in name:
        unit = "tokens"
    elif "pass_rate" in name:
        unit = "share of answers that are right"
    return Histogram(column, bars, counted, rows - counted, mean, median, unit, max(counts.values()))


def bin_step(low: float, high: float, *, whole: bool) -> float:
    """Returns the width of bins: 1, 2 or 5 times a power of ten, and a whole number for whole numbers."""
    if not whole and low >= 0 and high <= 1:
        return RATE_STEP
    span = high / MOST_BARS - low / MOST_BARS  # not (high - low), which may be beyond what a float holds
    if span <= 0:
        return 1.0 if whole else 10.0 ** math.floor(math.log10(abs(high)))
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span * (1 - HAIR))
    return max(1.0, step) if whole else step
