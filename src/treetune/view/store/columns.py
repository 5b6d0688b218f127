"""Computes the columns of the index of answers from Arrow batches of trajectories or episodes, or from the
lines of an evaluation.

In a batch, a column of lists is one flat array with offsets, which are called `ends` here: the list of row i
is `values[ends[i]:ends[i + 1]]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.view.text import one_line, one_line_with_end

if TYPE_CHECKING:
    import pyarrow as pa

CHARACTERS_OF_BEGINNING = 160
"""The most characters of an answer, and of its prompt, that lists show."""
MOST_CHARACTERS_OF_VERDICT = 200
"""The most characters that are kept of a grader's extracted answer, and of its message."""

NUMBER_PREFIX = "number."
"""The prefix of columns with numbers from graders and rollouts."""

# The columns that are read of each kind of file for an index: of trajectories, of episodes, and of the
# numbers that the trainer recorded.
COLUMNS_OF_ANSWERS = (
    "problem", "sample", "finish_reason", "text", "grade", "step_ends", "bonus", "numbers", "segments",
)  # fmt: skip
COLUMNS_OF_EPISODES = (
    "trajectory", "response_ids", "trained", "reward", "score", "finish_reason", "advantages", "step_values",
    "step_ends", "text", "prompt", "domain", "group", "policy_version", "behaviour_logprobs",
)  # fmt: skip
COLUMNS_OF_SIGNALS = ("trajectory", "logprobs", "entropies", "gaps", "ref_logprobs")


def answer_columns(batch: pa.RecordBatch) -> dict[str, Any]:
    """Returns the columns of a batch of trajectories."""
    import pyarrow as pa
    import pyarrow.compute as pc

    problem, grade = batch["problem"], batch["grade"]
    count, names = batch.num_rows, batch.schema.names
    # A bonus is a reward that shaping adds to the score. Files of earlier versions have no bonus, domain or
    # numbers.
    bonus = pc.fill_null(batch["bonus"], 0.0) if "bonus" in names else pa.array([0.0] * count)
    outcome = pc.struct_field(grade, "outcome")
    # An answer that could not be graded has no score, whatever the file has as its reward.
    is_graded = pc.not_equal(outcome, "unavailable")
    score = pc.if_else(is_graded, pc.struct_field(grade, "reward"), None)
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
        "extracted": pc.utf8_slice_codeunits(
            pc.struct_field(grade, "extracted"), 0, MOST_CHARACTERS_OF_VERDICT
        ),
        "message": pc.utf8_slice_codeunits(pc.struct_field(grade, "message"), 0, MOST_CHARACTERS_OF_VERDICT),
        "steps": pc.cast(pc.list_value_length(batch["step_ends"]), pa.int32()),
        "characters": pc.utf8_length(batch["text"]),
        "beginning": _beginnings_on_one_line(batch["text"]),
        "asked": _beginnings_and_ends(pc.struct_field(problem, "prompt")),
        **_segment_columns(batch["segments"]),
    }
    if "numbers" in names:
        columns |= _number_columns(batch["numbers"])
    if any(field.name == "numbers" for field in grade.type):
        columns |= _number_columns(pc.struct_field(grade, "numbers"))
    return columns


def _segment_columns(segments: pa.ListArray) -> dict[str, Any]:
    """Returns columns about the tokens of each row.

    The column `injected` counts the tokens that were not sampled, and `policy_version` is that of the row's
    first segment.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    offsets = segments.offsets.to_numpy()  # the first segment of each row, and the end of the last row
    flat = segments.values
    lengths = pc.list_value_length(flat.field("token_ids")).to_numpy(zero_copy_only=False)
    injected = np.where(pc.equal(flat.field("origin"), "injected").to_numpy(zero_copy_only=False), lengths, 0)
    versions = flat.field("policy_version").to_numpy(zero_copy_only=False).astype(float)
    first_version = np.full(len(segments), np.nan)
    has_segments = np.diff(offsets) > 0
    first_version[has_segments] = versions[offsets[:-1][has_segments]]
    logprobs = flat.field("logprobs")
    # The offsets of `logprobs` have the first log-prob of each segment. With the first segment of each row,
    # they give the first log-prob of each row.
    logprob_offsets = logprobs.offsets.to_numpy()[offsets]
    mean, least = mean_and_least(logprobs.values.to_numpy(zero_copy_only=False), logprob_offsets)
    return {
        "tokens": pa.array(_sums_of_rows(lengths, offsets), pa.int32()),
        "injected": pa.array(_sums_of_rows(injected, offsets), pa.int32()),
        "policy_version": pa.array(first_version, pa.float64(), from_pandas=True),
        "logprob_mean": pa.array(mean, pa.float64(), from_pandas=True),
        "logprob_least": pa.array(least, pa.float64(), from_pandas=True),
    }


def _number_columns(column: Any) -> dict[str, Any]:
    """Returns a column for each name in a column of maps. It is null for an answer without such a number.

    Example: the maps `[{"lines": 3.0}, {}]` give the column `number.lines` with 3.0 and null.
    """
    import pyarrow as pa

    # The position of each row's first entry among the entries of all maps, and the end of the last row.
    offsets = column.offsets.to_numpy()
    row_of_entry: np.ndarray = np.repeat(np.arange(len(column)), np.diff(offsets))
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    names = column.keys.slice(first, count).dictionary_encode()
    name_of_entry = names.indices.to_numpy(zero_copy_only=False)
    values = column.items.slice(first, count).to_numpy(zero_copy_only=False)
    columns = {}
    for number, name in enumerate(names.dictionary.to_pylist()):
        has_name = name_of_entry == number
        value_of_row = np.full(len(column), np.nan)
        value_of_row[row_of_entry[has_name]] = values[has_name]
        columns[NUMBER_PREFIX + name] = pa.array(value_of_row, pa.float64(), from_pandas=True)
    return columns


def episode_columns(batch: pa.RecordBatch) -> dict[str, Any]:
    """Returns the columns of a batch of training rows."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names, count, trained = batch.schema.names, batch.num_rows, batch["trained"]
    mean, least = _mean_and_least_of_trained(batch["advantages"], trained)
    # The largest number is the least of the negated ones, negated.
    _, negated_most = _mean_and_least_of_trained(batch["advantages"], trained, sign=-1.0)
    most = pc.negate(negated_most)
    logprob_mean, logprob_least = _mean_and_least_of_trained(batch["behaviour_logprobs"], trained)
    is_trained = trained.values.to_numpy(zero_copy_only=False).astype(np.int64)
    trained_counts = _sums_of_rows(is_trained, trained.offsets.to_numpy())
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
        "beginning": _beginnings_on_one_line(batch["text"]),
        "asked": _beginnings_and_ends(batch["prompt"]) if "prompt" in names else pa.array([""] * count),
        "tokens": pc.cast(pc.list_value_length(batch["response_ids"]), pa.int32()),
        "trained": pa.array(trained_counts, pa.int32()),
        "policy_version": pc.cast(batch["policy_version"], pa.float64()),
        "logprob_mean": logprob_mean,
        "logprob_least": logprob_least,
        "advantage_mean": mean,
        "advantage_least": least,
        "advantage_most": most,
        "advantage_size": pc.max_element_wise(pc.abs(least), pc.abs(most)),
        "first_value": _first_elements(batch["step_values"]),
    }


def _first_elements(lists: pa.ListArray) -> pa.Array:
    """Returns the first element of each list; null for an empty list."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not len(lists):
        return pa.array([], pa.float64())
    # `list_element` fails for empty lists, so each is replaced by [null].
    is_empty = pc.equal(pc.fill_null(pc.list_value_length(lists), 0), 0)
    padded = pc.if_else(is_empty, pa.scalar([None], lists.type), lists)
    return pc.list_element(padded, 0)


def _mean_and_least_of_trained(
    column: pa.ListArray, trained: pa.ListArray, sign: float = 1.0
) -> tuple[pa.Array, pa.Array]:
    """Returns the mean and the least of each row's numbers, multiplied by `sign`, over its trained tokens.

    Both are null for a row without numbers or without a trained token.
    """
    import pyarrow as pa

    number_offsets = column.offsets.to_numpy().astype(np.int64)
    token_offsets = trained.offsets.to_numpy()
    numbers_in_row, tokens_in_row = np.diff(number_offsets), np.diff(token_offsets)
    first_number, end = number_offsets[0], number_offsets[-1]
    has_numbers = numbers_in_row > 0
    if (numbers_in_row != tokens_in_row)[has_numbers].any():
        raise ValueError("an episode has numbers for more or fewer tokens than it has")
    # For each number, the position of its token in `trained`. The offsets of the two columns differ, because
    # a row without numbers has tokens nevertheless. All numbers of a row are equally far from their tokens.
    distance_in_row = token_offsets[:-1] - number_offsets[:-1]
    distance_of_number: np.ndarray = np.repeat(distance_in_row, numbers_in_row)
    token_of_number = np.arange(first_number, end) + distance_of_number
    is_trained = trained.values.to_numpy(zero_copy_only=False).astype(bool)[token_of_number]
    values = column.values.to_numpy(zero_copy_only=False)[first_number:end].astype(float)
    # In an array that has only the numbers of trained tokens, a row begins after those of all earlier rows.
    trained_before_number = np.concatenate([[0], np.cumsum(is_trained)])
    offsets_of_trained = trained_before_number[number_offsets - first_number]
    mean, least = mean_and_least(sign * values[is_trained], offsets_of_trained)
    return pa.array(mean, pa.float64(), from_pandas=True), pa.array(least, pa.float64(), from_pandas=True)


def signal_columns(batch: pa.RecordBatch) -> dict[str, Any]:
    """Returns the mean and the largest value of three numbers over the tokens of each training row.

    They are the entropy, the absolute gap, and the KL to the reference if training had one. A gap is the
    difference between the trainer's and the engine's log-prob of a token. Only tokens for which the trainer
    recorded a number count.
    """
    columns: dict[str, Any] = {"answer": batch["trajectory"]}
    for name, column in (("entropy", batch["entropies"]), ("gap", batch["gaps"])):
        columns |= _mean_and_most(name, np.abs(_flat_numbers(column)), _ends_of_rows(column))
    # Files of earlier versions lack this column. Iterations without a reference have only nulls in it.
    if "ref_logprobs" in batch.schema.names and batch["ref_logprobs"].null_count < batch.num_rows:
        logprobs, ref_logprobs = batch["logprobs"], batch["ref_logprobs"]
        if (_ends_of_rows(logprobs) != _ends_of_rows(ref_logprobs)).any():
            raise ValueError("an episode has the reference's log-probs of more or fewer tokens than it has")
        kl = kl_of_tokens(_flat_numbers(logprobs), _flat_numbers(ref_logprobs))
        columns |= _mean_and_most("kl", kl, _ends_of_rows(logprobs))
    return columns


def _flat_numbers(column: pa.ListArray) -> np.ndarray:
    """Returns the numbers of all rows of a list column, one after the other."""
    ends = column.offsets.to_numpy()
    return column.values.to_numpy(zero_copy_only=False)[ends[0] : ends[-1]].astype(float)


def _ends_of_rows(column: pa.ListArray) -> np.ndarray:
    """Returns where each row of a list column ends in the result of `_flat_numbers`, after a leading 0."""
    ends: np.ndarray = column.offsets.to_numpy().astype(np.int64)
    return ends - ends[0]


def _mean_and_most(name: str, values: np.ndarray, ends: np.ndarray) -> dict[str, Any]:
    """Returns the columns ``NAME_mean`` and ``NAME_most``: the mean and the largest of each row's values.

    The values of row i are ``values[ends[i] : ends[i + 1]]``. Values that are NaN don't count.
    """
    import pyarrow as pa

    is_recorded = ~np.isnan(values)
    # The ends in an array that has only the recorded values.
    ends_of_recorded = np.concatenate([[0], np.cumsum(is_recorded)])[ends]
    # The largest value is the least of the negated ones, negated.
    negated_mean, negated_most = mean_and_least(-values[is_recorded], ends_of_recorded)
    return {
        f"{name}_mean": pa.array(-negated_mean, pa.float64(), from_pandas=True),
        f"{name}_most": pa.array(-negated_most, pa.float64(), from_pandas=True),
    }


def kl_of_tokens(logprobs: np.ndarray, ref_logprobs: np.ndarray) -> np.ndarray:
    """Returns each token's term of the metric ``train/kl``, the KL of the policy to the reference.

    The term is Schulman's estimator k3 (`objectives.base.kl_estimate`), which is never negative.
    """
    difference = logprobs - ref_logprobs
    return np.exp(-difference) - 1 + difference


def line_columns(row: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Returns the row of the index for a line of an evaluation, which begins at the byte `place` of its
    file."""
    text = row.get("text") or ""
    extracted = row.get("extracted")
    numbers: dict[str, float] = {}
    for group, members in row.items():
        if isinstance(members, dict):  # such as grade or threads
            for name, value in members.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    # As in `answer_columns`, the columns of graders' numbers don't name the group "grade".
                    number_name = f"{group}/{name}".removeprefix("grade/")
                    numbers[NUMBER_PREFIX + number_name] = float(value)
    return {
        "answer": f"{row['problem']}#{row['sample']}",
        "problem": row["problem"],
        "domain": row.get("domain") or "",
        "sample": row["sample"],
        # A line has only a reward, which is taken as its score, too.
        "score": row.get("reward"),
        "reward": row.get("reward"),
        "outcome": row.get("outcome"),
        "finish_reason": row.get("finish_reason"),
        "unfinished": row.get("finish_reason") == "length",
        "extracted": None if extracted is None else extracted[:MOST_CHARACTERS_OF_VERDICT],
        "message": (row.get("message") or "")[:MOST_CHARACTERS_OF_VERDICT] or None,
        "tokens": row.get("tokens"),
        "characters": len(text),
        "beginning": one_line(text, CHARACTERS_OF_BEGINNING),
        "asked": one_line_with_end(row.get("prompt") or "", CHARACTERS_OF_BEGINNING),
        "place": place,
        **numbers,
    }


def _beginnings_on_one_line(texts: pa.Array) -> pa.Array:
    """Returns the beginning of each text on one line."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Texts are cut in Arrow first, because whole answers as Python objects would take long. One character
    # more than is shown is kept, so that `one_line` notices that the text is longer.
    short = pc.utf8_slice_codeunits(texts, 0, CHARACTERS_OF_BEGINNING + 1)
    lines = [None if text is None else one_line(text, CHARACTERS_OF_BEGINNING) for text in short.to_pylist()]
    return pa.array(lines, pa.string())


def _beginnings_and_ends(texts: pa.Array) -> pa.Array:
    """Returns each text on one line. Of a long text, only the beginning and the end are kept."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Texts are cut in Arrow first, because whole prompts as Python objects would take long. The beginning and
    # the end that are kept of a long text are together longer than what is shown, so that `one_line_with_end`
    # notices that the text is longer.
    beginnings = pc.utf8_slice_codeunits(texts, 0, CHARACTERS_OF_BEGINNING + 1).to_pylist()
    ends = pc.utf8_slice_codeunits(texts, -CHARACTERS_OF_BEGINNING).to_pylist()
    lines = []
    for beginning, end in zip(beginnings, ends, strict=True):
        is_whole = beginning is None or len(beginning) <= CHARACTERS_OF_BEGINNING
        lines.append(beginning if is_whole else beginning + end)
    return pa.array(
        [None if text is None else one_line_with_end(text, CHARACTERS_OF_BEGINNING) for text in lines],
        pa.string(),
    )


def _sums_of_rows(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the sum of the values of each row. Those of row i are ``values[ends[i] : ends[i + 1]]``."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[ends])


def mean_and_least(values: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the least value of each row, both of which are NaN for a row without values.

    The values of row i are ``values[ends[i] : ends[i + 1]]``.
    """
    counts = np.diff(ends)
    mean, least = np.full(len(counts), np.nan), np.full(len(counts), np.nan)
    has_values = counts > 0
    if has_values.any():
        # Values after the last end are cut off, because `reduceat` would count them for the last row.
        used_values: np.ndarray = values[: ends[-1]].astype(np.float64, copy=False)
        starts = ends[:-1][has_values]
        # `reduceat` sums each row separately. Differences of a running sum (`_sums_of_rows`) would be NaN in
        # all rows after the first -inf.
        mean[has_values] = np.add.reduceat(used_values, starts) / counts[has_values]
        least[has_values] = np.minimum.reduceat(used_values, starts)
    return mean, least
