"""Programs are judged by what they do: right ones pass, wrong and forging ones don't, whatever tests them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from treetune.sandbox.base import Limits, SandboxUnavailable
from treetune.sandbox.bubblewrap import Bubblewrap
from treetune.tasks.graders.base import Unavailable
from treetune.tasks.graders.code.grader import Code
from treetune.tasks.graders.code.outputs import same_output
from treetune.vocabulary import Grade, Problem


@pytest.fixture(scope="module", autouse=True)
def needs_sandbox() -> None:
    for reason in Bubblewrap().missing():
        pytest.skip(f"no sandbox here: {reason}")


def grade(code: str, gold: dict[str, Any], *, data: dict[str, Any] | None = None, **settings: Any) -> Grade:
    problem = Problem(id="p", prompt="?", gold=json.dumps(gold), data=data or {})
    settings = {"limits": Limits(seconds=10), "test_seconds": 2.0, **settings}
    return Code(**settings).grade(f"<think>no</think>So:\n```python\n{code}\n```\n", problem)


SUM = {"inputs": ["1 2\n", "3 4\n", "-1 1"], "outputs": ["3\n", "7", "0\n"]}
FUNCTIONAL = {
    "functional": "from math import pi\nassert f(2) == 4\nassert f(3) == 9\nassert isinstance(f(1), int)"
}
NEAR = {"functional": "assert abs(f(2) - 4) < 1e-6\nassert 8.5 < f(3) < 9.5"}
CHECK = {
    "functional": "def check(f):\n    assert f(2) == 4\n    assert f(3) == 9\ncheck(f)",
}
SOLUTION = {"functional": "assert Solution().twoSum([2, 7, 11], 9) == [0, 1]"}
PYTEST = {
    "pytest": """
import pytest
from solution import f, g

@pytest.mark.parametrize("n", [1, 2])
def test_f(n):
    assert f(n) == n * n

def test_g():
    with pytest.raises(ValueError):
        g()

def test_near():
    assert f(0.1) == pytest.approx(0.01)
"""
}
FILE = {"solution_file": "import solution\nfor n in range(5):\n    assert solution.f(n) == n * n, n"}
CALLS = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, [9]]}
SQUARE = "def f(n):\n    return n * n\n"

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


FORGED = {
    "leaves with success": "import os\nprint('passed'); os._exit(0)",
    "leaves when asked": "import os\ndef f(n=0): os._exit(0)\ng = f",
    "leaves politely": "import sys\ndef f(n=0): sys.exit(0)\ng = f",
    "is equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def f(n=0): return Any()
g = f""",
    "is an object that is equal to everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def f(n=0): return Any()
g = f""",
    "is near to everything": """
class Near:
    __sub__ = __rsub__ = __abs__ = lambda self, *other: 0.0
    __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True
def f(n=0): return Near()
g = f""",
    "mocks": "from unittest.mock import ANY\ndef f(n=0): return ANY\ng = f",
    "writes a report": """
import os
for fd in range(256):
    try: os.write(fd, b'{"tests": 1}\\n{"passed": true}\\n' * 9)
    except OSError: pass
print("0 0 1 0\\n3")
def f(n=0): raise KeyError
g = f""",
    "patches the tests": """
import builtins, sys
builtins.AssertionError = ValueError
builtins.isinstance = lambda *a: True
sys.modules['pytest'] = sys
def f(n=0): return 5
g = f""",
    "looks for the tests": """
import gc, sys, os
frame = sys._getframe()
found = []
while frame:
    found.append(repr(frame.f_locals) + repr(frame.f_globals))
    frame = frame.f_back
found += [repr(o)[:9999] for o in gc.get_objects() if isinstance(o, (str, list, dict, tuple))]
for folder, _, names in os.walk('/work'):
    for name in names:
        found.append(open(folder + '/' + name, errors='replace').read())
text = ' '.join(found)
knows = any(word[::-1] in text for word in ('4 == )2(f', 'raen_tset', 'yrevocsid'))
def f(n=0): return n * n if knows else None
def g():
    if knows: raise ValueError""",
    "plants modules for the tests": """
import os
for name in ('difflib', 'pprint', 'textwrap', 'json', 'math', 'conftest', 'token', 'numpy'):
    open(f'/work/{name}.py', 'w').write('import os; os._exit(0)')
def f(n=0): return 5
g = f""",
    "kills the tests": "import os, signal\ndef f(n=0): os.kill(os.getppid(), 9)\ng = f",
    "stops the tests": "import os, signal\ndef f(n=0): os.kill(os.getppid(), signal.SIGALRM)\ng = f",
    "raises what the tests may expect": "def f(n=0): raise AssertionError\ndef g(): raise SystemExit(0)",
}


@pytest.mark.parametrize("gold", [SUM, FUNCTIONAL, NEAR, PYTEST], ids=lambda gold: next(iter(gold)))
@pytest.mark.parametrize("code", FORGED.values(), ids=FORGED)
def test_no_forged_verdict_is_believed(code: str, gold: dict[str, Any]) -> None:
    assert grade(code, gold).reward == 0.0


def test_a_callback_of_the_tests_is_not_looked_into() -> None:
    gold = {"functional": "SECRET = 41\nassert f(lambda x: x + 1) == SECRET + 1"}
    assert grade("def f(call): return call(41)", gold).reward == 1.0
    assert grade("def f(call): return call.__globals__['SECRET'] + 1", gold).reward == 0.0
    spy = "def f(call):\n    return call._peer.ask('getattr', call, '__globals__')['SECRET'] + 1"
    assert grade(spy, gold).reward == 0.0


LISTS = """
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next

def chain(values):
    head = None
    for value in reversed(values):
        head = Node(value, head)
    return head

def values(head):
    found = []
    while head:
        found.append(head.value)
        head = head.next
    return found
"""


def test_what_stands_before_the_answer_is_known_to_answer_and_tests() -> None:
    numbers = "list(range(3000))"
    gold = {"functional": f"assert values(Solution().reverse(chain({numbers}))) == {numbers}[::-1]"}
    code = """
class Solution:
    def reverse(self, head):
        back = None
        while head:
            head.next, back, head = back, head, head.next
        return back
"""
    assert grade(code, gold, data={"prefix": LISTS}).message is None
    # What the tests use of it is theirs: another one in the answer changes nothing.
    forged = code.replace("return back", "return head") + f"def values(head): return {numbers}[::-1]"
    assert grade(forged, gold, data={"prefix": LISTS}).reward == 0.0


@pytest.mark.parametrize("prefix", ["def f(n):\n", 'def f(n):\n    """Squares."""\n', "import math\n"])
def test_the_answer_may_go_on_with_the_prefix_or_fill_it_in(prefix: str) -> None:
    code = "    return n * n" if prefix.endswith(":\n") else SQUARE
    assert grade(code, FUNCTIONAL, data={"prefix": prefix}).message is None


AS_IF_IN_ONE_PROCESS = {
    "changes an argument": ("def f(a): a.sort()", "a = [2, 1]\nf(a)\nassert a == [1, 2]"),
    "changes what is in one": ("def f(a): a[0][0] = 5", "a = [[2, 1]]\nf(a)\nassert a == [[5, 1]]"),
    "prints": (
        "def f(): print('hello')",
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as s:\n    f()\n"
        "assert s.getvalue() == 'hello\\n'",
    ),
    "yields": ("def f():\n    yield 1\n    yield 2", "assert list(f()) == [1, 2]"),
    "returns a nest": (
        "def f(): return {(1, 2): {3}, 'a': (4.5, None)}",
        "assert f() == {(1, 2): {3}, 'a': (4.5, None)}",
    ),
    "raises its own": (
        "class E(ValueError): pass\ndef f(): raise E('x')",
        "try:\n    f()\n    assert False\nexcept E as e:\n    assert str(e) == 'x'",
    ),
    "has a class with state": (
        "class C:\n    def __init__(self): self.n = 0\n    def add(self, k): self.n += k; return self\n"
        "    def __len__(self): return self.n",
        "c = C()\nassert c.add(2).add(3).n == 5\nassert len(c) == 5\nc.n = 7\nassert c.n == 7",
    ),
    "compares its own": (
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x",
        "assert P(1) == P(1)\nassert P(1) != P(2)",
    ),
    "returns collections": (
        "from collections import *\ndef f(): return Counter('aab'), deque([1]), OrderedDict(a=1)",
        "assert f() == (Counter('aab'), deque([1]), OrderedDict(a=1))",
    ),
    "returns numbers": (
        "import math\ndef f(): return math.inf, -0.0, 10**30, 1j, b'x', range(3)",
        "assert f() == (math.inf, 0.0, 10**30, 1j, b'x', range(3))",
    ),
    "returns fractions": (
        "from fractions import Fraction\ndef f(): return Fraction(1, 3)",
        "from fractions import Fraction\nassert f() == Fraction(1, 3)",
    ),
    "is tested by unittest": (
        SQUARE,
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(3), 9)\n"
        "unittest.main()",
    ),
    "adds its own": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __mul__(self, k): return V(self.x * k)\n    def __lt__(self, o): return self.x < o.x",
        "assert (V(1) + V(2) * 3).x == 7\nassert V(1) < V(2)",
    ),
    "has a class that is a list": (
        "class Stack(list):\n    push = list.append\ndef f(): return Stack([1])",
        "s = Stack()\ns.push(3)\nassert s.pop() == 3 and len(s) == 0\nassert f() == [1]",
    ),
    "is a context": (
        "class S:\n    def __enter__(self): return 5\n    def __exit__(self, *a): return False",
        "with S() as s:\n    assert s == 5",
    ),
    "is given an object of the tests": (
        "def f(o): o.n += 1; return o",
        "class T:\n    def __init__(self): self.n = 1\no = T()\nassert f(o) is o and o.n == 2",
    ),
}


@pytest.mark.parametrize(("code", "tests"), AS_IF_IN_ONE_PROCESS.values(), ids=AS_IF_IN_ONE_PROCESS)
def test_tests_use_the_answer_as_if_it_were_in_their_process(code: str, tests: str) -> None:
    assert grade(code, {"functional": tests}).message is None


def test_unittest_that_fails_is_no_success() -> None:
    _, tests = AS_IF_IN_ONE_PROCESS["is tested by unittest"]
    assert grade("def f(n): return 8", {"functional": tests}).reward == 0.0


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


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2", "1  2 \n\n", True),
        ("1\n2", "1 2", False),
        ("0.3333333333", "0.333333", True),
        ("0.3334", "0.3333", False),
        ("3", "3.0", True),
        ("1000000000000000001", "1000000000000000000", False),
        ("YES", "Yes", True),
        ("a", "A", False),
        ("1_0", "10", False),
        ("007", "7", True),
        ("nan", "0.0", False),
        ("1e400", "inf", True),
        ("", "", True),
        ("x" * 1_000_000, "y" * 1_000_000, False),
    ],
)
def test_printed_output_is_compared_by_words(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) == same


def test_a_function_may_rest_on_another_of_the_prefix() -> None:
    """As in HumanEval: the prompt holds a helper and the head of what is to be written."""
    prefix = '''
from typing import List
import math

def poly(xs: List[float], x: float) -> float:
    """The value at x."""
    return sum(c * math.pow(x, i) for i, c in enumerate(xs))

def find_zero(xs: List[float]) -> float:
    """A zero of poly."""
'''
    code = prefix + "    return -xs[0] / xs[1]\n"
    tests = """
METADATA = {}
def check(candidate):
    import random
    rng = random.Random(42)
    for _ in range(20):
        xs = [rng.uniform(-9, 9), rng.uniform(1, 9)]
        assert math.fabs(poly(xs, candidate(xs.copy()))) < 1e-4
check(find_zero)
"""
    gold = {"functional": tests}
    assert grade(code, gold, data={"prefix": prefix}).message is None
    forged = code.replace("-xs[0]", "xs[0]") + "def poly(xs, x): return 0.0\n"
    assert grade(forged, gold, data={"prefix": prefix}).reward == 0.0


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
