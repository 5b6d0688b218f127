"""Serves the viewer on this machine until it is interrupted."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from treetune.store.files import own_folder
from treetune_view.app import application
from treetune_view.store import Store

HOST, PORT = "127.0.0.1", 6680
PORTS_TRIED = 50
LAST_PORT = 65_535


def serve(
    paths: Sequence[Path], say: Callable[[str], None], port: int | None = None, *, read_only: bool = False
) -> None:
    """Says the address, then answers there. Without a `port`: `PORT`, or the next that is free. Where it is
    `read_only`, nobody can write notes.

    `paths` are folders, and files of data sets. Raises ValueError for one that isn't there and for a port
    that can't be had.
    """
    import uvicorn

    folders = [path for path in paths if path.is_dir() or not (path.is_file() or path.suffix)]
    files = [path for path in paths if path not in folders]
    store = Store(folders, _own_cache(), files=files, read_only=read_only)
    token = secrets.token_urlsafe(24)
    with _listening(port) as listening:
        own = listening.getsockname()[1]
        say(f"http://{HOST}:{own}/{'' if folders else 'data'}?token={token}")
        say(
            f"From another machine: ssh -N -L {own}:{HOST}:{own} THIS_MACHINE there, and the same address."
            " Ctrl-C ends it."
        )
        config = uvicorn.Config(
            application(store, token),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=2,
        )
        uvicorn.Server(config).run(sockets=[listening])


def cache_folder() -> Path:
    """Where what is made from experiments is kept, beside them: TREETUNE_VIEWER_CACHE, or a user's own."""
    if given := os.environ.get("TREETUNE_VIEWER_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treetune" / "viewer"


def _own_cache() -> Path:
    """The folder of `cache_folder`, for this user alone: it holds beginnings of answers and problems."""
    cache = cache_folder()
    own_folder(cache)
    return cache


def _listening(port: int | None) -> socket.socket:
    if port is not None and not 0 <= port <= LAST_PORT:
        raise ValueError(f"--port is {port} and must be from 0 (any free one) to {LAST_PORT}")
    ports = range(PORT, PORT + PORTS_TRIED) if port is None else [port]
    problem: OSError | None = None
    for one in ports:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, one))
            listening.listen()  # who reads the address may ask at once
        except OSError as error:
            listening.close()
            problem = error
            if error.errno != errno.EADDRINUSE:
                break
        else:
            return listening
    tried = f"port {port}" if port is not None else f"any of the ports {PORT} to {ports[-1]}"
    assert problem is not None
    raise ValueError(f"{tried} can't be had on {HOST} ({problem.strerror}): choose another with --port")
