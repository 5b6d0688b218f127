"""Promises of the code grader:

* right programs pass and wrong ones earn the tests that they pass, whichever kind of tests the gold has;
* tests use an answer as if it were in their process, and both know the prefix of the problem;
* a test without end fails, a missing sandbox leaves the answer ungraded, and a gold without tests is an
  error;
* printed output is compared by words and numbers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.domains.graders.code_grading import (
    GOLDS,
    PROGRAMS,
    SQUARE,
    gold_of,
    grade,
    needs_sandbox,
    programs,
)
from tests.support.cases import texts
from treetune.domains.graders.code import Code, same_output
from treetune.domains.sandbox.bubblewrap import Bubblewrap
from treetune.exceptions import SandboxUnavailable, Unavailable
from treetune.vocabulary import Problem

pytestmark = needs_sandbox

PREFIXES = texts(PROGRAMS / "prefixes.txt")
RIGHT, AS_IF_IN_ONE_PROCESS, ENDS = map(programs, ("right", "as_if_in_one_process", "ends"))


@pytest.mark.parametrize("program", RIGHT.values(), ids=RIGHT)
def test_right_code_earns_everything(program: tuple[str, str, str]) -> None:
    code, *tests = program
    graded = grade(code, gold_of(*tests))
    assert (graded.reward, graded.outcome, graded.message) == (1.0, "ok", None)
    assert graded.numbers["tests"] == graded.numbers["tests_passed"] > 0


@pytest.mark.parametrize(
    ("code", "kind", "passed"),
    [
        ("print(3)", "sum", 1),
        ("import os\nprint(sum(map(int, input().split())), flush=True)\nos._exit(1)", "sum", 0),
        ("a, b = map(int, input().split())\nwhile a < 0: pass\nprint(a + b)", "sum", 2),
        ("def f(n): return 4", "functional", 2),
        ("def f(n): return n + 2", "check", 0),
        ("def f(n):\n    if n == 2: return 5\n    return n * n\ndef g(): raise ValueError", "pytest", 3),
        ("def f(n): return n * (n < 4) * n", "file", 0),
        ("def f(n): return 4", "calls", 1),
        ("def f(n: return", "functional", 0),
        ("1 +", "sum", 0),
        ("def other(): pass", "pytest", 0),
    ],
)
def test_wrong_code_earns_the_tests_that_it_passes(code: str, kind: str, passed: int) -> None:
    graded = grade(code, GOLDS[kind], score="fraction")
    assert (graded.numbers["tests_passed"], graded.outcome) == (passed, "ok")
    assert graded.reward == pytest.approx(passed / graded.numbers["tests"])
    assert graded.message
    assert grade(code, GOLDS[kind]).reward == 0.0


def test_a_test_without_end_fails_and_so_do_those_behind_it() -> None:
    gold = {"functional": ["assert f(1) == 1", "assert f(0) == 0", "assert f(2) == 4"]}
    code = "def f(n):\n    while n == 0: pass\n    return n * n"
    graded = grade(code, gold, score="fraction", test_seconds=0.5)
    assert (graded.reward, graded.message) == (pytest.approx(1 / 3), "stopped after 0.5 s")


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_a_program_may_end_as_programs_do(program: tuple[str, str, str]) -> None:
    code, verdict, _ = program
    assert grade(code, {"inputs": [""], "outputs": ["1"]}).correct == (verdict == "right")


@pytest.mark.parametrize(("blocks", "right"), [("all", True), ("last", True), ("first", False)])
def test_a_setting_says_which_blocks_are_the_answer(blocks: Any, right: bool) -> None:
    response = "```python\ndef g(n): return n\n```\nthen\n```python\ndef f(n): return n * n\n```\n"
    response += "which prints\n```\n4\n```"
    problem = Problem(id="p", prompt="?", gold=json.dumps(GOLDS["functional"]))
    assert Code(blocks=blocks).grade(response, problem).correct == right


def test_without_a_block_there_is_no_answer() -> None:
    problem = Problem(id="p", prompt="?", gold=json.dumps(GOLDS["functional"]))
    for response in (SQUARE, "```python\ndef f(n): return 1\n```</think> well"):
        assert Code().grade(response, problem).outcome == "no_answer"


def test_without_a_sandbox_the_answer_stays_without_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*_: object, **__: object) -> None:
        raise SandboxUnavailable("no sandbox")

    monkeypatch.setattr(Bubblewrap, "run", down)
    for kind in ("sum", "functional"):
        with pytest.raises(Unavailable, match="no sandbox"):
            grade(SQUARE, GOLDS[kind])


@pytest.mark.parametrize(
    "gold", ["3", "{}", '{"inputs": ["1"], "outputs": []}', "not JSON", '{"inputs": [], "outputs": []}']
)
def test_a_gold_without_tests_is_an_error_and_not_a_wrong_answer(gold: str) -> None:
    with pytest.raises(ValueError, match="problem p"):
        Code().verdict(SQUARE, Problem(id="p", prompt="?", gold=gold))


@needs_sandbox
def test_an_empty_kind_of_tests_is_ignored() -> None:
    assert grade(
        SQUARE, {"functional": "", "solution_file": "from solution import f\nassert f(2) == 4"}
    ).correct


# Answers in the process of their tests, and prefixes


@pytest.mark.parametrize("program", AS_IF_IN_ONE_PROCESS.values(), ids=AS_IF_IN_ONE_PROCESS)
def test_tests_use_the_answer_as_if_it_were_in_their_process(program: tuple[str, str, str]) -> None:
    code, *tests = program
    assert grade(code, gold_of(*tests)).message is None


def test_unittest_that_fails_is_no_success() -> None:
    _, *tests = AS_IF_IN_ONE_PROCESS["is tested by unittest"]
    assert grade("def f(n): return 8", gold_of(*tests)).reward == 0.0


def test_the_prefix_is_known_to_the_answer_and_to_the_tests() -> None:
    numbers = "list(range(3000))"
    gold = {"functional": f"assert values(Solution().reverse(chain({numbers}))) == {numbers}[::-1]"}
    code = PREFIXES["reverse"]
    assert grade(code, gold, data={"prefix": PREFIXES["lists"]}).message is None
    # The tests use the helper of the prefix, although the answer defines it again.
    forged = code.replace("return back", "return head") + f"def values(head): return {numbers}[::-1]"
    assert grade(forged, gold, data={"prefix": PREFIXES["lists"]}).reward == 0.0


@pytest.mark.parametrize("prefix", ["def f(n):\n", 'def f(n):\n    """Squares."""\n', "import math\n"])
def test_the_answer_may_continue_the_prefix_or_repeat_it(prefix: str) -> None:
    code = "    return n * n" if prefix.endswith(":\n") else SQUARE
    assert grade(code, GOLDS["functional"], data={"prefix": prefix}).message is None


@pytest.mark.parametrize(
    "shared_class",
    [
        "from dataclasses import dataclass\n\n@dataclass\nclass Point:\n    x: int\n    y: int\n",
        "class Point(tuple):\n    pass\n",
    ],
)
def test_a_class_of_the_prefix_without_methods_is_known_to_both(shared_class: str) -> None:
    """Such a class is complete, and no stub that the answer fills in."""
    is_tuple = "tuple" in shared_class
    expression = "Point((n, n))" if is_tuple else "Point(n, n)"
    code = f"def diagonal(n):\n    return {expression}\n"
    expected = "Point((2, 2))" if is_tuple else "Point(2, 2)"
    gold = gold_of("functional", f"assert diagonal(2) == {expected}")
    assert grade(code, gold, data={"prefix": shared_class}).message is None


def test_a_function_may_use_a_helper_of_the_prefix() -> None:
    """As in HumanEval: the prompt holds a helper and the head of what is to be written."""
    prefix = PREFIXES["zeros"]
    code = prefix + "    return -xs[0] / xs[1]\n"
    gold = {"functional": PREFIXES["tests of zeros"]}
    assert grade(code, gold, data={"prefix": prefix}).message is None
    forged = code.replace("-xs[0]", "xs[0]") + "def poly(xs, x): return 0.0\n"
    assert grade(forged, gold, data={"prefix": prefix}).reward == 0.0


SAME = [
    ("1 2", "1  2 \n\n"), ("0.3333333333", "0.333333"), ("3", "3.0"), ("7.0", "7"), ("7e0", "7"),
    ("007", "7"), ("7.000000001", "7.0"), ("YES", "Yes"), ("1e400", "inf"), ("", ""),
]  # fmt: skip
DIFFERENT = [
    ("1\n2", "1 2"), ("0.3334", "0.3333"), ("7.000000001", "7"), ("6.9999999999999999999", "7"),
    ("1000000000000000000.4", "1000000000000000000"), ("1000000000000000001", "1000000000000000000"),
    ("1e999999999", "7"), ("snan", "7"), ("nan", "0.0"), ("a", "A"), ("1_0", "10"),
    ("x" * 1_000_000, "y" * 1_000_000),
]  # fmt: skip


def test_printed_output_is_compared_by_words_and_numbers() -> None:
    assert [pair for pair in SAME if not same_output(*pair)] == []
    assert [pair for pair in DIFFERENT if same_output(*pair)] == []
