"""Provide programs, tests and the function `grade` to the test files of the code grader."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import texts
from treetune.domains.graders.code import Code
from treetune.domains.sandbox.base import ProgramLimits
from treetune.domains.sandbox.bubblewrap import Bubblewrap
from treetune.vocabulary import Grade, Problem

PROGRAMS = Path(__file__).parent / "programs"

_MISSING = " ".join(Bubblewrap().missing())
needs_sandbox = pytest.mark.skipif(bool(_MISSING), reason=f"no sandbox here: {_MISSING}")

SQUARE = "def f(n):\n    return n * n\n"
GOLDS: dict[str, dict[str, Any]] = {
    "sum": {"inputs": ["1 2\n", "3 4\n", "-1 1"], "outputs": ["3\n", "7", "0\n"]},
    "functional": {
        "functional": "from math import pi\nassert f(2) == 4\nassert f(3) == 9\nassert isinstance(f(1), int)"
    },
    "near": {"functional": "assert abs(f(2) - 4) < 1e-6\nassert 8.5 < f(3) < 9.5"},
    "check": {"functional": "def check(f):\n    assert f(2) == 4\n    assert f(3) == 9\ncheck(f)"},
    "solution": {"functional": "assert Solution().twoSum([2, 7, 11], 9) == [0, 1]"},
    "file": {"solution_file": "import solution\nfor n in range(5):\n    assert solution.f(n) == n * n, n"},
    "calls": {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, [9]]},
    "pytest": {
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
    },
}


def grade(code: str, gold: dict[str, Any], *, data: dict[str, Any] | None = None, **settings: Any) -> Grade:
    problem = Problem(id="p", prompt="?", gold=json.dumps(gold), data=data or {})
    settings = {"limits": ProgramLimits(seconds=10), "test_seconds": 2.0, **settings}
    return Code(**settings).grade(f"<think>no</think>So:\n```python\n{code}\n```\n", problem)


def programs(file: str) -> dict[str, tuple[str, str, str]]:
    """Return a file's programs by their names: code, kind of tests and tests, empty where there are none.

    Lines of the form ``=== name`` stand before programs, ``--- kind`` before their tests.
    """
    by_name = {}
    for name, text in texts(PROGRAMS / f"{file}.txt").items():
        code, *tests = re.split(r"^--- (\w+)\n", text, flags=re.MULTILINE)
        by_name[name] = (code, *tests) if tests else (code, "", "")
    return by_name


def gold_of(kind: str, tests: str) -> dict[str, Any]:
    """Return the gold of a program of a file: tests of this kind, a gold in JSON, or one of `GOLDS`."""
    if kind == "gold":
        gold: dict[str, Any] = json.loads(tests)
        return gold
    return {kind: tests} if tests else GOLDS[kind]
