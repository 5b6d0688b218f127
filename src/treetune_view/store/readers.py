"""The files of data sets, and how DuckDB and Arrow read them: saved splits, estimates of difficulty."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treetune_view.store.folders import stat_of
from treetune_view.store.queries import conversation, literal, quoted

if TYPE_CHECKING:
    import pyarrow as pa

COUNTED = "pass_rate, correct, answers, mean_reward, mean_tokens, unfinished"

Kind = Literal["parquet", "lines", "saved", "estimate"]
"""Parquet; JSON lines; a split that ``save_to_disk`` wrote; what `estimate_difficulty` found."""

ESTIMATE, SPLITS, SPLIT = "estimate.json", "dataset_dict.json", "dataset_info.json"
"""Files that say what a folder is: of `estimate_difficulty`, of a saved data set, of one split of it."""

ENDINGS = (".parquet", ".jsonl")
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


# Estimates of difficulty


def rates(folder: Path, number: str) -> tuple[str, str]:
    """Returns a SELECT of a row for each row of the input of `estimate_difficulty`, its number as `number`;
    and a remark on it.

    Where the shards are put together, the rates come from rates.parquet, with the rows themselves; before,
    they are of what is graded by now. Raises ValueError where nothing is graded yet.
    """
    from treetune_data.difficulty.merging import RATES_FILE
    from treetune_data.difficulty.shard import GRADES, NOT_ASKED

    merged, rows = folder / RATES_FILE, folder / "rows.parquet"
    if merged.is_file():
        own = f'"index" AS {quoted(number)}, data_source, {COUNTED}, unavailable'
        rate = f"SELECT {own} FROM read_parquet({file_in_sql(merged)})"
        if not rows.is_file():
            return rate, ""
        asked = (
            "SELECT file_row_number, CASE WHEN apply_chat_template OR raw_prompt = ''"
            f" THEN {conversation('prompt')} ELSE raw_prompt END AS asked,"
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
    from treetune_data.difficulty.shard import ANSWERS, GRADES

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
