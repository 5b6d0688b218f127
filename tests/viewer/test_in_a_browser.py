"""The pages in Chromium: drawn, live, by keys, narrow and dark, with no error and no request elsewhere."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.looking import unseen_focus, wrong_with
from tests.support.tour import DOWNLOADED, DRAWN, place_of, stops
from tests.viewer.recorded import (
    answers,
    begin_run,
    record_evaluation,
    record_iteration,
    record_note,
    recorded_run,
)
from treetune_view.notes import read_notes, system_user
from treetune_view.pages import PAGES

Address = Callable[[str], str]

WIDTHS = pytest.mark.parametrize(("width", "dark"), [(1400, False), (420, True)])

HOSTILE = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "</title><svg onload=alert(1)>",
    "javascript:window.ran=1",
    "{{ 7 * 7 }}",
    "a\u202eb\u2066c\u0000d\u200be",
    '" autofocus onfocus="window.ran = 1',
)


@pytest.fixture(autouse=True)
def nothing_goes_wrong(window: Browser, served: Address) -> Iterator[None]:
    """No error in the console, no request to another machine."""
    yield
    faults = window.faults()
    window.open("about:blank")  # before the viewer ends, which a page would say
    assert faults == []


@WIDTHS
def test_every_page_is_drawn_fits_and_can_be_read(
    window: Browser, served: Address, folder: Path, width: int, dark: bool
) -> None:
    record_note(recorded_run(folder / "quickstart" / "vineppo"))
    recorded_run(folder / "quickstart" / "vineppo_seed2", seed=2, iterations=2)
    judged = begin_run(folder / "judged", task={"grader": {"type": "judge", "rule": {"type": "math"}}})
    verdicts = {"judge": 1.0, "rule": 0.0}
    both = [replace(one, grade=replace(one.grade, numbers=verdicts)) for one in answers(0)]
    record_iteration(judged, 0, both)
    (folder / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "pass_rate": 0.5}\n')
    begin_run(folder / "a_name_that_is_rather_long_for_a_narrow_page_and_has_no_spaces_in_it")
    window.open(served("/"), width=width, dark=dark)
    origin = served("/").partition("/?")[0]
    paper = window.script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")

    route = list(stops(place_of(window, origin)))
    assert {stop.page for stop in route} == {page.path for page in PAGES} - DOWNLOADED
    for stop in route:
        stop.visit(window, origin, width=width, dark=dark)
        assert wrong_with(window) == [], stop.name


def test_from_the_address_that_is_printed_to_why_an_answer_got_its_credit_are_three_clicks(
    window: Browser, served: Address, folder: Path
) -> None:
    recorded_run(folder / "vineppo", iterations=2)
    window.open(served("/"))

    window.click("tbody th a")  # the experiment
    window.wait(DRAWN)
    window.click("nav a[href^='/answers']")
    window.wait("document.querySelector('table.answers tbody a') !== null")
    window.click("table.answers tbody a")
    window.wait("document.querySelectorAll('.tokens [data-i]').length > 0")

    assert "V 0.500" in window.text() and "A +0.250" in window.text()  # values and advantages of its steps
    assert window.script("return document.querySelectorAll('.tokens .up.s10, .tokens .down.s7').length > 1")
    window.press("\ue014")
    assert "advantage 0.25" in window.script("return document.querySelector('.token-bar output').textContent")


def test_every_page_of_an_experiment_is_reached_by_keys_and_shows_where_the_focus_is(
    window: Browser, served: Address, folder: Path
) -> None:
    recorded_run(folder / "run", iterations=2)
    window.open(served("/"))
    for keys, page in (
        ("j\ue007", "/run"),
        ("ga", "/answers"),
        ("j\ue007", "/answer"),
        ("a", "/problem"),
        ("gm", "/compare"),
        ("gc", "/configuration"),
        ("gt", "/timeline"),
        ("gr", "/run"),
        ("ge", "/"),
    ):
        window.press(keys)
        window.wait(f"location.pathname === '{page}' && document.readyState === 'complete'")
    assert unseen_focus(window) == []


def test_an_answer_shows_its_credit_and_its_continuations_once_they_are_there(
    window: Browser, served: Address, folder: Path
) -> None:
    run = begin_run(folder / "run")
    record_iteration(run, 0)
    credit = run.iteration(0) / "episodes.arrow"
    found = credit.read_bytes()
    credit.unlink()
    window.open(served("/answer?run=run&source=i1&answer=train/0%230&as=tokens"))
    window.wait("document.querySelectorAll('.tokens [data-i]').length > 0")
    assert "V 0.500" not in window.text()
    window.script("window.notReloaded = true")

    credit.write_bytes(found)
    window.wait("document.body.innerText.includes('V 0.500')")
    window.script("document.querySelector('details[hx-get] summary').click()")
    window.wait("document.querySelector('details[hx-get] .later').textContent.trim() !== '…'")

    assert window.script("return window.notReloaded")


def test_a_run_that_goes_on_is_followed_without_a_reload(
    window: Browser, served: Address, folder: Path
) -> None:
    run = recorded_run(folder / "run", iterations=2, planned=4)
    with run.locked():
        window.open(served("/run?run=run"))
        window.wait(DRAWN)
        window.script("window.notReloaded = true; document.querySelector('#log').click()")
        assert "2 of 4 iterations" in window.text() and "running" in window.text()

        record_iteration(run, 2)
        window.wait("document.body.innerText.includes('3 of 4 iterations')")
        record_evaluation(run, 3)
    window.wait("document.body.innerText.includes('stopped')")  # it was killed
    with run.locked():
        record_iteration(run, 3)
    window.wait("document.body.innerText.includes('finished') && document.body.innerText.includes('4 of 4')")

    assert window.script("return window.notReloaded && document.querySelector('#log').checked")


def test_keys_choose_rows_open_pages_and_are_explained(
    window: Browser, served: Address, folder: Path
) -> None:
    for name in ("first", "second", "third"):
        recorded_run(folder / name, iterations=1)
    window.open(served("/"))
    window.press("?")
    window.wait("document.getElementById('keys').open")
    assert "the next row" in window.text() and "all experiments" in window.text()
    window.press("?")
    window.wait("!document.getElementById('keys').open")
    window.press("jxjjx")
    window.press("v")
    window.wait("location.pathname === '/run'")
    assert window.script("return new URLSearchParams(location.search).getAll('run')") == ["first", "third"]
    window.press("gc")
    window.wait("location.pathname === '/configuration'")
    window.press("ge")
    window.wait("location.pathname === '/'")
    window.press("/")
    window.script(
        "const field = document.activeElement; field.value = 'sec';"
        " field.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    window.wait(
        "document.querySelectorAll('tbody tr').length === 1 && location.search.includes('search=sec')"
    )


def test_names_that_are_hostile_are_text(window: Browser, served: Address, folder: Path) -> None:
    for i, text in enumerate(HOSTILE):
        run = recorded_run(folder / f"run{i}", iterations=1, planned=2, credit={"type": text}, **{text: text})
        (run.logs / "run.log").write_text(f"2026-11-22 19:03:11,801 INFO {text}\n")
    for path in (
        "/",
        *(f"/{page}?run=run{i}" for i in range(len(HOSTILE)) for page in ("run", "configuration")),
    ):
        window.open(served(path))
        window.wait("document.querySelector('h1') !== null")
        assert window.script("return window.ran === undefined"), path
        # What the pages themselves have, and no more.
        assert (
            window.script(
                "return document.querySelectorAll('img, iframe, object, [onerror], [onload]').length"
            )
            == 0
        )
    window.open(served("/configuration?run=run5"))
    assert "⟨RLO⟩" in window.text() and "\u202e" not in window.text()


def test_the_theme_is_chosen_here_and_kept(window: Browser, served: Address, folder: Path) -> None:
    window.open(served("/"))
    window.press("t")
    window.wait("getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 28)'")
    window.open(served("/"))
    window.wait("getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 28)'")
    window.press("t")
    window.wait("getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")


def test_a_note_is_written_by_keys_and_no_refresh_takes_what_is_typed(
    window: Browser, served: Address, folder: Path
) -> None:
    run = recorded_run(folder / "run", iterations=1)
    window.open(served("/answer?run=run&source=i1&answer=train/0%230"))
    window.script("window.notReloaded = true")
    window.wait("document.getElementById('own-note') !== null")
    window.press("n")
    window.script(
        "const field = document.activeElement; field.value = 'half a sen';"
        " field.dispatchEvent(new Event('input', {bubbles: true})); field.blur()"
    )
    record_note(run, author="somebody", label="theirs")
    window.wait("document.body.innerText.includes('somebody')")
    assert window.script("return document.querySelector('.own-note textarea').value") == "half a sen"

    window.script("document.querySelector('.own-note [name=labels]').value = 'mine, too'")
    window.script("document.querySelector('.own-note button').click()")
    window.wait("document.querySelectorAll('.own-note [type=checkbox]').length === 3")
    window.press("2")  # mine, theirs, too
    window.wait("document.querySelectorAll('.one-note .label').length === 4")

    assert window.script("return window.notReloaded")
    notes = {note.author: note for note in read_notes(run.notes)}
    assert notes[system_user()].text == "half a sen" and len(notes[system_user()].labels) == 3
