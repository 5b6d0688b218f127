"""Promises of the graders of predicted inputs and outputs of programs:

* a predicted value counts in any writing, and truth values are no numbers;
* a predicted input counts by the output of the program, which runs in the sandbox alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.domains.graders.code_grading import needs_sandbox
from tests.support.cases import cases
from treetune.domains.graders.codeio import CodeIO
from treetune.domains.graders.cruxeval import CruxEval
from treetune.domains.sandbox.base import ProgramLimits, ProgramOutcome, Sandbox
from treetune.exceptions import SandboxUnavailable, Unavailable
from treetune.vocabulary import Problem

SQUARE = "def main_solution(n, unit='m'):\n    print('working')\n    return [n * n, unit]"


def problem(reference: str = SQUARE) -> Problem:
    return Problem(id="x", prompt="?", gold='{"input": {"n": 3}}', data={"reference": reference})


@pytest.mark.parametrize("block", ['```json\n"output": 3\n```', '```\n{"output": 3}\n```', "```json\n3\n```"])
def test_a_value_counts_with_and_without_braces(block: str) -> None:
    for gold in ('{"output": 3}', "3"):
        assert CodeIO().grade(block, Problem(id="x", prompt="?", gold=gold)).reward == 1


def test_truth_values_are_no_numbers_and_nested_json_is_what_it_holds() -> None:
    equal = [("True", True), ('{"a": [1, 2]}', {"a": (1, 2.0)}), (0.1 + 0.2, 0.3)]
    unequal = [(True, 1), (0, False), ("3", 3), (10**400, 1e300), (1234567, 1234568)]
    assert all(CodeIO().are_equal(*pair) for pair in equal)
    assert not any(CodeIO().are_equal(*pair) for pair in unequal)


class FakeSandbox(Sandbox):
    """Runs programs that this test wrote, here."""

    def run(self, code: str, **keys: Any) -> ProgramOutcome:
        seconds = keys["limits"].seconds
        command = [sys.executable, "-c", code]
        try:
            done = subprocess.run(
                command, input=keys["stdin"], capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            printed = (error.stdout or b"").decode()
            return ProgramOutcome(stdout=printed, stderr="", exit=None, killed_by="time", seconds=seconds)
        return ProgramOutcome(
            stdout=done.stdout, stderr=done.stderr, exit=done.returncode, killed_by=None, seconds=0.0
        )


class NoSandbox(Sandbox):
    def run(self, code: str, **keys: Any) -> ProgramOutcome:
        raise SandboxUnavailable("there is none")


@pytest.mark.parametrize(
    ("answer", "right"),
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
def test_another_input_with_the_same_output_is_right_where_the_program_is_run(
    answer: str, right: bool
) -> None:
    running, without_program = CodeIO(program="reference", sandbox=FakeSandbox()), CodeIO()
    assert running.grade(f"```json\n{answer}\n```", problem()).correct is right
    assert without_program.grade(f"```json\n{answer}\n```", problem()).correct is (
        answer == '{"input": {"n": 3}}'
    )


def test_a_program_that_hangs_on_an_input_makes_it_wrong_and_a_missing_sandbox_judges_nothing() -> None:
    hanging = problem("def main_solution(n):\n    while n > 3: pass\n    return 1")
    response = '```json\n{"input": {"n": 9}}\n```'
    quick = CodeIO(program="reference", sandbox=FakeSandbox(), limits=ProgramLimits(seconds=2))
    assert not quick.grade(response, hanging).correct
    with pytest.raises(Unavailable, match="there is none"):
        CodeIO(program="reference", sandbox=NoSandbox()).grade(response, hanging)
    with pytest.raises(ValueError, match="no program under 'code'"):
        CodeIO(program="code", sandbox=FakeSandbox()).grade(response, hanging)


@needs_sandbox
def test_programs_run_in_the_sandbox() -> None:
    grader = CodeIO(program="reference")
    for n, right in ((-3, True), (4, False)):
        assert grader.grade(f'```json\n{{"input": {{"n": {n}}}}}\n```', problem()).correct is right


# CRUXEval, where the function is called and nothing of the answer is run

CODE = "def f(text, n):\n    return [text] * n if n else (text,)"
ENDLESS = "def f(n):\n    while n: pass"
GOLDS = {
    "output": {"code": CODE, "input": "'a b', 2"},
    "input": {"code": CODE, "output": "['x', 'x']"},
    "endless": {"code": ENDLESS, "output": "None"},
}
ANSWERS = [*cases(Path(__file__).parent / "cases/cruxeval.txt", "answers"), ["input", "(" * 5000, 0]]


@needs_sandbox
@pytest.mark.parametrize(("kind", "answer", "reward"), ANSWERS)
def test_an_answer_is_graded_by_the_output_of_the_function(kind: str, answer: str, reward: float) -> None:
    question = Problem(id=kind, prompt="?", gold=json.dumps(GOLDS[kind]))
    grader = CruxEval(limits=ProgramLimits(seconds=0.5)) if kind == "endless" else CruxEval()
    assert grader.grade(f"<think>```\n0\n```</think>\n```python\n{answer}\n```", question).reward == reward
    assert grader.grade(f"<answer>\n{answer}\n</answer>", question).reward == reward


@pytest.mark.parametrize("response", ["", "['a b', 'a b']", "```\n\n```", "```\n['a b']\n```</think>"])
def test_a_response_without_a_tagged_value_has_no_answer(response: str) -> None:
    question = Problem(id="o", prompt="?", gold=json.dumps(GOLDS["output"]))
    assert CruxEval().grade(response, question).outcome == "no_answer"


@pytest.mark.parametrize("gold", ["3", "{}", '{"code": "def f(): pass"}', '{"code": "", "input": "1"}', "x"])
def test_a_gold_that_is_none_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="problem p"):
        CruxEval().verdict("1", Problem(id="p", prompt="?", gold=gold))
