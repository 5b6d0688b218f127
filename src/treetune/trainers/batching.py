"""How a minibatch is cut over ranks and into micro-batches.

The cut is a pure function of lengths, computed alike on every rank, and never changes the update:
only how fast it is computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Layout = Literal["padded", "packed", "tree"]

Unit = tuple[int, ...]
"""Indices that belong together: of one sequence or the two of a pair, of rows that run at once, of a tree."""


@dataclass(frozen=True)
class Piece:
    """Rows that run together; a dummy (`real` false) only keeps the ranks in step."""

    indices: tuple[int, ...]
    real: bool = True


def cut(
    lengths: Sequence[int],
    units: Sequence[Unit],
    *,
    ranks: int,
    tokens: int,
    sequences: int | None,
    layout: Layout,
) -> list[list[Piece]]:
    """Micro-batches for each rank, as many on one as on another.

    `lengths` are of all rows, `units` those of this minibatch. Units go, longest first, to
    the rank with the fewest tokens so far; on a rank, neighbours in length share a micro-batch of
    at most `tokens` tokens (padding included) and at most `sequences` rows. A unit beyond the
    budget runs alone. Equal counts matter because with ZeRO 2 and 3 every backward pass is a
    collective.
    """
    widths = {unit: max(lengths[i] for i in unit) for unit in units}
    totals = {unit: sum(lengths[i] for i in unit) for unit in units}
    shares: list[list[Unit]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda u: (-widths[u], -totals[u], u)):
        taken, rank = heapq.heappop(load)
        shares[rank].append(unit)
        heapq.heappush(load, (taken + totals[unit], rank))
    pieces = [_pieces(widths, totals, share, tokens, sequences, layout) for share in shares]
    most = max(len(own) for own in pieces)
    shortest = min(units, key=lambda u: (totals[u], u))
    return [own + [Piece(shortest, real=False)] * (most - len(own)) for own in pieces]


def _pieces(
    widths: dict[Unit, int],
    totals: dict[Unit, int],
    share: Sequence[Unit],
    tokens: int,
    sequences: int | None,
    layout: Layout,
) -> list[Piece]:
    """`share` comes longest first, so a padded piece is as wide as its first unit."""
    pieces: list[Piece] = []
    current: list[int] = []
    width = total = 0
    for unit in share:
        count = len(current) + len(unit)
        cost = width * count if layout == "padded" else total + totals[unit]
        if current and (cost > tokens or (sequences is not None and count > sequences)):
            pieces.append(Piece(tuple(current)))
            current, total = [], 0
        if not current:
            width = widths[unit]
        current += unit
        total += totals[unit]
    if current:
        pieces.append(Piece(tuple(current)))
    return pieces
