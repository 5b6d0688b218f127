"""A page that was saved is one file: from disk it shows the same, asks for nothing, and text stays text."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.support.browser import Browser
from tests.viewer.conftest import TOKEN
from tests.viewer.hostile import KINDS, hostile_run
from tests.viewer.recorded import record_iteration
from tests.viewer.test_hostile_answers import SEEN
from treetune_view.store import Store

LOOKS = """
const all = (which, of) => [...document.querySelectorAll(which)].map(of);
return JSON.stringify([
  all('.uplot canvas', (one) => one.toDataURL()),
  all('[data-i]', (one) => [one.className, one.textContent]),
  all('.katex', (one) => [one.textContent, one.getClientRects()[0].width, getComputedStyle(one).fontFamily]),
  all('main tbody tr, pre, figcaption, .state', (one) => one.innerText),
  all('details', (one) => one.open && one.innerText).filter(Boolean),
  all('h1, .verdict, .chip, th', (one) => [getComputedStyle(one).color, getComputedStyle(one).font]),
  all('select', (one) => one.value),
]);
"""
DOWNLOAD_S = 30


def downloaded(folder: Path) -> Path:
    """The file in it, as soon as it is whole."""
    deadline = time.monotonic() + DOWNLOAD_S
    while not (found := list(folder.glob("*.html"))):
        assert time.monotonic() < deadline, f"nothing was saved: {list(folder.glob('*'))}"
        time.sleep(0.02)
    return found[0]


def test_a_page_is_saved_as_one_file_that_shows_the_same_and_asks_for_nothing(
    window: Browser, served: Callable[[str], str], store: Store, tmp_path: Path
) -> None:
    short = [kind for kind in KINDS if len(kind) < 400][::2]
    said = ["$\\frac{1}{2}$ and \\(x^2\\), $\\frac{1}{$", "\n\nbehind two line ends", *short]
    run = hostile_run(store.folders[0] / "an/experiment", said)
    record_iteration(run, 1)
    one = "run=an/experiment&source=i1&answer=train"
    open_numbers = "document.querySelector('#counted').open = true"
    pages = {
        "/run?run=an/experiment": "document.querySelector('#log').click()",
        "/answer?run=an/experiment&source=i2&answer=train/0%230": open_numbers,
        f"/answer?{one}/0%230&as=rendered": "",
        f"/answer?{one}/1%230&as=text": "",
        "/answers?run=an/experiment&of=everything&search=script": "",
        "/": "",
    }
    for number, (path, first) in enumerate(pages.items()):
        folder = tmp_path / f"saved{number}"
        allowed = {"behavior": "allow", "downloadPath": str(folder)}
        window.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allowed)
        window.open(served(path))
        window.wait("document.readyState === 'complete'")
        window.script(first)
        looks = window.script(LOOKS)
        window.press("e")
        saved = downloaded(folder)
        assert TOKEN not in saved.read_text() and "127.0.0.1" not in saved.read_text()
        window.open("about:blank")  # or the live page might ask for itself once more
        assert window.faults() == []

        window.open(f"file://{saved}")
        window.wait("document.readyState === 'complete'")
        assert window.requests() == [f"file://{saved}"] and window.messages() == [], path
        assert window.script(LOOKS) == looks, path
        assert window.script(SEEN) == [True, 0, 0, True], path
        assert (
            window.script(
                "return document.querySelectorAll('a[href]:not([href^=\"#\"]), form[action]').length"
            )
            == 0
        )
        assert window.overflow() == 0, path
        assert " · saved 20" in window.driver.title and (
            path == "/" or "an/experiment" in window.driver.title
        )
    window.open("about:blank")
