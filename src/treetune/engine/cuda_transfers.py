"""Transfers weights between GPUs: by CUDA IPC if trainer and server share one, by NCCL if each has its own.

vLLM's workers have both transfers built in, and define the content of the requests (vLLM 0.32:
``vllm.distributed.weight_transfer``). `tests/engine/test_cuda_transfers.py` compares the names in the
requests with vLLM's source. The transfer by CUDA IPC has been run on a GPU, the one by NCCL has not
(docs/hardware.md).
"""

from __future__ import annotations

import base64
import pickle
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from typing_extensions import override

from treetune.engine.base import Chunk
from treetune.engine.client import Address
from treetune.engine.launch import find_free_port
from treetune.engine.transfer import ByRoutes
from treetune.exceptions import ServerFailure

if TYPE_CHECKING:
    from torch import Tensor

BUFFER_BYTES = 2**28
"""The bytes of a broadcast's buffer. A weight that is larger gets a larger buffer."""
MOST_BROADCASTS = 2
"""The most broadcasts in flight."""


def weight_headers(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the names, types and shapes of weights, which a worker needs before it gets the weights."""
    return {
        "names": list(tensors),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in tensors.values()],
        "shapes": [list(weight.shape) for weight in tensors.values()],
    }


def own_address(url: str) -> str:
    """Returns the address by which the machine at `url` reaches this one."""
    host = urlsplit(url).hostname
    family, socket_type, _, _, remote = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    # Connecting a UDP socket sends nothing, whatever the port. It only chooses the network interface. The
    # socket then has the address of this interface.
    with socket.socket(family, socket_type) as probe:
        probe.connect(remote)
        return probe.getsockname()[0]


class CudaIpc(ByRoutes):
    """Copies each chunk into a buffer on the GPU. The server opens the buffer by its handle, and copies the
    chunk from there."""

    _buffer: Tensor | None = None
    _handle = ""
    """The handle of the buffer, by which another process opens the same memory."""

    @override
    def prepare(self, address: Address) -> None:
        self._post(address, "/init_weight_transfer_engine", {"init_info": {"packed": True}})

    @override
    def begin(self, address: Address) -> None:
        self._buffer = None  # a worker closes the buffer's handle at the end of an update
        super().begin(address)

    @override
    def send(self, address: Address, chunk: Chunk) -> None:
        """Copies a chunk into the buffer that this rank shares with the server, and has the server read it
        there. `_handle` tells the server where the buffer is."""
        import torch

        bytes_of_weights = [
            weight.contiguous().view(-1).view(torch.uint8) for weight in chunk.tensors.values()
        ]
        sizes = [weight.numel() for weight in bytes_of_weights]
        # A new thread uses the first GPU, and the trainer's may be another one.
        with torch.cuda.device(bytes_of_weights[0].device):
            buffer = self._buffer_of(sum(sizes), bytes_of_weights[0].device)
            torch.cat(bytes_of_weights, out=buffer[: sum(sizes)])
            # The copy must be complete before the request below lets the server's process read the buffer.
            torch.cuda.current_stream().synchronize()
            body = weight_headers(chunk.tensors) | {
                "tensor_sizes": sizes,
                "ipc_handles_pickled": self._handle,
            }
            self._post(address, "/update_weights", {"update_info": body})

    @override
    def end(self, address: Address, directory: Path) -> None:
        super().end(address, directory)
        self.close()

    @override
    def close(self) -> None:
        if self._buffer is not None:
            import torch

            self._buffer = None
            torch.cuda.ipc_collect()  # frees memory that servers had mapped

    def _buffer_of(self, size: int, device: Any) -> Tensor:
        """Returns a buffer of at least `size` bytes. Its handle is in `_handle`."""
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
            # The arguments with which another process opens the same memory. vLLM's worker finds them by the
            # UUID of its GPU.
            _, arguments = reduce_tensor(self._buffer)
            gpu = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = base64.b64encode(pickle.dumps({gpu: arguments})).decode()
        return self._buffer


class Nccl(ByRoutes):
    """Broadcasts each chunk to the server's workers, in a process group of this rank and the workers."""

    _group: Any = None
    """The process group; None before `prepare` and after `close`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        import torch

        # `prepare` joins the process group in a new thread. vLLM binds the group to that thread's GPU, which
        # would be the machine's first GPU. So this rank's GPU is kept here, and set in the new thread.
        self._device = torch.cuda.current_device()

    @override
    def prepare(self, address: Address) -> None:
        """Makes an NCCL process group of this rank and the server's workers."""
        self.close()  # ends the group with an earlier process of the server, if there is one
        # The process group consists of this rank, with the number 0, and the workers, with the numbers from
        # 1 on.
        rendezvous = {
            "master_address": own_address(address.url),
            "master_port": find_free_port(),
            "world_size": 1 + self._workers,
        }
        sizes = {"packed_buffer_size_bytes": BUFFER_BYTES, "packed_num_buffers": MOST_BROADCASTS}
        body = rendezvous | {"rank_offset": 1, "packed": True} | sizes

        def join() -> None:
            """Joins the process group; returns when the workers have joined it, too."""
            import torch
            from vllm.distributed.weight_transfer.nccl_common import trainer_init

            with torch.cuda.device(self._device):
                self._group = trainer_init(rendezvous)

        self._post_while_working(join, address, "/init_weight_transfer_engine", {"init_info": body})

    @override
    def send(self, address: Address, chunk: Chunk) -> None:
        """Broadcasts a chunk's tensors to the server's workers."""

        def broadcast() -> None:
            """Sends the chunk's tensors to the workers, which receive them at the same time."""
            import torch
            from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

            with torch.cuda.device(self._group.device):
                packed_nccl_broadcast_producer(
                    iterator=iter(chunk.tensors.items()),
                    group=self._group,
                    src=0,
                    post_iter_func=lambda item: item[1],  # the tensor of a pair (name, tensor)
                    buffer_size_bytes=BUFFER_BYTES,
                    num_buffers=MOST_BROADCASTS,
                )

        body = {"update_info": weight_headers(chunk.tensors)}
        self._post_while_working(broadcast, address, "/update_weights", body)

    @override
    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._group = None
        self._prepared_epoch = None  # the next update makes a new group with the server

    def _post_while_working(
        self, work: Callable[[], None], address: Address, path: str, body: dict[str, Any]
    ) -> None:
        """Posts to the server while a thread does this rank's part, `work`. Both sides wait for each other in
        NCCL. If either fails or is late, the process group is destroyed, since it can't be used again.

        ::

            this thread     POST ─────────────────────────► answer ─► join(timeout) ─► error of `work`?
            its thread      work(): joins NCCL's group or broadcasts ─────┘
            the server      ──────── the same, in its workers ──────►
        """
        failures: list[Exception] = []

        def run() -> None:
            try:
                work()
            except Exception as error:  # raised below, in the thread that posts
                failures.append(error)

        thread = threading.Thread(target=run, name="weight-transfer-nccl", daemon=True)
        thread.start()
        try:
            self._post(address, path, body)
            thread.join(self._timeout)
            if thread.is_alive():
                raise ServerFailure(f"{path}: answered, but NCCL didn't finish within {self._timeout:.0f} s")
            if failures:
                raise ServerFailure(f"{path}: {type(failures[0]).__name__}: {failures[0]}")
        except BaseException:
            self.close()
            raise
