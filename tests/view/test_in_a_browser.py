"""The viewer's pages in Chromium.

Promises that these tests hold, each without an error in the console and without a request to another machine:

* Every page is drawn, fits wide and narrow windows, and can be read in light and dark.
* Pages follow a run that goes on, without a reload and without losing what is typed.
* Everything can be done by keys, and the focus is visible.
* Hostile names and texts stay text.
"""

from dataclasses import replace

import pytest

from tests.support.page_faults import find_page_faults, find_unseen_focus
from tests.support.viewer_pages import DOWNLOADED, DRAWN, find_shown_data, page_views
from tests.view.conftest import Shown
from tests.view.recorded import (
    answers,
    begin_run,
    record_evaluation,
    record_iteration,
    record_note,
)
from treetune.view.notes import read_notes, system_user
from treetune.view.pages import PAGES

HOSTILE = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "</title><svg onload=alert(1)>",
    "javascript:window.ran=1",
    "{{ 7 * 7 }}",
    "a\u202eb\u2066c\u0000d\u200be",
    '" autofocus onfocus="window.ran = 1',
)


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (420, True)])
def test_every_page_is_drawn_fits_and_can_be_read(shown: Shown, width: int, dark: bool) -> None:
    record_note(shown.viewer.record("quickstart/vineppo", iterations=3))
    shown.viewer.record("quickstart/vineppo_seed2", iterations=2, seed=2)
    run_with_judge = begin_run(
        shown.viewer.folder / "judged", task={"grader": {"type": "judge", "rule": {"type": "math"}}}
    )
    verdicts = {"judge": 1.0, "rule": 0.0}
    judged_answers = []
    for answer in answers(0):
        judged_answers.append(replace(answer, grade=replace(answer.grade, numbers=verdicts)))
    record_iteration(run_with_judge, 0, judged_answers)
    (shown.viewer.folder / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "pass_rate": 0.5}\n')
    begin_run(shown.viewer.folder / "a_name_that_is_rather_long_for_a_narrow_page_and_has_no_spaces_in_it")
    shown.open("/", width=width, dark=dark)
    origin = shown.address("/").partition("/?")[0]
    paper = shown.script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")

    views = list(page_views(find_shown_data(shown, origin)))
    assert {view.page for view in views} == {page.path for page in PAGES} - DOWNLOADED
    for view in views:
        view.visit(shown, origin, width=width, dark=dark)
        assert find_page_faults(shown) == [], view.name


def test_three_clicks_lead_from_the_printed_address_to_the_credit_of_an_answer(
    shown: Shown,
) -> None:
    shown.viewer.record("vineppo", iterations=2)
    shown.open("/")

    shown.click("tbody th a")  # the experiment
    shown.wait(DRAWN)
    shown.click("nav a[href^='/answers']")
    shown.wait("document.querySelector('table.answers tbody a') !== null")
    shown.click("table.answers tbody a")
    shown.wait("document.querySelectorAll('.tokens [data-i]').length > 0")

    assert "V 0.500" in shown.text() and "A +0.250" in shown.text()  # values and advantages of its steps
    assert shown.script("return document.querySelectorAll('.tokens .up.s10, .tokens .down.s7').length > 1")
    shown.press("\ue014")
    assert "advantage 0.25" in shown.script("return document.querySelector('.token-bar output').textContent")


def test_every_page_of_an_experiment_is_reached_by_keys_and_shows_where_the_focus_is(shown: Shown) -> None:
    shown.viewer.record(iterations=2)
    shown.open("/")
    for keys, page in (
        ("j\ue007", "/run"), ("ga", "/answers"), ("j\ue007", "/answer"), ("a", "/answers"),
        ("gm", "/compare"), ("gc", "/configuration"), ("gt", "/timeline"), ("gr", "/run"), ("ge", "/"),
    ):  # fmt: skip
        shown.press(keys)
        shown.wait(f"location.pathname === '{page}' && document.readyState === 'complete'")
    assert find_unseen_focus(shown) == []


def test_an_answer_shows_its_credit_and_its_continuations_once_they_are_there(shown: Shown) -> None:
    run = begin_run(shown.viewer.folder / "run")
    record_iteration(run, 0)
    credit = run.iteration_folder(0) / "episodes.arrow"
    episodes = credit.read_bytes()
    credit.unlink()
    shown.open("/answer?run=run&source=i1&answer=train/0%230&as=tokens")
    shown.wait("document.querySelectorAll('.tokens [data-i]').length > 0")
    assert "V 0.500" not in shown.text()
    shown.script("window.notReloaded = true")

    credit.write_bytes(episodes)
    shown.wait_for("V 0.500")
    shown.script("document.querySelector('details:has(.later) summary').click()")
    shown.wait("document.querySelector('details[open] .later').textContent.trim() !== '…'")

    assert shown.script("return window.notReloaded")


def test_a_run_that_goes_on_is_followed_without_a_reload(shown: Shown) -> None:
    run = shown.viewer.record(iterations=2, planned=4)
    with run.locked():
        shown.open("/run?run=run")
        shown.wait(DRAWN)
        shown.script("window.notReloaded = true; document.querySelector('#log').click()")
        assert "2 of 4 iterations" in shown.text() and "running" in shown.text()

        record_iteration(run, 2)
        shown.wait_for("3 of 4 iterations")
        record_evaluation(run, 3)
    shown.wait_for("stopped")  # the run no longer holds its lock, as if it had been killed
    with run.locked():
        record_iteration(run, 3)
    shown.wait("document.body.innerText.includes('finished') && document.body.innerText.includes('4 of 4')")

    assert shown.script("return window.notReloaded && document.querySelector('#log').checked")


def test_all_curves_are_zoomed_together_and_the_address_has_the_range(shown: Shown) -> None:
    shown.viewer.record(iterations=20)
    shown.open("/run?run=run&from=5&to=9")
    shown.wait(DRAWN)
    # What a chart draws is read off the labels of its axis: these are drawn, so a drag says where it is.
    before = shown.script(
        "return [...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"
    )
    from selenium.webdriver import ActionChains

    over = shown.driver.find_element("css selector", ".u-over")
    drag = ActionChains(shown.driver).move_to_element_with_offset(over, -60, 0)
    drag.click_and_hold().move_by_offset(80, 0).release().perform()
    shown.wait("!location.search.includes('from=5&')")
    fields = "[...document.querySelectorAll('#curves-form [type=number]')]"
    chosen = shown.script(f"return {fields}.map((field) => Number(field.value))")
    assert 5 < chosen[0] < chosen[1] < 9
    after = shown.script(
        "return [...document.querySelectorAll('canvas')].map((canvas) => canvas.toDataURL())"
    )
    assert len(after) == len(before) > 5
    for canvas_before, canvas_after in zip(before, after, strict=True):
        assert canvas_before != canvas_after, "all charts are zoomed"
    twice = "dispatchEvent(new MouseEvent('dblclick', { bubbles: true }))"
    shown.script(f"document.querySelector('.u-over').{twice}")
    shown.wait("!location.search.includes('from')")


def test_answers_are_read_labelled_and_left_by_keys_alone(shown: Shown) -> None:
    run = shown.viewer.record(iterations=1)
    record_note(run, author="somebody", label="odd")
    shown.open("/answers?run=run")
    shown.wait("document.querySelector('table.answers tbody a') !== null")
    names_of_answers = "return [...document.querySelectorAll('table.answers tbody th a')]"
    names_of_answers += ".map((link) => link.textContent)"
    listed = shown.script(names_of_answers)
    shown.press("j\ue007")
    title = "document.querySelector('h1')?.textContent.split(' ')[0]"
    for number in (0, 1, 2, 3):
        shown.wait(f"location.pathname === '/answer' && {title} === {listed[number]!r}")
        shown.press("j" if number < 3 else "k")
    shown.wait(f"{title} === {listed[2]!r}")
    shown.press("m")
    shown.wait("document.querySelector('[data-on]') !== null")
    shown.press("1")
    shown.wait(f"{title} === {listed[3]!r}")
    my_notes = [note for note in read_notes(run.notes_folder) if note.author == system_user()]
    assert [note.about.answer for note in my_notes] == [listed[2]]
    shown.script("history.back()")
    shown.wait("location.pathname === '/answers'")
    shown.script("history.forward()")
    shown.wait(f"location.pathname === '/answer' && {title} === {listed[3]!r}")
    shown.press("u")
    shown.wait("location.pathname === '/answers' && document.querySelector('tr:target a') !== null")
    assert shown.script("return document.querySelector('tr:target th a').textContent") == listed[3]
    shown.press("j\ue007")
    shown.wait(f"location.pathname === '/answer' && {title} === {listed[4]!r}")


def test_keys_choose_rows_open_pages_and_are_explained(shown: Shown) -> None:
    for name in ("first", "second", "third"):
        shown.viewer.record(name)
    shown.open("/")
    shown.press("?")
    shown.wait("document.getElementById('keys').open")
    assert "next row" in shown.text() and "all experiments" in shown.text()
    shown.press("?")
    shown.wait("!document.getElementById('keys').open")
    shown.press("jxjjx")
    shown.press("v")
    shown.wait("location.pathname === '/run'")
    assert shown.script("return new URLSearchParams(location.search).getAll('run')") == ["first", "third"]
    shown.press("gc")
    shown.wait("location.pathname === '/configuration'")
    shown.press("ge")
    shown.wait("location.pathname === '/'")
    shown.press("/")
    shown.type("sec")
    one_row = "document.querySelectorAll('tbody tr').length === 1"
    shown.wait(f"{one_row} && location.search.includes('search=sec')")


def test_hostile_names_are_shown_as_text(shown: Shown) -> None:
    for i, text in enumerate(HOSTILE):
        run = shown.viewer.record(f"run{i}", iterations=1, planned=2, credit={"type": text}, **{text: text})
        (run.logs_folder / "run.log").write_text(f"2026-11-22 19:03:11,801 INFO {text}\n")
    pages = [f"/{page}?run=run{i}" for i in range(len(HOSTILE)) for page in ("run", "configuration")]
    for path in ("/", *pages):
        shown.open(path)
        shown.wait("document.querySelector('h1') !== null")
        assert shown.script("return window.ran === undefined"), path
        # The pages have no such elements themselves.
        added = "document.querySelectorAll('img, iframe, object, [onerror], [onload]').length"
        assert shown.script(f"return {added}") == 0
    shown.open("/configuration?run=run5")
    assert "⟨RLO⟩" in shown.text() and "\u202e" not in shown.text()


def test_the_theme_that_is_chosen_is_kept(shown: Shown) -> None:
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 28)'"
    shown.open("/")
    shown.press("t")
    shown.wait(dark)
    shown.open("/")
    shown.wait(dark)
    shown.press("t")
    shown.wait(dark.replace("20, 23, 28", "255, 255, 255"))


def test_a_note_is_written_by_keys_and_a_refresh_keeps_what_is_typed(shown: Shown) -> None:
    run = shown.viewer.record(iterations=1)
    shown.open("/answer?run=run&source=i1&answer=train/0%230")
    shown.script("window.notReloaded = true")
    shown.wait("document.getElementById('own-note') !== null")
    shown.press("n")
    shown.type("half a sen")
    shown.script("document.activeElement.blur()")
    record_note(run, author="somebody", label="theirs")
    shown.wait_for("somebody")
    assert shown.script("return document.querySelector('.own-note textarea').value") == "half a sen"

    shown.script("document.querySelector('.own-note [name=labels]').value = 'mine, too'")
    shown.script("document.querySelector('.own-note button').click()")
    shown.wait("document.querySelectorAll('.own-note [type=checkbox]').length === 3")
    shown.press("2")  # the second of the labels mine, theirs, too
    shown.wait("document.querySelectorAll('.one-note .label').length === 4")

    assert shown.script("return window.notReloaded")
    notes = {note.author: note for note in read_notes(run.notes_folder)}
    assert notes[system_user()].text == "half a sen" and len(notes[system_user()].labels) == 3
