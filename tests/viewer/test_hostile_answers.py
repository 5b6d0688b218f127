"""What a model wrote is text on every page, whatever it wrote: nothing of it runs, loads or breaks a page."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.reports.synthetic import CODEC
from tests.support.browser import Browser
from tests.viewer.hostile import COUNT, KINDS, MEGABYTE, hostile_run, texts
from tests.viewer.recorded import begin_run, record_iteration, recorded_run, trajectory
from treetune.rollouts.storage import TOKENS, write_tokens
from treetune_view.store import Store
from treetune_view.text import SHOWN, visible

WAYS = ("tokens", "rendered", "text")
MARKDOWN = {
    "p", "em", "strong", "code", "pre", "blockquote", "ul", "ol", "li", "table", "thead", "tbody", "tr",
    "th", "td", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "br", "s", "span",
}  # fmt: skip


def is_marked(kind: str) -> bool:
    """Whether it has Markdown or mathematics."""
    return len(kind) < 10_000 and any(
        sign in kind for sign in ("$", "\\(", "\\[", "](", "```", "> > ", "***", "[[[")
    )


SEEN = """
return [window.ran === undefined, document.querySelectorAll(
  'main :is(script, style, link, img, iframe, object, embed, base, meta, video, template, form[action^=http])'
).length, [...document.querySelectorAll('main *')].filter((one) => [...one.attributes].some(
  (own) => own.name.startsWith('on') || own.name === 'srcdoc' ||
    ['href', 'src', 'action'].includes(own.name) && /^\\s*(javascript|data|https?):/i.test(own.value)
)).length, document.querySelector('header.frame').getClientRects().length > 0];
"""


class Elements(HTMLParser):
    """Which elements a page has, and which attributes these."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {(tag, name) for name, _ in attrs} | {(tag, "")}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def folder(store: Store) -> Path:
    """With the experiment ``hostile``, whose answers can be asked for."""
    hostile_run(store.folders[0] / "hostile")
    answers = store.answers(store.run("hostile"))
    for _ in range(600):
        if all(one.about for one in answers.indexed()):
            return store.folders[0]
        time.sleep(0.1)
    raise AssertionError(f"the index was not made: {answers.problems()}")


def test_hostile_answers_add_no_element_to_a_page(client: TestClient, folder: Path) -> None:
    recorded_run(folder / "tame", iterations=1)
    tame = {"run": "tame", "source": "i1", "answer": "train/0#0"}
    usual = {way: Elements(client.get("/answer", params={**tame, "as": way}).text).found for way in WAYS}
    allowed = {(tag, name) for tag in MARKDOWN for name in ("", "class", "data-display")} | {
        (tag, name) for tag in ("details", "summary", "pre", "p", "code") for name in ("", "id", "class")
    }
    said = texts()
    assert len(said) == COUNT

    for number, text in enumerate(said[: len(KINDS) + 1]):  # the others are made of these
        way = WAYS[number % len(WAYS)]
        where = {"run": "hostile", "source": "i1", "answer": f"train/{number}#0", "as": way}
        page = client.get("/answer", params=where)
        assert page.status_code == 200
        elements = Elements(page.text)
        assert elements.found <= usual[way] | allowed | {("ol", "start")}
        if way == "text" and not text.startswith(("\n", "\r", " ")):
            assert visible(text[:200])[:200] in "".join(elements.text)


def test_lists_of_hostile_answers_hold_no_element_of_theirs(client: TestClient, folder: Path) -> None:
    recorded_run(folder / "tame", iterations=1)
    usual = Elements(client.get("/answers", params={"run": "tame", "size": 200}).text).found
    for of in ("i1", "e1-validation"):
        for number in (1, 2):
            page = client.get("/answers", params={"run": "hostile", "of": of, "size": 200, "page": number})
            assert page.status_code == 200
            assert Elements(page.text).found <= usual | {
                ("option", "value"), ("option", "selected"), ("a", "data-key"), ("p", "class")
            }  # fmt: skip


def test_half_a_character_is_searched_for_and_shown(client: TestClient, folder: Path) -> None:
    asked = {"run": "hostile", "of": "e1-validation", "search": "half a character"}
    assert "<b>1</b> answer<" in client.get("/answers", params=asked).text
    where = {"run": "hostile", "source": "e1-validation", "answer": f"v/{COUNT}#0"}
    page = client.get("/answer", params=where)
    assert page.status_code == 200 and "half a character" in page.text


def test_hostile_answers_are_text_in_a_browser(
    window: Browser, served: Callable[[str], str], folder: Path
) -> None:
    pages = ["/answers?run=hostile&size=200", "/answers?run=hostile&size=200&page=2"]
    # What a browser might make something of; all kinds are parsed above.
    pages += [
        "/answer?run=hostile&source=i1"
        f"&answer=train/{number}%230&as={'rendered' if is_marked(kind) else 'tokens'}"
        for number, kind in enumerate(KINDS)
        if is_marked(kind) or number % 6 == 0 or len(kind) > 10_000
    ]
    for page in pages:
        window.open(served(page))
        window.wait("document.readyState === 'complete'")
        ran, elements, attributes, framed = window.script(SEEN)
        assert (ran, elements, attributes, framed) == (True, 0, 0, True), page
        assert window.overflow() == 0, page
    faults = window.faults()
    window.open("about:blank")
    assert faults == []


def test_a_megabyte_on_one_line_is_cut_and_shown_whole_on_demand(client: TestClient, folder: Path) -> None:
    where = {"run": "hostile", "source": "i1", "answer": f"train/{len(KINDS)}#0", "as": "text"}

    short = client.get("/answer", params=where).text
    whole = client.get("/answer", params={**where, "all": "1"}).text

    assert f"{len(MEGABYTE) - SHOWN:,} more characters" in short
    assert whole.count("one line") > len(MEGABYTE) / 20


def test_hundreds_of_marks_on_a_character_cover_no_other_line(client: TestClient, store: Store) -> None:
    heap = "Z" + "\u0301\u0316" * 250 + "algo"
    run = begin_run(store.folders[0] / "marks", planned=1)
    write_tokens(run.path / TOKENS, CODEC, 4096)
    record_iteration(run, 0, [trajectory(0, 0, f"{heap}\nनमस्ते e\u0301")])

    for way in WAYS:
        where = {"run": "marks", "source": "i1", "answer": "train/0#0", "as": way}
        text = "".join(Elements(client.get("/answer", params=where).text).text)
        assert re.search("[\u0300-\u036f]{5}", text) is None
        assert "algo" in text and "e\u0301" in text
        assert ("⟨769⟩" if way == "tokens" else "496 more marks") in text
    assert "more marks" in client.get("/answers", params={"run": "marks"}).text
