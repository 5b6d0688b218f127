"""Append-only files of JSON rows that outlive a killed process, each row with its checksum."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.exceptions import Damaged
from treetune.store.files import sync

FLUSH_ROWS = 256
"""Rows that are held back at most, where rows are held back."""

_BLOCK_BYTES = 2**16
_HEAD, _END = b'{"crc32":"', b"}\n"

log = logging.getLogger(__name__)


class Journal(AbstractContextManager["Journal"]):
    """Rows of JSON in a file that only grows, found again by their keys.

    A row is an object with the entry ``key`` or a list that begins with its key; of rows with one key the
    last counts. Only their positions are kept in memory. Rows of the files `others` are found as well, and
    those files are not written to. A row that was added outlives a killed process; with `flush_s` it may be
    held back for that many seconds. A last line that was cut short is cut off before anything is appended, a
    damaged line counts as not written, and a line without a checksum is one of an earlier version.

    The file is made with the first row, or at once if the journal is `exclusive`: then a second process is
    refused with a ValueError. A `plain` journal has no checksums, so that other programs read it as JSON
    lines. Safe to use from several threads, and after `close`.
    """

    def __init__(
        self,
        path: Path,
        others: Sequence[Path] = (),
        *,
        exclusive: bool = False,
        flush_s: float = 0.0,
        plain: bool = False,
    ) -> None:
        self.path, self._others = path, tuple(others)
        self._exclusive, self._flush_s, self._plain = exclusive, flush_s, plain
        self._lock = threading.RLock()
        self._file: FileIO | None = None
        self._end = 0
        self._held: list[bytes] = []
        self._flushed = time.monotonic()
        self._index: dict[str, tuple[Path, int, int]] | None = None
        if exclusive:
            self._open()

    @override
    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        """Yields all keys, in the order of their first rows."""
        with self._lock:
            return iter(list(self._positions()))

    def get(self, key: str) -> Any:
        """The row with this key, or None."""
        with self._lock:
            position = self._positions().get(key)
            if position is None:
                return None
            self.flush()
            path, start, length = position
            with path.open("rb") as file:
                file.seek(start)
                return json.loads(row_of(file.read(length)))

    def add(self, *rows: Any) -> None:
        """Appends rows. Raises OSError with the file's name."""
        with self._lock:
            if self._file is None:
                self._open()
            for row in rows:
                text = json.dumps(row, separators=(",", ":"))
                line = (f"{text}\n" if self._plain else sealed_line(text)).encode()
                if self._index is not None and (key := _key(row)) is not None:
                    self._index[key] = self.path, self._end, len(line)
                self._end += len(line)
                self._held.append(line)
            late = time.monotonic() - self._flushed > self._flush_s
            if not self._flush_s or late or len(self._held) >= FLUSH_ROWS:
                self.flush()

    def flush(self) -> None:
        """Writes the rows that are held back."""
        with self._lock:
            left = memoryview(b"".join(self._held))
            self._held = []
            self._flushed = time.monotonic()
            try:
                while left and self._file is not None:
                    left = left[self._file.write(left) or 0 :]
            except OSError as error:
                self._forget_file()
                raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self, *, durable: bool = False) -> None:
        """Closes the file. With `durable`, what is in it outlives a power cut too."""
        with self._lock:
            try:
                self.flush()
                if durable and self.path.is_file():  # also rows of an earlier process that was killed
                    sync(self.path)
            finally:
                self._forget_file()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b", buffering=0)
        try:
            if self._exclusive:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = _whole_bytes(file)
            if self._end < file.seek(0, os.SEEK_END):
                file.truncate(self._end)
        except BlockingIOError as error:
            file.close()
            raise ValueError(
                f"another process is at work in {self.path.parent}: wait for it, or name another output"
            ) from error
        self._file = file

    def _forget_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _positions(self) -> dict[str, tuple[Path, int, int]]:
        if self._index is None:
            self.flush()
            self._index = {}
            for path in (*self._others, self.path):
                for start, length, row in _rows(path, None):
                    if (key := _key(row)) is not None:
                        self._index[key] = path, start, length
        return self._index


def read_rows(path: Path, damaged: list[int] | None = None) -> Iterator[Any]:
    """Yields the whole rows of a journal; none if there is no such file. A last line that was cut short is
    passed over. The numbers of damaged lines (from 1) go to `damaged`, or are logged."""
    for _, _, row in _rows(path, damaged):
        yield row


def sealed_line(row: str) -> str:
    """Returns the line of a journal for a row of JSON."""
    return f'{{"crc32":"{zlib.crc32(row.encode()):08x}","row":{row}}}\n'


def row_of(line: bytes) -> bytes:
    """Returns the row of JSON in a line. Raises Damaged if it isn't what was written."""
    if not line.startswith(_HEAD):
        # Lines of earlier versions have no head. One wrong byte in a head is damage.
        if sum(a != b for a, b in zip(line, _HEAD, strict=False)) == 1:
            raise Damaged("its head isn't what was written")
        return line
    row = line[len(_HEAD) + len('00000000","row":') : -len(_END)]
    if line != sealed_line(row.decode(errors="replace")).encode():
        raise Damaged("its checksum doesn't match its content")
    return row


def _rows(path: Path, damaged: list[int] | None) -> Iterator[tuple[int, int, Any]]:
    """Yields the offset and length of each whole line, and its row."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    start = 0
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # it was cut short, or is being written
            try:
                row = json.loads(row_of(line))
            except ValueError:
                if line == b"\n":
                    pass  # earlier versions put one behind a line that was cut short
                elif damaged is None:
                    log.warning("line %d of %s is damaged and counts as not written", number, path)
                else:
                    damaged.append(number)
            else:
                yield start, len(line), row
            start += len(line)


def _key(row: Any) -> str | None:
    key = row.get("key") if isinstance(row, dict) else row[0] if isinstance(row, list) and row else None
    return key if isinstance(key, str) else None


def _whole_bytes(file: FileIO) -> int:
    """Returns the number of bytes up to the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
