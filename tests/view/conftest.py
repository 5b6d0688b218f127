"""Fixtures of the viewer: one without a socket (`viewer`), and one in a browser (`shown`)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from httpx import Response
from starlette.testclient import TestClient

from tests.support.browser import MISSING, Browser, browser
from tests.view.recorded import recorded_run
from treetune.runtime.directory import ExperimentDirectory
from treetune.view.app import make_application
from treetune.view.store import Store

TOKEN = "a-token-that-tests-know"
FIRST = {"source": "i1", "answer": "train/0#0"}
"""The first answer of a recorded run."""


def fingerprint_of(page: str) -> str:
    """Reads the fingerprint of a page: sent with the next request, it asks for the page only if that has
    changed."""
    return page.split('data-fingerprint="')[1].split('"')[0]


@dataclass(frozen=True)
class Viewer:
    """A client that has the token, and the folder whose experiments the viewer shows."""

    store: Store
    client: TestClient

    @property
    def folder(self) -> Path:
        return self.store.folders[0]

    def record(self, name: str = "run", iterations: int = 1, **settings: Any) -> ExperimentDirectory:
        return recorded_run(self.folder / name, iterations=iterations, **settings)

    def get(self, path: str, headers: dict[str, str] | None = None, **query: Any) -> Response:
        """Requests a path; its query is in `path`, or in the keyword arguments."""
        return self.client.get(path, params=query or None, headers=headers)

    def page(self, path: str, **query: Any) -> str:
        answer = self.get(path, **query)
        assert answer.status_code == 200, answer.text
        return answer.text

    def refusal(self, path: str, status: int, **query: Any) -> str:
        answer = self.get(path, **query)
        assert answer.status_code == status, answer.text
        return answer.text


FIND_HARM = """
return [window.ran !== undefined, document.querySelectorAll(
  'main :is(script, style, link, img, iframe, object, embed, base, meta, video, template, form[action^=http])'
).length, [...document.querySelectorAll('main *')].filter((element) => [...element.attributes].some(
  ({name, value}) => name.startsWith('on') || name === 'srcdoc' ||
    ['href', 'src', 'action'].includes(name) && /^\\s*(javascript|data|https?):/i.test(value)
)).length, document.querySelector('header.frame').getClientRects().length > 0];
"""


class Shown(Browser):
    """The viewer in a window of a browser."""

    def __init__(self, driver: Any, viewer: Viewer, address: Callable[[str], str]) -> None:
        super().__init__(driver)
        self.viewer, self.address = viewer, address

    def open(self, address: str, **looks: Any) -> None:
        """Opens a path of the viewer or a whole address, and waits until it is loaded."""
        super().open(self.address(address) if address.startswith("/") else address, **looks)
        self.wait("document.readyState === 'complete'")

    def wait_for(self, text: str) -> None:
        self.wait(f"document.body.innerText.includes({text!r})")

    def harm(self) -> list[str]:
        """Lists the harm that texts of models or other programs have done to the page."""
        ran, elements, attributes, framed = self.script(FIND_HARM)
        kinds = {"a text ran": ran, "the frame is gone": not framed, "wider than the window": self.overflow()}
        kinds |= {"elements were added": elements, "attributes were added": attributes}
        return [kind for kind, has_happened in kinds.items() if has_happened]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The experiments below ``tmp_path/experiments``, looked for anew at every request."""
    (tmp_path / "experiments").mkdir()
    return Store([tmp_path / "experiments"], tmp_path / "cache", look_again_s=0.0)


@pytest.fixture
def folder(store: Store) -> Path:
    return store.folders[0]


@pytest.fixture
def client(store: Store) -> TestClient:
    client = TestClient(make_application(store, TOKEN), base_url="http://127.0.0.1")
    client.get("/", params={"token": TOKEN})
    return client


@pytest.fixture
def viewer(store: Store, client: TestClient) -> Viewer:
    return Viewer(store, client)


@pytest.fixture(scope="session")
def window() -> Iterator[Browser]:
    """One browser for all tests of a process."""
    if MISSING:
        pytest.skip(MISSING)
    with browser() as window:
        yield window


@pytest.fixture
def shown(viewer: Viewer, window: Browser, served: Callable[[str], str]) -> Iterator[Shown]:
    """The viewer in a window, which must end without an error and without a request to another machine."""
    yield Shown(window.driver, viewer, served)
    faults = window.faults()
    window.open("about:blank")  # before the viewer ends, which a page would say
    assert faults == []


@pytest.fixture
def served(store: Store) -> Iterator[Callable[[str], str]]:
    """The viewer on a port of this machine, as a function from a path to its whole address."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    origin = f"http://127.0.0.1:{listening.getsockname()[1]}"
    config = uvicorn.Config(make_application(store, TOKEN), log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield lambda path: f"{origin}{path}{'&' if '?' in path else '?'}token={TOKEN}"
    server.should_exit = True
    thread.join(20)
    listening.close()
