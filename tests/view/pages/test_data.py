"""The viewer's pages about data sets, and the comparison of a judge's verdicts with a rule's.

The tests hold that lists and rows are what their address asks for, that hostile rows stay text, and that
pages fit their windows.
"""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from tests.view.conftest import Shown, Viewer, fingerprint_of
from tests.view.prepared import ROWS, SAMPLES, write_data_sets, write_estimate
from tests.view.recorded import begin_run, record_iteration, trajectory
from tests.view.test_hostile_answers import Elements
from treetune.view.app import SEEN_FINGERPRINT_HEADER
from treetune.vocabulary import Trajectory


def judged_answer(judge: float | None, rule: float, number: int, domain: str) -> Trajectory:
    """Builds an answer with both verdicts, or with the rule's alone."""
    numbers = {"rule": rule} if judge is None else {"judge": judge, "rule": rule}
    answer = trajectory(number, 0, f"#{number:03}")
    score = rule if judge is None else judge
    return replace(
        answer,
        grade=replace(answer.grade, reward=score, numbers=numbers),
        problem=replace(answer.problem, domain=domain),
    )


def link_with(page: str, text: str) -> str:
    """Finds the first link whose address has this text in its first 200 characters."""
    addresses = [part.split('"')[0] for part in page.split('href="')[1:]]
    return next(unescape(address) for address in addresses if text in address[:200])


def test_data_sets_are_listed_and_the_list_notices_changed_files(viewer: Viewer) -> None:
    assert "No data set was found" in viewer.page("/data")
    write_data_sets(viewer.folder / "data")
    viewer.record()
    page = viewer.page("/data")
    fingerprint = {SEEN_FINGERPRINT_HEADER: fingerprint_of(page)}
    assert viewer.get("/data", fingerprint).status_code == 204
    assert "data/sums.parquet" in page
    assert "trips" not in viewer.page("/data?search=parquet")
    assert "No data set matches" in viewer.page("/data?search=zzz")
    with (viewer.folder / "data" / "trips.jsonl").open("a") as file:
        file.write("\n")
    assert viewer.get("/data", fingerprint).status_code == 200


def test_rows_are_filtered_and_sorted_and_bars_of_histograms_link_to_their_rows(viewer: Viewer) -> None:
    write_data_sets(viewer.folder / "data")
    rows = {"data": "data/sums.parquet"}
    query = {**rows, "where": "pass_rate >= 0.5; data_source has MATH", "sort": "prompt.characters"}
    page = viewer.page("/rows", **query, order="down", size=20)
    assert "<b>10</b> rows" in page and page.index(">23</a>") < page.index(">2</a>")
    assert "<b>" in viewer.page(link_with(viewer.page("/histograms", **query), "pass_rate+%3C"))
    for key, message in (
        ("sort", "rows can&#39;t be sorted"),
        ("where", "is not a condition"),
        ("histogram", "is not a column of numbers"),
        ("page", "whole number"),
    ):
        assert message in viewer.refusal("/rows", 400, **rows, **{key: "zzz"})
    viewer.refusal("/rows", 404, data=str(viewer.folder / "data/sums.parquet"))
    viewer.refusal("/row", 404, **rows, row=ROWS)


@pytest.mark.parametrize(
    ("name", "row"),
    [("data/sums.parquet", 0), ("data/trips.jsonl", 1), ("weak", 0)],
)
def test_a_hostile_row_adds_no_element(viewer: Viewer, name: str, row: int) -> None:
    write_data_sets(viewer.folder / "data")
    write_estimate(viewer.folder / "weak")
    for path in (f"/rows?data={name}", f"/row?data={name}&row={row}"):
        page = viewer.page(path)
        elements = Elements(page).elements
        harmful_tags = {"img", "iframe", "object", "embed", "base", "video", "style"}
        attributes = {attribute for _, attribute in elements}
        assert not {tag for tag, _ in elements} & harmful_tags
        assert not attributes & {"style", "srcdoc"}
        assert not [attribute for attribute in attributes if attribute.startswith("on")]
        assert page.count("<script") == page.count('<script src="/assets/')


def test_the_answers_of_an_estimate_stand_below_their_row(viewer: Viewer) -> None:
    write_estimate(viewer.folder / "weak")
    page = viewer.page("/row?data=weak&row=3")
    assert f"<b>3</b> of {SAMPLES} correct" in page and page.count("extracted") == SAMPLES
    assert "What is 3 + 3?" in page


def test_answers_on_which_judge_and_rule_disagree_are_linked(viewer: Viewer) -> None:
    verdicts = [(1.0, 1.0)] * 5 + [(0.0, 0.0)] * 3 + [(1.0, 0.0)] * 2 + [(None, 1.0)]
    answers = []
    for number, (judge, rule) in enumerate(verdicts):
        answers.append(judged_answer(judge, rule, number, "math" if number % 2 else "logic"))
    record_iteration(begin_run(viewer.folder / "run"), 0, answers)
    viewer.record("plain")
    page = viewer.page("/answers?run=run")
    assert "<b>2</b> answers" in viewer.page(link_with(page, "number.judge+%3E%3D+1%3B+number.rule+%3C+1"))
    assert "by the judge" not in viewer.page("/answers?run=plain")


def test_data_pages_are_drawn_in_a_browser_and_fit(shown: Shown, folder: Path) -> None:
    write_data_sets(folder / "data")
    write_estimate(folder / "weak")
    for path in (
        "/data",
        "/rows?data=data/sums.parquet",
        "/row?data=data/sums.parquet&row=0&as=rendered",
        "/row?data=weak&row=0",
    ):
        shown.open(path, width=420, dark=True)
        assert shown.harm() == [], path
    shown.open("/rows?data=weak", width=1400)
    shown.wait("document.querySelectorAll('.histogram a').length > 5")
    shown.press("gd")
    shown.wait("location.pathname === '/data'")
