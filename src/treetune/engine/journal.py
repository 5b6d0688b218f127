"""Answers outlive a crash: sampled requests are written down as they come, and not sampled again."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

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
from treetune.store.journal import Journal
from treetune.vocabulary import Column

log = logging.getLogger(__name__)

Observe = Callable[[Request, Sequence[Completion]], None]

FLUSH_S = 0.2
"""A killed process loses at most what it sampled in this time."""


class JournaledEngine(EngineWrapper):
    """An engine whose finished requests are kept in journals, and found there the next time.

    A request is known by its content and by the policy version that samples it, so one journal can serve
    several calls and a restarted run. `others` are journals to find requests in, and not to write to. A
    request that differs from an earlier one in asking for fewer samples gets the first of those: no sample
    depends on how many there are. Continuations that are asked for among answers are kept in the file
    `continuations`, if there is one. `observe` is called with every request and its samples, before
    `on_result`. Everything but `generate` goes straight through.

    `sampled` counts the tokens that were not in a journal, by the priority of their requests.
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
        self._known: dict[str, list[Completion]] = {}
        self._widest: dict[str, tuple[int, str]] = {}

    @override
    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        all_requests: list[Request] = []
        keys: list[str] = []  # of all that is asked
        sampled: list[tuple[str, int]] = []  # of those that the engine below is asked for, and priorities
        waiting_for: dict[str, list[int]] = {}  # the requests that have the same key, while it is sampled

        def numbered(more: Sequence[Request | Later]) -> list[tuple[int, Request] | Later]:
            rows: list[tuple[int, Request] | Later] = []
            for request in more:
                if isinstance(request, Later):
                    rows.append(request)
                else:
                    rows.append((len(keys), request))
                    all_requests.append(request)
                    keys.append(self._key(request))
            return rows

        def followers(index: int) -> list[tuple[int, Request] | Later]:
            """Returns the requests that follow from one that has its answer."""
            completions = self._known[keys[index]]
            if self._observe is not None:
                self._observe(all_requests[index], completions)
            more = on_result(index, completions) if on_result is not None else None
            return numbered(more or ())

        def later(request: Later) -> Later:
            return Later(request.ready, lambda: unknown(numbered(request.requests())))

        def unknown(requests: Sequence[tuple[int, Request] | Later]) -> list[Request | Later]:
            """Returns what has to be sampled: requests in no journal, and those that follow from the rest."""
            waiting, missing = deque(requests), list[Request | Later]()
            while waiting:
                following = waiting.popleft()
                if isinstance(following, Later):
                    missing.append(later(following))
                    continue
                index, request = following
                key = keys[index]
                if self._find(key, request):
                    waiting.extend(followers(index))
                elif key in waiting_for:
                    waiting_for[key].append(index)
                else:
                    waiting_for[key] = [index]
                    sampled.append((key, request.priority))
                    missing.append(request)
            return missing

        def keep(position: int, completions: list[Completion]) -> list[Request | Later]:
            key, priority = sampled[position]
            self._known[key] = completions
            self.sampled[priority] += sum(len(completion.token_ids) for completion in completions)
            journal = self._answers if priority == ANSWERS else self._continuations
            journal.add(journal_row(key, completions))
            return unknown([follower for index in waiting_for.pop(key) for follower in followers(index)])

        with closing(self._answers), closing(self._continuations):
            if missing := unknown(numbered(requests)):
                self.engine.generate(missing, keep)
        return [self._known[key] for key in keys]

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
    """Returns a hash that two requests share if they have the same answer. `n` stands for the request's own
    number of samples."""
    samples = request.n if n is None else n
    # The fields as they are: `dataclasses.astuple` copies deeply, which takes longer than all else here.
    sampling = list(vars(request.sampling).values())
    content = (request.prompt_ids.tolist(), request.seed, samples, sampling)
    unread = [] if request.reads_logprobs else ["without log-probs"]
    text = json.dumps([content, version, *unread], separators=(",", ":"))
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
