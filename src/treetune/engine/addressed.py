"""Uses a server that the run did not start: waits until it answers, loads weights into it, and notices when
it is gone or has other weights.

The thread ``engine-addressed`` of each server, on every rank::

    away ──► _meet: can this run use it? the first rank gives it the newest weights ──────────► present
     ▲                                                                                          │
     └────────── _check, every CHECK_EVERY_S: another process answers, or it has other weights ◄──────┘

The main thread waits in `Server.wait_until_ready` until the server is present, and for `start_timeout` at
most. A server that fails is away at once, so its requests go to the other servers.

The first rank (`loads_weights`) loads weights into the server: the start weights at first, and the newest
ones whenever the server comes back without them. The name of the weights consists of the run's and the
folder's name, such as ``3f2a91c07be4d518 0007``. A subclass sends the server this name, and asks for it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from treetune.engine.client import Address, Client
from treetune.engine.server import Server
from treetune.engine.settings import PlainVllmSettings, VllmSettings
from treetune.engine.transfer import FromFolder, drop_cache
from treetune.exceptions import EngineError, ServerFailure

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
"""Seconds between two checks of a server that is present."""
REACH_AGAIN_EVERY_S = 0.2
"""Seconds between two attempts to reach a server that is away."""
ANSWER_TIMEOUT_S = 60.0
"""Most seconds that a server may take to answer a question about itself, even while it samples."""
THREAD_END_TIMEOUT_S = 5.0
"""Most seconds that closing waits for a server's thread to end."""


class ServerState(NamedTuple):
    """A server's state: which process it is, and which weights it has.

    Example: ``ServerState(process="9c01d2", weights="3f2a91c07be4d518 0007")``.
    """

    process: str
    """A name that changes when the server is restarted."""
    weights: str
    """The name of its weights; empty if no client has named them."""


class AddressedServer(Server):
    """A server that the run neither starts nor ends. While it is away, the engine uses its other servers. It
    waits for this one for `start_timeout` at most."""

    start_command = ""
    """The command that starts such a server, for messages."""

    def __init__(
        self,
        url: str,
        key: str,
        settings: VllmSettings | PlainVllmSettings,
        weights: Path,
        run: str,
        client: Client,
        *,
        loads_weights: bool,
    ) -> None:
        """Starts the thread that meets and checks the server.

        Args:
            url: The server's URL.
            key: The key that the server asks for.
            settings: The settings of the engine.
            weights: The folder of the weights that the server shall have at first.
            run: The name of this run, with which the names of its weights begin.
            client: Sends the requests.
            loads_weights: Whether this rank loads weights into the server; only the first rank does.
        """
        super().__init__()
        self.loads_weights, self._url, self._key, self._run = loads_weights, url, key, run
        self._settings, self._client = settings, client
        self._from_folder = FromFolder(client, settings.sync_timeout)
        self._weights = weights
        self._process = ""
        """The name of the server's process when it was last met (`ServerState.process`)."""
        self._weights_lock = threading.Lock()
        """Held while the thread loads weights into a server that has come back."""
        self._reason_away = "it has not answered yet"
        self._away_since = time.monotonic()
        self._is_loading = False
        """Whether the main thread is loading weights. Meanwhile `_thread` leaves the server alone."""
        self._must_load = True
        """Whether weights are loaded even if the server has weights of the right name already: True at the
        start, and after a sync that failed."""
        self._thread = threading.Thread(target=self._supervise, name="engine-addressed", daemon=True)
        self._thread.start()

    # Implemented by subclasses. They raise ServerFailure if the server can't be reached.

    def _describe(self) -> ServerState:
        """Asks the server for its state. Raises EngineError if it is not a server that the run can use."""
        raise NotImplementedError

    def _introduce(self) -> ServerState:
        """Returns the state of a server that was away. Raises EngineError if the run can't use it."""
        raise NotImplementedError

    def _name_weights(self, address: Address, name: str) -> None:
        """Tells the server the name of its weights; empty while they are being replaced."""
        raise NotImplementedError

    # Called by the engine

    @override
    def current_address(self) -> Address | None:
        """Returns the server's address; None while the server is away.

        Raises:
            EngineError: The engine was closed, or the server is given up or has been away for too long.
        """
        with self._changed:
            if self._closed:
                raise EngineError("the engine was closed")
            if self._error is not None:
                raise EngineError(self._error)
            seconds_away = time.monotonic() - self._away_since
            if self._address is None and seconds_away > self._settings.start_timeout:
                raise EngineError(
                    f"the server at {self._url} has been away for {seconds_away:.0f} s (start_timeout ="
                    f" {self._settings.start_timeout:.0f}): {self._reason_away}. Start it again"
                    f" ({self.start_command}), or remove it from"
                    f" {self._settings.key_path}.addresses"
                )
            return self._address

    @override
    def report_failure(self, address: Address, reason: str) -> None:
        """Notes a failure of the server. Its thread then meets the server again: asks whether this run can
        use it, and gives it the newest weights. After too many failures, the server is given up."""
        with self._changed:
            if address.epoch != self._epoch:
                return  # the failure is that of a process that has been replaced
            # The main thread loads no more weights into the server, so the server's thread may meet it again.
            self._is_loading = False
            if self._address is None:
                return  # reported already
            self._failures_in_a_row += 1
            if self._failures_in_a_row > self._settings.max_restarts:
                self._error = (
                    f"the server at {self._url} failed {self._failures_in_a_row} times in a row (max_restarts"
                    f" is {self._settings.max_restarts}), the last time: {reason}"
                )
            self._set_away(reason)

    @override
    def reason_gone(self, address: Address) -> str | None:
        with self._changed:
            return None if self._address == address else self._reason_away

    @override
    def wait_anew(self) -> None:
        self._away_since = time.monotonic()

    @override
    def begin_weights(self, address: Address) -> Address:
        """Begins to load new weights: tells the server that its weights have no name until `end_weights`.

        Returns the server's address for requests that work with any weights. Raises ServerFailure.
        """
        # `_weights_lock` waits until the thread has loaded the older weights, if it is just doing so.
        with self._weights_lock, self._changed:
            # The thread may have lost the server since the caller read its address. The thread then has to
            # meet the server again, and it would not do so while `_is_loading` is set.
            if self._address is None or address.epoch != self._epoch:
                raise ServerFailure(self._reason_away)
            self._is_loading = True
        try:
            # The weights get no name, so that nothing is sampled for the run from a mixture of old and new
            # ones.
            self._name_weights(address, "")
        except (ServerFailure, EngineError) as failure:
            self.report_failure(address, str(failure))
            raise
        # The server's weights have no name now, and it refuses requests that ask for a name.
        return replace(address, weights="")

    @override
    def end_weights(self, address: Address, weights: Path) -> Address:
        """Gives the server the name of its new weights. Returns its address for requests that ask for these
        weights, also if the server was lost meanwhile: a request then shows whether it is back."""
        self._weights = weights  # `_weights_name` is made from this folder
        self._name_weights(address, self._weights_name)
        with self._changed:
            self._is_loading = False
            if self._address is not None:  # if it is None, the server was lost, and `_meet` sets it later
                self._address = self._make_address()
            self._changed.notify_all()
            return self._make_address()

    @override
    def set_newest_weights(self, weights: Path) -> None:
        """Notes the newest weights. If they are new to this rank, the server counts as away until a check has
        shown that it has them."""
        with self._changed:
            # They are new to all ranks but the first, where `end_weights` has noted them already.
            if weights != self._weights:
                self._weights = weights
                self._set_away("it was not checked yet whether it has the newest weights")

    @override
    def start_anew(self, weights: Path, reason: str) -> None:
        """Has the server's thread load the weights into the server again."""
        # The run can't restart this server's process. So the server counts as away, until its thread meets it
        # again: asks whether this run can use it, and loads the weights, even if the server has weights of
        # this name already.
        with self._changed:
            self._weights, self._is_loading, self._must_load = weights, False, True
            self._set_away(reason)

    @override
    def close(self) -> None:
        self.begin_to_close()
        self._thread.join(THREAD_END_TIMEOUT_S)

    def check_now(self) -> None:
        """Checks the server in the caller's thread, unless the server is away.

        A server that fails the check is away from then on.
        """
        if self._address is None:
            return
        try:
            self._check()
        except ServerFailure as failure:
            with self._changed:
                # While weights are loaded, the thread that loads them notices the failure itself.
                if not self._is_loading:
                    self._set_away(str(failure))

    @property
    def reason_away(self) -> str:
        """The reason why the server is away or, if it is present, was away the last time."""
        return self._reason_away

    @property
    def error(self) -> str | None:
        """The reason why the server was given up; None if it was not."""
        return self._error

    # The thread

    def _supervise(self) -> None:
        """Meets the server while it is away, and checks it now and then while it is present, until it is
        closed or given up.

        To meet a server is to find out whether this run can use it, and to give it the newest weights.
        """
        while True:
            with self._changed:
                if self._closed or self._error is not None:
                    return
                is_present, is_loading = self._address is not None, self._is_loading
            try:
                if is_loading:
                    pass  # the main thread, which loads weights, notices by itself whether the server fails
                elif is_present:
                    self._check()
                else:
                    self._meet()
            except ServerFailure as failure:
                with self._changed:
                    if not self._is_loading:
                        self._set_away(str(failure))
            except EngineError as error:
                self._give_up(str(error))
            except Exception as error:
                # If the error weren't caught, this thread would end, and the main thread would wait until
                # `start_timeout`.
                logger.exception(f"an error in the thread of the server at {self._url}")
                self._give_up(
                    f"the server at {self._url} can't be used, because of an error in treetune"
                    f" ({type(error).__name__}: {error}): the log has its traceback"
                )
            with self._changed:
                if not self._closed:
                    self._changed.wait(REACH_AGAIN_EVERY_S if self._address is None else CHECK_EVERY_S)

    def _give_up(self, error: str) -> None:
        """Records that the server can't be used any more, for the main thread to raise."""
        with self._changed:
            self._error = error
            self._set_away(error)

    def _check(self) -> None:
        """Checks a server that was present. Raises ServerFailure if another process answers, or if it has
        other weights."""
        state = self._describe()
        with self._changed:
            if self._is_loading or self._address is None:
                return  # this changed after the server was asked, so its answer is outdated
            if state.process != self._process:
                raise ServerFailure("it was restarted")
            if state.weights != self._weights_name:
                raise ServerFailure(f"its weights are {state.weights!r}, not {self._weights_name!r}")

    def _meet(self) -> None:
        """Makes a server present that was away, if the server fits this run and has the run's weights.

        The first rank loads the weights into the server if needed.

        Raises:
            ServerFailure: The server can't be used yet.
            EngineError: This run can't use the server at all.
        """
        state = self._introduce()
        weights_name = self._weights_name  # the main thread may change it meanwhile
        if self.loads_weights and (self._must_load or state.weights != weights_name):
            with self._weights_lock:
                if self._is_loading:
                    return  # the main thread loads newer weights
                self._load(self._weights)
                self._must_load = False
        elif state.weights != weights_name:
            raise ServerFailure("the first rank has not loaded the newest weights into it yet")
        with self._changed:
            if self._is_loading or self._closed or weights_name != self._weights_name:
                return  # the run has newer weights by now: the next meeting compares with their name
            if state.process != self._process:
                self._process = state.process
                self._epoch += 1  # a new process: addresses of the former one are outdated now
            self._address = self._make_address()
            self._changed.notify_all()

    def _load(self, weights: Path) -> None:
        """Loads the weights of a folder into the server. Raises ServerFailure."""
        address = self._make_address(with_weights=False)
        self._name_weights(address, "")  # empty while the weights are replaced
        try:
            self._from_folder.end(address, weights)  # lets the server read the folder
        except (ServerFailure, EngineError) as failure:
            raise ServerFailure(
                f"it could not load the weights in {weights}, a path that its machine must see: {failure}"
            ) from failure
        drop_cache(self._client, address, self._settings.sync_timeout)
        # Last, so that a server with a part of the weights, or with old prefixes, never has their name.
        self._name_weights(address, self._weights_name_of(weights))

    def _set_away(self, reason: str) -> None:
        """Records that the server is away. The caller holds `_changed`."""
        if self._address is not None:  # if it is None, the server has been away for longer
            self._away_since = time.monotonic()
        self._reason_away, self._address = reason, None
        self._changed.notify_all()

    def _make_address(self, *, with_weights: bool = True) -> Address:
        """Returns the server's address. Requests to it name the present weights, or none without
        `with_weights`."""
        return Address(self._url, self._epoch, self._key, self._weights_name if with_weights else "")

    def _weights_name_of(self, weights: Path) -> str:
        return f"{self._run} {weights.name}"

    @property
    def _weights_name(self) -> str:
        return self._weights_name_of(self._weights)
