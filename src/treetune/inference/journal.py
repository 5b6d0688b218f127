"""Answers outlive a crash: what was sampled is written down as it comes, and not sampled again."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any

from treetune.inference.around import EngineAround
from treetune.inference.base import (
    ANSWERS,
    Completion,
    Engine,
    Later,
    OnResult,
    Request,
)
from treetune.store.checksums import row_of, sealed_line
from treetune.vocabulary import Column

log = logging.getLogger(__name__)

Hear = Callable[[Request, Sequence[Completion]], None]

FLUSH_S = 0.2
"""A killed process loses at most what it was given in this time."""
FLUSH_LINES = 256


class JournaledEngine(EngineAround):
    """An engine whose finished requests are kept in a file of JSON lines, found there the next time.

    A request is known by its content and by the policy version that samples it, so one journal can
    serve several calls and a restarted run. `others` are journals to find requests in as well, and
    not to write to. A request that differs from an earlier one in asking for fewer samples is given the first
    of those: no sample depends on how many there are. Continuations that are asked for among answers are kept
    in the file `continuations`, where there is one. `hear` is told of every request and its samples, before
    whoever asked. Everything but `generate` goes straight through.

    `sampled` counts the tokens that were not in a journal, by the priority of their requests.
    """

    def __init__(
        self,
        engine: Engine,
        path: Path,
        others: Sequence[Path] = (),
        continuations: Path | None = None,
        hear: Hear | None = None,
    ) -> None:
        super().__init__(engine)
        self.path, self.others = path, tuple(others)
        self.continuations, self._hear = continuations, hear
        self.sampled: Counter[int] = Counter()
        self._known: dict[str, list[Completion]] | None = None
        self._widest: dict[str, tuple[int, str]] = {}

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        if self._known is None:
            self._known = {}
            for other in self.others:
                self._known |= read_journal(other, repair=False)
            for path in filter(None, (self.continuations, self.path)):
                self._known |= read_journal(path)
        known = self._known
        asked: list[Request] = []
        keys: list[str] = []  # of all that is asked
        sampled: list[tuple[str, int]] = []  # of those that the engine below is asked for, and priorities
        places: dict[str, list[int]] = {}

        def numbered(further: Sequence[Request | Later]) -> list[tuple[int, Request] | Later]:
            found: list[tuple[int, Request] | Later] = []
            for one in further:
                if isinstance(one, Later):
                    found.append(one)
                else:
                    found.append((len(keys), one))
                    asked.append(one)
                    keys.append(self._key(one))
            return found

        def followers(index: int) -> list[tuple[int, Request] | Later]:
            """What follows from a request that has its answer."""
            if self._hear is not None:
                self._hear(asked[index], known[keys[index]])
            further = on_result(index, known[keys[index]]) if on_result is not None else None
            return numbered(further or ())

        def later(one: Later) -> Later:
            return Later(one.ready, lambda: unknown(numbered(one.requests())))

        def unknown(requests: Sequence[tuple[int, Request] | Later]) -> list[Request | Later]:
            """What has to be sampled of these requests, and of what follows from those that needn't be."""
            waiting, wanted = deque(requests), list[Request | Later]()
            while waiting:
                following = waiting.popleft()
                if isinstance(following, Later):
                    wanted.append(later(following))
                    continue
                index, request = following
                key = keys[index]
                if key not in known and (among := self._among(request)) in known:
                    known[key] = known[among][: request.n]
                if key in known:
                    waiting.extend(followers(index))
                elif key in places:
                    places[key].append(index)
                else:
                    places[key] = [index]
                    sampled.append((key, request.priority))
                    wanted.append(request)
            return wanted

        with ExitStack() as stack:
            writer = stack.enter_context(_Writer(self.path))
            aside = stack.enter_context(_Writer(self.continuations)) if self.continuations else writer

            def keep(position: int, completions: list[Completion]) -> list[Request | Later]:
                key, priority = sampled[position]
                known[key] = completions
                self.sampled[priority] += sum(len(one.token_ids) for one in completions)
                (writer if priority == ANSWERS else aside).add(journal_line(key, completions))
                return unknown([follower for index in places.pop(key) for follower in followers(index)])

            if missing := unknown(numbered(requests)):
                self.engine.generate(missing, keep)
        return [known[key] for key in keys]

    def _key(self, request: Request) -> str:
        """The request's, which is remembered where none like it has asked for more samples."""
        key, alike = request_key(request, self.version), self._alike(request)
        if self._widest.get(alike, (0, ""))[0] < request.n:
            self._widest[alike] = request.n, key
        return key

    def _among(self, request: Request) -> str:
        """The key of the request like this one that asked for the most samples."""
        return self._widest[self._alike(request)][1]

    def _alike(self, request: Request) -> str:
        return request_key(request, self.version, n=0)


def request_key(request: Request, version: int, *, n: int | None = None) -> str:
    """What makes two requests have the same answer: this one's, or, with `n`, that of one like it which asks
    for so many samples."""
    samples = request.n if n is None else n
    # Of the fields as they are: `dataclasses.astuple` copies deeply, which takes longer than all else here.
    sampling = list(vars(request.sampling).values())
    asked = (request.prompt_ids.tolist(), request.seed, samples, sampling)
    unread = [] if request.reads_logprobs else ["without log-probs"]
    text = json.dumps([asked, version, *unread], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def journal_line(key: str, completions: Sequence[Completion]) -> str:
    """One finished request: of each sample the bytes of its ids (int32) and log-probs (float32, or float64
    where they are twice as long; null where nobody reads them), little-endian in base64, then the rest as
    JSON has it."""
    rows = [
        (
            _text(c.token_ids),
            None if c.logprobs is None else _text(c.logprobs),
            c.finish_reason,
            c.policy_version,
            c.seconds,
        )
        for c in completions
    ]
    return sealed_line(json.dumps([key, rows], separators=(",", ":")))


def read_journal(path: Path, *, repair: bool = True) -> dict[str, list[Completion]]:
    """The finished requests in a journal, by key; empty if there is no such file.

    A last line that a crash cut short is cut off the file with `repair`, so that the next one starts
    clean; a line that is damaged counts as not written, and what it held is sampled again to the same bits.
    """
    known = {}
    whole = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    key, rows = json.loads(row_of(line))
                    known[key] = [completion_of(*row) for row in rows]
                except (ValueError, TypeError):
                    log.warning("line %d of %s is damaged: what it held is sampled again", number, path)
    except FileNotFoundError:
        return {}
    if repair and whole < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(whole)
    return known


def _text(column: Column) -> str:
    kind = column.dtype.newbyteorder("<")
    return base64.b64encode(column.astype(kind, copy=False).tobytes()).decode("ascii")


def completion_of(token_ids: Any, logprobs: Any, *rest: Any) -> Completion:
    """From a row of a journal. Lists of numbers are those of one from before they were written as bytes."""
    import numpy as np

    if isinstance(token_ids, str):
        ids = base64.b64decode(token_ids)
        token_ids = np.frombuffer(ids, "<i4")
        if logprobs is not None:
            numbers = base64.b64decode(logprobs)
            logprobs = np.frombuffer(numbers, "<f8" if len(numbers) == 2 * len(ids) else "<f4")
    return Completion(token_ids, logprobs, *rest)


class _Writer:
    """Appends lines, a batch at a time. Where there is none, no file is made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._lines: list[str] = []
        self._flushed = time.monotonic()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._flush()
        finally:
            if self._file is not None:
                self._file.close()

    def add(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= FLUSH_LINES or time.monotonic() - self._flushed > FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        left = memoryview("".join(self._lines).encode())
        self._lines = []
        try:
            if left and self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            while left and self._file is not None:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._flushed = time.monotonic()
