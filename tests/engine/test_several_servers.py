"""Engines with several servers, and several ranks that share the server of the first.

Promises that these tests hold:

* Any number of servers gives the same samples, and each request is sampled once.
* When one server is lost, the others go on, and it gets requests again when it is back.
* New weights, sleep and failures reach every server.
* A continuation goes to the server that has its prefix in its cache.
* Ranks that share a server load weights together, fail together, and can each have it replaced.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import pytest

from tests.support.stubs import Stub, answers, below, request, until
from treetune.engine import server
from treetune.engine.base import Rendezvous
from treetune.engine.client import Address
from treetune.engine.engine import VllmEngine
from treetune.engine.journal import JournaledEngine
from treetune.engine.requests import CONTINUATION_PRIORITY, Completion, Request, SamplingParams
from treetune.engine.sampling import BLOCK_TOKENS, Prefixes
from treetune.engine.server import OwnServer, RemoteServer
from treetune.engine.settings import VllmSettings
from treetune.exceptions import EngineError
from treetune.store.timeline import TIMELINE_SUFFIX, Span, read_timeline


def servers() -> list[int]:
    """Finds the stub servers among the descendants of this process: each of them has one child."""
    return [pid for pid in below(os.getpid()) if len(below(pid)) == 1]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_any_number_of_servers_gives_the_same_answers(stub: Stub, replicas: int) -> None:
    engine = stub.start(replicas=replicas)
    engine.wait_ready()
    assert engine.generate([request(i) for i in range(24)]) == [answers(i) for i in range(24)]
    assert sorted(body["seed"] for body in stub.sample_requests()) == list(range(24)), (
        "nothing is asked twice"
    )
    assert set(stub.servers_of_requests()) == set(range(replicas)), "every server has work"


def test_a_server_killed_in_mid_wave_is_replaced_while_the_others_go_on(stub: Stub, tmp_path: Path) -> None:
    before = set(servers())
    stub.faults.mkdir()
    engine = stub.start(replicas=2, max_concurrency=2)
    engine.wait_ready()
    victim, _ = sorted(set(servers()) - before)
    stub.slow_down(0.05)
    reported: list[int] = []

    def on_result(index: int, completions: list[Completion]) -> None:
        reported.append(index)
        if len(reported) == 10:
            os.kill(victim, signal.SIGKILL)

    journaled = JournaledEngine(engine, tmp_path / "journal.jsonl")
    asked = [request(i) for i in range(60)]
    assert journaled.generate(asked, on_result) == [answers(i) for i in range(60)]
    assert sorted(reported) == list(range(60)), "each answer is reported once"
    seeds = [body["seed"] for body in stub.sample_requests()]
    seeds_asked_twice = {seed for seed in seeds if seeds.count(seed) > 1}
    # The killed server had at most `max_concurrency` requests, and those with an answer are not asked again.
    assert len(seeds_asked_twice) <= 2
    assert not seeds_asked_twice & set(reported[:10])
    assert JournaledEngine(engine, tmp_path / "journal.jsonl").generate(asked) == journaled.generate(asked)
    assert len(stub.sample_requests()) == len(seeds), "what the journal has is not asked for"
    assert until(lambda: engine.restarts == 1)


def test_a_server_that_was_lost_takes_requests_again_when_it_is_back(stub: Stub) -> None:
    engine = stub.start(replicas=2)
    engine.wait_ready()
    stub.order("forgets-a-logprob")
    assert engine.generate([request(1), request(2)]) == [answers(1), answers(2)]
    engine.wait_ready()
    assert engine.restarts == 1
    stub.forget_requests()
    assert engine.generate([request(i) for i in range(8)]) == [answers(i) for i in range(8)]
    assert set(stub.servers_of_requests()) == {0, 1}


def test_all_servers_have_new_weights_and_one_that_fails_is_replaced_alone(stub: Stub) -> None:
    engine = stub.start(replicas=2)
    engine.wait_ready()
    stub.order("reload-lies")
    report = engine.load(stub.weights(1), 1, stub.canary(1))
    assert (report.canary_gap, report.restarts) == (0.0, 1)
    stub.forget_requests()
    assert engine.generate([request(i) for i in range(8)]) == [answers(i, version=1) for i in range(8)]
    assert set(stub.servers_of_requests()) == {0, 1}
    report = engine.load(stub.weights(2), 2, stub.canary(2))
    assert (report.canary_gap, report.restarts) == (0.0, 0)


def test_all_servers_sleep_and_wake(stub: Stub) -> None:
    engine = stub.start(replicas=2, sleep=True)
    with engine.asleep():
        assert stub.paths() == ["/sleep?level=1"] * 2
    assert engine.generate([request(1)]) == [answers(1)]
    assert sorted(stub.paths()) == ["/wake_up?tags=kv_cache"] * 2 + ["/wake_up?tags=weights"] * 2


def test_a_server_that_cannot_be_replaced_ends_the_sampling(stub: Stub) -> None:
    engine = stub.start(replicas=2, max_restarts=0)
    engine.wait_ready()
    stub.slow_down(0.1)
    stub.order("forgets-a-logprob")
    with pytest.raises(EngineError, match="max_restarts is 0"):
        engine.generate([request(i) for i in range(400)])


def test_continuations_go_to_the_server_that_has_the_answer(stub: Stub) -> None:
    engine = stub.start(replicas=2, prefix_caching=True)
    engine.wait_ready()
    sampling = SamplingParams(3)

    def answer(i: int) -> Request:
        return Request(tuple(range(i, i + BLOCK_TOKENS)), i, 1, sampling)

    def on_result(index: int, completions: list[Completion]) -> list[Request]:
        if index >= 8:
            return []
        prompt = np.concatenate([answer(index).prompt_ids, completions[0].token_ids[:1]])
        return [Request(prompt, 100 * (k + 1) + index, 1, sampling, CONTINUATION_PRIORITY) for k in range(3)]

    engine.generate([answer(i) for i in range(8)], on_result)
    seeds = [body["seed"] for body in stub.sample_requests()]
    server_by_seed = dict(zip(seeds, stub.servers_of_requests(), strict=True))
    assert len(server_by_seed) == 32
    for i in range(8):
        for k in range(3):
            assert server_by_seed[100 * (k + 1) + i] == server_by_seed[i]
    assert {server_by_seed[i] for i in range(8)} == {0, 1}


def test_the_server_of_a_prompt_is_the_one_that_computed_its_longest_prefix() -> None:
    prompt = np.arange(4 * BLOCK_TOKENS, dtype=np.int32)
    prefixes = Prefixes()
    assert prefixes.find(prompt) is None
    prefixes.add(0, prompt[: 2 * BLOCK_TOKENS])
    other_prompt = prompt.copy()
    other_prompt[BLOCK_TOKENS:] += 1
    prefixes.add(1, other_prompt[: 2 * BLOCK_TOKENS])
    assert prefixes.find(prompt) == 0 and prefixes.find(other_prompt) == 1
    assert prefixes.find(prompt[: BLOCK_TOKENS - 1]) is None, (
        "a prefix shorter than a block is not remembered"
    )
    prefixes.forget(0)
    assert prefixes.find(prompt) == 1, "the first block is the same"


def test_the_number_of_remembered_prefixes_is_bounded() -> None:
    prefixes = Prefixes(most_blocks=4)
    texts = [np.full(3 * BLOCK_TOKENS, number, np.int32) for number in range(20)]
    for text in texts:
        prefixes.add(0, text)
    assert [prefixes.find(text) for text in texts[-2:]] == [0, 0]
    assert sum(prefixes.find(text) is not None for text in texts) <= 2


# Several ranks

T = TypeVar("T")
DEADLINE_S = 60.0


class TwoRanks:
    """The engines of two ranks, in two threads instead of two processes; rank 0 has the server."""

    def __init__(self, stub: Stub, **settings: object) -> None:
        self.stub = stub
        barrier = threading.Barrier(2, timeout=DEADLINE_S)

        def meet(name: str) -> None:
            barrier.wait()

        launches = [stub.launch(Rendezvous(rank, 2, stub.folder, meet), **settings) for rank in range(2)]  # type: ignore[arg-type]
        address_file = stub.folder / "server.json"
        servers = (
            OwnServer(launches[0], stub.log, address_file),
            RemoteServer(address_file, stub.log, launches[0].settings),
        )
        self.engines = [
            VllmEngine(launch.settings, launch.run, [server])
            for launch, server in zip(launches, servers, strict=True)
        ]
        self.pool = ThreadPoolExecutor(2)

    def both(self, work: Callable[[int, VllmEngine], T]) -> list[T]:
        futures = [self.pool.submit(work, rank, engine) for rank, engine in enumerate(self.engines)]
        return [future.result(DEADLINE_S) for future in futures]

    def close(self) -> None:
        for engine in reversed(self.engines):
            engine.close()
        self.pool.shutdown()


@pytest.fixture
def ranks(stub: Stub) -> Iterator[TwoRanks]:
    two_ranks = TwoRanks(stub)
    yield two_ranks
    two_ranks.close()


@pytest.mark.parametrize("fault", [None, "reload-lies"])
def test_every_rank_samples_from_the_one_server_and_from_new_weights_after_a_load(
    ranks: TwoRanks, fault: str | None
) -> None:
    def sample(rank: int, engine: VllmEngine) -> list[list[Completion]]:
        return engine.generate([request(rank)])

    assert ranks.both(sample) == [[answers(0)], [answers(1)]]
    if fault is not None:
        ranks.stub.order(fault)
    folder, canary = ranks.stub.weights(1), ranks.stub.canary(1)
    reports = ranks.both(lambda rank, engine: engine.load(folder, 1, canary))
    assert sum(report.restarts for report in reports) == (fault is not None)
    assert ranks.both(sample) == [[answers(0, version=1)], [answers(1, version=1)]]


def test_a_sync_that_fails_for_good_fails_on_every_rank(ranks: TwoRanks) -> None:
    missing, canary = ranks.stub.folder / "missing", ranks.stub.canary(1)

    def load(rank: int, engine: VllmEngine) -> str:
        with pytest.raises(EngineError) as caught:
            engine.load(missing, 1, canary)
        return str(caught.value)

    assert all("could not be loaded into the engine" in message for message in ranks.both(load))


def test_a_rank_whose_request_fails_has_the_server_replaced_though_the_first_is_idle(ranks: TwoRanks) -> None:
    ranks.both(lambda rank, engine: engine.wait_ready())
    ranks.stub.order("forgets-a-logprob")
    assert ranks.engines[1].generate([request(4)]) == [answers(4)]
    assert ranks.engines[0].generate([request(4)]) == [answers(4)]
    assert ranks.engines[0].restarts == 1


def test_other_ranks_get_the_error_of_the_first_ranks_server(stub: Stub) -> None:
    stub.order("never-starts")
    ranks = TwoRanks(stub)
    try:
        with pytest.raises(EngineError, match="out of memory"):
            ranks.engines[1].wait_ready()
    finally:
        ranks.close()


@pytest.mark.parametrize("event", ["failed", "let go", "succeeded"])
def test_a_server_that_was_away_before_has_its_whole_start_time_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """A rank misses the server at the end of one wave, and again at the next, after hours of training."""
    clock = SimpleNamespace(monotonic=lambda: clock.time, sleep=lambda seconds: None, time=1.0)
    monkeypatch.setattr(server, "time", clock)
    remote = RemoteServer(tmp_path / "server.json", tmp_path / "log", VllmSettings(start_timeout=20.0))
    assert remote.current_address() is None
    clock.time += 10_000.0
    if event == "failed":
        remote.report_failure(Address("http://server", 1, "key"), "it hangs")
    elif event == "let go":
        remote.set_held(False)
    else:
        remote.report_success()
    assert remote.current_address() is None
    clock.time += 10_000.0
    with pytest.raises(EngineError, match="did not start in time"):
        remote.current_address()


def test_a_rank_that_begins_to_sample_waits_its_whole_time_for_the_server(stub: Stub) -> None:
    ranks = TwoRanks(stub)
    try:
        (replica,) = ranks.engines[1]._replicas
        assert isinstance(replica.server, RemoteServer)
        replica.server._waits_since = time.monotonic() - 10_000.0
        assert ranks.engines[1].generate([request(4)]) == [answers(4)]  # the server is just starting
    finally:
        ranks.close()


def test_ranks_exchange_values_in_rank_order_meeting_after_meeting(tmp_path: Path) -> None:
    barrier = threading.Barrier(3, timeout=DEADLINE_S)

    def meet(rank: int) -> list[list[int]]:
        files = Rendezvous(rank, 3, tmp_path, lambda name: barrier.wait() and None)
        return [files.gather(100 * meeting + rank) for meeting in range(50)]

    with ThreadPoolExecutor(3) as pool:
        for gathered in pool.map(meet, range(3)):
            assert gathered == [[100 * meeting + rank for rank in range(3)] for meeting in range(50)]
    file_names = sorted(path.name for path in tmp_path.iterdir())
    assert file_names == [f"engine-meeting-50-{rank}.json" for rank in range(3)], (
        "each meeting has files of its own, and only the last ones are left"
    )


def test_the_timeline_has_the_pid_of_the_server_and_not_of_its_guard_or_the_run(ranks: TwoRanks) -> None:
    ranks.both(lambda rank, engine: engine.wait_ready())

    def find_answering_spans() -> list[Span]:
        [process] = read_timeline(ranks.stub.log.with_suffix(TIMELINE_SUFFIX))
        return [span for span in process.spans if span.name == "answers"]

    assert until(lambda: bool(find_answering_spans()))  # the span begins after the address is published
    [answering] = find_answering_spans()
    command = Path(f"/proc/{answering.about['pid']}/cmdline").read_bytes()
    assert b"stub_server" in command and b"guard.py" not in command
