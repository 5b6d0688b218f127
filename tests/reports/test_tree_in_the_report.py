"""The answers to one problem are drawn as its tree, with the values of its states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.reports.page import Page
from tests.reports.synthetic import EPISODES, episode, write_experiment
from treetune_view.report import write_report

GROUP = (
    episode("46\n102\n#102", (0.5, 0.7, 0.9), 1.0, "train/7"),
    replace(episode("46\n103\n<b>", (0.5, 0.7, 0.1), 0.0, "train/7"), trajectory="train/7#1"),
    replace(episode("46\n102\n#102", (0.5, 0.7, 0.9), 1.0, "train/7"), trajectory="train/7#2"),
)


def test_steps_that_answers_share_stand_once_with_the_value_of_the_state_behind_them(
    tmp_path: Path,
) -> None:
    page = Page(write_report([write_experiment(tmp_path / "run", episodes=(*EPISODES, *GROUP))]))
    drawn = page.text.partition("A problem's tree")[2].partition("Episodes")[0]
    assert "train/7" in drawn and drawn.count("46") == 1 and drawn.count("#102") == 1
    assert [drawn.count(value) for value in ("V 0.50", "V 0.70", "V 0.90", "V 0.10")] == [1, 1, 1, 1]
    assert drawn.count("reward 1 × 2") == 1 and drawn.count("reward 0") == 1
    assert "<b>" in drawn, "escaped"


def test_without_values_or_a_second_answer_there_is_no_tree(tmp_path: Path) -> None:
    alone = write_experiment(tmp_path / "alone")
    plain = write_experiment(
        tmp_path / "plain", episodes=tuple(replace(one, step_values=None) for one in GROUP)
    )
    assert "A problem's tree" not in Page(write_report([alone])).text
    assert "A problem's tree" not in Page(write_report([plain])).text


def test_a_tree_with_more_answers_than_are_drawn_says_so(tmp_path: Path) -> None:
    many = [replace(GROUP[i % 2], trajectory=f"train/7#{i}") for i in range(40)]
    assert (
        "16 of the 40 answers" in Page(write_report([write_experiment(tmp_path / "run", episodes=many)])).text
    )
