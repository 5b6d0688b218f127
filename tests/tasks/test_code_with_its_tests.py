"""Tests use an answer as if it were in their process, and both know what stands before it."""

from __future__ import annotations

import pytest

from tests.tasks.code_grading import FUNCTIONAL, SQUARE, grade
from treetune_domains.sandbox.bubblewrap import Bubblewrap


@pytest.fixture(scope="module", autouse=True)
def needs_sandbox() -> None:
    for reason in Bubblewrap().missing():
        pytest.skip(f"no sandbox here: {reason}")


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
