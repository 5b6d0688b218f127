"""Promises of the code grader about hostile programs:

* none earns a verdict that it forges, plays the part of its judge, or looks into its tests by their objects;
* an answer that ends or raises errors of its own passes no test by that;
* an honest program may use all that a forger uses.
"""

from __future__ import annotations

from collections.abc import Iterable
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
from treetune.domains.sandbox import inside
from treetune.domains.sandbox.base import ProgramLimits

pytestmark = needs_sandbox

FORGING_PROGRAMS, JUDGE_PLAYING_PROGRAMS, REACHING_PROGRAMS = (
    {name: code for name, (code, *_) in programs(file).items()} for file in ("forged", "plays", "reaches")
)
"""Programs that pretend to have passed, that play their judge, and that look into their tests."""

DEFINITIONS_OF_OBJECTS = (PROGRAMS / "objects_of_tests.txt").read_text()
OBJECTS_GIVEN = dict(line.split(": ", 1) for line in (PROGRAMS / "given.txt").read_text().splitlines())
"""Objects that tests may hand to an answer: expressions with the names of `DEFINITIONS_OF_OBJECTS`."""


def golds_that_give(names: Iterable[str] = OBJECTS_GIVEN) -> dict[str, dict[str, Any]]:
    """Make tests of each kind that hand these objects to an answer's `f` and expect a number that they hide.

    In tests within one function the first assertion that fails ends the function, and one start is enough.
    """
    asserts = [f"assert f({OBJECTS_GIVEN[name]}) == SECRET" for name in names]
    lines = "".join(f"\n        {assertion}" for assertion in asserts)
    pytests = "\n".join(f"def test_{n}():\n    {assertion}" for n, assertion in enumerate(asserts))
    check = f"def check(f):\n    if 1:{lines}\ncheck(f)"
    unittest = f"import unittest\nclass T(unittest.TestCase):\n    def test(self): {lines}\nunittest.main()"
    return {
        "assertions": {
            "functional": [f"{DEFINITIONS_OF_OBJECTS}\n{test}" for test in (*asserts, check, unittest)]
        },
        "pytest": {"pytest": f"{DEFINITIONS_OF_OBJECTS}\nfrom solution import f\n{pytests}"},
        "a file": {"solution_file": f"{DEFINITIONS_OF_OBJECTS}\nfrom solution import *\n{asserts[0]}"},
    }


_ASSERTIONS = (PROGRAMS / "squares.txt").read_text()
_INDENTED = "".join(f"    {line}\n" for line in _ASSERTIONS.splitlines())
SQUARES: dict[str, dict[str, Any]] = {
    "inputs": {"inputs": ["2", "3"], "outputs": ["4", "9"]},
    "calls": {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]},
    "assertions": {"functional": f"import math\n{_ASSERTIONS}"},
    "a list of tests": {
        "functional": [
            "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
            "        self.assertEqual(f(2), 4)\n        self.assertAlmostEqual(f(3), 9)\n"
            "        self.assertIn(f(2), [4])\nunittest.main()",
            "with context() as n:\n    assert f(n) == n * n == 4 and n == 2",
            f"import math\ndef check(f):\n{_INDENTED}check(f)",
        ]
    },
    "pytest": {
        "pytest": "import math, pytest\nfrom solution import *\n"
        f"def test_f():\n{_INDENTED}def test_near():\n    assert f(3) == pytest.approx(9)\n"
    },
}


def test_an_honest_square_passes_the_tests_of_squares() -> None:
    context = "import contextlib\n@contextlib.contextmanager\ndef context(): yield 2\n"
    for kind, gold in SQUARES.items():
        code = "print(int(input()) ** 2)" if kind == "inputs" else context + SQUARE
        assert grade(code, gold).message is None, kind


def test_there_are_at_least_50_forgeries_and_each_is_valid_python() -> None:
    assert len(FORGING_PROGRAMS) + len(REACHING_PROGRAMS) + len(JUDGE_PLAYING_PROGRAMS) >= 50
    for code in (*FORGING_PROGRAMS.values(), *REACHING_PROGRAMS.values(), *JUDGE_PLAYING_PROGRAMS.values()):
        compile(code, "forgery", "exec")


EXACT_AND_NEAR = {"functional": [GOLDS[kind]["functional"] for kind in ("functional", "near")]}


@pytest.mark.parametrize("gold", [GOLDS["sum"], EXACT_AND_NEAR, GOLDS["pytest"]], ids=list)
@pytest.mark.parametrize("code", FORGING_PROGRAMS.values(), ids=FORGING_PROGRAMS)
def test_no_forged_verdict_is_believed(code: str, gold: dict[str, Any]) -> None:
    graded = grade(code, gold, score="fraction")
    assert graded.reward < 1.0 and (gold is not EXACT_AND_NEAR or graded.reward == 0.0)


@pytest.mark.parametrize("kind", SQUARES)
@pytest.mark.parametrize("code", JUDGE_PLAYING_PROGRAMS.values(), ids=JUDGE_PLAYING_PROGRAMS)
def test_no_program_plays_its_judge(code: str, kind: str) -> None:
    graded = grade(code, SQUARES[kind], score="fraction")
    assert graded.reward < 1.0 and (kind != "a list of tests" or graded.reward == 0.0)


@pytest.mark.parametrize("kind", golds_that_give())
@pytest.mark.parametrize("code", REACHING_PROGRAMS.values(), ids=REACHING_PROGRAMS)
def test_nothing_that_the_tests_hand_over_leads_back_to_them(code: str, kind: str) -> None:
    gold = golds_that_give()[kind]
    graded = grade(code, gold, score="fraction", limits=ProgramLimits(seconds=30), test_seconds=8)
    assert graded.numbers["tests_passed"] == 0


@pytest.mark.parametrize("given_object", ["a function", "a generator", "an instance", "a class", "an error"])
@pytest.mark.parametrize("reach", ["raw messages", "values that are not", "changed arguments", "formats"])
def test_no_message_that_an_answer_writes_itself_leads_to_the_tests(reach: str, given_object: str) -> None:
    """Each is tried by itself, since a broken message ends the process that tries."""
    assert grade(REACHING_PROGRAMS[reach], golds_that_give([given_object])["assertions"]).reward == 0.0


def test_without_the_checks_on_objects_the_forgeries_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks on objects, the programs find the number: it is the checks that stop them."""
    unchecked = inside.bundle("tests", "joining", "peers").replace(
        "_check_operation(operation, args, self)", "pass"
    )
    unchecked = unchecked.replace("isinstance(value, _NEVER_GIVEN_TYPES)", "False")
    monkeypatch.setattr(inside, "bundle", lambda *_: unchecked)
    for reach, given_object in (("all attributes", "a generator"), ("formats", "a function")):
        assert grade(REACHING_PROGRAMS[reach], golds_that_give([given_object])["assertions"]).reward == 1.0


@pytest.mark.parametrize("wrong", ["Exception", "AssertionError", "BaseException", "(ValueError, Exception)"])
def test_an_answer_that_renames_a_general_exception_catches_no_assertion(wrong: str) -> None:
    gold = {"functional": "try:\n    f(-1)\n    assert False\nexcept Wrong:\n    pass"}
    assert grade(f"Wrong = {wrong}\ndef f(n): return 0", gold).reward == 0.0
    assert grade("class Wrong(Exception): pass\ndef f(n): raise Wrong", gold).reward == 1.0


def test_an_answer_that_ends_has_raised_no_error() -> None:
    for gold in (
        {"functional": "try:\n    f(-1)\n    assert False\nexcept Exception as e:\n    pass"},
        {"pytest": "import pytest, solution\ndef test():\n    with pytest.raises(Exception): solution.f(-1)"},
    ):
        assert grade("import os\ndef f(n): os._exit(0)", gold).reward == 0.0
        assert grade("def f(n): raise KeyError", gold).reward == 1.0


def test_a_callback_of_the_tests_is_not_looked_into() -> None:
    gold = {"functional": "SECRET = 41\nassert f(lambda x: x + 1) == SECRET + 1"}
    assert grade("def f(call): return call(41)", gold).reward == 1.0
    assert grade("def f(call): return call.__globals__['SECRET'] + 1", gold).reward == 0.0
    spy = "def f(call):\n    return call._peer.ask('getattr', call, '__globals__')['SECRET'] + 1"
    assert grade(spy, gold).reward == 0.0


HONEST = programs("honest")


@pytest.mark.parametrize("program", HONEST.values(), ids=HONEST)
def test_an_honest_program_may_use_all_that_a_forger_uses(program: tuple[str, str, str]) -> None:
    code, *tests = program
    assert grade(code, gold_of(*tests)).message is None
