"""Answers in the report: the credit microscope, trees, episodes and turns.

The tests hold that steps stand with the values, intervals and advantages that were stored, that shared
steps are drawn once, and that texts of models and environments are escaped and marked.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support import turns
from tests.support.turns import Letters, lent, rollout
from tests.view.report.page import Page
from tests.view.report.synthetic import EPISODES, episode, report, write_experiment
from treetune.credit.grpo import Group
from treetune.domains.environments.pool import EnvironmentPool
from treetune.lab.analyzers.step_credit import make_step_credit
from treetune.rollouts.storage import TOKENS, write_episodes, write_tokens
from treetune.tree import answers_of
from treetune.view.report.write import write_report

HOSTILE = "<img src=x onerror=alert(1)>"
NINE = make_step_credit([2, 4], 0.0, [0.25, 0.25, -0.75, -0.75], [2, 4], (0.5, 0.75), (0.1, math.inf)).plain()
GROUP = make_step_credit([2, 4], 0.0, [-0.001] * 4).plain()


def microscope(path: Path) -> tuple[str, str]:
    """Writes the report, and returns the HTML and the text of its credit microscope."""
    written = write_report([path])
    html = written.read_text().partition("Credit microscope</h3>")[2].partition("<h3>")[0]
    return html, Page(written).text.partition("Credit microscope")[2].partition("Episodes")[0]


def write_analysis(path: Path, numbers: dict[str, Any]) -> Path:
    """Writes a run with a result of the credit microscope."""
    folder = write_experiment(path) / "analyses" / "credit_microscope"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"analyzer": "credit_microscope", "numbers": numbers}))
    return path


def write_analysis_of_an_answer(path: Path, credit: dict[str, Any], truth: int = 0, **more: Any) -> Path:
    answer = {
        "answer": f"train/7#{HOSTILE}", "prompt": HOSTILE, "reward": 0.0, "correct": False,
        "unfinished": True, "steps": [f"{HOSTILE}\n", "second"], "credit": credit, **more,
    }  # fmt: skip
    of_iteration = {"costs": {"K=9": {"tokens_per_answer": 812.4}}, "answers": [answer]}
    return write_analysis(path, {"truth": truth, "by_iteration": {"4": of_iteration}})


def test_methods_stand_side_by_side_with_values_intervals_and_costs(tmp_path: Path) -> None:
    html, text = microscope(
        write_analysis_of_an_answer(tmp_path / "run", {"K=9": NINE, "GRPO": GROUP}, truth=64)
    )
    assert "iteration 5" in text and "means over 64 continuations" in text and "reward 0, unfinished" in text
    assert "812 tokens an answer" in text and "V 0.50 [0.30, 0.70]" in " ".join(text.split())
    assert "+0.25" in text and "-0.75" in text
    assert text.count("-0.00") == 0, "next to nothing has no sign"
    assert html.count('<div class="note">V ') == 1, "no value where the step is credited with the one before"
    # Each method's largest advantage has the full colour, and its side one of two.
    assert 'class="signed down s10">-0.75' in html and 'class="signed up s3">+0.25' in html


def test_texts_are_escaped_a_newline_takes_one_line_and_an_end_token_is_shown(tmp_path: Path) -> None:
    html, text = microscope(write_analysis_of_an_answer(tmp_path / "run", {HOSTILE: NINE}))
    assert HOSTILE not in html
    assert text.count(HOSTILE) == 4, "as the id, the prompt, a step and a method's name"
    html, text = microscope(
        write_analysis_of_an_answer(tmp_path / "other", {"K=9": NINE}, steps=["\n<i>", ""])
    )
    assert "↵ &lt;i&gt;</span>" in html and "(end)" in text


def test_without_an_analysis_the_episodes_have_the_runs_values_and_intervals(
    tmp_path: Path,
) -> None:
    episodes = tuple(replace(row, step_errors=(0.1,) * len(row.step_ends)) for row in EPISODES)
    page = report(write_experiment(tmp_path / "run", episodes=episodes))
    assert "Credit microscope" not in page.text and "credit_microscope.jsonnet" in page.text
    assert "V 0.600 [0.40, 0.80]" in page.words and page.count("article", "episode") == 3
    # Episodes without errors have values without intervals.
    page = report(write_experiment(tmp_path / "older"))
    assert "V 0.600" in page.text and "0.40" not in page.text


def test_a_damaged_analysis_is_named_and_the_report_is_written(tmp_path: Path) -> None:
    text = report(write_analysis(tmp_path / "run", {})).text
    assert "analyses/credit_microscope/result.json can't be read" in text and "V 0.600" in text


ANSWERS = (
    episode("46\n102\n#102", (0.5, 0.7, 0.9), 1.0, "train/7"),
    replace(episode("46\n103\n<b>", (0.5, 0.7, 0.1), 0.0, "train/7"), trajectory="train/7#1"),
    replace(episode("46\n102\n#102", (0.5, 0.7, 0.9), 1.0, "train/7"), trajectory="train/7#2"),
)


def test_steps_that_answers_share_are_drawn_once_with_the_value_after_them(tmp_path: Path) -> None:
    page = report(write_experiment(tmp_path / "run", episodes=(*EPISODES, *ANSWERS)))
    drawn = page.text.partition("A problem's tree")[2].partition("Episodes")[0]
    once = (
        "the prompt · value after it 0.500", "46 ↵", "102 ↵", "· value after it 0.700", "after it 0.100",
        "mean reward 1.000", "mean reward 0.000",
    )  # fmt: skip
    assert {text: drawn.count(text) for text in once} == dict.fromkeys(once, 1), drawn
    assert "train/7" in drawn and "<b>" in drawn, "escaped"


def test_a_tree_is_drawn_only_with_values_and_two_answers_and_then_has_all(tmp_path: Path) -> None:
    plain = [replace(answer, step_values=None) for answer in ANSWERS]
    assert "A problem's tree" not in report(write_experiment(tmp_path / "alone")).text
    assert "A problem's tree" not in report(write_experiment(tmp_path / "plain", episodes=plain)).text
    many = [replace(ANSWERS[i % 2], trajectory=f"train/7#{i}") for i in range(40)]
    assert "All 40 answers" in report(write_experiment(tmp_path / "many", episodes=many)).text


def test_which_problems_tree_is_drawn_does_not_depend_on_the_order_of_rows(
    tmp_path: Path,
) -> None:
    equal = []
    for problem in (f"train/{number}" for number in range(10, 70)):
        equal.append(episode("46\n102\n#102", (0.5, 0.7, 0.9), 1.0, problem))
        wrong = episode("46\n103\n#103", (0.5, 0.7, 0.1), 0.0, problem)
        equal.append(replace(wrong, trajectory=f"{problem}#1"))
    for name, rows in (("forwards", equal), ("backwards", equal[::-1]), ("mixed", equal[1::2] + equal[::2])):
        page = report(write_experiment(tmp_path / name, episodes=rows))
        drawn = page.text.partition("A problem's tree")[2].partition("Episodes")[0]
        assert "train/10" in drawn, name
        assert "train/11" not in drawn, name


def test_each_turn_is_a_line_with_its_reward_and_the_environments_replies_are_marked(tmp_path: Path) -> None:
    with EnvironmentPool() as environments:
        context = lent(Letters(golds=("",) * 2), turns.engine(), environments)
        trees, _ = rollout(samples=4).run(context, context.task.problems("train"))
    path = write_experiment(tmp_path / "run", iterations=1, episodes=())
    write_episodes(path / "iterations/0000/episodes.arrow", Group().assign(context, trees)[0], turns.CODEC)
    write_tokens(path / TOKENS, turns.CODEC, len(turns.ALPHABET) + 1)
    page = report(path)
    replies = sum(answer.text.count("+") + answer.text.count("-") for answer in answers_of(trees))
    assert len(page.texts("injected")) == replies + 1, "each reply, and one in the legend"
    assert "not sampled by the policy" in page.text
    first = next(answer for answer in answers_of(trees) if answer.step_rewards)
    assert [reward for reward in first.step_rewards if f"r {reward:+.3g}" not in page.text] == []
