"""Servers that somebody else has started, here or on other machines (`serve_engine`), reached by address."""

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

LOOK_S = 5.0
"""Seconds between two looks at a server that is there."""
AWAY_S = 0.2
"""Seconds between two looks at a server that is away."""
ANSWER_S = 60.0
"""Seconds that a server which samples may take to describe itself."""
END_S = 5.0
"""Seconds that its thread may take to end."""

SETTING = "engines.policy.addresses"


def read_key(path: Path) -> str:
    """Returns the key in a file that nobody else may read. Raises ValueError."""
    try:
        mode = path.stat().st_mode
        key = path.read_text().strip()
    except OSError as error:
        raise ValueError(
            f"engines.policy.key_file, {path}, can't be read ({error.strerror}): it holds the key that the"
            " servers were started with (serve_engine --key-file)"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"engines.policy.key_file, {path}, can be read by others: chmod 600 {path}")
    if not key:
        raise ValueError(f"engines.policy.key_file, {path}, is empty: it holds the key of the servers")
    return key


def shared_settings(launch: ServerLaunch, weights: Path) -> dict[str, Any]:
    """Returns the settings that a server and the run have to share."""
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
            "engines.policy.weight_transfer is 'nccl', the servers at addresses are on other machines,"
            " and NCCL would use this one's loopback: set NCCL_SOCKET_IFNAME to the interface between"
            " them"
        )
    run = launch.ranks.gather(secrets.token_hex(8))[0]
    is_first = launch.ranks.rank == 0
    return [
        GivenServer(url, key, ServerLaunch(settings, launch), run, loads=is_first)
        for url in settings.addresses
    ]


class GivenServer(Server):
    """A server that isn't ours: it is never ended and never started. While it is away, the engine waits for
    it, up to `start_timeout`, and others go on.

    The first rank (`loads`) brings weights into it: the start weights at first, and the newest whenever the
    server comes back with others. The weights' name is made of the run's and the folder's: by it the server
    refuses to sample from others. A thread meets the server and looks whether it still is there.
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
        self._bringing_in = threading.Lock()
        self._why = "it has not answered yet"
        self._away_since = time.monotonic()
        self._loading = False
        self._is_doubted = True  # whatever the name of its weights is
        self._thread = threading.Thread(target=self._look_after, name="engine-given", daemon=True)
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
                    f" {self._settings.start_timeout:.0f}): {self._why}. Start it again (serve_engine), or"
                    f" take it out of {SETTING}"
                )
            return self._address

    @override
    def failed(self, address: Address, reason: str) -> None:
        with self._changed:
            if self._address is None or address.epoch != self._epoch:
                return
            self._failures_in_a_row += 1
            self._loading = False
            if self._failures_in_a_row > self._settings.max_restarts:
                self._error = (
                    f"the server at {self._url} failed {self._failures_in_a_row} times in a row (max_restarts"
                    f" is {self._settings.max_restarts}), the last time: {reason}"
                )
            self._lose(reason)

    @override
    def gone(self, address: Address) -> str | None:
        with self._changed:
            return None if self._address == address else self._why

    @override
    def wait_anew(self) -> None:
        self._away_since = time.monotonic()

    @override
    def begin_weights(self, address: Address) -> Address:
        with self._bringing_in:  # older ones, into a server that has just come back
            self._loading = True
        self._name(address, "")
        return replace(address, weights="")

    @override
    def end_weights(self, address: Address, weights: Path) -> Address:
        self._weights = weights
        self._name(address, self._named)
        with self._changed:
            self._loading = False
            if self._address is not None:
                self._address = self._here()
            self._changed.notify_all()
            return self._here()

    @override
    def use(self, weights: Path) -> None:
        with self._changed:
            if weights != self._weights:
                self._weights = weights
                self._lose("it has not been asked for the newest weights yet")

    @override
    def start_anew(self, weights: Path, reason: str) -> None:
        with self._changed:
            self._weights, self._loading, self._is_doubted = weights, False, True
            self._lose(reason)

    @override
    def close(self) -> None:
        self.begin_to_close()
        self._thread.join(END_S)
        self._client.close()

    # The thread

    def _look_after(self) -> None:
        while True:
            with self._changed:
                if self._closed or self._error is not None:
                    return
                there, loading = self._address is not None, self._loading
            try:
                if not loading:
                    self._look() if there else self._meet()
            except ServerFailure as failure:
                with self._changed:
                    if not self._loading:
                        self._lose(str(failure))
            except EngineError as error:
                with self._changed:
                    self._error = str(error)
                    self._lose(str(error))
            with self._changed:
                if not self._closed:
                    self._changed.wait(AWAY_S if self._address is None else LOOK_S)

    def _look(self) -> None:
        """Checks a server that was there. Raises ServerFailure if another process answers, or if it has other
        weights."""
        description = self._ask()
        with self._changed:
            if self._loading or self._address is None:
                return
            if description["process"] != self._process:
                raise ServerFailure("it was started anew")
            if description["weights"] != self._named:
                raise ServerFailure(f"its weights are {description['weights']!r}, not {self._named!r}")

    def _meet(self) -> None:
        description = self._ask()
        self._refuse_another(description["started"])
        named = self._named
        if self.loads and (self._is_doubted or description["weights"] != named):
            with self._bringing_in:
                if self._loading:
                    return
                self._bring_in(self._weights)
                self._is_doubted = False
        elif description["weights"] != named:
            raise ServerFailure("the first rank has not brought the newest weights in")
        with self._changed:
            if self._loading or self._closed or named != self._named:
                return
            if description["process"] != self._process:
                self._process = description["process"]
                self._epoch += 1
            self._address = self._here()
            self._changed.notify_all()

    def _ask(self, query: str = "") -> dict[str, Any]:
        address = Address(self._url, self._epoch, self._key)
        try:
            return self._client.post(address, ROUTE + query, timeout=ANSWER_S)
        except EngineError as refusal:
            if "HTTP 401" in str(refusal):
                raise EngineError(
                    f"the server at {self._url} has another key than engines.policy.key_file holds"
                ) from refusal
            raise EngineError(
                f"what answers at {self._url} is no server that `serve_engine` started: {refusal}"
            ) from refusal

    def _refuse_another(self, started: Mapping[str, Any]) -> None:
        """Raises EngineError if its settings aren't this run's."""
        expected = dict(self._expected)
        model, of_run = started.get("model", {}), expected.pop("model")
        differences = [
            f"{name} {started.get(name)}, and the run's is {value}"
            for name, value in expected.items()
            if started.get(name) != value and not (name == "context_length" and started.get(name, 0) > value)
        ]
        differences += [
            f"another model ({name} {model.get(name)}, and the run's has {of_run.get(name)})"
            for name in sorted(of_run.keys() | model.keys())
            if of_run.get(name) != model.get(name)
        ][:1]
        if differences:
            raise EngineError(
                f"the server at {self._url} was started with {'; '.join(differences)}: start it with"
                " `serve_engine` and the experiment's configurations"
            )

    def _bring_in(self, weights: Path) -> None:
        address = self._here(named=False)
        self._name(address, "")
        try:
            self._from_folder.end(address, weights)
        except (ServerFailure, EngineError) as failure:
            raise ServerFailure(
                f"it did not take the weights in {weights}, which its machine must see under this path:"
                f" {failure}"
            ) from failure
        drop_cache(self._client, address, self._settings.sync_timeout)
        self._name(address, f"{self._run} {weights.name}")

    def _name(self, address: Address, weights: str) -> None:
        self._ask(f"?are={quote(weights)}")

    def _lose(self, why: str) -> None:
        """Records that the server is away. The caller holds the lock."""
        if self._address is not None:
            self._away_since = time.monotonic()
        self._why, self._address = why, None
        self._changed.notify_all()

    def _here(self, *, named: bool = True) -> Address:
        return Address(self._url, self._epoch, self._key, self._named if named else "")

    @property
    def _named(self) -> str:
        return f"{self._run} {self._weights.name}"
