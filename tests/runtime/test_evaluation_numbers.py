"""pass@1 with its interval, pass@k and the majority vote, against their definitions."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetune.runtime.evaluation import by_domain, pass_at_k, summarise
from treetune.runtime.intervals import bootstrap, interval_of_mean
from treetune.vocabulary import Grade, Problem, Segment, Trajectory

Answer = tuple[str | None, bool, int]
"""What was extracted, whether it was cut off, its number of tokens."""

RIGHT = "right"


def trajectories(problems: Sequence[Sequence[Answer]]) -> list[Trajectory]:
    return [
        Trajectory(
            problem=Problem(id=f"test/{p}", prompt="?", gold=RIGHT),
            sample=sample,
            prompt_ids=(1,),
            segments=(Segment(token_ids=(2,) * tokens),),
            finish_reason="length" if cut else "stop",
            text=extracted or "",
            grade=Grade(float(extracted == RIGHT), "ok" if extracted else "no_answer", extracted),
            step_ends=(tokens,),
        )
        for p, answers in enumerate(problems)
        for sample, (extracted, cut, tokens) in enumerate(answers)
    ]


@st.composite
def evaluations(draw: st.DrawFn) -> list[list[Answer]]:
    samples = draw(st.integers(1, 6))
    answer = st.tuples(st.sampled_from([RIGHT, "wrong", "other", None]), st.booleans(), st.integers(1, 5))
    return draw(st.lists(st.lists(answer, min_size=samples, max_size=samples), min_size=1, max_size=5))


@given(evaluations())
@settings(max_examples=40)
def test_a_summary_is_what_its_definitions_say(problems: list[list[Answer]]) -> None:
    summary = summarise(trajectories(problems), seed=0)
    answers = list(itertools.chain.from_iterable(problems))
    rights = [[extracted == RIGHT for extracted, _, _ in group] for group in problems]
    n = len(problems[0])
    assert summary["n_problems"] == len(problems)
    assert summary["samples"] == n
    assert summary["pass_at_1"] == pytest.approx(mean(mean(right) for right in rights))
    assert summary["ci_low"] <= summary["pass_at_1"] + 1e-12
    assert summary["ci_high"] >= summary["pass_at_1"] - 1e-12
    assert summary["unfinished"] == pytest.approx(mean(cut for _, cut, _ in answers))
    assert summary["mean_tokens"] == pytest.approx(mean(tokens for _, _, tokens in answers))
    assert list(summary["pass_at_k"]) == [str(k) for k in (1, 2, 4) if k <= n]
    for k, value in summary["pass_at_k"].items():
        subsets = [mean(any(s) for s in itertools.combinations(right, int(k))) for right in rights]
        assert value == pytest.approx(mean(subsets))
    votes = 0
    for group in problems:
        counts = Counter(extracted for extracted, _, _ in group if extracted is not None)
        most = max(counts.values(), default=0)
        first = next((e for e, _, _ in group if e is not None and counts[e] == most), None)
        votes += first == RIGHT
    assert summary["majority_vote"] == pytest.approx(votes / len(problems))


def test_answers_whose_grader_extracts_nothing_have_no_majority() -> None:
    """A reward function says that an answer is right, and not what it says: that is no vote against it."""
    voting = trajectories([[(RIGHT, False, 1), (RIGHT, False, 1)], [("wrong", False, 1), (RIGHT, False, 1)]])
    silent = [
        replace(
            one,
            problem=replace(one.problem, id=f"silent/{one.problem.id}", domain="silent"),
            grade=replace(one.grade, extracted=None),
        )
        for one in voting
    ]
    assert summarise(voting, 0)["majority_vote"] == 0.5
    assert summarise(silent, 0)["majority_vote"] is None
    assert summarise([*voting, *silent], 0)["majority_vote"] == 0.5


def test_scores_of_a_recipe_change_no_share_of_right_answers() -> None:
    """Some give a little for a wrong answer, and more than 1 for a right one."""
    plain = trajectories([[(RIGHT, False, 1), ("wrong", False, 1)], [(None, True, 2), ("wrong", False, 1)]])
    scored = [
        replace(one, grade=replace(one.grade, reward=1.01 if one.grade.correct else 0.02)) for one in plain
    ]
    assert summarise(scored, seed=0) == summarise(plain, seed=0)
    assert summarise(scored, seed=0)["pass_at_1"] == 0.25


@given(st.integers(1, 8), st.data())
@settings(max_examples=40)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, data: st.DataObject) -> None:
    right = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n))
    brute = mean(any(subset) for subset in itertools.combinations(right, k))
    assert pass_at_k(n, sum(right), k) == pytest.approx(brute)


@pytest.mark.parametrize(("truth", "problems"), [(0.6, 60), (0.1, 30), (0.02, 30)])
def test_the_interval_of_a_share_covers_the_truth_as_often_as_it_says(truth: float, problems: int) -> None:
    draw, trials = random.Random(7), 2000
    covered = 0
    for trial in range(trials):
        low, high = interval_of_mean([float(draw.random() < truth) for _ in range(problems)], seed=trial)
        covered += low <= truth <= high
    assert 0.93 <= covered / trials <= 0.99


def test_the_interval_of_means_of_several_samples_covers_the_truth_about_as_often_as_it_says() -> None:
    draw, trials = random.Random(7), 100
    covered = 0
    for trial in range(trials):
        values = [sum(draw.random() < 0.6 for _ in range(4)) / 4 for _ in range(60)]
        low, high = interval_of_mean(values, seed=trial)
        covered += low <= 0.6 <= high
    assert 88 <= covered <= 100


def test_the_interval_is_as_wide_as_the_normal_one_and_leaves_room_where_problems_went_alike() -> None:
    values = [float(i < 300) for i in range(500)]
    half = 1.96 * (0.6 * 0.4 / 500) ** 0.5
    for interval in (interval_of_mean(values, seed=3), bootstrap(values, seed=3)):
        assert interval == pytest.approx((0.6 - half, 0.6 + half), abs=0.01)
    assert bootstrap(values, seed=3) == bootstrap(values, seed=3)
    assert interval_of_mean([1.0] * 20, seed=0) == pytest.approx((0.839, 1.0), abs=5e-4)
    assert interval_of_mean([0.0] * 20, seed=0) == pytest.approx((0.0, 0.161), abs=5e-4)


def test_a_summary_by_domain_is_that_of_each_domain_alone_and_needs_several() -> None:
    answers = trajectories([[(RIGHT, False, 2), ("wrong", True, 3)], [("wrong", False, 1)] * 2])
    named = [replace(t, problem=replace(t.problem, domain="ab"[int(t.problem.id[-1])])) for t in answers]
    assert by_domain(named, 0) == {
        "domains": {"a": summarise(answers[:2], 0), "b": summarise(answers[2:], 0)},
    }
    lost = [replace(t, grade=Grade(0.0, "unavailable")) if t.problem.domain == "b" else t for t in named]
    assert list(by_domain(lost, 0)["domains"]) == ["a"], "of the other one nothing is known"
    assert by_domain(named[:2], 0) == by_domain(answers, 0) == {}
