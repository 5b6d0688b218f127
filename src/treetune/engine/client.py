"""Sends requests to vLLM servers: token ids, answered by sampled token ids with their log-probs.

HTTP runs in a separate thread with an event loop, so that answers arrive while other threads work::

    any thread                                 thread "engine-client"            server
      post(…), or run(coroutine, timeout)  ──►   sends the HTTP request    ──►
        waits for the result               ◄──   sets the result           ◄──   answers
        after `timeout`: ServerFailure     ──►   cancels the request
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from treetune.engine.key import key_header
from treetune.engine.requests import Completion, Request, ScoreRequest
from treetune.exceptions import EngineError, ServerFailure, TemporaryFailure
from treetune.vocabulary import logprob_array, token_array

if TYPE_CHECKING:
    import ssl

    import aiohttp

T = TypeVar("T")

MODEL_NAME = "policy"
"""The model's name in a server."""

SAMPLES_ROUTE = "/treetune/samples"
"""A server's route that samples (`treetune.engine.whole_answers`)."""
SCORES_ROUTE = "/treetune/scores"
"""A server's route that returns the log-probs of given tokens (`treetune.engine.whole_answers`)."""

KEEP_ALIVE_S = 3.0
"""Seconds that an idle connection stays open for the next request."""


@dataclass(frozen=True)
class Address:
    """The address of a running server process."""

    url: str
    epoch: int
    """The number of the server's start. A restarted server has another epoch."""
    key: str = field(repr=False)
    """The key that each request must have."""
    weights: str = ""
    """The name of the weights that requests to this address are meant for. The server refuses a request if it
    has other weights. Empty: any weights will do."""


@dataclass(frozen=True, eq=False)
class RequestPart:
    """A part of the request number `index`: its samples ``first`` to ``first + n - 1``."""

    index: int
    first: int
    n: int
    request: Request


def split_request(index: int, request: Request, largest: int) -> list[RequestPart]:
    """Splits a request into parts of at most `largest` samples, which a server draws at the same time.

    Sample i of the request has the seed ``seed + i``, whatever its part.
    """
    return [
        RequestPart(index, first, min(largest, request.n - first), request)
        for first in range(0, request.n, largest)
    ]


def make_sampling_body(
    part: RequestPart,
    version: int,
    end_ids: Sequence[int] = (),
    special_ids: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the JSON body with which a part is posted to `SAMPLES_ROUTE`: the ids of the prompt, and vLLM's
    sampling parameters.

    The server answers with ``samples``, each with ``token_ids``, ``finish_reason`` and, if requested, the
    ``logprobs`` of its tokens.

    Args:
        version: The version of the weights. vLLM uses cached prefixes only for requests of the same version.
        end_ids: The tokens that end a sample. They stay in it.
        special_ids: The ids of special tokens by their texts, for stop strings that are such tokens.
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
            "logprobs": 0 if part.request.reads_logprobs else None,  # 0: only that of the sampled token
            "stop_token_ids": [*end_ids, *sampling.stop_ids],
            "stop": list(sampling.stop),
        },
        "priority": part.request.priority,
        "cache_salt": _cache_salt(version),
    }


def make_scoring_body(request: ScoreRequest, version: int) -> dict[str, Any]:
    """Returns the JSON body with which a text is posted to `SCORES_ROUTE`.

    The server answers with the ``logprobs`` of the text's tokens.
    """
    return {
        "prompt": request.prompt_ids.tolist(),
        "text": request.text_ids.tolist(),
        "priority": request.priority,
        "cache_salt": _cache_salt(version),
    }


def _cache_salt(version: int) -> str:
    """Returns the salt of requests to weights of this version. vLLM uses cached prefixes only for requests of
    the same salt, so prefixes of older weights aren't used."""
    return f"version-{version}"


def read_completions(
    answer: Mapping[str, Any], part: RequestPart, version: int, seconds: float = 0.0
) -> list[Completion]:
    """Returns a part's samples in their order. Raises ServerFailure if the answer is incomplete.

    Args:
        seconds: The time that the answer took.
    """
    samples, needs_logprobs = answer.get("samples", ()), part.request.reads_logprobs
    if len(samples) != part.n:
        raise ServerFailure(f"it answered with {len(samples)} samples, and {part.n} were requested")
    completions = []
    for sample in samples:
        ids, logprobs, reason = sample["token_ids"], sample["logprobs"] or (), sample["finish_reason"]
        # With any other reason, such as "abort", the sample ended before it was complete.
        is_complete = reason in ("stop", "length") and len(ids) > 0
        lacks_logprobs = needs_logprobs and len(logprobs) != len(ids)
        if not is_complete or lacks_logprobs:
            raise ServerFailure(
                f"a sample has {len(ids)} token ids, {len(logprobs)} log-probs, finish_reason {reason!r}"
            )
        logprobs_of_sample = logprob_array(logprobs) if needs_logprobs else None
        completions.append(Completion(token_array(ids), logprobs_of_sample, reason, version, seconds))
    return completions


def read_scored_completion(
    answer: Mapping[str, Any], request: ScoreRequest, version: int, seconds: float = 0.0
) -> Completion:
    """Returns the request's text with its log-probs. Raises ServerFailure if the answer is incomplete."""
    logprobs, text_ids = answer.get("logprobs", ()), request.text_ids
    if len(logprobs) != len(text_ids):
        raise ServerFailure(f"it answered with {len(logprobs)} log-probs for {len(text_ids)} tokens")
    # Nothing was sampled. The finish reason of given tokens is always "length".
    return Completion(text_ids, logprob_array(logprobs), "length", version, seconds)


class Client:
    """An HTTP client that sends its requests in a thread of its own, as drawn in the head of this file.

    Args:
        end_ids: The tokens that end every sample; empty for those of the model's configuration.
        special_ids: The ids of special tokens by their texts, for stop strings that are such tokens.
    """

    def __init__(
        self, end_ids: Sequence[int] = (), special_ids: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self.end_ids, self.special_ids = tuple(end_ids), dict(special_ids)
        self.loop = asyncio.new_event_loop()
        """The event loop of the client's `thread`."""
        self.thread = threading.Thread(target=self.loop.run_forever, name="engine-client", daemon=True)
        self.thread.start()
        self.certificates: ssl.SSLContext | None = None
        """The certificates with which servers at https addresses are verified; None: the system's."""
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
        """Posts one request, and waits for the answer.

        Args:
            answers: The form in which the route answers. ``text``: any text, of which only the beginning is
                returned, under the key ``answer``.

        Returns:
            The JSON object of the answer. Another JSON value, such as a list, is returned under the key
            ``answer``.

        Raises:
            ServerFailure: The server failed, or didn't answer within `timeout` seconds.
            EngineError: The server refused the request.
        """
        # The request's own limit should end the wait first: the error of that limit names the path.
        return self.run(self.ask(address, path, body, timeout, answers), timeout + 10.0)

    def close(self) -> None:
        """Ends the thread. It may be called twice."""
        if self.loop.is_closed():
            return
        if self._session is not None:
            with contextlib.suppress(ServerFailure, RuntimeError):  # the sockets end with the process anyway
                self.run(self._session.close(), 5.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=5.0)
        if not self.thread.is_alive():  # a loop that runs can't be closed
            self.loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Runs a coroutine in the client's thread, and waits for its result. Raises ServerFailure if it takes
        longer than `timeout` seconds."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            raise ServerFailure(f"no answer in {timeout:.0f} s") from error
        finally:
            future.cancel()  # has no effect on a future that is done

    async def sample(
        self, address: Address, part: RequestPart, version: int, timeout: float
    ) -> list[Completion]:
        """Returns a part's samples, or the scores of a `ScoreRequest`. It raises the errors of `post`, and is
        called in the client's thread."""
        started = time.monotonic()
        if isinstance(part.request, ScoreRequest):
            answer = await self.ask(address, SCORES_ROUTE, make_scoring_body(part.request, version), timeout)
            return [read_scored_completion(answer, part.request, version, time.monotonic() - started)]
        body = make_sampling_body(part, version, self.end_ids, self.special_ids)
        answer = await self.ask(address, SAMPLES_ROUTE, body, timeout)
        return read_completions(answer, part, version, time.monotonic() - started)

    async def ask(
        self,
        address: Address,
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float,
        answers: str = "JSON",
    ) -> dict[str, Any]:
        """Posts one request; see `post`, also for `answers`. It is called in the client's thread."""
        status, content = await self.exchange("POST", address, path, body, timeout)
        return self.read_answer(path, status, content, answers)

    async def exchange(
        self, method: str, address: Address, path: str, body: Mapping[str, Any] | None, timeout: float
    ) -> tuple[int, bytes]:
        """Sends one HTTP request, and returns the status and the body of the answer. Raises ServerFailure if
        there is no answer."""
        import aiohttp

        if timeout <= 0:  # aiohttp would wait without a limit
            raise ServerFailure(f"{path}: no time is left for a request")
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=0,  # any number of connections, since the caller limits the requests in flight
                keepalive_timeout=KEEP_ALIVE_S,
                ssl=self.certificates or True,  # True: the system's certificates
            )
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        client_timeout = aiohttp.ClientTimeout(total=timeout)
        headers = self.headers(address)
        try:
            async with self._session.request(
                method, address.url + path, json=body, timeout=client_timeout, headers=headers
            ) as response:
                content = await response.read()
                return response.status, content
        except TimeoutError as error:
            # Not a TemporaryFailure, after which a client may try again: no time is left for that.
            raise ServerFailure(f"{path}: no answer in {timeout:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TemporaryFailure(f"{path}: {type(error).__name__}: {error}") from error

    def headers(self, address: Address) -> dict[str, str]:
        """Returns the headers of a request."""
        return key_header(address.key, address.weights)

    def read_answer(self, path: str, status: int, text: bytes, answers: str = "JSON") -> dict[str, Any]:
        """Returns the JSON object of an answer. With ``answers="text"`` the answer isn't JSON; see `post`."""
        beginning = text[:500].decode(errors="replace")
        if status != 200:
            self.raise_for_status(path, status, beginning)
        if not text:  # some of vLLM's routes answer with nothing
            return {}
        if answers == "text":  # no caller needs more of the text than its beginning
            return {"answer": beginning}
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise ServerFailure(f"{path}: not JSON: {beginning}") from error
        return answer if isinstance(answer, dict) else {"answer": answer}

    def raise_for_status(self, path: str, status: int, beginning: str) -> NoReturn:
        """Raises the error for an answer whose status isn't 200: EngineError if the request is wrong, since a
        restarted server would refuse it again, and ServerFailure for all other statuses.

        `beginning` is the beginning of the answer's text.
        """
        # With 409 the request is right, but the server has other weights than the request names. It gets the
        # right ones when it is started again.
        is_request_wrong = 400 <= status < 500 and status != 409
        if is_request_wrong:
            raise EngineError(f"the server refused {path} with HTTP {status}: {beginning}")
        raise ServerFailure(f"{path}: HTTP {status}: {beginning}")
