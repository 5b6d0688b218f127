"""How ranks hand each other answers and training rows: as columns, of which no number becomes an object."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path

from treetune.rollouts.storage import (
    StoredEpisodes,
    episodes_from_bytes,
    episodes_to_bytes,
    trajectories_from_bytes,
    trajectories_to_bytes,
)
from treetune.store.checksums import seal_of
from treetune.trainers.ranks import Ranks
from treetune.vocabulary import Episode, Trajectory

SEEN_S = 0.2
"""How often is looked for what another machine has written."""


def trajectories_on_first(ranks: Ranks, name: str, own: Sequence[Trajectory]) -> list[Trajectory]:
    """All ranks' answers, rank after rank, on the first; none on the others. Collective."""
    if ranks.world_size == 1:
        return list(own)
    return [
        one
        for part in ranks.to_first(name, trajectories_to_bytes(own))
        for one in trajectories_from_bytes(part)
    ]


def episodes_on_first(ranks: Ranks, name: str, own: Sequence[Episode]) -> list[Episode]:
    """All ranks' rows, rank after rank, on the first; none on the others. Collective."""
    if ranks.world_size == 1:
        return list(own)
    return [one for part in ranks.to_first(name, episodes_to_bytes(own)) for one in episodes_from_bytes(part)]


def episodes_of_first(ranks: Ranks, name: str, own: Sequence[Episode]) -> list[Episode]:
    """The first rank's rows, on every rank. Collective."""
    if ranks.world_size == 1:
        return list(own)
    return episodes_from_bytes(ranks.from_first(name, episodes_to_bytes(own) if ranks.is_first else b""))


def stored_for_all(ranks: Ranks, path: Path) -> StoredEpisodes:
    """What the first rank has at `path`, as soon as this rank's machine shows it: a file system that machines
    share may be late. Raises RuntimeError where it doesn't in time. Collective."""
    seal = ranks.from_first("episodes are stored", seal_of(path) if ranks.is_first else None)
    deadline = time.monotonic() + ranks.deadline_s
    while seal_of(path) != seal:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{platform.node()} doesn't see {path} as the first rank has written it, after"
                f" {ranks.deadline_s:.0f} s: it must be a file of one file system that all machines have"
            )
        time.sleep(SEEN_S)
    return StoredEpisodes(path)


def episodes_everywhere(ranks: Ranks, name: str, own: Sequence[Episode]) -> list[Episode]:
    """All ranks' rows, rank after rank. Collective."""
    if ranks.world_size == 1:
        return list(own)
    return [one for part in ranks.exchange(name, episodes_to_bytes(own)) for one in episodes_from_bytes(part)]
