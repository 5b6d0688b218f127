"""The engine of a run: a managed vLLM server, its client and the weight sync, as one thing."""

from __future__ import annotations

import atexit
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from treetune.inference.base import (
    Canary,
    Chunk,
    Completion,
    Engine,
    EngineError,
    Later,
    OnResult,
    Request,
    SyncReport,
)
from treetune.inference.client import Address, Client, RequestPart, parts_of
from treetune.inference.gaps import Gap, Probe, judge
from treetune.inference.launch import Way
from treetune.inference.prefixes import Prefixes
from treetune.inference.ranks import RankFiles
from treetune.inference.replica import Replica, Taken
from treetune.inference.sampling import Limit, Lost, Sampling
from treetune.inference.server_interface import Server
from treetune.inference.transfer import Delivery, send_all

if TYPE_CHECKING:
    from treetune.inference.settings import VllmSettings

T = TypeVar("T")

RATE_WINDOW_S = 5.0

AHEAD = 2
"""Times the samples that a server works on at once are what it is given: as many wait there as are worked on,
and the rest here, for whoever has room first."""

RETURN_POLL_S = 0.1
"""How often is looked whether a server that was lost is there again."""


class VllmEngine(Engine):
    """See `Engine`. `version` is 0 for the weights that it was started on.

    Its servers are alike, and a request's samples are the same whichever answers it. A server that is lost is
    started anew while the others go on with what it had not answered. `tokens_per_second` is the rate of
    `tokens` over the last seconds of sampling.
    """

    def __init__(
        self,
        settings: VllmSettings,
        servers: Sequence[Server],
        ranks: RankFiles,
        *,
        context_length: int,
        device: str,
        end_ids: Sequence[int] = (),
        way: Way = "file",
    ) -> None:
        self.version = 0
        self.tokens = 0
        self.sleeps = settings.sleep
        self._settings, self._ranks = settings, ranks
        self._context_length, self._device = context_length, device
        self._client = Client(end_ids)
        self._replicas = [
            Replica(number, one, self._client, settings, way) for number, one in enumerate(servers)
        ]
        self._threads = ThreadPoolExecutor(len(servers), "engine-replica")
        self._prefixes: Prefixes | None = None
        self._forget_prefixes()
        self._recent: list[tuple[float, int]] = []
        atexit.register(self.close)

    @property
    def restarts(self) -> int:
        """How often a server was started anew, so far."""
        return sum(one.server.restarts for one in self._replicas)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens that arrived in the last few seconds, per second; 0 before any."""
        if len(self._recent) < 2:
            return 0.0
        seconds = self._recent[-1][0] - self._recent[0][0]
        return sum(count for _, count in self._recent[1:]) / seconds if seconds > 0 else 0.0

    def wait_ready(self) -> None:
        for one in self._replicas:
            one.server.ready()

    def wait_settled(self) -> None:
        if self._device == "cuda":
            self.wait_ready()

    # Sampling

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        arrived: dict[int, dict[int, list[Completion]]] = {}

        def asked(further: Sequence[Request | Later]) -> tuple[list[RequestPart], list[Later]]:
            parts: list[RequestPart] = []
            for request in further:
                if isinstance(request, Later):
                    continue
                self._check(len(results), request)
                parts += parts_of(len(results), request, self._settings.max_num_seqs)
                results.append([])
            return parts, [one for one in further if isinstance(one, Later)]

        asking: dict[int, Address] = {}  # where those are that take requests
        first = asked(requests)
        worked: set[int] = set()
        self._recent = [(time.monotonic(), 0)]
        for one in self._replicas:
            one.server.wait_anew()
        with self._sampling() as sampling:
            self._open_servers(sampling, asking)
            sampling.add(*first)
            while sampling.outstanding:
                whole = self._open_servers(sampling, asking)
                came = sampling.next() if whole else sampling.next(RETURN_POLL_S)
                if came is None:
                    self._give_up_gone(sampling, asking)
                    continue
                if isinstance(came, Lost):
                    self._replicas[came.server].server.failed(came.address, came.reason)
                    worked.discard(came.server)
                elif isinstance(came, Later):
                    sampling.add(*asked(came.requests()))
                else:
                    worked.add(came.server)
                    index = came.part.index
                    done = arrived.setdefault(index, {})
                    done[came.part.first] = came.completions
                    self._count(came.completions)
                    if sum(map(len, done.values())) < came.part.request.n:
                        continue
                    del arrived[index]
                    results[index] = [c for first in sorted(done) for c in done[first]]
                    if on_result is not None:
                        sampling.add(*asked(on_result(index, results[index]) or ()))
        for number in worked:
            self._replicas[number].server.succeeded()
        return results

    def _sampling(self) -> Sampling:
        settings = self._settings
        limit = Limit(settings.max_concurrency, AHEAD * settings.max_num_seqs)
        return Sampling(self._client, self.version, limit, settings.request_timeout, self._prefixes)

    def _give_up_gone(self, sampling: Sampling, asking: dict[int, Address]) -> None:
        for number, address in asking.items():
            if sampling.is_open(number) and (why := self._replicas[number].server.gone(address)):
                sampling.lose(number, why)

    def _open_servers(self, sampling: Sampling, asking: dict[int, Address]) -> bool:
        """Has the servers take requests that are there and don't yet, and puts down where; whether all do."""
        shut = [one for one in self._replicas if not sampling.is_open(one.number)]
        there = self._each(shut, Replica.awake)
        if found := {one.number: address for one, address in zip(shut, there, strict=True) if address}:
            asking |= found
            sampling.open(found)
        return None not in there

    def _each(self, replicas: Sequence[Replica], work: Callable[[Replica], T]) -> list[T]:
        """What `work` gives for each of them, done at the same time."""
        if len(replicas) < 2:
            return [work(one) for one in replicas]
        return list(self._threads.map(work, replicas))

    def _check(self, index: int, request: Request) -> None:
        length, wanted = len(request.prompt_ids), request.sampling.max_tokens
        if not length:
            raise ValueError(f"request {index} has an empty prompt")
        if request.n < 1 or wanted < 1:
            raise ValueError(f"request {index} asks for {request.n} samples of at most {wanted} tokens")
        if length + wanted > self._context_length:
            raise ValueError(
                f"request {index}: a prompt of {length} tokens and max_tokens = {wanted} need"
                f" {length + wanted} tokens, and the engine's context_length is {self._context_length}"
            )

    def _count(self, completions: list[Completion]) -> None:
        count = sum(len(completion.token_ids) for completion in completions)
        self.tokens += count
        now = time.monotonic()
        self._recent.append((now, count))
        if self._recent[0][0] < now - 2 * RATE_WINDOW_S:
            self._recent = [entry for entry in self._recent if entry[0] >= now - RATE_WINDOW_S]

    # Weights

    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        started = time.monotonic()
        restarts = self.restarts
        # Nobody samples from here on: a request in flight would mix old weights and new.
        self._ranks.gather(None)
        gaps, parts = list[Gap](), dict[str, float]()
        lacking = dict.fromkeys(self._replicas, "")
        for attempt in range(2):
            sent: dict[Replica, Delivery] = {}
            if attempt == 0:
                sent, parts["reload"] = self._send(directory, chunks)
            else:
                for one, problem in lacking.items():
                    one.start_anew(directory, problem)

            def take(one: Replica, sent: dict[Replica, Delivery] = sent) -> Taken:
                return one.take(version, directory, canary, self._context_length, sent.get(one))

            taken = dict(zip(lacking, self._each(list(lacking), take), strict=True))
            found, seconds = self._verify(taken, canary)
            gaps += [gap for gap in found.values() if not gap.problem]
            for further in (seconds, *(one.parts for one in taken.values())):
                parts |= {name: max(parts.get(name, 0.0), value) for name, value in further.items()}
            problems = {one: its.problem or found[one].problem for one, its in taken.items()}
            lacking = {one: problem for one, problem in problems.items() if problem}
            everyones = self._ranks.gather("; ".join(lacking.values()))
            if not any(everyones):
                break
        else:
            raise EngineError(
                f"the weights in {directory} could not be brought into the engine, not even by a new"
                f" server, or once more where it isn't ours: {'; '.join(filter(None, everyones))}"
            )
        self.version = version
        self._forget_prefixes()
        for one in self._replicas:
            one.use(directory)
            one.server.succeeded()
        return SyncReport(
            time.monotonic() - started,
            max((gap.largest for gap in gaps), default=math.nan),
            max((gap.mean for gap in gaps), default=math.nan),
            self.restarts - restarts,
            parts,
        )

    def _send(self, directory: Path, chunks: Iterable[Chunk] | None) -> tuple[dict[Replica, Delivery], float]:
        """Gives this rank's servers their new weights; how each came out of it, and the seconds that took."""
        before = time.monotonic()
        own = [one for one in self._replicas if one.is_own]
        deliveries = self._each(own, lambda one: one.delivery(from_folder=chunks is None))
        try:
            send_all(chunks or (), deliveries, directory)
        except BaseException:
            for one, delivery in zip(own, deliveries, strict=True):
                one.give_up(delivery)
            raise
        return dict(zip(own, deliveries, strict=True)), time.monotonic() - before

    def _verify(
        self, taken: dict[Replica, Taken], canary: Canary | None
    ) -> tuple[dict[Replica, Gap], dict[str, float]]:
        """How far each server's log-probs are from the trainer's, and the seconds that scoring took."""
        if canary is None:
            return dict.fromkeys(taken, Gap(math.nan, math.nan)), {}
        before = time.monotonic()
        # Servers that are alike have sampled the same: that is scored once. Every rank comes here, with
        # nothing to score if it has no server: scoring may be collective.
        pairs = {key: pair for one in taken.values() for key, pair in one.pairs().items()}
        scores = dict(zip(pairs, canary.score(list(pairs.values())), strict=True))
        seconds = {"score_canary": time.monotonic() - before}
        tolerance = canary.tolerance or self._settings.tolerance(self._device)
        gaps = {}
        for one, its in taken.items():
            rows = [scores[key] for key in its.pairs()]
            probes = [
                Probe(prompt, completion.token_ids, completion.logprobs.tolist(), row)
                for (prompt, completion), row in zip(its.sampled, rows, strict=True)
                if completion.logprobs is not None
            ]
            gaps[one] = judge(probes, one.verified, tolerance)
            if not (its.problem or gaps[one].problem):
                one.verified = probes
        return gaps, seconds

    def _forget_prefixes(self) -> None:
        """What was cached was computed by other weights."""
        cached = len(self._replicas) > 1 and self._settings.caches_prefixes(self._device)
        self._prefixes = Prefixes() if cached else None

    # Memory

    @contextmanager
    def asleep(self) -> Iterator[None]:
        if not self._settings.sleep:
            yield
            return
        self._ranks.gather(None)
        self._each([one for one in self._replicas if one.is_own], Replica.fall_asleep)
        self._hold(True)
        self._ranks.gather(None)
        try:
            yield
        finally:
            # They wake when they are next needed.
            self._hold(False)

    def _hold(self, held: bool) -> None:
        for one in self._replicas:
            one.server.hold(held)

    def close(self) -> None:
        atexit.unregister(self.close)
        for one in self._replicas:
            one.transfer.close()
            one.server.begin_to_close()
        for one in self._replicas:
            one.server.close()
        self._threads.shutdown(wait=False)
        with contextlib.suppress(RuntimeError):  # the interpreter is on its way out
            self._client.close()
