"""One of an engine's servers: awake or asleep, with new weights or without."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.inference.base import Canary, Completion, EngineError
from treetune.inference.client import Address, Client, ServerFailure
from treetune.inference.gaps import Probe
from treetune.inference.launch import Way
from treetune.inference.server_interface import Server
from treetune.inference.sync import drop_cache, probes_of, sample_probes
from treetune.inference.transfer import Delivery, FromFolder, transfer
from treetune.vocabulary import TokenIds

if TYPE_CHECKING:
    from treetune.inference.settings import VllmSettings


@dataclass(frozen=True)
class Taken:
    """How a server took new weights: seconds by part, what it sampled for the canary, and what went wrong, if
    anything."""

    parts: dict[str, float] = field(default_factory=dict)
    sampled: list[tuple[TokenIds, Completion]] = field(default_factory=list)
    problem: str | None = None

    def pairs(self) -> dict[tuple[int, bytes, bytes], tuple[TokenIds, TokenIds]]:
        """Each prompt and what was sampled after it, by what servers that sampled the same share."""
        return {
            (number, prompt.tobytes(), one.token_ids.tobytes()): (prompt, one.token_ids)
            for number, (prompt, one) in enumerate(self.sampled)
        }


class Replica:
    """A server, this rank's own or the first rank's, and whether it sleeps.

    `number` tells it from the engine's others. `verified` are the canary's probes of the weights that are in
    it, where there was one. Its methods may be called from several threads.
    """

    def __init__(
        self, number: int, server: Server, client: Client, settings: VllmSettings, way: Way = "file"
    ) -> None:
        self.number, self.server = number, server
        self.transfer = transfer(way, client, settings.sync_timeout, settings.tensor_parallel_size)
        self._from_folder = FromFolder(client, settings.sync_timeout)
        self.verified: list[Probe] = []
        self._client, self._settings = client, settings
        self._asleep_epoch: int | None = None
        self._one_at_a_time = threading.RLock()

    @property
    def is_own(self) -> bool:
        """Whether this rank brings its weights in."""
        return self.server.loads

    # Memory

    def fall_asleep(self) -> None:
        """A server that can't is replaced by one that then has to."""
        while (address := self.server.ready()).epoch != self._asleep_epoch:
            with self._or_restart(address):
                self._client.post(address, "/sleep?level=1", timeout=self._settings.sync_timeout)
                self._asleep_epoch = address.epoch

    def awake(self) -> Address | None:
        """The server, ready to sample; None while it is being started."""
        with self._one_at_a_time:
            if self.server.now() is None:
                return None
            # Weights first, and the cache after new weights are in, so that the peak of memory stays low.
            self._wake("weights")
            self._wake_cache()
            return self.server.now()

    def _wake_cache(self) -> None:
        self._wake("kv_cache")
        self._asleep_epoch = None

    def _wake(self, tag: str) -> None:
        if self._asleep_epoch is None:
            return
        address = self.server.ready()
        if address.epoch == self._asleep_epoch:  # a new server never slept
            with self._or_restart(address):
                self._client.post(address, f"/wake_up?tags={tag}", timeout=self._settings.sync_timeout)

    @contextmanager
    def _or_restart(self, address: Address) -> Iterator[None]:
        try:
            yield
        except ServerFailure as failure:
            self.server.failed(address, str(failure))

    # Weights

    def delivery(self, *, from_folder: bool) -> Delivery:
        """An own server, ready to be given weights: in chunks, or in a folder that is whole."""
        way = self._from_folder if from_folder else self.transfer
        try:
            with self._one_at_a_time:
                self._wake("weights")
                return Delivery(way, self.server.begin_weights(self.server.ready()))
        except (EngineError, ServerFailure) as failure:
            return Delivery(way, None, str(failure))

    def give_up(self, delivery: Delivery) -> None:
        """The server's weights are of two versions: nobody may sample from it."""
        if delivery.address is not None:
            self.server.failed(delivery.address, delivery.problem or "its weights are of two versions")

    def take(
        self,
        version: int,
        weights: Path,
        canary: Canary | None,
        context_length: int,
        sent: Delivery | None,
    ) -> Taken:
        """Has the server forget its old weights, and sample for the canary. `sent` says how the new ones
        came, which are those in the folder `weights`; None where it was started on them. An own server alone
        does anything."""
        taken = Taken()
        if not self.is_own:
            return taken
        if sent is not None and sent.problem is not None:
            return Taken(problem=sent.problem)
        timeout = self._settings.sync_timeout
        try:
            before = time.monotonic()
            with self._one_at_a_time:
                if sent is not None:
                    self._wake_cache()
                address = self.server.ready()
                if sent is not None:
                    drop_cache(self._client, replace(address, weights=""), timeout)
                    address = self.server.end_weights(address, weights)
                    taken.parts["reset_cache"] = time.monotonic() - before
            if canary is not None:
                before = time.monotonic()
                requests = probes_of(canary, context_length)
                taken.sampled.extend(sample_probes(self._client, address, requests, version, timeout))
                taken.parts["sample_canary"] = time.monotonic() - before
        except (ServerFailure, EngineError) as failure:
            return Taken(taken.parts, [], str(failure))
        return taken

    def start_anew(self, weights: Path, reason: str) -> None:
        """An own server is ended, whatever it does, and another started on `weights`."""
        if self.is_own:
            self.server.start_anew(weights, reason)

    def use(self, weights: Path) -> None:
        """From here on, a server that was lost comes back on these weights."""
        self.server.use(weights)
