"""Starts the service from the command line's options, and serves it with uvicorn until it is interrupted."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.cli.command import Options
from treetune.cluster.credit_service.app import make_application
from treetune.cluster.credit_service.choices import ALLOWED_CREDITS
from treetune.cluster.credit_service.service import CreditService, ServiceSettings
from treetune.config.jsonnet import sum_of
from treetune.config.layers import Layer
from treetune.credit.library.servers import is_address

SHUTDOWN_GRACE_S = 10
"""Most seconds that requests get to end after SIGTERM or Ctrl-C, before they are cancelled."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def make_settings(options: Options) -> ServiceSettings:
    """Returns the settings of a command line. Raises ConfigError for a Jsonnet text that is wrong."""
    credits = ALLOWED_CREDITS
    if options.credits:
        credits = tuple(name.strip() for name in options.credits.split(",") if name.strip())
    return ServiceSettings(
        engine=_read_engine(options.engine),
        tokenizer=options.tokenizer,
        grader=_read_grader(options.grader),
        credits=credits,
        calls=options.calls,
        budget=options.budget,
        deadline=options.deadline,
    )


def run_service(
    settings: ServiceSettings, key: str, host: str, port: int, most_bytes: int, say: Callable[[str], None]
) -> None:
    """Prints the service's address, and serves until SIGTERM or Ctrl-C.

    Args:
        settings: The settings of the service's owner.
        key: The key that requests need.
        host: The address to listen on.
        port: The port to listen on; 0 is any free one.
        most_bytes: Most bytes of a request's body.
        say: Prints a line.

    Raises:
        ValueError: The settings are wrong, or the port isn't available.
    """
    import uvicorn

    with CreditService(settings) as service, _listen(host, port) as listening:
        actual_port = listening.getsockname()[1]
        name = f"[{host}]" if ":" in host else host  # IPv6 addresses have brackets in URLs
        config = uvicorn.Config(
            make_application(service, key, most_bytes),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
        )
        say(f"http://{name}:{actual_port}/advantages")
        if host not in LOOPBACK_HOSTS:
            say(
                f"Traffic to {host} is not encrypted and contains the key: use a private network, or a TLS"
                " proxy."
            )
        say("Press Ctrl-C to stop.")
        uvicorn.Server(config).run(sockets=[listening])


def _read_engine(texts: Sequence[str]) -> Any:
    """Returns the engine that the command line names, as `CreditAssigner` takes it: addresses of servers, a
    folder, a configuration or None. Raises ValueError for a mixture of these."""
    if not texts:
        return None
    if all(map(is_address, texts)):
        return list(texts)
    if len(texts) > 1:
        raise ValueError(
            "--engine is given several times, and not each time with an address: give addresses of servers"
            " with the same model, or one engine"
        )
    (text,) = texts
    # An object in Jsonnet, or the folder of a model.
    return _evaluate_option(text, "--engine") if "{" in text else Path(text)


def _read_grader(text: str | None) -> Mapping[str, Any] | None:
    """Returns the configuration of the command line's grader. `text` is Jsonnet or only the grader's type."""
    if text is None:
        return None
    grader: Mapping[str, Any] = _evaluate_option(text, "--grader") if "{" in text else {"type": text}
    return grader


def _evaluate_option(text: str, name: str) -> Any:
    """Returns the value of a Jsonnet text of the owner, such as ``{type: 'math'}``."""
    return sum_of([Layer(name, text)], variables={})  # evaluates the only layer


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises ValueError if the address or the port isn't available."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Without this option, the port of a service that has just ended would stay taken for a minute.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise ValueError(
            f"--port {port} is not available on {host} ({error.strerror}): choose another with --port, or an"
            " address of this machine with --host"
        ) from error
    return listening
