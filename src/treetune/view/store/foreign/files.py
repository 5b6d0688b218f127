"""Reads rows of other programs' files: JSON lines (also while they are written), Inspect's archives and JSON,
slime's ``.pt``, TRL's Parquet, W&B's tables."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from treetune.view.store.readers import wandb_rows

ENDINGS = (".jsonl", ".eval", ".json", ".pt", ".parquet")

FIRST_ROWS = 20
"""The number of rows at a file's beginning that are searched for an answer."""
LONGEST_FIRST_LINE = 32_000_000
HEAD_BYTES = 1_000_000
"""The size of the beginning of a JSON file or a pickle that shows whether it can have answers."""
ROWS_AT_ONCE = 1024

ZSTANDARD, LENGTHS_AT = 93, 26
"""In a zip archive: the number of Zstandard compression, which Python reads only from 3.14 on, and the
position of the lengths of names in a member's header."""
LARGEST_SAMPLE_BYTES = 200_000_000
"""The largest sample of an Inspect log that is unpacked."""

OF_A_TABLE = ("prompt", "completion", "step")
"""The columns of TRL's tables of completions. A Parquet file without them is a data set."""

NOT_AN_OBJECT = "not a JSON object"

UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, NotImplementedError,
    OverflowError, zipfile.BadZipFile,
)  # fmt: skip
"""The errors that damaged files and files of another kind raise."""


@dataclass(frozen=True)
class FileRow:
    """A row of a file.

    Example: `FileRow(place=1024, where="line 3", content={"prompt": "2+2=", "response": "4", "score": 1.0})`.
    """

    place: int
    """The byte where its line begins, or its number, counted from 0."""
    where: str
    """The position, as messages name it."""
    content: Any = None
    fault: str = ""
    """The reason why it can't be read; empty for a row that could be."""
    is_inspect: bool = False
    """Whether it is a sample of Inspect."""
    task: str = ""
    """The name of the evaluation's task, for a sample of Inspect."""


def rows_of(path: Path, remarks: list[str]) -> Iterator[FileRow]:
    """Yields the rows of a file, and adds remarks on the whole file to `remarks`.

    Raises ValueError for a file that can't be read.
    """
    if path.suffix == ".jsonl":
        yield from _lines(path, remarks)
    elif path.suffix == ".eval":  # an archive of Inspect
        yield from _samples(path, remarks)
    elif path.suffix == ".pt":  # of slime
        yield from _numbered(_pickled_samples(path))
    elif path.suffix == ".parquet":  # of TRL
        yield from _numbered(_parquet_rows(path))
    elif _begins_as_log(path):  # Inspect's log in JSON
        yield from _samples_of_json(path, remarks)
    else:  # a table of W&B
        yield from _numbered(iter(wandb_rows(path)))


def first_rows(path: Path) -> Iterator[FileRow]:
    """Yields a few rows at the beginning of a file, without reading much more of it.

    The rows only show whether the file has answers. Their places and line numbers are not used. For a file
    of Inspect, one row without content stands for its samples.
    """
    if path.suffix == ".jsonl":
        yield from _first_lines(path)
    elif path.suffix == ".eval":
        if _is_archive_of_inspect(path):
            yield FileRow(0, "", is_inspect=True)
    elif path.suffix == ".pt":
        if _has_samples_of_slime(path):
            # This row takes the place of slime's samples, which aren't read here. It passes for an answer.
            yield FileRow(0, "", {"prompt": "", "response": "", "reward": None})
    elif path.suffix == ".parquet":
        yield from _first_completions(path)
    elif _begins_as_log(path):
        yield FileRow(0, "", is_inspect=True)
    elif path.name.endswith(".table.json"):
        yield from _numbered(iter(wandb_rows(path)[:FIRST_ROWS]))


def _first_lines(path: Path) -> Iterator[FileRow]:
    """Yields the rows of the first lines, without faulty ones."""
    with path.open("rb") as file:
        for _ in range(FIRST_ROWS):
            text = file.readline(LONGEST_FIRST_LINE)
            if not text:
                return
            row = _line(0, 0, text)
            if row is not None and not row.fault:
                yield row


def _is_archive_of_inspect(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        # A running evaluation writes `_journal/start.json` first, and may have no sample yet.
        return bool(_sample_names(archive)) or "_journal/start.json" in archive.namelist()


def _has_samples_of_slime(path: Path) -> bool:
    """Returns whether a file of PyTorch looks like one of slime's samples. Raises ValueError unless it has
    exactly one pickle."""
    # The file may be a large checkpoint. So only the beginning of its pickle is read, and not unpickled.
    with zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        with archive.open(name) as pickled:
            head = pickled.read(HEAD_BYTES)
    return all(word in head for word in (b"rollout_id", b"samples", b"response"))


def _first_completions(path: Path) -> Iterator[FileRow]:
    """Yields the first rows of TRL's table of completions; none of another Parquet file, a data set."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        if not all(name in table.schema_arrow.names for name in OF_A_TABLE):
            return
        first_batch = next(table.iter_batches(FIRST_ROWS), None)
        if first_batch is not None:
            yield from _numbered(iter(first_batch.to_pylist()))


def _numbered(contents: Iterator[Any]) -> Iterator[FileRow]:
    """Yields a row for each content, with its number as its place; it has a fault where it isn't an
    object."""
    for place, content in enumerate(contents):
        is_object = isinstance(content, Mapping)
        yield FileRow(place, f"row {place + 1}", content, "" if is_object else NOT_AN_OBJECT)


# JSON lines


def json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the lines of an evaluation's file, each with the byte where it begins."""
    with path.open("rb") as file:
        place = 0
        for text in file:
            if text.strip():
                yield place, json.loads(text)
            place += len(text)


def _lines(path: Path, remarks: list[str]) -> Iterator[FileRow]:
    """Yields the rows of JSON lines. A last line without its end may still be being written."""
    with path.open("rb") as file:
        place = 0
        for number, text in enumerate(file, 1):
            row = _line(place, number, text)
            if row is not None and row.fault and not text.endswith(b"\n"):
                remarks.append("its last line is incomplete and is left out")
                return
            if row is not None:
                yield row
            place += len(text)


def _line(place: int, number: int, text: bytes) -> FileRow | None:
    """Returns the row of a line; None for one that is blank."""
    if not text.strip():
        return None
    where = f"line {number}"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return FileRow(place, where, fault="not valid JSON")
    return FileRow(place, where, content, "" if isinstance(content, Mapping) else NOT_AN_OBJECT)


def row_at(path: Path, place: int) -> FileRow:
    """Returns the row whose line begins at the byte `place`.

    Raises ValueError if no row begins there, because the file was changed after `place` was noted.
    """
    with path.open("rb") as file:
        file.seek(place)
        # The number of the line isn't known here, and 0 stands for it.
        row = _line(place, 0, file.readline())
    if row is None or row.fault:
        raise ValueError(
            f"{path} has no answer at byte {place} any more, because it was rewritten: reload the page"
        )
    return row


# Inspect


def _samples(path: Path, remarks: list[str]) -> Iterator[FileRow]:
    """Yields the samples of an archive; one that can't be read is a row with a fault."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        header = _header(file, archive)
        task = _task(header)
        _add_status(header, remarks)
        for place, name in enumerate(_sample_names(archive)):
            try:
                content = json.loads(_member(file, archive, name))
                fault = "" if isinstance(content, Mapping) else NOT_AN_OBJECT
            except UNREADABLE as error:
                content, fault = None, f"can't be read ({error})"
            yield FileRow(place, name, content, fault, is_inspect=True, task=task)


def _sample_names(archive: zipfile.ZipFile) -> list[str]:
    """Returns the names of the archive's samples, with numbers in their numeric order: 2 before 10.

    An id with a slash becomes a folder in the name. A sample that was written twice is in the archive under
    the same name, of which reading returns the last content.
    """
    names = {name for name in archive.namelist() if re.fullmatch(r"samples/.+\.json", name, re.DOTALL)}

    def natural_order(name: str) -> tuple[list[tuple[int, int, str]], str]:
        # Each part of a name becomes (number, length, "") or (−1, 0, text). So texts come before numbers.
        key = []
        for part in re.split(r"(\d+)", name):
            # Only the first digits are read as a number, since ids can have thousands of digits.
            key.append((int(part[:18]), len(part), "") if part.isdecimal() else (-1, 0, part))
        return key, name

    return sorted(names, key=natural_order)


def _header(file: IO[bytes], archive: zipfile.ZipFile) -> Mapping[str, Any]:
    """Returns the header of a log, which is empty where there is none.

    A finished evaluation has it at the end of the log, and a running one at its beginning.
    """
    for name in ("header.json", "_journal/start.json"):
        try:
            header = json.loads(_member(file, archive, name))
        except UNREADABLE:
            continue
        if isinstance(header, Mapping) and header.get("eval"):
            return header
    return {}


def _member(file: IO[bytes], archive: zipfile.ZipFile, name: str) -> bytes:
    """Returns the content of a member. Raises ValueError for one that is too large."""
    info = archive.getinfo(name)
    if info.file_size > LARGEST_SAMPLE_BYTES:
        raise ValueError(f"larger than {LARGEST_SAMPLE_BYTES:,} bytes")
    if info.compress_type != ZSTANDARD:
        return archive.read(name)
    # Python before 3.14 can't read such a member. So its compressed bytes are looked up in the file. They
    # follow the member's header, which ends with a name and an extra field. The lengths of both are in it.
    import pyarrow as pa

    file.seek(info.header_offset + LENGTHS_AT)
    file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)  # skips the name and the extra field
    try:
        return pa.decompress(file.read(info.compress_size), info.file_size, "zstd", asbytes=True)
    except pa.ArrowException as error:
        raise ValueError(f"can't be unpacked: {error}") from error


def _samples_of_json(path: Path, remarks: list[str]) -> Iterator[FileRow]:
    log = json.loads(path.read_bytes())
    _add_status(log, remarks)
    for row in _numbered(iter(log.get("samples") or ())):
        yield FileRow(row.place, row.where, row.content, row.fault, is_inspect=True, task=_task(log))


def _task(header: Mapping[str, Any]) -> str:
    evaluation = header.get("eval")
    return str(evaluation.get("task") or "") if isinstance(evaluation, Mapping) else ""


def _add_status(header: Mapping[str, Any], remarks: list[str]) -> None:
    status = header.get("status")
    if status in (None, "success"):
        return
    error = header.get("error")
    why = f": {error.get('message')}" if isinstance(error, Mapping) else ""
    remarks.append(f"its evaluation's status is {status}{why}")


def _begins_as_log(path: Path) -> bool:
    """Returns whether a JSON file is a log of Inspect, by its beginning."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return b'"version"' in head and b'"eval"' in head


# Others


def _pickled_samples(path: Path) -> Iterator[Any]:
    """Yields the samples of slime's dump.

    Raises ValueError for a pickle with anything but numbers, texts and tensors, which could run code.
    """
    try:
        import torch

        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (ImportError, pickle.UnpicklingError, RuntimeError) as error:
        # The message names the refused class, among much advice.
        reasons = [*re.findall(r"GLOBAL (\S+)", str(error)), *str(error).splitlines()]
        raise ValueError(
            f"{path} is read with torch, and only numbers, texts and tensors are allowed: {reasons[0]}"
        ) from error
    yield from loaded["samples"]


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"{path} can't be read: {error}") from error
