"""An index of one file of answers: for each a row of numbers and words, so that nobody reads all tokens.

It lies in the viewer's own folder, goes in whole, and is made anew when the file is another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.exports.evaluations import writable
from treetune.files import whole_folder
from treetune.viewer.store.batches import Layout, walk
from treetune.viewer.store.signatures import SignatureWriter
from treetune.viewer.store.sources import Source
from treetune.viewer.text import one_line

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 3
"""Of the files of an index: another one makes all anew."""

BEGINNING = 160
"""Characters of an answer and of its prompt that a list shows."""
SHORT = 200
"""Characters of what a grader extracted or said."""

ROWS_IN_GROUP = 2048
"""Of the Parquet file, which are read together."""

ROWS, BITS, ABOUT = "rows.parquet", "bits", "about.json"

NUMBER = "number."
"""Before the names of what graders and rollouts counted."""

OF_ANSWERS = (
    "problem",
    "sample",
    "finish_reason",
    "text",
    "grade",
    "step_ends",
    "bonus",
    "numbers",
    "segments",
)
OF_EPISODES = (
    "trajectory", "response_ids", "trained", "reward", "score", "finish_reason", "advantages", "step_values",
    "step_ends", "text", "prompt", "domain", "group", "policy_version", "behaviour_logprobs",
)  # fmt: skip
LINES_AT_ONCE = 4096


@dataclass(frozen=True)
class About:
    """What an index is of: how many answers, and where batches of its Arrow files lie."""

    rows: int
    mark: str
    answers: Layout | None = None
    episodes: Layout | None = None


def build(source: Source, place: Path) -> None:
    """Makes the index of a source in the folder `place`. Raises ValueError for a file that isn't whole."""
    import pyarrow as pa

    mark = source.mark
    with whole_folder(place) as folder:
        bits = SignatureWriter(folder / BITS)
        layouts: dict[str, Layout] = {}
        if source.kind == "evaluation":
            tables = list(_of_lines(source.path, bits))
        elif source.path == source.episodes:
            tables = list(_of_stream(source.path, OF_EPISODES, _episode_columns, bits, layouts, "episodes"))
        else:
            tables = list(_of_stream(source.path, OF_ANSWERS, _answer_columns, bits, layouts, "answers"))
        bits.close()
        table = _together(tables, source)
        if source.episodes is not None and source.path != source.episodes:
            credit = _of_stream(source.episodes, OF_EPISODES, _episode_columns, None, layouts, "episodes")
            table = _with_credit(table, pa.concat_tables(credit, promote_options="default"))
        _write(table, folder / ROWS)
        about = About(table.num_rows, mark, layouts.get("answers"), layouts.get("episodes"))
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
        for name in ("answers", "episodes")
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


# Trajectories


def _answer_columns(batch: pa.RecordBatch) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    problem, grade = batch["problem"], batch["grade"]
    names = [field.name for field in problem.type]
    count = batch.num_rows
    bonus = pc.fill_null(batch["bonus"], 0.0) if "bonus" in batch.schema.names else pa.array([0.0] * count)
    outcome = pc.struct_field(grade, "outcome")
    known = pc.not_equal(outcome, "unavailable")
    score = pc.if_else(known, pc.struct_field(grade, "reward"), None)
    identity = pc.struct_field(problem, "id")
    return {
        "answer": pc.binary_join_element_wise(identity, pc.cast(batch["sample"], pa.string()), "#"),
        "problem": identity,
        "domain": pc.struct_field(problem, "domain") if "domain" in names else pa.array([""] * count),
        "sample": batch["sample"],
        "score": score,
        "reward": pc.add(score, bonus),
        "outcome": outcome,
        "finish_reason": batch["finish_reason"],
        "unfinished": pc.equal(batch["finish_reason"], "length"),
        "extracted": pc.utf8_slice_codeunits(pc.struct_field(grade, "extracted"), 0, SHORT),
        "message": pc.utf8_slice_codeunits(pc.struct_field(grade, "message"), 0, SHORT),
        "steps": pc.cast(pc.list_value_length(batch["step_ends"]), pa.int32()),
        "characters": pc.utf8_length(batch["text"]),
        "beginning": _beginnings(batch["text"]),
        "asked": _beginnings(pc.struct_field(problem, "prompt")),
        **_segment_columns(batch["segments"]),
        **_numbers(batch["numbers"] if "numbers" in batch.schema.names else None),
        **_numbers(pc.struct_field(grade, "numbers") if _has(grade.type, "numbers") else None),
    }


def _segment_columns(segments: pa.ListArray) -> dict[str, Any]:
    """Tokens (all, and injected ones), log-probs of what was sampled, and the policy that sampled it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ends = segments.offsets.to_numpy()
    flat = segments.values
    lengths = pc.list_value_length(flat.field("token_ids")).to_numpy(zero_copy_only=False)
    injected = np.where(pc.equal(flat.field("origin"), "injected").to_numpy(zero_copy_only=False), lengths, 0)
    versions = flat.field("policy_version").to_numpy(zero_copy_only=False).astype(float)
    first = np.full(len(segments), np.nan)
    first[np.diff(ends) > 0] = versions[ends[:-1][np.diff(ends) > 0]]
    logprobs = flat.field("logprobs")
    token_ends = logprobs.offsets.to_numpy()[ends]
    mean, least = _mean_and_least(logprobs.values.to_numpy(zero_copy_only=False), token_ends)
    return {
        "tokens": pa.array(_sums(lengths, ends), pa.int32()),
        "injected": pa.array(_sums(injected, ends), pa.int32()),
        "policy_version": pa.array(first, pa.float64(), from_pandas=True),
        "logprob_mean": pa.array(mean, pa.float64(), from_pandas=True),
        "logprob_least": pa.array(least, pa.float64(), from_pandas=True),
    }


def _numbers(column: Any) -> dict[str, Any]:
    """A column for each name in a column of maps; null where an answer has no such number."""
    import pyarrow as pa

    if column is None:
        return {}
    ends = column.offsets.to_numpy()
    rows: np.ndarray = np.repeat(np.arange(len(column)), np.diff(ends))
    keys = column.keys.slice(int(ends[0]), int(ends[-1] - ends[0])).dictionary_encode()
    values = column.items.slice(int(ends[0]), int(ends[-1] - ends[0])).to_numpy(zero_copy_only=False)
    codes = keys.indices.to_numpy(zero_copy_only=False)
    made = {}
    for code, name in enumerate(keys.dictionary.to_pylist()):
        own = np.full(len(column), np.nan)
        own[rows[codes == code]] = values[codes == code]
        made[NUMBER + name] = pa.array(own, pa.float64(), from_pandas=True)
    return made


# Episodes


def _episode_columns(batch: pa.RecordBatch) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    names, count = batch.schema.names, batch.num_rows
    score = batch["score"] if "score" in names else batch["reward"]
    trained = batch["trained"]
    mean, least = _of_trained(batch["advantages"], trained)
    _, most = _of_trained(batch["advantages"], trained, sign=-1.0)
    logprob_mean, logprob_least = _of_trained(batch["behaviour_logprobs"], trained)
    values = batch["step_values"]
    return {
        "answer": batch["trajectory"],
        "problem": batch["group"],
        "domain": batch["domain"] if "domain" in names else pa.array([""] * count),
        "score": score,
        "reward": batch["reward"],
        "finish_reason": batch["finish_reason"],
        "unfinished": pc.equal(batch["finish_reason"], "length"),
        "steps": pc.cast(pc.list_value_length(batch["step_ends"]), pa.int32()),
        "characters": pc.utf8_length(batch["text"]),
        "beginning": _beginnings(batch["text"]),
        "asked": _beginnings(batch["prompt"]) if "prompt" in names else pa.array([""] * count),
        "tokens": pc.cast(pc.list_value_length(batch["response_ids"]), pa.int32()),
        "trained": pa.array(_trained_counts(trained), pa.int32()),
        "policy_version": pc.cast(batch["policy_version"], pa.float64()),
        "logprob_mean": logprob_mean,
        "logprob_least": logprob_least,
        "advantage_mean": mean,
        "advantage_least": least,
        "advantage_most": pc.negate(most),
        "first_value": pc.list_element(_padded(values), 0) if len(values) else pa.array([], pa.float64()),
    }


def _of_trained(column: pa.ListArray, trained: pa.ListArray, sign: float = 1.0) -> tuple[pa.Array, pa.Array]:
    """Mean and least of each row of numbers (times `sign`) over tokens that are trained; null for none."""
    import pyarrow as pa

    ends, token_ends = column.offsets.to_numpy().astype(np.int64), trained.offsets.to_numpy()
    counts = np.diff(ends)
    if (counts != np.diff(token_ends))[counts > 0].any():
        raise ValueError("an episode has numbers for more or fewer tokens than it has")
    # Each number's token: rows without numbers have tokens all the same.
    tokens = np.arange(ends[0], ends[-1]) + np.repeat(token_ends[:-1] - ends[:-1], counts)
    kept = trained.values.to_numpy(zero_copy_only=False).astype(bool)[tokens]
    values = column.values.to_numpy(zero_copy_only=False)[ends[0] : ends[-1]].astype(float)
    left = np.concatenate([[0], np.cumsum(kept)])[ends - ends[0]]
    mean, least = _mean_and_least(sign * values[kept], left)
    return pa.array(mean, pa.float64(), from_pandas=True), pa.array(least, pa.float64(), from_pandas=True)


def _trained_counts(trained: pa.ListArray) -> np.ndarray:
    return _sums(trained.values.to_numpy(zero_copy_only=False).astype(np.int64), trained.offsets.to_numpy())


def _padded(column: pa.ListArray) -> pa.ListArray:
    """With null in place of lists without an element, whose first nobody may ask for."""
    import pyarrow as pa
    import pyarrow.compute as pc

    empty = pc.equal(pc.fill_null(pc.list_value_length(column), 0), 0)
    return pc.if_else(empty, pa.scalar([None], column.type), column)


def _with_credit(answers: pa.Table, episodes: pa.Table) -> pa.Table:
    """Answers with what credit gave them: over all episodes that an answer was cut into, and their places."""
    import duckdb

    with duckdb.connect(":memory:") as connection:
        connection.register("answers", answers)
        connection.register("episodes", episodes)
        return connection.sql(
            """
            SELECT answers.*, credit.* EXCLUDE (credited) FROM answers LEFT JOIN (
                SELECT answer AS credited, count(*)::INTEGER AS episodes, min(place) AS episode_place,
                    max(place) AS episode_last,
                    sum(advantage_mean * trained)
                        / nullif(sum(trained) FILTER (advantage_mean IS NOT NULL), 0)
                        AS advantage_mean,
                    min(advantage_least) AS advantage_least, max(advantage_most) AS advantage_most,
                    arg_min(first_value, place) AS first_value
                FROM episodes GROUP BY answer
            ) AS credit ON credited = answers.answer ORDER BY answers.place
            """
        ).to_arrow_table()


# Evaluations


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

    with path.open("rb") as file:
        begin = 0
        for line in file:
            row = json.loads(line)
            waiting.append(
                {
                    name: writable(value) if isinstance(value, str) else value
                    for name, value in _line_columns(row, begin).items()
                }
            )
            texts.append(writable(row.get("text") or ""))
            begin += len(line)
            if len(waiting) == LINES_AT_ONCE:
                yield made()
    if waiting:
        yield made()


def _line_columns(row: Mapping[str, Any], place: int) -> dict[str, Any]:
    text = row.get("text") or ""
    grouped = {
        f"{group}/{n}": x for group, own in row.items() if isinstance(own, dict) for n, x in own.items()
    }
    return {
        "answer": f"{row['problem']}#{row['sample']}",
        "problem": row["problem"],
        "domain": row.get("domain") or "",
        "sample": row["sample"],
        "score": row.get("reward"),
        "reward": row.get("reward"),
        "outcome": row.get("outcome"),
        "finish_reason": row.get("finish_reason"),
        "unfinished": row.get("finish_reason") == "length",
        "extracted": (row.get("extracted") or "")[:SHORT] if row.get("extracted") is not None else None,
        "message": (row.get("message") or "")[:SHORT] or None,
        "tokens": row.get("tokens"),
        "characters": len(text),
        "beginning": one_line(text, BEGINNING),
        "asked": one_line(row.get("prompt") or "", BEGINNING),
        "place": place,
        **{NUMBER + name.removeprefix("grade/"): float(x) for name, x in grouped.items() if _is_number(x)},
    }


# All


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


def _beginnings(texts: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    short = pc.utf8_slice_codeunits(texts, 0, BEGINNING + 1)
    return pa.array(
        [None if text is None else one_line(text, BEGINNING) for text in short.to_pylist()], pa.string()
    )


def _sums(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Of the values between one end and the next."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[ends])


def _mean_and_least(values: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the values between one end and the next; NaN of none."""
    counts = np.diff(ends)
    mean, least = np.full(len(counts), np.nan), np.full(len(counts), np.nan)
    full = counts > 0
    if full.any():
        own: np.ndarray = values[: ends[-1]].astype(np.float64, copy=False)
        starts = ends[:-1][full]
        # Each row by itself: differences of one running sum would be NaN behind the first -inf.
        mean[full] = np.add.reduceat(own, starts) / counts[full]
        least[full] = np.minimum.reduceat(own, starts)
    return mean, least


def _has(kind: pa.DataType, name: str) -> bool:
    return any(field.name == name for field in kind)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
