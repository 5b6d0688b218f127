"""A data set as a table, whose rows DuckDB filters, searches, sorts and counts directly in the file."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
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
    condition_sql,
    conversation_sql,
    open_database,
    order_sql,
    quote_name,
    quote_text,
)
from treetune.view.store.readers import DataSet, file_in_sql, rates_sql, read_saved_split, read_wandb_table

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

LENGTH_SUFFIX = ".characters"
"""The suffix of the column that has the lengths of a column of text: "prompt.characters"."""

CHARACTERS_OF_BEGINNING = 160
"""The most characters of a text that a list of rows shows."""
DEEPEST_LINE = 100
"""The most levels of nesting in a line of JSON. DuckDB fails at 128."""
LONGEST_LINE = 64 * 2**20
"""The most bytes of a line of JSON."""
MOST_FIELD_LEVELS, MOST_COLUMNS = 2, 400
"""The number of levels of nested fields that become columns, and the number of columns from which on nested
fields don't."""

KEPT_RESULTS, KEPT_SEARCHES = 64, 3
"""The number of counts and histograms that are kept, and the number of results of searches. These are fewer,
because a result may have millions of rows."""

ROW_NUMBER = "row number"
"""The name of the column with the number of each row in the file, from 0."""

MOST_BARS = 24
"""About the most bars of a histogram."""
RATE_STEP = 0.05
"""The width of bins for values from 0 to 1, such as pass rates. Values of exactly 1 have a bin for
themselves."""

ROUNDING_SHARE = 1e-9
"""A share of the width of a bin. A value that is below a bin's lower bound by no more than this share,
because of rounding, still belongs to the bin."""

T = TypeVar("T")

# Names of DuckDB's types.
_INTEGER_TYPES = {"tinyint", "smallint", "integer", "bigint", "utinyint", "usmallint", "uinteger", "ubigint"}
_TYPES_AS_DOUBLE = {"float", "double", "decimal", "hugeint", "uhugeint"}
_TYPES_AS_TEXT = {"date", "time", "timestamp", "timestamp with time zone", "uuid"}


@dataclass(frozen=True)
class DataColumn:
    """A column that rows can be filtered and sorted by.

    Example::

        DataColumn("extra_info.index", "BIGINT", "BIGINT", "struct_extract(\\"extra_info\\", 'index')", 1)
    """

    name: str
    type: str
    """The type in the file; empty for lengths, which are computed."""
    kind: str
    """The type as which the column is compared: VARCHAR, BOOLEAN, BIGINT or DOUBLE."""
    sql: str
    """The SQL of the column's values."""
    depth: int = 0
    """The level of nesting; 0 for a column of the file."""


@dataclass(frozen=True)
class HistogramBar:
    """A bar of a histogram: `count` values are at least `low` and below `high`."""

    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Histogram:
    """A histogram of a column's values."""

    column: str
    bars: Sequence[HistogramBar]
    counted: int
    """The number of finite values."""
    missing: int
    """The number of rows without a finite value."""
    mean: float
    median: float
    unit: str
    """What the values are, for the axis: "tokens", "characters", "share of correct answers" or "value"."""
    highest: int
    """The count of the highest bar."""


class DataSetTable:
    """The rows of a data set, numbered from 0 in the file's order. Safe for several threads.

    Raises ValueError for a file that can't be read.
    """

    def __init__(self, data: DataSet) -> None:
        import duckdb

        self.data = data
        self._lock = threading.Lock()
        self._connection = open_database()
        self._cache: OrderedDict[Hashable, Any] = OrderedDict()
        """Results of queries that are kept for further calls, such as histograms, the least recently used
        first."""
        self._searches: OrderedDict[Hashable, Any] = OrderedDict()
        """The rows that contain a searched text, for the last few searches."""
        self._copy: Any = None
        """A temporary copy of a file of JSON lines without its bad lines, which is deleted with this
        object."""
        self._arrow: pa.Table | None = None
        """The rows of a file that DuckDB can't read itself; None if it can."""
        try:
            # `_source_sql` is the SQL after FROM for the file's rows, and `note` a remark on the file.
            self._source_sql, self.note = self._make_source_sql()
            self.columns = {column.name: column for column in self._find_columns()}
            counted = self._new_cursor().execute(f"SELECT count(*) FROM {self._source_sql}")
            [(total,)] = counted.fetchall()
        except (duckdb.Error, RuntimeError) as error:  # RuntimeError: a name that is not valid text
            raise ValueError(f"{data.path} can't be read: {error}") from error
        self.total: int = total
        self.kinds = {name: column.kind for name, column in self.columns.items()}
        columns = ", ".join(f"{column.sql} AS {quote_name(column.name)}" for column in self.columns.values())
        # The SQL after FROM for the rows with their numbers and all columns, the derived ones included.
        self._rows_sql = f"(SELECT {quote_name(ROW_NUMBER)}, {columns} FROM {self._source_sql})"

    def names(self) -> list[str]:
        """Returns the names of the file's columns, without nested fields."""
        return [column.name for column in self.columns.values() if not column.depth]

    def numeric(self) -> list[str]:
        """Returns the names of all columns of numbers, nested fields and lengths included."""
        return [name for name, kind in self.kinds.items() if kind not in ("VARCHAR", "BOOLEAN")]

    # Questions

    def ask(self, question: RowQuery, shown_columns: Sequence[str]) -> RowPage:
        """Returns the page of rows that a question asks for.

        Each row has its number under `ROW_NUMBER`, and the columns `shown_columns`, whose texts are
        shortened. Raises ValueError for a column or an operator that doesn't exist.
        """
        where, values, matching = self._make_condition(question.filters, question.search)
        order = order_sql(question, self.kinds, self.kinds, quote_name(ROW_NUMBER), "rows")
        # First only the numbers of this page's rows are read, so that few columns are sorted. Then the shown
        # columns of these rows are read.
        numbers_query = (
            f"SELECT {quote_name(ROW_NUMBER)} FROM {self._rows_sql} WHERE {where} ORDER BY {order}"
            f" LIMIT {question.size} OFFSET {question.rows_before_page}"
        )
        numbers = [number for (number,) in self._run_query(numbers_query, values, matching).fetchall()]
        rows: dict[int, dict[str, Any]] = {}
        if numbers:
            columns = [quote_name(ROW_NUMBER)]
            for name in shown_columns:
                is_text = self.kinds[name] == "VARCHAR"
                # One character more than is shown is read, so that the page notices that the text is longer.
                shortened = f"left({quote_name(name)}, {CHARACTERS_OF_BEGINNING + 1}) AS {quote_name(name)}"
                columns.append(shortened if is_text else quote_name(name))
            is_on_page = f"{quote_name(ROW_NUMBER)} IN ({', '.join(map(str, numbers))})"
            query = f"SELECT {', '.join(columns)} FROM {self._rows_sql} WHERE {is_on_page}"
            rows = {row[ROW_NUMBER]: row for row in as_rows(self._run_query(query))}
        if matching is not None:
            total = matching.num_rows
        elif question.filters:
            count = f"SELECT count(*) FROM {self._rows_sql} WHERE {where}"
            key = "total", tuple(question.filters)
            total = self._compute_once(key, lambda: self._run_query(count, values).fetchone()[0])
        else:
            total = self.total
        # A row can only be missing if the file has changed between the two queries.
        return RowPage([rows[number] for number in numbers if number in rows], total)

    def row(self, number: int) -> dict[str, Any]:
        """Returns the whole row with this number, as the file has it, without null fields.

        Fields of a prepared Parquet file that have JSON as text are parsed. Raises NotThere if there is no
        row with this number, and ValueError for a row that can't be read.
        """
        path, kind = self.data.path, self.data.kind
        # An estimate of difficulty has a pass rate for each row of its input. While it is unfinished, it has
        # fewer rates than the input has rows, so the number of a row may be larger than `total`.
        if kind != "estimate" and not 0 <= number < self.total:
            raise NotThere(f"{self.data.name} has no row {number}: it has rows 0 to {self.total - 1}")
        if kind == "parquet":
            return parquet_row(path, number)
        if self._arrow is not None:  # the rows are in memory, because DuckDB can't read the file
            row = self._arrow.slice(number, 1).drop_columns([ROW_NUMBER]).to_pylist()[0]
            return {name: value for name, value in row.items() if value is not None}
        if kind == "lines":
            with path.open("rb") as file:
                lines = (line for line in file if line.strip())  # blank lines are not rows
                line = next(itertools.islice(lines, number, None), b"")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            return row if isinstance(row, dict) else {"unreadable line": line.decode("utf-8", "replace")}
        # The only other kind is "estimate".
        query = f"SELECT * FROM {self._rows_sql} WHERE {quote_name(ROW_NUMBER)} = {number}"
        rows = as_rows(self._run_query(query))
        if not rows:
            raise NotThere(f"{self.data.name} has no rate of row {number} yet")
        rate = {name: rows[0][name] for name in self.names()}
        if not (path / "rows.parquet").is_file():
            return rate
        # The row of rows.parquet, the estimate's input, has the whole prompt and the reference answer. They
        # take the place of the columns `asked` and `gold`.
        numbers = {name: value for name, value in rate.items() if name not in ("asked", "gold")}
        return parquet_row(path / "rows.parquet", number) | numbers

    def check_numeric(self, columns: Sequence[str]) -> None:
        """Raises ValueError for a column that isn't numeric."""
        for name in columns:
            if name not in self.numeric():
                raise ValueError(
                    f"{name!r} is not a column of numbers: there are {', '.join(self.numeric())}"
                )

    def make_histograms(
        self, columns: Sequence[str], filters: Sequence[ColumnFilter], search: str
    ) -> list[Histogram]:
        """Returns histograms of columns over the rows that match the filters and the searched text.

        A column that has no finite number in these rows has no histogram. Raises ValueError for a column that
        isn't numeric.
        """
        self.check_numeric(columns)
        if not columns:
            return []

        def count_values() -> list[Histogram]:
            where, values, matching = self._make_condition(filters, search)
            rows = f"{self._rows_sql} WHERE {where}"
            return histograms_of(lambda query: self._run_query(query, values, matching), rows, columns)

        key = "histograms", tuple(columns), tuple(filters), search
        return self._compute_once(key, count_values)

    def _make_condition(
        self, filters: Sequence[ColumnFilter], search: str
    ) -> tuple[str, list[Any], pa.Table | None]:
        """Returns the SQL after WHERE, the values of its `?`, and the table `matching` that the SQL reads.

        That table has the numbers of the rows that the filters and the search choose, and is kept, so that
        further queries about the same search don't read the texts again. Without a search, it is None.
        """
        where, values = condition_sql(filters, self.kinds, self.kinds, "rows")
        if not search:
            return where, values, None

        def find_matching_rows() -> pa.Table:
            """Returns the numbers of the rows that satisfy the filters and have the searched text."""
            import pyarrow as pa

            text_columns = [name for name in self.names() if self.kinds[name] == "VARCHAR"]
            conditions = [f"contains(lower({quote_name(name)}), lower(?))" for name in text_columns]
            contains = " OR ".join(conditions) or "false"  # without a column of texts, no row matches
            query = f"SELECT {quote_name(ROW_NUMBER)} FROM {self._rows_sql} WHERE {where} AND ({contains})"
            values_of_query = [*values, *[search] * len(text_columns)]
            return pa.table(self._run_query(query, values_of_query).fetchnumpy())

        key = "matching", tuple(filters), search
        matching = self._compute_once(key, find_matching_rows, searches=True)
        # The search has already applied the filters, so they aren't repeated here.
        return f"{quote_name(ROW_NUMBER)} IN (SELECT {quote_name(ROW_NUMBER)} FROM matching)", [], matching

    def _compute_once(self, key: Hashable, make: Callable[[], T], *, searches: bool = False) -> T:
        """Returns the result of `make`, which is kept under `key` for further calls.

        If there are too many results, the least recently used one is dropped. Results of searches are kept
        apart, because fewer of them are kept.
        """
        cache, most_results = (self._searches, KEPT_SEARCHES) if searches else (self._cache, KEPT_RESULTS)
        with self._lock:
            if key in cache:
                cache.move_to_end(key)
                return cache[key]
        value = make()  # without the lock, because it may take seconds
        with self._lock:
            cache[key] = value
            while len(cache) > most_results:
                cache.popitem(last=False)
        return value

    # DuckDB

    def _run_query(self, text: str, values: Sequence[Any] = (), matching: pa.Table | None = None) -> Any:
        """Returns the cursor of an executed query. `matching` is the table that `_make_condition` returns."""
        import duckdb

        try:
            cursor = self._new_cursor()
            if matching is not None:
                cursor.register("matching", matching)
            return cursor.execute(text, list(values))
        except duckdb.Error as error:  # the file has changed, or is damaged in a part that wasn't read before
            raise ValueError(f"{self.data.path} can't be read: {error}") from error

    def _new_cursor(self) -> duckdb.DuckDBPyConnection:
        """Returns a new cursor, which knows the rows in memory as the table `arrow_table`."""
        with self._lock:
            cursor = self._connection.cursor()
        if self._arrow is not None:
            cursor.register("arrow_table", self._arrow)  # for this cursor only: others register it themselves
        return cursor

    def _make_source_sql(self) -> tuple[str, str]:
        """Returns the SQL after FROM, and a remark on the data, which may be empty.

        The SQL's rows have their numbers in the column `ROW_NUMBER`.
        """
        import numpy as np
        import pyarrow as pa

        path = self.data.path
        if self.data.kind == "parquet":
            # Hive partitioning is off: it would add a column if the file is in a folder named `key=value`.
            file = f"read_parquet({file_in_sql(path)}, file_row_number=true, hive_partitioning=false)"
            columns = f"* EXCLUDE (file_row_number), file_row_number AS {quote_name(ROW_NUMBER)}"
            return f"(SELECT {columns} FROM {file})", ""
        if self.data.kind == "lines":
            return self._make_json_lines_sql()
        if self.data.kind == "estimate":
            text, note = rates_sql(path, ROW_NUMBER)
            return f"({text})", note
        table = read_wandb_table(path) if self.data.kind == "table" else read_saved_split(path)
        self._arrow = table.append_column(ROW_NUMBER, pa.array(np.arange(table.num_rows, dtype=np.int64)))
        return "arrow_table", ""  # the name by which each cursor knows `self._arrow` (`_new_cursor`)

    def _make_json_lines_sql(self) -> tuple[str, str]:
        """Returns the SQL after FROM for a file of JSON lines, and a remark.

        The SQL's rows have their numbers in the column `ROW_NUMBER`. Lines that can't be read become rows of
        nulls, which the remark lists.
        """
        import duckdb

        path = self.data.path

        def read_json(path: Path, arguments: str) -> str:
            """Returns a call of DuckDB's `read_json` with further arguments."""
            return (
                f"read_json({file_in_sql(path)}, format='newline_delimited', ignore_errors=true,"
                f" maximum_object_size={LONGEST_LINE}, {arguments})"
            )

        def types_of_columns(path: Path) -> dict[str, str]:
            """Returns DuckDB's types of the columns, by name."""
            # The types are found from all lines (-1). Values that are nested deeper than six levels stay
            # JSON.
            described = f"DESCRIBE SELECT * FROM {read_json(path, 'sample_size=-1, maximum_depth=6')}"
            return {name: kind for name, kind, *_ in self._new_cursor().execute(described).fetchall()}

        try:
            types = types_of_columns(path)
        except duckdb.Error:  # a line is nested deeper than DuckDB reads
            types = {}
        # With a line that is not an object, DuckDB finds no columns, or only one that is named "json".
        if list(types) in ([], ["json"]):
            self._copy = _without_bad_lines(path)
            path = Path(self._copy.name)
            types = types_of_columns(path)
        # DuckDB would parse texts that look like dates. They stay texts, so that they are shown as written.
        types = {name: "VARCHAR" if kind.lower() in _TYPES_AS_TEXT else kind for name, kind in types.items()}
        columns = ", ".join(f"{quote_text(name)}: {quote_text(kind)}" for name, kind in types.items())
        file = (
            f"(SELECT *, row_number() OVER () - 1 AS {quote_name(ROW_NUMBER)}"
            f" FROM {read_json(path, f'records=true, columns={{{columns}}}')})"
        )
        all_null = " AND ".join(f"{quote_name(name)} IS NULL" for name in types)
        query = (
            f"SELECT {quote_name(ROW_NUMBER)}, count(*) OVER () FROM {file} WHERE {all_null}"
            " ORDER BY 1 LIMIT 3"
        )
        unreadable = self._new_cursor().execute(query).fetchall()
        if not unreadable:
            return file, ""
        count = unreadable[0][1]
        numbers = ", ".join(str(number) for number, _ in unreadable)
        return file, (
            f"{count} lines can't be read as JSON objects (cut off, another value, nested too deeply, not in"
            f" UTF-8, or with half a character), and are shown as empty rows: {numbers}"
            f"{', …' if count > len(unreadable) else ''}"
        )

    def _find_columns(self) -> Iterator[DataColumn]:
        """Yields all columns of the file, each followed by its length and its nested fields.

        Lengths and nested fields are left out from the `MOST_COLUMNS`-th column on.
        """
        query = f"SELECT * EXCLUDE ({quote_name(ROW_NUMBER)}) FROM {self._source_sql}"
        relation = self._new_cursor().sql(query)
        described = list(zip(relation.columns, relation.types, strict=True))
        taken_names = {name.casefold() for name, _ in described}
        count = 0
        for name, kind in described:
            for column in _columns_of_field(name, quote_name(name), kind, depth=0):
                key = column.name.casefold()
                # A nested field is left out, too, if its name is that of another column ("a.b").
                if column.depth and (key in taken_names or count >= MOST_COLUMNS):
                    continue
                taken_names.add(key)
                count += 1
                yield column


def _without_bad_lines(path: Path) -> Any:
    """Returns a temporary copy of a file of JSON lines that DuckDB can read.

    An empty object takes the place of each line that DuckDB can't read, so that the numbers of the other rows
    stay the same. Raises ValueError for a file without any row.
    """
    copied = tempfile.NamedTemporaryFile(suffix=".jsonl")  # noqa: SIM115 (it stays open for the caller)
    has_row = False
    with path.open("rb") as file:
        for line in filter(bytes.strip, file):
            try:
                row = json.loads(line)
                # DuckDB can't read an object that has a field with an empty name.
                is_readable = isinstance(row, dict) and "" not in row and _nesting_depth(row) <= DEEPEST_LINE
            except (ValueError, RecursionError):
                is_readable = False
            has_row = has_row or is_readable
            copied.write(line if is_readable else b"{}\n")
    copied.flush()
    if not has_row:
        raise ValueError(f"{path} has no row: none of its lines is a JSON object")
    return copied


def _nesting_depth(value: Any) -> int:
    """Returns the levels of nesting in a JSON value: 3 for {"a": [1]}."""
    members: Iterable[object] = ()
    if isinstance(value, dict):
        members = value.values()
    elif isinstance(value, list):
        members = value
    return 1 + max(map(_nesting_depth, members), default=0)


def _is_conversation(kind: Any) -> bool:
    """Returns whether a type of DuckDB is that of a conversation: a list of structs with texts `role` and
    `content`."""
    if kind.id != "list":
        return False
    [(_, element)] = kind.children
    if element.id != "struct":
        return False
    texts = {field for field, field_kind in element.children if field_kind.id == "varchar"}
    return {"role", "content"} <= texts


def _columns_of_field(name: str, sql: str, kind: Any, depth: int) -> Iterator[DataColumn]:
    """Yields a column, then the column with the lengths of its texts if it has texts, then its nested fields.

    Args:
        name: The name of the column.
        sql: The SQL of the column's values in the file.
        kind: DuckDB's type of the column.
        depth: The level of nesting; 0 for a column of the file.
    """
    is_conversation = _is_conversation(kind)
    compared_kind, to_sql = "VARCHAR", f"CAST({sql} AS VARCHAR)"
    if kind.id == "boolean":
        compared_kind, to_sql = "BOOLEAN", sql
    elif kind.id in _INTEGER_TYPES:
        compared_kind, to_sql = "BIGINT", sql
    elif kind.id in _TYPES_AS_DOUBLE:
        compared_kind, to_sql = "DOUBLE", f"CAST({sql} AS DOUBLE)"
    elif str(kind) == "JSON":
        to_sql = f"({sql} ->> '$')"  # JSON as text, where a string has no quotes
    elif is_conversation:
        to_sql = conversation_sql(sql)
    elif kind.id in ("struct", "list", "map", "array", "union"):
        to_sql = f"CAST(to_json({sql}) AS VARCHAR)"
    yield DataColumn(name=name, type=str(kind), kind=compared_kind, sql=to_sql, depth=depth)
    if depth >= MOST_FIELD_LEVELS:
        return
    if kind.id == "varchar" or is_conversation:
        yield DataColumn(
            name=name + LENGTH_SUFFIX,
            type="",  # the file has no such column
            kind="BIGINT",
            sql=f"length({to_sql})",
            depth=depth + 1,
        )
    if kind.id == "struct":
        for field, field_kind in kind.children:
            field_sql = f"struct_extract({sql}, {quote_text(field)})"
            yield from _columns_of_field(f"{name}.{field}", field_sql, field_kind, depth + 1)


# Histograms


def histograms_of(ask: Callable[[str], Any], rows: str, columns: Sequence[str]) -> list[Histogram]:
    """Returns histograms of columns, without columns that have no finite number.

    `rows` is SQL after FROM. `ask` runs a query with the values of the `?` in `rows`, and returns its cursor.
    """
    # The rows are read only once, into a table with columns x0, x1, …, in which a value that isn't finite is
    # null.
    as_doubles = [f"CAST({quote_name(name)} AS DOUBLE) AS x{i}" for i, name in enumerate(columns)]
    finite = [f"if(isfinite(x{i}), x{i}, NULL) AS x{i}" for i in range(len(columns))]
    doubles = f"SELECT {', '.join(as_doubles)} FROM {rows}"
    # Only this cursor can read the temporary table.
    cursor = ask(f"CREATE TEMP TABLE numbers AS SELECT {', '.join(finite)} FROM ({doubles})")
    histograms = [_make_histogram(cursor, name, f"x{i}") for i, name in enumerate(columns)]
    return [histogram for histogram in histograms if histogram is not None]


def _make_histogram(cursor: duckdb.DuckDBPyConnection, column: str, x: str) -> Histogram | None:
    """Returns the histogram of a column of the cursor's table `numbers`, in bins with round bounds.

    `x` is the name of the column in the table, and `column` the name that pages show. Returns None if the
    column has no number.
    """
    facts = cursor.execute(
        f"SELECT count(*), count({x}), min({x}), max({x}), avg({x}), median({x}), bool_and({x} = floor({x}))"
        " FROM numbers"
    ).fetchone()
    assert facts is not None
    rows, counted, low, high, mean, median, are_whole = facts
    if not counted:
        return None
    step = bin_step(low, high, whole=are_whole)
    # Bin number n begins at n · step. A value at the beginning of a bin may be slightly below it by rounding,
    # so a tiny share of a bin is added to each value.
    first = math.floor(low / step + ROUNDING_SHARE)
    binned = cursor.execute(
        f"SELECT floor({x} / {step!r} + {ROUNDING_SHARE!r}) AS bin, count(*) FROM numbers"
        f" WHERE {x} IS NOT NULL GROUP BY bin"
    ).fetchall()
    counts = {int(number) - first: count for number, count in binned}  # by the bin's position, from 0
    # Bounds are rounded, because 3 · 0.05 is 0.15000000000000002.
    digits = max(0, 1 - math.floor(math.log10(step)))
    n_bars = max(counts) + 1
    bounds = [round((first + i) * step, digits) for i in range(n_bars + 1)]
    bars = [HistogramBar(bounds[i], bounds[i + 1], counts.get(i, 0)) for i in range(n_bars)]
    name, unit = column.casefold(), "value"
    if name.endswith(LENGTH_SUFFIX):
        unit = "characters"
    elif "token" in name:
        unit = "tokens"
    elif "pass_rate" in name:
        unit = "share of correct answers"
    return Histogram(column, bars, counted, rows - counted, mean, median, unit, max(counts.values()))


def bin_step(low: float, high: float, *, whole: bool) -> float:
    """Returns the width of bins: 1, 2 or 5 times a power of ten, and a whole number for whole numbers.

    Numbers from 0 to 1, such as pass rates, always get `RATE_STEP`, unless all are whole.

    Example: the numbers 0 to 1000 get bins of 50.
    """
    if not whole and low >= 0 and high <= 1:
        return RATE_STEP
    # With bins narrower than `least_width`, there would be more than MOST_BARS. Each number is divided before
    # the subtraction, because `high - low` may overflow.
    least_width = high / MOST_BARS - low / MOST_BARS
    if least_width <= 0:  # all values are equal
        return 1.0 if whole else 10.0 ** math.floor(math.log10(abs(high)))
    power = 10.0 ** math.floor(math.log10(least_width))
    # By rounding, `least_width` may be slightly above the round width that it should equal, so it is reduced
    # a little.
    round_widths = [power * factor for factor in (1, 2, 5, 10)]
    step = next(width for width in round_widths if width >= least_width * (1 - ROUNDING_SHARE))
    return max(1.0, step) if whole else step
