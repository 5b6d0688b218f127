"""The ways between GPUs, on a CUDA that is faked thread by thread: each thread begins on the first GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from treetune.engine import cuda_transfers
from treetune.engine.base import Chunk
from treetune.engine.client import Address
from treetune.engine.cuda_transfers import CudaIpc, Nccl
from treetune.engine.transfer import Delivery, WeightTransfer, send_all
from treetune.exceptions import ServerFailure

from .fake_cuda import FakeCuda, on_gpu

HERE = Address("http://127.0.0.1:1", 1, "key")
TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.arange(4, dtype=torch.float32).view(2, 2).t(),
}
UPDATE = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]


class Recorder:
    """A client that keeps what the server is asked, and answers as it is told to."""

    def __init__(self, cuda: FakeCuda | None = None, fails_at: str = "") -> None:
        self.asked: list[tuple[str, Any]] = []
        self.fails_at, self.cuda = fails_at, cuda

    def post(self, address: Address, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        if path == "/update_weights" and self.cuda is not None:
            self.cuda.done.append(("told", self.cuda.current()))
        self.asked.append((path, body))
        if path == self.fails_at:
            raise ServerFailure(f"{path}: HTTP 500")
        return {}

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


def chunk(gpu: int = 0, tensors: Mapping[str, torch.Tensor] = TENSORS) -> Chunk:
    return Chunk(Path("nowhere"), 0, True, "", {name: on_gpu(one, gpu) for name, one in tensors.items()})


def sent(transfer: WeightTransfer, *chunks: Chunk) -> str | None:
    """Sends them as a sync does, from threads of its own; returns the problem."""
    delivery = Delivery(transfer, HERE)
    send_all(chunks, [delivery], Path("nowhere"))
    return delivery.problem


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor] = TENSORS) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name].as_subclass(torch.Tensor), weight)


@pytest.fixture(params=[0, 3], ids=["rank 0", "rank 3"])
def rank(request: pytest.FixtureRequest) -> int:
    """Trains on the GPU of its number."""
    return int(request.param)


@pytest.fixture
def cuda(rank: int, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The main thread is on the rank's GPU."""
    fake = FakeCuda(monkeypatch)
    fake.set(rank)
    return fake


def test_what_comes_by_ipc_is_what_the_worker_unpacks(
    cuda: FakeCuda, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCWeightTransferInitInfo,
        IPCWeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    client = Recorder(cuda)
    transfer = CudaIpc(client, 1.0)  # type: ignore[arg-type]
    buffers: list[torch.Tensor] = []
    buffer_of = transfer._buffer_of
    monkeypatch.setattr(
        transfer, "_buffer_of", lambda *asked: buffers.append(buffer_of(*asked)) or buffers[-1]
    )
    larger = {"c": torch.arange(64, dtype=torch.float32)}
    assert sent(transfer, chunk(rank), chunk(rank, larger)) is None
    assert client.paths() == [*UPDATE[:3], "/update_weights", "/finish_weight_update"]
    assert cuda.done[:4] == [("synchronize", rank), ("told", rank)] * 2, "the copy is done when it is told of"
    assert cuda.done[4][0] == "ipc_collect" and transfer._buffer is None
    bodies = [body for _, body in client.asked]
    assert IPCWeightTransferInitInfo(**bodies[0]["init_info"]).packed
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    for body, buffer, tensors in zip(bodies[2:4], buffers, (TENSORS, larger), strict=True):
        told = IPCWeightTransferUpdateInfo(**body["update_info"])
        assert told.ipc_handles == {f"GPU-{rank}": (buffer.numel(), rank)}
        assert told.tensor_sizes is not None
        types = [getattr(torch, name) for name in told.dtype_names]
        assert_same(dict(unpack_tensor(buffer, told.names, told.shapes, types, told.tensor_sizes)), tensors)
    assert sent(transfer, chunk(rank)) is None
    assert client.paths()[5:] == UPDATE[1:], "it is met once"


class Communicator:
    """In the place of vLLM's, whose rules about devices it has."""

    made: list[Communicator]

    def __init__(self, group: Any, device: int) -> None:
        self.device = torch.device("cuda", device)
        self.packed: list[torch.Tensor] = []
        self.given_up = False
        self.made.append(self)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert tensor.device == self.device
        self.packed.append(tensor)

    def destroy(self) -> None:
        self.given_up = True


@pytest.fixture
def places(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Where the groups meet. All else of vLLM's own trainer's side is as it is."""
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    found: list[Any] = []
    Communicator.made = []
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Communicator)
    monkeypatch.setattr(utils.StatelessProcessGroup, "create", lambda **place: found.append(place))
    packed_tensor._get_streams.cache_clear()
    yield found
    packed_tensor._get_streams.cache_clear()


def test_nccl_meets_and_sends_on_the_ranks_own_gpu(cuda: FakeCuda, rank: int, places: list[Any]) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    client = Recorder()
    transfer = Nccl(client, 5.0, 2)  # type: ignore[arg-type]
    assert sent(transfer, chunk(rank)) is None
    assert client.paths() == UPDATE
    (group,) = Communicator.made
    assert group.device.index == rank
    bodies = [body for _, body in client.asked]
    told = NCCLWeightTransferInitInfo(**bodies[0]["init_info"])
    assert (told.rank_offset, told.world_size, told.packed) == (1, 3, True)
    assert places == [{"host": told.master_address, "port": told.master_port, "rank": 0, "world_size": 3}]
    update = NCCLWeightTransferUpdateInfo(**bodies[2]["update_info"])
    assert update.shapes == [[2, 3], [2, 2]]
    types = [getattr(torch, name) for name in update.dtype_names]
    sizes = [weight.nbytes for weight in TENSORS.values()]
    assert_same(dict(unpack_tensor(group.packed[0], update.names, update.shapes, types, sizes)))
    assert ("synchronize", rank) in cuda.done
    assert {gpu for _, gpu in cuda.done} == {rank}


@pytest.mark.parametrize("at", ["/init_weight_transfer_engine", "/update_weights"])
def test_a_group_whose_server_fails_is_given_up_and_made_anew(
    at: str, cuda: FakeCuda, rank: int, places: list[Any]
) -> None:
    client = Recorder(fails_at=at)
    transfer = Nccl(client, 5.0)  # type: ignore[arg-type]
    assert sent(transfer, chunk(rank)) == f"{at}: HTTP 500"
    transfer.give_up(HERE)
    assert client.asked[-1] == ("/collective_rpc", {"method": "give_up_weight_update"})
    transfer.give_up(HERE)
    assert client.paths().count("/collective_rpc") == 1, "what was given up is over"
    assert all(group.given_up for group in Communicator.made[:1])
    client.fails_at = ""
    client.asked.clear()
    assert sent(transfer, chunk(rank)) is None
    assert client.paths() == UPDATE, "it is met anew"


@pytest.mark.parametrize("fault", ["raises", "is late"])
def test_this_sides_part_of_a_broadcast_has_a_deadline(fault: str, cuda: FakeCuda) -> None:
    transfer = Nccl(Recorder(), 0.2)  # type: ignore[arg-type]
    go_on = threading.Event()

    def work() -> None:
        if fault == "raises":
            raise RuntimeError("unhandled system error")
        go_on.wait(20)

    with pytest.raises(ServerFailure, match=r"unhandled system error|NCCL didn't finish"):
        transfer._post_while_working(work, HERE, "/update_weights", {})
    go_on.set()


def test_a_weight_larger_than_the_buffer_is_taken_by_both_sides() -> None:
    """vLLM's packing breaks a buffer off behind the weight that overflows it, on both sides alike."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    items = iter([("large", torch.zeros(64)), ("small", torch.zeros(2))])
    first = pack_tensors(items, lambda item: item[1], 16)
    assert first is not None and first.names == ["large"]
    assert cuda_transfers.BUFFERS > 1
