"""The point where two runs part: the first iteration, phase and number in which what they wrote differs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.inference.base import Completion
from treetune.inference.journal import completions_of_row
from treetune.runtime.directory import ExperimentDirectory
from treetune.store.checksums import KEY, SUMS, Damaged, damage_of, read_record, verify_stream
from treetune.store.journal import read_rows

if TYPE_CHECKING:
    import pyarrow as pa

TIMED = ("seconds", "time", "speed", "tokens_per_second", "sync_", "restarts")
"""Words in the names of numbers that a clock decides."""

CHUNK_BYTES = 1 << 20

JOURNALS = "journal"

SEAL, SEAL_BYTES = b"checksum", 128
"""A word that checksums begin with, and how far from a file's end at most."""

PARTS = {"policy": "weights", "critic": "weights of the critic", "trainer": "trainer's state"}
"""The folders of a checkpoint, and what they hold."""

Comparison = Callable[[Path, Path], tuple[str, str, str] | None]
"""A function of two files: where they differ first, and what stands there in each; None where they don't."""


@dataclass(frozen=True)
class Difference:
    """The first difference. `iteration` counts from 1, as the console does; 0 is what lies before them."""

    iteration: int
    phase: str
    place: str
    first: str
    second: str

    def __str__(self) -> str:
        return (
            f"the runs part in iteration {self.iteration}, {self.phase}: {self.place} is {self.first} in the"
            f" first and {self.second} in the second"
        )


def first_difference(first: Path, second: Path) -> Difference | None:
    """Returns the first difference of two experiments' folders, in the order in which a run writes them: in
    each iteration what was sampled, what credit it got, with the journals of both, the metrics of training,
    the weights and the trainer's state, the evaluations. None where all that both have is the same, but for
    what a clock decides.

    What only one of them has, such as checkpoints that were cleaned up, is no difference; the runs must share
    an iteration. Raises ValueError where one holds no run, or nothing is to be found in both.
    """
    one, other = ExperimentDirectory(first), ExperimentDirectory(second)
    for directory in (one, other):
        if not (directory.path / "iterations").is_dir():
            raise ValueError(f"{directory.path} holds no iterations of a run: name an experiment's folder")
    numbers = _both(_iterations(one), _iterations(other))
    if not numbers:
        raise ValueError(f"{first} and {second} have no iteration in common")
    return next((found for number in numbers for found in _of_iteration(one, other, number)), None)


def _of_iteration(one: ExperimentDirectory, other: ExperimentDirectory, number: int) -> Iterator[Difference]:
    done = number + 1

    def files() -> Iterator[tuple[str, Path, Comparison]]:
        """Yields what is compared of the first run, and how."""
        place = one.iteration(number)
        yield "sampling", place / "trajectories.arrow", tables_differ
        yield "sampling", place / JOURNALS, partial(journals_differ, phase="rollout")
        yield "credit", place / "episodes.arrow", tables_differ
        yield "credit", place / JOURNALS, partial(journals_differ, phase="credit")
        yield "training (metrics)", place / "metrics.json", numbers_differ
        for part, words in PARTS.items():
            for path in _files(one.checkpoint(done) / part):
                yield words, path, tensors_differ if path.suffix == ".safetensors" else bytes_differ
            yield words, one.checkpoint(done) / part, folders_differ
        for path in _files(one.path / "evaluations" / f"{done:04d}"):
            if path.name == "summary.json":
                yield "evaluation", path, numbers_differ

    for phase, first, differ in files():
        name = first.relative_to(one.path)
        second = other.path / name
        if first.exists() and second.exists():
            found = differ(first, second)
            if found is not None:
                place, of_first, of_second = found
                yield Difference(done, phase, f"{name}: {place}", of_first, of_second)


def tensors_differ(first: Path, second: Path) -> tuple[str, str, str] | None:
    """Compares two files of tensors, by name; names that aren't in both are a difference."""
    import numpy as np

    with _tensors(first) as one, _tensors(second) as other:
        if sorted(one.keys()) != sorted(other.keys()):
            return "the names of its tensors", str(len(one.keys())), f"{len(other.keys())} or others"
        for name in one.keys():  # noqa: SIM118  (no mapping)
            a, b = one.get_tensor(name), other.get_tensor(name)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return f"the tensor {name}", f"{a.dtype} {tuple(a.shape)}", f"{b.dtype} {tuple(b.shape)}"
            # By bytes: not-a-number is itself, and 0.0 is not -0.0.
            width = a.element_size()
            raw_a, raw_b = (t.contiguous().view(-1).view(_bytes()).numpy().reshape(-1, width) for t in (a, b))
            off = np.flatnonzero((raw_a != raw_b).any(axis=1))
            if len(off):
                flat = int(off[0])
                index = [int(i) for i in np.unravel_index(flat, a.shape or (1,))]
                place = f"the tensor {name} at {index} ({len(off)} of {a.numel()} numbers differ)"
                return place, f"{a.flatten()[flat].item()!r}", f"{b.flatten()[flat].item()!r}"
    return None


@contextlib.contextmanager
def _tensors(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} can't be read as a whole ({error}): it was damaged or cut") from error
    with file as opened:
        yield opened


def _bytes() -> Any:
    import torch

    return torch.uint8


def tables_differ(first: Path, second: Path) -> tuple[str, str, str] | None:
    """Compares two Arrow files, row by row. Columns that a clock decides are left out."""
    one, other = _table(first), _table(second)
    if one.num_rows != other.num_rows:
        return "its number of rows", str(one.num_rows), str(other.num_rows)
    names = [name for name in one.column_names if name in other.column_names and not _is_timed(name)]
    rows = [_first_row(one.column(name), other.column(name)) for name in names]
    known = [(row, name) for row, name in zip(rows, names, strict=True) if row is not None]
    if not known:
        return _damage_differs(first, second, _verify_stream) or _seal_differs(first, second)
    row, name = min(known, key=lambda found: (found[0], names.index(found[1])))
    values = one.column(name)[row].as_py(), other.column(name)[row].as_py()
    within = _within(*values)
    if within is None:
        return None
    where, *of_both = within
    who = one.column("trajectory")[row].as_py() if "trajectory" in one.column_names else f"row {row}"
    return f"{who}, {name}{where}", repr(of_both[0]), repr(of_both[1])


def _verify_stream(path: Path) -> None:
    with path.open("rb") as file:
        verify_stream(file, str(path), "")


def _verify_record(path: Path) -> None:
    read_record(path, "")


def _seal_differs(first: Path, second: Path) -> tuple[str, str, str] | None:
    """Compares the seals of two files that are as long and say the same. What an earlier version wrote has
    none, and is shorter by it."""
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


def _table(path: Path) -> pa.Table:
    import pyarrow as pa

    try:
        with path.open("rb") as file:
            table = pa.ipc.open_stream(file).read_all()
        table.validate(full=True)  # else a flipped bit of an offset is read as what lies anywhere
        return table
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} can't be read as a whole ({error}): it was damaged or cut") from error


def _first_row(one: pa.ChunkedArray, other: pa.ChunkedArray) -> int | None:
    """The first in which two columns differ beyond what a clock decides."""
    if one.equals(other):
        return None
    for row, (a, b) in enumerate(zip(one, other, strict=True)):
        if not a.equals(b) and _within(a.as_py(), b.as_py()) is not None:
            return row
    return None


def _within(one: Any, other: Any) -> tuple[str, Any, Any] | None:
    """Returns the path of the first difference within two nested values, and both."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [key for key in one if key in other and not _is_timed(key)]
        for key in keys:
            if (found := _within(one[key], other[key])) is not None:
                return f".{key}{found[0]}", found[1], found[2]
        return None
    if isinstance(one, list) and isinstance(other, list):
        for place, (a, b) in enumerate(zip(one, other)):
            if (found := _within(a, b)) is not None:
                return f"[{place}]{found[0]}", found[1], found[2]
        return None if len(one) == len(other) else (" (its length)", len(one), len(other))
    same = one == other and _signed(one) == _signed(other)
    both_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return None if same or both_nan else ("", one, other)


def _signed(value: Any) -> float:
    return math.copysign(1.0, value) if isinstance(value, float) else 0.0


def numbers_differ(first: Path, second: Path) -> tuple[str, str, str] | None:
    """Compares the numbers of two JSON objects that both have and no clock decides."""
    one, other = (_json(path) for path in (first, second))
    found = _within(one, other)
    if found is None:
        return _damage_differs(first, second, _verify_record) or _seal_differs(first, second)
    return found[0].lstrip("."), repr(found[1]), repr(found[2])


def _json(path: Path) -> Any:
    """Returns a file's object without the checksum, in which a clock has its part."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): it was damaged or cut") from error
    return {name: one for name, one in value.items() if name != KEY}


def _damage_differs(
    first: Path, second: Path, verify: Callable[[Path], object]
) -> tuple[str, str, str] | None:
    """Compares whether checksums say that two files or folders of the same content aren't what was
    written."""

    def told(path: Path) -> str:
        try:
            verify(path)
        except Damaged:
            return "damaged"
        return "right"

    of_both = told(first), told(second)
    return None if of_both[0] == of_both[1] else ("what its checksum covers", *of_both)


def folders_differ(first: Path, second: Path) -> tuple[str, str, str] | None:
    """Compares whether one alone of two folders with the same tensors isn't as it was sealed."""

    def verify(path: Path) -> None:
        if damage := damage_of(path):
            raise Damaged(damage)

    return _damage_differs(first, second, verify)


def journals_differ(first: Path, second: Path, phase: str) -> tuple[str, str, str] | None:
    """Compares the requests of a phase in two folders of journals, whichever rank answered them in which
    order. Where one of both has no journal of it, there is nothing to compare."""
    one, other = (_requests(folder, phase) for folder in (first, second))
    if not one or not other:
        return None
    for key in [*one, *(key for key in other if key not in one)]:
        if key not in one or key not in other:
            words = "answered", "missing or damaged"
            return (f"the {phase}'s request {key}", *(words if key in one else reversed(words)))
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


def bytes_differ(first: Path, second: Path) -> tuple[str, str, str] | None:
    """The first byte, of files that nobody looks into."""
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


def _is_timed(name: str) -> bool:
    return any(word in name for word in TIMED)


def _iterations(directory: ExperimentDirectory) -> list[int]:
    return sorted(int(path.name) for path in (directory.path / "iterations").iterdir() if path.name.isdigit())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)


def _both(one: list[Any], other: list[Any]) -> list[Any]:
    return [item for item in one if item in other]
