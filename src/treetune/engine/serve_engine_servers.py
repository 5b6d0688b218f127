"""Uses servers that `serve_engine` started, on this machine or on others (see
`treetune.engine.addressed`)."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from typing_extensions import override

from treetune.engine.addressed import ANSWER_TIMEOUT_S, AddressedServer, ServerState
from treetune.engine.base import EngineLaunch
from treetune.engine.client import Address, Client
from treetune.engine.key import WEIGHTS_ROUTE
from treetune.engine.launch import ServerLaunch
from treetune.engine.server import Server
from treetune.engine.settings import VllmSettings
from treetune.exceptions import EngineError


def read_key(
    path: Path,
    setting: str = "engines.policy.key_file",
    meaning: str = "the key with which the servers were started (serve_engine --key-file)",
) -> str:
    """Returns the key in a file.

    Args:
        setting: The setting that names the file, for messages.
        meaning: The meaning of the key, for messages.

    Raises:
        ValueError: The file can't be read, is empty, or is readable by other users.
    """
    try:
        mode = path.stat().st_mode
        key = path.read_text().strip()
    except OSError as error:
        raise ValueError(
            f"{setting}, {path}, can't be read ({error.strerror}): it must contain {meaning}"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"{setting}, {path}, can be read by others: chmod 600 {path}")
    if not key:
        raise ValueError(f"{setting}, {path}, is empty: it must contain {meaning}")
    return key


def shared_settings(launch: ServerLaunch, weights: Path) -> dict[str, Any]:
    """Returns the settings that a server must share with the run."""
    settings = launch.settings
    return {
        "vllm": _read_vllm_version(),
        "dtype": settings.resolved_dtype(launch.run.device),
        "context_length": launch.context_length,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "weight_transfer": launch.run.transfer,
        "model": json.loads((weights / "config.json").read_text()),
    }


def _read_vllm_version() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "none"


def servers_at_addresses(settings: VllmSettings, launch: EngineLaunch) -> list[Server]:
    """Returns the servers at the settings' addresses, and begins to connect to them. Collective."""
    assert settings.addresses is not None and settings.key_file is not None
    key = read_key(Path(settings.key_file).expanduser())
    interface = os.environ.get("NCCL_SOCKET_IFNAME")
    # The addresses of a loopback begin with 127.
    are_here = all("//127." in url for url in settings.addresses)
    # NCCL takes "=lo" as the whole name of an interface, and "lo" as the beginning of its name.
    if launch.transfer == "nccl" and interface in ("lo", "=lo") and not are_here:
        raise ValueError(
            "engines.policy.weight_transfer is 'nccl' and the servers at addresses are on other machines,"
            " but NCCL_SOCKET_IFNAME is this machine's loopback: set it to the network interface that reaches"
            " the other machines"
        )
    run = launch.ranks.gather(secrets.token_hex(8))[0]  # the run's name, made by the first rank
    is_first = launch.ranks.rank == 0
    return [
        ServeEngineServer(url, key, ServerLaunch(settings, launch), run, loads_weights=is_first)
        for url in settings.addresses
    ]


class ServeEngineServer(AddressedServer):
    """A server that `serve_engine` started. It knows the name of its weights, and refuses requests for
    weights of another name."""

    start_command = "serve_engine"

    def __init__(self, url: str, key: str, launch: ServerLaunch, run: str, *, loads_weights: bool) -> None:
        weights = launch.run.weights
        # Set first: the constructor of the base class starts the thread, which reads these settings.
        self._expected = shared_settings(launch, weights)
        super().__init__(url, key, launch.settings, weights, run, Client(), loads_weights=loads_weights)

    @override
    def close(self) -> None:
        super().close()
        self._client.close()

    @override
    def _describe(self) -> ServerState:
        description = self._ask()
        return ServerState(description["process"], description["weights"])

    @override
    def _introduce(self) -> ServerState:
        description = self._ask()
        self._refuse_other_settings(description["started"])
        return ServerState(description["process"], description["weights"])

    @override
    def _name_weights(self, address: Address, name: str) -> None:
        # While the name is empty, the server refuses all requests that expect named weights.
        self._ask(f"?are={quote(name)}")

    def _ask(self, query: str = "") -> dict[str, Any]:
        """Returns the server's description of itself. Raises EngineError if it has another key, or isn't a
        server of this project."""
        address = Address(self._url, self._epoch, self._key)
        try:
            description = self._client.post(address, WEIGHTS_ROUTE + query, timeout=ANSWER_TIMEOUT_S)
        except EngineError as refusal:
            if "HTTP 401" in str(refusal):
                raise EngineError(
                    f"the server at {self._url} has another key than the one in engines.policy.key_file"
                ) from refusal
            raise EngineError(
                f"the server at {self._url} was not started by `serve_engine`: {refusal}"
            ) from refusal
        if not (
            isinstance(description.get("process"), str)
            and isinstance(description.get("weights"), str)
            and isinstance(description.get("started"), dict)
        ):
            raise EngineError(
                f"the server at {self._url} was not started by `serve_engine`: it doesn't answer with"
                f" 'process', 'weights' and 'started', but with {str(description)[:200]}"
            )
        return description

    def _refuse_other_settings(self, started: Mapping[str, Any]) -> None:
        """Raises EngineError if the server was started with other settings than this run's."""
        expected = dict(self._expected)
        expected_model = expected.pop("model")
        differences = []
        for name, value in expected.items():
            # A server with a longer context samples the same.
            is_longer_context = name == "context_length" and started.get(name, 0) > value
            if started.get(name) != value and not is_longer_context:
                differences.append(f"{name} {started.get(name)}, and the run's is {value}")
        model = started.get("model", {})
        for name in sorted(expected_model.keys() | model.keys()):
            if expected_model.get(name) != model.get(name):
                differences.append(
                    f"another model ({name} {model.get(name)}, and the run's has {expected_model.get(name)})"
                )
                break  # a different model differs in many entries, and the message needs only one
        if differences:
            raise EngineError(
                f"the server at {self._url} was started with {'; '.join(differences)}: start it with"
                " `serve_engine` and the experiment's configurations"
            )
