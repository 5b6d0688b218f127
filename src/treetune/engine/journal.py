"""Stores each request's samples as soon as they arrive, so that a killed run doesn't sample them again.

::

    program ──sample(request)──► JournaledEngine ──► known in memory or in a journal?  ──yes──► its samples
                                                              │ no
                                                              ▼
                                       another task samples the same request ──yes──► wait for that task
                                                              │ no
                                                              ▼
                                       engine.sample, then a row of the journal (`Journal.add`)
"""

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

from treetune.engine.base import Engine, EngineWrapper
from treetune.engine.programs import result_of
from treetune.engine.requests import ANSWER_PRIORITY, Completion, Deferred, OnResult, Request, ScoreRequest
from treetune.store.journal import Journal
from treetune.vocabulary import Column

T = TypeVar("T")

log = logging.getLogger(__name__)

Observe = Callable[[Request, Sequence[Completion]], None]
"""A function that is called with each request and its samples, before the program gets them."""

FLUSH_EVERY_S = 0.2
"""The shortest time between two writes to disk, in seconds, unless many rows wait. A row that comes sooner
waits until another row comes after this time, a row is read, or the program ends. A killed process loses the
rows that wait."""


class CallTimes(NamedTuple):
    """The times of one program or call of `generate`, in seconds since the engine was made.

    Example: answers were sampled until 40 s, continuations of them from 12 s until 55 s::

        CallTimes(answers_end=40.0, end=55.0, overlap=28.0)
    """

    answers_end: float
    """The time at which the last request for answers was answered."""
    end: float
    """The time at which the program ended."""
    overlap: float
    """The seconds in which both continuations and answers were sampled."""


class JournaledEngine(EngineWrapper):
    """An engine that stores the samples of finished requests in journals, and reads them from there.

    A request is identified by its content and by the version of the weights, so one journal can serve several
    calls and a restarted run. A request for fewer samples than an earlier, otherwise equal one gets the first
    of its samples, since a sample doesn't depend on the number of samples. Everything but sampling is
    forwarded.

    Args:
        path: The journal.
        other_paths: Further journals that are read and not written.
        continuations: The journal of continuations; None for `path`.
        observe: Is called with every request and its samples, also if they come from a journal.

    Attributes:
        sampled: The number of tokens that the engine has sampled, since they were not in a journal, by the
            priority of their requests.
        calls: The times of each program that `run` has run.
    """

    def __init__(
        self,
        engine: Engine,
        path: Path,
        other_paths: Sequence[Path] = (),
        continuations: Path | None = None,
        observe: Observe | None = None,
    ) -> None:
        super().__init__(engine)
        self._observe = observe
        self._answers = Journal(path, other_paths, flush_s=FLUSH_EVERY_S)
        self._continuations = (
            Journal(continuations, flush_s=FLUSH_EVERY_S) if continuations else self._answers
        )
        self.sampled: Counter[int] = Counter()  # the numbers of tokens, by the priority of their requests
        self.calls: list[CallTimes] = []
        self._start = time.perf_counter()  # `elapsed_s` counts the seconds from here
        self._last_answer_at = 0.0
        self._first_continuation_at: float | None = None
        self._completions_by_key: dict[str, list[Completion]] = {}
        self._in_flight: dict[str, asyncio.Future[None]] = {}
        """The requests that the engine samples now, by key: a future that is done when the engine has
        answered or has failed."""
        self._widest: dict[str, tuple[int, str]] = {}
        """The number of samples and the key of the request for the most samples, among requests that differ
        only in their number of samples. The key of this dictionary is equal for all of these."""

    @override
    def run(self, program: Coroutine[Any, Any, T]) -> T:
        """Runs a program with the engine, and adds the times of the program to `calls`."""
        # `sample` sets `_last_answer_at` whenever an answer ends, and `_first_continuation_at` when the first
        # continuation is requested. Without answers, the former is the beginning of the program.
        self._last_answer_at = self.elapsed_s()
        self._first_continuation_at = None
        # Closing a journal writes the rows that it still holds. The next row opens it again.
        with closing(self._answers), closing(self._continuations):
            try:
                result = self.engine.run(program)
            finally:
                # A program that raised may leave futures here. They belong to its loop, which is gone.
                self._in_flight.clear()
        # A program may request continuations of some answers while other answers are still sampled.
        overlap = 0.0
        if self._first_continuation_at is not None:
            overlap = max(0.0, self._last_answer_at - self._first_continuation_at)
        self.calls.append(CallTimes(answers_end=self._last_answer_at, end=self.elapsed_s(), overlap=overlap))
        return result

    @override
    async def sample(self, request: Request) -> list[Completion]:
        """Returns the samples of a request, from a journal or else from the engine."""
        # Requests for answers have the priority `ANSWER_PRIORITY`, and requests for continuations another
        # one.
        if request.priority != ANSWER_PRIORITY and self._first_continuation_at is None:
            self._first_continuation_at = self.elapsed_s()
        key = self._note_key(request)
        while not self._is_answered(key, request):
            if key in self._in_flight:  # another task has made the same request
                # The future is also done if the other task fails or is cancelled. Then there are no samples,
                # and the loop tries once more. Shielded: if this task is cancelled, the future must not be,
                # since others wait for it.
                await asyncio.shield(self._in_flight[key])
            else:
                await self._sample_and_store(key, request)
        completions = self._completions_by_key[key]
        if request.priority == ANSWER_PRIORITY:
            self._last_answer_at = self.elapsed_s()
        if self._observe is not None:
            self._observe(request, completions)
        return completions

    async def _sample_and_store(self, key: str, request: Request) -> None:
        """Samples a request by the engine, and stores its completions in memory and in its journal."""
        # Set before the engine is awaited, so that a task with the same request finds it.
        is_done = asyncio.get_running_loop().create_future()
        self._in_flight[key] = is_done
        try:
            completions = await self.engine.sample(request)
            if not isinstance(request, ScoreRequest):
                self.sampled[request.priority] += sum(len(completion.token_ids) for completion in completions)
            journal = self._answers if request.priority == ANSWER_PRIORITY else self._continuations
            journal.add(journal_row(key, completions))
            self._completions_by_key[key] = completions
        finally:
            # The future is also done after an error or a cancellation: a task that waits for it then samples
            # the request.
            self._in_flight.pop(key, None)
            is_done.set_result(None)

    @override
    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        """Answers the requests from the journals or else by the engine, as `sample` does."""
        results: list[list[Completion]] = []

        async def sample_all(new_requests: Sequence[Request | Deferred]) -> None:
            """Samples the requests and those that follow from them, all at the same time."""
            tasks: list[Coroutine[Any, Any, None]] = []
            for request in new_requests:
                if isinstance(request, Deferred):
                    tasks.append(sample_deferred(request))
                else:
                    tasks.append(sample_request(len(results), request))
                    results.append([])
            await asyncio.gather(*tasks)

        async def sample_request(index: int, request: Request) -> None:
            results[index] = await self.sample(request)
            if on_result is not None:
                await sample_all(on_result(index, results[index]) or ())

        async def sample_deferred(deferred: Deferred) -> None:
            # `deferred` stands for requests that are not known before `deferred.ready` is done, such as
            # before an environment has replied. After an error, `deferred.requests` is called too, and may
            # raise the error.
            with suppress(Exception):
                await result_of(deferred.ready)
            await sample_all(deferred.requests())

        self.run(sample_all(requests))
        return results

    def elapsed_s(self) -> float:
        """Returns the seconds since the engine was made."""
        return time.perf_counter() - self._start

    def _is_answered(self, key: str, request: Request) -> bool:
        """Returns whether the request was answered before. If it was, its completions are in
        `_completions_by_key` after this call."""
        if key in self._completions_by_key:
            return True
        completions = self._read_completions(key)
        if completions is None:
            # The samples of a request for fewer samples are the first ones of a request for more.
            # `_note_key` has noted this request, so there is always a widest one.
            key_for_any_n = request_key(request, self.version, n=0)
            _, widest_key = self._widest[key_for_any_n]
            if more_completions := self._read_completions(widest_key):
                completions = more_completions[: request.n]
        if completions is None:
            return False
        self._completions_by_key[key] = completions
        return True

    def _read_completions(self, key: str) -> list[Completion] | None:
        """Returns the completions of a request from memory or from a journal; None if there are none."""
        if key in self._completions_by_key:
            return self._completions_by_key[key]
        journal = self._answers
        row = journal.get(key)
        if row is None:
            journal = self._continuations
            row = journal.get(key)
        if row is None:
            return None
        try:
            return completions_of_row(row)
        except (ValueError, TypeError):
            log.warning("the request %s in %s is damaged: it is sampled again", key, journal.path)
            return None

    def _note_key(self, request: Request) -> str:
        """Returns the request's key, and notes whether the request is the widest one so far.

        The widest request has the most samples among the requests that are equal otherwise.
        """
        key = request_key(request, self.version)
        key_for_any_n = request_key(request, self.version, n=0)
        most_samples, _ = self._widest.get(key_for_any_n, (0, ""))
        if most_samples < request.n:
            self._widest[key_for_any_n] = request.n, key
        return key


def request_key(request: Request, version: int, *, n: int | None = None) -> str:
    """Returns a hash that is equal for requests with equal samples.

    Args:
        n: Replaces the request's number of samples. With 0, requests that differ only in their number of
            samples have the same hash.
    """
    sample_count = request.n if n is None else n
    # Not `dataclasses.astuple`, which copies deeply and would take longer than all the rest.
    sampling = list(vars(request.sampling).values())
    content = (request.prompt_ids.tolist(), request.seed, sample_count, sampling)
    key_parts: list[Any] = [content, version]
    if not request.reads_logprobs:
        # The journal's row of such a request has no log-probs, and can't answer a request that needs them.
        key_parts.append("without log-probs")
    if isinstance(request, ScoreRequest):
        key_parts.append(["text", *request.text_ids.tolist()])
    text = json.dumps(key_parts, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def journal_row(key: str, completions: Sequence[Completion]) -> list[Any]:
    """Returns the row of a finished request in a journal.

    The ids and the log-probs of a sample are written as little-endian bytes in base64: ids as int32, and
    log-probs as float32 or float64, as the engine returned them.

    Example: ``["9f0c…", [["FAAAAAIAAAA=", "rkfhvQrXo7w=", "stop", 3, 0.8]]]``.
    """
    samples = []
    for completion in completions:
        logprobs = None if completion.logprobs is None else _encode(completion.logprobs)
        samples.append(
            (
                _encode(completion.token_ids),
                logprobs,
                completion.finish_reason,
                completion.policy_version,
                completion.seconds,
            )
        )
    return [key, samples]


def completions_of_row(row: Any) -> list[Completion]:
    """Returns the samples in a row of a journal. Earlier versions wrote lists of numbers in place of bytes.

    Raises:
        ValueError, TypeError: The row is damaged.
    """
    import numpy as np

    _, samples = row
    completions = []
    for token_ids, logprobs, *other_fields in samples:
        if isinstance(token_ids, str):
            id_bytes = base64.b64decode(token_ids)
            token_ids = np.frombuffer(id_bytes, "<i4")
            if logprobs is not None:
                logprob_bytes = base64.b64decode(logprobs)
                # An engine may give log-probs of 4 or of 8 bytes. Each belongs to an id, which has 4.
                has_doubles = len(logprob_bytes) == 2 * len(id_bytes)
                logprobs = np.frombuffer(logprob_bytes, "<f8" if has_doubles else "<f4")
        completions.append(Completion(token_ids, logprobs, *other_fields))
    return completions


def _encode(column: Column) -> str:
    """Returns the little-endian bytes of an array in base64."""
    little_endian = column.dtype.newbyteorder("<")
    return base64.b64encode(column.astype(little_endian, copy=False).tobytes()).decode("ascii")
