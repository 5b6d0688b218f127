"""Transfers new weights into running servers: the protocol, and the transfers that need no GPU.

An update has a beginning, chunks of limited size in the order of the model, and an end. Only after the end
the server has the new weights. If the update fails, the server is told to give it up, and reads the folder
with the chunks' files. If that fails, too, the server is replaced by a new one that starts with that folder.

`send_all` overlaps the steps. While the servers read a chunk, the trainer makes the next one::

    main thread       make chunk 0   make chunk 1         make chunk 2        ...
                               │  submit      │ wait, submit      │ wait, submit
    a thread for               ▼              ▼                   ▼
    each server       begin    send 0         send 1              send 2      ... end

vLLM's four routes for it (``/init_weight_transfer_engine``, ``/start_weight_update``, ``/update_weights``,
``/finish_weight_update``) change between its versions; only this file and `treetune.engine.cuda_transfers`
know them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.engine.base import Chunk
from treetune.engine.client import MODEL_NAME, Address, Client
from treetune.engine.launch import ADAPTER_CONFIG
from treetune.exceptions import EngineError, ServerFailure

GIVE_UP_TIMEOUT_S = 30.0
"""Most seconds in which a working server gives up an update."""


class WeightTransfer:
    """A transfer of new weights into one server. Its methods are called one at a time, in the order of the
    protocol. Each raises ServerFailure if the server fails, or takes longer than `timeout` seconds.

    Args:
        workers: The number of the server's workers, one for each of its GPUs.
    """

    def __init__(self, client: Client, timeout: float, workers: int = 1) -> None:
        self._client, self._timeout, self._workers = client, timeout, workers

    def begin(self, address: Address) -> None:
        """Begins an update. The update before must have ended, or have been given up."""

    def send(self, address: Address, chunk: Chunk) -> None:
        """Sends a chunk, and returns when the server has copied it."""

    def end(self, address: Address, directory: Path) -> None:
        """Ends the update. The server has all weights now, which are in `directory` as well."""

    def give_up(self, address: Address) -> None:
        """Makes the server forget a failed update, so that it can get the weights in another way."""

    def close(self) -> None:
        """Frees its resources."""

    def _post(self, address: Address, path: str, body: dict[str, Any] | None = None) -> None:
        self._client.post(address, path, body, timeout=self._timeout)


class FromFolder(WeightTransfer):
    """The server reads the folder when it is complete: weights, or adapters of the model that it serves."""

    @override
    def end(self, address: Address, directory: Path) -> None:
        """Has the server read the folder, which has whole weights or adapters."""
        if (directory / ADAPTER_CONFIG).is_file():
            # `load_inplace` replaces the loaded adapters of this name.
            adapters = {"lora_name": MODEL_NAME, "lora_path": str(directory), "load_inplace": True}
            self._client.post(
                address, "/v1/load_lora_adapter", adapters, timeout=self._timeout, answers="text"
            )
            return
        arguments = {"weights_path": str(directory)}
        body = {"method": "reload_weights", "kwargs": arguments, "timeout": self._timeout}
        self._post(address, "/collective_rpc", body)


class ByRoutes(WeightTransfer):
    """A transfer by vLLM's four routes, which are named in the head of this file. A subclass implements
    `prepare` and `send`."""

    _prepared_epoch: int | None = None
    """The epoch of the server that was prepared for this transfer; None if none was."""
    _epoch_of_update: int | None = None
    """The epoch of the server in which an update was begun; None if none was."""

    @override
    def begin(self, address: Address) -> None:
        """Begins an update, and prepares the server for transfers if its process isn't prepared yet."""
        # The epoch is the number of the server's start: a restarted server has another one. It is stored
        # first, so that `give_up` also ends an update that failed within this method.
        self._epoch_of_update = address.epoch
        if address.epoch != self._prepared_epoch:
            self.prepare(address)
            self._prepared_epoch = address.epoch
        self._post(address, "/start_weight_update")

    @override
    def end(self, address: Address, directory: Path) -> None:
        self._post(address, "/finish_weight_update")

    @override
    def give_up(self, address: Address) -> None:
        """Has the server end an update that was begun and has failed."""
        # A server that has restarted since the update began has another epoch, and no update to give up.
        if address.epoch == self._epoch_of_update:
            self.close()  # frees what this rank shares with the server, such as a process group
            # A server that hangs in NCCL doesn't answer, so the deadline is short.
            body = {"method": "give_up_weight_update"}
            self._client.post(address, "/collective_rpc", body, timeout=min(self._timeout, GIVE_UP_TIMEOUT_S))
            self._epoch_of_update = None

    def prepare(self, address: Address) -> None:
        """Prepares a server for its first update after each start."""
        raise NotImplementedError


class SharedMemory(ByRoutes):
    """The server maps each chunk's file as soon as it is written, and verifies its digest. The files are in
    the run's folder in /dev/shm."""

    @override
    def prepare(self, address: Address) -> None:
        self._post(address, "/init_weight_transfer_engine", {"init_info": {}})

    @override
    def send(self, address: Address, chunk: Chunk) -> None:
        """Has the server load the chunk from its file in shared memory."""
        info = {
            "path": str(chunk.path),
            "number": chunk.number,
            "last": chunk.last,
            "digest": chunk.digest,
        }
        self._post(address, "/update_weights", {"update_info": info})


def drop_cache(client: Client, address: Address, timeout: float) -> None:
    """Clears the server's cache of keys and values of old weights. Raises ServerFailure."""
    answer = client.post(address, "/reset_prefix_cache", timeout=timeout)
    # vLLM refuses to clear the cache while a request uses it. Versions before 0.30 answer nothing.
    if answer.get("success", True) is not True:
        raise ServerFailure("the prefix cache was not dropped, since a request still uses it")


@dataclass
class Delivery:
    """The transfer of new weights to one server."""

    transfer: WeightTransfer
    address: Address | None
    """None if the server isn't running."""
    problem: str | None = None
    """The reason why the transfer failed; None if it didn't."""


def send_all(chunks: Iterable[Chunk], deliveries: Sequence[Delivery], directory: Path) -> None:
    """Sends all chunks to every server. A chunk is made while the servers read the one before it.

    A server that fails gets no more chunks, and has a `problem`. All chunks are made even if all servers
    fail, since making them may be collective. If making them fails, that error is raised, and all servers
    have a problem.
    """
    in_flight: dict[int, Future[None]] = {}
    with ThreadPoolExecutor(max(1, len(deliveries)), "weight-transfer") as threads:

        def wait() -> None:
            """Waits for the step of every server, and stores failures as its `problem`."""
            for index in list(in_flight):
                try:
                    in_flight.pop(index).result()
                except (ServerFailure, EngineError) as failure:
                    deliveries[index].problem = str(failure)
                except Exception as failure:  # for example, the GPU is out of memory
                    # Not raised, since other ranks wait for this one to make the chunks with them.
                    deliveries[index].problem = f"{type(failure).__name__}: {failure}"

        def start_step(step: str, *arguments: Any) -> None:
            """Waits for the step before, and starts the next one of every server without a problem."""
            wait()
            for index, delivery in enumerate(deliveries):
                if delivery.problem is None:
                    method = getattr(delivery.transfer, step)
                    in_flight[index] = threads.submit(method, delivery.address, *arguments)

        try:
            start_step("begin")
            for chunk in chunks:
                start_step("send", chunk)
            start_step("end", directory)
        except BaseException:
            for delivery in deliveries:
                delivery.problem = delivery.problem or "the transfer of weights was not finished"
            raise
        finally:
            wait()
