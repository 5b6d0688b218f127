"""The client of a server: token ids in, token ids and their log-probs out, many requests at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from treetune.engine.base import Completion, Request
from treetune.engine.key import header
from treetune.exceptions import EngineError, ServerFailure
from treetune.vocabulary import logprob_array, token_array

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

MODEL_NAME = "policy"
"""The model's name in a server."""

SAMPLES = "/treetune/samples"
"""A server's route that samples (`treetune.engine.whole_answers`)."""

KEEP_ALIVE_S = 3.0
"""Seconds that a connection is kept for the next request."""


@dataclass(frozen=True)
class Address:
    """A server's URL and the key that it asks for. `epoch` counts the starts: another epoch is another
    process. `weights` is the name of the weights that are meant, if the server is to refuse others."""

    url: str
    epoch: int
    key: str = field(repr=False)
    weights: str = ""


@dataclass(frozen=True, eq=False)
class RequestPart:
    """The samples ``[first, first + n)`` of the request number `index`."""

    index: int
    first: int
    n: int
    request: Request


def parts_of(index: int, request: Request, largest: int) -> list[RequestPart]:
    """Splits a request into parts of at most `largest` samples, which the server can hold at a time.

    Sample i has the seed ``seed + i`` in whichever part it is.
    """
    return [
        RequestPart(index, first, min(largest, request.n - first), request)
        for first in range(0, request.n, largest)
    ]


def payload(
    part: RequestPart,
    version: int,
    end_ids: Sequence[int] = (),
    special_ids: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the body that asks `SAMPLES` for a part: ids of a prompt, and vLLM's own sampling parameters.
    Sample i has the seed ``seed + i``. Each of `end_ids` ends a sample, and stays in it; so does a stop
    string that is one of the special tokens of `special_ids`.

    The answer has ``samples``, each with ``token_ids``, their ``logprobs`` if they were asked for, and its
    ``finish_reason``.
    """
    sampling = part.request.sampling.with_special_stops(special_ids)
    return {
        "prompt": part.request.prompt_ids.tolist(),
        "sampling": {
            "n": part.n,
            "seed": part.request.seed + part.first,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "logprobs": 0 if part.request.reads_logprobs else None,
            "stop_token_ids": [*end_ids, *sampling.stop_ids],
            "stop": list(sampling.stop),
        },
        "priority": part.request.priority,
        # Cached prefixes of other weights can't be met under another salt.
        "cache_salt": f"version-{version}",
    }


def completions_of(
    answer: Mapping[str, Any], part: RequestPart, version: int, seconds: float = 0.0
) -> list[Completion]:
    """Returns a part's samples in their order. Raises ServerFailure if anything is missing."""
    samples, read = answer.get("samples", ()), part.request.reads_logprobs
    if len(samples) != part.n:
        raise ServerFailure(f"asked for {part.n} samples, got {len(samples)}")
    completions = []
    for sample in samples:
        ids, logprobs, reason = sample["token_ids"], sample["logprobs"] or (), sample["finish_reason"]
        if reason not in ("stop", "length") or not ids or (read and len(ids) != len(logprobs)):
            raise ServerFailure(
                f"a sample has {len(ids)} token ids, {len(logprobs)} log-probs, finish_reason {reason!r}"
            )
        completions.append(
            Completion(token_array(ids), logprob_array(logprobs) if read else None, reason, version, seconds)
        )
    return completions


class Client:
    """HTTP in a thread of its own, so that answers are received while the caller grades.

    `end_ids` end every sample; without any, the server's model says which tokens do. `special_ids` are the
    tokens that text doesn't show, by their texts.
    """

    def __init__(
        self, end_ids: Sequence[int] = (), special_ids: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self.end_ids, self.special_ids = tuple(end_ids), dict(special_ids)
        self.loop = asyncio.new_event_loop()
        """The event loop of the client's `thread`."""
        self.thread = threading.Thread(target=self.loop.run_forever, name="engine-client", daemon=True)
        self.thread.start()
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
        """Posts one request. Returns its JSON object, or another answer under the key ``answer``. Raises
        ServerFailure on anything but a good answer within `timeout` s."""
        return self.run(self.ask(address, path, body, timeout, answers), timeout + 10.0)

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        if self.loop.is_closed():
            return
        if self._session is not None:
            with contextlib.suppress(ServerFailure, RuntimeError):  # on the way out; the sockets end with us
                self.run(self._session.close(), 5.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=5.0)
        if not self.thread.is_alive():
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            raise ServerFailure(f"no answer in {timeout:.0f} s") from error
        finally:
            future.cancel()

    async def ask(
        self,
        address: Address,
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float,
        answers: str = "JSON",
    ) -> dict[str, Any]:
        import aiohttp

        if self._session is None:
            # Concurrency is bounded by the caller. Connections are kept for the next wave.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.post(
                address.url + path, json=body, timeout=limit, headers=header(address.key, address.weights)
            ) as response:
                text = await response.read()
                status = response.status
        except TimeoutError as error:
            raise ServerFailure(f"{path}: no answer in {timeout:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFailure(f"{path}: {type(error).__name__}: {error}") from error
        beginning = text[:500].decode(errors="replace")
        if status == 409:
            raise ServerFailure(f"{path}: {beginning}")
        if 400 <= status < 500:
            # This project's own request was wrong: a restart would only meet it again.
            raise EngineError(f"the server refused {path} with HTTP {status}: {beginning}")
        if status != 200:
            raise ServerFailure(f"{path}: HTTP {status}: {beginning}")
        if not text:
            return {}
        if answers == "text":
            return {"answer": beginning}
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise ServerFailure(f"{path}: not JSON: {beginning}") from error
        return answer if isinstance(answer, dict) else {"answer": answer}
