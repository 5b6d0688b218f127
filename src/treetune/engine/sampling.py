"""Distributes requests over an engine's servers, and sends them to another server if one is lost.

Two threads run::

    the caller's thread (`VllmEngine.generate`)        the client's thread, with its event loop

    RequestScheduler.add(parts) ─────────────────────▶ _waiting: by priority, the newest first
                                                          │  as soon as a server has room (`_choose`)
                                                          ▼
                                                       _ask: a task for each part, which waits for the server
                                                          │  its samples, or the server's failure
    RequestScheduler.next() ◀── _results (a queue) ◀──────┘
      Answered  a part's samples: the caller may add requests that follow from them
      Lost      a server: its parts wait again, for another one; the caller has it restarted
      Deferred  its future is done: the thread that has set the future puts it here

`next` returns None after a second without an event, so that its caller can check its servers. Each part has
the deadline `timeout`; a server that misses it is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from treetune.engine.client import Address, Client, RequestPart
from treetune.engine.requests import Completion, Deferred
from treetune.exceptions import ServerFailure
from treetune.vocabulary import TokenIds

EVENT_TIMEOUT_S = 1.0

BUSIER_FACTOR, BUSIER_SAMPLES = 2, 16
"""A server that has a request's prefix in its cache is preferred while it has at most ``BUSIER_FACTOR * n +
BUSIER_SAMPLES`` samples in flight, where n is the number of samples in flight on the server with the fewest.
Beyond that, computing the prefix again costs less than waiting for the busier server."""


BLOCK_TOKENS = 16
"""The tokens of a block. Only whole blocks of a prefix count, as in vLLM's own cache on a GPU."""
MOST_BLOCKS = 1_000_000
"""The most blocks that are remembered, about 100 MB. Servers have smaller caches."""


@dataclass(frozen=True)
class Answered:
    """The samples of a part of a request, and the number of the server that drew them."""

    part: RequestPart
    completions: list[Completion]
    server: int


@dataclass(frozen=True)
class Lost:
    """A server that failed. Its unanswered parts go to the other servers, or wait until one is open."""

    server: int
    address: Address
    reason: str


SchedulerEvent = Answered | Lost | Deferred


@dataclass(eq=False)
class _OpenServer:
    """A server that takes requests, and the parts that were sent to it."""

    number: int
    address: Address
    tasks: dict[RequestPart, asyncio.Task[None]] = field(default_factory=dict)
    """The parts in flight, each with the task that waits for its answer."""
    samples: int = 0
    """The number of samples in flight."""


class RequestScheduler:
    """A context manager that sends parts of requests to servers. The caller numbers the servers.

    A part goes to the server that has its prefix in the cache, unless that server is much busier than the
    others. In all other cases the part goes to the server with the fewest samples in flight. Parts with a
    lower priority number are sent first. Of those with the same priority, the parts that were added last are
    sent first: they usually continue answers that have begun, so few answers are half done at the same time.

    Args:
        client: Sends the requests, in its own thread.
        version: The version of the weights that sample.
        most_parts: The most parts in flight on a server.
        most_samples: A server with this many samples in flight, or more, gets no further part.
        timeout: The seconds in which a server must answer a part.
        prefixes: The index of cached prefixes; None if servers don't cache them.
    """

    def __init__(
        self,
        client: Client,
        version: int,
        *,
        most_parts: int,
        most_samples: int,
        timeout: float,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._client, self._version, self._timeout = client, version, timeout
        # Limits for each server: of parts of requests, and of samples, that are in flight.
        self._most_parts, self._most_samples = most_parts, most_samples
        self.outstanding = 0
        """The number of parts and of `Deferred` that `next` hasn't returned yet. A `Deferred` stands for
        requests that wait for something, such as an environment's reply."""
        self.opened: set[int] = set()
        """The numbers of the servers that take requests."""
        # A SimpleQueue, so that the event loop never waits for the caller.
        self._results: queue.SimpleQueue[SchedulerEvent | BaseException] = queue.SimpleQueue()
        # The attributes below belong to the event loop.
        self._prefixes = prefixes
        self._waiting: dict[int, deque[RequestPart]] = {}  # by priority
        self._servers: dict[int, _OpenServer] = {}
        self._is_over = False

    def __enter__(self) -> RequestScheduler:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(RuntimeError):  # the client was closed meanwhile
            self._client.loop.call_soon_threadsafe(self._stop)

    def open(self, servers: Mapping[int, Address]) -> None:
        """Opens servers, by their numbers, so that parts are sent to them. They must not be open yet."""
        assert not servers.keys() & self.opened
        self.opened |= servers.keys()
        self._client.loop.call_soon_threadsafe(self._accept_servers, dict(servers))

    def lose(self, number: int, reason: str) -> None:
        """Gives up an open server whose requests will never be answered. As for a server that has failed,
        `next` returns a `Lost`, and its parts are sent again."""
        self._client.loop.call_soon_threadsafe(self._lose, number, reason)

    def add(self, parts: Sequence[RequestPart], deferred: Sequence[Deferred] = ()) -> None:
        """Sends the parts of requests as soon as a server is free.

        `next` returns each part's samples. It also returns each of `deferred` once it is ready. A `Deferred`
        stands for requests that wait for something, such as an environment's reply.
        """
        self.outstanding += len(parts) + len(deferred)
        if parts:
            self._client.loop.call_soon_threadsafe(self._queue_parts, list(parts))
        for request in deferred:
            request.ready.add_done_callback(lambda _, request=request: self._results.put(request))  # type: ignore[misc]

    def next(self, timeout: float = EVENT_TIMEOUT_S) -> SchedulerEvent | None:
        """Returns the next event; None if there is no event within `timeout` seconds.

        An event is the samples of a part of a request, a `Deferred` (requests that waited for something) that
        is ready, or a server that was lost and is no longer open. Raises EngineError if a server refused a
        part.
        """
        try:
            result = self._results.get(timeout=timeout)
        except queue.Empty:
            assert self._client.thread.is_alive(), "the client's thread has ended unexpectedly"
            return None
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, Lost):
            self.opened.discard(result.server)
        else:
            self.outstanding -= 1
        return result

    # In the event loop

    def _accept_servers(self, servers: Mapping[int, Address]) -> None:
        if not self._is_over:
            self._servers |= {number: _OpenServer(number, address) for number, address in servers.items()}
            self._send()

    def _queue_parts(self, parts: list[RequestPart]) -> None:
        """Puts parts before the waiting parts of the same priority, and sends what can be sent.

        New parts often continue an answer, and answers that have begun are finished first.
        """
        for part in reversed(parts):  # each is put before the others, so the last one comes first
            self._waiting.setdefault(part.request.priority, deque()).appendleft(part)
        self._send()

    def _send(self) -> None:
        """Sends waiting parts as long as a server is free."""
        while not self._is_over:
            priorities = [priority for priority, parts in self._waiting.items() if parts]
            if not priorities:
                return
            parts = self._waiting[min(priorities)]
            server = self._choose(parts[0])
            if server is None:
                return
            part = parts.popleft()
            server.samples += part.n
            server.tasks[part] = self._client.loop.create_task(self._ask(part, server))
            if self._prefixes is not None:
                # Before the server has computed the prompt, so that `_choose` can prefer the server for
                # the next parts with this prompt.
                self._prefixes.add(server.number, part.request.prompt_ids)

    def _choose(self, part: RequestPart) -> _OpenServer | None:
        """Returns the server for a part; None if all servers are busy."""
        free = [
            server
            for server in self._servers.values()
            if len(server.tasks) < self._most_parts and server.samples < self._most_samples
        ]
        if not free:
            return None
        idlest = min(free, key=lambda server: (server.samples, server.number))
        if self._prefixes is not None:
            # The server that has the beginning of the prompt in its cache is chosen if it isn't much busier.
            holder = self._prefixes.find(part.request.prompt_ids)
            most_samples_of_holder = BUSIER_FACTOR * idlest.samples + BUSIER_SAMPLES
            for server in free:
                if server.number == holder and server.samples <= most_samples_of_holder:
                    return server
        return idlest

    async def _ask(self, part: RequestPart, server: _OpenServer) -> None:
        """Sends a part to a server, and hands its samples, or the server's failure, to `next`."""
        try:
            completions = await self._client.sample(server.address, part, self._version, self._timeout)
        except ServerFailure as failure:
            # Another part of this server may have failed first, and the server may have been replaced since.
            if self._servers.get(server.number) is server:
                self._lose(server.number, str(failure))
            return
        except Exception as failure:  # `next` raises it in the caller's thread
            self._results.put(failure)
            self._stop()
            return
        del server.tasks[part]
        server.samples -= part.n
        if self._prefixes is not None:
            for completion in completions:
                all_ids = np.concatenate([part.request.prompt_ids, completion.token_ids])
                self._prefixes.add(server.number, all_ids)
        self._results.put(Answered(part, completions, server.number))
        self._send()

    def _lose(self, number: int, reason: str) -> None:
        """Removes a server, and sends its unanswered parts again. The same seeds give the same tokens."""
        server = self._servers.pop(number, None)
        if server is None:
            return
        if self._prefixes is not None:
            self._prefixes.forget(number)
        unfinished = list(server.tasks.items())
        server.tasks = {}
        for _, task in unfinished:
            if task is not asyncio.current_task():  # the task that noticed the failure calls this method
                task.cancel()
        self._results.put(Lost(number, server.address, reason))
        self._queue_parts([part for part, _ in unfinished])

    def _stop(self) -> None:
        """Cancels all requests, and sends no further ones."""
        self._is_over = True
        self._waiting.clear()
        for server in self._servers.values():
            for task in server.tasks.values():
                if task is not asyncio.current_task():  # a task that has failed calls this method
                    task.cancel()


class Prefixes:
    """An index of the servers that probably have a prefix in their cache of keys and values.

    A block is identified by a hash of its tokens and of all tokens before it. If there are more than
    `most_blocks` blocks, all of them are forgotten.
    """

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._holders: dict[int, int] = {}
        """The number of the server that was last added for a block, by the block's hash."""

    def add(self, holder: int, ids: TokenIds) -> None:
        """Remembers that the server with the number `holder` has computed all of `ids`."""
        if len(self._holders) >= self._most_blocks:  # bounds this index's memory; a server's cache is smaller
            self._holders.clear()
        for block_hash in _hash_blocks(ids):
            self._holders[block_hash] = holder

    def find(self, ids: TokenIds) -> int | None:
        """Returns the number of the server that has computed the longest prefix of `ids`; None if no server
        has computed any.

        If several servers have computed this prefix, returns the last of them. The index keeps only the last
        server for each block of tokens.
        """
        holder_of_longest = None
        for block_hash in _hash_blocks(ids):
            holder = self._holders.get(block_hash)
            if holder is None:
                break
            holder_of_longest = holder
        return holder_of_longest

    def forget(self, holder: int) -> None:
        """Forgets a server whose cache is gone."""
        self._holders = {
            block_hash: server for block_hash, server in self._holders.items() if server != holder
        }


def _hash_blocks(ids: TokenIds) -> Iterator[int]:
    """Yields a hash for each whole block of `ids`. The hash is made from that block and all blocks before
    it."""
    block_hash = 0
    data = ids.tobytes()
    size = BLOCK_TOKENS * ids.itemsize
    for end in range(size, len(data) + 1, size):
        block_hash = hash((block_hash, data[end - size : end]))
        yield block_hash
