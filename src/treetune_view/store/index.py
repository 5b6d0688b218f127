"""An index of one file of answers: for each a row of numbers and words, so that nobody reads all tokens.

It lies in the viewer's own folder, goes in whole, and is made anew when the file is another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.runtime.directory import verify_answers
from treetune.store.files import whole_folder
from treetune_view.exports.evaluations import writable
from treetune_view.store.batches import Layout, walk
from treetune_view.store.columns import (
    OF_ANSWERS,
    OF_EPISODES,
    OF_SIGNALS,
    answer_columns,
    episode_columns,
    line_columns,
    signal_columns,
)
from treetune_view.store.signatures import SignatureWriter
from treetune_view.store.sources import Source

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 4
"""Of the files of an index and their columns: another one makes all anew."""

ROWS_IN_GROUP = 2048
"""Of the Parquet file, which are read together."""

ROWS, BITS, ABOUT = "rows.parquet", "bits", "about.json"

LINES_AT_ONCE = 4096


@dataclass(frozen=True)
class About:
    """What an index is of: how many answers, and where batches of its Arrow files lie."""

    rows: int
    mark: str
    answers: Layout | None = None
    episodes: Layout | None = None
    signals: Layout | None = None


@dataclass(frozen=True)
class Indexed:
    """A source and its index, where that is made; `fault` is why it can't be."""

    source: Source
    place: Path
    about: About | None
    fault: str = ""

    @property
    def is_awaited(self) -> bool:
        """Whether its index is still to come."""
        return self.about is None and not self.fault


def build(source: Source, place: Path) -> None:
    """Makes the index of a source in the folder `place`. Raises ValueError for a file that isn't whole."""
    mark = source.mark
    with whole_folder(place) as folder:
        bits = SignatureWriter(folder / BITS)
        layouts: dict[str, Layout] = {}
        if source.kind == "evaluation":
            tables = list(_of_lines(source.path, bits))
        elif source.path == source.episodes:
            tables = [_of_episodes(source, bits, layouts)]
        else:
            tables = list(_of_stream(source.path, OF_ANSWERS, answer_columns, bits, layouts, "answers"))
        bits.close()
        table = _together(tables, source)
        if source.episodes is not None and source.path != source.episodes:
            table = _with_credit(table, _of_episodes(source, None, layouts))
        _write(table, folder / ROWS)
        about = About(table.num_rows, mark, **layouts)
        (folder / ABOUT).write_text(json.dumps({"version": VERSION, **asdict(about)}))


def read_about(place: Path) -> About | None:
    """Of an index that is there, in this version."""
    try:
        found = json.loads((place / ABOUT).read_text())
    except (OSError, ValueError):
        return None
    if found.pop("version", None) != VERSION:
        return None
    layouts: Any = {
        name: Layout(one["head"], tuple(one["ends"]), tuple(one["rows"]))
        if (one := found.pop(name))
        else None
        for name in ("answers", "episodes", "signals")
    }
    return About(**found, **layouts)


def _of_stream(
    path: Path,
    columns: Sequence[str],
    made_of: Any,
    bits: SignatureWriter | None,
    layouts: dict[str, Layout],
    kind: str,
) -> Iterator[pa.Table]:
    import pyarrow as pa

    walking = walk(path, columns)
    _, head = next(walking)
    ends, rows = list[int](), [0]
    for batch, end in walking:
        ends.append(end)
        made = made_of(batch)
        made["place"] = pa.array(np.arange(rows[-1], rows[-1] + batch.num_rows, dtype=np.int64))
        rows.append(rows[-1] + batch.num_rows)
        if bits is not None:
            bits.add(batch["text"])
        yield pa.table(made)
    layouts[kind] = Layout(head, tuple(ends), tuple(rows))


def _of_episodes(source: Source, bits: SignatureWriter | None, layouts: dict[str, Layout]) -> pa.Table:
    """Training rows with what the trainer said of their tokens. Raises ValueError where it is of others."""
    import pyarrow as pa

    assert source.episodes is not None
    made = list(_of_stream(source.episodes, OF_EPISODES, episode_columns, bits, layouts, "episodes"))
    if not made:
        return pa.table({"place": pa.array([], pa.int64())})
    table = pa.concat_tables(made, promote_options="default")
    if source.signals is None:
        return table
    said = pa.concat_tables(
        _of_stream(source.signals, OF_SIGNALS, signal_columns, None, layouts, "signals"),
        promote_options="default",
    )
    if not said["answer"].equals(table["answer"]):
        raise ValueError(f"{source.signals} is of other rows than {source.episodes}: delete it")
    for name in said.column_names:
        if name not in table.column_names:
            table = table.append_column(name, said[name])
    return table


def _with_credit(answers: pa.Table, episodes: pa.Table) -> pa.Table:
    """Answers with what credit gave them: over all episodes that an answer was cut into, and their places."""
    import duckdb

    of_signals = "".join(
        f"sum({name}_mean * trained) / nullif(sum(trained) FILTER ({name}_mean IS NOT NULL), 0)"
        f" AS {name}_mean, max({name}_most) AS {name}_most,"
        for name in ("entropy", "gap")
        if f"{name}_mean" in episodes.column_names
    )
    with duckdb.connect(":memory:") as connection:
        connection.register("answers", answers)
        connection.register("episodes", episodes)
        return connection.sql(
            f"""
            SELECT answers.*, credit.* EXCLUDE (credited) FROM answers LEFT JOIN (
                SELECT answer AS credited, count(*)::INTEGER AS episodes, min(place) AS episode_place,
                    max(place) AS episode_last,
                    sum(advantage_mean * trained)
                        / nullif(sum(trained) FILTER (advantage_mean IS NOT NULL), 0)
                        AS advantage_mean,
                    {of_signals}
                    min(advantage_least) AS advantage_least, max(advantage_most) AS advantage_most,
                    arg_min(first_value, place) AS first_value
                FROM episodes GROUP BY answer
            ) AS credit ON credited = answers.answer ORDER BY answers.place
            """
        ).to_arrow_table()


def _of_lines(path: Path, bits: SignatureWriter) -> Iterator[pa.Table]:
    import pyarrow as pa

    waiting: list[dict[str, Any]] = []
    texts: list[str] = []

    def made() -> pa.Table:
        bits.add(pa.array(texts, pa.string()))
        texts.clear()
        names = dict.fromkeys(name for row in waiting for name in row)
        table = pa.table({name: pa.array([row.get(name) for row in waiting]) for name in names})
        waiting.clear()
        return table

    verify_answers(path)
    with path.open("rb") as file:
        begin = 0
        for line in file:
            row = json.loads(line)
            waiting.append(
                {
                    name: writable(value) if isinstance(value, str) else value
                    for name, value in line_columns(row, begin).items()
                }
            )
            texts.append(writable(row.get("text") or ""))
            begin += len(line)
            if len(waiting) == LINES_AT_ONCE:
                yield made()
    if waiting:
        yield made()


def _together(tables: Sequence[pa.Table], source: Source) -> pa.Table:
    import pyarrow as pa

    table = (
        pa.concat_tables(tables, promote_options="permissive")
        if tables
        else pa.table({"place": pa.array([], pa.int64())})
    )
    return table.append_column("source", pa.array([source.name] * table.num_rows, pa.string()))


def _write(table: pa.Table, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = pa.array(np.arange(table.num_rows, dtype=np.int64))
    parquet.write_table(
        table.append_column("row", rows), path, compression="zstd", row_group_size=ROWS_IN_GROUP
    )
