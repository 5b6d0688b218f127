"""Pages about data: what an address asks for is shown, hostile rows are text, judge and rule are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.support.browser import Browser
from tests.viewer.prepared import ROWS, SAMPLES, estimate, prepared
from tests.viewer.recorded import begin_run, record_iteration, recorded_run, trajectory
from tests.viewer.test_hostile_answers import SEEN, Elements
from treetune.vocabulary import Trajectory
from treetune_view.app import SEEN as MARK
from treetune_view.pages.agreement import Agreement

JUDGED = {"task": {"grader": {"type": "judge", "rule": {"type": "math"}}}}


def judged(judge: float | None, rule: float, number: int, domain: str) -> Trajectory:
    """An answer with both verdicts, or with the rule's alone."""
    numbers = {"rule": rule} if judge is None else {"judge": judge, "rule": rule}
    made = trajectory(number, 0, f"#{number:03}")
    score = rule if judge is None else judge
    return replace(
        made,
        grade=replace(made.grade, reward=score, numbers=numbers),
        problem=replace(made.problem, domain=domain),
    )


def test_data_sets_are_listed_and_followed(client: TestClient, folder: Path) -> None:
    nothing = client.get("/data")
    assert "No data set is known" in nothing.text
    prepared(folder / "data")
    recorded_run(folder / "run", iterations=1, **JUDGED)

    page = client.get("/data")
    mark = page.text.split('data-mark="')[1].split('"')[0]
    assert client.get("/data", headers={MARK: mark}).status_code == 204
    assert "data/sums.parquet" in page.text and "agreement?run=run" in page.text
    assert "trips" not in client.get("/data", params={"search": "wandb"}).text
    assert "Nothing is like that" in client.get("/data", params={"search": "zzz"}).text
    with (folder / "data" / "trips.jsonl").open("a") as file:
        file.write("\n")
    assert client.get("/data", headers={MARK: mark}).status_code == 200


def test_rows_are_filtered_sorted_and_counted_in_bars_that_lead_to_them(
    client: TestClient, folder: Path
) -> None:
    prepared(folder / "data")
    asked = {
        "data": "data/sums.parquet",
        "where": "pass_rate >= 0.5; data_source has MATH",
        "sort": "prompt.characters",
    }

    page = client.get("/rows", params={**asked, "order": "down", "size": 20}).text

    assert "<b>10</b> rows" in page and page.index(">23</a>") < page.index(">2</a>")
    bars = client.get("/histograms", params=asked).text
    links = [
        unescape(part.split('"')[0]) for part in bars.split('<a href="')[1:] if "pass_rate+%3C" in part[:200]
    ]
    assert links and "<b>" in client.get(links[0]).text
    wrong = {
        "sort": "rows can&#39;t be sorted",
        "where": "is no condition",
        "histogram": "is no column of numbers",
        "page": "whole number",
    }
    for key, words in wrong.items():
        answer = client.get("/rows", params={"data": "data/sums.parquet", key: "zzz"})
        assert (answer.status_code, words in answer.text) == (400, True), key
    assert client.get("/rows", params={"data": str(folder / "data/sums.parquet")}).status_code == 404
    assert client.get("/row", params={"data": "data/sums.parquet", "row": ROWS}).status_code == 404


def test_a_hostile_row_adds_no_element(client: TestClient, folder: Path) -> None:
    prepared(folder / "data")
    estimate(folder / "weak")
    pages = {
        "/rows": [
            ("data/sums.parquet", 0),
            ("data/trips.jsonl", 0),
            ("data/validation.table.json", 0),
            ("weak", 0),
        ],
        "/row": [
            ("data/sums.parquet", 0),
            ("data/trips.jsonl", 1),
            ("data/validation.table.json", 0),
            ("weak", 0),
        ],
    }
    for path, places in pages.items():
        for name, row in places:
            page = client.get(path, params={"data": name, "row": row})
            assert page.status_code == 200, page.text
            found = Elements(page.text)
            assert not {tag for tag, _ in found.found} & {
                "img",
                "iframe",
                "object",
                "embed",
                "base",
                "video",
                "style",
            }
            assert not [
                name for _, name in found.found if name.startswith("on") or name in ("style", "srcdoc")
            ]
            assert page.text.count("<script") == page.text.count('<script src="/assets/')


def test_answers_of_an_estimate_stand_beneath_their_row(client: TestClient, folder: Path) -> None:
    estimate(folder / "weak")

    page = client.get("/row", params={"data": "weak", "row": 3}).text

    assert f"<b>3</b> of {SAMPLES} right" in page and page.count("the grader took") == SAMPLES
    assert "What is 3 + 3?" in page


def test_judge_and_rule_are_compared_where_both_graded(client: TestClient, folder: Path) -> None:
    verdicts = [(1.0, 1.0)] * 5 + [(0.0, 0.0)] * 3 + [(1.0, 0.0)] * 2 + [(None, 1.0)]
    run = begin_run(folder / "run", **JUDGED)
    made = [judged(judge, rule, n, "math" if n % 2 else "logic") for n, (judge, rule) in enumerate(verdicts)]
    record_iteration(run, 0, made)
    recorded_run(folder / "plain", iterations=1)

    page = client.get("/agreement", params={"run": "run"}).text

    assert "<b>0.800</b> of 10 answers" in page and "1 answer was graded by the rule alone" in page
    assert "Cohen's kappa <b>0.600</b>" in page and "By domain" in page
    [link] = [
        unescape(part.split('"')[0])
        for part in page.split('href="')[1:]
        if "number.judge+%3E%3D+1%3B+number.rule+%3C+1" in part[:200]
    ]
    assert "<b>2</b> answers" in client.get(link).text
    assert "where judge and rule agree" in client.get("/answers", params={"run": "run"}).text
    other = client.get("/agreement", params={"run": "plain"})
    assert other.status_code == 404 and "graded by a judge and by a rule" in other.text


def test_kappa_is_not_told_where_nothing_varies() -> None:
    assert Agreement("x", ((0, 0), (0, 9))).kappa is None and Agreement("x", ((0, 0), (0, 9))).share == 1.0
    assert Agreement("x", ((0, 0), (0, 0))).share is None
    assert Agreement("x", ((25, 25), (25, 25))).kappa == 0.0
    assert Agreement("x", ((20, 5), (10, 15))).kappa == pytest.approx(
        0.4
    )  # Cohen's two readers of 50 proposals


def test_data_pages_are_drawn_in_a_browser_and_fit(
    window: Browser, served: Callable[[str], str], folder: Path
) -> None:
    prepared(folder / "data")
    estimate(folder / "weak")
    record_iteration(begin_run(folder / "run"), 0, [judged(1.0, n % 2, n, "math") for n in range(4)])
    for path in (
        "/data",
        "/rows?data=data/sums.parquet",
        "/row?data=data/sums.parquet&row=0&as=rendered",
        "/row?data=weak&row=0",
        "/agreement?run=run",
    ):
        window.open(served(path), width=420, dark=True)
        window.wait("document.readyState === 'complete' && document.querySelector('h1') !== null")
        ran, elements, attributes, framed = window.script(SEEN)
        assert (ran, elements, attributes, framed) == (True, 0, 0, True), path
        assert window.overflow() == 0, path
    window.open(served("/rows?data=weak"), width=1400)
    window.wait("document.querySelectorAll('.histogram a').length > 5")
    window.press("g")
    window.press("d")
    window.wait("location.pathname === '/data'")
    faults = window.faults()
    window.open("about:blank")
    assert faults == []
