"""The engine of a run that samples with vLLM: it manages servers, sends them requests, and loads new weights.

Threads and processes of one rank with two servers::

    main thread                 client's thread        server threads          processes
    ─────────────────────       ──────────────────     ────────────────────    ─────────────
    generate(requests)
      RequestScheduler.add   ─────►  HTTP requests    ─────────────────────►   server 0, 1
      RequestScheduler.next  ◄─────  answers          ◄─────────────────────
        a server is lost:
          Server.failed   ────────────────────────►    ends and restarts it ►  server 1
          its requests go to server 0                  (`OwnServer`)
        a server is back:
          RequestScheduler.open

    load(weights)               one thread for each server ("engine-replica") sends it the weights, drops its
                                cache and samples the canary; the main thread waits for all of them

Every wait has a deadline: `request_timeout` for a request, `sync_timeout` for each part of a sync,
`start_timeout` for the start of a server. If a server fails more than `max_restarts` times in a row, its
thread gives up, and the waiting main thread raises EngineError.
"""

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
from typing import Literal, TypeVar

from typing_extensions import override

from treetune.engine.base import (
    Canary,
    Chunk,
    Engine,
    EngineLaunch,
    SyncReport,
    TransferMethod,
    check_request,
)
from treetune.engine.canary import Gap, Probe, judge_gap
from treetune.engine.client import Address, Client, RequestPart, split_request
from treetune.engine.cuda_transfers import CudaIpc, Nccl
from treetune.engine.in_process import InProcessEngine
from treetune.engine.launch import ServerLaunch, add_reading_time
from treetune.engine.plain_servers import connect_plain_servers
from treetune.engine.requests import Completion, Deferred, OnResult, Request, ScoreRequest
from treetune.engine.sampling import Answered, Lost, Prefixes, RequestScheduler
from treetune.engine.serve_engine_servers import servers_at_addresses
from treetune.engine.server import Server, close_servers, make_servers
from treetune.engine.settings import EngineSettings, InProcessSettings, PlainVllmSettings, VllmSettings
from treetune.engine.transfer import Delivery, FromFolder, SharedMemory, drop_cache, send_all
from treetune.exceptions import EngineError, ServerFailure
from treetune.vocabulary import TokenIds

T = TypeVar("T")

RATE_WINDOW_S = 5.0
"""The rate of tokens is the mean over the last `RATE_WINDOW_S` to ``2 * RATE_WINDOW_S`` seconds."""

BATCHES_PER_SERVER = 2
"""A server gets up to this many times the samples that it draws at the same time, so that its next samples
already wait there. All further samples wait in this process, for the server that is free first."""

CHECK_LOST_SERVERS_EVERY_S = 0.1
"""Seconds between two checks whether a lost server is back."""

PROBE_CONCURRENCY = 64
"""Most samples of a canary that are requested at the same time."""

MOST_NEW_SERVERS_IN_A_ROW = 3
"""If this many syncs in a row need a new server, the run ends, since each of them takes as long as a server's
start."""


TRANSFER_CLASSES = {"file": FromFolder, "shared_memory": SharedMemory, "cuda_ipc": CudaIpc, "nccl": Nccl}
"""The classes of the transfers, by their names."""


def start_engine(settings: EngineSettings, launch: EngineLaunch) -> Engine:
    """Begins to start an engine, and returns at once; `Engine.wait_ready` waits for it. Every rank calls
    this.

    Raises:
        ValueError: The settings don't fit the device or the ranks.
    """
    # A user's engine is started by its settings. treetune's own engines are started here, since the module of
    # their settings must not import engines: `check` reads settings, and has to stay fast.
    if isinstance(settings, InProcessSettings):
        return InProcessEngine(settings, launch)
    if isinstance(settings, VllmSettings):
        return start_vllm(settings, launch)
    if isinstance(settings, PlainVllmSettings):
        return start_plain_vllm(settings, launch)
    return settings.start(launch)


def start_vllm(settings: VllmSettings, launch: EngineLaunch) -> VllmEngine:
    """Begins to start vLLM servers, or connects to those at `addresses`; see `start_engine`."""
    settings = add_reading_time(settings, launch.weights)  # longer timeouts for larger weights
    if settings.sleep and launch.device != "cuda":
        raise ValueError(
            "engines.policy.sleep is true, but the engine runs on a CPU, where vLLM's sleep frees no memory:"
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
        # In this folder all ranks find the servers that they share. A rank's own servers need no folder.
        shared_folder = None if per_rank else ranks.folder
        servers = make_servers(ServerLaunch(settings, launch), log, shared_folder)
    return VllmEngine(settings, launch, servers)


def start_plain_vllm(settings: PlainVllmSettings, launch: EngineLaunch) -> VllmEngine:
    """Begins to connect to servers that `vllm serve` started; see `start_engine`."""
    settings = add_reading_time(settings, launch.weights)
    plain = connect_plain_servers(settings, launch)
    return VllmEngine(settings, launch, plain.servers, client=plain.client, router=plain.router)


class VllmEngine(Engine):
    """An engine of one or several vLLM servers; see `Engine`. `version` is 0 for the weights that it starts
    with.

    All servers have the same weights and settings, so a request's samples don't depend on the server that
    draws them. If a server is lost, it is restarted, and the others get its unanswered requests.

    Args:
        client: The client that samples; None: one for the routes of servers that treetune started.
        router: A router for all servers, which is asked for samples instead of them.
    """

    def __init__(
        self,
        settings: VllmSettings | PlainVllmSettings,
        launch: EngineLaunch,
        servers: Sequence[Server],
        *,
        client: Client | None = None,
        router: Server | None = None,
    ) -> None:
        self.version = 0
        self.tokens = 0
        self.scores = True  # this engine answers a `ScoreRequest`
        self.sleeps = settings.sleep
        self.at_once = settings.max_num_seqs * len(servers)
        self._settings, self._ranks, self._device = settings, launch.ranks, launch.device
        self._context_length = settings.context_length or launch.context_length
        self._client = client or Client(launch.end_ids, launch.special_ids)
        self._replicas = [
            Replica(number, server, self._client, settings, launch.transfer)
            for number, server in enumerate(servers)
        ]
        """The servers, which get new weights."""
        self._asked_replicas = self._replicas
        """The servers that are asked for samples, or the router."""
        if router is not None:
            self._asked_replicas = [Replica(0, router, self._client, settings, launch.transfer)]
        self._transfer: TransferMethod = launch.transfer
        self._logs = launch.logs
        self._new_servers_in_a_row = 0
        """The number of the latest syncs in a row that each needed a new server."""
        self._threads = ThreadPoolExecutor(len(servers), "engine-replica")
        self._prefixes = self._make_prefixes()
        self._recent: list[tuple[float, int]] = []
        """The times at which completions arrived lately, and the tokens of each."""
        atexit.register(self.close)

    @property
    def restarts(self) -> int:
        """The number of restarts of all servers so far."""
        return sum(replica.server.restarts for replica in self._replicas)

    @property
    @override
    def tokens_per_second(self) -> float:  # type: ignore[override]
        """The rate of the tokens that arrived in the last seconds; 0 before the first ones."""
        if len(self._recent) < 2:
            return 0.0
        seconds = self._recent[-1][0] - self._recent[0][0]
        # The first entry's tokens were sampled before these seconds.
        return sum(count for _, count in self._recent[1:]) / seconds if seconds > 0 else 0.0

    @property
    def _targets(self) -> list[Replica]:
        """The servers, and the router if there is one."""
        return list(dict.fromkeys([*self._replicas, *self._asked_replicas]))

    @override
    def wait_ready(self) -> None:
        for replica in self._targets:
            replica.server.wait_until_ready()

    @override
    def wait_settled(self) -> None:
        if self._device == "cuda":
            self.wait_ready()

    # Sampling

    @override
    def generate(
        self, requests: Sequence[Request | Deferred], on_result: OnResult | None = None
    ) -> list[list[Completion]]:
        """Distributes the requests over the servers, and sends those of a lost server to others; see
        `Engine.generate`."""
        settings = self._settings
        results = _Results(self._context_length, settings.largest_part)
        # All requests are checked before anything is sent. So a request that can't be sampled costs nothing.
        first_parts, first_deferred = results.split_requests(requests)
        # The addresses of the servers that take requests, by the servers' numbers.
        addresses: dict[int, Address] = {}
        # The numbers of the servers that have answered since they were last lost.
        servers_with_answers: set[int] = set()
        self._recent = [(time.monotonic(), 0)]  # the rate of tokens (`tokens_per_second`) begins here
        # A server that is away may come back within `start_timeout` from now on. `_targets` are the servers,
        # and the router if there is one.
        for replica in self._targets:
            replica.server.wait_anew()
        # Requests go to `_asked_replicas`: to the servers themselves, or only to a router. The router takes
        # as many samples at once as all of its servers together.
        samples_of_all_servers = BATCHES_PER_SERVER * settings.max_num_seqs * len(self._replicas)
        with RequestScheduler(
            self._client,
            self.version,
            most_parts=settings.max_concurrency,
            most_samples=samples_of_all_servers // len(self._asked_replicas),
            timeout=settings.request_timeout,
            prefixes=self._prefixes,
        ) as scheduler:
            self._open_servers(scheduler, addresses)
            scheduler.add(first_parts, first_deferred)
            while scheduler.outstanding:
                all_open = self._open_servers(scheduler, addresses)
                # If a server is away, the wait for an event is short, to see soon that it is back.
                event = scheduler.next() if all_open else scheduler.next(CHECK_LOST_SERVERS_EVERY_S)
                if event is None:  # nothing has happened for a while, perhaps since a server is gone
                    self._lose_gone_servers(scheduler, addresses)
                elif isinstance(event, Lost):
                    lost_server = self._asked_replicas[event.server].server
                    lost_server.report_failure(event.address, event.reason)
                    servers_with_answers.discard(event.server)
                elif isinstance(event, Deferred):
                    scheduler.add(*results.split_requests(event.requests()))
                else:
                    servers_with_answers.add(event.server)
                    if not isinstance(event.part.request, ScoreRequest):  # its tokens weren't sampled
                        self._count_tokens(event.completions)
                    completions = results.add(event.part, event.completions)
                    # None if other parts of the request are missing.
                    if completions is not None and on_result is not None:
                        further_requests = on_result(event.part.index, completions) or ()
                        scheduler.add(*results.split_requests(further_requests))
        # The earlier failures of servers that have answered no longer count towards `max_restarts`.
        for number in servers_with_answers:
            self._asked_replicas[number].server.report_success()
        return results.completions

    def _lose_gone_servers(self, scheduler: RequestScheduler, addresses: dict[int, Address]) -> None:
        """Lets the scheduler give up the open servers that are gone, since their requests would never be
        answered. A server is open if the scheduler sends it requests."""
        for number in scheduler.opened:
            server = self._asked_replicas[number].server
            if reason := server.reason_gone(addresses[number]):
                scheduler.lose(number, reason)

    def _open_servers(self, scheduler: RequestScheduler, addresses: dict[int, Address]) -> bool:
        """Opens the servers that are running and don't take requests yet, and adds their addresses to
        `addresses`. Returns whether all servers take requests now."""
        closed = [replica for replica in self._asked_replicas if replica.number not in scheduler.opened]
        addresses_of_closed = self._call_for_each(closed, Replica.wake)
        opened_addresses = {}
        for replica, address in zip(closed, addresses_of_closed, strict=True):
            if address is not None:
                opened_addresses[replica.number] = address
        if opened_addresses:
            addresses |= opened_addresses
            scheduler.open(opened_addresses)
        return None not in addresses_of_closed

    def _call_for_each(self, replicas: Sequence[Replica], work: Callable[[Replica], T]) -> list[T]:
        """Calls `work` for all replicas at the same time, in threads, and returns the results in their
        order."""
        if len(replicas) < 2:
            return [work(replica) for replica in replicas]
        return list(self._threads.map(work, replicas))

    def _count_tokens(self, completions: list[Completion]) -> None:
        """Adds the tokens to the total and to the rate."""
        count = sum(len(completion.token_ids) for completion in completions)
        self.tokens += count
        now = time.monotonic()
        self._recent.append((now, count))
        # Old entries are dropped only after two windows, so that the list isn't copied at each arrival.
        if self._recent[0][0] < now - 2 * RATE_WINDOW_S:
            number_of_old = sum(arrived < now - RATE_WINDOW_S for arrived, _ in self._recent)
            # The newest of the old entries stays, since the rate begins with it. Without it, answers that
            # arrive together after a pause would seem to have been sampled in the milliseconds between them.
            self._recent = self._recent[number_of_old - 1 :]

    # Weights

    @override
    def load(
        self,
        directory: Path,
        version: int,
        canary: Canary | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> SyncReport:
        """Makes attempts (see `Engine.load`) until the servers of all ranks have the weights."""
        started = time.monotonic()
        restarts_before = self.restarts
        # All ranks have stopped sampling when this returns. A request in flight would mix old and new
        # weights.
        self._ranks.gather(None)
        attempts: tuple[Attempt, ...] = ("file", "new server")
        if chunks is not None and self._transfer != "file":
            attempts = ("transfer", *attempts)
        # The servers without the new weights, each with the problem of its last attempt. Only they take part
        # in the next attempt, which is slower and has fewer ways to fail.
        outdated = dict.fromkeys(self._replicas, "")
        gaps: list[Gap] = []
        parts = {"reload": 0.0}  # the seconds of each part of the sync
        gave_up = ""  # the reason why the configured transfer is not used any more
        last_problems = ""  # the problems of all ranks in the last attempt that failed
        is_loaded = False
        for attempt in attempts:
            result = self._attempt(attempt, outdated, directory, version, canary, chunks)
            chunks = None  # all chunks have been made, so the folder is complete now
            outdated = result.problems
            gaps += result.gaps
            parts["reload"] += result.sending_seconds
            for part, seconds in result.part_seconds.items():
                parts[part] = max(parts.get(part, 0.0), seconds)
            # An attempt fails on all ranks if it fails on one.
            problems_of_ranks = self._ranks.gather("; ".join(outdated.values()))
            if not any(problems_of_ranks):
                is_loaded = True
                break
            last_problems = "; ".join(filter(None, problems_of_ranks))
            if attempt == "transfer":
                gave_up = (
                    f"the transfer of new weights by {self._transfer} failed, and weights are sent by file"
                    f" from now on: {last_problems}"
                )
                self._transfer = "file"
        if not is_loaded:
            # The run can't restart a server that it did not start. With such a server, the attempt "new
            # server" connects again, and loads the weights a second time.
            raise EngineError(
                f"the weights in {directory} could not be loaded into the engine. The last attempt was with a"
                f" new server (or a second one with a server that the run did not start): {last_problems}"
            )
        if attempt == "new server":  # the attempt that has succeeded
            self._new_servers_in_a_row += 1
        else:
            self._new_servers_in_a_row = 0
        if self._new_servers_in_a_row == MOST_NEW_SERVERS_IN_A_ROW:
            raise EngineError(
                f"the last {MOST_NEW_SERVERS_IN_A_ROW} syncs of weights each needed a new server, the last"
                f" one because {last_problems}. See the servers' logs in {self._logs}"
            )
        self.version = version
        self._prefixes = self._make_prefixes()  # the servers have dropped their caches
        for replica in self._targets:
            replica.server.set_newest_weights(directory)
            replica.server.report_success()
        return SyncReport(
            seconds=time.monotonic() - started,
            canary_gap=max((gap.largest for gap in gaps), default=math.nan),
            canary_mean_gap=max((gap.mean for gap in gaps), default=math.nan),
            restarts=self.restarts - restarts_before,
            parts=parts,
            gave_up=gave_up,
        )

    def _attempt(
        self,
        attempt: Attempt,
        outdated: dict[Replica, str],
        directory: Path,
        version: int,
        canary: Canary | None,
        chunks: Iterable[Chunk] | None,
    ) -> AttemptResult:
        """Makes one attempt to give the outdated servers new weights, and verifies which servers have them.
        Collective.

        Args:
            outdated: The servers without the new weights, each with the problem of its last attempt.
        """
        # Send the weights, or begin to start servers with them.
        sending_seconds = 0.0
        updates: dict[Replica, Update] = {}
        if attempt == "new server":
            for replica, problem in outdated.items():
                if replica.server.loads_weights:
                    replica.server.start_anew(directory, problem)
                # There is no delivery, since the new server reads the weights when it starts.
                updates[replica] = Update(directory, delivery=None)
        else:
            started = time.monotonic()
            deliveries = self._send(list(outdated), directory, chunks, by_transfer=attempt == "transfer")
            sending_seconds = time.monotonic() - started
            for replica in outdated:
                updates[replica] = Update(directory, deliveries.get(replica))

        # Let the servers drop their caches of the old weights, and sample for the canary.
        def complete(replica: Replica) -> None:
            replica.complete(updates[replica], version, canary, self._context_length)

        self._call_for_each(list(updates), complete)

        # Compare the log-probs of the canary's few samples with the trainer's.
        gap_of_replica, part_seconds = self._verify(updates, canary)
        gaps = [gap for gap in gap_of_replica.values() if not gap.problem]
        problems: dict[Replica, str] = {}
        for replica, update in updates.items():
            # The servers work at the same time, so a part takes as long as the slowest one needs.
            for part, seconds in update.seconds.items():
                part_seconds[part] = max(part_seconds.get(part, 0.0), seconds)
            problem_now = update.problem or gap_of_replica[replica].problem
            if problem_now:
                problems[replica] = problem_now
        return AttemptResult(problems, gaps, sending_seconds, part_seconds)

    def _send(
        self, replicas: Sequence[Replica], directory: Path, chunks: Iterable[Chunk] | None, by_transfer: bool
    ) -> dict[Replica, Delivery]:
        """Sends this rank's servers their new weights, all at the same time. Returns the delivery of each."""
        loading = [replica for replica in replicas if replica.server.loads_weights]
        deliveries = self._call_for_each(loading, lambda replica: replica.prepare_delivery(by_transfer))
        try:
            send_all(chunks or (), deliveries, directory)
        except BaseException:
            for replica, delivery in zip(loading, deliveries, strict=True):
                if delivery.address is not None:  # the server must not sample any more
                    problem = delivery.problem or "its weights are of two versions"
                    replica.server.report_failure(delivery.address, problem)
            raise
        return dict(zip(loading, deliveries, strict=True))

    def _verify(
        self, updates: dict[Replica, Update], canary: Canary | None
    ) -> tuple[dict[Replica, Gap], dict[str, float]]:
        """Returns the gap between each server's log-probs and the trainer's, and the seconds of scoring.

        The canary is a few samples of each server. Their log-probs show whether the server has the new
        weights.
        """
        if canary is None:
            return dict.fromkeys(updates, Gap(math.nan, math.nan)), {}
        started = time.monotonic()
        # Pairs of prompt and sample, by a key that is equal for equal pairs (`Update.pairs_by_key`). Servers
        # with the same weights have drawn the same samples, which are scored once.
        pairs: dict[tuple[int, bytes, bytes], tuple[TokenIds, TokenIds]] = {}
        for update in updates.values():
            pairs |= update.pairs_by_key()
        # Every rank calls `score`, even if it has no server and nothing to score, since scoring may be
        # collective.
        scores_of_pairs = canary.score(list(pairs.values()))
        scores = dict(zip(pairs, scores_of_pairs, strict=True))
        seconds = {"score_canary": time.monotonic() - started}
        tolerance = canary.tolerance or self._settings.tolerance(self._device)
        gaps = {}
        for replica, update in updates.items():
            scores_of_trainer = [scores[key] for key in update.pairs_by_key()]
            probes = []
            for (prompt, completion), trainer_logprobs in zip(update.sampled, scores_of_trainer, strict=True):
                assert completion.logprobs is not None, "a canary's requests read log-probs"
                engine_logprobs = completion.logprobs.tolist()
                probes.append(Probe(prompt, completion.token_ids, engine_logprobs, trainer_logprobs))
            # Until now, the verified probes are those of the previous weights. If the server's log-probs fit
            # them better, it still has the previous weights.
            gaps[replica] = judge_gap(probes, replica.verified_probes, tolerance)
            if not (update.problem or gaps[replica].problem):
                replica.verified_probes = probes
        return gaps, seconds

    def _make_prefixes(self) -> Prefixes | None:
        """Returns an empty index of the prefixes that the servers have cached; None if none is needed."""
        # The index tells which server has the prefix of a request. With a single server, there is no choice.
        needs_index = len(self._asked_replicas) > 1 and self._settings.caches_prefixes(self._device)
        return Prefixes() if needs_index else None

    # Memory

    @override
    @contextmanager
    def asleep(self, *, keep_weights: bool = True) -> Iterator[None]:
        """Puts the servers to sleep for the block, if so configured. They are woken when they are needed."""
        if not self._settings.sleep:
            yield
            return
        self._ranks.gather(None)  # every rank has stopped sampling
        # A server that several ranks share is put to sleep by the one rank that also loads its weights.
        replicas_of_this_rank = [replica for replica in self._replicas if replica.server.loads_weights]
        # vLLM's level 1 keeps the weights in the host's memory, and level 2 drops them.
        level = 1 if keep_weights else 2
        self._call_for_each(replicas_of_this_rank, lambda replica: replica.fall_asleep(level))
        # In the block the trainer uses the servers' memory. So a server that dies in the block must not be
        # started again before the block ends.
        for replica in self._replicas:
            replica.server.set_held(held=True)
        self._ranks.gather(None)  # every server sleeps, also those that other ranks have put to sleep
        try:
            yield
        finally:
            # The servers are woken when they are needed (`Replica.wake`).
            for replica in self._replicas:
                replica.server.set_held(held=False)

    @override
    def close(self) -> None:
        atexit.unregister(self.close)
        for replica in self._targets:
            replica.transfer.close()
        close_servers([replica.server for replica in self._targets])
        self._threads.shutdown(wait=False)
        with contextlib.suppress(RuntimeError):  # raised if the interpreter is ending
            self._client.close()


class _Results:
    """The results of one call of `VllmEngine.generate`. Requests get their indices here. They are cut into
    parts, which several servers may sample, and the completions of the parts are put together again."""

    def __init__(self, context_length: int, largest_part: int) -> None:
        self.completions: list[list[Completion]] = []
        """The completions of each request, by its index; empty until they are complete."""
        self._context_length, self._largest_part = context_length, largest_part
        self._parts: dict[int, dict[int, list[Completion]]] = {}
        """The completions of incomplete requests, by the request's index and the part's first sample."""

    def split_requests(self, new: Sequence[Request | Deferred]) -> tuple[list[RequestPart], list[Deferred]]:
        """Gives requests their indices, and cuts them into parts that are sent to one server each.

        A `Deferred` holds requests that can't be made yet, for example before an environment has replied.
        Each `Deferred` is returned as it is.
        """
        parts: list[RequestPart] = []
        deferred: list[Deferred] = []
        for request in new:
            if isinstance(request, Deferred):
                deferred.append(request)
                continue
            index = len(self.completions)
            check_request(index, request, self._context_length)
            parts += split_request(index, request, self._largest_part)
            self.completions.append([])
        return parts, deferred

    def add(self, part: RequestPart, completions: list[Completion]) -> list[Completion] | None:
        """Adds the completions of a part. Returns those of the whole request, in order, or None if other
        parts are missing.

        `part.first` is the number of the part's first sample within the request.
        """
        parts_of_request = self._parts.setdefault(part.index, {})
        parts_of_request[part.first] = completions
        if sum(map(len, parts_of_request.values())) < part.request.n:
            return None
        del self._parts[part.index]
        completions_in_order: list[Completion] = []
        for first_sample in sorted(parts_of_request):
            completions_in_order += parts_of_request[first_sample]
        self.completions[part.index] = completions_in_order
        return completions_in_order


Attempt = Literal["transfer", "file", "new server"]
"""The ways in which `VllmEngine.load` tries to give servers new weights: the configured transfer, the folder
of weights, which a server reads, or a new server that starts with this folder."""


@dataclass(frozen=True)
class AttemptResult:
    """The result of one attempt of `VllmEngine.load`, for this rank's servers."""

    problems: dict[Replica, str]
    """The servers that don't have the new weights, each with the reason."""
    gaps: list[Gap]
    """The gaps between log-probs of engine and trainer, of the servers whose canary found no problem."""
    sending_seconds: float
    """The seconds until all servers had got the weights; 0 if new servers are started."""
    part_seconds: dict[str, float]
    """The seconds of each further part, such as ``{"score_canary": 0.1, "reset_cache": 0.1}``."""


@dataclass
class Update:
    """One attempt to give a server new weights."""

    weights: Path
    """The folder of the weights."""
    delivery: Delivery | None
    """The weights' transfer; None if a new server was started with them, or if another rank sends them."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The seconds of each step after the transfer, such as ``{"reset_cache": 0.1, "sample_canary": 0.3}``."""
    sampled: list[tuple[TokenIds, Completion]] = field(default_factory=list)
    """The canary's prompts and the server's samples."""
    problem: str | None = None
    """The reason why the attempt failed; None if it didn't."""

    def pairs_by_key(self) -> dict[tuple[int, bytes, bytes], tuple[TokenIds, TokenIds]]:
        """Returns the pairs of prompt and sample.

        Their keys are equal for two servers if these sampled the same tokens for the same probe.
        """
        pairs = {}
        for probe_number, (prompt, completion) in enumerate(self.sampled):
            key = probe_number, prompt.tobytes(), completion.token_ids.tobytes()
            pairs[key] = prompt, completion.token_ids
        return pairs


class Replica:
    """One of an engine's servers, awake or asleep: started by this rank, by the first rank, or not by the
    run. Thread-safe.

    Attributes:
        number: The number of the server among the engine's, from 0.
        verified_probes: The canary's probes of the present weights; empty without a canary.
    """

    def __init__(
        self,
        number: int,
        server: Server,
        client: Client,
        settings: VllmSettings | PlainVllmSettings,
        method: TransferMethod,
    ) -> None:
        self.number, self.server = number, server
        self.transfer = TRANSFER_CLASSES[method](client, settings.sync_timeout, settings.tensor_parallel_size)
        self.verified_probes: list[Probe] = []
        self._client, self._timeout = client, settings.sync_timeout
        # Each start of a server has its own epoch. A restarted server is awake and has weights again.
        self._asleep_epoch: int | None = None
        """The epoch of the server that was put to sleep and hasn't been woken; None if none was."""
        self._epoch_without_weights: int | None = None
        """The epoch of the server whose weights were dropped; None if none were."""
        self._lock = threading.RLock()

    def fall_asleep(self, level: int) -> None:
        """Puts the server to sleep. If that fails, the server is restarted, and the new one is put to sleep.

        Args:
            level: vLLM's level: 1 keeps the weights in the host's memory, 2 drops them.
        """
        # Repeat until the running server is the one that was put to sleep. Each start of a server has its own
        # epoch. If the server is restarted meanwhile, it is awake again, and has another epoch.
        while (address := self.server.wait_until_ready()).epoch != self._asleep_epoch:
            try:
                self._client.post(address, f"/sleep?level={level}", timeout=self._timeout)
                self._asleep_epoch = address.epoch
                self._epoch_without_weights = address.epoch if level == 2 else None
            except ServerFailure as failure:
                self.server.report_failure(address, str(failure))

    def wake(self) -> Address | None:
        """Wakes the server if it sleeps, and returns its address. Returns None while the server is being
        started."""
        with self._lock:
            if (address := self.server.current_address()) is None:
                return None
            if address.epoch == self._epoch_without_weights:
                self.server.report_failure(address, "it was asked to sample after its weights were dropped")
                return None
            # Weights and cache are woken separately, as in a sync. Until the new weights have come, a sync
            # wakes only the weights (`prepare_delivery`), so that its peak of memory is lower.
            self._wake("weights")
            self._wake("kv_cache")
            return self.server.current_address()  # asked again, since waking the server may have failed

    def _wake(self, tag: str) -> None:
        """Wakes a part of a sleeping server: ``weights`` first, and ``kv_cache`` last."""
        if self._asleep_epoch is not None:
            address = self.server.wait_until_ready()
            # Each start of a server has its own epoch. With another epoch, the server was restarted
            # meanwhile, and is awake.
            if address.epoch == self._asleep_epoch:
                try:
                    self._client.post(address, f"/wake_up?tags={tag}", timeout=self._timeout)
                except ServerFailure as failure:
                    self.server.report_failure(address, str(failure))
        if tag == "kv_cache":  # the last part, so the whole server is awake
            self._asleep_epoch = None

    def prepare_delivery(self, by_transfer: bool) -> Delivery:
        """Prepares the server for new weights, and returns the delivery that will send them: by the server's
        transfer, or from a complete folder. If the preparation fails, the delivery has the problem."""
        transfer = self.transfer if by_transfer else FromFolder(self._client, self._timeout)
        try:
            with self._lock:
                self._wake("weights")
                address = self.server.begin_weights(self.server.wait_until_ready())
                if not by_transfer:
                    # The server may still wait for the rest of a transfer that failed.
                    self.transfer.give_up(address)
                return Delivery(transfer, address)
        except (EngineError, ServerFailure) as failure:
            return Delivery(transfer, address=None, problem=str(failure))

    def complete(self, update: Update, version: int, canary: Canary | None, context_length: int) -> None:
        """Completes an update: drops the server's cache of the old weights, and samples after the canary's
        prompts. The caller verifies the new weights by these samples. Does nothing for a server whose weights
        another rank loads."""
        if not self.server.loads_weights:
            return
        delivery = update.delivery
        if delivery is not None and delivery.problem is not None:
            update.problem = delivery.problem
            return
        try:
            started = time.monotonic()
            with self._lock:
                # Without a delivery, the server was just started with the weights: it is awake, and has
                # cached nothing.
                if delivery is not None:
                    self._wake("kv_cache")
                address = self.server.wait_until_ready()
                if delivery is not None:
                    # The server refuses a request with the name of weights that it doesn't have. The
                    # server gets the new name in `end_weights`, so this request has no name.
                    drop_cache(self._client, replace(address, weights=""), self._timeout)
                    address = self.server.end_weights(address, update.weights)
                    self._epoch_without_weights = None
                    update.seconds["reset_cache"] = time.monotonic() - started
            if canary is not None:
                started = time.monotonic()
                update.sampled = self._sample_probes(address, canary.requests(context_length), version)
                update.seconds["sample_canary"] = time.monotonic() - started
        except (ServerFailure, EngineError) as failure:
            update.problem = str(failure)

    def _sample_probes(
        self, address: Address, requests: Sequence[Request], version: int
    ) -> list[tuple[TokenIds, Completion]]:
        """Samples a canary's requests on the server at `address`. Returns pairs of prompt and sample, by
        which the server's weights are verified."""
        answers = {}
        with RequestScheduler(
            self._client,
            version,
            most_parts=PROBE_CONCURRENCY,
            most_samples=PROBE_CONCURRENCY,
            timeout=self._timeout,
        ) as scheduler:
            scheduler.open({0: address})
            # Each request asks for one sample, so it is sent as a single part.
            scheduler.add(
                [RequestPart(index, first=0, n=1, request=request) for index, request in enumerate(requests)]
            )
            while scheduler.outstanding:
                event = scheduler.next()
                if isinstance(event, Lost):
                    raise ServerFailure(event.reason)
                if isinstance(event, Answered):
                    answers[event.part.index] = event.completions[0]
        return [(request.prompt_ids, answers[index]) for index, request in enumerate(requests)]
