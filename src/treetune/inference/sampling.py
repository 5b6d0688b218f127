"""Requests on their way through an engine's servers: who gets which, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from treetune.inference.base import Completion, Later
from treetune.inference.client import (
    Address,
    Client,
    RequestPart,
    ServerFailure,
    completions_of,
    payload,
)
from treetune.inference.prefixes import Prefixes

POLL_S = 1.0

BUSIER, BUSIER_SAMPLES = 2, 16
"""A server that has a request's prefix is preferred as long as it has in flight at most so many times the
samples of the idlest one, and so many more: computing a prompt again costs less than waiting in a line."""


@dataclass(frozen=True)
class Answered:
    """A part's samples, and which server they are from."""

    part: RequestPart
    completions: list[Completion]
    server: int


@dataclass(frozen=True)
class Lost:
    """The server did not do what it was asked. What it had not answered goes to the others, or waits."""

    server: int
    address: Address
    reason: str


@dataclass(frozen=True)
class Limit:
    """Of what a server is given at a time: so many parts, and none more while it has so many samples."""

    parts: int
    samples: int


Came = Answered | Lost | Later


@dataclass(eq=False)
class _Place:
    """A server that takes requests, and what it has of ours."""

    number: int
    address: Address
    tasks: dict[RequestPart, asyncio.Task[None]] = field(default_factory=dict)
    samples: int = 0


class Sampling:
    """Parts of requests on their way through servers that are numbered by the caller. A context manager.

    A part goes to the server that has its prefix, where that one isn't much busier than the others, and
    otherwise to the one with the fewest samples in flight; each has as much as the `limit` allows, and each
    part `timeout` s. More can be given while those before are sampled: they go before what still waits of
    their priority, so that little is begun and not ended. `prefixes` is None where no server caches any.
    """

    def __init__(
        self, client: Client, version: int, limit: Limit, timeout: float, prefixes: Prefixes | None = None
    ) -> None:
        self._client, self._version = client, version
        self._limit, self._timeout = limit, timeout
        self._outstanding = 0
        self._open: set[int] = set()
        # A SimpleQueue, so that the event loop never waits for the caller.
        self._results: queue.SimpleQueue[Came | BaseException] = queue.SimpleQueue()
        # From here on only the event loop's.
        self._prefixes = prefixes
        self._waiting: dict[int, deque[RequestPart]] = {}  # by priority
        self._places: dict[int, _Place] = {}
        self._over = False

    def __enter__(self) -> Sampling:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(RuntimeError):  # the client was closed meanwhile
            self._client.call_soon(self._stop)

    @property
    def outstanding(self) -> bool:
        """Whether anything that was given is still to come."""
        return self._outstanding > 0

    def is_open(self, number: int) -> bool:
        """Whether that server takes requests."""
        return number in self._open

    def open(self, servers: Mapping[int, Address]) -> None:
        """These, by their numbers, which weren't open, take requests from here on."""
        assert not servers.keys() & self._open
        self._open |= servers.keys()
        self._client.call_soon(self._accept_servers, dict(servers))

    def lose(self, number: int, reason: str) -> None:
        """Gives up a server that takes requests and doesn't answer any more, as if it had said so itself."""
        self._client.call_soon(self._lose_number, number, reason)

    def add(self, parts: Sequence[RequestPart], laters: Sequence[Later] = ()) -> None:
        """Has the parts sampled as soon as there is room, and waits for what comes later as well."""
        self._outstanding += len(parts) + len(laters)
        if parts:
            self._client.call_soon(self._accept, list(parts))
        for later in laters:
            later.ready.add_done_callback(lambda _, later=later: self._results.put(later))  # type: ignore[misc]

    def next(self, timeout: float = POLL_S) -> Came | None:
        """What comes next: a part's samples, a `Later` that is ready, a server that was lost and is open no
        longer; None where nothing came in time. Raises EngineError where a server refused a part."""
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty:
            assert self._client.is_alive, "the client's thread ended without a word"
            return None
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, Lost):
            self._open.discard(result.server)
        else:
            self._outstanding -= 1
        return result

    # In the event loop

    def _accept_servers(self, servers: Mapping[int, Address]) -> None:
        if not self._over:
            self._places |= {number: _Place(number, address) for number, address in servers.items()}
            self._send()

    def _accept(self, parts: list[RequestPart]) -> None:
        for part in reversed(parts):
            self._waiting.setdefault(part.request.priority, deque()).appendleft(part)
        self._send()

    def _send(self) -> None:
        """As much of what waits as there is room for."""
        while not self._over:
            waiting = min((priority for priority, parts in self._waiting.items() if parts), default=None)
            if waiting is None or (place := self._choose(self._waiting[waiting][0])) is None:
                return
            part = self._waiting[waiting].popleft()
            place.samples += part.n
            place.tasks[part] = self._client.create_task(self._ask(part, place))
            if self._prefixes is not None:
                self._prefixes.given(place.number, part.request.prompt_ids)

    def _choose(self, part: RequestPart) -> _Place | None:
        limit = self._limit
        free = [p for p in self._places.values() if len(p.tasks) < limit.parts and p.samples < limit.samples]
        if not free:
            return None
        idlest = min(free, key=lambda place: (place.samples, place.number))
        if self._prefixes is not None:
            holder = self._prefixes.holder(part.request.prompt_ids)
            for place in free:
                if place.number == holder and place.samples <= BUSIER * idlest.samples + BUSIER_SAMPLES:
                    return place
        return idlest

    async def _ask(self, part: RequestPart, place: _Place) -> None:
        try:
            begun = time.monotonic()
            body = payload(part, self._version, self._client.end_ids)
            answer = await self._client.ask(place.address, "/v1/completions", body, self._timeout)
            seconds = time.monotonic() - begun
            completions = completions_of(answer, part, self._version, seconds)
        except ServerFailure as failure:
            self._lose(place, str(failure))
            return
        except Exception as failure:  # handed to the caller's thread, which raises it
            self._results.put(failure)
            self._stop()
            return
        del place.tasks[part]
        place.samples -= part.n
        if self._prefixes is not None:
            for completion in completions:
                whole = np.concatenate([part.request.prompt_ids, completion.token_ids])
                self._prefixes.given(place.number, whole)
        self._results.put(Answered(part, completions, place.number))
        self._send()

    def _lose_number(self, number: int, reason: str) -> None:
        if (place := self._places.get(number)) is not None:
            self._lose(place, reason)

    def _lose(self, place: _Place, reason: str) -> None:
        """What the server has not answered is sent again: the same seeds give the same tokens."""
        if self._places.get(place.number) is not place:
            return
        del self._places[place.number]
        if self._prefixes is not None:
            self._prefixes.forget(place.number)
        unfinished = list(place.tasks.items())
        place.tasks = {}
        for _, task in unfinished:
            if task is not asyncio.current_task():
                task.cancel()
        self._results.put(Lost(place.number, place.address, reason))
        self._accept([part for part, _ in unfinished])

    def _stop(self) -> None:
        self._over = True
        self._waiting.clear()
        for place in self._places.values():
            for task in place.tasks.values():
                if task is not asyncio.current_task():
                    task.cancel()
