"""The columns of the index of answers, made of batches of trajectories or episodes, or of an evaluation's
line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.view.text import one_line

if TYPE_CHECKING:
    import pyarrow as pa

BEGINNING = 160
"""Characters of an answer and of its prompt that a list shows."""
SHORT = 200
"""Characters of what a grader extracted or said."""

NUMBER = "number."
"""Begins the names of what graders and rollouts counted."""

OF_ANSWERS = (
    "problem", "sample", "finish_reason", "text", "grade", "step_ends", "bonus", "numbers", "segments",
)  # fmt: skip
OF_EPISODES = (
    "trajectory", "response_ids", "trained", "reward", "score", "finish_reason", "advantages", "step_values",
    "step_ends", "text", "prompt", "domain", "group", "policy_version", "behaviour_logprobs",
)  # fmt: skip
OF_SIGNALS = ("trajectory", "logprobs", "entropies", "gaps")
"""Columns of the files that are read for an index."""


def answer_columns(batch: pa.RecordBatch) -> dict[str, Any]:
    """Returns the columns of a batch of trajectories."""
    import pyarrow as pa
    import pyarrow.compute as pc

    problem, grade = batch["problem"], batch["grade"]
    count, names = batch.num_rows, batch.schema.names
    bonus = pc.fill_null(batch["bonus"], 0.0) if "bonus" in names else pa.array([0.0] * count)
    outcome = pc.struct_field(grade, "outcome")
    known = pc.not_equal(outcome, "unavailable")
    score = pc.if_else(known, pc.struct_field(grade, "reward"), None)
    identity = pc.struct_field(problem, "id")
    has_domain = any(field.name == "domain" for field in problem.type)
    columns = {
        "answer": pc.binary_join_element_wise(identity, pc.cast(batch["sample"], pa.string()), "#"),
        "problem": identity,
        "domain": pc.struct_field(problem, "domain") if has_domain else pa.array([""] * count),
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
    }
    if "numbers" in names:
        columns |= _numbers(batch["numbers"])
    if any(field.name == "numbers" for field in grade.type):
        columns |= _numbers(pc.struct_field(grade, "numbers"))
    return columns


def _segment_columns(segments: pa.ListArray) -> dict[str, Any]:
    """Returns tokens (all, and injected ones), log-probs of what was sampled, and the policy that sampled
    it."""
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
    mean, least = mean_and_least(logprobs.values.to_numpy(zero_copy_only=False), token_ends)
    return {
        "tokens": pa.array(_sums(lengths, ends), pa.int32()),
        "injected": pa.array(_sums(injected, ends), pa.int32()),
        "policy_version": pa.array(first, pa.float64(), from_pandas=True),
        "logprob_mean": pa.array(mean, pa.float64(), from_pandas=True),
        "logprob_least": pa.array(least, pa.float64(), from_pandas=True),
    }


def _numbers(column: Any) -> dict[str, Any]:
    """Returns a column for each name in a column of maps; null where an answer has no such number."""
    import pyarrow as pa

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


def episode_columns(batch: pa.RecordBatch) -> dict[str, Any]:
    """Returns the columns of a batch of training rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names, count, trained = batch.schema.names, batch.num_rows, batch["trained"]
    mean, least = _of_trained(batch["advantages"], trained)
    _, most = _of_trained(batch["advantages"], trained, sign=-1.0)
    logprob_mean, logprob_least = _of_trained(batch["behaviour_logprobs"], trained)
    trained_counts = _sums(
        trained.values.to_numpy(zero_copy_only=False).astype(np.int64), trained.offsets.to_numpy()
    )
    # With null in place of lists without an element, whose first nobody may ask for.
    values = batch["step_values"]
    empty = pc.equal(pc.fill_null(pc.list_value_length(values), 0), 0)
    padded = pc.if_else(empty, pa.scalar([None], values.type), values)
    return {
        "answer": batch["trajectory"],
        "problem": batch["group"],
        "domain": batch["domain"] if "domain" in names else pa.array([""] * count),
        "score": batch["score"] if "score" in names else batch["reward"],
        "reward": batch["reward"],
        "finish_reason": batch["finish_reason"],
        "unfinished": pc.equal(batch["finish_reason"], "length"),
        "steps": pc.cast(pc.list_value_length(batch["step_ends"]), pa.int32()),
        "characters": pc.utf8_length(batch["text"]),
        "beginning": _beginnings(batch["text"]),
        "asked": _beginnings(batch["prompt"]) if "prompt" in names else pa.array([""] * count),
        "tokens": pc.cast(pc.list_value_length(batch["response_ids"]), pa.int32()),
        "trained": pa.array(trained_counts, pa.int32()),
        "policy_version": pc.cast(batch["policy_version"], pa.float64()),
        "logprob_mean": logprob_mean,
        "logprob_least": logprob_least,
        "advantage_mean": mean,
        "advantage_least": least,
        "advantage_most": pc.negate(most),
        "advantage_size": pc.max_element_wise(pc.abs(least), pc.abs(most)),
        "first_value": pc.list_element(padded, 0) if len(values) else pa.array([], pa.float64()),
    }


def _of_trained(column: pa.ListArray, trained: pa.ListArray, sign: float = 1.0) -> tuple[pa.Array, pa.Array]:
    """Returns mean and least of each row of numbers (times `sign`) over tokens that are trained; null for
    none."""
    import pyarrow as pa

    ends, token_ends = column.offsets.to_numpy().astype(np.int64), trained.offsets.to_numpy()
    counts = np.diff(ends)
    if (counts != np.diff(token_ends))[counts > 0].any():
        raise ValueError("an episode has numbers for more or fewer tokens than it has")
    # Each number's token: rows without numbers have tokens all the same.
    tokens = np.arange(ends[0], ends[-1]) + np.repeat(token_ends[:-1] - ends[:-1], counts)
    kept = trained.values.to_numpy(zero_copy_only=False).astype(bool)[tokens]
    values = column.values.to_numpy(zero_copy_only=False)[ends[0] : ends[-1]].astype(float)
    kept_ends = np.concatenate([[0], np.cumsum(kept)])[ends - ends[0]]
    mean, least = mean_and_least(sign * values[kept], kept_ends)
    return pa.array(mean, pa.float64(), from_pandas=True), pa.array(least, pa.float64(), from_pandas=True)


def signal_columns(batch: pa.RecordBatch) -> dict[str, Any]:
    """Returns mean and largest entropy, and mean and largest size of the gap between trainer and engine, over
    the tokens where these are known."""
    import pyarrow as pa

    made: dict[str, Any] = {"answer": batch["trajectory"]}
    for name, column in (("entropy", batch["entropies"]), ("gap", batch["gaps"])):
        ends = column.offsets.to_numpy().astype(np.int64)
        sizes = np.abs(column.values.to_numpy(zero_copy_only=False)[ends[0] : ends[-1]].astype(float))
        known = ~np.isnan(sizes)
        known_ends = np.concatenate([[0], np.cumsum(known)])[ends - ends[0]]
        mean, least = mean_and_least(-sizes[known], known_ends)
        made[f"{name}_mean"] = pa.array(-mean, pa.float64(), from_pandas=True)
        made[f"{name}_most"] = pa.array(-least, pa.float64(), from_pandas=True)
    return made


def line_columns(row: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Returns the columns of a line of an evaluation that begins at the byte `place`."""
    text = row.get("text") or ""
    numbers = {
        f"{group}/{name}": float(x)
        for group, own in row.items()
        if isinstance(own, dict)
        for name, x in own.items()
        if isinstance(x, int | float) and not isinstance(x, bool)
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
        **{NUMBER + name.removeprefix("grade/"): x for name, x in numbers.items()},
    }


def _beginnings(texts: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    short = pc.utf8_slice_codeunits(texts, 0, BEGINNING + 1)
    return pa.array(
        [None if text is None else one_line(text, BEGINNING) for text in short.to_pylist()], pa.string()
    )


def _sums(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the sum of the values between each end and the next."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[ends])


def mean_and_least(values: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and least of the values between each end and the next; NaN of none."""
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
