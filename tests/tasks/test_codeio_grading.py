"""Predicted inputs and outputs: a value counts in any writing, an input by what the program makes of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.tasks.rule_grading import reward
from treetune.tasks.graders.base import Unavailable
from treetune.vocabulary import Problem
from treetune_domains.graders.codeio import CodeIO
from treetune_domains.sandbox.base import Limits, Outcome, Sandbox, SandboxUnavailable
from treetune_domains.sandbox.bubblewrap import Bubblewrap


@pytest.mark.parametrize("block", ['```json\n"output": 3\n```', '```\n{"output": 3}\n```', "```json\n3\n```"])
def test_a_value_counts_with_and_without_braces(block: str) -> None:
    assert reward(CodeIO(), block, '{"output": 3}') == 1
    assert reward(CodeIO(), block, "3") == 1


def test_truth_values_are_no_numbers_and_nested_json_is_what_it_holds() -> None:
    grader = CodeIO()
    assert not grader.equal(True, 1)
    assert not grader.equal(0, False)
    assert grader.equal("True", True)
    assert grader.equal('{"a": [1, 2]}', {"a": (1, 2.0)})
    assert not grader.equal("3", 3)
    assert not grader.equal(10**400, 1e300)
    assert grader.equal(0.1 + 0.2, 0.3)
    assert not grader.equal(1234567, 1234568)


SQUARE = "def main_solution(n, unit='m'):\n    print('working')\n    return [n * n, unit]"


class FakeSandbox(Sandbox):
    """Runs programs that this test wrote, here."""

    def run(self, code: str, **keys: Any) -> Outcome:
        limits, stdin = keys["limits"], keys["stdin"]
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=limits.seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode()
            return Outcome(stdout=said, stderr="", exit=None, killed_by="time", seconds=limits.seconds)
        return Outcome(
            stdout=done.stdout, stderr=done.stderr, exit=done.returncode, killed_by=None, seconds=0.0
        )


class NoSandbox(Sandbox):
    def run(self, code: str, **keys: Any) -> Outcome:
        raise SandboxUnavailable("there is none")


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ('{"input": {"n": 3}}', True),
        ('{"input": {"n": -3}}', True),
        ('"input": {"n": -3, "unit": "m"}', True),
        ('{"input": {"n": 4}}', False),
        ('{"input": {"n": 3, "unit": "km"}}', False),
        ('{"input": {"m": 3}}', False),
        ('{"input": "import os"}', False),
        ('{"input": [3]}', True),
    ],
)
def test_another_input_with_the_same_output_is_right_where_the_program_is_run(said: str, right: bool) -> None:
    problem = Problem(id="x", prompt="?", gold='{"input": {"n": 3}}', data={"reference": SQUARE})
    running = CodeIO(program="reference", sandbox=FakeSandbox())
    assert running.grade(f"```json\n{said}\n```", problem).correct is right
    plain = CodeIO().grade(f"```json\n{said}\n```", problem)
    assert plain.correct is (said == '{"input": {"n": 3}}')


def test_a_program_that_hangs_on_an_input_makes_it_wrong_and_a_missing_sandbox_judges_nothing() -> None:
    program = "def main_solution(n):\n    while n > 3: pass\n    return 1"
    problem = Problem(id="x", prompt="?", gold='{"input": {"n": 3}}', data={"reference": program})
    quick = CodeIO(program="reference", sandbox=FakeSandbox(), limits=Limits(seconds=2))
    assert not quick.grade('```json\n{"input": {"n": 9}}\n```', problem).correct
    with pytest.raises(Unavailable, match="there is none"):
        CodeIO(program="reference", sandbox=NoSandbox()).grade('```json\n{"input": {"n": 9}}\n```', problem)
    with pytest.raises(ValueError, match="no program under 'code'"):
        CodeIO(program="code", sandbox=FakeSandbox()).grade('```json\n{"input": {"n": 9}}\n```', problem)


@pytest.mark.skipif(bool(Bubblewrap().missing()), reason=" ".join(Bubblewrap().missing()))
def test_programs_run_in_the_sandbox() -> None:
    problem = Problem(id="x", prompt="?", gold='{"input": {"n": 3}}', data={"reference": SQUARE})
    grader = CodeIO(program="reference")
    assert grader.grade('```json\n{"input": {"n": -3}}\n```', problem).correct
    assert not grader.grade('```json\n{"input": {"n": 4}}\n```', problem).correct
