"""Lists views of every page of the viewer, for what a folder of experiments and data holds.

The contents are found as a person finds them: the rows of the pages lead to answers, their problems and their
continuations. A page of the viewer that this list lacks is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from tests.support.browser import Browser
from treetune.view.pages import PAGES

STATES = ("running", "stopped", "finished", "waiting")

LONGEST_INDEX_S = 300.0

ANSWERS_THERE = "document.querySelector('table.answers tbody tr[data-href]') !== null"
DRAWN = "document.querySelectorAll('.uplot canvas').length > 0"
ROWS_THERE = "document.querySelector('[data-rows] tr[data-href]') !== null"
SOME_TEXT = "document.body.innerText.trim().length > 0"
WHOLE_TEXTS = "document.querySelector('pre.whole') !== null"
COUNTED = "!document.body.innerText.includes('being counted')"
THERE = "document.querySelector('main')?.innerText.trim().length > 0"


@dataclass(frozen=True)
class ShownData:
    """The contents that the views show: an experiment and another one, one of its answers, the ways it can be
    shown in, the address of the continuations of its first step that has some; names of data sets."""

    run: str
    other: str
    source: str
    answer: str
    problem: str
    ways: Sequence[str]
    continuations: str = ""
    data: Sequence[str] = ()


@dataclass(frozen=True)
class PageView:
    """One view: the page that shows it, its name, the query of its address, what is true in the browser once
    it is there; keys that are pressed then, and what is true after them."""

    page: str
    name: str
    query: str = ""
    ready: str = THERE
    keys: str = ""
    after: str = THERE

    def visit(self, browser: Browser, origin: str, *, width: int = 1400, dark: bool = False) -> None:
        """Opens it and waits until it is there."""
        address = f"{origin}{self.page}?{self.query}" if self.query else f"{origin}{self.page}"
        browser.open(address, width=width, dark=dark)
        browser.wait(self.ready)
        if self.keys:
            browser.press(self.keys)
            browser.wait(self.after)


class UnknownPage(Exception):
    """The viewer has a page of which `page_views` has no view."""


def find_shown_data(browser: Browser, origin: str, states: Sequence[str] = STATES) -> ShownData:
    """Of experiments in one of these states, the one with the most iterations. Raises ValueError where none
    of them has an answer."""
    browser.open(f"{origin}/")
    names = browser.script(
        """return [...document.querySelectorAll('tbody tr[data-href]')].map((row) => [
          new URLSearchParams(row.dataset.href.split('?')[1]).get('run'),
          row.querySelector('.state')?.innerText.trim().split(' ').pop() || 'unreadable',
          Number((row.innerText.match(/(\\d+) of (\\d+|\\?)/) || [0, 0])[1])])"""
    )
    ranked = sorted((row for row in names if row[1] in states), key=lambda row: -row[2])
    for name, _, _ in ranked:
        if found := _first_answer(browser, origin, name):
            other = next((row[0] for row in ranked if row[0] != name), name)
            return _read_shown_data(browser, origin, found, name, other)
    raise ValueError(f"no experiment that is {' or '.join(states)} has an answer: there are {names}")


def _first_answer(browser: Browser, origin: str, run: str) -> str:
    """The address of an answer, one with much credit before others; nothing where there is none."""
    for more in ("sort=advantage_mean&order=down", ""):
        browser.open(f"{origin}/answers?{urlencode({'run': run})}&{more}")
        browser.wait(
            f"{ANSWERS_THERE} || document.querySelector('.problem') !== null", seconds=LONGEST_INDEX_S
        )
        if browser.script(f"return {ANSWERS_THERE}"):
            return browser.script("return document.querySelector('table.answers tr[data-href]').dataset.href")
    return ""


def _read_shown_data(browser: Browser, origin: str, address: str, run: str, other: str) -> ShownData:
    browser.open(origin + address)
    browser.wait("document.querySelector('[name=as]') !== null")
    asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
    problem, ways, continuations = browser.script(
        """return [
          new URLSearchParams(document.querySelector('a[data-key=a]').search).get('problem'),
          [...document.querySelectorAll('[name=as] option')].map((one) => one.value),
          document.querySelector('.tokens [data-later]')?.dataset.later || ''];"""
    )
    data = _data_sets(browser, origin)
    return ShownData(run, other, asked["source"], asked["answer"], problem, ways, continuations, data)


def _data_sets(browser: Browser, origin: str) -> Sequence[str]:
    """A data set of each kind."""
    browser.open(f"{origin}/data")
    browser.wait(THERE)
    found = browser.script(
        """return [...document.querySelectorAll('tbody tr[data-href]')].map((row) => [
          row.cells[1].innerText, new URLSearchParams(row.dataset.href.split('?')[1]).get('data')])"""
    )
    return list(dict(reversed(found)).values())


def page_views(shown: ShownData) -> Iterator[PageView]:
    """Yields views of all pages. Raises UnknownPage for a page without any."""
    run, another, of_run = {"run": shown.run}, shown.other != shown.run, _query(run=shown.run)
    both = {"run": [shown.run, shown.other]}
    everything = {**run, "of": "everything"}
    answer = {**run, "source": shown.source, "answer": shown.answer}
    views_by_page: dict[str, list[tuple[str, *tuple[str, ...]]]] = {
        "/": [("experiments",), ("experiments that none is like", _query(search="no name is like this"))],
        "/run": [
            ("run", of_run),
            *another * [("two runs", _query(**both), DRAWN)],
            *another * [("two runs, seeds together", _query(**both, seeds="together"), DRAWN)],
        ],
        "/answers": [
            ("answers", of_run, ANSWERS_THERE),
            ("answers that are wrong", _query(**everything, verdict="wrong")),
            (
                "answers on a condition",
                _query(**everything, where="tokens >= 3", sort="tokens", order="down"),
            ),
            ("answers that none is like", _query(**run, search="no answer has this")),
        ],
        "/answers/histograms": [("histograms of answers", _query(**everything))],
        "/answer": [
            *((f"answer as {way}", _query(**answer, **{"as": way})) for way in shown.ways),
            *(
                (f"answer, tokens by {number}", _query(**answer, **{"as": "tokens", "colour": number}))
                for number in ("log-prob", "gap")
                if "tokens" in shown.ways
            ),
        ],
        "/problems": [
            ("problems", _query(**everything)),
            ("problems without a signal", _query(**run, signal="none")),
        ],
        "/problem": [("problem", _query(**run, problem=shown.problem))],
        "/compare": [
            ("compared", _query(**run, which="all")),
            ("two answers compared", _query(**run, which="all"), ROWS_THERE, "j\ue007", WHOLE_TEXTS),
        ],
        "/configuration": [
            ("configuration", of_run),
            *another * [("configurations that differ", _query(**both, only="differences"))],
        ],
        "/continuations": [
            ("continuations", urlsplit(one).query, SOME_TEXT) for one in [shown.continuations] if one
        ],
        "/data": [("data sets",)],
        "/rows": [
            view
            for name in shown.data
            for view in (
                (f"rows of {name}", _query(data=name), COUNTED),
                (f"rows of {name} that none is like", _query(data=name, search="no row has this")),
            )
        ],
        "/histograms": [(f"histograms of {name}", _query(data=name)) for name in shown.data],
        "/row": [
            view
            for name in shown.data
            for view in (
                (f"a row of {name}", _query(data=name, row=0)),
                (f"a row of {name} rendered", _query(data=name, row=0, **{"as": "rendered"})),
            )
        ],
        "/timeline": [("timeline", of_run), ("the timeline's first two seconds", _query(**run, to=2))],
        "/notes": [("notes", of_run), ("notes of all experiments",)],
    }
    for page in PAGES:
        if page.path not in DOWNLOADED:
            if page.path not in views_by_page:
                raise UnknownPage(f"{Path(__file__).name} doesn't know {page.path} ({page.title})")
            yield from (PageView(page.path, *view) for view in views_by_page[page.path])


def _query(**values: object) -> str:
    return urlencode(values, doseq=True)


DOWNLOADED = {"/timeline/trace", "/notes/data"}
"""No pages: files that the browser keeps."""
