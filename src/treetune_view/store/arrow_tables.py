"""Data sets that Arrow reads and DuckDB doesn't: splits that `save_to_disk` wrote, and W&B's tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune_view.exports.evaluations import writable

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST_TABLE = 256 * 2**20
"""Bytes of a W&B table's JSON: it is read as a whole."""

_PART = re.compile(r"(input|output|score)_(\d+)")


def saved(folder: Path) -> pa.Table:
    """A split of a saved data set, as it lies on disk: not copied, and read without `datasets`, which takes
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


def wandb_table(path: Path) -> pa.Table:
    """The rows of a W&B table's JSON (``columns`` and ``data``). A table of validation answers, in which each
    row is a step with ``input_1``, ``output_1``, ``score_1``, ``input_2`` and so on, has a row for each
    answer instead: step, example, input, output, score. Raises ValueError for another JSON.

    https://github.com/LLM360/Reasoning360 shows such tables.
    """
    import pyarrow as pa

    if path.stat().st_size > LARGEST_TABLE:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, and a W&B table is read up to {LARGEST_TABLE:,}:"
            " write its rows as JSON lines or Parquet"
        )
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from error
    columns: Any = found.get("columns") if isinstance(found, dict) else None
    data: Any = found.get("data") if isinstance(found, dict) else None
    if not _is_table(columns, data):
        raise ValueError(f"{path} is no W&B table: it should have columns, a list of names, and data, whose"
                         " rows are as long")  # fmt: skip
    names = _different([str(name) for name in columns])
    rows = [dict(zip(names, row, strict=True)) for row in data]
    if any(_PART.fullmatch(name) for name in names):
        rows = list(_unfolded(rows))
        names = ["step", "example", "input", "output", "score"]
    return pa.table({name: _array([row.get(name) for row in rows]) for name in names})


def _is_table(columns: Any, data: Any) -> bool:
    return (
        isinstance(columns, list)
        and isinstance(data, list)
        and bool(columns)
        and all(isinstance(row, list) and len(row) == len(columns) for row in data)
    )


def _different(names: Sequence[str]) -> list[str]:
    """Names that no other has, in letters of any size."""
    taken: set[str] = set()
    made = []
    for name in map(writable, names):
        own, number = name, 2
        while own.casefold() in taken:
            own, number = f"{name}_{number}", number + 1
        taken.add(own.casefold())
        made.append(own)
    return made


def _unfolded(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows):
        examples: dict[int, dict[str, Any]] = {}
        for name, value in row.items():
            if part := _PART.fullmatch(name):
                examples.setdefault(int(part[2]), {})[part[1]] = value
        for example, own in sorted(examples.items()):
            yield {"step": row.get("step", number), "example": example, **own}


def _array(values: Sequence[Any]) -> pa.Array:
    """Of one type: as they are where they have one, otherwise as text or JSON."""
    import pyarrow as pa

    if not any(isinstance(value, str | list | dict) for value in values):
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError):
            pass
    return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    return writable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
