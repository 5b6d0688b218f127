"""Which answers may hold a text: three neighbouring bytes each set one of 4096 bits of their answer.

Kept bit by bit and not answer by answer, so that a search reads one slice for each three bytes that it looks
for. What it finds is a little too much and never too little: who asks looks into the texts. Letters of ASCII
are alike in both sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune_view.exports.evaluations import writable

if TYPE_CHECKING:
    import pyarrow as pa

BITS = 4096
BLOCK = 65_536
"""Answers whose bits lie together: half a MiB for each 1024 of them."""

AT_ONCE = 1024
"""Answers whose bits are bytes at a time."""

SHORTEST = 3
"""Bytes of a text that can be searched for so."""

_LOWER: np.ndarray = np.arange(256, dtype=np.uint8)
_LOWER[ord("A") : ord("Z") + 1] += 32


class SignatureWriter:
    """Writes the bits of texts, batch after batch; `close` at the end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._bits: np.ndarray = np.zeros((BITS, AT_ONCE), np.bool_)
        self._rows = 0
        self._packed: list[np.ndarray] = []

    def add(self, texts: pa.Array) -> None:
        """`texts` is a column of strings; null has no bits."""
        done = 0
        while done < len(texts):
            taken = min(len(texts) - done, AT_ONCE - self._rows)
            self._set(texts.slice(done, taken))
            done += taken
            if self._rows == AT_ONCE:
                self._pack()

    def close(self) -> None:
        self._pack()
        self._flush()
        self._file.close()

    def _set(self, texts: pa.Array) -> None:
        data, lengths = _bytes_of(texts)
        hashed = _hashes(data)
        rows: np.ndarray = np.repeat(
            np.arange(self._rows, self._rows + len(lengths), dtype=np.uint32), lengths
        )
        # Three bytes across the border of two texts set a bit too many, which does no harm.
        self._bits[hashed, rows[: len(hashed)]] = True
        self._rows += len(lengths)

    def _pack(self) -> None:
        if self._rows:
            self._packed.append(np.packbits(self._bits[:, : self._rows], axis=1))
            self._bits[:] = False
            self._rows = 0
        if len(self._packed) * AT_ONCE == BLOCK:
            self._flush()

    def _flush(self) -> None:
        if self._packed:
            self._file.write(np.concatenate(self._packed, axis=1).tobytes())
            self._packed.clear()


def may_hold(path: Path, rows: int, text: str) -> np.ndarray:
    """A mask over the `rows` answers of a file of signatures: False where the text can't be."""
    wanted = np.unique(_hashes(_LOWER[np.frombuffer(writable(text).encode(), np.uint8)]))
    found: np.ndarray = np.ones(rows, np.bool_)
    with path.open("rb") as file:
        for start in range(0, rows, BLOCK):
            width = -(-min(BLOCK, rows - start) // 8)
            bits: np.ndarray = np.full(width, 255, np.uint8)
            for bit in wanted.tolist():
                file.seek(BITS * (start // 8) + bit * width)
                bits &= np.frombuffer(file.read(width), np.uint8)
            found[start : start + BLOCK] = np.unpackbits(bits)[: min(BLOCK, rows - start)]
    return found


def lowered(text: str) -> str:
    """As a search compares texts: ASCII letters small, half characters U+FFFD, all others as they are."""
    return bytes(_LOWER[np.frombuffer(writable(text).encode(), np.uint8)]).decode()


def _bytes_of(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of all texts behind each other, small, and how many each has."""
    import pyarrow as pa
    import pyarrow.compute as pc

    whole: Any = pc.fill_null(pc.cast(texts, pa.large_string()), "")
    offsets = np.frombuffer(whole.buffers()[1], np.int64)[whole.offset : whole.offset + len(whole) + 1]
    buffer = whole.buffers()[2]
    data = np.frombuffer(buffer, np.uint8)[offsets[0] : offsets[-1]] if buffer else np.empty(0, np.uint8)
    return _LOWER[data], np.diff(offsets)


def _hashes(data: np.ndarray) -> np.ndarray:
    """Of every three neighbouring bytes."""
    wide: np.ndarray = data.astype(np.uint32)
    mixed = wide[:-2] * np.uint32(0x9E3779B1)
    mixed += wide[1:-1] * np.uint32(0x85EBCA6B)
    mixed += wide[2:] * np.uint32(0xC2B2AE35)
    return (mixed ^ (mixed >> np.uint32(15))) & np.uint32(BITS - 1)
