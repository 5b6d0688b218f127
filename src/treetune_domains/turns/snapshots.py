"""An environment's state on the segment behind which it stands, with what was earned on the way there."""

from __future__ import annotations

import json
from collections.abc import Sequence

from treetune.vocabulary import Segment

END_OF_HEAD = b"\n"


def packed(rewards: Sequence[float], snapshot: tuple[int, bytes]) -> bytes:
    """`snapshot` is the number of actions that led to the state, and the state itself."""
    done, state = snapshot
    return json.dumps([done, list(rewards)]).encode() + END_OF_HEAD + state


def unpacked(begun: Sequence[Segment]) -> tuple[list[float], tuple[int, bytes] | None]:
    """The rewards and the snapshot of where these segments end; none where they carry no copies."""
    snapshot = begun[-1].snapshot if begun else None
    if snapshot is None:
        return [], None
    head, _, state = snapshot.partition(END_OF_HEAD)
    done, rewards = json.loads(head)
    return rewards, (done, state)
