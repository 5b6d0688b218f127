"""Reads the rows of other programs' files.

These are JSON lines (also while they are written), Inspect's archives and JSON, slime's ``.pt``, TRL's
Parquet, and W&B's tables.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from treetune.view.store.readers import read_wandb_rows

ANSWER_FILE_ENDINGS = (".jsonl", ".eval", ".json", ".pt", ".parquet")

FIRST_ROWS = 20
"""The number of rows at a file's beginning that are searched for an answer."""
LONGEST_FIRST_LINE = 32_000_000
"""The most bytes that are read of each of the first lines of JSON lines."""
HEAD_BYTES = 1_000_000
"""The number of bytes at the beginning of a JSON file or a pickle that are searched for signs of answers."""
ROWS_AT_ONCE = 1024
"""The number of rows of a Parquet file in memory."""

ZSTANDARD_CODE, LENGTHS_OFFSET = 93, 26
"""Numbers of the zip format: the code of Zstandard compression, which Python reads only from 3.14 on, and the
byte of a member's header where the lengths of its name and its extra field are."""
LARGEST_SAMPLE_BYTES = 200_000_000
"""The size in bytes of the largest sample of an Inspect log that is unpacked."""

COLUMNS_OF_COMPLETIONS = ("prompt", "completion", "step")
"""The columns by which one of TRL's tables of completions is recognised. A Parquet file without them is a
data set."""

NOT_AN_OBJECT = "not a JSON object"

READING_ERRORS = (
    OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, NotImplementedError,
    OverflowError, zipfile.BadZipFile,
)  # fmt: skip
"""The errors that reading a damaged file, or a file of another kind, may raise."""


@dataclass(frozen=True)
class FileRow:
    """A row of a file.

    Example: `FileRow(place=1024, name="line 3", content={"prompt": "2+2=", "response": "4", "score": 1.0})`.
    """

    place: int
    """The byte where the row's line begins or, if the file doesn't have lines, the row's number from 0."""
    name: str
    """A name of the row for messages, such as "line 3"."""
    content: Any = None
    """The row as a Python object, usually a dictionary."""
    fault: str = ""
    """The reason why the row can't be read; empty if it could be."""
    is_inspect: bool = False
    """Whether the row is a sample of Inspect."""
    task: str = ""
    """The name of the evaluation's task, if the row is a sample of Inspect."""


def read_rows(path: Path, remarks: list[str]) -> Iterator[FileRow]:
    """Yields the rows of a file, and adds remarks on the whole file to `remarks`.

    Raises ValueError for a file that can't be read.
    """
    if path.suffix == ".jsonl":
        yield from _read_lines(path, remarks)
    elif path.suffix == ".eval":  # an archive of Inspect
        yield from _read_samples(path, remarks)
    elif path.suffix == ".pt":  # a dump of slime
        yield from _number_rows(_pickled_samples(path))
    elif path.suffix == ".parquet":  # a table of TRL
        yield from _number_rows(_parquet_rows(path))
    elif _begins_as_log(path):  # Inspect's log in JSON
        yield from _samples_of_json(path, remarks)
    else:  # a table of W&B
        yield from _number_rows(read_wandb_rows(path))


def first_rows(path: Path) -> Iterator[FileRow]:
    """Yields a few rows at the beginning of a file, without reading much more of it.

    They serve only to find out whether the file has answers, so their places and line numbers don't count.
    For a file of Inspect, one row without content stands for its samples.
    """
    if path.suffix == ".jsonl":
        yield from _first_lines(path)
    elif path.suffix == ".eval":
        if _is_archive_of_inspect(path):
            yield FileRow(0, "", is_inspect=True)
    elif path.suffix == ".pt":
        if _has_samples_of_slime(path):
            # This row stands for slime's samples, which aren't read here. It has the form of an answer.
            yield FileRow(0, "", {"prompt": "", "response": "", "reward": None})
    elif path.suffix == ".parquet":
        yield from _first_completions(path)
    elif _begins_as_log(path):
        yield FileRow(0, "", is_inspect=True)
    elif path.name.endswith(".table.json"):
        yield from _number_rows(read_wandb_rows(path)[:FIRST_ROWS])


def _first_lines(path: Path) -> Iterator[FileRow]:
    """Yields the rows of the first lines, without those that can't be read."""
    with path.open("rb") as file:
        for _ in range(FIRST_ROWS):
            text = file.readline(LONGEST_FIRST_LINE)
            if not text:
                return
            row = _parse_line(0, 0, text)  # the places and numbers of these lines are not used
            if row is not None and not row.fault:
                yield row


def _is_archive_of_inspect(path: Path) -> bool:
    """Returns whether a zip archive is a log of Inspect."""
    with zipfile.ZipFile(path) as archive:
        # A running evaluation writes `_journal/start.json` first, and may have no sample yet.
        return bool(_sample_names(archive)) or "_journal/start.json" in archive.namelist()


def _has_samples_of_slime(path: Path) -> bool:
    """Returns whether a file of PyTorch looks like a dump of slime's samples.

    Raises ValueError if the file doesn't have exactly one pickle.
    """
    # The file may be a large checkpoint, so only the beginning of its pickle is read, without unpickling it.
    with zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        with archive.open(name) as pickled:
            head = pickled.read(HEAD_BYTES)
    return all(word in head for word in (b"rollout_id", b"samples", b"response"))


def _first_completions(path: Path) -> Iterator[FileRow]:
    """Yields the first rows of one of TRL's tables of completions. For any other Parquet file, which is a
    data set, it yields nothing."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        if not all(name in table.schema_arrow.names for name in COLUMNS_OF_COMPLETIONS):
            return
        first_batch = next(table.iter_batches(FIRST_ROWS), None)
        if first_batch is not None:
            yield from _number_rows(first_batch.to_pylist())


def _number_rows(contents: Iterable[Any]) -> Iterator[FileRow]:
    """Yields a row for each content, whose place is its number. A content that isn't an object is a fault."""
    for place, content in enumerate(contents):
        is_object = isinstance(content, Mapping)
        yield FileRow(place, f"row {place + 1}", content, "" if is_object else NOT_AN_OBJECT)


# JSON lines


def json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields (byte where it begins, content) for each line of an evaluation's file that isn't blank."""
    with path.open("rb") as file:
        place = 0
        for text in file:
            if text.strip():
                yield place, json.loads(text)
            place += len(text)


def _read_lines(path: Path, remarks: list[str]) -> Iterator[FileRow]:
    """Yields the rows of JSON lines.

    A last line that has no end and can't be read may still be being written: it is left out, with a remark.
    """
    with path.open("rb") as file:
        place = 0
        for number, text in enumerate(file, 1):
            row = _parse_line(place, number, text)
            if row is not None and row.fault and not text.endswith(b"\n"):
                remarks.append("its last line is incomplete and is left out")
                return
            if row is not None:
                yield row
            place += len(text)


def _parse_line(place: int, number: int, text: bytes) -> FileRow | None:
    """Returns the row of a line, and None for a blank line.

    Args:
        place: The byte of the file at which the line begins.
        number: The number of the line, for messages.
        text: The line.
    """
    if not text.strip():
        return None
    name = f"line {number}"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return FileRow(place, name, fault="not valid JSON")
    return FileRow(place, name, content, "" if isinstance(content, Mapping) else NOT_AN_OBJECT)


def row_at(path: Path, place: int) -> FileRow:
    """Returns the row whose line begins at the byte `place`.

    Raises ValueError if no row begins there, because the file was changed after `place` was noted.
    """
    with path.open("rb") as file:
        file.seek(place)
        # The number of the line isn't known here, and 0 stands for it.
        row = _parse_line(place, 0, file.readline())
    if row is None or row.fault:
        raise ValueError(
            f"{path} has no answer at byte {place} any more, because it was rewritten: reload the page"
        )
    return row


# Inspect


def _read_samples(path: Path, remarks: list[str]) -> Iterator[FileRow]:
    """Yields the samples of one of Inspect's archives. A sample that can't be read is a row with a fault."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        header = _read_header(file, archive)
        task = _task_name(header)
        _add_status(header, remarks)
        for place, name in enumerate(_sample_names(archive)):
            try:
                content = json.loads(_read_member(file, archive, name))
                fault = "" if isinstance(content, Mapping) else NOT_AN_OBJECT
            except READING_ERRORS as error:
                content, fault = None, f"can't be read ({error})"
            yield FileRow(place, name, content, fault, is_inspect=True, task=task)


def _sample_names(archive: zipfile.ZipFile) -> list[str]:
    """Returns the names of the files of an archive's samples, with numbers in numeric order: 2 before 10.

    A sample's id is a part of the name, so an id with a slash makes a folder. If a sample was written twice,
    the archive has its name twice, and reading returns the content that was written last.
    """
    names = {name for name in archive.namelist() if re.fullmatch(r"samples/.+\.json", name, re.DOTALL)}

    def natural_order(name: str) -> tuple[list[tuple[int, int, str]], str]:
        """Returns a key for sorting, in which a text is smaller than a number."""
        key = []
        for part in re.split(r"(\d+)", name):
            if part.isdecimal():
                # Only the first 18 digits are read as a number, because an id can have thousands of digits.
                key.append((int(part[:18]), len(part), ""))
            else:
                key.append((-1, 0, part))
        return key, name

    return sorted(names, key=natural_order)


def _read_header(file: IO[bytes], archive: zipfile.ZipFile) -> Mapping[str, Any]:
    """Returns the header of an archive, which is empty if it has none.

    A finished evaluation has it in `header.json`, and a running one in `_journal/start.json`. A header
    counts only if it describes the evaluation, in `eval`.
    """
    for name in ("header.json", "_journal/start.json"):
        try:
            header = json.loads(_read_member(file, archive, name))
        except READING_ERRORS:
            continue
        if isinstance(header, Mapping) and header.get("eval"):
            return header
    return {}


def _read_member(file: IO[bytes], archive: zipfile.ZipFile, name: str) -> bytes:
    """Returns the content of a file in an archive. Raises ValueError if it is too large or can't be
    unpacked."""
    info = archive.getinfo(name)
    if info.file_size > LARGEST_SAMPLE_BYTES:
        raise ValueError(f"larger than {LARGEST_SAMPLE_BYTES:,} bytes")
    if info.compress_type != ZSTANDARD_CODE:
        return archive.read(name)
    # Python before 3.14 can't unpack Zstandard, so the compressed bytes are read from the file itself. They
    # follow the member's header, which ends with the name and an extra field, and which has the lengths of
    # both.
    import pyarrow as pa

    file.seek(info.header_offset + LENGTHS_OFFSET)
    file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)  # skips the name and the extra field
    try:
        return pa.decompress(file.read(info.compress_size), info.file_size, "zstd", asbytes=True)
    except pa.ArrowException as error:
        raise ValueError(f"can't be unpacked: {error}") from error


def _samples_of_json(path: Path, remarks: list[str]) -> Iterator[FileRow]:
    """Yields the samples of one of Inspect's logs in JSON."""
    log = json.loads(path.read_bytes())
    _add_status(log, remarks)
    for row in _number_rows(log.get("samples") or ()):
        yield replace(row, is_inspect=True, task=_task_name(log))


def _task_name(header: Mapping[str, Any]) -> str:
    """Returns the name of the evaluation's task; empty if the log's header has none."""
    evaluation = header.get("eval")
    return str(evaluation.get("task") or "") if isinstance(evaluation, Mapping) else ""


def _add_status(header: Mapping[str, Any], remarks: list[str]) -> None:
    """Adds a remark if the evaluation has not succeeded (yet)."""
    status = header.get("status")
    if status in (None, "success"):
        return
    error = header.get("error")
    why = f": {error.get('message')}" if isinstance(error, Mapping) else ""
    remarks.append(f"its evaluation's status is {status}{why}")


def _begins_as_log(path: Path) -> bool:
    """Returns whether the beginning of a JSON file is that of a log of Inspect."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return b'"version"' in head and b'"eval"' in head


# Others


def _pickled_samples(path: Path) -> Iterator[Any]:
    """Yields the samples of one of slime's dumps.

    Raises ValueError if the pickle has anything other than numbers, texts and tensors, because unpickling
    other objects can run code.
    """
    try:
        import torch

        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (ImportError, pickle.UnpicklingError, RuntimeError) as error:
        # torch's message names the refused class in the midst of long advice. Only the name is kept.
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
