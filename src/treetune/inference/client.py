"""Talks to a server: token ids in, token ids and their log-probs out, many requests at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from treetune.inference.base import Completion, EngineError, Later, Request
from treetune.inference.key import header
from treetune.inference.launch import MODEL_NAME
from treetune.vocabulary import logprob_array, token_array

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

POLL_S = 1.0

KEEP_ALIVE_S = 3.0
"""How long a connection that nobody uses is kept for the next request."""


class ServerFailure(Exception):
    """The server did not do what it was asked; another one may."""


@dataclass(frozen=True)
class Address:
    """Where a server answers, and to whom: those who know its key. `epoch` counts the starts: another epoch
    is another process."""

    url: str
    epoch: int
    key: str = field(repr=False)


@dataclass(frozen=True)
class RequestPart:
    """The samples ``[first, first + n)`` of the request number `index`."""

    index: int
    first: int
    n: int
    request: Request


def parts_of(index: int, request: Request, largest: int) -> list[RequestPart]:
    """The request in parts of at most `largest` samples, which the server can hold at a time.

    Sample i has the seed ``seed + i`` in whichever part it is.
    """
    return [
        RequestPart(index, first, min(largest, request.n - first), request)
        for first in range(0, request.n, largest)
    ]


def payload(part: RequestPart, version: int, end_ids: Sequence[int] = ()) -> dict[str, Any]:
    """The body that asks for a part. One prompt each: a server gives all prompts of one body the
    same seeds. Each of `end_ids` ends a sample, and stays in it.
    """
    sampling = part.request.sampling
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": part.request.prompt_ids.tolist(),
        "n": part.n,
        "seed": part.request.seed + part.first,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "priority": part.request.priority,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        # Cached prefixes of other weights can't be met under another salt.
        "cache_salt": f"version-{version}",
    }
    if end_ids or sampling.stop_ids:
        body["stop_token_ids"] = [*end_ids, *sampling.stop_ids]
    if sampling.stop:
        body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    return body


def completions_of(answer: Mapping[str, Any], n: int, version: int, seconds: float = 0.0) -> list[Completion]:
    """The `n` samples in an answer, in their order. Raises ServerFailure if anything is missing."""
    choices = sorted(answer.get("choices", ()), key=lambda choice: choice["index"])
    if len(choices) != n:
        raise ServerFailure(f"asked for {n} samples, got {len(choices)}")
    found = []
    for choice in choices:
        ids = choice.get("token_ids") or ()
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length") or not ids or len(ids) != len(logprobs) or None in logprobs:
            raise ServerFailure(
                f"a sample has {len(ids)} token ids, {len(logprobs)} log-probs, finish_reason {reason!r}"
            )
        found.append(Completion(token_array(ids), logprob_array(logprobs), reason, version, seconds))
    return found


class Client:
    """HTTP in a thread of its own, so that answers are taken while the caller grades.

    `end_ids` end every sample; without any, the server knows which do.
    """

    def __init__(self, end_ids: Sequence[int] = ()) -> None:
        self._end_ids = tuple(end_ids)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession | None = None

    def post(
        self,
        address: Address,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float,
        answers: Literal["JSON", "text"] = "JSON",
    ) -> dict[str, Any]:
        """One request; an answer that isn't a JSON object comes under ``answer``.

        Raises ServerFailure on anything but a good answer within `timeout` s."""
        return self._run(self._post(address, path, body, timeout, answers), timeout + 10.0)

    def sampling(self, address: Address, version: int, *, concurrency: int, timeout: float) -> Sampling:
        """Parts of requests are sampled there, at most `concurrency` in flight, `timeout` s each."""
        return Sampling(self, address, version, concurrency, timeout)

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(ServerFailure, RuntimeError):  # on the way out; the sockets end with us
            self._run(self._close_session(), 5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            raise ServerFailure(f"no answer in {timeout:.0f} s") from error
        finally:
            future.cancel()

    def _client_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            # Concurrency is bounded by who sends. Connections are kept for the next wave.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post(
        self,
        address: Address,
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float,
        answers: str = "JSON",
    ) -> dict[str, Any]:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._client_session().post(
                address.url + path, json=body, timeout=limit, headers=header(address.key)
            ) as response:
                text = await response.read()
                status = response.status
        except TimeoutError as error:
            raise ServerFailure(f"{path}: no answer in {timeout:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(f"{path}: {type(error).__name__}: {error}") from error
        shown = text[:500].decode(errors="replace")
        if 400 <= status < 500:
            # What this project asked was wrong: a restart would only meet it again.
            raise EngineError(f"the server refused {path} with HTTP {status}: {shown}")
        if status != 200:
            raise ServerFailure(f"{path}: HTTP {status}: {shown}")
        if not text:
            return {}
        if answers == "text":
            return {"answer": shown}
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise ServerFailure(f"{path}: not JSON: {shown}") from error
        return answer if isinstance(answer, dict) else {"answer": answer}


Came = tuple[RequestPart, list[Completion]] | Later


class Sampling:
    """Parts of requests on their way through a server. A context manager; iterate over it for the samples.

    More can be given while those before are sampled: they go before what still waits of their priority, so
    that little is begun and not ended.
    """

    def __init__(
        self, client: Client, address: Address, version: int, concurrency: int, timeout: float
    ) -> None:
        self._client, self._address, self._version = client, address, version
        self._concurrency, self._timeout = concurrency, timeout
        self._outstanding = 0
        # A SimpleQueue, so that the event loop never waits for the caller.
        self._results: queue.SimpleQueue[Came | BaseException] = queue.SimpleQueue()
        # From here on only the event loop's.
        self._waiting: dict[int, deque[RequestPart]] = {}  # by priority
        self._workers: set[asyncio.Task[None]] = set()
        self._working = 0
        self._over = False

    def __enter__(self) -> Sampling:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(RuntimeError):  # the client was closed meanwhile
            self._client._loop.call_soon_threadsafe(self._stop)

    def add(self, parts: Sequence[RequestPart], laters: Sequence[Later] = ()) -> None:
        """Has the parts sampled as soon as there is room, and waits for what comes later as well."""
        self._outstanding += len(parts) + len(laters)
        if parts:
            self._client._loop.call_soon_threadsafe(self._accept, list(parts))
        for later in laters:
            later.ready.add_done_callback(lambda _, later=later: self._results.put(later))  # type: ignore[misc]

    def __iter__(self) -> Iterator[Came]:
        """Parts and their samples as they come, and each `Later` that is ready, until all that were given are
        there.

        Raises ServerFailure at the first that fails, after those that had come before it.
        """
        while self._outstanding:
            try:
                result = self._results.get(timeout=POLL_S)
            except queue.Empty:
                assert self._client._thread.is_alive(), "the client's thread ended without a word"
                continue
            if isinstance(result, BaseException):
                raise result
            self._outstanding -= 1
            yield result

    def _accept(self, parts: list[RequestPart]) -> None:
        for part in reversed(parts):
            self._waiting.setdefault(part.request.priority, deque()).appendleft(part)
        while self._working < self._concurrency and not self._over and (first := self._next()) is not None:
            self._working += 1
            worker = self._client._loop.create_task(self._work(first))
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    def _next(self) -> RequestPart | None:
        first = min((priority for priority, parts in self._waiting.items() if parts), default=None)
        return None if first is None else self._waiting[first].popleft()

    async def _work(self, part: RequestPart) -> None:
        """One part after the other, as long as any waits."""
        try:
            while True:
                begun = time.monotonic()
                body = payload(part, self._version, self._client._end_ids)
                answer = await self._client._post(self._address, "/v1/completions", body, self._timeout)
                seconds = time.monotonic() - begun
                self._results.put((part, completions_of(answer, part.n, self._version, seconds)))
                if (following := self._next()) is None:
                    return
                part = following
        except Exception as failure:  # handed to the caller's thread, which raises it
            self._results.put(failure)
            self._stop()
        finally:
            # Not when the task is done, which is later: a part that came between would wait for ever.
            self._working -= 1

    def _stop(self) -> None:
        self._over = True
        self._waiting.clear()
        for worker in self._workers:
            worker.cancel()
