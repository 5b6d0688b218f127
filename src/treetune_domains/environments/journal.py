"""What environments said outlives a crash: it is written down as it comes, and not asked for again."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from treetune.store.checksums import row_of, sealed_line
from treetune_domains.environments.base import Turn
from treetune_domains.environments.worlds import Played

SUFFIX = ".turns"
"""Of the file beside a journal of requests."""


class TurnJournal:
    """Turns in a file of JSON lines, by the answer that they belong to and the actions before them.

    An answer that is sampled again comes to the same turns without its environment, also where that isn't
    asked the same twice: what hung stays a ``timeout``. What was ``unavailable`` is asked for again.
    `others` are journals to find turns in, and not to write to. Safe to use from several threads.
    """

    def __init__(self, path: Path, others: Sequence[Path] = ()) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._known: dict[str, Played] = {}
        for file in (*others, path):
            self._known |= _read(file)

    def known(self, answer: int, actions: Sequence[str]) -> Played | None:
        return self._known.get(_key(answer, actions))

    def add(self, answer: int, actions: Sequence[str], played: Played) -> None:
        """One turn, the last of these actions'."""
        (turn,) = played.turns
        if turn.outcome == "unavailable":
            return
        done, state = played.snapshot or (0, None)
        copied = None if state is None else [done, base64.b64encode(state).decode("ascii")]
        line = json.dumps([_key(answer, actions), dataclasses.astuple(turn), copied], separators=(",", ":"))
        with self._lock:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
                if self._file.tell():
                    self._file.write(b"\n")  # behind a line that a crash cut short
            self._file.write(sealed_line(line).encode())

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _key(answer: int, actions: Sequence[str]) -> str:
    text = json.dumps([answer, *actions])
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _read(path: Path) -> dict[str, Played]:
    """The turns in a file; none if there is no such file. A line that was cut short or damaged is none."""
    known = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            key, turn, copied = json.loads(row_of(line + b"\n"))
        except ValueError:
            continue
        snapshot = None if copied is None else (copied[0], base64.b64decode(copied[1]))
        known[key] = Played((Turn(*turn),), snapshot)
    return known
