"""The engine of a run: managed vLLM servers, their client and the weight sync, as one thing."""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from treetune.engine.base import (
    Canary,
    Chunk,
    Completion,
    Engine,
    EngineLaunch,
    Later,
    OnResult,
    Request,
    SyncReport,
    TransferMethod,
    check_request,
)
from treetune.engine.canary import Gap, Probe, judge
from treetune.engine.client import Address, Client, RequestPart, parts_of
from treetune.engine.cuda_transfers import CudaIpc, Nccl
from treetune.engine.given import servers_at_addresses
from treetune.engine.in_process import InProcessEngine
from treetune.engine.launch import ServerLaunch, with_time_for
from treetune.engine.sampling import Answered, Lost, Prefixes, Sampling
from treetune.engine.server import Server, close_servers, servers_of
from treetune.engine.settings import EngineSettings, InProcessSettings, VllmSettings
from treetune.engine.transfer import Delivery, FromFolder, SharedMemory, drop_cache, send_all
from treetune.exceptions import EngineError, ServerFailure
from treetune.vocabulary import TokenIds

T = TypeVar("T")

RATE_WINDOW_S = 5.0
"""Arrivals of the last so many seconds, up to twice as many, give the rate of tokens."""

QUEUED = 2
"""A server is given this many times the samples that it works on at once: as many wait there as are worked
on, and the rest here, for the server that is free first."""

RETURN_POLL_S = 0.1
"""Seconds between two looks whether a lost server is there again."""

PROBE_CONCURRENCY = 64

NEW_SERVERS_IN_A_ROW = 3
"""Syncs in a row that need a new server, at which the run ends: each of them costs a server's start."""


TRANSFERS = {"file": FromFolder, "shared_memory": SharedMemory, "cuda_ipc": CudaIpc, "nccl": Nccl}
"""The ways of new weights into a server."""


def start_engine(settings: EngineSettings, launch: EngineLaunch) -> Engine:
    """Begins to start an engine and returns at once; `Engine.wait_ready` waits for it. Every rank calls this.
    Raises ValueError if the settings don't suit the device or the ranks."""
    # Ours are started here and not by methods of their settings, which are read where no engine is imported.
    if isinstance(settings, InProcessSettings):
        return InProcessEngine(settings, launch)
    if isinstance(settings, VllmSettings):
        return start_vllm(settings, launch)
    return settings.start(launch)


def start_vllm(settings: VllmSettings, launch: EngineLaunch) -> VllmEngine:
    settings = with_time_for(settings, launch.weights)
    if settings.sleep and launch.device != "cuda":
        raise ValueError(
            "engines.policy.sleep is true and the engine runs on a CPU, where vLLM's sleep frees nothing:"
            " set it to false"
        )
    ranks = launch.ranks
    if ranks.world_size > 1 and ranks.folder is None:
        raise ValueError("several ranks need a rendezvous folder to find the engine's server")
    if settings.addresses is not None:
        servers = servers_at_addresses(settings, launch)
    else:
        per_rank = settings.servers == "per_rank"
        log = launch.logs / f"server-{ranks.rank if per_rank else 0}.log"
        servers = servers_of(ServerLaunch(settings, launch), log, None if per_rank else ranks.folder)
    return VllmEngine(settings, launch, servers)


class VllmEngine(Engine):
    """See `Engine`. `version` is 0 for the weights that it was started on.

    Its servers are alike, and a request's samples are the same whichever answers it. A server that is lost is
    started anew while the others go on with its unanswered requests.
    """

    def __init__(self, settings: VllmSettings, launch: EngineLaunch, servers: Sequence[Server]) -> None:
        self.version = 0
        self.tokens = 0
        self.sleeps = settings.sleep
        self.at_once = settings.max_num_seqs * len(servers)
        self._settings, self._ranks, self._device = settings, launch.ranks, launch.device
        self._context_length = settings.context_length or launch.context_length
        self._client = Client(launch.end_ids, launch.special_ids)
        self._replicas = [
            Replica(number, server, self._client, settings, launch.transfer)
            for number, server in enumerate(servers)
        ]
        self._transfer: TransferMethod = launch.transfer
        self._logs = launch.logs
        self._new_servers_in_a_row = 0
        self._threads = ThreadPoolExecutor(len(servers), "engine-replica")
        self._prefixes: Prefixes | None = None
        self._forget_prefixes()
        self._recent: list[tuple[float, int]] = []
        atexit.register(self.close)

    @property
    def restarts(self) -> int:
        """Restarts of all servers so far."""
        return sum(replica.server.restarts for replica in self._replicas)

    @property
    @override
    def tokens_per_second(self) -> float:  # type: ignore[override]
        """Sampled tokens that arrived in the last few seconds, per second; 0 before any."""
        if len(self._recent) < 2:
            return 0.0
        seconds = self._recent[-1][0] - self._recent[0][0]
        return sum(count for _, count in self._recent[1:]) / seconds if seconds > 0 else 0.0

    @override
    def wait_ready(self) -> None:
        for replica in self._replicas:
            replica.server.ready()

    @override
    def wait_settled(self) -> None:
        if self._device == "cuda":
            self.wait_ready()

    # Sampling

    @override
    def generate(
        self, requests: Sequence[Request | Later], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        results: list[list[Completion]] = []
        arrived: dict[int, dict[int, list[Completion]]] = {}  # completions by request and first sample

        def numbered(more: Sequence[Request | Later]) -> tuple[list[RequestPart], list[Later]]:
            parts: list[RequestPart] = []
            for request in more:
                if isinstance(request, Later):
                    continue
                check_request(len(results), request, self._context_length)
                parts += parts_of(len(results), request, self._settings.max_num_seqs)
                results.append([])
            return parts, [request for request in more if isinstance(request, Later)]

        first = numbered(requests)
        addresses: dict[int, Address] = {}  # of the servers that take requests
        worked: set[int] = set()
        self._recent = [(time.monotonic(), 0)]
        for replica in self._replicas:
            replica.server.wait_anew()
        settings = self._settings
        with Sampling(
            self._client,
            self.version,
            most_parts=settings.max_concurrency,
            most_samples=QUEUED * settings.max_num_seqs,
            timeout=settings.request_timeout,
            prefixes=self._prefixes,
        ) as sampling:
            self._open_servers(sampling, addresses)
            sampling.add(*first)
            while sampling.outstanding:
                all_open = self._open_servers(sampling, addresses)
                event = sampling.next() if all_open else sampling.next(RETURN_POLL_S)
                if event is None:
                    for number in sampling.opened:
                        if why := self._replicas[number].server.gone(addresses[number]):
                            sampling.lose(number, why)
                elif isinstance(event, Lost):
                    self._replicas[event.server].server.failed(event.address, event.reason)
                    worked.discard(event.server)
                elif isinstance(event, Later):
                    sampling.add(*numbered(event.requests()))
                else:
                    worked.add(event.server)
                    part = event.part
                    done = arrived.setdefault(part.index, {})
                    done[part.first] = event.completions
                    self._count(event.completions)
                    if sum(map(len, done.values())) < part.request.n:
                        continue
                    del arrived[part.index]
                    results[part.index] = [c for first in sorted(done) for c in done[first]]
                    if on_result is not None:
                        sampling.add(*numbered(on_result(part.index, results[part.index]) or ()))
        for number in worked:
            self._replicas[number].server.succeeded()
        return results

    def _open_servers(self, sampling: Sampling, addresses: dict[int, Address]) -> bool:
        """Opens servers that are there and don't take requests yet, and notes their addresses. Returns
        whether all servers take requests."""
        shut = [replica for replica in self._replicas if replica.number not in sampling.opened]
        awake = self._each(shut, Replica.awake)
        opened = {replica.number: address for replica, address in zip(shut, awake, strict=True) if address}
        if opened:
            addresses |= opened
            sampling.open(opened)
        return None not in awake

    def _each(self, replicas: Sequence[Replica], work: Callable[[Replica], T]) -> list[T]:
        """Returns the results of `work` for each of them, done at the same time."""
        if len(replicas) < 2:
            return [work(replica) for replica in replicas]
        return list(self._threads.map(work, replicas))

    def _count(self, completions: list[Completion]) -> None:
        count = sum(len(completion.token_ids) for completion in completions)
        self.tokens += count
        now = time.monotonic()
        self._recent.append((now, count))
        # Twice the window, so that the list is copied once a window and not at each arrival.
        if self._recent[0][0] < now - 2 * RATE_WINDOW_S:
            self._recent = [entry for entry in self._recent if entry[0] >= now - RATE_WINDOW_S]

    # Weights

    @override
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
        gaps: list[Gap] = []
        parts = {"reload": 0.0}
        gave_up = ""
        # The servers without the new weights, each with the problem of the last attempt. The next attempt is
        # for them alone; it is a slower way, and one with fewer things that can go wrong.
        lacking = dict.fromkeys(self._replicas, "")
        has_transfer = chunks is not None and self._transfer != "file"
        attempts = ("transfer", "file", "new server") if has_transfer else ("file", "new server")
        for attempt in attempts:
            sent: dict[Replica, Delivery] = {}
            if attempt == "new server":
                for replica, problem in lacking.items():
                    if replica.server.loads:
                        replica.server.start_anew(directory, problem)
            else:
                before = time.monotonic()
                sent = self._send(list(lacking), directory, chunks, attempt == "transfer")
                parts["reload"] += time.monotonic() - before
                chunks = None  # the folder is whole now
            updates = {replica: Update(directory, sent.get(replica)) for replica in lacking}

            def take(replica: Replica, updates: dict[Replica, Update] = updates) -> None:
                replica.take(updates[replica], version, canary, self._context_length)

            self._each(list(updates), take)
            gap_of_replica, scoring_seconds = self._verify(updates, canary)
            gaps += [gap for gap in gap_of_replica.values() if not gap.problem]
            # Servers work at the same time: a part of the sync takes as long as in the slowest.
            for seconds_of_part in (scoring_seconds, *(update.seconds for update in updates.values())):
                for part, seconds in seconds_of_part.items():
                    parts[part] = max(parts.get(part, 0.0), seconds)
            lacking = {}
            for replica, update in updates.items():
                new_problem = update.problem or gap_of_replica[replica].problem
                if new_problem:
                    lacking[replica] = new_problem
            problems_of_ranks = self._ranks.gather("; ".join(lacking.values()))
            if not any(problems_of_ranks):
                break
            told = "; ".join(filter(None, problems_of_ranks))
            if attempt == "transfer":
                gave_up = (
                    f"new weights did not come into the engine by {self._transfer}, and come by file from"
                    f" here on: {told}"
                )
                self._transfer = "file"
        else:
            raise EngineError(
                f"the weights in {directory} could not be brought into the engine, not even by a new"
                f" server, or once more where it isn't ours: {told}"
            )
        if attempt == "new server":
            self._new_servers_in_a_row += 1
        else:
            self._new_servers_in_a_row = 0
        if self._new_servers_in_a_row == NEW_SERVERS_IN_A_ROW:
            raise EngineError(
                f"at {NEW_SERVERS_IN_A_ROW} syncs in a row the engine had new weights by a new server only,"
                f" the last time since {told}. The servers' logs in {self._logs} say more"
            )
        self.version = version
        self._forget_prefixes()
        for replica in self._replicas:
            replica.server.use(directory)
            replica.server.succeeded()
        return SyncReport(
            time.monotonic() - started,
            max((gap.largest for gap in gaps), default=math.nan),
            max((gap.mean for gap in gaps), default=math.nan),
            self.restarts - restarts,
            parts,
            gave_up,
        )

    def _send(
        self, replicas: Sequence[Replica], directory: Path, chunks: Iterable[Chunk] | None, by_transfer: bool
    ) -> dict[Replica, Delivery]:
        """Gives this rank's servers their new weights. Returns the result for each."""
        loading = [replica for replica in replicas if replica.server.loads]
        deliveries = self._each(loading, lambda replica: replica.delivery(by_transfer))
        try:
            send_all(chunks or (), deliveries, directory)
        except BaseException:
            for replica, delivery in zip(loading, deliveries, strict=True):
                if delivery.address is not None:  # nobody may sample from it
                    problem = delivery.problem or "its weights are of two versions"
                    replica.server.failed(delivery.address, problem)
            raise
        return dict(zip(loading, deliveries, strict=True))

    def _verify(
        self, updates: dict[Replica, Update], canary: Canary | None
    ) -> tuple[dict[Replica, Gap], dict[str, float]]:
        """Returns the gap between each server's log-probs and the trainer's, and the seconds of scoring."""
        if canary is None:
            return dict.fromkeys(updates, Gap(math.nan, math.nan)), {}
        before = time.monotonic()
        # Servers that are alike have sampled the same: that is scored once. Every rank comes here, with
        # nothing to score if it has no server: scoring may be collective.
        pairs = {key: pair for update in updates.values() for key, pair in update.pairs().items()}
        scores = dict(zip(pairs, canary.score(list(pairs.values())), strict=True))
        seconds = {"score_canary": time.monotonic() - before}
        tolerance = canary.tolerance or self._settings.tolerance(self._device)
        gaps = {}
        for replica, update in updates.items():
            rows = [scores[key] for key in update.pairs()]
            probes = [
                Probe(prompt, completion.token_ids, completion.logprobs.tolist(), row)
                for (prompt, completion), row in zip(update.sampled, rows, strict=True)
                if completion.logprobs is not None
            ]
            gaps[replica] = judge(probes, replica.verified, tolerance)
            if not (update.problem or gaps[replica].problem):
                replica.verified = probes
        return gaps, seconds

    def _forget_prefixes(self) -> None:
        """Forgets the servers' caches, which are of other weights."""
        is_cached = len(self._replicas) > 1 and self._settings.caches_prefixes(self._device)
        self._prefixes = Prefixes() if is_cached else None

    # Memory

    @override
    @contextmanager
    def asleep(self, *, keep_weights: bool = True) -> Iterator[None]:
        if not self._settings.sleep:
            yield
            return
        self._ranks.gather(None)
        loading = [replica for replica in self._replicas if replica.server.loads]
        self._each(loading, lambda replica: replica.fall_asleep(1 if keep_weights else 2))
        for replica in self._replicas:
            replica.server.hold(True)
        self._ranks.gather(None)
        try:
            yield
        finally:
            # They wake when they are next needed.
            for replica in self._replicas:
                replica.server.hold(False)

    @override
    def close(self) -> None:
        atexit.unregister(self.close)
        for replica in self._replicas:
            replica.transfer.close()
        close_servers([replica.server for replica in self._replicas])
        self._threads.shutdown(wait=False)
        with contextlib.suppress(RuntimeError):  # the interpreter is on its way out
            self._client.close()


@dataclass
class Update:
    """A server's way to new weights, those in the folder `weights`."""

    weights: Path
    delivery: Delivery | None
    """None if the server was started on them."""
    seconds: dict[str, float] = field(default_factory=dict)
    sampled: list[tuple[TokenIds, Completion]] = field(default_factory=list)
    """The canary's prompts and the server's samples."""
    problem: str | None = None

    def pairs(self) -> dict[tuple[int, bytes, bytes], tuple[TokenIds, TokenIds]]:
        """Returns each prompt and its sample, by a key that servers share which sampled the same."""
        return {
            (number, prompt.tobytes(), completion.token_ids.tobytes()): (prompt, completion.token_ids)
            for number, (prompt, completion) in enumerate(self.sampled)
        }


class Replica:
    """A server, this rank's own or the first rank's, awake or asleep.

    `number` tells it from the engine's others. `verified` are the canary's probes of its present weights, if
    there was a canary. Its methods may be called from several threads.
    """

    def __init__(
        self, number: int, server: Server, client: Client, settings: VllmSettings, method: TransferMethod
    ) -> None:
        self.number, self.server = number, server
        self.transfer = TRANSFERS[method](client, settings.sync_timeout, settings.tensor_parallel_size)
        self.verified: list[Probe] = []
        self._client, self._timeout = client, settings.sync_timeout
        self._asleep_epoch: int | None = None
        self._emptied_epoch: int | None = None
        self._one_at_a_time = threading.RLock()

    def fall_asleep(self, level: int) -> None:
        """Puts the server to sleep: at level 1 its weights are copied to the host and back, at level 2 they
        are dropped. One that can't is replaced by one that then has to."""
        while (address := self.server.ready()).epoch != self._asleep_epoch:
            try:
                self._client.post(address, f"/sleep?level={level}", timeout=self._timeout)
                self._asleep_epoch = address.epoch
                self._emptied_epoch = address.epoch if level == 2 else None
            except ServerFailure as failure:
                self.server.failed(address, str(failure))

    def awake(self) -> Address | None:
        """Returns the server, ready to sample, or None while it is being started."""
        with self._one_at_a_time:
            if (address := self.server.now()) is None:
                return None
            if address.epoch == self._emptied_epoch:
                self.server.failed(address, "it was to sample after its weights were dropped")
                return None
            # Weights first, and the cache after new weights are in, so that the peak of memory stays low.
            self._wake("weights")
            self._wake("kv_cache")
            return self.server.now()

    def _wake(self, tag: str) -> None:
        if self._asleep_epoch is not None:
            address = self.server.ready()
            if address.epoch == self._asleep_epoch:  # a new server never slept
                try:
                    self._client.post(address, f"/wake_up?tags={tag}", timeout=self._timeout)
                except ServerFailure as failure:
                    self.server.failed(address, str(failure))
        if tag == "kv_cache":
            self._asleep_epoch = None

    def delivery(self, by_transfer: bool) -> Delivery:
        """Makes the server ready to be given weights: in chunks, or in a folder that is whole."""
        transfer = self.transfer if by_transfer else FromFolder(self._client, self._timeout)
        try:
            with self._one_at_a_time:
                self._wake("weights")
                address = self.server.begin_weights(self.server.ready())
                if not by_transfer:
                    self.transfer.give_up(address)
                return Delivery(transfer, address)
        except (EngineError, ServerFailure) as failure:
            return Delivery(transfer, None, str(failure))

    def take(self, update: Update, version: int, canary: Canary | None, context_length: int) -> None:
        """Has the server forget its old weights, and sample for the canary. Only an own server does
        anything."""
        if not self.server.loads:
            return
        delivery = update.delivery
        if delivery is not None and delivery.problem is not None:
            update.problem = delivery.problem
            return
        try:
            before = time.monotonic()
            with self._one_at_a_time:
                if delivery is not None:
                    self._wake("kv_cache")
                address = self.server.ready()
                if delivery is not None:
                    drop_cache(self._client, replace(address, weights=""), self._timeout)
                    address = self.server.end_weights(address, update.weights)
                    self._emptied_epoch = None
                    update.seconds["reset_cache"] = time.monotonic() - before
            if canary is not None:
                before = time.monotonic()
                update.sampled = self._sample_probes(address, canary.requests(context_length), version)
                update.seconds["sample_canary"] = time.monotonic() - before
        except (ServerFailure, EngineError) as failure:
            update.problem = str(failure)

    def _sample_probes(
        self, address: Address, requests: Sequence[Request], version: int
    ) -> list[tuple[TokenIds, Completion]]:
        """Returns the prompts and the server's samples."""
        answers = {}
        with Sampling(
            self._client,
            version,
            most_parts=PROBE_CONCURRENCY,
            most_samples=PROBE_CONCURRENCY,
            timeout=self._timeout,
        ) as sampling:
            sampling.open({0: address})
            sampling.add([RequestPart(index, 0, 1, request) for index, request in enumerate(requests)])
            while sampling.outstanding:
                event = sampling.next()
                if isinstance(event, Lost):
                    raise ServerFailure(event.reason)
                if isinstance(event, Answered):
                    answers[event.part.index] = event.completions[0]
        return [(request.prompt_ids, answers[index]) for index, request in enumerate(requests)]
