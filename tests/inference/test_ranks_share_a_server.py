"""Several ranks, one server: the others are clients of the first rank's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest

from treetune.inference import server
from treetune.inference.base import Completion, EngineError, Rendezvous
from treetune.inference.client import Address
from treetune.inference.engine import VllmEngine
from treetune.inference.server import OwnServer, RemoteServer
from treetune.inference.settings import VllmSettings
from treetune.store.timeline import SUFFIX, read_timeline

from .stubs import Stub, answers, request

T = TypeVar("T")
DEADLINE_S = 60.0


class TwoRanks:
    """Two engines in two threads, as if they were processes."""

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
    found = TwoRanks(stub)
    yield found
    found.close()


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

    assert all("could not be brought into the engine" in message for message in ranks.both(load))


def test_a_rank_whose_request_fails_has_the_server_replaced_though_the_first_is_idle(ranks: TwoRanks) -> None:
    ranks.both(lambda rank, engine: engine.wait_ready())
    ranks.stub.order("forgets-a-logprob")
    assert ranks.engines[1].generate([request(4)]) == [answers(4)]
    assert ranks.engines[0].generate([request(4)]) == [answers(4)]
    assert ranks.engines[0].restarts == 1


def test_other_ranks_hear_why_the_first_has_no_server(stub: Stub) -> None:
    stub.order("never-starts")
    found = TwoRanks(stub)
    try:
        with pytest.raises(EngineError, match="out of memory"):
            found.engines[1].wait_ready()
    finally:
        found.close()


@pytest.mark.parametrize("event", ["failed", "let go", "succeeded"])
def test_a_server_that_was_missed_before_has_its_whole_time_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """It was missed at the end of one wave, hours of training follow, and it is missed at the next."""
    clock = SimpleNamespace(monotonic=lambda: clock.time, sleep=lambda seconds: None, time=1.0)
    monkeypatch.setattr(server, "time", clock)
    remote = RemoteServer(tmp_path / "server.json", tmp_path / "log", VllmSettings(start_timeout=20.0))
    assert remote.now() is None
    clock.time += 10_000.0
    if event == "failed":
        remote.failed(Address("http://server", 1, "key"), "it hangs")
    elif event == "let go":
        remote.hold(False)
    else:
        remote.succeeded()
    assert remote.now() is None
    clock.time += 10_000.0
    with pytest.raises(EngineError, match="was not there in time"):
        remote.now()


def test_who_begins_to_sample_waits_for_a_server_that_was_missed_before(stub: Stub) -> None:
    found = TwoRanks(stub)
    try:
        (replica,) = found.engines[1]._replicas
        assert isinstance(replica.server, RemoteServer)
        replica.server._missed_since = time.monotonic() - 10_000.0
        assert found.engines[1].generate([request(4)]) == [answers(4)]  # the server is just starting
    finally:
        found.close()


def test_ranks_exchange_values_in_rank_order_meeting_after_meeting(tmp_path: Path) -> None:
    barrier = threading.Barrier(3, timeout=DEADLINE_S)

    def meet(rank: int) -> list[list[int]]:
        files = Rendezvous(rank, 3, tmp_path, lambda name: barrier.wait() and None)
        return [files.gather(100 * meeting + rank) for meeting in range(50)]

    with ThreadPoolExecutor(3) as pool:
        for seen in pool.map(meet, range(3)):
            assert seen == [[100 * meeting + rank for rank in range(3)] for meeting in range(50)]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"engine-meeting-50-{rank}.json" for rank in range(3)], "no name is used twice, none kept"


def test_the_timeline_names_the_server_and_neither_its_guard_nor_the_run(ranks: TwoRanks) -> None:
    ranks.both(lambda rank, engine: engine.wait_ready())
    [process] = read_timeline(ranks.stub.log.with_suffix(SUFFIX))
    [answers] = [one for one in process.spans if one.name == "answers"]
    command = Path(f"/proc/{answers.about['pid']}/cmdline").read_bytes()
    assert b"stub_server" in command and b"guard.py" not in command
