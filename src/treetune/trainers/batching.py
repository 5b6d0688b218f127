"""How a minibatch is cut over ranks and into micro-batches.

The cut is a pure function of lengths, computed alike on every rank, and never changes the update:
only how fast it is computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Layout = Literal["padded", "packed"]


@dataclass(frozen=True)
class Piece:
    """Sequences that run together; a dummy (`real` false) only keeps the ranks in step."""

    indices: tuple[int, ...]
    real: bool = True


def cut(
    lengths: Sequence[int],
    indices: Sequence[int],
    *,
    ranks: int,
    tokens: int,
    sequences: int | None,
    layout: Layout,
) -> list[list[Piece]]:
    """Micro-batches for each rank, as many on one as on another.

    `lengths` are of all sequences, `indices` those of this minibatch. Sequences go, longest first,
    to the rank with the fewest tokens so far; on a rank, neighbours in length share a micro-batch
    of at most `tokens` tokens (padding included) and at most `sequences` sequences. A sequence
    longer than the budget runs alone. Equal counts matter because with ZeRO 2 and 3 every backward
    pass is a collective.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        taken, rank = heapq.heappop(load)
        shares[rank].append(index)
        heapq.heappush(load, (taken + lengths[index], rank))
    pieces = [_pieces(lengths, share, tokens, sequences, layout) for share in shares]
    most = max(len(own) for own in pieces)
    shortest = min(indices, key=lambda i: (lengths[i], i))
    return [own + [Piece((shortest,), real=False)] * (most - len(own)) for own in pieces]


def _pieces(
    lengths: Sequence[int], share: Sequence[int], tokens: int, sequences: int | None, layout: Layout
) -> list[Piece]:
    """`share` comes longest first, so a padded piece is as wide as its first sequence."""
    pieces: list[Piece] = []
    current: list[int] = []
    total = 0
    for index in share:
        cost = (
            lengths[current[0]] * (len(current) + 1)
            if current and layout == "padded"
            else total + lengths[index]
        )
        if current and (cost > tokens or len(current) == sequences):
            pieces.append(Piece(tuple(current)))
            current, total = [], 0
        current.append(index)
        total += lengths[index]
    if current:
        pieces.append(Piece(tuple(current)))
    return pieces
