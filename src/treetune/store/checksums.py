"""Writes and verifies checksums of a run's files, so that a damaged file is named and never read.

=================  ====================================================
JSON record        in its last key, ``checksum``
Arrow stream       in a trailer after its end
folder             in an additional file, ``checksums.json``
line of a journal  at its beginning (`journal`)
=================  ====================================================

Earlier versions wrote files without checksums, which are read as they are. A single flipped bit must not make
a file with a checksum look like one without, so records and streams also say in their content that they have
one (`FORMAT_KEY`, `SEALED_MARK`).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from treetune.exceptions import Damaged
from treetune.store.files import write_json

CHECKSUM_KEY = "checksum"
"""The last key of a JSON record. Its value is the checksum of all other keys and values."""

FORMAT_KEY = "format"
"""A key of every JSON record with a checksum. The records of earlier versions have neither."""

SEALED_MARK = b"treetune-sealed"
"""A word in the schema at the beginning of an Arrow stream. It announces a trailer at the stream's end: a
stream with this word and without a trailer was cut short."""

CHECKSUMS_FILE = "checksums.json"
"""The file with the digests of all other files below a folder."""

_TRAILER = b"\ntreetune-checksum "
"""The beginning of a trailer. The digest in hexadecimal follows, and is the end of the file."""
_DIGEST_BYTES = 16
_TRAILER_BYTES = len(_TRAILER) + 2 * _DIGEST_BYTES
_HASHED_AT_ONCE = 8
_CHUNK_BYTES = 2**22


# JSON records


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes JSON with the checksum of its content."""
    write_json(path, seal_record(record))


def seal_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with its format and its checksum."""
    # JSON changes types: a tuple becomes a list. The checksum is made from the types that a reader gets, so
    # that the reader computes the same checksum. Readers only check that there is a FORMAT_KEY, whatever its
    # number.
    plain = json.loads(json.dumps(record)) | {FORMAT_KEY: 2}
    return plain | {CHECKSUM_KEY: _checksum_of_record(plain)}


def read_record(path: Path, remedy: str) -> dict[str, Any]:
    """Returns the content of a file that `write_record`, or an earlier version without checksums, wrote.

    Raises:
        Damaged: The content is not as it was written; the message ends with the `remedy`.
        FileNotFoundError: There is no such file.
    """
    try:
        return unseal_record(path.read_bytes())
    except Damaged as error:
        raise Damaged(f"{path} is damaged ({error}): {remedy}") from error


def unseal_record(text: bytes | str) -> dict[str, Any]:
    """Returns the record from the JSON text of `seal_record(record)`. Raises Damaged if the text was
    changed."""
    if not text:
        raise Damaged("it is empty")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Damaged(str(error)) from error
    if not isinstance(value, dict):
        raise Damaged(f"it holds no JSON object but a {type(value).__name__}")
    checksum = value.pop(CHECKSUM_KEY, None)
    # Records of earlier versions have neither key.
    should_have_checksum = checksum is not None or FORMAT_KEY in value
    if should_have_checksum and checksum != _checksum_of_record(value):
        raise Damaged("its checksum doesn't match its content")
    value.pop(FORMAT_KEY, None)
    return value


def _checksum_of_record(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


# Streams with a trailer


class SealingFile:
    """A binary file that computes the digest of what is written to it. `seal` appends the digest."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash = file, _new_hash()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def seal(self) -> None:
        """Appends the trailer, which holds the digest of all that was written before it."""
        self._file.write(_TRAILER + self._hash.hexdigest().encode())

    def flush(self) -> None:
        self._file.flush()

    @property
    def closed(self) -> bool:
        return self._file.closed


def verify_stream(file: IO[bytes], name: str, remedy: str) -> None:
    """Compares a stream's content with its trailer, and seeks back to the beginning.

    Raises:
        Damaged: They differ, or the trailer is gone; the message ends with the `remedy`.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TRAILER_BYTES))
    last_bytes = file.read()
    file.seek(0)
    if _TRAILER not in last_bytes:
        # A stream of an earlier version never had a trailer. Any other stream announces it at its beginning.
        announces_trailer = SEALED_MARK in file.read(_CHUNK_BYTES)
        if announces_trailer:
            raise Damaged(f"{name} is cut short, or its checksum is damaged: {remedy}")
        file.seek(0)
        return  # an earlier version wrote it, without a checksum
    if not last_bytes.startswith(_TRAILER):  # a part of the digest is missing, so the trailer begins later
        raise Damaged(f"{name} is cut short: {remedy}")
    content_hash, remaining = _new_hash(), size - _TRAILER_BYTES
    while remaining > 0 and (chunk := file.read(min(remaining, _CHUNK_BYTES))):
        content_hash.update(chunk)
        remaining -= len(chunk)
    file.seek(0)
    written_digest = last_bytes[len(_TRAILER) :]
    if content_hash.hexdigest().encode() != written_digest:
        raise Damaged(f"{name} is damaged (its checksum doesn't match its content): {remedy}")


_verified_states: dict[Path, tuple[int, int, int]] = {}
"""The size, time and inode of each file when this process verified it."""


def verify_once(path: Path, remedy: str, digest: str | None = None) -> None:
    """Verifies a file, unless this process has done so and the file has not changed since.

    Args:
        digest: The digest that the file should have; None for a stream, whose trailer has the digest.

    Raises:
        Damaged: The file is not as it was written; the message ends with the `remedy`.
    """
    status = path.stat()
    state = (status.st_size, status.st_mtime_ns, status.st_ino)
    if _verified_states.get(path) == state:
        return
    if digest is None:
        with path.open("rb") as file:
            verify_stream(file, str(path), remedy)
    elif digest_of(path) != digest:
        raise Damaged(f"{path} is damaged (its checksum doesn't match its content): {remedy}")
    _verified_states[path] = state


def read_seal(path: Path) -> bytes | None:
    """Returns the trailer at the end of a stream. It has the digest of the content, so it differs if the
    content does. Returns None if there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TRAILER_BYTES))
            return file.read()
    except FileNotFoundError:
        return None


# Folders


def seal_folder(folder: Path) -> None:
    """Writes the digests of all files below the folder into ``checksums.json``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS_FILE)
    write_json(folder / CHECKSUMS_FILE, _digests_of_files(folder, files))


def find_damage(folder: Path) -> str | None:
    """Returns a message that names the first damaged or missing file of a sealed folder. Returns None if the
    folder is undamaged, or was not sealed."""
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        return None
    try:
        written_digests: dict[str, str] = dict(json.loads(path.read_text()))
    except (ValueError, TypeError):
        return f"{path} is damaged"
    for name in written_digests:
        if not (folder / name).is_file():
            return f"{folder / name} is gone"
    present_digests = _digests_of_files(folder, [folder / name for name in written_digests])
    for name in written_digests:
        if present_digests[name] != written_digests[name]:
            return f"{folder / name} is damaged"
    return None


def refuse_damaged(folder: Path, remedy: str) -> None:
    """Raises Damaged if a folder's files aren't as they were sealed."""
    damage = find_damage(folder)
    if damage is not None:
        raise Damaged(f"{damage} (its checksum doesn't match its content): {remedy}")


# Weights on their way into an engine


def digest_of_weights(path: Path) -> str:
    """Returns a digest of a file of weights. The hash is a very fast one, since weights are compared in every
    iteration."""
    import xxhash

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return xxhash.xxh3_128_hexdigest(content)


# Digests of files and of configurations


def _digests_of_files(folder: Path, files: list[Path]) -> dict[str, str]:
    """Returns the digests of files by their paths relative to the folder."""
    # hashlib releases the interpreter's lock while it hashes, so threads hash several files at a time.
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
        digests = threads.map(digest_of, files)
        return {str(path.relative_to(folder)): digest for path, digest in zip(files, digests, strict=True)}


def digest_of(path: Path) -> str:
    """Returns the digest of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _new_hash).hexdigest()


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def config_hash(config: Any) -> str:
    """Returns a hash of a configuration, 32 hexadecimal digits, which doesn't depend on the order of its
    keys.

    ``1.0`` counts as ``1``, since Jsonnet has only one kind of number.

    Raises:
        ValueError: A value is NaN or infinite, which JSON can't hold.
    """
    text = json.dumps(_canonical_form(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _canonical_form(value: Any) -> Any:
    """Returns a configuration in the form that is hashed, which is the same for equal configurations."""
    if isinstance(value, dict):
        return {str(key): _canonical_form(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical_form(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
