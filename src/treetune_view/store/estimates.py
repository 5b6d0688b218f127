"""What `estimate_difficulty` found: a rate of each row, also while it works, and the answers behind it."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treetune_view.store.queries import conversation, literal, quoted

_GRADES = (
    "{'row': 'BIGINT', 'sample': 'BIGINT', 'reward': 'DOUBLE', 'correct': 'BOOLEAN', 'outcome': 'VARCHAR',"
    " 'complete': 'BOOLEAN', 'tokens': 'BIGINT'}"
)


def rates(folder: Path, number: str) -> tuple[str, str]:
    """A SELECT of a row for each row of the input, its number as `number`; and what is to be said of it.

    Where the shards are put together, from rates.parquet, with the rows themselves; before, from what is
    graded by now. Raises ValueError where nothing is graded yet.
    """
    from treetune_data.difficulty.merging import RATES_FILE

    if (folder / RATES_FILE).is_file():
        return _merged(folder / RATES_FILE, folder / "rows.parquet", number), ""
    return _graded(folder, number), (
        "It is not finished: rates are of the answers graded by now, and rows without any are missing"
    )


COUNTED = "pass_rate, correct, answers, mean_reward, mean_tokens, unfinished"


def _merged(path: Path, rows: Path, number: str) -> str:
    own = f'"index" AS {quoted(number)}, data_source, {COUNTED}, unavailable'
    rate = f"SELECT {own} FROM read_parquet({_file(path)})"
    if not rows.is_file():
        return rate
    asked = (
        "SELECT file_row_number, CASE WHEN apply_chat_template OR raw_prompt = ''"
        f" THEN {conversation('prompt')} ELSE raw_prompt END AS asked,"
        f" reward_model.ground_truth AS gold FROM read_parquet({_file(rows)}, file_row_number=true)"
    )
    return (
        f"SELECT asked, gold, rate.* FROM ({rate}) AS rate"
        f" LEFT JOIN ({asked}) AS asked ON file_row_number = rate.{quoted(number)}"
    )


def _graded(folder: Path, number: str) -> str:
    from treetune_data.difficulty.shard import GRADES, NOT_ASKED

    files = [path for path in sorted(folder.glob(f"shards/*/{GRADES}")) if path.stat().st_size]
    if not files:
        raise ValueError(f"no answer is graded yet in {folder}: they appear as they are")
    # The last line may still be written; an answer that was graded twice counts once.
    read = (
        f"read_json([{', '.join(map(_file, files))}], format='newline_delimited', records=true,"
        f" ignore_errors=true, columns={_GRADES})"
    )
    once = (
        'SELECT "row", sample, any_value(reward) AS reward, any_value(correct) AS correct,'
        f" any_value(complete) AS complete, any_value(tokens) AS tokens FROM {read}"
        f' WHERE "row" IS NOT NULL AND outcome <> {literal(NOT_ASKED)} GROUP BY "row", sample'
    )
    return (
        f'SELECT "row" AS {quoted(number)}, {COUNTED} FROM (SELECT "row", count(*) AS answers,'
        " count(*) FILTER (correct) AS correct, count(*) FILTER (correct) / count(*) AS pass_rate,"
        " avg(reward) AS mean_reward,"
        " avg(tokens) AS mean_tokens, count(*) FILTER (NOT complete) AS unfinished"
        f' FROM ({once}) GROUP BY "row")'
    )


def answers_to(folder: Path, row: int) -> list[dict[str, Any]]:
    """The answers to a row, by sample, each with its `text` and, where it is graded, `reward`, `outcome`,
    `extracted` and `message`."""
    from treetune_data.difficulty.shard import ANSWERS, GRADES

    found: dict[int, dict[str, Any]] = {}
    for name in (ANSWERS, GRADES):
        for path in sorted(folder.glob(f"shards/*/{name}")):
            own: dict[int, dict[str, Any]] = {}
            for line in _lines_of(path, row):
                own.setdefault(line["sample"], line)
            for sample, line in own.items():
                found[sample] = found.get(sample, {}) | line
            if own:
                break  # a row is in one shard
    return [found[sample] for sample in sorted(found)]


def _lines_of(path: Path, row: int) -> Iterator[dict[str, Any]]:
    """Those about a row. Others are told by how a line begins, and not read: there may be millions."""
    beginning = b'{"row":%d,' % row
    with path.open("rb") as file:
        for line in file:
            if line.startswith(beginning) and line.endswith(b"\n"):
                try:
                    yield json.loads(line)
                except ValueError:  # a crash of the machine can leave such
                    continue


def _file(path: Path) -> str:
    return literal(glob.escape(str(path)))
