"""The engine of a run: a managed vLLM server, its client and the weight sync, as one thing."""

from __future__ import annotations

import atexit
import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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
from treetune.inference.client import Address, Client, RequestPart, Sampling, ServerFailure, parts_of
from treetune.inference.gaps import Gap, Probe, judge
from treetune.inference.launch import Way
from treetune.inference.ranks import RankFiles
from treetune.inference.server import OwnServer, Server
from treetune.inference.sync import drop_cache, probes_of, sample_probes
from treetune.inference.transfer import FromFolder, Receiver, send_all, transfer
from treetune.vocabulary import TokenIds

if TYPE_CHECKING:
    from treetune.inference.settings import VllmSettings

RATE_WINDOW_S = 5.0


class VllmEngine(Engine):
    """See `Engine`. `version` is 0 for the weights that it was started on.

    `tokens_per_second` is the rate of `tokens` over the last seconds of sampling.
    """

    def __init__(
        self,
        settings: VllmSettings,
        server: Server,
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
        self._settings, self._server, self._ranks = settings, server, ranks
        self._context_length, self._device = context_length, device
        self._client = Client(end_ids)
        self._transfer = transfer(way, self._client, settings.sync_timeout, settings.tensor_parallel_size)
        self._from_folder = FromFolder(self._client, settings.sync_timeout)
        self._recent: list[tuple[float, int]] = []
        self._asleep_epoch: int | None = None
        self._verified: list[Probe] = []
        """The canary's probes of the weights that are in the engine, where there was one."""
        atexit.register(self.close)

    @property
    def restarts(self) -> int:
        """How often the server was started anew, so far."""
        return self._server.restarts

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens that arrived in the last few seconds, per second; 0 before any."""
        if len(self._recent) < 2:
            return 0.0
        seconds = self._recent[-1][0] - self._recent[0][0]
        return sum(count for _, count in self._recent[1:]) / seconds if seconds > 0 else 0.0

    def wait_ready(self) -> None:
        self._server.ready()

    def wait_settled(self) -> None:
        if self._device == "cuda":
            self._server.ready()

    # Sampling

    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        arrived: dict[int, dict[int, list[Completion]]] = {}
        missing: dict[tuple[int, int], RequestPart] = {}
        promised: list[Later] = []

        def asked(further: Sequence[Request | Later]) -> tuple[list[RequestPart], list[Later]]:
            parts: list[RequestPart] = []
            for request in further:
                if isinstance(request, Later):
                    continue
                self._check(len(results), request)
                parts += parts_of(len(results), request, self._settings.max_num_seqs)
                results.append([])
            laters = [one for one in further if isinstance(one, Later)]
            missing.update(((part.index, part.first), part) for part in parts)
            promised.extend(laters)
            return parts, laters

        asked(requests)
        given = len(results)
        self._recent = [(time.monotonic(), 0)]
        while missing or promised:
            address = self._awake()
            # What follows from other answers goes first among its like, as it did before.
            parts = sorted(missing.values(), key=lambda part: (part.request.priority, part.index < given))
            try:
                with self._sampling(address) as sampling:
                    sampling.add(parts, promised)
                    for came in sampling:
                        if isinstance(came, Later):
                            promised.remove(came)
                            sampling.add(*asked(came.requests()))
                            continue
                        part, completions = came
                        del missing[part.index, part.first]
                        done = arrived.setdefault(part.index, {})
                        done[part.first] = completions
                        self._count(completions)
                        if sum(map(len, done.values())) < part.request.n:
                            continue
                        del arrived[part.index]
                        results[part.index] = [c for first in sorted(done) for c in done[first]]
                        if on_result is not None:
                            sampling.add(*asked(on_result(part.index, results[part.index]) or ()))
            except ServerFailure as failure:
                # Whoever is unfinished is sent again: the same seeds give the same tokens.
                self._server.failed(address, str(failure))
        self._server.succeeded()
        return results

    def _sampling(self, address: Address) -> Sampling:
        return self._client.sampling(
            address,
            self.version,
            concurrency=self._settings.max_concurrency,
            timeout=self._settings.request_timeout,
        )

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
        restarts = self._server.restarts
        # Nobody samples from here on: a request in flight would mix old weights and new.
        self._ranks.gather(None)
        problem: str | None = None
        for attempt in range(2):
            seconds, problem = ({}, None) if attempt else self._exchange(directory, chunks)
            parts, gap, probes, problem = self._verify(version, canary, problem)
            parts = seconds | parts
            problems = [other for other in self._ranks.gather(problem) if other]
            if not problems:
                break
            if attempt == 0 and problem and isinstance(self._server, OwnServer):
                self._server.start_anew(directory, problem)
        else:
            raise EngineError(
                f"the weights in {directory} could not be brought into the engine, not even by a new"
                f" server: {'; '.join(problems)}"
            )
        self.version, self._verified = version, probes
        if isinstance(self._server, OwnServer):
            self._server.use(directory)
        self._server.succeeded()
        took = time.monotonic() - started
        return SyncReport(took, gap.largest, gap.mean, self._server.restarts - restarts, parts)

    def _exchange(
        self, directory: Path, chunks: Iterable[Chunk] | None
    ) -> tuple[dict[str, float], str | None]:
        """The live server's weights for those in `directory`, on their way in `chunks` where they are;
        seconds by part, and what went wrong, if anything."""
        started = time.monotonic()
        receivers: list[Receiver] = []
        problem: str | None = None
        if isinstance(self._server, OwnServer):
            try:
                self._wake_for_sync()
                way = self._from_folder if chunks is None else self._transfer
                receivers.append(Receiver(way, self._server.ready()))
            except (ServerFailure, EngineError) as failure:
                problem = str(failure)
        try:
            send_all(chunks or (), receivers, directory)
        except BaseException:
            for one in receivers:
                self._server.failed(one.address, one.problem or "")
            raise
        exchanged = time.monotonic()
        for one in receivers:
            problem = one.problem
            if problem is None:
                try:
                    self._wake_cache()
                    drop_cache(self._client, one.address, self._settings.sync_timeout)
                except (ServerFailure, EngineError) as failure:
                    problem = str(failure)
        seconds = {"reload": exchanged - started, "reset_cache": time.monotonic() - exchanged}
        return seconds if receivers else {}, problem

    def _verify(
        self, version: int, canary: Canary | None, problem: str | None
    ) -> tuple[dict[str, float], Gap, list[Probe], str | None]:
        """Seconds by part, gap, what it was found on, and what is wrong with the server's weights; that is
        `problem` where there is one already."""
        parts: dict[str, float] = {}
        sampled: list[tuple[TokenIds, Completion]] = []
        gap, probes = Gap(math.nan, math.nan), list[Probe]()
        if canary is None:
            return parts, gap, probes, problem
        if problem is None and isinstance(self._server, OwnServer):
            before = time.monotonic()
            try:
                address = self._server.ready()
                requests = probes_of(canary, self._context_length)
                timeout = self._settings.sync_timeout
                sampled = sample_probes(self._client, address, requests, version, timeout)
            except (ServerFailure, EngineError) as failure:
                problem = str(failure)
            parts["sample_canary"] = time.monotonic() - before
        before = time.monotonic()
        # Every rank comes here, with nothing to score if it has no server: scoring may be collective.
        scores = canary.score([(prompt, completion.token_ids) for prompt, completion in sampled])
        parts["score_canary"] = time.monotonic() - before
        probes = [
            Probe(prompt, completion.token_ids, completion.logprobs.tolist(), row)
            for (prompt, completion), row in zip(sampled, scores, strict=True)
        ]
        gap = judge(probes, self._verified, canary.tolerance or self._settings.tolerance(self._device))
        return parts, gap, probes, gap.problem or problem

    # Memory

    @contextmanager
    def asleep(self) -> Iterator[None]:
        if not self._settings.sleep:
            yield
            return
        self._ranks.gather(None)
        if isinstance(self._server, OwnServer):
            # A server that can't fall asleep is replaced by one that then has to.
            while (address := self._server.ready()).epoch != self._asleep_epoch:
                with self._or_restart(address):
                    self._client.post(address, "/sleep?level=1", timeout=self._settings.sync_timeout)
                    self._asleep_epoch = address.epoch
        self._server.hold(True)
        self._ranks.gather(None)
        try:
            yield
        finally:
            # It wakes when it is next needed: weights first, the cache after the new weights are in, so
            # that the peak of memory stays low.
            self._server.hold(False)

    def _awake(self) -> Address:
        """The server, ready to sample."""
        self._wake_for_sync()
        self._wake_cache()
        return self._server.ready()

    def _wake_for_sync(self) -> None:
        self._wake("weights")

    def _wake_cache(self) -> None:
        self._wake("kv_cache")
        self._asleep_epoch = None

    def _wake(self, tag: str) -> None:
        if self._asleep_epoch is None:
            return
        address = self._server.ready()
        if address.epoch == self._asleep_epoch:  # a new server never slept
            with self._or_restart(address):
                self._client.post(address, f"/wake_up?tags={tag}", timeout=self._settings.sync_timeout)

    @contextmanager
    def _or_restart(self, address: Address) -> Iterator[None]:
        try:
            yield
        except ServerFailure as failure:
            self._server.failed(address, str(failure))

    def close(self) -> None:
        atexit.unregister(self.close)
        self._transfer.close()
        self._server.close()
        with contextlib.suppress(RuntimeError):  # the interpreter is on its way out
            self._client.close()
