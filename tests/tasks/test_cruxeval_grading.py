"""Predictions of a function's output or input are judged by calling it; nothing of the answer is run."""

from __future__ import annotations

import json

import pytest

from treetune.vocabulary import Problem
from treetune_domains.graders.cruxeval import CruxEval
from treetune_domains.sandbox.bubblewrap import Bubblewrap

CODE = "def f(text, n):\n    return [text] * n if n else (text,)"
OUTPUT = Problem(id="o", prompt="?", gold=json.dumps({"code": CODE, "input": "'a b', 2"}))
INPUT = Problem(id="i", prompt="?", gold=json.dumps({"code": CODE, "output": "['x', 'x']"}))
EXPLODES = Problem(
    id="e", prompt="?", gold=json.dumps({"code": "def f(n):\n    while n: pass", "output": "None"})
)


@pytest.fixture(scope="module", autouse=True)
def needs_sandbox() -> None:
    for reason in Bubblewrap().missing():
        pytest.skip(f"no sandbox here: {reason}")


@pytest.mark.parametrize(
    ("problem", "answer", "reward"),
    [
        (OUTPUT, "['a b', 'a b']", 1),
        (OUTPUT, '["a b",\n "a b"]', 1),
        (OUTPUT, "assert f('a b', 2) == ['a b', 'a b']", 1),
        (OUTPUT, "assert ['a b', 'a b'] == f('a b', 2)", 1),
        (OUTPUT, "('a b', 'a b')", 0),
        (OUTPUT, "['a b']", 0),
        (OUTPUT, "f('a b', 2)", 0),
        (OUTPUT, "assert f('a b', 0) == ('a b',)", 0),
        (OUTPUT, "assert f('a b', 2) == f('a b', 2)", 0),
        (OUTPUT, "assert True", 0),
        (OUTPUT, "assert f('a b', 2)", 0),
        (INPUT, "'x', 2", 1),
        (INPUT, "text='x', n=2", 1),
        (INPUT, "f('x', 2)", 1),
        (INPUT, "f('x', n=2)", 1),
        (INPUT, "f('x', 3)", 0),
        (INPUT, "f(f('x', 2))", 0),
        (INPUT, "g('x', 2)", 0),
        (INPUT, "f('x', 2); f('x', 3)", 0),
        (INPUT, "assert f('x', 2) == ['x', 'x']", 1),
        (INPUT, "assert f('y', 1) == ['y']", 0),
        (INPUT, "'x', 3", 0),
        (INPUT, "'x'", 0),
        (INPUT, "__import__('os').getcwd(), 2", 0),
        (INPUT, "'x', 2) or f('x', 2", 0),
        (INPUT, "(" * 5000, 0),
        (EXPLODES, "0", 1),
        (EXPLODES, "1", 0),
    ],
)
def test_an_answer_is_judged(problem: Problem, answer: str, reward: float) -> None:
    grader = CruxEval()
    if problem is EXPLODES:
        grader = CruxEval(limits=type(grader.limits)(seconds=0.5))
    assert grader.grade(f"<think>```\n0\n```</think>\n```python\n{answer}\n```", problem).reward == reward
    assert grader.grade(f"<answer>\n{answer}\n</answer>", problem).reward == reward


@pytest.mark.parametrize("response", ["", "['a b', 'a b']", "```\n\n```", "```\n['a b']\n```</think>"])
def test_no_answer_is_no_answer(response: str) -> None:
    assert CruxEval().grade(response, OUTPUT).outcome == "no_answer"


@pytest.mark.parametrize("gold", ["3", "{}", '{"code": "def f(): pass"}', '{"code": "", "input": "1"}', "x"])
def test_a_gold_that_is_none_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="problem p"):
        CruxEval().verdict("1", Problem(id="p", prompt="?", gold=gold))
