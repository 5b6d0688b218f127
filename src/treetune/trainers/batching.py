"""How a minibatch is dealt out to ranks and to their micro-batches.

The plan is a pure function of lengths, computed alike on every rank, and never changes the update:
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
class PlannedBatch:
    """Indices of what runs at once. A dummy only keeps the ranks in step."""

    indices: tuple[int, ...]
    is_dummy: bool = False


def plan_micro_batches(
    lengths: Sequence[int],
    units: Sequence[Unit],
    *,
    ranks: int,
    max_tokens: int,
    max_rows: int | None,
    layout: Layout,
) -> list[list[PlannedBatch]]:
    """Micro-batches for each rank, as many on one as on another.

    `lengths` are of all rows, `units` those of this minibatch. Units go, longest first, to
    the rank with the fewest tokens so far; on a rank, neighbours in length share a micro-batch of
    at most `max_tokens` tokens (padding included) and at most `max_rows` rows. A unit beyond the
    budget runs alone. Equal counts matter because with ZeRO 2 and 3 every backward pass is a
    collective.
    """
    widths = {unit: max(lengths[i] for i in unit) for unit in units}
    totals = {unit: sum(lengths[i] for i in unit) for unit in units}
    units_by_rank: list[list[Unit]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda u: (-widths[u], -totals[u], u)):
        tokens, rank = heapq.heappop(load)
        units_by_rank[rank].append(unit)
        heapq.heappush(load, (tokens + totals[unit], rank))
    planned = [_of_rank(widths, totals, own, max_tokens, max_rows, layout) for own in units_by_rank]
    most = max(len(own) for own in planned)
    shortest = min(units, key=lambda u: (totals[u], u))
    return [own + [PlannedBatch(shortest, is_dummy=True)] * (most - len(own)) for own in planned]


def _of_rank(
    widths: dict[Unit, int],
    totals: dict[Unit, int],
    units: Sequence[Unit],
    max_tokens: int,
    max_rows: int | None,
    layout: Layout,
) -> list[PlannedBatch]:
    """`units` come longest first, so a padded micro-batch is as wide as its first unit."""
    planned: list[PlannedBatch] = []
    current: list[int] = []
    width = total = 0
    for unit in units:
        rows = len(current) + len(unit)
        tokens = width * rows if layout == "padded" else total + totals[unit]
        if current and (tokens > max_tokens or (max_rows is not None and rows > max_rows)):
            planned.append(PlannedBatch(tuple(current)))
            current, total = [], 0
        if not current:
            width = widths[unit]
        current += unit
        total += totals[unit]
    if current:
        planned.append(PlannedBatch(tuple(current)))
    return planned
