"""What environments said outlives a crash: it is written down as it comes, and not asked for again."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from treetune.store.journal import Journal
from treetune_domains.environments.base import Turn
from treetune_domains.environments.worlds import Played

SUFFIX = ".turns"
"""Of the file beside a journal of requests."""


class TurnJournal:
    """A journal of turns, by the answer that they belong to and the actions before them.

    An answer that is sampled again comes to the same turns without its environment, also where that isn't
    asked the same twice: what hung stays a ``timeout``. What was ``unavailable`` is asked for again.
    `others` are journals to find turns in, and not to write to. Safe to use from several threads.
    """

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        self._journal = Journal(path, others)

    def known(self, answer: int, actions: Sequence[str]) -> Played | None:
        row = self._journal.get(_key(answer, actions))
        if row is None:
            return None
        _, turn, copied = row
        return Played((Turn(*turn),), copied and (copied[0], base64.b64decode(copied[1])))

    def add(self, answer: int, actions: Sequence[str], played: Played) -> None:
        """Keeps one turn, the last of these actions'."""
        (turn,) = played.turns
        if turn.outcome == "unavailable":
            return
        done, state = played.snapshot or (0, None)
        copied = None if state is None else [done, base64.b64encode(state).decode("ascii")]
        self._journal.add([_key(answer, actions), dataclasses.astuple(turn), copied])

    def close(self) -> None:
        self._journal.close()


def _key(answer: int, actions: Sequence[str]) -> str:
    text = json.dumps([answer, *actions])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
