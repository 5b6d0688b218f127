"""An answer looks the same in the report and in the viewer: the same markup, under the same style sheets."""

from __future__ import annotations

import json
import re

from starlette.testclient import TestClient

from tests.viewer.recorded import recorded_run
from treetune_lab.analyzers.step_credit import step_credit
from treetune_view.report import write_report
from treetune_view.store import Store
from treetune_view.templates import DRAWINGS, LOOK

WHERE = {"run": "run", "source": "i1", "answer": "train/0#0"}
NINE = step_credit([2, 4, 6], 1.0, [0.25] * 6, [2, 4, 6], (0.5, 0.75, 0.25), (0.1, 0.1, 0.2)).plain()
GROUP = step_credit([2, 4, 6], 1.0, [-0.5] * 6).plain()


def plain(html: str) -> str:
    """Without links and the white space between elements."""
    return re.sub(r"\s*(<[^>]+>)\s*", r"\1", re.sub(r"</?a\b[^>]*>", "", html))


def one_line(pattern: str, html: str) -> list[str]:
    return [plain(found) for found in re.findall(pattern, html, re.DOTALL)]


def test_steps_and_credits_of_an_answer_are_the_same(client: TestClient, store: Store) -> None:
    run = recorded_run(store.folders[0] / "run", iterations=1)
    looked = {
        "answer": "train/0#0",
        "prompt": "0+1+2=",
        "reward": 1.0,
        "correct": True,
        "unfinished": False,
        "steps": ["0+1=1\n", "1+2=3\n", "#3"],
        "credit": {"K=9": NINE, "GRPO": GROUP},
    }
    numbers = {"truth": 0, "by_iteration": {"0": {"costs": {}, "answers": [looked]}}}
    folder = run.path / "analyses" / "credit_microscope"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"analyzer": "credit_microscope", "numbers": numbers}))

    report = write_report([run.path]).read_text()
    page = client.get("/answer", params=WHERE).text

    step, table = r'<div class="credit-of-step">.*?</div>', r'<table class="credits">.*?</table>'
    cards = report.split('<article class="episode">')[1:]
    [card] = [part for part in cards if "<code>train/0#0</code>" in part]
    assert one_line(step, page) == one_line(step, card) != []
    [shown], [written] = one_line(table, page), one_line(table, report)
    assert shown.replace("<small>credit_microscope</small>", "") == written
    phases = r'<svg class="share".*?</p>'
    assert one_line(phases, client.get("/run", params={"run": "run"}).text) == one_line(phases, report) != []


def test_both_have_the_same_style_sheets(client: TestClient, store: Store) -> None:
    run = recorded_run(store.folders[0] / "run", iterations=1)
    report, page = write_report([run.path]).read_text(), client.get("/answer", params=WHERE).text
    for sheet in (LOOK, DRAWINGS):
        assert sheet.read_text() in report
        assert f'href="/assets/{sheet.name}"' in page
        assert client.get(f"/assets/{sheet.name}").text == sheet.read_text()
