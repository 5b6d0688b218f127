"""A viewer without a socket, and one that a browser can open."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.support.browser import MISSING, Browser, browser
from treetune_view.app import application
from treetune_view.store import Store

TOKEN = "a-token-that-tests-know"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Of the experiments below ``tmp_path/experiments``, looked for anew at every request."""
    (tmp_path / "experiments").mkdir()
    return Store([tmp_path / "experiments"], tmp_path / "cache", look_again_s=0.0)


@pytest.fixture
def folder(store: Store) -> Path:
    return store.folders[0]


@pytest.fixture
def client(store: Store) -> TestClient:
    """Somebody who knows the token."""
    made = TestClient(application(store, TOKEN), base_url="http://127.0.0.1")
    made.get("/", params={"token": TOKEN})
    return made


@pytest.fixture(scope="session")
def window() -> Iterator[Browser]:
    """One browser for all tests of a process."""
    if MISSING:
        pytest.skip(MISSING)
    with browser() as made:
        yield made


@pytest.fixture
def served(store: Store) -> Iterator[Callable[[str], str]]:
    """The viewer at an address: gives the whole address of a path."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    origin = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(application(store, TOKEN), log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield lambda path: f"{origin}{path}{'&' if '?' in path else '?'}token={TOKEN}"
    server.should_exit = True
    thread.join(20)
    listening.close()
