"""LiveBench's scores: parts of an answer earn parts, and the last answer counts alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.vocabulary import Problem
from treetune_domains.graders.livebench import SCORES, LiveBench, edit_distance


def of_livebench(task: str, response: str, gold: str) -> float:
    return LiveBench().grade(response, Problem(id="x", prompt="?", gold=gold, data={"task": task})).reward


def test_parts_of_an_answer_to_livebench_earn_parts() -> None:
    groups = "a, b, c, d, e, f, g, h"
    assert of_livebench("connections", "<solution>d, c, b, a, e, f, g, x</solution>", groups) == 0.5
    assert of_livebench("zebra_puzzle", "<solution>a, c</solution>", "a, b") == 0.25
    assert of_livebench("tablejoin", "{'a': 'x'}", "{'a': 'x', 'b': 'y'}") == pytest.approx(2 / 3)
    plot = "One thing happens. Another thing follows. They all go home."
    other = "They all go home. One thing happens. Another thing follows."
    assert of_livebench("plot_unscrambling", other, plot) == pytest.approx(1 - 2 / 3)


def test_the_last_answer_alone_counts_however_many_stand_in_bold() -> None:
    """The published scorers take the best of all groups in bold, or any of the last three words."""
    assert of_livebench("connections", "**a, b, c, d**\n\n**a, b, x, y**", "a, b, c, d") == 0
    assert of_livebench("spatial", "**4**\n\n**5**\n\n**6**", "4") == 0


def test_a_task_that_livebench_does_not_have_is_told() -> None:
    with pytest.raises(ValueError, match="did you mean 'spatial'"):
        of_livebench("spacial", "4", "4")


@given(st.sampled_from(sorted(SCORES)), st.text(max_size=80))
def test_any_answer_to_livebench_earns_at_most_1(task: str, text: str) -> None:
    gold = {"tablejoin": "{'a': 'b'}", "tablereformat": '[{"a": 1, "b": 2}]'}.get(task, "One. Two")
    assert 0 <= of_livebench(task, text, gold) <= 1


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_edit_distance_is_a_metric_that_ends_at_the_longer_length(one: list[int], other: list[int]) -> None:
    distance = edit_distance(one, other)
    assert distance == edit_distance(other, one)
    assert (distance == 0) == (one == other)
    assert abs(len(one) - len(other)) <= distance <= max(len(one), len(other))
