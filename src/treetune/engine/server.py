"""Starts a server, watches it, restarts it when it dies, and ends it with all of its processes.

States of an `OwnServer`, which its thread ``engine-server`` runs through::

    wanted ──► starting ──► running ──► ended ──► wanted      it died, or `report_failure` said so
                  │ fails      │ close                 │
                  ▼            ▼                       │ more than max_restarts times in a row
               given up     closed                     ▼
                                                    given up

    `wait_until_ready`  waits until the server runs; raises EngineError if it was given up or closed
    `set_held`          keeps an ended server from being started until it is called again

The other ranks see this server as a `RemoteServer`, through two kinds of files in the run's folder of
weights::

    server.json          first rank → others    address, key, epoch, error; written at each change
    server-EPOCH.failed  others → first rank    a rank reports that the server of this epoch failed
"""

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
from treetune.engine.client import SAMPLES_ROUTE, Address, Client
from treetune.engine.launch import (
    SERVER_END_TIMEOUT_S,
    ServerLaunch,
    ServerProcess,
    add_reading_time,
    diagnose_log,
    is_listening,
    read_last_lines,
    refuse_long_paths,
    refuse_wider_windows,
)
from treetune.engine.settings import EngineSettings, VllmSettings
from treetune.exceptions import EngineError, ServerFailure
from treetune.store.files import write_json, write_text
from treetune.store.timeline import TIMELINE_SUFFIX, Timeline

POLL_SERVER_EVERY_S = 0.1
"""Seconds between two checks of a server's process."""
MOST_PORT_TRIES = 4
"""Most starts of a server on another port, if its port is taken meanwhile."""


class Server:
    """A server as its engine sees it, started by this rank or by another process. Thread-safe.

    A subclass sets `_address` while the server runs, and notifies `_changed`.
    """

    loads_weights = False
    """Whether this rank sends the server its weights."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._address: Address | None = None
        self._error: str | None = None
        """The reason why the server was given up; None if it was not."""
        self._epoch = 0
        """The number of starts that succeeded. It identifies the running server process."""
        self._failures_in_a_row = 0
        """The number of failures since `report_success` was last called."""
        self._closed = False

    @property
    def restarts(self) -> int:
        """The number of successful starts after the first. A failure that both the thread and a caller notice
        counts once."""
        return max(0, self._epoch - 1)

    def wait_until_ready(self) -> Address:
        """Waits until the server runs, and returns its address. Raises EngineError if it was given up."""
        with self._changed:
            # This ends, since `current_address` or the thread gives the server up after a deadline.
            while (address := self.current_address()) is None:
                self._changed.wait(POLL_SERVER_EVERY_S)
            return address

    def current_address(self) -> Address | None:
        """Returns the server's address; None while it is being started. Raises EngineError if it was given
        up."""
        raise NotImplementedError

    def report_failure(self, address: Address, reason: str) -> None:
        """Reports that the server at `address` failed. It is then ended and restarted."""
        raise NotImplementedError

    def reason_gone(self, address: Address) -> str | None:
        """Returns the reason why a request to the server at `address` would never be answered. Returns None
        if the request will be answered, or will fail by itself."""
        return None

    def wait_anew(self) -> None:
        """Restarts the deadline of the wait for this server. Called when work begins."""

    def report_success(self) -> None:
        """Reports that work was finished. Earlier failures then no longer count towards `max_restarts`."""
        self._failures_in_a_row = 0

    def set_held(self, held: bool) -> None:
        """Sets whether the server is held: if it ends, it is not restarted until it is no longer held. While
        the server is held, the trainer uses its memory."""

    def begin_weights(self, address: Address) -> Address:
        """Begins to load new weights, and returns the address that they are sent to. From now on the server
        has neither the old weights nor all of the new ones. Raises ServerFailure."""
        return address

    def end_weights(self, address: Address, weights: Path) -> Address:
        """Notes that the server has the weights of that folder now, and returns the address that samples from
        them. Raises ServerFailure."""
        return address

    def set_newest_weights(self, weights: Path) -> None:
        """Sets the newest weights, with which the server is restarted if it dies."""

    def start_anew(self, weights: Path, reason: str) -> None:
        """Ends the server, and starts a new one with these weights."""

    def begin_to_close(self) -> None:
        """Begins to end the server if this process started it, and returns at once."""
        with self._changed:
            self._closed = True  # the thread of an `OwnServer` sees this, and ends the server
            self._address = None
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the server if this process started it, and waits for its end."""


class OwnServer(Server):
    """A server that this process starts. A thread starts, watches and restarts it. The other ranks read its
    address from `address_file`."""

    loads_weights = True

    def __init__(self, launch: ServerLaunch, log: Path, address_file: Path | None) -> None:
        super().__init__()
        self._launch, self._settings, self._log = launch, launch.settings, log
        # These three calls raise ValueError here, in the caller's thread: for GPUs that don't exist, for
        # paths that are too long, and for a model that vLLM computes differently.
        launch.environment(Path())
        refuse_long_paths()
        refuse_wider_windows(launch.run.weights, launch.context_length)
        self._address_file = address_file
        self._weights = launch.run.weights
        self._start_wanted = True
        """Whether the thread is to start a server."""
        self._last_failure: tuple[int, str] = (0, "")
        """The last epoch (the number of a server's start) that was reported as failed, and the reason."""
        self._held = False  # set by `set_held`: an ended server is not restarted yet
        self._client = Client()
        self._timeline = Timeline(log.with_suffix(TIMELINE_SUFFIX))
        # The thread starts the processes, and lives as long as this object.
        self._thread = threading.Thread(target=self._supervise, name="engine-server", daemon=True)
        self._thread.start()

    @override
    def current_address(self) -> Address | None:
        """Returns the server's address; None while it doesn't run. Raises EngineError if it was given up or
        closed."""
        with self._changed:
            if self._address is None:
                if self._error is not None:
                    raise EngineError(self._error)
                if self._closed:
                    raise EngineError("the engine was closed")
            return self._address

    @override
    def report_failure(self, address: Address, reason: str) -> None:
        """Reports that the server at this address has failed, so that the thread ends and replaces it."""
        with self._changed:
            # An earlier epoch is that of a server that has been replaced. Without an address, the server has
            # been reported already, or is being ended.
            if address.epoch == self._epoch and self._address is not None:
                self._last_failure = (address.epoch, reason)
                self._address = None
                self._changed.notify_all()

    @override
    def set_held(self, held: bool) -> None:
        with self._changed:
            self._held = held
            self._changed.notify_all()

    @override
    def set_newest_weights(self, weights: Path) -> None:
        self._weights = weights

    @override
    def start_anew(self, weights: Path, reason: str) -> None:
        """Has the thread end the present server, and start another one with these weights."""
        with self._changed:
            self._weights = weights
            self._address, self._error = None, None
            # The epoch is the number of the start that succeeded last, so it stands for the present process.
            # This process now counts as failed, so the thread ends it, if it runs.
            self._last_failure = (self._epoch, reason)
            self._start_wanted = True
            self._changed.notify_all()

    @override
    def close(self) -> None:
        self.begin_to_close()
        # This is more than `ServerProcess.end` takes, which may wait twice for `SERVER_END_TIMEOUT_S`.
        self._thread.join(SERVER_END_TIMEOUT_S * 3)
        self._client.close()
        self._timeline.close()
        self._publish()  # so that ranks that still wait for the server stop

    def _supervise(self) -> None:
        """Starts a server whenever one is wanted, and watches it until it ends or is replaced.

        After a failure another server is wanted, unless the server has failed too often. Returns when the
        engine is closed.
        """
        while True:
            with self._changed:
                # While the server is held (`set_held`), the trainer uses its memory, and no server is
                # started.
                while not self._closed and (self._held or not self._start_wanted):
                    self._changed.wait()
                if self._closed:
                    return
                self._start_wanted = False
                weights = self._weights
            try:
                with self._timeline.span("server", "starts", weights=weights.name):
                    process = self._start(weights)
            except Exception as error:  # other threads and ranks wait for a server, and must get any error
                self._give_up(error)
                continue
            try:
                with self._changed:
                    self._epoch += 1
                    # If `start_anew` was called meanwhile, this server has outdated weights, and is ended.
                    if not self._start_wanted:
                        self._address = process.address(self._epoch)
                    self._publish()
                    self._changed.notify_all()
                start, pid = self._epoch, process.pid()
                with self._timeline.span("server", "answers", start=start, pid=pid) as details:
                    reason = self._watch(process)
                    details["why"] = reason
            except Exception as error:
                process.end(at_once=True)
                self._give_up(error)
                continue
            # When the engine is closed, the server still works, and gets time for a clean end. A server that
            # has failed or is replaced gets none.
            process.end(at_once=not self._closed)
            with self._changed:
                self._address = None
                if self._closed:
                    return
                if self._start_wanted:  # by `start_anew`, so this isn't a failure that counts
                    continue
                self._failures_in_a_row += 1
                if self._failures_in_a_row > self._settings.max_restarts:
                    self._error = (
                        f"the engine's server failed {self._failures_in_a_row} times in a row (max_restarts"
                        f" is {self._settings.max_restarts}), the last time: {reason}."
                        f"{diagnose_log(process.log_text())}\n{read_last_lines(self._log)}"
                    )
                    self._publish()
                else:
                    self._start_wanted = True
                self._changed.notify_all()

    def _give_up(self, error: Exception) -> None:
        """Reports to all ranks that there is no server."""
        message = str(error)
        if not isinstance(error, EngineError | OSError):  # the messages of these say what has failed
            message = f"{type(error).__name__} while the server was started or watched: {message}"
        with self._changed:
            self._address = None
            # If `start_anew` was called meanwhile, the error is of a start that isn't wanted any more.
            if not self._start_wanted:
                self._error = message
            # If the disk is full, the other ranks don't read the message. They still end, since the main
            # thread of this rank raises the error.
            with contextlib.suppress(OSError):
                self._publish()
            self._changed.notify_all()

    def _watch(self, process: ServerProcess) -> str:
        """Waits until the process has ended or has to be ended, and returns the reason for its end."""
        # The file in which another rank reports that this server failed.
        failure_file = failure_file_of(self._address_file, self._epoch) if self._address_file else None
        while True:
            with self._changed:
                if self._closed:
                    return "closed"
                # The epoch is the number of a server's start. `start_anew`, which wants another server, and
                # `report_failure`, which reports this one, store the epoch and the reason.
                failed_epoch, reason = self._last_failure
                if self._start_wanted or failed_epoch == self._epoch:
                    return reason
                self._changed.wait(POLL_SERVER_EVERY_S)
            if (code := process.exit_code()) is not None:
                return f"its process ended with code {code}"
            if failure_file is not None and failure_file.exists():
                return failure_file.read_text()

    def _start(self, weights: Path) -> ServerProcess:
        """Starts a server process, and returns it when it has sampled tokens. Raises EngineError with the end
        of the log if it fails."""
        for attempt in range(MOST_PORT_TRIES):
            process = ServerProcess(self._launch, weights, self._log)
            try:
                self._wait_until_sampling(process)
            except ServerFailure as failure:
                text = process.log_text()
                process.end(at_once=True)
                # Another process may have taken the port between `find_free_port` and the server's start.
                if "address already in use" in text.lower() and attempt + 1 < MOST_PORT_TRIES:
                    continue
                raise EngineError(
                    f"the engine's server did not come up: {failure}.{diagnose_log(text)}\n"
                    f"{read_last_lines(self._log)}"
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
        listens = False
        while True:
            # `start_anew` sets `_start_wanted`: another server is wanted in place of this one.
            if self._closed or self._start_wanted:
                raise ServerFailure("no longer wanted")
            if (code := process.exit_code()) is not None:
                raise ServerFailure(f"its process ended with code {code}")
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise ServerFailure(
                    f"no token sampled within start_timeout = {self._settings.start_timeout:.0f} s"
                )
            listens = listens or is_listening(process.port)
            if not listens:
                time.sleep(POLL_SERVER_EVERY_S)
                continue
            # The server may listen before it can sample, so a request that fails is sent again.
            with contextlib.suppress(ServerFailure):
                # Two sizes of batches, since some code is compiled at first use for one sample and for
                # several.
                for n in (1, 3):
                    self._client.post(
                        process.address(), SAMPLES_ROUTE, make_warm_up_body(n), timeout=remaining_s
                    )
                return
            time.sleep(POLL_SERVER_EVERY_S)

    def _publish(self) -> None:
        """Writes the state of the server for the other ranks."""
        # The run may have deleted the folder at its end.
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
        write_json(self._address_file, state, durable=False, private=True)  # since it contains the key


class RemoteServer(Server):
    """The first rank's server, as another rank sees it. This rank reads its address from a file, and reports
    failures in another one."""

    def __init__(self, address_file: Path, log: Path, settings: VllmSettings) -> None:
        super().__init__()
        self._file, self._log, self._settings = address_file, log, settings
        self._failed_epoch = 0
        """The last epoch (the number of a server's start) that this rank has reported as failed."""
        self._waits_since: float | None = None
        """The time since which this rank waits for the server; None if it doesn't wait."""

    @override
    def wait_until_ready(self) -> Address:
        self.wait_anew()
        return super().wait_until_ready()

    @override
    def current_address(self) -> Address | None:
        """Returns the server's address, which the first rank writes into a file; None while there is none.
        Raises EngineError if the server was given up or is too late."""
        if self._closed:
            raise EngineError("the engine was closed")
        try:
            state: dict[str, Any] = json.loads(self._file.read_text())
        except FileNotFoundError:
            state = {}
        if state.get("error"):
            raise EngineError(state["error"])
        # A server that this rank has reported as failed may still be in the file for a moment. Its epoch, the
        # number of its start, is the one that was reported, and a new server has a higher one.
        if state.get("url") and state["epoch"] > self._failed_epoch:
            self._epoch, self._waits_since = state["epoch"], None
            return Address(state["url"], state["epoch"], state["key"])
        # The first rank tries up to `MOST_PORT_TRIES` ports, for up to `start_timeout` each.
        self._waits_since = self._waits_since or time.monotonic()
        longest_wait_s = MOST_PORT_TRIES * self._settings.start_timeout + SERVER_END_TIMEOUT_S
        if time.monotonic() > self._waits_since + longest_wait_s:
            raise EngineError(f"the first rank's server did not start in time; its log is {self._log}")
        return None

    @override
    def report_failure(self, address: Address, reason: str) -> None:
        self._failed_epoch = max(self._failed_epoch, address.epoch)
        self.wait_anew()
        # The first rank reads this file, and starts the server again.
        write_text(failure_file_of(self._file, address.epoch), reason)

    @override
    def report_success(self) -> None:
        self.wait_anew()  # only the first rank counts failures, and resets the count after its own work

    @override
    def wait_anew(self) -> None:
        self._waits_since = None

    @override
    def set_held(self, held: bool) -> None:
        if not held:  # only the first rank restarts the server
            self.wait_anew()


def start_servers(settings: EngineSettings, run: EngineLaunch, log: Path) -> list[Server]:
    """Begins to start the servers of a model that isn't trained, such as a judge. Every rank calls this, and
    the first one starts the servers, which all ranks share.

    Raises:
        ValueError: The settings don't fit the device.
    """
    if not isinstance(settings, VllmSettings):
        raise ValueError(
            f"engines.judge.server is {settings.registered_name()!r}, but a judge needs a server that answers"
            " over HTTP: set it to 'vllm'"
        )
    if run.device == "cpu" and settings.replicas is None and settings.addresses is None:
        # By default, the policy's servers fill the cores, so a judge gets a single server. `devices` lists
        # GPUs, and `VllmSettings` would refuse a list for more servers than `replicas`.
        settings = replace(settings, replicas=1, devices=None)
    # The context length is that of `run`. A context length in the settings would replace it.
    settings = replace(settings, context_length=None)
    settings = add_reading_time(settings, run.weights)
    launch = ServerLaunch(settings, run, is_trained=False)
    return make_servers(launch, log, run.ranks.folder if run.ranks.world_size > 1 else None)


def make_servers(launch: ServerLaunch, log: Path, folder: Path | None) -> list[Server]:
    """Returns an engine's servers, and begins to start them.

    Args:
        log: The log of the first server. The others' logs are in the same folder.
        folder: A folder that all ranks see, if all ranks share the servers. The first rank then starts them.
            None: the servers are only for this rank, which starts them.

    Raises:
        ValueError: There are too few GPUs. No server has been started then.
    """
    count = launch.settings.replicas_on(launch.run.device)
    launches = [replace(launch, replica=number) for number in range(count)]
    starts_them = folder is None or launch.run.ranks.rank == 0
    if starts_them:
        for launch_of_server in launches:
            launch_of_server.environment(Path())  # raises for GPUs that don't exist
    servers: list[Server] = []
    for launch_of_server in launches:
        suffix = f"-{launch_of_server.replica}" if launch_of_server.replica else ""
        log_of_server = log.with_stem(log.stem + suffix)
        address_file = folder / f"server{suffix}.json" if folder else None
        if starts_them:
            servers.append(OwnServer(launch_of_server, log_of_server, address_file))
        else:
            assert address_file is not None
            servers.append(RemoteServer(address_file, log_of_server, launch.settings))
    return servers


def close_servers(servers: list[Server]) -> None:
    """Ends all servers that this process started, at the same time, and waits for them."""
    for server in servers:
        server.begin_to_close()
    for server in servers:
        server.close()


def failure_file_of(address_file: Path, epoch: int) -> Path:
    """Returns the file in which a rank reports that the server of this epoch failed."""
    return address_file.with_name(f"{address_file.stem}-{epoch}.failed")


def make_warm_up_body(n: int) -> dict[str, Any]:
    """Returns the body of the smallest request for `n` samples that runs all of the server's code that real
    requests run."""
    sampling = {"n": n, "seed": 0, "max_tokens": 2, "logprobs": 0}
    return {"prompt": [0], "sampling": sampling, "priority": 0, "cache_salt": "warm-up"}
