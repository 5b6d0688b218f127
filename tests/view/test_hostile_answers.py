"""Texts of models stay text on every page: nothing in them runs, loads or breaks a page."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.view.conftest import Shown, Viewer
from tests.view.hostile import COUNT, KINDS, MEGABYTE, hostile_run, texts
from tests.view.recorded import begin_run, record_iteration, trajectory
from tests.view.report.synthetic import CODEC
from treetune.rollouts.storage import TOKENS, write_tokens
from treetune.view.store import Store
from treetune.view.text import CHARACTERS_SHOWN, make_visible

WAYS = ("tokens", "rendered", "text")
ALL_WAYS = (*WAYS, "credit", "tree")
MARKDOWN = {
    "p", "em", "strong", "code", "pre", "blockquote", "ul", "ol", "li", "table", "thead", "tbody", "tr",
    "th", "td", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "br", "s", "span",
}  # fmt: skip


def is_marked(kind: str) -> bool:
    """Tells whether a text has Markdown or mathematics."""
    signs = ("$", "\\(", "\\[", "](", "```", "> > ", "***", "[[[")
    return len(kind) < 10_000 and any(sign in kind for sign in signs)


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[tuple[str, str]] = set()
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements |= {(tag, name) for name, _ in attrs} | {(tag, "")}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def folder(store: Store) -> Path:
    """A folder with the experiment ``hostile``, whose answers are indexed."""
    hostile_run(store.folders[0] / "hostile")
    answers = store.answers(store.run("hostile"))
    for _ in range(600):
        if all(source.about for source in answers.list_indexed_sources()):
            return store.folders[0]
        time.sleep(0.1)
    raise AssertionError(f"the index was not made: {answers.problems()}")


def answer(viewer: Viewer, run: str, way: str, number: int = 0, **more: Any) -> str:
    return viewer.page("/answer", run=run, source="i1", answer=f"train/{number}#0", **{"as": way, **more})


@pytest.mark.usefixtures("folder")
def test_hostile_answers_add_no_element_to_a_page(viewer: Viewer) -> None:
    viewer.record("tame")
    usual = {way: Elements(answer(viewer, "tame", way)).elements for way in ALL_WAYS}
    allowed = {(tag, name) for tag in MARKDOWN for name in ("", "class", "data-display")} | {
        (tag, name) for tag in ("details", "summary", "pre", "p", "code") for name in ("", "id", "class")
    }
    hostile_texts = texts()
    assert len(hostile_texts) == COUNT
    # The texts after these are combinations of them.
    for number, text in enumerate(hostile_texts[: len(KINDS) + 1]):
        way = ALL_WAYS[number % len(ALL_WAYS)]
        page_elements = Elements(answer(viewer, "hostile", way, number))
        assert page_elements.elements <= usual[way] | allowed | {("ol", "start")}
        if way == "text" and not text.startswith(("\n", "\r", " ")):
            assert make_visible(text[:200])[:200] in "".join(page_elements.text)
    usual_list = Elements(viewer.page("/answers?run=tame&size=200")).elements
    of_lists = {("option", "value"), ("option", "selected"), ("a", "data-key"), ("p", "class")}
    for of in ("i1", "e1-validation"):
        for number in (1, 2):
            page = viewer.page(f"/answers?run=hostile&of={of}&size=200&page={number}")
            assert Elements(page).elements <= usual_list | of_lists


@pytest.mark.usefixtures("folder")
def test_half_a_character_is_found_and_a_megabyte_on_one_line_is_cut_until_all_is_asked_for(
    viewer: Viewer,
) -> None:
    query = {"run": "hostile", "of": "e1-validation", "search": "half a character"}
    assert "<b>1</b> answer<" in viewer.page("/answers", **query)
    where = {"run": "hostile", "source": "e1-validation", "answer": f"v/{COUNT}#0"}
    assert "half a character" in viewer.page("/answer", **where)
    short = answer(viewer, "hostile", "text", len(KINDS))
    whole = answer(viewer, "hostile", "text", len(KINDS), all="1")
    assert f"{len(MEGABYTE) - CHARACTERS_SHOWN:,} more characters" in short
    assert whole.count("one line") > len(MEGABYTE) / 20


@pytest.mark.usefixtures("folder")
def test_hostile_answers_are_text_in_a_browser(shown: Shown) -> None:
    pages = ["/answers?run=hostile&size=200", "/answers?run=hostile&size=200&page=2"]
    pages += ["/problems?run=hostile", "/problems?run=hostile&page=2"]
    # A selection, as a page takes seconds: texts with markup, long ones, and every sixth of the others.
    # The test above parses all of them.
    for number, kind in enumerate(KINDS):
        if is_marked(kind) or number % 6 == 0 or len(kind) > 10_000:
            way = "rendered" if is_marked(kind) else ALL_WAYS[number % 4 - 2]
            pages.append(f"/answer?run=hostile&source=i1&answer=train/{number}%230&as={way}")
    for page in pages:
        shown.open(page)
        assert shown.harm() == [], page


def test_hundreds_of_marks_on_a_character_cover_no_other_line(viewer: Viewer) -> None:
    heap = "Z" + "\u0301\u0316" * 250 + "algo"
    run = begin_run(viewer.folder / "marks", planned=1)
    write_tokens(run.path / TOKENS, CODEC, 4096)
    record_iteration(run, 0, [trajectory(0, 0, f"{heap}\nनमस्ते e\u0301")])
    for way in WAYS:
        text = "".join(Elements(answer(viewer, "marks", way)).text)
        assert re.search("[\u0300-\u036f]{5}", text) is None
        assert "algo" in text and "e\u0301" in text
        assert ("⟨769⟩" if way == "tokens" else "496 more marks") in text
    assert "more marks" in viewer.page("/answers?run=marks")
