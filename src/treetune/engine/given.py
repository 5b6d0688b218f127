"""Uses servers that the run did not start (`serve_engine`), on this machine or on others.

The thread ``engine-given`` of each server, on every rank::

    away ──► _meet: has it this run's settings? the first rank gives it the newest weights ──► present
     ▲                                                                                          │
     └────────── _check, every CHECK_S: another process answers, or it has other weights ◄──────┘

The main thread waits in `Server.ready` until the server is present, and for `start_timeout` at most. A server
that fails is away at once, so that its requests go to the other servers.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from typing_extensions import override

from treetune.engine.base import EngineLaunch
from treetune.engine.client import Address, Client
from treetune.engine.key import ROUTE
from treetune.engine.launch import ServerLaunch
from treetune.engine.server import Server
from treetune.engine.settings import VllmSettings
from treetune.engine.transfer import FromFolder, drop_cache
from treetune.exceptions import EngineError, ServerFailure

CHECK_S = 5.0
"""Seconds between two checks of a server that is present."""
AWAY_S = 0.2
"""Seconds between two attempts to reach a server that is away."""
ANSWER_S = 60.0
"""Most seconds until a server describes itself, also while it samples."""
END_S = 5.0
"""Most seconds until a server's thread ends."""

SETTING = "engines.policy.addresses"


def read_key(path: Path) -> str:
    """Returns the key in a file. Raises ValueError if the file can't be read, is empty, or is readable by
    other users."""
    try:
        mode = path.stat().st_mode
        key = path.read_text().strip()
    except OSError as error:
        raise ValueError(
            f"engines.policy.key_file, {path}, can't be read ({error.strerror}): it must contain the key with"
            " which the servers were started (serve_engine --key-file)"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"engines.policy.key_file, {path}, can be read by others: chmod 600 {path}")
    if not key:
        raise ValueError(f"engines.policy.key_file, {path}, is empty: it must contain the key of the servers")
    return key


def shared_settings(launch: ServerLaunch, weights: Path) -> dict[str, Any]:
    """Returns the settings that a server must share with the run."""
    settings = launch.settings
    return {
        "vllm": _version(),
        "dtype": settings.resolved_dtype(launch.run.device),
        "context_length": launch.context_length,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "weight_transfer": launch.run.transfer,
        "model": json.loads((weights / "config.json").read_text()),
    }


def _version() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "none"


def servers_at_addresses(settings: VllmSettings, launch: EngineLaunch) -> list[Server]:
    """Returns the servers at the settings' addresses. Collective."""
    assert settings.addresses is not None and settings.key_file is not None
    key = read_key(Path(settings.key_file).expanduser())
    interface = os.environ.get("NCCL_SOCKET_IFNAME")
    are_here = all("//127." in url for url in settings.addresses)
    if launch.transfer == "nccl" and interface in ("lo", "=lo") and not are_here:
        raise ValueError(
            "engines.policy.weight_transfer is 'nccl' and the servers at addresses are on other machines,"
            " but NCCL_SOCKET_IFNAME is this machine's loopback: set it to the network interface that reaches"
            " the other machines"
        )
    run = launch.ranks.gather(secrets.token_hex(8))[0]
    is_first = launch.ranks.rank == 0
    return [
        GivenServer(url, key, ServerLaunch(settings, launch), run, loads=is_first)
        for url in settings.addresses
    ]


class GivenServer(Server):
    """A server that the run neither starts nor ends. While it is away, the engine uses the others, and waits
    for this one for `start_timeout` at most.

    The first rank (`loads`) loads weights into it: the start weights at first, and the newest ones whenever
    the server comes back without them. The name of the weights consists of the run's and the folder's name,
    and the server refuses requests for weights of another name.
    """

    def __init__(self, url: str, key: str, launch: ServerLaunch, run: str, *, loads: bool) -> None:
        super().__init__()
        weights = launch.run.weights
        self.loads, self._url, self._key, self._run = loads, url, key, run
        self._settings, self._expected = launch.settings, shared_settings(launch, weights)
        self._client = Client()
        self._from_folder = FromFolder(self._client, launch.settings.sync_timeout)
        self._weights = weights
        self._process = ""
        """The name that the server's process has given itself."""
        self._weights_lock = threading.Lock()
        """Held while the thread loads weights into a server that has come back."""
        self._reason_away = "it has not answered yet"
        self._away_since = time.monotonic()
        self._is_loading = False
        """Whether the main thread is loading weights. The thread then leaves the server alone."""
        self._is_doubted = True
        """Whether the server gets weights even if it has some of the right name."""
        self._thread = threading.Thread(target=self._supervise, name="engine-given", daemon=True)
        self._thread.start()

    @override
    def now(self) -> Address | None:
        with self._changed:
            if self._closed:
                raise EngineError("the engine was closed")
            if self._error is not None:
                raise EngineError(self._error)
            away = time.monotonic() - self._away_since
            if self._address is None and away > self._settings.start_timeout:
                raise EngineError(
                    f"the server at {self._url} has been away for {away:.0f} s (start_timeout ="
                    f" {self._settings.start_timeout:.0f}): {self._reason_away}. Start it again"
                    f" (serve_engine), or remove it from {SETTING}"
                )
            return self._address

    @override
    def failed(self, address: Address, reason: str) -> None:
        with self._changed:
            if self._address is None or address.epoch != self._epoch:
                return
            self._failures_in_a_row += 1
            self._is_loading = False
            if self._failures_in_a_row > self._settings.max_restarts:
                self._error = (
                    f"the server at {self._url} failed {self._failures_in_a_row} times in a row (max_restarts"
                    f" is {self._settings.max_restarts}), the last time: {reason}"
                )
            self._set_away(reason)

    @override
    def gone(self, address: Address) -> str | None:
        with self._changed:
            return None if self._address == address else self._reason_away

    @override
    def wait_anew(self) -> None:
        self._away_since = time.monotonic()

    @override
    def begin_weights(self, address: Address) -> Address:
        # Waits until the thread has loaded older weights, if the server has just come back.
        with self._weights_lock:
            self._is_loading = True
        self._name_weights(address, "")
        return replace(address, weights="")

    @override
    def end_weights(self, address: Address, weights: Path) -> Address:
        self._weights = weights
        self._name_weights(address, self._weights_name)
        with self._changed:
            self._is_loading = False
            if self._address is not None:
                self._address = self._make_address()
            self._changed.notify_all()
            return self._make_address()

    @override
    def use(self, weights: Path) -> None:
        with self._changed:
            if weights != self._weights:
                self._weights = weights
                self._set_away("it was not checked yet whether it has the newest weights")

    @override
    def start_anew(self, weights: Path, reason: str) -> None:
        with self._changed:
            self._weights, self._is_loading, self._is_doubted = weights, False, True
            self._set_away(reason)

    @override
    def close(self) -> None:
        self.begin_to_close()
        self._thread.join(END_S)
        self._client.close()

    # The thread

    def _supervise(self) -> None:
        """Meets and checks the server as drawn in the head of this file, until it is closed."""
        while True:
            with self._changed:
                if self._closed or self._error is not None:
                    return
                is_present, is_loading = self._address is not None, self._is_loading
            try:
                if not is_loading and is_present:
                    self._check()
                elif not is_loading:
                    self._meet()
            except ServerFailure as failure:
                with self._changed:
                    if not self._is_loading:
                        self._set_away(str(failure))
            except EngineError as error:
                with self._changed:
                    self._error = str(error)
                    self._set_away(str(error))
            with self._changed:
                if not self._closed:
                    self._changed.wait(AWAY_S if self._address is None else CHECK_S)

    def _check(self) -> None:
        """Checks a server that was present. Raises ServerFailure if another process answers, or if it has
        other weights."""
        description = self._ask()
        with self._changed:
            if self._is_loading or self._address is None:
                return
            if description["process"] != self._process:
                raise ServerFailure("it was restarted")
            if description["weights"] != self._weights_name:
                raise ServerFailure(f"its weights are {description['weights']!r}, not {self._weights_name!r}")

    def _meet(self) -> None:
        """Uses a server that was away, if it has this run's settings and weights. The first rank loads the
        weights. Raises ServerFailure if the server can't be used yet."""
        description = self._ask()
        self._refuse_other_settings(description["started"])
        weights_name = self._weights_name
        if self.loads and (self._is_doubted or description["weights"] != weights_name):
            with self._weights_lock:
                if self._is_loading:
                    return
                self._load(self._weights)
                self._is_doubted = False
        elif description["weights"] != weights_name:
            raise ServerFailure("the first rank has not loaded the newest weights into it yet")
        with self._changed:
            if self._is_loading or self._closed or weights_name != self._weights_name:
                return
            if description["process"] != self._process:
                self._process = description["process"]
                self._epoch += 1
            self._address = self._make_address()
            self._changed.notify_all()

    def _ask(self, query: str = "") -> dict[str, Any]:
        """Returns the server's description of itself. Raises EngineError if it has another key, or isn't a
        server of this project."""
        address = Address(self._url, self._epoch, self._key)
        try:
            return self._client.post(address, ROUTE + query, timeout=ANSWER_S)
        except EngineError as refusal:
            if "HTTP 401" in str(refusal):
                raise EngineError(
                    f"the server at {self._url} has another key than the one in engines.policy.key_file"
                ) from refusal
            raise EngineError(
                f"the server at {self._url} was not started by `serve_engine`: {refusal}"
            ) from refusal

    def _refuse_other_settings(self, started: Mapping[str, Any]) -> None:
        """Raises EngineError if the server was started with other settings than this run's."""
        expected = dict(self._expected)
        expected_model = expected.pop("model")
        differences = []
        for name, value in expected.items():
            is_longer_context = name == "context_length" and started.get(name, 0) > value
            if started.get(name) != value and not is_longer_context:
                differences.append(f"{name} {started.get(name)}, and the run's is {value}")
        model = started.get("model", {})
        for name in sorted(expected_model.keys() | model.keys()):
            if expected_model.get(name) != model.get(name):
                differences.append(
                    f"another model ({name} {model.get(name)}, and the run's has {expected_model.get(name)})"
                )
                break  # a different model differs in many ways, and one is enough
        if differences:
            raise EngineError(
                f"the server at {self._url} was started with {'; '.join(differences)}: start it with"
                " `serve_engine` and the experiment's configurations"
            )

    def _load(self, weights: Path) -> None:
        """Loads the weights of a folder into the server. Raises ServerFailure."""
        address = self._make_address(with_weights=False)
        self._name_weights(address, "")
        try:
            self._from_folder.end(address, weights)
        except (ServerFailure, EngineError) as failure:
            raise ServerFailure(
                f"it could not load the weights in {weights}, a path that its machine must see: {failure}"
            ) from failure
        drop_cache(self._client, address, self._settings.sync_timeout)
        self._name_weights(address, f"{self._run} {weights.name}")

    def _name_weights(self, address: Address, name: str) -> None:
        """Tells the server the name of its weights. With an empty name it refuses all requests for
        samples."""
        self._ask(f"?are={quote(name)}")

    def _set_away(self, reason: str) -> None:
        """Records that the server is away. The caller holds `_changed`."""
        if self._address is not None:
            self._away_since = time.monotonic()
        self._reason_away, self._address = reason, None
        self._changed.notify_all()

    def _make_address(self, *, with_weights: bool = True) -> Address:
        """Returns the server's address. Requests to it name the present weights, or none without
        `with_weights`."""
        return Address(self._url, self._epoch, self._key, self._weights_name if with_weights else "")

    @property
    def _weights_name(self) -> str:
        return f"{self._run} {self._weights.name}"
