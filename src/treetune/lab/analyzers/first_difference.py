"""The first difference of two runs: the first iteration, phase and number in which their files differ."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from treetune.engine.base import Completion
from treetune.engine.journal import completions_of_row
from treetune.exceptions import Damaged
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import KEY, SUMS, damage_of, read_record, verify_stream
from treetune.store.journal import read_rows

if TYPE_CHECKING:
    import pyarrow as pa

TIMED = ("seconds", "memory/", "time", "speed", "tokens_per_second", "sync_", "restarts")
"""Parts of the names of numbers that depend on time, and differ between any two runs."""

CHUNK_BYTES = 1 << 20

JOURNALS = "journal"

SEAL, SEAL_BYTES = b"checksum", 128
"""The word that a checksum begins with, and the most bytes from it to the file's end."""

PARTS = {"policy": "weights", "critic": "weights of the critic", "trainer": "trainer's state"}
"""The folders of a checkpoint, and what they hold."""

Differing = tuple[str, str, str] | None
"""Where two files differ first, and what the first and the second file have there; None where they are the
same. An example: ``("train/17/0, reward", "1.0", "0.0")``."""


@dataclass(frozen=True)
class FirstDifference:
    """The first difference. `iteration` counts from 1, as the console does."""

    iteration: int
    phase: str
    place: str
    first: str
    second: str

    @override
    def __str__(self) -> str:
        return (
            f"the runs part in iteration {self.iteration}, {self.phase}: {self.place} is {self.first} in the"
            f" first and {self.second} in the second"
        )


def first_difference(first: Path, second: Path) -> FirstDifference | None:
    """Returns the first difference of two experiments' folders, in the order in which a run writes files: in
    each iteration the answers, their credit, with the journals of both, the metrics of training, the weights
    and the trainer's state, the evaluations. None where all files that both have are the same, but for
    numbers that depend on time.

    Files that only one of them has, such as those of checkpoints that were cleaned up, are no difference; the
    runs must share an iteration. Raises ValueError where a folder holds no run, and where the runs have no
    iteration in common.
    """
    in_first, in_second = _iterations(first), _iterations(second)
    common = sorted(in_first & in_second)
    if not common:
        raise ValueError(f"{first} and {second} have no iteration in common")
    directory = ExperimentDirectory(first)
    for number in common:
        for phase, path, compare in _comparisons(directory, number):
            name = path.relative_to(first)
            if not (path.exists() and (second / name).exists()):
                continue
            difference = compare(path, second / name)
            if difference is not None:
                where, value_in_first, value_in_second = difference
                return FirstDifference(number + 1, phase, f"{name}: {where}", value_in_first, value_in_second)
    return None


def _iterations(run: Path) -> set[int]:
    """Returns the numbers of a run's iterations. Raises ValueError for a folder that holds no run."""
    if not (run / "iterations").is_dir():
        raise ValueError(f"{run} holds no iterations of a run: name an experiment's folder")
    names = [path.name for path in (run / "iterations").iterdir()]
    return {int(name) for name in names if name.isdigit()}


def _comparisons(
    run: ExperimentDirectory, number: int
) -> Iterator[tuple[str, Path, Callable[[Path, Path], Differing]]]:
    """Yields, in the order in which a run writes them, the files and folders of an iteration that are
    compared: the phase that wrote it, its path, and the function that compares it."""
    folder, finished = run.iteration(number), number + 1
    yield "sampling", folder / "trajectories.arrow", _compare_tables
    yield "sampling", folder / JOURNALS, partial(_compare_journals, phase="rollout")
    yield "credit", folder / "episodes.arrow", _compare_tables
    yield "credit", folder / JOURNALS, partial(_compare_journals, phase="credit")
    yield "training (metrics)", folder / "metrics.json", _compare_numbers
    for part, content in PARTS.items():
        for path in _files(run.checkpoint(finished) / part):
            yield content, path, _compare_tensors if path.suffix == ".safetensors" else _compare_bytes
        yield content, run.checkpoint(finished) / part, _compare_seals_of_folders
    for path in _files(run.path / "evaluations" / f"{finished:04d}"):
        if path.name == "summary.json":
            yield "evaluation", path, _compare_numbers


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)


def _compare_tensors(first: Path, second: Path) -> Differing:
    """Compares two files of tensors, by name; names that aren't in both are a difference."""
    import numpy as np
    import torch
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
        one, other = files
        if sorted(one.keys()) != sorted(other.keys()):
            return "the names of its tensors", str(len(one.keys())), f"{len(other.keys())} or others"
        for name in one.keys():  # noqa: SIM118  (no mapping)
            a, b = one.get_tensor(name), other.get_tensor(name)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return f"the tensor {name}", f"{a.dtype} {tuple(a.shape)}", f"{b.dtype} {tuple(b.shape)}"
            # By bytes: not-a-number is itself, and 0.0 is not -0.0.
            width = a.element_size()
            raw = [t.contiguous().view(-1).view(torch.uint8).numpy().reshape(-1, width) for t in (a, b)]
            off = np.flatnonzero((raw[0] != raw[1]).any(axis=1))
            if len(off):
                flat = int(off[0])
                index = [int(i) for i in np.unravel_index(flat, a.shape or (1,))]
                place = f"the tensor {name} at {index} ({len(off)} of {a.numel()} numbers differ)"
                return place, f"{a.flatten()[flat].item()!r}", f"{b.flatten()[flat].item()!r}"
    return None


def _compare_tables(first: Path, second: Path) -> Differing:
    """Compares two Arrow files, row by row. Columns that a clock decides are left out."""
    first_table, second_table = _table(first), _table(second)
    if first_table.num_rows != second_table.num_rows:
        return "its number of rows", str(first_table.num_rows), str(second_table.num_rows)
    # Of each column the first row that differs, and how.
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
            # None for cells that only differ in what depends on time, or in two texts of not-a-number.
            within_cell = _within(a.as_py(), b.as_py())
            if within_cell is not None:
                differences.append((row, name, within_cell))
                break
    if not differences:
        return _compare_seals(first, second, _verify_stream) or _compare_lacking_seals(first, second)
    # The first row, and in it the first column: `min` keeps the first of equals.
    row, name, (where, value, second_value) = min(differences, key=lambda difference: difference[0])
    label = f"row {row}"
    if "trajectory" in first_table.column_names:
        label = first_table.column("trajectory")[row].as_py()
    return f"{label}, {name}{where}", repr(value), repr(second_value)


def _table(path: Path) -> pa.Table:
    import pyarrow as pa

    try:
        with path.open("rb") as file:
            table = pa.ipc.open_stream(file).read_all()
        table.validate(full=True)  # else a flipped bit of an offset is read as what lies anywhere
        return table
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} can't be read as a whole ({error}): it was damaged or cut") from error


def _within(a: Any, b: Any) -> tuple[str, Any, Any] | None:
    """Returns the path of the first difference within two nested values, such as ``.grade.reward`` or
    ``[3]``, and what both have there; None where they are the same."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a:
            if key in b and not _is_timed(key) and (inner := _within(a[key], b[key])) is not None:
                path, a_value, b_value = inner
                return f".{key}{path}", a_value, b_value
        return None
    if isinstance(a, list) and isinstance(b, list):
        for index, (a_item, b_item) in enumerate(zip(a, b)):
            if (inner := _within(a_item, b_item)) is not None:
                path, a_value, b_value = inner
                return f"[{index}]{path}", a_value, b_value
        return None if len(a) == len(b) else (" (its length)", len(a), len(b))
    if isinstance(a, float) and isinstance(b, float):
        if math.isnan(a) and math.isnan(b):
            return None
        if math.copysign(1.0, a) != math.copysign(1.0, b):  # 0.0 == -0.0, and their bits differ
            return "", a, b
    elif isinstance(a, float) or isinstance(b, float):
        return "", a, b  # 1 and 1.0 are equal, and not written alike
    return None if a == b else ("", a, b)


def _is_timed(name: str) -> bool:
    return any(word in name for word in TIMED)


def _compare_numbers(first: Path, second: Path) -> Differing:
    """Compares the numbers of two JSON objects that both have and no clock decides."""
    values = []
    for path in (first, second):
        try:
            value = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is no JSON ({error}): it was damaged or cut") from error
        # A clock has its part in the checksum.
        values.append({name: one for name, one in value.items() if name != KEY})
    found = _within(*values)
    if found is None:
        verify = partial(read_record, remedy="")
        return _compare_seals(first, second, verify) or _compare_lacking_seals(first, second)
    return found[0].lstrip("."), repr(found[1]), repr(found[2])


def _verify_stream(path: Path) -> None:
    with path.open("rb") as file:
        verify_stream(file, str(path), "")


def _compare_seals(first: Path, second: Path, verify: Callable[[Path], object]) -> Differing:
    """Compares whether checksums say that two files or folders of the same content aren't what was
    written."""

    def verdict(path: Path) -> str:
        try:
            verify(path)
        except Damaged:
            return "damaged"
        return "right"

    verdicts = verdict(first), verdict(second)
    return None if verdicts[0] == verdicts[1] else ("what its checksum covers", *verdicts)


def _compare_lacking_seals(first: Path, second: Path) -> Differing:
    """Compares the seals of two files that are as long and say the same. Files of an earlier version have
    none, and are shorter by it."""
    sizes, sealed = [], []
    for path in (first, second):
        with path.open("rb") as file:
            sizes.append(file.seek(0, 2))
            file.seek(max(0, sizes[-1] - SEAL_BYTES))
            sealed.append(SEAL in file.read())
    if sizes[0] != sizes[1] or sealed[0] == sealed[1]:
        return None
    words = ["there" if one else "missing or damaged" for one in sealed]
    return "its checksum", words[0], words[1]


def _compare_seals_of_folders(first: Path, second: Path) -> Differing:
    """Compares whether one alone of two folders with the same tensors isn't as it was sealed."""

    def verify(path: Path) -> None:
        if damage := damage_of(path):
            raise Damaged(damage)

    return _compare_seals(first, second, verify)


def _compare_journals(first: Path, second: Path, phase: str) -> Differing:
    """Compares the requests of a phase in two folders of journals, whichever rank answered them in which
    order. Where one of both has no journal of it, there is nothing to compare."""
    one, other = (_requests(folder, phase) for folder in (first, second))
    if not one or not other:
        return None
    for key in dict.fromkeys([*one, *other]):
        if key not in one or key not in other:
            words = ("answered", "missing or damaged") if key in one else ("missing or damaged", "answered")
            return f"the {phase}'s request {key}", *words
        found = _within(one[key], other[key])
        if found is not None:
            return f"the {phase}'s request {key}, sample{found[0]}", repr(found[1]), repr(found[2])
    return None


def _requests(folder: Path, phase: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the answers to each request, without what a clock decides. Lines that are no record are left
    out, as a run that goes on leaves them out."""
    found = {}
    for path in sorted(folder.glob(f"{phase}-*.jsonl")):
        for row in read_rows(path):
            with contextlib.suppress(ValueError, TypeError):
                key, written = row
                samples = zip(completions_of_row(row), written, strict=True)
                found[key] = [_sample(one, numbers) for one, numbers in samples]
    return found


def _sample(one: Completion, written: list[Any]) -> dict[str, Any]:
    """Returns what is compared. `written` is last: base64 has several texts for the same numbers."""
    return {
        "token_ids": one.token_ids.tolist(),
        "logprobs": None if one.logprobs is None else one.logprobs.tolist(),
        "finish_reason": one.finish_reason,
        "policy_version": one.policy_version,
        "written": written[:2],
    }


def _compare_bytes(first: Path, second: Path) -> Differing:
    """Compares two files byte by byte."""
    at = 0
    with first.open("rb") as one, second.open("rb") as other:
        while True:
            a, b = one.read(CHUNK_BYTES), other.read(CHUNK_BYTES)
            if a != b:
                place = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
                values = (f"0x{part[place]:02x}" if place < len(part) else "its end" for part in (a, b))
                return (f"byte {at + place}", *values)  # type: ignore[return-value]
            if not a:
                return None
            at += len(a)
