"""Finds answers that may hold a text: three neighbouring bytes each set one of 4096 bits of their answer, of
32,768 where answers are long.

Kept bit by bit and not answer by answer, so that a search reads one slice for each three bytes that it looks
for. Its hits are a little too many and never too few: who asks looks into the texts. Letters of ASCII are
alike in both sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.view.text import writable

if TYPE_CHECKING:
    import pyarrow as pa

BITS, BITS_OF_LONG, LONG = 4096, 32_768, 8000
"""Bits of an answer; of one in a file whose first answers have more bytes than `LONG`: half of so few bits
would be set by any long text."""
BLOCK = 65_536 * BITS
"""Bits that lie together."""
AT_ONCE_BYTES = 2**23
"""Bytes of text that are hashed at a time."""

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
        self._bits: np.ndarray = np.zeros((0, AT_ONCE), np.bool_)
        self._rows = 0
        self._packed: list[np.ndarray] = []

    def add(self, texts: pa.Array) -> None:
        """Adds a column of strings; null has no bits."""
        import pyarrow as pa
        import pyarrow.compute as pc

        done, mean = 0, texts.nbytes // max(1, len(texts))
        if not len(self._bits):
            self._bits = np.zeros((BITS_OF_LONG if mean > LONG else BITS, AT_ONCE), np.bool_)
        while done < len(texts):
            taken = min(len(texts) - done, AT_ONCE - self._rows, 1 + AT_ONCE_BYTES // max(1, mean))
            # The bytes of all texts behind each other, in small letters, and how many each has.
            whole: Any = pc.fill_null(pc.cast(texts.slice(done, taken), pa.large_string()), "")
            offsets = np.frombuffer(whole.buffers()[1], np.int64)[whole.offset : whole.offset + taken + 1]
            buffer = whole.buffers()[2]
            data = np.frombuffer(buffer, np.uint8) if buffer else np.empty(0, np.uint8)
            hashed = _hashes(_LOWER[data[offsets[0] : offsets[-1]]], len(self._bits))
            rows: np.ndarray = np.repeat(
                np.arange(self._rows, self._rows + taken, dtype=np.uint32), np.diff(offsets)
            )
            # Three bytes across the border of two texts set a bit too many, which does no harm.
            self._bits[hashed, rows[: len(hashed)]] = True
            self._rows += taken
            done += taken
            if self._rows == AT_ONCE:
                self._pack()

    def close(self) -> None:
        self._pack()
        self._flush()
        self._file.close()

    def _pack(self) -> None:
        if self._rows:
            self._packed.append(np.packbits(self._bits[:, : self._rows], axis=1))
            self._bits[:] = False
            self._rows = 0
        if len(self._packed) * AT_ONCE * len(self._bits) == BLOCK:
            self._flush()

    def _flush(self) -> None:
        if self._packed:
            self._file.write(np.concatenate(self._packed, axis=1).tobytes())
            self._packed.clear()


def may_hold(path: Path, rows: int, text: str) -> np.ndarray:
    """Returns a mask over the `rows` answers of a file of signatures: False where the text can't be."""
    # A slice of a block has whole bytes, and all blocks but the last have whole slices.
    bits_each = BITS if path.stat().st_size <= BITS * -(-rows // 8) else BITS_OF_LONG
    block, words = BLOCK // bits_each, np.frombuffer(writable(text).encode(), np.uint8)
    needed = np.unique(_hashes(_LOWER[words], bits_each))
    mask: np.ndarray = np.ones(rows, np.bool_)
    with path.open("rb") as file:
        for start in range(0, rows, block):
            width = -(-min(block, rows - start) // 8)
            bits: np.ndarray = np.full(width, 255, np.uint8)
            for bit in needed.tolist():
                file.seek(bits_each * (start // 8) + bit * width)
                bits &= np.frombuffer(file.read(width), np.uint8)
            mask[start : start + block] = np.unpackbits(bits)[: min(block, rows - start)]
    return mask


def lowered(text: str) -> str:
    """Writes a text as a search compares it: ASCII letters small, half characters U+FFFD, all others as they
    are."""
    return bytes(_LOWER[np.frombuffer(writable(text).encode(), np.uint8)]).decode()


def _hashes(data: np.ndarray, bits: int) -> np.ndarray:
    """Returns a bit's number, below `bits`, for every three neighbouring bytes."""
    wide: np.ndarray = data.astype(np.uint32)
    mixed = wide[:-2] * np.uint32(0x9E3779B1)
    mixed += wide[1:-1] * np.uint32(0x85EBCA6B)
    mixed += wide[2:] * np.uint32(0xC2B2AE35)
    return (mixed ^ (mixed >> np.uint32(15))) & np.uint32(bits - 1)
