"""The ways along signs: what is right, what the teacher does, and what its states are worth."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from treetune.credit.values.base import AnswerState, ValuedAnswer
from treetune.lab.signposts import SIGNS, Decided, Rule, Signposts, SignpostsGrader
from treetune.tasks.steps import ends_of_lines
from treetune.tree import State
from treetune.vocabulary import Problem

RULES: tuple[Rule, ...] = ("all", "first", "last", "once")


def signposts(rule: Rule, **settings: object) -> Signposts:
    sizes = {"signs": 6, "train_size": 60, "validation_size": 20, "test_size": 30}
    return Signposts(rule=rule, rates=(0.8, 0.4, 0.6), **(sizes | settings))  # type: ignore[arg-type]


def way(task: Signposts, problem: Problem, right: list[bool]) -> str:
    """An answer whose choices are right on these lines."""
    signs = [problem.data["signs"][line % task.period] for line in range(len(right))]
    return "".join(
        f"{SIGNS[sign]}{task.right(sign) if good else task.right(sign) % task.options + 1}aaa\n"
        for sign, good in zip(signs, right, strict=True)
    )


@pytest.mark.parametrize(
    ("rule", "right", "correct"),
    [
        ("all", [True] * 6, True),
        ("all", [True] * 5 + [False], False),
        ("first", [True] + [False] * 5, True),
        ("first", [False] + [True] * 5, False),
        ("last", [False] * 5 + [True], True),
        ("last", [True] * 5 + [False], False),
        ("once", [True, False, True, False, True, False], True),
        ("once", [True, False, True, True, False, True], False),
        ("once", [True, True], False),
    ],
)
def test_the_rule_says_whose_choices_decide(rule: Rule, right: list[bool], correct: bool) -> None:
    task = signposts(rule)
    problem = task.problems("train")[0]
    assert task.grader.grade(way(task, problem, right), problem).correct is correct


@pytest.mark.parametrize("response", ["", "\n\n\n", "A", "xxxxxxxxx", "\n" * 50])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_no_way_earns_nothing(rule: Rule, response: str) -> None:
    task = signposts(rule)
    assert task.grader.grade(response, task.problems("train")[0]).reward == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_state_of_the_teacher_is_worth_the_mean_of_what_follows(rule: Rule) -> None:
    """The value before a line is the mean of those behind it, right and wrong, and of the last the reward."""
    task = signposts(rule)
    for problem in task.problems("train")[:3]:
        before: list[list[bool]] = [[]]
        for line in range(task.steps):
            rate = task.rate(problem.data["signs"][line % task.period])
            for so_far in before:
                behind = [
                    task.teacher_value(problem, way(task, problem, [*so_far, good])) for good in (False, True)
                ]
                here = task.teacher_value(problem, way(task, problem, so_far))
                assert here == pytest.approx((1 - rate) * behind[0] + rate * behind[1], abs=1e-12)
            before = [[*so_far, good] for so_far in before for good in (False, True)]
        for so_far in before:
            text = way(task, problem, so_far)
            assert task.teacher_value(problem, text) == task.grader.grade(text, problem).reward


def test_the_teacher_is_as_often_right_as_it_is_said_to_be() -> None:
    task = signposts("all", signs=20, train_size=4000)
    problems = task.problems("train")
    solved = [task.grader.grade(task.demonstration(one, 1), one).reward for one in problems]
    known = [task.teacher_value(one, "") for one in problems]
    assert sum(solved) / len(solved) == pytest.approx(sum(known) / len(known), abs=0.02)
    assert task.demonstration(problems[0], 1) == task.demonstration(problems[0], 1)
    assert task.demonstration(problems[0], 1) != task.demonstration(problems[0], 2)


def test_every_line_is_a_step_and_shows_the_sign_of_the_prompt() -> None:
    task = signposts("all", period=2, signs=20)
    problem = task.problems("test")[3]
    response = task.demonstration(problem, 5)
    assert task.step_boundaries(response) == ends_of_lines(response)
    lines, shown = response.splitlines(), problem.prompt.splitlines()
    assert [line[0] for line in lines] == [shown[line % 2][0] for line in range(6)]
    assert {len(line) for line in [*lines, *shown]} == {5}
    assert set(problem.prompt + response) <= set(task.alphabet())


def test_wandering_and_names_change_nothing_but_the_text() -> None:
    plain, wandering = signposts("first"), signposts("first", wandering=3, names=2, signs=6)
    problem = wandering.problems("train")[0]
    response = wandering.demonstration(problem, 1)
    *way_, wandered = response.splitlines()
    assert len(way_) == plain.steps
    assert wandered[::2] == way_[-1][0] * 3
    assert set(wandered[1::2]) <= set("1234")
    name, *shown = problem.prompt.splitlines()
    assert (len(name), len(shown)) == (2, 3)
    assert set(problem.prompt + response) <= set(wandering.alphabet())
    value = wandering.teacher_value(problem, response)
    assert value == wandering.teacher_value(problem, way_[0] + "\n")
    assert value == wandering.grader.grade(response, problem).reward


def test_where_wandering_comes_first_the_way_behind_it_is_what_counts() -> None:
    task = signposts("all", steps=2, period=2, chatter=0, wandering=3, wandering_first=True, signs=20)
    plain = replace(task, wandering=0)
    for problem, same in zip(task.problems("train")[:20], plain.problems("train")):
        wandered, *way = task.demonstration(problem, 1).splitlines(keepends=True)
        assert wandered[:-1:2] == way[0][0] * 3
        assert task.teacher_value(problem, "") == plain.teacher_value(same, "")
        assert task.teacher_value(problem, wandered) == plain.teacher_value(same, "")
        assert task.decision(problem, wandered[:1]) is None and task.decided(problem, wandered) is None
        for length in range(3):
            begun = "".join(way[:length])
            assert task.teacher_value(problem, wandered + begun) == plain.teacher_value(same, begun)
            assert task.decided(problem, wandered + begun) == plain.decided(same, begun)
        assert task.decision(problem, wandered + way[0] + way[1][0]) == problem.gold[1]
        response = "".join([wandered, *way])
        assert task.grader.grade(response, problem) == plain.grader.grade("".join(way), same)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"train_size": 1000}, "6 make only 216"), ({"period": 4, "steps": 3}, "more than the 3 steps")],
)
def test_what_can_not_be_is_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        signposts("all", **settings)


def test_where_answers_have_to_be_whole_what_is_cut_short_is_none() -> None:
    """A policy that leaves out what doesn't count would have nothing to wonder about."""
    grader = SignpostsGrader(whole=True)
    task = Signposts(
        steps=1, period=1, rule="first", chatter=0, wandering=4, names=4, signs=12, grader=grader
    )
    lenient = replace(task, grader=SignpostsGrader())
    for problem in task.problems("train")[:20]:
        response = f"{problem.prompt.splitlines()[1][0]}{problem.gold}\nA1A1A1A1\n"
        assert len(response) == len(task.demonstration(problem, 1))
        assert task.grader.grade(response, problem).correct
        assert task.decided(problem, response) == 1.0
        first = response[:3]
        assert lenient.grader.grade(first, problem).correct and lenient.decided(problem, first) == 1.0
        assert not task.grader.grade(first, problem).correct and task.decided(problem, first) is None
        assert not task.grader.grade(response + "A1", problem).correct


@pytest.mark.parametrize(("rule", "decided"), [("first", 1), ("last", 6)])
def test_values_of_what_is_decided_are_the_reward_and_before_that_the_mean_of_the_others(
    rule: Rule, decided: int
) -> None:
    task = signposts(rule)
    problem = task.problems("train")[0]
    texts = [way(task, problem, [good] * 6) for good in (True, False, False)]
    ids = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    leaves = [SimpleNamespace(response_ids=one, reward=float(n == 0)) for n, one in enumerate(ids)]
    codec = SimpleNamespace(decode=lambda some: bytes(some).decode())
    context = SimpleNamespace(task=SimpleNamespace(of=lambda one: task), codec=codec)
    tree = SimpleNamespace(problem=problem, leaves=leaves)
    answers = []
    for leaf in range(3):
        states = [AnswerState(0, leaf, 6 * line, State("0", 0, 6 * line)) for line in range(7)]
        answers.append(ValuedAnswer(tree, leaf, states))  # type: ignore[arg-type]
    of_leaves = Decided().values(SimpleNamespace(context=context, answers=answers))  # type: ignore[arg-type]
    for of_leaf, reward, others in zip(of_leaves, (1.0, 0.0, 0.0), (0.0, 0.5, 0.5), strict=True):
        assert [one.value for one in of_leaf if one] == [others] * decided + [reward] * (7 - decided)
