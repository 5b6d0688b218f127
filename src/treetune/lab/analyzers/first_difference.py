"""Finds the first difference between two runs: the iteration, phase, file and number."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from treetune.engine.journal import completions_of_row
from treetune.engine.requests import Completion
from treetune.exceptions import Damaged
from treetune.runtime.directory import EPISODES, ITERATION_METRICS, SUMMARY, TRAJECTORIES, ExperimentDirectory
from treetune.store.checksums import CHECKSUM_KEY, CHECKSUMS_FILE, find_damage, read_record, verify_stream
from treetune.store.journal import read_journal

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from torch import Tensor

PARTS_OF_TIMED_NAMES = ("seconds", "memory/", "time", "speed", "tokens_per_second", "sync_", "restarts")
"""Parts of names of numbers. A number whose name has one of these parts depends on time, and so differs
between any two runs."""

CHUNK_BYTES = 1 << 20

CHECKSUM_WORD, MOST_CHECKSUM_BYTES = b"checksum", 128
"""The word with which the checksum at the end of a file begins, and the largest number of bytes from this
word to the end of the file."""

PHASE_BY_FOLDER = {
    "policy": "weights",
    "adapter": "weights of the adapters",
    "critic": "weights of the critic",
    "reward_model": "weights of the reward model",
    "trainer": "trainer's state",
}
"""The folders of a checkpoint that are compared. The value names the phase in the report of a difference."""

Difference = tuple[str, str, str] | None
"""The position of the first difference of two files, and the values of the first and the second file there.

Example: `("train/17/0, reward", "1.0", "0.0")`. None for equal files."""


@dataclass(frozen=True)
class FirstDifference:
    """The first difference between two runs.

    Example: `FirstDifference(2, "credit", "iterations/0001/episodes.arrow: 17#0, reward", "1.0", "0.0")`.
    """

    iteration: int
    """Counted from 1, as on the console."""
    phase: str
    position: str
    """The file, and the position in it."""
    first: str
    """The first run's value at the position."""
    second: str
    """The second run's value at the position."""

    @override
    def __str__(self) -> str:
        return (
            f"the runs first differ in iteration {self.iteration}, {self.phase}: {self.position} is"
            f" {self.first} in the first and {self.second} in the second"
        )


def find_first_difference(first: Path, second: Path) -> FirstDifference | None:
    """Returns the first difference between the folders of two experiments, or None if they don't differ.

    Files are compared in the order in which a run writes them: in each iteration the answers, their credit,
    the metrics of training, the weights and the trainer's state, and the evaluations. Numbers that depend on
    time are ignored, and so are files that only one run has, such as those of deleted checkpoints.

    Raises ValueError for a folder without a run, and for runs without a common iteration.
    """
    first_run, second_run = ExperimentDirectory(first), ExperimentDirectory(second)
    common = sorted(_require_iterations(first_run) & _require_iterations(second_run))
    if not common:
        raise ValueError(f"{first} and {second} have no iteration in common")
    for number in common:
        for phase, path, compare in _list_comparisons(first_run, number):
            name = path.relative_to(first)
            if not (path.exists() and (second / name).exists()):
                continue
            difference = compare(path, second / name)
            if difference is not None:
                position, value_in_first, value_in_second = difference
                iteration = number + 1  # folders count iterations from 0, the console from 1
                position_in_run = f"{name}: {position}"
                return FirstDifference(iteration, phase, position_in_run, value_in_first, value_in_second)
    return None


def _require_iterations(run: ExperimentDirectory) -> set[int]:
    """Returns the numbers of a run's iterations. Raises ValueError for a folder without any."""
    iterations = run.iterations()
    if not iterations:
        raise ValueError(f"{run.path} has no iterations of a run: give an experiment's folder")
    return set(iterations)


def _list_comparisons(
    run: ExperimentDirectory, number: int
) -> Iterator[tuple[str, Path, Callable[[Path, Path], Difference]]]:
    """Yields the files and folders of an iteration to compare, in the order in which a run writes them.

    Each comes with the phase that wrote it, and the function that compares two such files or folders.
    """
    folder = run.iteration_folder(number)
    finished = number + 1  # checkpoints and evaluations are counted by finished iterations
    yield "sampling", folder / TRAJECTORIES, _compare_tables
    yield "sampling", run.journal_folder(number), partial(_compare_journals, phase="rollout")
    yield "credit", folder / EPISODES, _compare_tables
    yield "credit", run.journal_folder(number), partial(_compare_journals, phase="credit")
    yield "training (metrics)", folder / ITERATION_METRICS, _compare_numbers
    for name, phase in PHASE_BY_FOLDER.items():
        folder_of_checkpoint = run.checkpoint_folder(finished) / name
        for path in _files_to_compare(folder_of_checkpoint):
            yield phase, path, _compare_tensors if path.suffix == ".safetensors" else _compare_bytes
        yield phase, folder_of_checkpoint, _compare_checksums_of_folders
    # Each evaluation set has a folder with a summary, which has a digest of the set's answers.
    for evaluated_after, label in run.evaluations():
        if evaluated_after == finished:
            yield "evaluation", run.evaluation_folder(finished, label) / SUMMARY, _compare_numbers


def _files_to_compare(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS_FILE)


def _compare_tensors(first: Path, second: Path) -> Difference:
    """Compares the tensors of two files, name by name. A name that only one file has is a difference."""
    import numpy as np
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:
        files = []
        for path in (first, second):
            try:
                files.append(stack.enter_context(safe_open(path, "pt")))
            except SafetensorError as error:
                raise ValueError(
                    f"{path} can't be read as a whole ({error}): it was damaged or cut"
                ) from error
        first_file, second_file = files
        if sorted(first_file.keys()) != sorted(second_file.keys()):
            count = len(second_file.keys())
            # Both files may have the same number of tensors. Then only their names differ: "or others".
            return "the names of its tensors", str(len(first_file.keys())), f"{count} or others"
        for name in first_file.keys():  # noqa: SIM118  (it can't be iterated over)
            a, b = first_file.get_tensor(name), second_file.get_tensor(name)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return f"the tensor {name}", f"{a.dtype} {tuple(a.shape)}", f"{b.dtype} {tuple(b.shape)}"
            # Compares bytes, because NaN is not equal to itself, and 0.0 is equal to -0.0.
            different = np.flatnonzero((_bytes_of_numbers(a) != _bytes_of_numbers(b)).any(axis=1))
            if len(different):
                flat = int(different[0])
                shape = a.shape or (1,)  # a scalar, whose shape is (), has its number at [0]
                index = [int(i) for i in np.unravel_index(flat, shape)]
                position = f"the tensor {name} at {index} ({len(different)} of {a.numel()} numbers differ)"
                return position, f"{a.flatten()[flat].item()!r}", f"{b.flatten()[flat].item()!r}"
    return None


def _bytes_of_numbers(tensor: Tensor) -> NDArray[np.uint8]:
    """Returns an array with a row for each number of the tensor: the bytes of the number."""
    import torch

    flat_bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat_bytes.reshape(-1, tensor.element_size())


def _compare_tables(first: Path, second: Path) -> Difference:
    """Compares two Arrow files row by row, without columns that depend on time."""
    first_table, second_table = _read_table(first), _read_table(second)
    if first_table.num_rows != second_table.num_rows:
        return "its number of rows", str(first_table.num_rows), str(second_table.num_rows)
    # For each column the first row that differs, and the difference.
    differences: list[tuple[int, str, tuple[str, Any, Any]]] = []
    for name in first_table.column_names:
        if name not in second_table.column_names or _is_timed(name):
            continue
        column, second_column = first_table.column(name), second_table.column(name)
        if column.equals(second_column):
            continue
        for row, (a, b) in enumerate(zip(column, second_column, strict=True)):
            if a.equals(b):
                continue
            difference_in_cell = _difference_of_values(a.as_py(), b.as_py())
            # There is none if the cells differ only in what depends on time, or if both are NaN, which
            # `equals` takes as different from itself.
            if difference_in_cell is not None:
                differences.append((row, name, difference_in_cell))
                break
    if not differences:
        # One of the files may still be damaged, in a column that is not compared or in its checksum.
        difference = _compare_checksums(first, second, _open_and_verify_stream)
        return difference or _compare_missing_checksums(first, second)
    # The difference in the first row that has one, and there in the first column: of equals, `min` returns
    # the first.
    row, name, (path_in_cell, value, second_value) = min(differences, key=lambda difference: difference[0])
    label = f"row {row}"
    if "trajectory" in first_table.column_names:
        label = first_table.column("trajectory")[row].as_py()
    return f"{label}, {name}{path_in_cell}", repr(value), repr(second_value)


def _read_table(path: Path) -> pa.Table:
    import pyarrow as pa

    try:
        with path.open("rb") as file:
            table = pa.ipc.open_stream(file).read_all()
        table.validate(full=True)  # otherwise a damaged offset would read memory anywhere
        return table
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} can't be read as a whole ({error}): it was damaged or cut") from error


def _difference_of_values(a: Any, b: Any) -> tuple[str, Any, Any] | None:
    """Returns the path of the first difference between two nested values, and what each of the two has there.

    Keys that depend on time, or that only one value has, are left out. Returns None for equal values.

    Example: `(".grade.reward", 1.0, 0.0)`, or with an index `("[3]", 17, 5)`."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a:
            if key not in b or _is_timed(key):
                continue
            difference = _difference_of_values(a[key], b[key])
            if difference is not None:
                path, a_value, b_value = difference
                return f".{key}{path}", a_value, b_value
        return None
    if isinstance(a, list) and isinstance(b, list):
        for index, (a_item, b_item) in enumerate(zip(a, b)):  # as far as the shorter list goes
            difference = _difference_of_values(a_item, b_item)
            if difference is not None:
                path, a_value, b_value = difference
                return f"[{index}]{path}", a_value, b_value
        return None if len(a) == len(b) else (" (its length)", len(a), len(b))
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) and math.isnan(b):
            return None
        if math.copysign(1.0, a) != math.copysign(1.0, b):  # 0.0 == -0.0, and their bits differ
            return "", a, b
    elif isinstance(a, float) or isinstance(b, float):
        return "", a, b  # 1 and 1.0 are equal, but are written differently
    return None if a == b else ("", a, b)


def _is_timed(name: str) -> bool:
    return any(word in name for word in PARTS_OF_TIMED_NAMES)


def _compare_numbers(first: Path, second: Path) -> Difference:
    """Compares the numbers that two JSON objects have in common and that don't depend on time."""
    objects = []
    for path in (first, second):
        try:
            value = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error}): it was damaged or cut off") from error
        # Checksums of intact files differ, too, since they cover numbers that depend on time.
        objects.append({name: member for name, member in value.items() if name != CHECKSUM_KEY})
    difference = _difference_of_values(*objects)
    if difference is None:
        # One of the files may still be damaged, in a number that depends on time or in its checksum. Each
        # checksum is therefore tested against its own file.
        verify = partial(read_record, remedy="")  # the remedy is part of an error's message, which isn't used
        return _compare_checksums(first, second, verify) or _compare_missing_checksums(first, second)
    path_in_object, first_value, second_value = difference
    return path_in_object.lstrip("."), repr(first_value), repr(second_value)


def _open_and_verify_stream(path: Path) -> None:
    with path.open("rb") as file:
        verify_stream(file, str(path), "")


def _compare_checksums(first: Path, second: Path, verify: Callable[[Path], object]) -> Difference:
    """Returns a difference if, by their checksums, only one of two files or folders is damaged.

    It is called after a comparison of the contents has found no difference: a part that is not compared may
    still be damaged. `verify` raises Damaged for a file or folder that differs from its checksum."""

    def verdict(path: Path) -> str:
        try:
            verify(path)
        except Damaged:
            return "damaged"
        return "intact"

    verdicts = verdict(first), verdict(second)
    return None if verdicts[0] == verdicts[1] else ("what its checksum covers", *verdicts)


def _compare_missing_checksums(first: Path, second: Path) -> Difference:
    """Returns a difference if only one of two files of the same size and content has a checksum.

    Earlier versions wrote no checksums, so their files are shorter than the same files with a checksum: files
    of different sizes are no difference. If both have the same size and one has no checksum, its checksum was
    damaged, which is a difference."""
    sizes, has_checksum = [], []
    for path in (first, second):
        with path.open("rb") as file:
            sizes.append(file.seek(0, os.SEEK_END))  # the position of the end
            file.seek(max(0, sizes[-1] - MOST_CHECKSUM_BYTES))  # a checksum is at the end of its file
            has_checksum.append(CHECKSUM_WORD in file.read())
    if sizes[0] != sizes[1] or has_checksum[0] == has_checksum[1]:
        return None
    states = ["present" if present else "missing or damaged" for present in has_checksum]
    return "its checksum", states[0], states[1]


def _compare_checksums_of_folders(first: Path, second: Path) -> Difference:
    """Returns a difference if only one of two folders differs from its checksums.

    The files that both folders have are compared elsewhere. This comparison finds other damage: a file of one
    folder is gone, or its list of checksums is damaged."""

    def verify(path: Path) -> None:
        if damage := find_damage(path):
            raise Damaged(damage)

    return _compare_checksums(first, second, verify)


def _compare_journals(first: Path, second: Path, phase: str) -> Difference:
    """Compares the requests of a phase in two folders of journals.

    Neither the order of the requests nor the rank that made them matters. Returns None if one of the folders
    has no journal of the phase, because files that only one run has are not compared."""
    in_first, in_second = (_read_requests(folder, phase) for folder in (first, second))
    if not in_first or not in_second:
        return None
    for key in dict.fromkeys([*in_first, *in_second]):
        if key not in in_second:
            return f"the {phase}'s request {key}", "answered", "missing or damaged"
        if key not in in_first:
            return f"the {phase}'s request {key}", "missing or damaged", "answered"
        difference = _difference_of_values(in_first[key], in_second[key])
        if difference is not None:
            path, first_value, second_value = difference
            return f"the {phase}'s request {key}, sample{path}", repr(first_value), repr(second_value)
    return None


def _read_requests(folder: Path, phase: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the samples of each request, without numbers that depend on time. Lines that can't be read are
    left out, as a resumed run leaves them out."""
    samples_by_request = {}
    for path in sorted(folder.glob(f"{phase}-*.jsonl")):
        for row in read_journal(path):
            with contextlib.suppress(ValueError, TypeError):
                key, stored_samples = row
                samples = zip(completions_of_row(row), stored_samples, strict=True)
                samples_by_request[key] = [
                    _make_comparable(completion, stored) for completion, stored in samples
                ]
    return samples_by_request


def _make_comparable(completion: Completion, stored: list[Any]) -> dict[str, Any]:
    """Returns what is compared of a sample: first its numbers, and then the stored texts of its token ids and
    log-probs.

    The texts can differ where numbers are equal, because base64 has several texts for the same bytes."""
    return {
        "token_ids": completion.token_ids.tolist(),
        "logprobs": None if completion.logprobs is None else completion.logprobs.tolist(),
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "written": stored[:2],
    }


def _compare_bytes(first: Path, second: Path) -> Difference:
    """Compares two files byte by byte."""

    def byte_at(chunk: bytes, position: int) -> str:
        return f"0x{chunk[position]:02x}" if position < len(chunk) else "its end"

    offset = 0  # of the present chunks
    with first.open("rb") as first_file, second.open("rb") as second_file:
        while True:
            a, b = first_file.read(CHUNK_BYTES), second_file.read(CHUNK_BYTES)
            if a != b:
                common = min(len(a), len(b))
                position = next((i for i in range(common) if a[i] != b[i]), common)
                return f"byte {offset + position}", byte_at(a, position), byte_at(b, position)
            if not a:
                return None
            offset += len(a)
