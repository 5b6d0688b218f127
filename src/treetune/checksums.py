"""What a run reads again is what it wrote: files carry a checksum, and one that doesn't match is named.

A JSON record has it as its last key, an Arrow stream behind its end, a line of a journal in front, a folder
in a file of its own. What earlier versions wrote has none, and is read as it is.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from treetune.files import write_json

KEY = "checksum"
"""Of a JSON record, its last key."""

SUMS = "checksums.json"
"""In a folder: the digest of every other file below it."""

_TRAILER = b"\ntreetune-checksum "
_DIGEST_BYTES = 16
_TRAILER_BYTES = len(_TRAILER) + 2 * _DIGEST_BYTES
_HASHED_AT_ONCE = 8
_CHUNK_BYTES = 2**22


class Damaged(ValueError):
    """A file that isn't what was written."""


# JSON records


def write_record(path: Path, value: Mapping[str, Any]) -> None:
    """JSON with the checksum of its content."""
    plain = json.loads(json.dumps(value))
    write_json(path, plain | {KEY: _of_record(plain)})


def read_record(path: Path, remedy: str) -> dict[str, Any]:
    """What `write_record` wrote, or JSON of before. `remedy` says what to do about one that is damaged.
    Raises Damaged, and FileNotFoundError for none."""
    data = path.read_bytes()
    try:
        value = json.loads(data)
        if not isinstance(value, dict):
            raise ValueError(f"it holds no JSON object but a {type(value).__name__}")
    except ValueError as error:
        what = str(error) if data else "it is empty"
        raise Damaged(f"{path} is damaged ({what}): {remedy}") from error
    written = value.pop(KEY, None)
    if written is not None and written != _of_record(value):
        raise Damaged(f"{path} is damaged (its checksum doesn't match its content): {remedy}")
    return value


def _of_record(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


# Lines of journals


def sealed_line(row: str) -> str:
    """A line of a journal around a row of JSON."""
    return f'{{"crc32":"{zlib.crc32(row.encode()):08x}","row":{row}}}\n'


def row_of(line: bytes) -> bytes:
    """The row of JSON in a line. Raises Damaged where it isn't what was written."""
    head, end = b'{"crc32":"', b"}\n"
    if not line.startswith(head):
        return line
    row = line[len(head) + len('00000000","row":') : -len(end)]
    if line != sealed_line(row.decode(errors="replace")).encode():
        raise Damaged("its checksum doesn't match its content")
    return row


# Streams with a trailer


class SealingFile:
    """A binary file that knows the digest of what was written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash = file, _hash()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def seal(self) -> None:
        self._file.write(_TRAILER + self._hash.hexdigest().encode())

    def flush(self) -> None:
        self._file.flush()

    @property
    def closed(self) -> bool:
        return self._file.closed


def verify_stream(file: IO[bytes], name: str, remedy: str) -> None:
    """Holds what stands before the trailer against it, and goes back to the beginning. Raises Damaged."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _TRAILER_BYTES))
    trailer = file.read()
    file.seek(0)
    if _TRAILER not in trailer:
        return
    if not trailer.startswith(_TRAILER):
        raise Damaged(f"{name} is cut short: {remedy}")
    found, left = _hash(), size - _TRAILER_BYTES
    while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
        found.update(chunk)
        left -= len(chunk)
    file.seek(0)
    if found.hexdigest().encode() != trailer[len(_TRAILER) :]:
        raise Damaged(f"{name} is damaged (its checksum doesn't match its content): {remedy}")


def seal_of(path: Path) -> bytes | None:
    """The trailer of a sealed stream, or the end of one without, by which it is told from others; None where
    there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TRAILER_BYTES))
            return file.read()
    except FileNotFoundError:
        return None


# Folders


def seal_folder(folder: Path) -> None:
    """Writes the digests of all files below it."""
    write_json(folder / SUMS, _digests(folder, _files(folder)))


def damage_of(folder: Path) -> str | None:
    """What in a folder isn't as it was sealed; None where nothing is, or nobody sealed it."""
    path = folder / SUMS
    if not path.is_file():
        return None
    try:
        written: dict[str, str] = dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        return f"{path} is damaged"
    gone = [name for name in written if not (folder / name).is_file()]
    if gone:
        return f"{folder / gone[0]} is gone"
    found = _digests(folder, [folder / name for name in written])
    return next((f"{folder / name} is damaged" for name in written if found[name] != written[name]), None)


def refuse_damaged(folder: Path, remedy: str) -> None:
    """Raises Damaged where a folder's files aren't as they were sealed."""
    damage = damage_of(folder)
    if damage is not None:
        raise Damaged(f"{damage} (its checksum doesn't match its content): {remedy}")


# Weights on their way into an engine


def digest_of_weights(path: Path) -> str:
    """Of a file that is read at once: as fast as memory, for whoever compares it in every iteration."""
    import xxhash

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return xxhash.xxh3_128_hexdigest(content)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / SUMS)


def _digests(folder: Path, files: list[Path]) -> dict[str, str]:
    # hashlib lets go of the interpreter: several files are read side by side.
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
        digests = threads.map(_digest, files)
        return {str(path.relative_to(folder)): digest for path, digest in zip(files, digests, strict=True)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _hash).hexdigest()


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)
