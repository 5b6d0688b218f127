"""What an engine needs of a server, whoever started it."""

from __future__ import annotations

import threading
from pathlib import Path

from treetune.inference.client import Address


class Server:
    """What an engine needs of a server, be it this rank's own or another's."""

    loads = False
    """Whether this rank brings its weights in."""

    def ready(self) -> Address:
        """Waits for the server. Raises EngineError if it didn't come up."""
        raise NotImplementedError

    def now(self) -> Address | None:
        """The server, if it is there. Raises EngineError where it isn't coming."""
        raise NotImplementedError

    def failed(self, address: Address, reason: str) -> None:
        """The server at `address` misbehaved: it is to be ended and started anew."""
        raise NotImplementedError

    def succeeded(self) -> None:
        """Work was finished: the restarts so far are forgiven."""

    def wait_anew(self) -> None:
        """Work begins: how long this server was waited for before doesn't count."""

    def hold(self, held: bool) -> None:
        """While held, a server that ends is not started anew: its memory is somebody else's."""

    @property
    def restarts(self) -> int:
        """How often it was started anew."""
        raise NotImplementedError

    def gone(self, address: Address) -> str | None:
        """Why who has asked the server at `address` would wait in vain; None where asking it tells."""
        return None

    def begin_weights(self, address: Address) -> Address:
        """Its weights are neither the old ones nor the new ones from here on; where it takes the new ones.
        Raises ServerFailure."""
        return address

    def end_weights(self, address: Address, weights: Path) -> Address:
        """It has the weights of that folder now; where it is asked for them. Raises ServerFailure."""
        return address

    def use(self, weights: Path) -> None:
        """From here on, whoever comes back has these weights."""

    def start_anew(self, weights: Path, reason: str) -> None:
        """Whatever it does, it is to have these weights, and nothing from before."""

    def begin_to_close(self) -> None:
        """Begins to end it, if it is ours, and waits for nothing."""

    def close(self) -> None:
        """Ends it, if it is ours."""


class AwaitedServer(Server):
    """One that a thread of this process looks after: it sets `_address`, under `_changed`, while the server
    is there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._address: Address | None = None
        self._error: str | None = None
        self._epoch = self._in_a_row = 0
        self._closed = False

    def ready(self) -> Address:
        with self._changed:
            # The thread, or `now`, gives up by its own deadline, so this ends.
            while (address := self.now()) is None:
                self._changed.wait(0.5)
            return address

    def succeeded(self) -> None:
        self._in_a_row = 0

    def begin_to_close(self) -> None:
        with self._changed:
            self._closed = True
            self._address = None
            self._changed.notify_all()
