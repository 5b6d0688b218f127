"""Answers outlive a crash: sampled requests are written down as they come, and not sampled again."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from typing_extensions import override

from treetune.engine.base import (
    ANSWERS,
    Completion,
    Engine,
    EngineWrapper,
    Later,
    OnResult,
    Request,
)
from treetune.engine.programs import result_of
from treetune.store.journal import Journal
from treetune.vocabulary import Column

T = TypeVar("T")

log = logging.getLogger(__name__)

Observe = Callable[[Request, Sequence[Completion]], None]

FLUSH_S = 0.2
"""A killed process loses at most what it sampled in this time."""


class CallTimes(NamedTuple):
    """The times of one call of `generate`, in seconds since its engine was made.

    Example: answers were sampled until 40 s, continuations of them from 12 s until 55 s::

        CallTimes(answers_end=40.0, end=55.0, overlap=28.0)
    """

    answers_end: float
    """When the last request for answers was answered."""
    end: float
    overlap: float
    """Seconds in which continuations were asked for beside answers."""


class JournaledEngine(EngineWrapper):
    """An engine whose finished requests are kept in journals, and found there the next time.

    A request is known by its content and by the policy version that samples it, so one journal can serve
    several calls and a restarted run. `others` are journals to find requests in, and not to write to. A
    request that differs from an earlier one in asking for fewer samples gets the first of those: no sample
    depends on how many there are. Continuations that are asked for among answers are kept in the file
    `continuations`, if there is one. `observe` is called with every request and its samples, before whoever
    asked has them. Everything but sampling goes straight through.

    `sampled` counts the tokens that were not in a journal, by the priority of their requests; `calls` has the
    times of each call.
    """

    def __init__(
        self,
        engine: Engine,
        path: Path,
        others: Sequence[Path] = (),
        continuations: Path | None = None,
        observe: Observe | None = None,
    ) -> None:
        super().__init__(engine)
        self._observe = observe
        self._answers = Journal(path, others, flush_s=FLUSH_S)
        self._continuations = Journal(continuations, flush_s=FLUSH_S) if continuations else self._answers
        self.sampled: Counter[int] = Counter()
        self.calls: list[CallTimes] = []
        self._made = time.perf_counter()
        self._answers_end = 0.0
        self._continuations_begin: float | None = None
        self._known: dict[str, list[Completion]] = {}
        self._in_flight: dict[str, asyncio.Future[None]] = {}
        self._widest: dict[str, tuple[int, str]] = {}

    @override
    def run(self, program: Coroutine[Any, Any, T]) -> T:
        self._answers_end, self._continuations_begin = self.now(), None
        with closing(self._answers), closing(self._continuations):
            try:
                result = self.engine.run(program)
            finally:
                self._in_flight.clear()
        begin = self._answers_end if self._continuations_begin is None else self._continuations_begin
        overlap = max(0.0, self._answers_end - begin)
        self.calls.append(CallTimes(self._answers_end, self.now(), overlap))
        return result

    @override
    async def sample(self, request: Request) -> list[Completion]:
        """Returns the samples of a request: those of a journal, or else new ones, which are written down."""
        if request.priority != ANSWERS and self._continuations_begin is None:
            self._continuations_begin = self.now()
        key = self._key(request)
        if not self._find(key, request):
            if key in self._in_flight:  # somebody else has made the same request
                await self._in_flight[key]
            else:
                await self._sample_anew(key, request)
        completions = self._known[key]
        if request.priority == ANSWERS:
            self._answers_end = self.now()
        if self._observe is not None:
            self._observe(request, completions)
        return completions

    async def _sample_anew(self, key: str, request: Request) -> None:
        is_known = self._in_flight[key] = asyncio.get_running_loop().create_future()
        completions = await self.engine.sample(request)
        self.sampled[request.priority] += sum(len(completion.token_ids) for completion in completions)
        journal = self._answers if request.priority == ANSWERS else self._continuations
        journal.add(journal_row(key, completions))
        self._known[key] = completions
        del self._in_flight[key]
        is_known.set_result(None)

    @override
    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []

        async def sample_all(more: Sequence[Request | Later]) -> None:
            first = len(results)
            results.extend([] for request in more if isinstance(request, Request))
            numbers = iter(range(first, len(results)))
            await asyncio.gather(
                *(
                    wait_for(request) if isinstance(request, Later) else sample_one(next(numbers), request)
                    for request in more
                )
            )

        async def sample_one(number: int, request: Request) -> None:
            results[number] = await self.sample(request)
            if on_result is not None:
                await sample_all(on_result(number, results[number]) or ())

        async def wait_for(later: Later) -> None:
            with suppress(Exception):  # `requests` is called after an error too, which it may raise
                await result_of(later.ready)
            await sample_all(later.requests())

        self.run(sample_all(requests))
        return results

    def now(self) -> float:
        """Returns the seconds since this was made."""
        return time.perf_counter() - self._made

    def _find(self, key: str, request: Request) -> bool:
        """Returns whether the request's completions are known, and remembers them."""
        if key not in self._known:
            _, widest = self._widest[request_key(request, self.version, n=0)]
            if (completions := self._completions(key)) is None and (more := self._completions(widest)):
                completions = more[: request.n]
            if completions is None:
                return False
            self._known[key] = completions
        return True

    def _completions(self, key: str) -> list[Completion] | None:
        """Returns the completions with this key in memory or in a journal."""
        if key in self._known:
            return self._known[key]
        row = self._answers.get(key) or self._continuations.get(key)
        try:
            return None if row is None else completions_of_row(row)
        except (ValueError, TypeError):
            log.warning("the request %s in %s is damaged: it is sampled again", key, self._answers.path)
            return None

    def _key(self, request: Request) -> str:
        """Returns the request's key, and remembers it if no request like it has asked for more samples."""
        key, alike = request_key(request, self.version), request_key(request, self.version, n=0)
        if self._widest.get(alike, (0, ""))[0] < request.n:
            self._widest[alike] = request.n, key
        return key


def request_key(request: Request, version: int, *, n: int | None = None) -> str:
    """Returns a hash that is the same for two requests with the same answer.

    `n` replaces the request's number of samples: with 0, requests that differ in it alone have one hash.
    """
    samples = request.n if n is None else n
    # The fields as they are: `dataclasses.astuple` copies deeply, which takes longer than all else here.
    sampling = list(vars(request.sampling).values())
    content = (request.prompt_ids.tolist(), request.seed, samples, sampling)
    key_parts = [content, version]
    if not request.reads_logprobs:
        # Its row in the journal has no log-probs, and is no answer to a request that reads them.
        key_parts.append("without log-probs")
    text = json.dumps(key_parts, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def journal_row(key: str, completions: Sequence[Completion]) -> list[Any]:
    """Returns the row of a finished request: of each sample the bytes of its ids (int32) and log-probs
    (float32, or float64 where they are twice as long; null where nobody reads them), little-endian in base64,
    then the rest."""
    return [
        key,
        [
            (
                _text(c.token_ids),
                None if c.logprobs is None else _text(c.logprobs),
                c.finish_reason,
                c.policy_version,
                c.seconds,
            )
            for c in completions
        ],
    ]


def completions_of_row(row: Any) -> list[Completion]:
    """Returns the samples in a row of a journal. Raises ValueError or TypeError if it is none. Lists of
    numbers come from versions that did not write them as bytes."""
    import numpy as np

    _, samples = row
    completions = []
    for token_ids, logprobs, *rest in samples:
        if isinstance(token_ids, str):
            ids = base64.b64decode(token_ids)
            token_ids = np.frombuffer(ids, "<i4")
            if logprobs is not None:
                numbers = base64.b64decode(logprobs)
                logprobs = np.frombuffer(numbers, "<f8" if len(numbers) == 2 * len(ids) else "<f4")
        completions.append(Completion(token_ids, logprobs, *rest))
    return completions


def _text(column: Column) -> str:
    kind = column.dtype.newbyteorder("<")
    return base64.b64encode(column.astype(kind, copy=False).tobytes()).decode("ascii")
