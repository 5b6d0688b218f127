"""The ways between GPUs, as far as a CPU goes: what a worker is told is what this vLLM's own source takes."""

from __future__ import annotations

import base64
import contextlib
import inspect
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treetune.inference.base import Chunk
from treetune.inference.client import Address, ServerFailure
from treetune_cluster import cuda_transfers
from treetune_cluster.cuda_transfers import CudaIpc, Nccl

HERE = Address("http://127.0.0.1:1", 1, "key")
TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.arange(4, dtype=torch.float32).view(2, 2).t(),
}


class Recorder:
    """A client that keeps what the server is asked, and answers as it is told to."""

    def __init__(self, fails_at: str = "") -> None:
        self.asked: list[tuple[str, Mapping[str, Any] | None]] = []
        self.fails_at = fails_at

    def post(self, address: Address, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        self.asked.append((path, body))
        if path == self.fails_at:
            raise ServerFailure(f"{path}: HTTP 500")
        return {}


def chunk(number: int = 0) -> Chunk:
    return Chunk(Path("nowhere"), number, True, "", TENSORS)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's calls do nothing, and a buffer on the CPU has a handle that nobody can open."""

    def room(self: CudaIpc, size: int, device: Any) -> torch.Tensor:
        self._buffer = torch.empty(size, dtype=torch.uint8)
        self._handle = base64.b64encode(pickle.dumps({})).decode()
        return self._buffer

    monkeypatch.setattr(CudaIpc, "_room", room)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


def test_what_comes_by_ipc_is_what_the_worker_unpacks(
    without_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCWeightTransferInitInfo,
        IPCWeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    client = Recorder()
    transfer = CudaIpc(client, 1.0)  # type: ignore[arg-type]
    transfer.begin(HERE)
    transfer.send(HERE, chunk())
    buffer = transfer._buffer
    assert buffer is not None
    transfer.end(HERE, Path("nowhere"))
    paths = [path for path, _ in client.asked]
    assert paths == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ]
    bodies = [body for _, body in client.asked]
    assert IPCWeightTransferInitInfo(**bodies[0]["init_info"]).packed  # type: ignore[index]
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    told = IPCWeightTransferUpdateInfo(**bodies[2]["update_info"])  # type: ignore[index]
    assert told.ipc_handles == {}
    assert told.tensor_sizes is not None
    types = [getattr(torch, name) for name in told.dtype_names]
    found = dict(unpack_tensor(buffer, told.names, told.shapes, types, told.tensor_sizes))
    assert found.keys() == TENSORS.keys()
    for name, weight in TENSORS.items():
        assert torch.equal(found[name], weight)


def test_a_worker_is_told_of_the_nccl_group_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    class Group:
        device = torch.device("cpu")
        given_up = False

        def destroy(self) -> None:
            self.given_up = True

    group = Group()
    places: list[Any] = []
    sent: dict[str, torch.Tensor] = {}
    signature = inspect.signature(packed_tensor.packed_nccl_broadcast_producer)

    def produce(**arguments: Any) -> None:
        signature.bind(**arguments)
        assert arguments["group"] is group
        sent.update({item[0]: arguments["post_iter_func"](item) for item in arguments["iterator"]})

    def join(place: Any) -> Group:
        places.append(place)
        return group

    inspect.signature(nccl_common.trainer_init).bind({})
    monkeypatch.setattr(nccl_common, "trainer_init", join)
    monkeypatch.setattr(packed_tensor, "packed_nccl_broadcast_producer", produce)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    client = Recorder()
    transfer = Nccl(client, 5.0, workers=2)  # type: ignore[arg-type]
    transfer.begin(HERE)
    transfer.send(HERE, chunk())
    transfer.end(HERE, Path("nowhere"))
    bodies = [body for _, body in client.asked]
    told = NCCLWeightTransferInitInfo(**bodies[0]["init_info"])  # type: ignore[index]
    assert (told.rank_offset, told.world_size, told.packed) == (1, 3, True)
    assert places == [
        {"master_address": told.master_address, "master_port": told.master_port, "world_size": 3}
    ]
    update = NCCLWeightTransferUpdateInfo(**bodies[2]["update_info"])  # type: ignore[index]
    assert update.shapes == [[2, 3], [2, 2]]
    assert sent.keys() == TENSORS.keys()

    client.fails_at = "/update_weights"
    transfer.begin(HERE)
    with pytest.raises(ServerFailure):
        transfer.send(HERE, chunk())
    assert group.given_up, "who waits in NCCL for a server that failed is let go"
    client.asked.clear()
    transfer.begin(HERE)
    assert client.asked[0][0] == "/init_weight_transfer_engine", "a group that was given up is made anew"


@pytest.mark.parametrize("fault", ["raises", "is late"])
def test_this_sides_part_of_a_broadcast_has_a_deadline(fault: str) -> None:
    transfer = Nccl(Recorder(), 0.2)  # type: ignore[arg-type]
    go_on = threading.Event()

    def work() -> None:
        if fault == "raises":
            raise RuntimeError("unhandled system error")
        go_on.wait(20)

    with pytest.raises(ServerFailure, match=r"unhandled system error|NCCL was not done"):
        transfer._beside(work, HERE, "/update_weights", {})
    go_on.set()


def test_a_weight_larger_than_the_buffer_is_taken_by_both_sides() -> None:
    """vLLM's packing breaks a buffer off behind the weight that overflows it, on both sides alike."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    items = iter([("large", torch.zeros(64)), ("small", torch.zeros(2))])
    first = pack_tensors(items, lambda item: item[1], 16)
    assert first is not None and first.names == ["large"]
    assert cuda_transfers.BUFFERS > 1
