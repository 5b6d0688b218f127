"""How ranks hand each other answers and training rows: as columns, of which no number becomes an object."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.episode_generators.storage import (
    episodes_from_bytes,
    episodes_to_bytes,
    trajectories_from_bytes,
    trajectories_to_bytes,
)
from treetune.trainers.ranks import Ranks
from treetune.vocabulary import Episode, Trajectory


def trajectories_on_first(ranks: Ranks, name: str, own: Sequence[Trajectory]) -> list[Trajectory]:
    """All ranks' answers, rank after rank, on the first; none on the others. Collective."""
    if ranks.world_size == 1:
        return list(own)
    return [
        one
        for part in ranks.to_first(name, trajectories_to_bytes(own))
        for one in trajectories_from_bytes(part)
    ]


def episodes_everywhere(ranks: Ranks, name: str, own: Sequence[Episode]) -> list[Episode]:
    """All ranks' rows, rank after rank: minibatches are drawn from all of them. Collective."""
    if ranks.world_size == 1:
        return list(own)
    return [one for part in ranks.exchange(name, episodes_to_bytes(own)) for one in episodes_from_bytes(part)]
