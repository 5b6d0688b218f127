"""Saved pages: one file that shows what the page showed; and answers look the same in viewer and report."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from tests.view.conftest import FIRST, TOKEN, Shown, Viewer
from tests.view.hostile import KINDS, hostile_run
from tests.view.recorded import record_iteration
from treetune.lab.analyzers.step_credit import make_step_credit
from treetune.view.report.write import write_report
from treetune.view.templates import DRAWINGS_CSS, LOOK_CSS

LOOKS = """
const all = (selector, read) => [...document.querySelectorAll(selector)].map(read);
return JSON.stringify([
  all('.uplot canvas', (canvas) => canvas.toDataURL()),
  all('[data-i]', (token) => [token.className, token.textContent]),
  all('.katex', (formula) => [
    formula.textContent, formula.getClientRects()[0].width, getComputedStyle(formula).fontFamily]),
  all('main tbody tr, pre, figcaption, .state', (element) => element.innerText),
  all('details', (box) => box.open && box.innerText).filter(Boolean),
  all('h1, .verdict, .chip, th', (element) => [
    getComputedStyle(element).color, getComputedStyle(element).font]),
  all('select', (list) => list.value),
]);
"""
DOWNLOAD_S = 30


def downloaded(folder: Path) -> Path:
    """Waits for the page that the browser saves into a folder (while it writes, the name is another)."""
    deadline = time.monotonic() + DOWNLOAD_S
    while not (pages := list(folder.glob("*.html"))):
        assert time.monotonic() < deadline, f"nothing was saved: {list(folder.glob('*'))}"
        time.sleep(0.02)
    return pages[0]


def test_a_page_is_saved_as_one_file_that_shows_the_same_and_asks_for_nothing(
    shown: Shown, tmp_path: Path
) -> None:
    short = [kind for kind in KINDS if len(kind) < 400][::2]
    answers = ["$\\frac{1}{2}$ and \\(x^2\\), $\\frac{1}{$", "\n\nbehind two line ends", *short]
    run = hostile_run(shown.viewer.folder / "an/experiment", answers)
    record_iteration(run, 1)
    answer = "run=an/experiment&source=i1&answer=train"
    open_numbers = "document.querySelector('#counted').open = true"
    pages = {
        "/run?run=an/experiment": "document.querySelector('#log').click()",
        "/answer?run=an/experiment&source=i2&answer=train/0%230": open_numbers,
        f"/answer?{answer}/0%230&as=rendered": "",
        f"/answer?{answer}/1%230&as=text": "",
        "/answers?run=an/experiment&of=everything&search=script": "",
        "/": "",
    }
    for number, (path, click) in enumerate(pages.items()):
        folder = tmp_path / f"saved{number}"
        allowed = {"behavior": "allow", "downloadPath": str(folder)}
        shown.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allowed)
        shown.open(path)
        shown.wait("document.querySelector('.counted')?.childElementCount !== 0")  # the histograms
        shown.script(click)
        looks = shown.script(LOOKS)
        shown.press("e")
        saved = downloaded(folder)
        assert TOKEN not in saved.read_text() and "127.0.0.1" not in saved.read_text()
        shown.open("about:blank")  # otherwise the live page might send one more request
        assert shown.faults() == []

        shown.open(f"file://{saved}")
        assert shown.requests() == [f"file://{saved}"] and shown.messages() == [], path
        assert shown.script(LOOKS) == looks, path
        assert shown.harm() == [], path
        elsewhere = "document.querySelectorAll('a[href]:not([href^=\"#\"]), form[action]').length"
        assert shown.script(f"return {elsewhere}") == 0, path
        title = shown.driver.title
        assert " · saved 20" in title and (path == "/" or "an/experiment" in title)


NINE = make_step_credit([2, 4, 6], 1.0, [0.25] * 6, [2, 4, 6], (0.5, 0.75, 0.25), (0.1, 0.1, 0.2)).plain()
GROUP = make_step_credit([2, 4, 6], 1.0, [-0.5] * 6).plain()


def plain(html: str) -> str:
    """Removes links and the white space between elements."""
    without_links = re.sub(r"</?a\b[^>]*>", "", html)
    return re.sub(r"\s*(<[^>]+>)\s*", r"\1", without_links)


def plain_matches(pattern: str, html: str) -> list[str]:
    return [plain(match) for match in re.findall(pattern, html, re.DOTALL)]


def test_steps_credits_and_style_sheets_of_an_answer_are_the_same(viewer: Viewer) -> None:
    run = viewer.record()
    analysed_answer = {
        "answer": "train/0#0", "prompt": "0+1+2=", "reward": 1.0, "correct": True, "unfinished": False,
        "steps": ["0+1=1\n", "1+2=3\n", "#3"], "credit": {"K=9": NINE, "GRPO": GROUP},
    }  # fmt: skip
    numbers = {"truth": 0, "by_iteration": {"0": {"costs": {}, "answers": [analysed_answer]}}}
    folder = run.path / "analyses" / "credit_microscope"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"analyzer": "credit_microscope", "numbers": numbers}))

    report = write_report([run.path]).read_text()
    page = viewer.page("/answer", run="run", **FIRST)
    step, table = r'<div class="credit-of-step">.*?</div>', r'<table class="credits">.*?</table>'
    cards = report.split('<article class="episode">')[1:]
    [card] = [part for part in cards if "<code>train/0#0</code>" in part]
    assert plain_matches(step, page) == plain_matches(step, card) != []
    [shown], [written] = plain_matches(table, page), plain_matches(table, report)
    assert shown.replace("<small>credit_microscope</small>", "") == written
    phases = r'<svg class="share".*?</p>'
    assert plain_matches(phases, viewer.page("/run?run=run")) == plain_matches(phases, report) != []
    for sheet in (LOOK_CSS, DRAWINGS_CSS):
        assert sheet.read_text() in report
        assert f'href="/assets/{sheet.name}"' in page
        assert viewer.page(f"/assets/{sheet.name}") == sheet.read_text()
