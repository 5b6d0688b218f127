"""New weights on their way into a live server: the protocol, and what breaks it, on a stand-in for the
server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treetune.inference.base import TRANSFERS, Chunk, EngineError
from treetune.inference.client import Address
from treetune.inference.settings import VllmSettings
from treetune_cluster import runs as runs

from .stubs import Stub, request
from .test_engine_recovers import expected


def chosen(
    setting: str = "auto", device: str = "cpu", machines: tuple[str, ...] = ("a",), **changes: Any
) -> str:
    """The transfer for settings, ranks and devices."""
    adapters = changes.pop("adapters", False)
    settings = VllmSettings(weight_transfer=setting, **changes)  # type: ignore[arg-type]
    return settings.transfer_method(device=device, machines=machines, adapters=adapters)[0]


def test_an_update_begins_takes_chunks_in_their_order_and_ends(stub: Stub) -> None:
    engine = stub.start("shared_memory")
    engine.wait_ready()
    for version in (1, 2):
        stub.paths()
        report = engine.load(
            stub.folder / f"{version:04d}", version, stub.canary(version), stub.chunks(version)
        )
        assert (report.canary_gap, report.restarts) == (0.0, 0)
        update = ["/start_weight_update", *3 * ["/update_weights"], "/finish_weight_update"]
        first = ["/init_weight_transfer_engine"] if version == 1 else []
        assert stub.paths() == [*first, *update, "/reset_prefix_cache"]
    assert engine.generate([request(5, n=1)]) == [[expected(5, 0, version=2)]]


@pytest.mark.parametrize(
    "fault",
    [
        "start-fails",
        "update-fails",
        "finish-fails",
        "dies-in-an-update",
        "hangs-in-an-update",
        "cache-is-held",
    ],
)
def test_a_server_that_fails_an_update_is_replaced_by_one_with_whole_weights(stub: Stub, fault: str) -> None:
    engine = stub.start("shared_memory", sync_timeout=1.0)
    engine.wait_ready()
    stub.order(fault)
    report = engine.load(stub.folder / "0001", 1, stub.canary(1), stub.chunks(1))
    assert (report.canary_gap, report.restarts) == (0.0, 1)
    assert engine.generate([request(5, n=1)]) == [[expected(5, 0, version=1)]]
    report = engine.load(stub.folder / "0002", 2, stub.canary(2), stub.chunks(2))
    assert report.restarts == 0, "the new server is met and takes chunks"
    assert engine.generate([request(5, n=1)]) == [[expected(5, 0, version=2)]]


def test_chunks_are_gone_through_to_their_end_whatever_the_server_does(stub: Stub) -> None:
    """Making them is collective: other ranks would wait."""
    engine = stub.start("shared_memory")
    engine.wait_ready()
    stub.order("start-fails")
    made: list[int] = []

    def chunks() -> Iterator[Chunk]:
        for chunk in stub.chunks(1):
            made.append(chunk.number)
            yield chunk

    engine.load(stub.folder / "0001", 1, stub.canary(1), chunks())
    assert made == [0, 1, 2]


def test_a_way_that_runs_out_of_memory_on_this_side_is_a_failure_like_others(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises: the other ranks wait in the middle of the chunks."""
    engine = stub.start("shared_memory")
    engine.wait_ready()
    (replica,) = engine._replicas
    problems: list[str] = []
    start_anew = replica.server.start_anew

    def send(address: Address, chunk: Chunk) -> None:
        raise RuntimeError("out of memory")

    def started_anew(weights: Path, reason: str) -> None:
        problems.append(reason)
        start_anew(weights, reason)

    monkeypatch.setattr(replica.transfer, "send", send)
    monkeypatch.setattr(replica.server, "start_anew", started_anew)
    made: list[int] = []

    def chunks() -> Iterator[Chunk]:
        for chunk in stub.chunks(1):
            made.append(chunk.number)
            yield chunk

    report = engine.load(stub.folder / "0001", 1, stub.canary(1), chunks())
    assert made == [0, 1, 2]
    assert (report.canary_gap, report.restarts) == (0.0, 1)
    assert problems == ["RuntimeError: out of memory"]


def test_nobody_samples_from_the_weights_of_two_versions(stub: Stub) -> None:
    """What fails is the trainer: the server has a chunk of the new weights and not the others."""
    engine = stub.start("shared_memory")
    engine.wait_ready()

    def chunks() -> Iterator[Chunk]:
        yield next(stub.chunks(1))
        raise OSError("no room for the second chunk")

    with pytest.raises(OSError, match="no room"):
        engine.load(stub.folder / "0001", 1, stub.canary(1), chunks())
    assert engine.generate([request(5, n=1)]) == [[expected(5, 0, version=0)]]
    assert (engine.restarts, engine.version) == (1, 0)
    engine.load(stub.folder / "0002", 2, stub.canary(2), stub.chunks(2))
    assert engine.generate([request(5, n=1)]) == [[expected(5, 0, version=2)]]


def test_a_second_update_cannot_begin_while_one_is_open(stub: Stub) -> None:
    engine = stub.start("shared_memory")
    engine.load(stub.folder / "0001", 1, stub.canary(1), stub.chunks(1))
    (replica,) = engine._replicas
    engine._client.post(replica.server.ready(), "/start_weight_update", timeout=5.0)
    report = engine.load(stub.folder / "0002", 2, stub.canary(2), stub.chunks(2))
    assert (report.canary_gap, report.restarts) == (0.0, 1)
    assert engine.generate([request(5, n=1)]) == [[expected(5, 0, version=2)]]


def test_of_several_servers_all_are_given_the_weights_and_the_one_that_fails_is_replaced(stub: Stub) -> None:
    engine = stub.start("shared_memory", replicas=2)
    engine.wait_ready()
    stub.order("dies-in-an-update")
    report = engine.load(stub.folder / "0001", 1, stub.canary(1), stub.chunks(1))
    # One, where the other server is quick enough to answer within the stand-ins' short deadlines.
    assert report.canary_gap == 0.0 and report.restarts in (1, 2)
    found = engine.generate([request(seed, n=1) for seed in range(8)])
    assert found == [[expected(seed, 0, version=1)] for seed in range(8)]


def test_weights_that_no_server_takes_end_in_an_error(stub: Stub) -> None:
    engine = stub.start("shared_memory")
    with pytest.raises(EngineError, match="could not be brought into the engine"):
        engine.load(stub.folder / "0001", 1, stub.canary(2), stub.chunks(1))


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, "file"),
        ({"machines": ("a", "a")}, "file"),
        ({"machines": ("a", "b"), "servers": "per_rank"}, "file"),
        ({"adapters": True}, "file"),
        ({"device": "cuda"}, "cuda_ipc"),
        ({"device": "cuda", "machines": ("a", "a")}, "file"),
        ({"device": "cuda", "machines": ("a", "a"), "servers": "per_rank"}, "cuda_ipc"),
        ({"device": "cuda", "machines": ("a", "b"), "servers": "per_rank"}, "cuda_ipc"),
        ({"device": "cuda", "tensor_parallel_size": 2}, "file"),
        ({"device": "cuda", "replicas": 2}, "file"),
        ({"device": "cuda", "machines": ("a", "a"), "servers": "per_rank", "replicas": 2}, "file"),
        ({"device": "cuda", "devices": (1, 2), "tensor_parallel_size": 2}, "nccl"),
        ({"device": "cuda", "devices": (1, 2), "replicas": 2}, "nccl"),
        ({"device": "cuda", "devices": (0,)}, "file"),
        ({"device": "cuda", "devices": (1, 2), "machines": ("a", "a"), "replicas": 2}, "file"),
        ({"device": "cuda", "devices": (1,), "machines": ("a", "b"), "servers": "per_rank"}, "nccl"),
    ],
)
def test_the_way_is_chosen_by_where_trainer_and_engine_live(changes: dict, way: str) -> None:
    assert chosen(**changes) == way


@pytest.mark.parametrize(
    ("setting", "changes", "remedy"),
    [
        ("cuda_ipc", {}, "choose 'shared_memory'"),
        ("nccl", {}, "choose 'shared_memory'"),
        ("nccl", {"device": "cuda"}, "name its devices"),
        ("nccl", {"device": "cuda", "devices": (0, 1)}, "name others"),
        ("cuda_ipc", {"device": "cuda", "devices": (1,)}, "leave devices out"),
        ("cuda_ipc", {"device": "cuda", "replicas": 2}, "set replicas"),
        ("shared_memory", {"machines": ("a", "b"), "servers": "per_rank"}, "choose 'file'"),
        ("shared_memory", {"adapters": True}, "'merged'"),
    ],
)
def test_a_way_that_can_not_be_is_refused_with_what_would_be_right(
    setting: str, changes: dict, remedy: str
) -> None:
    with pytest.raises(ValueError, match=f"weight_transfer is '{setting}'.*{remedy}"):
        chosen(setting, **changes)


def test_without_the_package_that_brings_them_there_are_no_transfers_between_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TRANSFERS, "_functions", {})
    assert chosen(device="cuda") == chosen(device="cuda", devices=(1,)) == "file"
    with pytest.raises(ValueError, match="weight_transfer is 'cuda_ipc', and no package is installed"):
        chosen("cuda_ipc", device="cuda")
