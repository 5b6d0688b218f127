"""The transfer of new weights into a live server: one protocol, and the methods that need no GPU.

An update begins, takes chunks of bounded size in their order, and ends; then alone the server has new
weights. Where something fails in between, it is told to give the update up, and reads the folder that the
chunks were written to; one that doesn't is ended, and another one started on that folder.

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

ANSWERS_S = 30.0
"""Seconds in which a server that works forgets an update."""


class WeightTransfer:
    """A transfer of new weights into one server. Its methods are called in the order of the protocol, one at
    a time; each raises ServerFailure if the server doesn't do its part within `timeout` seconds."""

    def __init__(self, client: Client, timeout: float, workers: int = 1) -> None:
        self._client, self._timeout, self._workers = client, timeout, workers

    def begin(self, address: Address) -> None:
        """Opens an update. None may be open."""

    def send(self, address: Address, chunk: Chunk) -> None:
        """Returns when the server has the chunk and needs nothing of it any more."""

    def end(self, address: Address, directory: Path) -> None:
        """Closes the update: the server has all weights now, which lie in `directory` as well."""

    def give_up(self, address: Address) -> None:
        """Has the server forget an update that failed, so that it can be given the weights otherwise."""

    def close(self) -> None:
        """Frees its resources."""

    def _post(self, address: Address, path: str, body: dict[str, Any] | None = None) -> None:
        self._client.post(address, path, body, timeout=self._timeout)


class FromFolder(WeightTransfer):
    """The server reads the folder when it is whole: weights, or adapters on the model that it serves."""

    @override
    def end(self, address: Address, directory: Path) -> None:
        if (directory / ADAPTER_CONFIG).is_file():
            adapters = {"lora_name": MODEL_NAME, "lora_path": str(directory), "load_inplace": True}
            self._client.post(
                address, "/v1/load_lora_adapter", adapters, timeout=self._timeout, answers="text"
            )
            return
        arguments = {"weights_path": str(directory)}
        body = {"method": "reload_weights", "kwargs": arguments, "timeout": self._timeout}
        self._post(address, "/collective_rpc", body)


class ByRoutes(WeightTransfer):
    """vLLM's protocol. A sub-class adds the content of the first meeting and of each chunk."""

    _met: int | None = None
    """The epoch of the server that knows this transfer."""
    _begun: int | None = None
    """The epoch of the server that an update was begun with."""

    @override
    def begin(self, address: Address) -> None:
        self._begun = address.epoch
        if address.epoch != self._met:
            self.meet(address)
            self._met = address.epoch
        self._post(address, "/start_weight_update")

    @override
    def end(self, address: Address, directory: Path) -> None:
        self._post(address, "/finish_weight_update")

    @override
    def give_up(self, address: Address) -> None:
        if address.epoch == self._begun:
            self.close()
            # One that waits in NCCL for ever does not answer.
            body = {"method": "give_up_weight_update"}
            self._client.post(address, "/collective_rpc", body, timeout=min(self._timeout, ANSWERS_S))
            self._begun = None

    def meet(self, address: Address) -> None:
        """Prepares a server for its first update."""
        raise NotImplementedError


class SharedMemory(ByRoutes):
    """The server maps each chunk's file as soon as it is written, and checks it. The files lie in /dev/shm,
    in a folder that is this run's."""

    @override
    def meet(self, address: Address) -> None:
        self._post(address, "/init_weight_transfer_engine", {"init_info": {}})

    @override
    def send(self, address: Address, chunk: Chunk) -> None:
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
    # Refused while blocks are held; vLLM before 0.30 answers nothing.
    if answer.get("success", True) is not True:
        raise ServerFailure("the prefix cache was not dropped: a request still holds blocks")


@dataclass
class Delivery:
    """New weights for one server, and the problem with it, if any. Without an address there is no server, and
    the problem says why."""

    transfer: WeightTransfer
    address: Address | None
    problem: str | None = None


def send_all(chunks: Iterable[Chunk], deliveries: Sequence[Delivery], directory: Path) -> None:
    """Gives every server all chunks; a chunk is made while the servers take the one before it.

    A server that fails is given nothing more and has a `problem`. `chunks` are gone through to their end
    whatever the servers do, since making them may need other ranks. An error of making them is raised, and
    all servers have a problem then.
    """
    in_flight: dict[int, Future[None]] = {}
    with ThreadPoolExecutor(max(1, len(deliveries)), "weight-transfer") as threads:

        def wait() -> None:
            for index in list(in_flight):
                try:
                    in_flight.pop(index).result()
                except (ServerFailure, EngineError) as failure:
                    deliveries[index].problem = str(failure)
                except Exception as failure:  # no memory left on the GPU, say: other ranks wait for this one
                    deliveries[index].problem = f"{type(failure).__name__}: {failure}"

        def each(step: str, *arguments: Any) -> None:
            wait()
            for index, delivery in enumerate(deliveries):
                if delivery.problem is None:
                    method = getattr(delivery.transfer, step)
                    in_flight[index] = threads.submit(method, delivery.address, *arguments)

        try:
            each("begin")
            for chunk in chunks:
                each("send", chunk)
            each("end", directory)
        except BaseException:
            for delivery in deliveries:
                delivery.problem = delivery.problem or "the transfer of weights was not finished"
            raise
        finally:
            wait()
