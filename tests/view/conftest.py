"""A viewer without a socket, and one that a browser can open."""

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
from treetune.view.app import application
from treetune.view.store import Store

TOKEN = "a-token-that-tests-know"
FIRST = {"source": "i1", "answer": "train/0#0"}
"""The first answer of a recorded run."""


def mark_of(page: str) -> str:
    """What a page sends with its next request, so that it is sent anew only where it has changed."""
    return page.split('data-mark="')[1].split('"')[0]


@dataclass(frozen=True)
class Viewer:
    """Somebody who knows the token, and the folder whose experiments they look at."""

    store: Store
    client: TestClient

    @property
    def folder(self) -> Path:
        return self.store.folders[0]

    def record(self, name: str = "run", iterations: int = 1, **settings: Any) -> ExperimentDirectory:
        return recorded_run(self.folder / name, iterations=iterations, **settings)

    def get(self, path: str, headers: dict[str, str] | None = None, **query: Any) -> Response:
        """Of a path with its query, or of one and the query's fields."""
        return self.client.get(path, params=query or None, headers=headers)

    def page(self, path: str, **query: Any) -> str:
        answer = self.get(path, **query)
        assert answer.status_code == 200, answer.text
        return answer.text

    def refusal(self, path: str, status: int, **query: Any) -> str:
        answer = self.get(path, **query)
        assert answer.status_code == status, answer.text
        return answer.text


HARM = """
return [window.ran !== undefined, document.querySelectorAll(
  'main :is(script, style, link, img, iframe, object, embed, base, meta, video, template, form[action^=http])'
).length, [...document.querySelectorAll('main *')].filter((one) => [...one.attributes].some(
  (own) => own.name.startsWith('on') || own.name === 'srcdoc' ||
    ['href', 'src', 'action'].includes(own.name) && /^\\s*(javascript|data|https?):/i.test(own.value)
)).length, document.querySelector('header.frame').getClientRects().length > 0];
"""


class Shown(Browser):
    """The viewer in a window of a browser."""

    def __init__(self, driver: Any, viewer: Viewer, address: Callable[[str], str]) -> None:
        super().__init__(driver)
        self.viewer, self.address = viewer, address

    def open(self, address: str, **looks: Any) -> None:
        """A path of the viewer, or a whole address; until it is there."""
        super().open(self.address(address) if address.startswith("/") else address, **looks)
        self.wait("document.readyState === 'complete'")

    def wait_for(self, words: str) -> None:
        self.wait(f"document.body.innerText.includes({words!r})")

    def wrong(self) -> list[str]:
        """With a page that shows what somebody else wrote."""
        ran, elements, attributes, framed = self.script(HARM)
        found = {"a text ran": ran, "the frame is gone": not framed, "wider than the window": self.overflow()}
        found |= {"elements were added": elements, "attributes were added": attributes}
        return [what for what, is_so in found.items() if is_so]


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
    made = TestClient(application(store, TOKEN), base_url="http://127.0.0.1")
    made.get("/", params={"token": TOKEN})
    return made


@pytest.fixture
def viewer(store: Store, client: TestClient) -> Viewer:
    return Viewer(store, client)


@pytest.fixture(scope="session")
def window() -> Iterator[Browser]:
    """One browser for all tests of a process."""
    if MISSING:
        pytest.skip(MISSING)
    with browser() as made:
        yield made


@pytest.fixture
def shown(viewer: Viewer, window: Browser, served: Callable[[str], str]) -> Iterator[Shown]:
    """No error in its console, no request to another machine."""
    yield Shown(window.driver, viewer, served)
    faults = window.faults()
    window.open("about:blank")  # before the viewer ends, which a page would say
    assert faults == []


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
