"""The task of signposts: its rules, its teacher, and the values of its states.

These tests promise:

* The rule decides which answers are correct, and a malformed answer earns nothing.
* The value of a state is the mean of the values after it, and that of a whole answer its reward.
* Text that does not count changes no value.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from treetune.credit.values.base import AnswerState, ValuedAnswer
from treetune.lab.signposts import SIGN_LETTERS, Decided, SignpostRule, Signposts, SignpostsGrader
from treetune.tasks.steps import ends_of_lines
from treetune.tree import State
from treetune.vocabulary import Problem

RULES: tuple[SignpostRule, ...] = ("all", "first", "last", "once")


def make_task(rule: SignpostRule, **settings: object) -> Signposts:
    sizes = {"signs": 6, "train_size": 60, "validation_size": 20, "test_size": 30}
    return Signposts(rule=rule, rates=(0.8, 0.4, 0.6), **(sizes | settings))  # type: ignore[arg-type]


def make_answer(task: Signposts, problem: Problem, is_right: list[bool]) -> str:
    """Returns an answer whose choices are right on these lines."""
    signs = [problem.data["signs"][line % task.period] for line in range(len(is_right))]
    lines = []
    for sign, line_is_right in zip(signs, is_right, strict=True):
        option = task.right(sign) if line_is_right else task.right(sign) % task.options + 1
        lines.append(f"{SIGN_LETTERS[sign]}{option}aaa\n")
    return "".join(lines)


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
def test_the_rule_decides_which_choices_count(rule: SignpostRule, right: list[bool], correct: bool) -> None:
    task = make_task(rule)
    problem = task.problems("train")[0]
    assert task.grader.grade(make_answer(task, problem, right), problem).correct is correct


@pytest.mark.parametrize("response", ["", "\n\n\n", "A", "xxxxxxxxx", "\n" * 50])
@pytest.mark.parametrize("rule", RULES)
def test_a_malformed_answer_earns_nothing(rule: SignpostRule, response: str) -> None:
    task = make_task(rule)
    assert task.grader.grade(response, task.problems("train")[0]).reward == 0


@pytest.mark.parametrize("rule", RULES)
def test_the_value_of_a_state_is_the_mean_of_the_values_after_it(rule: SignpostRule) -> None:
    """The value before a line is the mean of those after a right and a wrong line; after the last it is the
    reward."""
    task = make_task(rule)
    for problem in task.problems("train")[:3]:
        prefixes: list[list[bool]] = [[]]
        for line in range(task.steps):
            rate = task.rate(problem.data["signs"][line % task.period])
            for prefix in prefixes:
                next_values = [
                    task.teacher_value(problem, make_answer(task, problem, [*prefix, is_right]))
                    for is_right in (False, True)
                ]
                value = task.teacher_value(problem, make_answer(task, problem, prefix))
                assert value == pytest.approx((1 - rate) * next_values[0] + rate * next_values[1], abs=1e-12)
            prefixes = [[*prefix, is_right] for prefix in prefixes for is_right in (False, True)]
        for prefix in prefixes:
            text = make_answer(task, problem, prefix)
            assert task.teacher_value(problem, text) == task.grader.grade(text, problem).reward


def test_the_teacher_is_right_as_often_as_configured() -> None:
    task = make_task("all", signs=20, train_size=4000)
    problems = task.problems("train")
    solved = [task.grader.grade(task.demonstration(problem, 1), problem).reward for problem in problems]
    exact_values = [task.teacher_value(problem, "") for problem in problems]
    assert sum(solved) / len(solved) == pytest.approx(sum(exact_values) / len(exact_values), abs=0.02)
    assert task.demonstration(problems[0], 1) == task.demonstration(problems[0], 1)
    assert task.demonstration(problems[0], 1) != task.demonstration(problems[0], 2)


def test_every_line_is_a_step_and_shows_the_sign_of_the_prompt() -> None:
    task = make_task("all", period=2, signs=20)
    problem = task.problems("test")[3]
    response = task.demonstration(problem, 5)
    assert task.step_boundaries(response) == ends_of_lines(response)
    lines, prompt_lines = response.splitlines(), problem.prompt.splitlines()
    assert [line[0] for line in lines] == [prompt_lines[line % 2][0] for line in range(6)]
    assert {len(line) for line in [*lines, *prompt_lines]} == {5}
    assert set(problem.prompt + response) <= set(task.alphabet())


def test_wandering_and_names_change_only_the_text() -> None:
    plain, wandering = make_task("first"), make_task("first", wandering=3, names=2, signs=6)
    problem = wandering.problems("train")[0]
    response = wandering.demonstration(problem, 1)
    *answer_lines, wandered = response.splitlines()
    assert len(answer_lines) == plain.steps
    assert wandered[::2] == answer_lines[-1][0] * 3
    assert set(wandered[1::2]) <= set("1234")
    name, *sign_lines = problem.prompt.splitlines()
    assert (len(name), len(sign_lines)) == (2, 3)
    assert set(problem.prompt + response) <= set(wandering.alphabet())
    value = wandering.teacher_value(problem, response)
    assert value == wandering.teacher_value(problem, answer_lines[0] + "\n")
    assert value == wandering.grader.grade(response, problem).reward


def test_if_wandering_comes_first_only_the_lines_after_it_count() -> None:
    task = make_task("all", steps=2, period=2, chatter=0, wandering=3, wandering_first=True, signs=20)
    plain = replace(task, wandering=0)
    for problem, plain_problem in zip(task.problems("train")[:20], plain.problems("train")):
        wandered, *answer_lines = task.demonstration(problem, 1).splitlines(keepends=True)
        assert wandered[:-1:2] == answer_lines[0][0] * 3
        assert task.teacher_value(problem, "") == plain.teacher_value(plain_problem, "")
        assert task.teacher_value(problem, wandered) == plain.teacher_value(plain_problem, "")
        assert task.decision(problem, wandered[:1]) is None and task.decided_reward(problem, wandered) is None
        for length in range(3):
            beginning = "".join(answer_lines[:length])
            assert task.teacher_value(problem, wandered + beginning) == plain.teacher_value(
                plain_problem, beginning
            )
            assert task.decided_reward(problem, wandered + beginning) == plain.decided_reward(
                plain_problem, beginning
            )
        assert task.decision(problem, wandered + answer_lines[0] + answer_lines[1][0]) == problem.gold[1]
        response = "".join([wandered, *answer_lines])
        assert task.grader.grade(response, problem) == plain.grader.grade(
            "".join(answer_lines), plain_problem
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"train_size": 1000}, "6 make only 216"), ({"period": 4, "steps": 3}, "more than the 3 steps")],
)
def test_impossible_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task("all", **settings)


def test_if_answers_have_to_be_whole_a_shortened_answer_earns_nothing() -> None:
    """Otherwise a policy could leave out everything that doesn't count."""
    grader = SignpostsGrader(whole=True)
    task = Signposts(
        steps=1, period=1, rule="first", chatter=0, wandering=4, names=4, signs=12, grader=grader
    )
    lenient = replace(task, grader=SignpostsGrader())
    for problem in task.problems("train")[:20]:
        response = f"{problem.prompt.splitlines()[1][0]}{problem.gold}\nA1A1A1A1\n"
        assert len(response) == len(task.demonstration(problem, 1))
        assert task.grader.grade(response, problem).correct
        assert task.decided_reward(problem, response) == 1.0
        first = response[:3]
        assert lenient.grader.grade(first, problem).correct and lenient.decided_reward(problem, first) == 1.0
        assert not task.grader.grade(first, problem).correct and task.decided_reward(problem, first) is None
        assert not task.grader.grade(response + "A1", problem).correct


@pytest.mark.parametrize(("rule", "decided"), [("first", 1), ("last", 6)])
def test_after_the_decision_the_value_is_the_reward_and_before_it_the_mean_of_the_others(
    rule: SignpostRule, decided: int
) -> None:
    task = make_task(rule)
    problem = task.problems("train")[0]
    texts = [make_answer(task, problem, [is_right] * 6) for is_right in (True, False, False)]
    ids = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    leaves = [SimpleNamespace(response_ids=value, reward=float(n == 0)) for n, value in enumerate(ids)]
    codec = SimpleNamespace(decode=lambda ids: bytes(ids).decode())
    context = SimpleNamespace(task=task, codec=codec)
    tree = SimpleNamespace(problem=problem, leaves=leaves)
    answers = []
    for leaf in range(3):
        states = [AnswerState(0, leaf, 6 * line, State("0", 0, 6 * line)) for line in range(7)]
        answers.append(ValuedAnswer(tree, leaf, states))  # type: ignore[arg-type]
    values_of_leaves = Decided().values(SimpleNamespace(context=context, answers=answers))  # type: ignore[arg-type]
    for values, reward, mean_of_others in zip(
        values_of_leaves, (1.0, 0.0, 0.0), (0.0, 0.5, 0.5), strict=True
    ):
        expected = [mean_of_others] * decided + [reward] * (7 - decided)
        assert [value.value for value in values if value] == expected
