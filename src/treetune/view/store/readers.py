"""Finds the kind of a data set, and reads the kinds that are no plain file for DuckDB: saved splits, W&B
tables, and estimates of difficulty."""

from __future__ import annotations

import functools
import glob
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treetune.view.store.folders import stat_of
from treetune.view.store.queries import conversation_sql, quote_name, quote_text
from treetune.view.text import make_writable

if TYPE_CHECKING:
    import pyarrow as pa

RATE_COLUMNS = "pass_rate, correct, answers, mean_reward, mean_tokens, unfinished"
"""The columns of an estimate of difficulty with rates and counts, as SQL."""

DataSetKind = Literal["parquet", "lines", "saved", "table", "estimate"]
"""The kind of a data set: a Parquet file, a file of JSON lines, the folder of a split that ``save_to_disk``
wrote, a W&B table in JSON, or a folder that `estimate_difficulty` wrote."""

LARGEST_TABLE = 256 * 2**20
"""The most bytes of a W&B table that is read. Its JSON must be read as a whole."""

ESTIMATE_FILE, SPLITS_FILE, SPLIT_FILE = "estimate.json", "dataset_dict.json", "dataset_info.json"
"""The files that mark a folder as an estimate of difficulty, as a saved data set with splits, and as a single
saved split."""

DATA_SET_ENDINGS = (".parquet", ".jsonl", ".json")

_TABLE_BEGINNING = re.compile(rb'\s*\{\s*"(?:_type|columns|column_types|ncols)"')
"""The beginning of a W&B table."""
_TABLE_HEAD_BYTES = 200

_EXAMPLE_PART = re.compile(r"(input|output|score)_(\d+)")
"""The columns of a table of validation answers that has a row for each step, as verl logs it: ``input_1``,
``output_1``, ``score_1``, ``input_2``, …"""
# DuckDB's types of the fields in a file of grades of `estimate_difficulty`.
_GRADE_TYPES = (
    "{'row': 'BIGINT', 'sample': 'BIGINT', 'reward': 'DOUBLE', 'correct': 'BOOLEAN', 'outcome': 'VARCHAR',"
    " 'complete': 'BOOLEAN', 'tokens': 'BIGINT'}"
)


@dataclass(frozen=True)
class DataSet:
    """A data set.

    Example: `DataSet("math/train.parquet", Path("/scratch/math/train.parquet"), "parquet", "below
    /scratch")`."""

    name: str
    """The name in addresses."""
    path: Path
    kind: DataSetKind
    known_from: str
    """A description of how the viewer found the data set."""

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever one of its files changes."""
        return repr([(str(path), stat_of(path)) for path in self.files()])

    @property
    def size(self) -> int:
        """The bytes on disk, without files that were deleted meanwhile."""
        return sum(path.stat().st_size for path in self.files() if path.is_file())

    def files(self) -> list[Path]:
        """Returns the files that have the data."""
        if self.kind == "estimate":
            return [*sorted(self.path.glob("shards/*/*.jsonl")), *sorted(self.path.glob("*.parquet"))]
        return sorted(self.path.glob("*.arrow")) if self.kind == "saved" else [self.path]


def kind_of_data_set(path: Path) -> DataSetKind | None:
    """Returns the kind of data set that a file or a folder is. Returns None if it isn't a data set."""
    if path.is_dir():
        if (path / ESTIMATE_FILE).is_file():
            return "estimate"
        return "saved" if (path / SPLIT_FILE).is_file() and (path / "state.json").is_file() else None
    if path.suffix == ".json":
        is_table = path.name.endswith(".table.json") or _begins_as_table(path, stat_of(path))
        return "table" if is_table else None
    kinds: dict[str, DataSetKind] = {".parquet": "parquet", ".jsonl": "lines"}
    return kinds.get(path.suffix)


def file_in_sql(path: Path) -> str:
    """Returns a file's path in SQL, with the characters of glob patterns escaped."""
    return quote_text(glob.escape(str(path)))


def read_saved_split(folder: Path) -> pa.Table:
    """Returns a split of a data set that `save_to_disk` wrote, mapped into memory.

    It doesn't need the package `datasets`, whose import takes seconds. Raises ValueError if the split can't
    be read.
    """
    import pyarrow as pa

    try:
        state = json.loads((folder / "state.json").read_text())
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise ValueError("its rows are picked by indices: save it again with save_to_disk")
        names = [entry["filename"] for entry in state["_data_files"]]
        if any(Path(name).name != name for name in names):
            raise ValueError(f"state.json names files elsewhere: {', '.join(names)}")
        parts = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
        for part in parts:
            part.validate(full=True)  # a wrong offset could point anywhere in memory
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the data set in {folder} can't be read: {error}") from error
    return pa.concat_tables(parts)


# W&B's tables


@functools.lru_cache(maxsize=4096)
def _begins_as_table(path: Path, stat: object) -> bool:
    """Returns whether a JSON file begins like a W&B table.

    `stat` is only a part of the cache's key, so that a changed file is read again.
    """
    try:
        with path.open("rb") as file:
            return _TABLE_BEGINNING.match(file.read(_TABLE_HEAD_BYTES)) is not None
    except OSError:
        return False


def read_wandb_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a W&B table, which is JSON with ``columns`` and ``data``.

    Raises ValueError for any other JSON, and for a file of more than LARGEST_TABLE bytes.
    """
    if path.stat().st_size > LARGEST_TABLE:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, and W&B tables are read up to {LARGEST_TABLE:,}:"
            " write its rows as JSON lines or Parquet"
        )
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    table = content if isinstance(content, dict) else {}
    columns: Any = table.get("columns")
    rows: Any = table.get("data")
    is_table = isinstance(columns, list) and len(columns) > 0 and isinstance(rows, list)
    if not is_table or not all(isinstance(row, list) and len(row) == len(columns) for row in rows):
        raise ValueError(
            f"{path} is not a W&B table: it should have columns, a list of names, and data, whose rows are as"
            " long"
        )
    names = list[str]()
    for column in columns:
        wanted_name = make_writable(str(column))
        name, number = wanted_name, 2
        # DuckDB takes names that differ only in case as equal, so they get numbers.
        while name.casefold() in map(str.casefold, names):
            name, number = f"{wanted_name}_{number}", number + 1
        names.append(name)
    return [dict(zip(names, row, strict=True)) for row in rows]


def read_wandb_table(path: Path) -> pa.Table:
    """Returns a W&B table as an Arrow table. Raises ValueError for any other JSON.

    In a table of validation answers, each row is a step with ``input_1``, ``output_1``, ``score_1``,
    ``input_2`` and so on. It is returned with a row for each answer: step, example, input, output, score.
    """
    import pyarrow as pa

    rows = read_wandb_rows(path)
    # Without rows, `read_wandb_rows` doesn't tell the names of the columns.
    names = list(rows[0]) if rows else json.loads(path.read_bytes())["columns"]
    if any(_EXAMPLE_PART.fullmatch(str(name)) for name in names):
        answers: list[dict[str, Any]] = []
        for number, row in enumerate(rows):
            answers += _examples_of(row, number)
        rows = answers
        names = ["step", "example", "input", "output", "score"]
    return pa.table({str(name): _make_column([row.get(name) for row in rows]) for name in names})


def _examples_of(row: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each answer in the row of a step.

    Example: ``{"step": 7, "input_1": "2+2=", "output_1": "4", "score_1": 1.0, "input_2": …}`` has the answer
    ``{"step": 7, "example": 1, "input": "2+2=", "output": "4", "score": 1.0}`` and so on. `number`, the
    number of the row, stands for the step if the row doesn't name it.
    """
    fields_by_example: dict[int, dict[str, Any]] = {}
    for name, value in row.items():
        if match := _EXAMPLE_PART.fullmatch(name):
            field, example = match[1], int(match[2])
            fields_by_example.setdefault(example, {})[field] = value
    for example, fields in sorted(fields_by_example.items()):
        yield {"step": row.get("step", number), "example": example, **fields}


def _make_column(values: list[Any]) -> pa.Array:
    """Returns values as an Arrow column, all of whose values have one type.

    Numbers, or other plain values of one type, stay as they are. If there are texts, lists, objects or
    different types, each value that isn't a text becomes its JSON. None stays null.
    """
    import pyarrow as pa

    if not any(isinstance(value, str | list | dict) for value in values):
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError):  # values of different types, or too large a number
            pass
    texts: list[str | None] = []
    for value in values:
        if value is None:
            texts.append(None)
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            texts.append(make_writable(text))
    return pa.array(texts, pa.string())


# Estimates of difficulty


def rates_sql(folder: Path, number_name: str) -> tuple[str, str]:
    """Returns a SELECT whose rows are the rates of an estimate of difficulty, and a remark on these rows.

    Each row has the rates of one row of `estimate_difficulty`'s input, whose number is in the column
    `number_name`. When the shards have been merged, the rates are those of rates.parquet, with prompts and
    reference answers. Before that, they are over the answers that have been graded so far. Raises ValueError
    if no answer has been graded yet.
    """
    from treetune.data.difficulty.merging import RATES_FILE

    merged_file = folder / RATES_FILE
    if merged_file.is_file():
        return _merged_rates_sql(merged_file, folder / "rows.parquet", number_name), ""
    return _rates_so_far_sql(folder, number_name), (
        "It is not finished: rates are over the answers graded so far, and rows without any are missing"
    )


def _merged_rates_sql(merged_file: Path, input_file: Path, number_name: str) -> str:
    """Returns a SELECT of the rates in rates.parquet, with prompts and reference answers if the input's file
    still exists.

    The number of the input's row is in the column `number_name`.
    """
    # `RATE_COLUMNS` are the names of the columns with rates and counts.
    columns = f'"index" AS {quote_name(number_name)}, data_source, {RATE_COLUMNS}, unavailable'
    rates_query = f"SELECT {columns} FROM read_parquet({file_in_sql(merged_file)})"
    if not input_file.is_file():
        return rates_query
    # The text that was asked is that of the conversation in `prompt` or, if no chat template was applied and
    # `raw_prompt` isn't empty, the plain text `raw_prompt`.
    asked_query = (
        "SELECT file_row_number, CASE WHEN apply_chat_template OR raw_prompt = ''"
        f" THEN {conversation_sql('prompt')} ELSE raw_prompt END AS asked,"
        " reward_model.ground_truth AS gold"
        f" FROM read_parquet({file_in_sql(input_file)}, file_row_number=true)"
    )
    return (
        f"SELECT asked, gold, rate.* FROM ({rates_query}) AS rate"
        f" LEFT JOIN ({asked_query}) AS row_of_input ON file_row_number = rate.{quote_name(number_name)}"
    )


def _rates_so_far_sql(folder: Path, number_name: str) -> str:
    """Returns a SELECT of the rates over the answers that have been graded so far, from the shards' files.

    The number of the input's row is in the column `number_name`. Raises ValueError if no answer has been
    graded yet.
    """
    from treetune.data.difficulty.shard import GRADES_FILE, WITHOUT_ANSWER

    files = [path for path in sorted(folder.glob(f"shards/*/{GRADES_FILE}")) if path.stat().st_size]
    if not files:
        raise ValueError(f"no answer is graded yet in {folder}: load the page again later")
    # `ignore_errors` skips the last line, which may be incomplete while it is written.
    grades_sql = (
        f"read_json([{', '.join(map(file_in_sql, files))}], format='newline_delimited', records=true,"
        f" ignore_errors=true, columns={_GRADE_TYPES})"
    )
    # As in merged rates, answers with these outcomes don't count: for example, a row whose prompt fills the
    # context was not asked, so it has no rate.
    without_answer = ", ".join(quote_text(outcome) for outcome in WITHOUT_ANSWER)
    # An answer that was graded twice counts once.
    distinct_sql = (
        'SELECT "row", sample, any_value(reward) AS reward, any_value(correct) AS correct,'
        f" any_value(complete) AS complete, any_value(tokens) AS tokens FROM {grades_sql}"
        f' WHERE "row" IS NOT NULL AND outcome NOT IN ({without_answer}) GROUP BY "row", sample'
    )
    return (
        f'SELECT "row" AS {quote_name(number_name)}, {RATE_COLUMNS} FROM (SELECT "row", count(*) AS answers,'
        " count(*) FILTER (correct) AS correct, count(*) FILTER (correct) / count(*) AS pass_rate,"
        " avg(reward) AS mean_reward, avg(tokens) AS mean_tokens,"
        " count(*) FILTER (NOT complete) AS unfinished"
        f' FROM ({distinct_sql}) GROUP BY "row")'
    )


def answers_to(folder: Path, row: int) -> list[dict[str, Any]]:
    """Returns the answers to a row of `estimate_difficulty`'s input, in the order of their sample numbers.

    Each has its `text` and, if it has been graded, `reward`, `outcome`, `extracted` and `message`.
    """
    from treetune.data.difficulty.shard import ANSWERS_FILE, GRADES_FILE

    answers: dict[int, dict[str, Any]] = {}
    for name in (ANSWERS_FILE, GRADES_FILE):
        for path in sorted(folder.glob(f"shards/*/{name}")):
            lines: dict[int, dict[str, Any]] = {}
            for line in _lines_of(path, row):
                lines.setdefault(line["sample"], line)  # a sample that was written twice counts once
            for sample, line in lines.items():
                answers[sample] = answers.get(sample, {}) | line
            if lines:
                break  # all answers to a row are in the same shard
    return [answers[sample] for sample in sorted(answers)]


def _lines_of(path: Path, row: int) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file that are about a row.

    There may be millions of other lines, which are recognised by their first bytes and not parsed.
    """
    beginning = b'{"row":%d,' % row
    with path.open("rb") as file:
        for line in file:
            # A line without its end is incomplete: a program is still writing it, or was interrupted.
            if line.startswith(beginning) and line.endswith(b"\n"):
                try:
                    yield json.loads(line)
                except ValueError:  # a crash of the machine can leave a damaged line
                    continue
