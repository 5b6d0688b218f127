"""Keeps rows of JSON in files that only grow and that outlive a killed process, each row with its checksum.

A line::

    {"crc32":"9ae0daaf","row":["train/17#3",{"token_ids":[20,31]}]}

Several threads may use a `Journal`, and other processes may read its file meanwhile::

    threads of the process that writes                     other processes
    ────────────────────────────────────────────────       ──────────────────────────────────────────
    _lock: one call at a time, the others wait
      add     line ─► _unwritten                           read_rows: needs no lock, and ends before a
      flush   _unwritten ─► the end of the file              line that is just being written
      get     the first call reads all files;              Journal(exclusive=True): ValueError at once
              flush, then one line of a file                 while another exclusive one has the file

A call holds the lock while it uses the disk, without a deadline. No thread of the journal writes the rows
that wait: they are written by the next call that flushes. If writing fails, that call raises OSError, and the
rows that it didn't write are lost. If the process is killed, rows that wait are lost, and the kernel frees
the file for another exclusive journal. The next journal that appends cuts off an incomplete line. Without
`exclusive`, the callers must ensure that only one process appends.
"""

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
from treetune.store.files import sync_to_disk

FLUSH_ROWS = 256
"""The most rows that wait to be written."""

_BLOCK_BYTES = 2**16
_LINE_HEAD, _LINE_END = b'{"crc32":"', b"}\n"
"""The beginning and the end of a line."""

log = logging.getLogger(__name__)


class Journal(AbstractContextManager["Journal"]):
    """A file of JSON rows that only grows, with an index of the rows by their keys.

    A row is an object with the entry ``key``, or a list that begins with its key. If several rows have the
    same key, the last one counts. Memory holds only the positions of rows. Safe to use from several threads,
    and after `close`.

    A killed process may leave an incomplete last line, which is cut off before the next row is appended. A
    damaged line counts as not written. Lines of earlier versions have no checksum and are accepted.

    Args:
        path: The file, made with the first row.
        other_paths: Further files in which rows are looked up.
        exclusive: Makes the file at once. A second process that opens it gets a ValueError.
        flush_s: The shortest time between two writes by `add`, in seconds, unless `FLUSH_ROWS` rows wait.
            Rows that are added sooner wait for a later call, however late it comes; a killed process loses
            them. 0 writes every row at once.
        without_checksums: Leaves out checksums, so that other programs can read the file as JSON lines.
    """

    def __init__(
        self,
        path: Path,
        other_paths: Sequence[Path] = (),
        *,
        exclusive: bool = False,
        flush_s: float = 0.0,
        without_checksums: bool = False,
    ) -> None:
        self.path, self._other_paths = path, tuple(other_paths)
        self._exclusive, self._flush_s, self._without_checksums = exclusive, flush_s, without_checksums
        self._lock = threading.RLock()
        self._file: FileIO | None = None
        self._end = 0
        """The size of the file, with the lines that wait to be written."""
        self._unwritten: list[bytes] = []
        self._flushed_at = time.monotonic()
        self._index: dict[str, tuple[Path, int, int]] | None = None
        """The file, offset and length of the last line of each key; None until a row is looked up."""
        if exclusive:
            self._open()  # locks the file now, and not with the first row

    @override
    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        """Yields all keys, in the order of their first rows."""
        with self._lock:
            return iter(list(self._find_positions()))

    def get(self, key: str) -> Any:
        """Returns the row with this key, or None."""
        with self._lock:
            position = self._find_positions().get(key)
            if position is None:
                return None
            self.flush()  # the row itself may still wait to be written
            path, start, length = position
            with path.open("rb") as file:
                file.seek(start)
                return json.loads(unseal_line(file.read(length)))

    def add(self, *rows: Any) -> None:
        """Appends rows. Raises OSError, with the file's name, if they can't be written."""
        with self._lock:
            if self._file is None:
                self._open()
            for row in rows:
                row_text = json.dumps(row, separators=(",", ":"))
                line_text = f"{row_text}\n" if self._without_checksums else sealed_line(row_text)
                line = line_text.encode()
                # An index that was made already is kept up to date.
                if self._index is not None and (key := _key_of_row(row)) is not None:
                    self._index[key] = self.path, self._end, len(line)
                self._end += len(line)
                self._unwritten.append(line)
            is_due = self._flush_s == 0 or time.monotonic() - self._flushed_at > self._flush_s
            if is_due or len(self._unwritten) >= FLUSH_ROWS:
                self.flush()

    def flush(self) -> None:
        """Writes the rows that wait."""
        with self._lock:
            remaining = memoryview(b"".join(self._unwritten))
            self._unwritten = []
            self._flushed_at = time.monotonic()
            if self._file is None:  # no rows wait while the file is closed
                return
            try:
                while remaining:
                    n_written = self._file.write(remaining)
                    assert n_written is not None, "only a non-blocking file returns None"
                    remaining = remaining[n_written:]
            except OSError as error:
                # The next row opens the file anew, and cuts off what was written of a line.
                self._close_file()
                self._index = None  # it has the positions of rows that are not in the file
                raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self, *, durable: bool = False) -> None:
        """Writes the rows that wait, and closes the file. With `durable`, its content outlives a power cut
        too."""
        with self._lock:
            try:
                self.flush()
                if durable and self.path.is_file():  # even if this process has added no row
                    sync_to_disk(self.path)
            finally:
                self._close_file()

    def _open(self) -> None:
        """Opens the file to append to it, and cuts off an incomplete last line. Raises ValueError if another
        process has an exclusive journal open."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b", buffering=0)
        try:
            if self._exclusive:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = _end_of_last_line(file)
            file_size = file.seek(0, os.SEEK_END)
            if self._end < file_size:  # the last line was cut short
                file.truncate(self._end)
        except BlockingIOError as error:
            file.close()
            raise ValueError(
                f"another process is writing into {self.path.parent}: wait for it, or choose another output"
            ) from error
        self._file = file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _find_positions(self) -> dict[str, tuple[Path, int, int]]:
        """Returns the index (see `_index`). The first call reads all files to make it."""
        if self._index is None:
            self.flush()  # so that the file has all rows
            self._index = {}
            for path in (*self._other_paths, self.path):
                for start, length, row in _read_rows(path, damaged=None):
                    if (key := _key_of_row(row)) is not None:
                        self._index[key] = path, start, length
        return self._index


def read_journal(path: Path, damaged: list[int] | None = None) -> Iterator[Any]:
    """Yields the rows of all complete, undamaged lines of a journal; none if there is no such file.

    Args:
        damaged: A list to which the numbers of damaged lines are added, counted from 1. None: they are
            logged.
    """
    for _, _, row in _read_rows(path, damaged):
        yield row


def sealed_line(row: str) -> str:
    """Returns the line of a journal for a row of JSON."""
    return f'{{"crc32":"{zlib.crc32(row.encode()):08x}","row":{row}}}\n'


def unseal_line(line: bytes) -> bytes:
    """Returns the row of JSON in a line. Raises Damaged if it isn't what was written."""
    if not line.startswith(_LINE_HEAD):
        # A line of an earlier version is the row itself. Its beginning differs from `_LINE_HEAD` in several
        # bytes. If only one byte differs, that byte is damaged, and the line has a checksum.
        wrong_bytes = sum(a != b for a, b in zip(line, _LINE_HEAD, strict=False))
        if wrong_bytes == 1:
            raise Damaged("its head isn't what was written")
        return line
    # `_LINE_HEAD`, the eight digits of the checksum and the key "row" come before the row.
    row_start = len(_LINE_HEAD) + len('00000000","row":')
    row = line[row_start : -len(_LINE_END)]
    if line != sealed_line(row.decode(errors="replace")).encode():
        raise Damaged("its checksum doesn't match its content")
    return row


def _read_rows(path: Path, damaged: list[int] | None) -> Iterator[tuple[int, int, Any]]:
    """Yields the offset, the length and the row of each complete, undamaged line.

    Adds the numbers of damaged lines to `damaged`. If it is None, logs them instead.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    start = 0
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # cut short, or just being written
            try:
                row = json.loads(unseal_line(line))
            except ValueError:
                if line == b"\n":
                    pass  # earlier versions wrote an empty line after a line that was cut short
                elif damaged is None:
                    log.warning("line %d of %s is damaged and counts as not written", number, path)
                else:
                    damaged.append(number)
            else:
                yield start, len(line), row
            start += len(line)


def _key_of_row(row: Any) -> str | None:
    """Returns the key of a row; None if it has none."""
    key = None
    if isinstance(row, dict):
        key = row.get("key")
    elif isinstance(row, list) and row:
        key = row[0]
    return key if isinstance(key, str) else None


def _end_of_last_line(file: FileIO) -> int:
    """Returns the offset after the last newline, which it looks for from the end, block by block."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
