"""A few answers with what credit gives their steps: what the analyzer found, or the run's own values."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.reports.page import Page
from tests.reports.synthetic import EPISODES, write_experiment
from treetune_lab.analyzers.step_credit import step_credit
from treetune_view.report import write_report

HOSTILE = "<img src=x onerror=alert(1)>"


def section(path: Path) -> tuple[str, str]:
    """Its HTML and its text."""
    report = write_report([path])
    html = report.read_text().partition("Credit microscope</h3>")[2].partition("<h3>")[0]
    return html, Page(report).text.partition("Credit microscope")[2].partition("Episodes")[0]


def look(path: Path, *answers: dict[str, Any], truth: int = 0, name: str = "credit_microscope") -> None:
    folder = path / "analyses" / name
    folder.mkdir(parents=True)
    found = {"costs": {"K=9": {"tokens_per_answer": 812.4}}, "answers": answers}
    numbers = {"truth": truth, "by_iteration": {"4": found}}
    (folder / "result.json").write_text(json.dumps({"analyzer": "credit_microscope", "numbers": numbers}))


def answer(**credit: Any) -> dict[str, Any]:
    return {
        "answer": f"train/7#{HOSTILE}",
        "prompt": HOSTILE,
        "reward": 0.0,
        "correct": False,
        "unfinished": True,
        "steps": [f"{HOSTILE}\n", "second"],
        "credit": credit,
    }


NINE = step_credit([2, 4], 0.0, [0.25, 0.25, -0.75, -0.75], [2, 4], (0.5, 0.75), (0.1, math.inf)).plain()
GROUP = step_credit([2, 4], 0.0, [-0.001] * 4).plain()


def test_methods_stand_side_by_side_with_values_intervals_and_costs(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run")
    look(path, answer(**{"K=9": NINE, "GRPO": GROUP}), truth=64)
    html, text = section(path)
    assert "iteration 5" in text and "Truth: 64 continuations" in text and "reward 0, unfinished" in text
    assert "812 tokens an answer" in text
    assert "V 0.50 [0.30, 0.70]" in " ".join(text.split())
    assert "+0.25" in text and "-0.75" in text
    assert text.count("-0.00") == 0, "next to nothing has no sign"
    assert html.count('<div class="note">V ') == 1, "no value where the step is credited with the one before"
    # Each method's largest advantage has the full colour, and its side one of two.
    assert 'class="signed down s10">-0.75' in html
    assert 'class="signed up s3">+0.25' in html


def test_what_a_model_wrote_is_text(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run")
    look(path, answer(**{HOSTILE: NINE}))
    html, text = section(path)
    assert HOSTILE not in html
    assert text.count(HOSTILE) == 4, "as the id, the prompt, a step and a method's name"


def test_a_step_that_begins_with_a_newline_is_one_line_and_an_end_token_is_seen(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run")
    look(path, answer(**{"K=9": NINE}) | {"steps": ["\n<i>", ""]})
    html, text = section(path)
    assert "↵ &lt;i&gt;</span>" in html
    assert "(end)" in text


def test_without_an_analysis_the_runs_own_values_are_shown_with_their_intervals(tmp_path: Path) -> None:
    episodes = tuple(replace(one, step_errors=(0.1,) * len(one.step_ends)) for one in EPISODES)
    html, text = section(write_experiment(tmp_path / "run", episodes=episodes))
    assert "the run's own" in text and "credit_microscope.jsonnet" in text
    assert "V 0.60 [0.40, 0.80]" in " ".join(text.split())
    assert html.count("<article") == 3
    # Of runs from before errors were kept, values alone.
    html, text = section(write_experiment(tmp_path / "older"))
    assert "V 0.60" in text and "0.40" not in text
    plain = tuple(replace(one, step_values=None) for one in EPISODES)
    assert section(write_experiment(tmp_path / "plain", episodes=plain)) == ("", "")


def test_a_damaged_analysis_is_missing_and_no_end_of_the_report(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run")
    folder = path / "analyses" / "credit_microscope"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text('{"analyzer": "credit_microscope", "numbers": {}}')
    text = Page(write_report([path])).text
    assert "analyses/credit_microscope/result.json can't be read" in text
    assert "the run's own" in text
