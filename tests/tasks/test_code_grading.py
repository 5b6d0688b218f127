"""Programs are judged by what they do: right ones pass and wrong ones don't, whatever tests them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tasks.code_grading import FUNCTIONAL, PYTEST, SQUARE, SUM, grade
from treetune.tasks.graders.base import Unavailable
from treetune.vocabulary import Problem
from treetune_domains.graders.code import Code
from treetune_domains.sandbox.base import SandboxUnavailable
from treetune_domains.sandbox.bubblewrap import Bubblewrap


@pytest.fixture(scope="module", autouse=True)
def needs_sandbox() -> None:
    for reason in Bubblewrap().missing():
        pytest.skip(f"no sandbox here: {reason}")


CHECK = {
    "functional": "def check(f):\n    assert f(2) == 4\n    assert f(3) == 9\ncheck(f)",
}
SOLUTION = {"functional": "assert Solution().twoSum([2, 7, 11], 9) == [0, 1]"}
FILE = {"solution_file": "import solution\nfor n in range(5):\n    assert solution.f(n) == n * n, n"}
CALLS = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, [9]]}

RIGHT = {
    "a program": ("print(sum(map(int, input().split())))", SUM),
    "a program that reads everything": (
        "import sys\na, b = map(int, sys.stdin.read().split())\nprint(a + b)",
        SUM,
    ),
    "a program that opens its input": ("print(sum(map(int, open(0).read().split())))", SUM),
    "a program that opens it by name": ("print(sum(map(int, open('/dev/stdin').read().split())))", SUM),
    "a program with a main part": (
        "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
        SUM,
    ),
    "a program that leaves by exit": ("print(sum(map(int, input().split())))\nexit()", SUM),
    "a program with threads": (
        "import threading\ndef main(): print(sum(map(int, input().split())))\n"
        "threading.stack_size(1 << 26)\nthreading.Thread(target=main).start()",
        SUM,
    ),
    "a function": (SQUARE, FUNCTIONAL),
    "a function under check": (SQUARE, CHECK),
    "a class": (
        "class Solution:\n    def twoSum(self, nums, target):\n"
        "        for i, a in enumerate(nums):\n            for j in range(i + 1, len(nums)):\n"
        "                if a + nums[j] == target: return [i, j]",
        SOLUTION,
    ),
    "pytest": (SQUARE + "def g(): raise ValueError", PYTEST),
    "a file": (SQUARE, FILE),
    "calls": (SQUARE, CALLS),
    "calls of a method": ("class Solution:\n    def f(self, n): return n * n", CALLS),
}


@pytest.mark.parametrize(("code", "gold"), RIGHT.values(), ids=RIGHT)
def test_right_code_earns_everything(code: str, gold: dict[str, Any]) -> None:
    found = grade(code, gold)
    assert (found.reward, found.outcome, found.message) == (1.0, "ok", None)
    assert found.numbers["tests"] == found.numbers["tests_passed"] > 0


@pytest.mark.parametrize(
    ("code", "gold", "passed"),
    [
        ("print(3)", SUM, 1),
        ("import os\nprint(sum(map(int, input().split())), flush=True)\nos._exit(1)", SUM, 0),
        ("a, b = map(int, input().split())\nwhile a < 0: pass\nprint(a + b)", SUM, 2),
        ("def f(n): return 4", FUNCTIONAL, 2),
        ("def f(n): return n + 2", CHECK, 0),
        ("def f(n):\n    if n == 2: return 5\n    return n * n\ndef g(): raise ValueError", PYTEST, 3),
        ("def f(n): return n * (n < 4) * n", FILE, 0),
        ("def f(n): return 4", CALLS, 1),
        ("def f(n: return", FUNCTIONAL, 0),
        ("1 +", SUM, 0),
        ("def other(): pass", PYTEST, 0),
    ],
)
def test_wrong_code_earns_the_tests_that_it_passes(code: str, gold: dict[str, Any], passed: int) -> None:
    found = grade(code, gold, score="fraction")
    assert found.numbers["tests_passed"] == passed
    assert found.reward == pytest.approx(passed / found.numbers["tests"])
    assert found.outcome == "ok"
    assert found.message
    assert grade(code, gold).reward == 0.0


def test_a_test_without_end_fails_and_so_do_those_behind_it() -> None:
    gold = {"functional": ["assert f(1) == 1", "assert f(0) == 0", "assert f(2) == 4"]}
    code = "def f(n):\n    while n == 0: pass\n    return n * n"
    found = grade(code, gold, score="fraction", test_seconds=0.5)
    assert found.reward == pytest.approx(1 / 3)
    assert found.message == "stopped after 0.5 s"


@pytest.mark.parametrize(("blocks", "right"), [("all", True), ("last", True), ("first", False)])
def test_which_blocks_are_the_answer_is_said(blocks: Any, right: bool) -> None:
    response = "```python\ndef g(n): return n\n```\nthen\n```python\ndef f(n): return n * n\n```\n"
    response += "which prints\n```\n4\n```"
    problem = Problem(id="p", prompt="?", gold=json.dumps(FUNCTIONAL))
    assert Code(blocks=blocks).grade(response, problem).correct == right


def test_without_a_block_there_is_no_answer() -> None:
    problem = Problem(id="p", prompt="?", gold=json.dumps(FUNCTIONAL))
    assert Code().grade("def f(n): return n * n", problem).outcome == "no_answer"
    assert Code().grade("```python\ndef f(n): return 1\n```</think> well", problem).outcome == "no_answer"


def test_without_a_sandbox_the_answer_stays_without_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*_: object, **__: object) -> None:
        raise SandboxUnavailable("no sandbox")

    monkeypatch.setattr(Bubblewrap, "run", down)
    for gold in (SUM, FUNCTIONAL):
        with pytest.raises(Unavailable, match="no sandbox"):
            grade(SQUARE, gold)


@pytest.mark.parametrize(
    "gold", ["3", "{}", '{"inputs": ["1"], "outputs": []}', "not JSON", '{"inputs": [], "outputs": []}']
)
def test_a_gold_without_tests_is_an_error_and_not_a_wrong_answer(gold: str) -> None:
    with pytest.raises(ValueError, match="problem p"):
        Code().verdict(SQUARE, Problem(id="p", prompt="?", gold=gold))


ENDS = {
    "by itself": ("print(1, end='')", True),
    "with 0": ("print(1); raise SystemExit(0)", True),
    "with True": ("print(1); exit(True)", False),
    "with words": ("print(1); exit('no')", False),
    "with nothing": ("print(1); exit()", True),
    "by an error": ("print(1); 1 / 0", False),
    "in a thread": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print(1))).start()",
        True,
    ),
    "with a last word": ("import atexit\natexit.register(print, 1)", True),
    "without a flush": ("import sys\nsys.stdout.write('1')", True),
    "with its output closed": ("import sys\nprint(1)\nsys.stdout.close()", True),
    "by a signal": ("import os\nprint(1, flush=True)\nos.kill(os.getpid(), 9)", False),
    "with a file left open": ("out = open(1, 'w')\nout.write('1')", True),
    "with a stream of its own": (
        "import sys\nclass Out:\n    text = ''\n    def write(self, s): self.text += s\n"
        "    def flush(self): sys.__stdout__.write(self.text); self.text = ''\nsys.stdout = Out()\nprint(1)",
        True,
    ),
    "with another stream": (
        "import io, sys\nsys.stdout = io.StringIO()\nprint(2)\nsys.__stdout__.write('1')",
        True,
    ),
}


@pytest.mark.parametrize(("code", "right"), ENDS.values(), ids=ENDS)
def test_a_program_may_end_as_programs_do(code: str, right: bool) -> None:
    assert grade(code, {"inputs": [""], "outputs": ["1"]}).correct == right
