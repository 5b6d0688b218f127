"""The weight transfers between GPUs (CUDA IPC and NCCL), on a fake CUDA.

As in CUDA, each thread begins on the first GPU. Promises that these tests hold:

* vLLM's own classes read the messages, and unpack exactly the weights that were sent.
* All work happens on the GPU of the rank.
* A transfer that fails is given up and meets its server again; every wait has a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.fake_cuda import FakeCuda, on_gpu
from treetune.engine import cuda_transfers
from treetune.engine.base import Chunk
from treetune.engine.client import Address
from treetune.engine.cuda_transfers import CudaIpc, Nccl
from treetune.engine.transfer import Delivery, WeightTransfer, send_all
from treetune.exceptions import ServerFailure

HERE = Address("http://127.0.0.1:1", 1, "key")
TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.arange(4, dtype=torch.float32).view(2, 2).t(),
}
UPDATE = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]


class Recorder:
    """A client that records its requests, and fails at the path `fails_at`."""

    def __init__(self, cuda: FakeCuda | None = None, fails_at: str = "") -> None:
        self.requests: list[tuple[str, Any]] = []
        self.fails_at, self.cuda = fails_at, cuda

    def post(self, address: Address, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        if path == "/update_weights" and self.cuda is not None:
            self.cuda.done.append(("update posted", self.cuda.current()))
        self.requests.append((path, body))
        if path == self.fails_at:
            raise ServerFailure(f"{path}: HTTP 500")
        return {}

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


def chunk(gpu: int = 0, tensors: Mapping[str, torch.Tensor] = TENSORS) -> Chunk:
    return Chunk(
        Path("nowhere"), 0, True, "", {name: on_gpu(tensor, gpu) for name, tensor in tensors.items()}
    )


def send_chunks(transfer: WeightTransfer, *chunks: Chunk) -> str | None:
    """Sends chunks as a sync does, each transfer in a thread of its own, and returns the problem."""
    delivery = Delivery(transfer, HERE)
    send_all(chunks, [delivery], Path("nowhere"))
    return delivery.problem


def assert_same(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor] = TENSORS) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights[name].as_subclass(torch.Tensor), weight)


@pytest.fixture(params=[0, 3], ids=["rank 0", "rank 3"])
def rank(request: pytest.FixtureRequest) -> int:
    """A rank, which trains on the GPU of the same number."""
    return int(request.param)


@pytest.fixture
def cuda(rank: int, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The fake CUDA, with the main thread on the rank's GPU."""
    fake = FakeCuda(monkeypatch)
    fake.set(rank)
    return fake


def test_the_worker_unpacks_the_weights_that_were_sent_by_cuda_ipc(
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

    def record_buffer(*arguments: Any) -> torch.Tensor:
        buffers.append(buffer_of(*arguments))
        return buffers[-1]

    monkeypatch.setattr(transfer, "_buffer_of", record_buffer)
    larger = {"c": torch.arange(64, dtype=torch.float32)}
    assert send_chunks(transfer, chunk(rank), chunk(rank, larger)) is None
    assert client.paths() == [*UPDATE[:3], "/update_weights", "/finish_weight_update"]
    assert cuda.done[:4] == [("synchronize", rank), ("update posted", rank)] * 2, (
        "the server hears of a copy when it is done"
    )
    assert cuda.done[4][0] == "ipc_collect" and transfer._buffer is None
    bodies = [body for _, body in client.requests]
    assert IPCWeightTransferInitInfo(**bodies[0]["init_info"]).packed
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    for body, buffer, tensors in zip(bodies[2:4], buffers, (TENSORS, larger), strict=True):
        update_info = IPCWeightTransferUpdateInfo(**body["update_info"])
        assert update_info.ipc_handles == {f"GPU-{rank}": (buffer.numel(), rank)}
        assert update_info.tensor_sizes is not None
        types = [getattr(torch, name) for name in update_info.dtype_names]
        assert_same(
            dict(
                unpack_tensor(buffer, update_info.names, update_info.shapes, types, update_info.tensor_sizes)
            ),
            tensors,
        )
    assert send_chunks(transfer, chunk(rank)) is None
    assert client.paths()[5:] == UPDATE[1:], "the transfer is initialized once"


class Communicator:
    """Stands in for vLLM's NCCL communicator, and has its rules about devices."""

    instances: list[Communicator]

    def __init__(self, group: Any, device: int) -> None:
        self.device = torch.device("cuda", device)
        self.packed: list[torch.Tensor] = []
        self.given_up = False
        self.instances.append(self)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert tensor.device == self.device
        self.packed.append(tensor)

    def destroy(self) -> None:
        self.given_up = True


@pytest.fixture
def group_addresses(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The addresses at which NCCL groups were created, with fakes for vLLM's communicator and group."""
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    addresses: list[Any] = []
    Communicator.instances = []
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Communicator)
    monkeypatch.setattr(utils.StatelessProcessGroup, "create", lambda **address: addresses.append(address))
    packed_tensor._get_streams.cache_clear()
    yield addresses
    packed_tensor._get_streams.cache_clear()


def test_nccl_creates_its_group_and_sends_on_the_gpu_of_the_rank(
    cuda: FakeCuda, rank: int, group_addresses: list[Any]
) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    client = Recorder()
    transfer = Nccl(client, 5.0, 2)  # type: ignore[arg-type]
    assert send_chunks(transfer, chunk(rank)) is None
    assert client.paths() == UPDATE
    (group,) = Communicator.instances
    assert group.device.index == rank
    bodies = [body for _, body in client.requests]
    init_info = NCCLWeightTransferInitInfo(**bodies[0]["init_info"])
    assert (init_info.rank_offset, init_info.world_size, init_info.packed) == (1, 3, True)
    assert group_addresses == [
        {"host": init_info.master_address, "port": init_info.master_port, "rank": 0, "world_size": 3}
    ]
    update_info = NCCLWeightTransferUpdateInfo(**bodies[2]["update_info"])
    assert update_info.shapes == [[2, 3], [2, 2]]
    types = [getattr(torch, name) for name in update_info.dtype_names]
    sizes = [weight.nbytes for weight in TENSORS.values()]
    assert_same(dict(unpack_tensor(group.packed[0], update_info.names, update_info.shapes, types, sizes)))
    assert ("synchronize", rank) in cuda.done
    assert {gpu for _, gpu in cuda.done} == {rank}


@pytest.mark.parametrize("at", ["/init_weight_transfer_engine", "/update_weights"])
def test_a_group_whose_server_fails_is_given_up_and_created_again(
    at: str, cuda: FakeCuda, rank: int, group_addresses: list[Any]
) -> None:
    client = Recorder(fails_at=at)
    transfer = Nccl(client, 5.0)  # type: ignore[arg-type]
    assert send_chunks(transfer, chunk(rank)) == f"{at}: HTTP 500"
    transfer.give_up(HERE)
    assert client.requests[-1] == ("/collective_rpc", {"method": "give_up_weight_update"})
    transfer.give_up(HERE)
    assert client.paths().count("/collective_rpc") == 1, "an update is given up once"
    assert all(group.given_up for group in Communicator.instances[:1])
    client.fails_at = ""
    client.requests.clear()
    assert send_chunks(transfer, chunk(rank)) is None
    assert client.paths() == UPDATE, "the group is initialized again"


@pytest.mark.parametrize("fault", ["raises", "is late"])
def test_the_senders_part_of_a_broadcast_has_a_deadline(fault: str, cuda: FakeCuda) -> None:
    transfer = Nccl(Recorder(), 0.2)  # type: ignore[arg-type]
    go_on = threading.Event()

    def work() -> None:
        if fault == "raises":
            raise RuntimeError("unhandled system error")
        go_on.wait(20)

    with pytest.raises(ServerFailure, match=r"unhandled system error|NCCL didn't finish"):
        transfer._post_while_working(work, HERE, "/update_weights", {})
    go_on.set()


def test_a_weight_larger_than_the_buffer_is_packed_alone() -> None:
    """vLLM's packing ends a buffer behind the weight that overflows it, at the sender and the receiver."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    items = iter([("large", torch.zeros(64)), ("small", torch.zeros(2))])
    first = pack_tensors(items, lambda item: item[1], 16)
    assert first is not None and first.names == ["large"]
    assert cuda_transfers.MOST_BROADCASTS > 1
