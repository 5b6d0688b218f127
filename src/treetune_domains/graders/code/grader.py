"""The grader of programs: an answer's code is run against tests in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from annotated_types import Gt

from treetune.tasks.graders.base import Grader, Isolation, Unavailable
from treetune.tasks.graders.extraction import after_thought, fenced_blocks
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.code.execution import run_cases, run_tests
from treetune_domains.graders.code.outputs import same_output, same_value
from treetune_domains.sandbox.base import Limits, Sandbox
from treetune_domains.sandbox.bubblewrap import Bubblewrap

_LANGUAGES = ("python", "py", "python3")

SPARE_SECONDS = 90.0
"""More than a sandbox takes to say that it can't start a program: only a bug reaches the deadline."""

_MESSAGE = 300


@Grader.register("code")
@dataclass(frozen=True, kw_only=True)
class Code(Grader):
    """Runs the answer's Python against the problem's tests in a sandbox.

    The answer is what stands in fenced code blocks behind the last ``</think>``: in those marked as Python,
    or where none is, in those without a mark. `blocks` says which of them: all, one below the other, the last
    or the first. With ``whole`` it is all of the answer, for models that write nothing else.

    The gold is JSON, of one of these kinds (Reasoning360's):

    * ``{"inputs": […], "outputs": […]}``: a program that is given each input and has to print the output.
      With ``"fn_name"`` (here or, as `function_name`, in the row) it is a function, and inputs are lists of
      arguments.
    * ``{"functional": "…"}``: code with assertions, which uses the names that the answer defines. A list is a
      list of tests; of one text each `assert` at the top level is a test, where it has any.
    * ``{"pytest": "…"}``: a file of tests for pytest, which import from `solution`.
    * ``{"solution_file": "…"}``: a program that imports `solution` and fails if the answer is wrong.

    A row's `prefix` goes before the answer, once. `score` is 1 if ``all`` tests pass, or their ``fraction``.
    Each test has `test_seconds`, all of them together `limits`, a sandbox of their own.

    Expected outputs never enter the sandbox. Tests that are code run there in another process than the
    answer, which can neither see nor reach them.
    """

    blocks: Literal["all", "last", "first", "whole"] = "all"
    score: Literal["all", "fraction"] = "all"
    sandbox: Sandbox = field(default_factory=Bubblewrap)
    test_seconds: Annotated[float, Gt(0)] = 6.0
    limits: Limits = field(default_factory=lambda: Limits(seconds=30.0, memory_mib=1024))

    @property
    def isolation(self) -> Isolation:  # type: ignore[override]
        return self.sandbox.isolation

    @property
    def deadline(self) -> float:  # type: ignore[override]
        return self.limits.seconds + SPARE_SECONDS

    @property
    def concurrency(self) -> int:  # type: ignore[override]
        return self.sandbox.concurrency

    def missing(self) -> Sequence[str]:
        return self.sandbox.missing()

    def extract(self, response: str, problem: Problem) -> str | None:
        answer = after_thought(response)
        if self.blocks == "whole":
            return answer if answer.strip() else None
        blocks = fenced_blocks(answer, *_LANGUAGES) or fenced_blocks(answer, "")
        chosen = {"all": blocks, "last": blocks[-1:], "first": blocks[:1]}[self.blocks]
        return "\n".join(chosen) if any(block.strip() for block in chosen) else None

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold = _gold_of(problem)
        prefix = str(problem.data.get("prefix") or "")
        function = gold.get("fn_name") or problem.data.get("fn_name") or problem.data.get("function_name")
        if "inputs" not in gold:
            return self._against_tests(prefix, extracted, gold)
        if function:
            return self._of_function(prefix, extracted, gold, str(function))
        return self._of_program(f"{prefix}\n{extracted}" if prefix else extracted, gold)

    def _of_program(self, code: str, gold: Mapping[str, Any]) -> Grade:
        inputs, outputs = gold["inputs"], gold["outputs"]
        cases = run_cases(
            self.sandbox,
            code,
            [_text(one) for one in inputs],
            limits=self.limits,
            seconds=self.test_seconds,
            stop_early=self.score == "all",
        )
        passed, message = 0, None
        for number, (case, expected) in enumerate(zip(cases, outputs), 1):
            if case.stopped:
                said = f"not done after {self.test_seconds:g} s"
            elif case.exit != 0:
                said = f"exit status {case.exit}: {_last_line(case.errors)}"
            elif not same_output(case.printed, _text(expected)):
                said = f"printed {case.printed[:60]!r}, not {_text(expected)[:60]!r}"
            else:
                passed += 1
                continue
            message = message or f"test {number}: {said}"
        if len(cases) < len(outputs) and message is None:
            message = f"test {len(cases) + 1}: not done when all tests had to be"
        return self._grade(passed, len(outputs), message)

    def _of_function(self, prefix: str, code: str, gold: Mapping[str, Any], function: str) -> Grade:
        inputs = [_arguments(one) for one in gold["inputs"]]
        expected = [_value(one) for one in gold["outputs"]]
        order = {"kind": "calls", "function": function.rpartition(".")[2], "inputs": inputs}
        report = run_tests(self.sandbox, prefix, code, order, limits=self.limits, seconds=self.test_seconds)
        passed = 0
        message = report.message
        for told, right in zip(report.tests, expected):
            # Some sets (APPS and what came of it) have each expected value in a list of its own.
            alone = right[0] if isinstance(right, list) and len(right) == 1 else right
            if "value" in told and (same_value(told["value"], right) or same_value(told["value"], alone)):
                passed += 1
            elif "value" in told:
                message = message or f"gave {str(told['value'])[:60]}, not {str(right)[:60]}"
        return self._grade(passed, len(expected), message)

    def _against_tests(self, prefix: str, code: str, gold: Mapping[str, Any]) -> Grade:
        kind = next(kind for kind in _TESTS if kind in gold)
        sandbox = self.sandbox
        if kind == "pytest" and isinstance(sandbox, Bubblewrap):
            if find_spec("pytest") is None:
                raise Unavailable("tests for pytest need it here: pip install pytest")
            sandbox = replace(sandbox, packages=True)
        order = {"kind": kind, "tests": gold[kind]}
        report = run_tests(sandbox, prefix, code, order, limits=self.limits, seconds=self.test_seconds)
        passed = sum(told.get("passed") is True for told in report.tests)
        message = report.message
        if message is None and passed < (report.count or 1):
            message = "the tests did not come to their end"
        return self._grade(passed, report.count or 1, message)

    def _grade(self, passed: int, tests: int, message: str | None) -> Grade:
        reward = passed / tests if self.score == "fraction" else float(passed == tests)
        numbers = {"tests": float(tests), "tests_passed": float(passed)}
        message = None if passed == tests or message is None else message[:_MESSAGE]
        return Grade(reward=reward, outcome="ok", message=message, numbers=numbers)


_TESTS = ("functional", "pytest", "solution_file")


def _gold_of(problem: Problem) -> Mapping[str, Any]:
    """Raises ValueError for a gold that holds no tests."""
    try:
        gold = json.loads(problem.gold)
    except ValueError as error:
        raise ValueError(f"the gold of problem {problem.id} is no JSON: {error}") from None
    if not isinstance(gold, dict):
        raise ValueError(f"the gold of problem {problem.id} should be a JSON object with tests")
    if "inputs" in gold:
        inputs, outputs = gold["inputs"], gold.get("outputs")
        if not inputs or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError(f"problem {problem.id} has not as many outputs as inputs, or none")
    elif not any(gold.get(kind) for kind in _TESTS):
        kinds = ", ".join(("inputs and outputs", *_TESTS))
        raise ValueError(f"the gold of problem {problem.id} has no tests: it needs one of {kinds}")
    return gold


def _text(value: Any) -> str:
    """What a program is given or prints. Some sets have it in lines."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _arguments(value: Any) -> list[Any]:
    """Of one call: a list, or text with the JSON of an argument on each line."""
    if isinstance(value, str):
        return [_value(line) for line in value.splitlines() if line.strip()]
    return value if isinstance(value, list) else [value]


def _value(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
