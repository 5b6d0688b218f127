"""One of an engine's servers: awake or asleep, with new weights or without."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.inference.base import Canary, Completion, EngineError
from treetune.inference.client import Address, Client, ServerFailure
from treetune.inference.gaps import Probe
from treetune.inference.server import OwnServer, Server
from treetune.inference.sync import probes_of, reload_weights, sample_probes
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

    def __init__(self, number: int, server: Server, client: Client, settings: VllmSettings) -> None:
        self.number, self.server = number, server
        self.verified: list[Probe] = []
        self._client, self._settings = client, settings
        self._asleep_epoch: int | None = None
        self._one_at_a_time = threading.RLock()

    @property
    def is_own(self) -> bool:
        """Whether this rank started it."""
        return isinstance(self.server, OwnServer)

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

    def take(
        self, directory: Path, version: int, canary: Canary | None, context_length: int, *, afresh: bool
    ) -> Taken:
        """Has the server exchange its weights for those in `directory`, and sample for the canary. `afresh`:
        it was started on them, and has them. An own server alone does anything."""
        taken = Taken()
        if not self.is_own:
            return taken
        timeout = self._settings.sync_timeout
        try:
            with self._one_at_a_time:
                if not afresh:
                    self._wake("weights")
                address = self.server.ready()
                if not afresh:
                    reload = reload_weights(
                        self._client, address, directory, timeout, between=self._wake_cache
                    )
                    taken.parts.update(reload)
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
        if isinstance(self.server, OwnServer):
            self.server.start_anew(weights, reason)

    def use(self, weights: Path) -> None:
        """From here on, an own server that dies comes back on these weights."""
        if isinstance(self.server, OwnServer):
            self.server.use(weights)
