"""A server's life: started, ready, watched, started anew when it dies, ended with everything of it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from treetune.engine.base import EngineLaunch
from treetune.engine.client import SAMPLES, Address, Client
from treetune.engine.launch import (
    END_S,
    ServerLaunch,
    ServerProcess,
    diagnosis,
    last_lines,
    listens,
    refuse_long_paths,
    with_time_for,
)
from treetune.engine.settings import EngineSettings, VllmSettings
from treetune.exceptions import EngineError, ServerFailure
from treetune.store.files import write_json
from treetune.store.timeline import SUFFIX, Timeline

POLL_S = 0.1
PORT_TRIES = 4


class Server:
    """A server as its engine sees it, be it this rank's own or another's. A sub-class sets `_address`, under
    `_changed`, while the server is there. Thread-safe."""

    loads = False
    """Whether this rank brings its weights in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._address: Address | None = None
        self._error: str | None = None
        self._epoch = self._in_a_row = 0
        self._closed = False

    @property
    def restarts(self) -> int:
        """Starts that came up, after the first: a failure that is noticed twice, by the thread and by a
        caller, is one restart."""
        return max(0, self._epoch - 1)

    def ready(self) -> Address:
        """Waits for the server. Raises EngineError if it didn't come up."""
        with self._changed:
            # `now` gives up by its own deadline, or the thread does, so this ends.
            while (address := self.now()) is None:
                self._changed.wait(POLL_S)
            return address

    def now(self) -> Address | None:
        """Returns the server if it is there, else None. Raises EngineError if it isn't coming."""
        raise NotImplementedError

    def failed(self, address: Address, reason: str) -> None:
        """Reports that the server at `address` misbehaved: it is to be ended and started anew."""
        raise NotImplementedError

    def gone(self, address: Address) -> str | None:
        """Returns the reason why a request to the server at `address` would wait in vain. None if it
        wouldn't, or if the request itself meets the failure."""
        return None

    def wait_anew(self) -> None:
        """Starts the deadline of waiting for this server anew, when work begins."""

    def succeeded(self) -> None:
        """Reports that work was finished: the restarts so far are forgiven."""
        self._in_a_row = 0

    def hold(self, held: bool) -> None:
        """Keeps a server that ends from being started anew while `held`: its memory is somebody else's."""

    def begin_weights(self, address: Address) -> Address:
        """Returns the address that takes new weights. From here on the server has neither the old ones nor
        the new ones. Raises ServerFailure."""
        return address

    def end_weights(self, address: Address, weights: Path) -> Address:
        """Returns the address that samples from the weights of that folder, which the server has now. Raises
        ServerFailure."""
        return address

    def use(self, weights: Path) -> None:
        """Sets the weights of a server that comes back."""

    def start_anew(self, weights: Path, reason: str) -> None:
        """Replaces the server, whatever it does, by one on these weights."""

    def begin_to_close(self) -> None:
        """Begins to end it, if it is ours, and waits for nothing."""
        with self._changed:
            self._closed = True
            self._address = None
            self._changed.notify_all()

    def close(self) -> None:
        """Ends it, if it is ours."""


class OwnServer(Server):
    """The server that this process started. A thread starts it, watches it and starts it anew. The other
    ranks read its address in `address_file`."""

    loads = True

    def __init__(self, launch: ServerLaunch, log: Path, address_file: Path | None) -> None:
        super().__init__()
        self._launch, self._settings, self._log = launch, launch.settings, log
        # A wrong choice of GPUs, or too long a path, is the caller's mistake, reported at once.
        launch.environment(Path())
        refuse_long_paths()
        self._address_file = address_file
        self._weights = launch.run.weights
        self._start_wanted = True
        self._bad_epoch: tuple[int, str] = (0, "")
        self._held = False
        self._client = Client()
        self._timeline = Timeline(log.with_suffix(SUFFIX))
        # The thread starts the processes; it lives as long as this object.
        self._thread = threading.Thread(target=self._supervise, name="engine-server", daemon=True)
        self._thread.start()

    @override
    def now(self) -> Address | None:
        with self._changed:
            if self._address is None:
                if self._error is not None:
                    raise EngineError(self._error)
                if self._closed:
                    raise EngineError("the engine was closed")
            return self._address

    @override
    def failed(self, address: Address, reason: str) -> None:
        with self._changed:
            if address.epoch == self._epoch and self._address is not None:
                self._bad_epoch = (address.epoch, reason)
                self._address = None
                self._changed.notify_all()

    @override
    def hold(self, held: bool) -> None:
        with self._changed:
            self._held = held
            self._changed.notify_all()

    @override
    def use(self, weights: Path) -> None:
        self._weights = weights

    @override
    def start_anew(self, weights: Path, reason: str) -> None:
        with self._changed:
            self._weights = weights
            self._address, self._error = None, None
            self._bad_epoch = (self._epoch, reason)
            self._start_wanted = True
            self._changed.notify_all()

    @override
    def close(self) -> None:
        self.begin_to_close()
        self._thread.join(END_S * 3)
        self._client.close()
        self._timeline.close()
        self._publish()

    def _supervise(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (self._held or not self._start_wanted):
                    self._changed.wait(0.5)
                if self._closed:
                    return
                self._start_wanted = False
                weights = self._weights
            try:
                with self._timeline.span("server", "starts", weights=weights.name):
                    process = self._start(weights)
            except Exception as error:  # any error ends the waiting of others, and is reported
                self._give_up(error)
                continue
            try:
                with self._changed:
                    self._epoch += 1
                    if not self._start_wanted:
                        self._address = process.address(self._epoch)
                    self._publish()
                    self._changed.notify_all()
                with self._timeline.span("server", "answers", start=self._epoch, pid=process.pid()) as ended:
                    ended["why"] = reason = self._watch(process)
            except Exception as error:
                process.end(at_once=True)
                self._give_up(error)
                continue
            process.end(at_once=not self._closed)
            with self._changed:
                self._address = None
                if self._closed:
                    return
                if self._start_wanted:
                    continue
                self._in_a_row += 1
                if self._in_a_row > self._settings.max_restarts:
                    self._error = (
                        f"the engine's server failed {self._in_a_row} times in a row (max_restarts is"
                        f" {self._settings.max_restarts}), the last time: {reason}."
                        f"{diagnosis(process.log_text())}\n{last_lines(self._log)}"
                    )
                    self._publish()
                else:
                    self._start_wanted = True
                self._changed.notify_all()

    def _give_up(self, error: Exception) -> None:
        """Reports on all ranks that there is no server."""
        known = isinstance(error, EngineError | OSError)
        with self._changed:
            self._address = None
            if not self._start_wanted:
                what = "" if known else f"{type(error).__name__} while the server was started or watched: "
                self._error = f"{what}{error}"
            with contextlib.suppress(OSError):  # a full disk: this rank's error ends the others
                self._publish()
            self._changed.notify_all()

    def _watch(self, process: ServerProcess) -> str:
        """Returns the reason when the process has ended or has to end."""
        poisoned = poison_file(self._address_file, self._epoch) if self._address_file else None
        while True:
            with self._changed:
                if self._closed:
                    return "closed"
                if self._start_wanted or self._bad_epoch[0] == self._epoch:
                    return self._bad_epoch[1]
                self._changed.wait(POLL_S)
            if (code := process.exit_code()) is not None:
                return f"its process ended with code {code}"
            if poisoned is not None and poisoned.exists():
                return poisoned.read_text()

    def _start(self, weights: Path) -> ServerProcess:
        """Returns a server that has sampled. Raises EngineError with the end of the log."""
        for attempt in range(PORT_TRIES):
            process = ServerProcess(self._launch, weights, self._log)
            try:
                self._wait_until_sampling(process)
            except ServerFailure as failure:
                text = process.log_text()
                process.end(at_once=True)
                # Between our asking the system for a port and the server's using it, another may have it.
                if "address already in use" in text.lower() and attempt + 1 < PORT_TRIES:
                    continue
                raise EngineError(
                    f"the engine's server did not come up: {failure}.{diagnosis(text)}\n"
                    f"{last_lines(self._log)}"
                ) from failure
            except BaseException:
                process.end(at_once=True)
                raise
            return process
        raise AssertionError("the last try returns or raises")

    def _wait_until_sampling(self, process: ServerProcess) -> None:
        """Waits until a new server has sampled tokens.

        Raises ServerFailure if its process ends, if that takes longer than `start_timeout`, or if the server
        is no longer wanted.
        """
        deadline = time.monotonic() + self._settings.start_timeout
        is_listening = False
        while True:
            if self._closed or self._start_wanted:
                raise ServerFailure("no longer wanted")
            if (code := process.exit_code()) is not None:
                raise ServerFailure(f"its process ended with code {code}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerFailure(
                    f"no token sampled within start_timeout = {self._settings.start_timeout:.0f} s"
                )
            is_listening = is_listening or listens(process.port)
            if not is_listening:
                time.sleep(POLL_S)
                continue
            # It may listen before it can sample: a failed request is sent again.
            with contextlib.suppress(ServerFailure):
                # Two sizes of batch: what is compiled at the first use is compiled for one and for many.
                for n in (1, 3):
                    self._client.post(process.address(), SAMPLES, warm_up(n), timeout=left)
                return
            time.sleep(POLL_S)

    def _publish(self) -> None:
        if self._address_file is None or not self._address_file.parent.is_dir():
            return
        address = self._address
        state = {
            "url": address.url if address else None,
            "key": address.key if address else None,
            "epoch": self._epoch,
            "error": self._error or ("the engine was closed" if self._closed else None),
            "restarts": self.restarts,
        }
        write_json(self._address_file, state, durable=False, private=True)


class RemoteServer(Server):
    """The first rank's server, seen from another rank: its address comes in a file, and failures are reported
    to it in another one."""

    def __init__(self, address_file: Path, log: Path, settings: VllmSettings) -> None:
        super().__init__()
        self._file, self._log, self._settings = address_file, log, settings
        self._bad_epoch = 0
        self._missed_since: float | None = None

    @override
    def ready(self) -> Address:
        self.wait_anew()
        return super().ready()

    @override
    def now(self) -> Address | None:
        if self._closed:
            raise EngineError("the engine was closed")
        try:
            state: dict[str, Any] = json.loads(self._file.read_text())
        except FileNotFoundError:
            state = {}
        if state.get("error"):
            raise EngineError(state["error"])
        if state.get("url") and state["epoch"] > self._bad_epoch:
            self._epoch, self._missed_since = state["epoch"], None
            return Address(state["url"], state["epoch"], state["key"])
        # The first rank needs as long for a start; then this rank knows that it is not coming.
        self._missed_since = self._missed_since or time.monotonic()
        if time.monotonic() > self._missed_since + PORT_TRIES * self._settings.start_timeout + END_S:
            raise EngineError(f"the first rank's server was not there in time; its log is {self._log}")
        return None

    @override
    def failed(self, address: Address, reason: str) -> None:
        self._bad_epoch = max(self._bad_epoch, address.epoch)
        self.wait_anew()
        poison_file(self._file, address.epoch).write_text(reason)

    @override
    def succeeded(self) -> None:
        self.wait_anew()  # the first rank's own work decides about restarts

    @override
    def wait_anew(self) -> None:
        self._missed_since = None

    @override
    def hold(self, held: bool) -> None:
        if not held:  # the first rank's decides about restarts
            self.wait_anew()


def start_servers(settings: EngineSettings, run: EngineLaunch, log: Path) -> list[Server]:
    """Begins to start servers, for all ranks, of a model that isn't trained. Every rank calls this, and the
    first one's starts them. Raises ValueError if the settings don't suit the device."""
    if not isinstance(settings, VllmSettings):
        raise ValueError(
            f"engines.judge.server is {settings.registered_name()!r}, and a judge is asked over HTTP: set it"
            " to 'vllm'"
        )
    if run.device == "cpu" and settings.replicas is None and settings.addresses is None:
        # More servers, as many as fill the cores, are for the model that is trained.
        settings = replace(settings, replicas=1, devices=None)
    settings = with_time_for(replace(settings, context_length=None), run.weights)
    launch = ServerLaunch(settings, run, is_trained=False)
    return servers_of(launch, log, run.ranks.folder if run.ranks.world_size > 1 else None)


def servers_of(launch: ServerLaunch, log: Path, folder: Path | None) -> list[Server]:
    """Returns an engine's servers: this process's own, or those that the first rank starts if the ranks share
    them and `folder` is one that all see. The first one's log is `log`; the others' are beside it. Raises
    ValueError for too few GPUs, before any is started."""
    count = launch.settings.replicas_on(launch.run.device)
    launches = [replace(launch, replica=number) for number in range(count)]
    is_first = folder is None or launch.run.ranks.rank == 0
    if is_first:
        for each in launches:
            each.environment(Path())
    servers: list[Server] = []
    for each in launches:
        name = f"-{each.replica}" if each.replica else ""
        its_log = log.with_stem(log.stem + name)
        address_file = folder / f"server{name}.json" if folder else None
        if is_first:
            servers.append(OwnServer(each, its_log, address_file))
        else:
            assert address_file is not None
            servers.append(RemoteServer(address_file, its_log, launch.settings))
    return servers


def close_servers(servers: list[Server]) -> None:
    """Ends all servers of ours side by side, and waits for them."""
    for server in servers:
        server.begin_to_close()
    for server in servers:
        server.close()


def poison_file(address_file: Path, epoch: int) -> Path:
    """Returns the file in which a rank reports that the server of this epoch failed it."""
    return address_file.with_name(f"{address_file.stem}-{epoch}.failed")


def warm_up(n: int) -> dict[str, Any]:
    """Returns the smallest request that takes every step which real ones take."""
    sampling = {"n": n, "seed": 0, "max_tokens": 2, "logprobs": 0}
    return {"prompt": [0], "sampling": sampling, "priority": 0, "cache_salt": "warm-up"}
