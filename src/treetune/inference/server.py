"""A server's life: started, ready, watched, started anew when it dies, ended with everything of it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.inference import scratch
from treetune.inference.base import EngineError
from treetune.inference.client import Address, Client, ServerFailure
from treetune.inference.launch import MODEL_NAME, Launch
from treetune.inference.server_interface import AwaitedServer, Server
from treetune.inference.server_log import diagnosis, last_lines
from treetune.inference.server_process import END_S, Process, listens
from treetune.store.files import write_json
from treetune.store.timeline import SUFFIX, Timeline

if TYPE_CHECKING:
    from treetune.inference.settings import VllmSettings

POLL_S = 0.1
PORT_TRIES = 4


class OwnServer(AwaitedServer):
    """The server that this process started. A thread starts it, watches it and starts it anew.

    `address_file` is where the other ranks find it. Thread-safe.
    """

    loads = True

    def __init__(self, launch: Launch, weights: Path, log: Path, address_file: Path | None) -> None:
        super().__init__()
        self._launch, self._settings, self._log = launch, launch.settings, log
        # A wrong choice of GPUs, or too long a path, is the caller's mistake, told at once.
        launch.environment(Path())
        scratch.refuse_long_paths()
        self._address_file = address_file
        self._weights = weights
        self._start_wanted = True
        self._bad_epoch: tuple[int, str] = (0, "")
        self._held = False
        self._client = Client()
        self._timeline = Timeline(log.with_suffix(SUFFIX))
        # The thread starts the processes; it lives as long as this object.
        self._thread = threading.Thread(target=self._supervise, name="engine-server", daemon=True)
        self._thread.start()

    @property
    def restarts(self) -> int:
        """Starts that came up, after the first. One failure that is noticed twice, by the thread and by
        a caller, is one restart.
        """
        return max(0, self._epoch - 1)

    def now(self) -> Address | None:
        with self._changed:
            if self._address is None:
                if self._error is not None:
                    raise EngineError(self._error)
                if self._closed:
                    raise EngineError("the engine was closed")
            return self._address

    def failed(self, address: Address, reason: str) -> None:
        with self._changed:
            if address.epoch == self._epoch and self._address is not None:
                self._bad_epoch = (address.epoch, reason)
                self._address = None
                self._changed.notify_all()

    def wait_anew(self) -> None:
        """Each start has its own deadline."""

    def hold(self, held: bool) -> None:
        with self._changed:
            self._held = held
            self._changed.notify_all()

    def use(self, weights: Path) -> None:
        """From here on, a new start is on these weights."""
        self._weights = weights

    def start_anew(self, weights: Path, reason: str) -> None:
        """Ends the server, whatever it does, and starts one on `weights`."""
        with self._changed:
            self._weights = weights
            self._address, self._error = None, None
            self._bad_epoch = (self._epoch, reason)
            self._start_wanted = True
            self._changed.notify_all()

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
            except Exception as error:  # whatever it is ends the waiting of others, and is told
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
        """Tells whoever waits, on all ranks, that there is no server."""
        known = isinstance(error, EngineError | OSError)
        with self._changed:
            self._address = None
            if not self._start_wanted:
                what = "" if known else f"{type(error).__name__} while the server was started or watched: "
                self._error = f"{what}{error}"
            with contextlib.suppress(OSError):  # a full disk: this rank's error ends the others
                self._publish()
            self._changed.notify_all()

    def _watch(self, process: Process) -> str:
        """Returns when the process is no more or shall be no more, with why."""
        poisoned = self._poison_file(self._epoch)
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

    def _start(self, weights: Path) -> Process:
        """A server that has sampled. Raises EngineError with the end of the log."""
        for attempt in range(PORT_TRIES):
            process = Process(self._launch, weights, self._log)
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

    def _wait_until_sampling(self, process: Process) -> None:
        deadline = time.monotonic() + self._settings.start_timeout
        listening = False
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
            if not (listening := listening or listens(process.port)):
                time.sleep(POLL_S)
                continue
            with contextlib.suppress(ServerFailure):
                # Two sizes of batch: what is compiled at the first use is compiled for one and for many.
                for n in (1, 3):
                    self._client.post(process.address(), "/v1/completions", warm_up(n), timeout=left)
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

    def _poison_file(self, epoch: int) -> Path | None:
        return poison_file(self._address_file, epoch) if self._address_file else None


class RemoteServer(Server):
    """The first rank's server, seen from another rank: found through a file, and told of failures
    through another.
    """

    def __init__(self, address_file: Path, log: Path, settings: VllmSettings) -> None:
        self._file, self._log, self._settings = address_file, log, settings
        self._bad_epoch = 0
        self._restarts = 0
        self._missed_since: float | None = None
        self._closed = False

    @property
    def restarts(self) -> int:
        return self._restarts

    def ready(self) -> Address:
        self.wait_anew()
        while (address := self.now()) is None:
            time.sleep(POLL_S)
        return address

    def now(self) -> Address | None:
        if self._closed:
            raise EngineError("the engine was closed")
        state = self._read()
        if state.get("error"):
            raise EngineError(state["error"])
        if state.get("url") and state["epoch"] > self._bad_epoch:
            self._restarts, self._missed_since = state["restarts"], None
            return Address(state["url"], state["epoch"], state["key"])
        # The first rank needs as long for a start; then this rank knows that it is not coming.
        self._missed_since = self._missed_since or time.monotonic()
        if time.monotonic() > self._missed_since + PORT_TRIES * self._settings.start_timeout + END_S:
            raise EngineError(f"the first rank's server was not there in time; its log is {self._log}")
        return None

    def failed(self, address: Address, reason: str) -> None:
        self._bad_epoch = max(self._bad_epoch, address.epoch)
        self.wait_anew()
        poison_file(self._file, address.epoch).write_text(reason)

    def succeeded(self) -> None:
        """The first rank's own work decides about restarts."""
        self.wait_anew()

    def wait_anew(self) -> None:
        self._missed_since = None

    def hold(self, held: bool) -> None:
        """The first rank's decides of this, too."""
        if not held:
            self.wait_anew()

    def begin_to_close(self) -> None:
        self._closed = True

    def close(self) -> None:
        self._closed = True

    def _read(self) -> dict[str, Any]:
        try:
            return json.loads(self._file.read_text())
        except FileNotFoundError:
            return {}


def servers_of(launch: Launch, weights: Path, log: Path, meeting_place: Path | None) -> list[Server]:
    """An engine's servers: this process's own, or those that the first rank starts, where the ranks share
    them and `meeting_place` is a folder that all see. The first one's log is `log`; the others' are
    beside it. Raises ValueError where there are too few GPUs, before any is started."""
    launches = [replace(launch, replica=i) for i in range(launch.settings.replicas_on(launch.device))]
    found: list[Server] = []
    is_first = meeting_place is None or launch.rank == 0
    if is_first:
        for one in launches:  # before any is started
            one.environment(Path())
    for one in launches:
        name = f"-{one.replica}" if one.replica else ""
        its_log = log.with_stem(log.stem + name)
        address_file = meeting_place / f"server{name}.json" if meeting_place else None
        if is_first:
            found.append(OwnServer(one, weights, its_log, address_file))
        else:
            assert address_file is not None
            found.append(RemoteServer(address_file, its_log, launch.settings))
    return found


def poison_file(address_file: Path, epoch: int) -> Path:
    """Where a rank leaves word that the server of this epoch failed it."""
    return address_file.with_name(f"{address_file.stem}-{epoch}.failed")


def warm_up(n: int) -> dict[str, Any]:
    """The smallest request that takes every step which real ones take."""
    return {
        "model": MODEL_NAME,
        "prompt": [0],
        "n": n,
        "seed": 0,
        "max_tokens": 2,
        "logprobs": 0,
        "return_token_ids": True,
        "cache_salt": "warm-up",
    }
