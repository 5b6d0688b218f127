"""The files of data sets, and how DuckDB and Arrow read them: saved splits, W&B's tables, estimates of
difficulty."""

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
from treetune.view.store.queries import conversation_sql, literal, quoted
from treetune.view.text import writable

if TYPE_CHECKING:
    import pyarrow as pa

COUNTED = "pass_rate, correct, answers, mean_reward, mean_tokens, unfinished"

Kind = Literal["parquet", "lines", "saved", "table", "estimate"]
"""Parquet; JSON lines; a split that ``save_to_disk`` wrote; a W&B table's JSON; what `estimate_difficulty`
found."""

LARGEST_TABLE = 256 * 2**20
"""Bytes of a W&B table's JSON: it is read as a whole."""

ESTIMATE, SPLITS, SPLIT = "estimate.json", "dataset_dict.json", "dataset_info.json"
"""Files that say what a folder is: of `estimate_difficulty`, of a saved data set, of one split of it."""

ENDINGS = (".parquet", ".jsonl", ".json")

_TABLE = re.compile(rb'\s*\{\s*"(?:_type|columns|column_types|ncols)"')
"""The beginning of a W&B table."""
_TABLE_HEAD_BYTES = 200

_EXAMPLE_PART = re.compile(r"(input|output|score)_(\d+)")
"""Columns of a table of validation answers with a row for each step, as verl logs it."""
_GRADES = (
    "{'row': 'BIGINT', 'sample': 'BIGINT', 'reward': 'DOUBLE', 'correct': 'BOOLEAN', 'outcome': 'VARCHAR',"
    " 'complete': 'BOOLEAN', 'tokens': 'BIGINT'}"
)


@dataclass(frozen=True)
class DataSet:
    """A data set, by its name in addresses. `known_from` says why it may be read."""

    name: str
    path: Path
    kind: Kind
    known_from: str

    @property
    def mark(self) -> str:
        """Another text as soon as a file of it is another."""
        return repr([(str(path), stat_of(path)) for path in self.files()])

    @property
    def size(self) -> int:
        """Bytes on disk; 0 for what has gone meanwhile."""
        return sum(path.stat().st_size for path in self.files() if path.is_file())

    def files(self) -> list[Path]:
        if self.kind == "estimate":
            return [*sorted(self.path.glob("shards/*/*.jsonl")), *sorted(self.path.glob("*.parquet"))]
        return sorted(self.path.glob("*.arrow")) if self.kind == "saved" else [self.path]


def kind_of(path: Path) -> Kind | None:
    """Returns what a file or a folder holds; None for no data set."""
    if path.is_dir():
        if (path / ESTIMATE).is_file():
            return "estimate"
        return "saved" if (path / SPLIT).is_file() and (path / "state.json").is_file() else None
    if path.suffix == ".json":
        is_table = path.name.endswith(".table.json") or _begins_as_table(path, stat_of(path))
        return "table" if is_table else None
    kinds: dict[str, Kind] = {".parquet": "parquet", ".jsonl": "lines"}
    return kinds.get(path.suffix)


def file_in_sql(path: Path) -> str:
    """Writes the path of one file in SQL, whatever signs of patterns are in its name."""
    return literal(glob.escape(str(path)))


def saved_split(folder: Path) -> pa.Table:
    """Reads a split of a saved data set as it lies on disk: not copied, and without `datasets`, which takes
    seconds to import. Raises ValueError for one that can't be read."""
    import pyarrow as pa

    try:
        state = json.loads((folder / "state.json").read_text())
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise ValueError("its rows are picked by indices: save it again with save_to_disk")
        names = [one["filename"] for one in state["_data_files"]]
        if any(Path(name).name != name for name in names):
            raise ValueError(f"state.json names files elsewhere: {', '.join(names)}")
        parts = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
        for part in parts:
            part.validate(full=True)  # an offset that is wrong points anywhere
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the data set in {folder} can't be read: {error}") from error
    return pa.concat_tables(parts)


# W&B's tables


@functools.lru_cache(maxsize=4096)
def _begins_as_table(path: Path, _: object) -> bool:
    """Reads the file again only when it is another."""
    try:
        with path.open("rb") as file:
            return _TABLE.match(file.read(_TABLE_HEAD_BYTES)) is not None
    except OSError:
        return False


def wandb_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a W&B table's JSON (``columns`` and ``data``). Raises ValueError for another JSON."""
    if path.stat().st_size > LARGEST_TABLE:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, and a W&B table is read up to {LARGEST_TABLE:,}:"
            " write its rows as JSON lines or Parquet"
        )
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    columns = content.get("columns") if isinstance(content, dict) else None
    data = content.get("data") if isinstance(content, dict) else None
    columns = columns if isinstance(columns, list) else []
    rows: list[Any] = data if isinstance(data, list) else [None]
    if not columns or not all(isinstance(row, list) and len(row) == len(columns) for row in rows):
        raise ValueError(
            f"{path} is no W&B table: it should have columns, a list of names, and data, whose rows are as"
            " long"
        )
    names = list[str]()
    for column in columns:
        written = writable(str(column))
        name, number = written, 2
        # DuckDB tells no names apart that differ in the size of letters alone.
        while name.casefold() in map(str.casefold, names):
            name, number = f"{written}_{number}", number + 1
        names.append(name)
    return [dict(zip(names, row, strict=True)) for row in rows]


def wandb_table(path: Path) -> pa.Table:
    """Returns the rows of a W&B table as columns of one type each. Raises ValueError for another JSON.

    A table of validation answers, in which each row is a step with ``input_1``, ``output_1``, ``score_1``,
    ``input_2`` and so on, has a row for each answer instead: step, example, input, output, score.
    """
    import pyarrow as pa

    rows = wandb_rows(path)
    names = list(rows[0]) if rows else json.loads(path.read_bytes())["columns"]
    if any(_EXAMPLE_PART.fullmatch(str(name)) for name in names):
        rows = [answer for number, row in enumerate(rows) for answer in _examples_of(row, number)]
        names = ["step", "example", "input", "output", "score"]
    return pa.table({str(name): _column([row.get(name) for row in rows]) for name in names})


def _examples_of(row: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yields the answers of a step's row."""
    examples: dict[int, dict[str, Any]] = {}
    for name, value in row.items():
        if part := _EXAMPLE_PART.fullmatch(name):
            examples.setdefault(int(part[2]), {})[part[1]] = value
    for example, parts in sorted(examples.items()):
        yield {"step": row.get("step", number), "example": example, **parts}


def _column(values: list[Any]) -> pa.Array:
    """Makes a column of one type: of the values as they are where they have one, else of text and JSON."""
    import pyarrow as pa

    if not any(isinstance(value, str | list | dict) for value in values):
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError):
            pass
    texts = [
        value if isinstance(value, str | None) else json.dumps(value, ensure_ascii=False) for value in values
    ]
    return pa.array([None if text is None else writable(text) for text in texts], pa.string())


# Estimates of difficulty


def rates(folder: Path, number: str) -> tuple[str, str]:
    """Returns a SELECT of a row for each row of the input of `estimate_difficulty`, its number as `number`;
    and a remark on it.

    Where the shards are put together, the rates come from rates.parquet, with the rows themselves; before,
    they are of what is graded by now. Raises ValueError where nothing is graded yet.
    """
    from treetune.data.difficulty.merging import RATES_FILE
    from treetune.data.difficulty.shard import GRADES, NOT_ASKED

    merged, rows = folder / RATES_FILE, folder / "rows.parquet"
    if merged.is_file():
        own = f'"index" AS {quoted(number)}, data_source, {COUNTED}, unavailable'
        rate = f"SELECT {own} FROM read_parquet({file_in_sql(merged)})"
        if not rows.is_file():
            return rate, ""
        asked = (
            "SELECT file_row_number, CASE WHEN apply_chat_template OR raw_prompt = ''"
            f" THEN {conversation_sql('prompt')} ELSE raw_prompt END AS asked,"
            f" reward_model.ground_truth AS gold FROM read_parquet({file_in_sql(rows)}, file_row_number=true)"
        )
        joined = f"file_row_number = rate.{quoted(number)}"
        return (
            f"SELECT asked, gold, rate.* FROM ({rate}) AS rate LEFT JOIN ({asked}) AS asked ON {joined}",
            "",
        )
    files = [path for path in sorted(folder.glob(f"shards/*/{GRADES}")) if path.stat().st_size]
    if not files:
        raise ValueError(f"no answer is graded yet in {folder}: they appear as they are")
    # The last line may still be written; an answer that was graded twice counts once.
    read = (
        f"read_json([{', '.join(map(file_in_sql, files))}], format='newline_delimited', records=true,"
        f" ignore_errors=true, columns={_GRADES})"
    )
    once = (
        'SELECT "row", sample, any_value(reward) AS reward, any_value(correct) AS correct,'
        f" any_value(complete) AS complete, any_value(tokens) AS tokens FROM {read}"
        f' WHERE "row" IS NOT NULL AND outcome <> {literal(NOT_ASKED)} GROUP BY "row", sample'
    )
    graded = (
        f'SELECT "row" AS {quoted(number)}, {COUNTED} FROM (SELECT "row", count(*) AS answers,'
        " count(*) FILTER (correct) AS correct, count(*) FILTER (correct) / count(*) AS pass_rate,"
        " avg(reward) AS mean_reward,"
        " avg(tokens) AS mean_tokens, count(*) FILTER (NOT complete) AS unfinished"
        f' FROM ({once}) GROUP BY "row")'
    )
    return graded, (
        "It is not finished: rates are of the answers graded by now, and rows without any are missing"
    )


def answers_to(folder: Path, row: int) -> list[dict[str, Any]]:
    """Returns the answers to a row of `estimate_difficulty`, by sample, each with its `text` and, where it is
    graded, `reward`, `outcome`, `extracted` and `message`."""
    from treetune.data.difficulty.shard import ANSWERS, GRADES

    answers: dict[int, dict[str, Any]] = {}
    for name in (ANSWERS, GRADES):
        for path in sorted(folder.glob(f"shards/*/{name}")):
            own: dict[int, dict[str, Any]] = {}
            for line in _lines_of(path, row):
                own.setdefault(line["sample"], line)
            for sample, line in own.items():
                answers[sample] = answers.get(sample, {}) | line
            if own:
                break  # a row is in one shard
    return [answers[sample] for sample in sorted(answers)]


def _lines_of(path: Path, row: int) -> Iterator[dict[str, Any]]:
    """Yields the lines about a row. Others are told by how a line begins, and not read: there may be
    millions."""
    beginning = b'{"row":%d,' % row
    with path.open("rb") as file:
        for line in file:
            if line.startswith(beginning) and line.endswith(b"\n"):
                try:
                    yield json.loads(line)
                except ValueError:  # a crash of the machine can leave such
                    continue
