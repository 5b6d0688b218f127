"""Computes digests of a model's files, by which a resumed run sees whether its start model has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from treetune.models.policy_files import resolve_policy

WHOLE_BYTES = 64 * 2**20
"""Files up to this size are read whole. Of a larger file, samples of this many bytes in total are read."""
SAMPLED_BLOCKS = 1024
SAMPLE_BYTES = WHOLE_BYTES // SAMPLED_BLOCKS

_FILES_LEFT_OUT = {"README.md", "LICENSE", ".gitattributes", "checksums.json"}
"""Files that say nothing about the weights."""


def model_digest(name_or_path: str, revision: str | None) -> dict[str, str]:
    """Returns the identity of a model: for a folder its path and a digest of its files; for a name on the hub
    the commit in the cache, if there is one.

    A model of hundreds of gigabytes is not read whole. Training changes nearly every weight, so samples from
    the whole file distinguish two checkpoints.

    Raises:
        ValueError: The model doesn't exist.
    """
    path = resolve_policy(name_or_path)
    if Path(path).is_dir():
        return {"name": name_or_path, "path": path, "digest": folder_digest(Path(path))}
    identity = {"name": name_or_path, "revision": revision or "main"}
    commit = _find_commit_in_cache(path, identity["revision"])
    if commit:
        identity["commit"] = commit
    return identity


def folder_digest(folder: Path) -> str:
    """Returns a digest of a model's files by name and content."""
    digest = hashlib.blake2b(digest_size=16)
    files = (file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    for file in sorted(files):
        if file.name in _FILES_LEFT_OUT:  # such as README.md
            continue
        digest_of_file = hashlib.blake2b(digest_size=16)
        for piece in _read_pieces(file):
            digest_of_file.update(piece)
        digest.update(f"{file.name}\0{digest_of_file.hexdigest()}\n".encode())
    return digest.hexdigest()


def _read_pieces(file: Path) -> Iterator[bytes]:
    """Yields the content of a file. Of a large file, yields only the size and samples: the beginning, the
    end, and pieces in between."""
    file_bytes = file.stat().st_size
    with file.open("rb") as content:
        if file_bytes <= WHOLE_BYTES:
            while piece := content.read(2**20):
                yield piece
            return
        yield str(file_bytes).encode()
        # The samples are at equal distances: the first one begins the file, and the last one ends it.
        for number in range(SAMPLED_BLOCKS):
            content.seek((file_bytes - SAMPLE_BYTES) * number // (SAMPLED_BLOCKS - 1))
            yield content.read(SAMPLE_BYTES)


def _find_commit_in_cache(name: str, revision: str) -> str | None:
    """Returns the commit of a branch or tag in the local cache of the hub; None if the cache doesn't have
    it."""
    from transformers.utils import cached_file
    from transformers.utils.hub import extract_commit_hash

    try:
        file = cached_file(
            name,
            "config.json",
            revision=revision,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        return None
    return extract_commit_hash(file, commit_hash=None)
