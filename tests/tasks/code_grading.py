"""Code and tests that several files grade: `grade` is what all of them call."""

from __future__ import annotations

import json
from typing import Any

from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.code import Code
from treetune_domains.sandbox.base import Limits


def grade(code: str, gold: dict[str, Any], *, data: dict[str, Any] | None = None, **settings: Any) -> Grade:
    problem = Problem(id="p", prompt="?", gold=json.dumps(gold), data=data or {})
    settings = {"limits": Limits(seconds=10), "test_seconds": 2.0, **settings}
    return Code(**settings).grade(f"<think>no</think>So:\n```python\n{code}\n```\n", problem)


SUM = {"inputs": ["1 2\n", "3 4\n", "-1 1"], "outputs": ["3\n", "7", "0\n"]}
FUNCTIONAL = {
    "functional": "from math import pi\nassert f(2) == 4\nassert f(3) == 9\nassert isinstance(f(1), int)"
}
NEAR = {"functional": "assert abs(f(2) - 4) < 1e-6\nassert 8.5 < f(3) < 9.5"}
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
SQUARE = "def f(n):\n    return n * n\n"
