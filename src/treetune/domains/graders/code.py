"""The grader of programs: it runs an answer's code against tests in a sandbox."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Gt, MinLen
from typing_extensions import override

from treetune.contracts import Finding, report_missing
from treetune.domains.sandbox import inside
from treetune.domains.sandbox.base import ProgramLimits, Sandbox
from treetune.domains.sandbox.bubblewrap import Bubblewrap
from treetune.exceptions import Unavailable
from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import fenced_blocks
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

_NAMES_OF_PYTHON = ("python", "py", "python3", "pypy3")

SPARE_SECONDS = 90.0
"""Time for grading an answer in addition to a program's own limit. A sandbox that can't start a program says
so earlier, so only a bug reaches the deadline."""

_MESSAGE_CHARACTERS = 300
"""The most characters of a grade's message."""

_REPORT_KIB = 64
"""The space for a report in addition to what the tests printed and their lines in it."""

_KEYS_OF_TESTS = ("functional", "pytest", "solution_file")
"""The keys of golds whose tests are code."""


class SandboxedGrader(Grader):
    """A grader that runs programs in its `sandbox`, within `limits`. The sandbox's isolation is also the
    grader's."""

    sandbox: Sandbox
    limits: ProgramLimits

    @property
    @override
    def isolation(self) -> Isolation:  # type: ignore[override]
        return self.sandbox.isolation

    @property
    @override
    def deadline(self) -> float | None:  # type: ignore[override]
        return self.limits.seconds + SPARE_SECONDS

    @property
    @override
    def concurrency(self) -> int:  # type: ignore[override]
        return self.sandbox.concurrency

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        yield from report_missing(self.sandbox.missing())


@Grader.register("code")
@dataclass(frozen=True, kw_only=True)
class Code(SandboxedGrader):
    """Runs the answer's Python against the problem's tests in a sandbox.

    The answer is in the fenced code blocks after the last ``</think>``: those marked as Python; if there are
    none, those without a mark; if no block is closed, the last one.

    The gold is JSON of one of these kinds, as in Reasoning360:

    * ``{"inputs": […], "outputs": […]}``: the answer is a program that reads each input and prints the
      output. With ``"fn_name"`` (here or, as `function_name`, in the row) it is a function, and inputs are
      lists of arguments.
    * ``{"functional": "…"}``: code with assertions, which uses the names that the answer defines. A list is a
      list of tests. In a single text, each `assert` at the top level is a test, if it has any.
    * ``{"pytest": "…"}``: a file of tests for pytest, which import from `solution`.
    * ``{"solution_file": "…"}``: a program that imports `solution` and fails if the answer is wrong.

    A row's `prefix` is put before the answer once. The answer may be the rest of the prefix's last function,
    that function again, or a whole program. For a gold with inputs and outputs, the answer can use names that
    such benchmarks import (`from typing import *` and the like) without importing them. Expected outputs
    never enter the sandbox. Tests that are code run in the sandbox in another process than the answer, so the
    answer can neither read nor change them.
    """

    blocks: Literal["all", "last", "first", "whole"] = "all"
    """The blocks that count: all of them joined, the last, or the first. ``whole`` takes the whole response,
    for models that write only code."""
    score: Literal["all", "fraction"] = "all"
    """``all``: the reward is 1 if all tests pass, otherwise 0. ``fraction``: the share of tests that pass."""
    sandbox: Sandbox = field(default_factory=Bubblewrap)
    """The sandbox that runs the code."""
    test_seconds: Annotated[float, Gt(0)] = 6.0
    """Seconds for each test."""
    limits: ProgramLimits = field(default_factory=lambda: ProgramLimits(seconds=30.0, memory_mib=1024))
    """Limits of all tests of an answer together."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        if self.blocks == "whole":
            return response if response.strip() else None
        # Blocks in Python, or else blocks without a language after the fence.
        blocks = fenced_blocks(response, *_NAMES_OF_PYTHON) or fenced_blocks(response, "")
        # The answer may end, or a stop string may have cut it, before its only block is closed.
        blocks = blocks or fenced_blocks(response, *_NAMES_OF_PYTHON, "", unclosed=True)
        chosen = {"all": blocks, "last": blocks[-1:], "first": blocks[:1]}[self.blocks]
        return "\n".join(chosen) if any(block.strip() for block in chosen) else None

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold = _read_gold(problem)
        prefix = str(problem.data.get("prefix") or "")
        # Data sets name the function in the gold or in the row.
        function = gold.get("fn_name") or problem.data.get("fn_name") or problem.data.get("function_name")
        if "inputs" not in gold:
            passed, tests, message = self._run_tests(prefix, extracted, gold)
        elif function:
            passed, tests, message = self._call_on_inputs(prefix, extracted, gold, str(function))
        else:
            passed, tests, message = self._run_on_inputs(prefix, extracted, gold)
        reward = passed / tests if self.score == "fraction" else float(passed == tests)
        numbers = {"tests": float(tests), "tests_passed": float(passed)}
        message = None if passed == tests or message is None else message[:_MESSAGE_CHARACTERS]
        return Grade(reward=reward, outcome="ok", message=message, numbers=numbers)

    def _run_on_inputs(self, prefix: str, code: str, gold: Mapping[str, Any]) -> _TestResults:
        """Runs the program on each input, which is a test."""
        inputs = [_text_of_value(text) for text in gold["inputs"]]
        outputs = gold["outputs"]
        most_bytes = self.limits.output_kib * 1024
        stops_early = self.score == "all"  # the first failure decides
        call = f"\nrun({prefix!r}, {code!r}, {inputs!r}, {self.test_seconds!r}, {most_bytes}, {stops_early})"
        # For each test, the report has a line, what the program printed, and the end of its errors (see
        # `sandbox.inside.cases`). The 4 KiB are for the line and the errors.
        kib_of_test = self.limits.output_kib + 4
        limits = replace(self.limits, output_kib=kib_of_test * len(inputs) + _REPORT_KIB)
        report = self.sandbox.run(inside.bundle("cases", "joining") + call, limits=limits).stdout
        passed, done, message = 0, 0, None
        # The report has fewer tests than there are outputs if the first failure has stopped it, or a limit.
        for expected, test in zip(map(_text_of_value, outputs), _read_report(report)):
            done += 1
            if test.ran_out_of_time:
                problem = f"not done after {self.test_seconds:g} s"
            elif test.exit_status != 0:
                lines = [line for line in test.errors.splitlines() if line.strip()]
                problem = f"exit status {test.exit_status}: {lines[-1] if lines else ''}"
            elif not same_output(test.printed, expected):
                problem = f"printed {test.printed[:60]!r}, not {expected[:60]!r}"
            else:
                passed += 1
                continue
            message = message or f"test {done}: {problem}"
        if done < len(outputs) and message is None:  # all tests together have exceeded a limit
            message = f"test {done + 1}: not done when all tests had to be"
        return _TestResults(passed, len(outputs), message)

    def _call_on_inputs(self, prefix: str, code: str, gold: Mapping[str, Any], function: str) -> _TestResults:
        """Calls the answer's function with each input, which is a test.

        `prefix` is code of the problem that comes before the answer's code.
        """
        inputs = [_read_arguments(value) for value in gold["inputs"]]
        expected = [_json_value_or_text(value) for value in gold["outputs"]]
        # "Solution.twoSum" is passed as "twoSum": if there is a class `Solution`, the sandbox looks in it.
        name = function.rpartition(".")[2]
        order = {"kind": "calls", "function": name, "inputs": inputs}
        _, results, message = self._collect_reports(self.sandbox, prefix, code, order)
        passed = 0
        for result, expected_value in zip(results, expected):  # fewer results if a test was not reached
            if "value" not in result:
                continue  # the call raised, so `message` is set
            accepted = [expected_value]
            # Some data sets (APPS and those derived from it) put each expected value into a list.
            if isinstance(expected_value, list) and len(expected_value) == 1:
                accepted.append(expected_value[0])
            if any(same_value(result["value"], value) for value in accepted):
                passed += 1
            else:
                message = (
                    message or f"gave {str(result['value'])[:60]}, not {_text_of_value(expected_value)[:60]}"
                )
        return _TestResults(passed, len(expected), message)

    def _run_tests(self, prefix: str, code: str, gold: Mapping[str, Any]) -> _TestResults:
        """Runs tests that are code."""
        kind = next(kind for kind in _KEYS_OF_TESTS if gold.get(kind))
        sandbox = self.sandbox
        if kind == "pytest" and isinstance(sandbox, Bubblewrap):
            if find_spec("pytest") is None:
                raise Unavailable("tests for pytest need it here: pip install pytest")
            sandbox = replace(sandbox, packages=True)  # so that the sandbox can import pytest
        order = {"kind": kind, "tests": gold[kind]}
        count, results, message = self._collect_reports(sandbox, prefix, code, order)
        passed = sum(result.get("passed") is True for result in results)
        # Tests that could not begin, or that have no test in them, count as one that failed.
        count = count or 1
        # A test that failed has a message. If none has, the tests that didn't pass have no report at all.
        if message is None and passed < count:
            message = "the tests did not run to their end"
        return _TestResults(passed, count, message)

    def _collect_reports(
        self, sandbox: Sandbox, prefix: str, code: str, order: Mapping[str, Any]
    ) -> tuple[int | None, Sequence[Mapping[str, Any]], str | None]:
        """Runs the tests of an `order` (see `sandbox.inside.tests`) against the code.

        Returns:
            The number of tests (None if they could not begin), the report of each test that has begun, and
            the message of the first test that failed (None if none failed). A report is ``{"passed": True}``
            or, for a call, ``{"value": 3}``. It has a ``message`` if the test failed.
        """
        # The program forks the answer's process, and then reads the tests from its standard input. The
        # answer's process has no standard input.
        are_calls = order["kind"] == "calls"
        call = f"\nmain({prefix!r}, {code!r}, {self.test_seconds!r}, {are_calls})"
        program = inside.bundle("tests", "joining", "peers") + call
        with _allow_long_integers():
            stdin = json.dumps(order)
        report = sandbox.run(program, stdin=stdin, limits=self.limits).stdout
        count: int | None = None
        results: list[Mapping[str, Any]] = []
        for line in report.splitlines():
            try:
                row = json.loads(line, parse_int=_read_integer)
            except ValueError:
                break  # cut at the deadline
            if "tests" in row:
                count = int(row["tests"])
            else:
                results.append(row)
        message = next((str(row["message"]) for row in results if "message" in row), None)
        # An error outside of the tests has a row as well, after those of the tests, and counts as no test.
        return count, results[: count or 0], message


def _read_gold(problem: Problem) -> Mapping[str, Any]:
    """Reads a problem's gold. Raises ValueError for a gold without tests."""
    try:
        with _allow_long_integers():
            gold = json.loads(problem.gold)
    except ValueError as error:
        raise ValueError(f"the gold of problem {problem.id} is not JSON: {error}") from None
    if not isinstance(gold, dict):
        raise ValueError(f"the gold of problem {problem.id} should be a JSON object with tests")
    if "inputs" in gold:
        inputs, outputs = gold["inputs"], gold.get("outputs")
        if not inputs or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError(f"problem {problem.id} has not as many outputs as inputs, or none")
    elif not any(gold.get(kind) for kind in _KEYS_OF_TESTS):
        kinds = ", ".join(("inputs and outputs", *_KEYS_OF_TESTS))
        raise ValueError(f"the gold of problem {problem.id} has no tests: it needs one of {kinds}")
    return gold


class _TestResults(NamedTuple):
    """What the tests of an answer say."""

    passed: int
    tests: int
    """The number of tests, of which `passed` passed."""
    message: str | None
    """The reason of the first failure."""


class _TestRun(NamedTuple):
    """The run of a program on one input."""

    exit_status: int
    ran_out_of_time: bool
    printed: str
    errors: str
    """The end of its error output."""


def _read_report(report: str) -> Iterator[_TestRun]:
    """Yields the runs in a report of `sandbox.inside.cases`, until it ends or was cut at a limit.

    A run has a line such as "0 0 3 0", then what the program printed, then its errors. The numbers are the
    exit status, 1 if the time ran out, and the lengths of these two texts.
    """
    while True:
        numbers_line, _, report = report.partition("\n")
        try:
            exit_status, ran_out_of_time, printed_length, errors_length = map(int, numbers_line.split())
        except ValueError:  # an empty line, or a line that was cut
            return
        printed = report[:printed_length]
        errors = report[printed_length : printed_length + errors_length]
        report = report[printed_length + errors_length :]
        yield _TestRun(exit_status, bool(ran_out_of_time), printed, errors)


def _text_of_value(value: Any) -> str:
    """Returns a program's input or output as text. Some data sets have a list of lines."""
    with _allow_long_integers():  # Python refuses to write integers of more than 4,300 digits otherwise
        if isinstance(value, list):
            return "\n".join(map(str, value))
        return str(value)


def _read_arguments(value: Any) -> list[Any]:
    """Returns the arguments of one call, from a list, or from a text with the JSON of an argument in each
    line. Any other value is the only argument."""
    if isinstance(value, str):
        return [_json_value_or_text(line) for line in value.splitlines() if line.strip()]
    return value if isinstance(value, list) else [value]


def _json_value_or_text(value: Any) -> Any:
    """Returns the value of a text that is JSON. Any other text, and a value that isn't a text, stays as it
    is."""
    try:
        with _allow_long_integers():
            return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


@contextlib.contextmanager
def _allow_long_integers() -> Iterator[None]:
    """Lets Python convert integers of any length from and to text within the block.

    Use it only for golds, which are trusted. The conversion takes quadratic time, so a long integer in an
    answer could take too long.
    """
    usual_limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(usual_limit)


def _read_integer(digits: str) -> int | Decimal:
    """Reads an integer that an answer returned. A long one becomes a Decimal, since `int` takes quadratic
    time."""
    return int(digits) if len(digits) <= _LONGEST_NUMBER else Decimal(digits)


# Expected outputs

PRINTED_TOLERANCE = 1e-6
"""Tolerance of printed numbers, absolute or relative, as in most programming contests."""

RETURNED_TOLERANCE = 1e-5
"""Tolerance of numbers that a function returns, absolute or relative, as in Reasoning360's tests."""

_LONGEST_NUMBER = 400
"""The most characters of a number that is converted with `int`."""
_WORDS_OF_ANY_CASE = {"yes", "no", "true", "false"}
"""Words whose upper and lower case don't matter in what a program prints."""
_MOST_NESTED_VALUES = 100
"""The most lists and objects within each other that are compared."""


def same_output(printed: str, expected: str) -> bool:
    """Compares the output of a program with the expected one, line by line and word by word.

    The number of spaces between words, spaces at the end of lines, and empty lines at the end don't matter,
    and neither does the case of yes, no, true and false. An expected whole number has to be matched exactly
    (``7.0`` is 7, and ``7.000000001`` isn't). An expected number with a decimal point or an exponent may
    differ by 1e-6, absolutely or relatively.
    """
    lines, expected_lines = printed.rstrip().split("\n"), expected.rstrip().split("\n")
    if len(lines) != len(expected_lines):
        return False
    for line, expected_line in zip(lines, expected_lines, strict=True):
        if line == expected_line:
            continue
        printed_words, expected_words = line.split(), expected_line.split()
        if len(printed_words) != len(expected_words):
            return False
        if not all(map(_same_word, printed_words, expected_words)):
            return False
    return True


def _same_word(printed: str, expected: str) -> bool:
    """Returns whether a printed word matches the expected one, by the rules of `same_output`."""
    if printed == expected:
        return True
    if expected.lower() in _WORDS_OF_ANY_CASE:
        return printed.lower() == expected.lower()
    if max(len(printed), len(expected)) > _LONGEST_NUMBER or "_" in printed:
        return False  # `int` takes quadratic time for long numbers, and Python reads 1_0 as ten
    try:
        expected_integer = int(expected)
    except ValueError:
        expected_integer = None
    try:
        if expected_integer is not None:
            return bool(Decimal(printed) == expected_integer)
        number, expected_number = float(printed), float(expected)
        if math.isinf(number) or math.isinf(expected_number):
            exact_expected = Decimal(expected)
            if exact_expected.is_infinite():
                return number == expected_number
            # A finite number that is too large for a float is compared exactly.
            return bool(Decimal(printed) == exact_expected)
        return are_close(number, expected_number, PRINTED_TOLERANCE)
    except (ValueError, ArithmeticError):
        return False


def same_value(returned: Any, expected: Any, depth: int = 0) -> bool:
    """Compares JSON values. Two whole numbers have to be equal, and other numbers may differ by 1e-5,
    absolutely or relatively. Everything else is compared exactly. True is not equal to 1. `depth` is the
    number of lists and objects around the values.
    """
    if depth > _MOST_NESTED_VALUES:
        return False
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, int | Decimal) and isinstance(expected, int):
        return bool(returned == expected)  # a Decimal is a long integer (`_read_integer`)
    if isinstance(returned, int | float) and isinstance(expected, int | float):
        try:
            return are_close(float(returned), float(expected), RETURNED_TOLERANCE)
        except OverflowError:  # one is an integer that is larger than all floats
            return False
    if isinstance(returned, list) and isinstance(expected, list):
        if len(returned) != len(expected):
            return False
        return all(same_value(item, other, depth + 1) for item, other in zip(returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(
            same_value(value, expected[key], depth + 1) for key, value in returned.items()
        )
    return type(returned) is type(expected) and bool(returned == expected)


def are_close(number: float, expected: float, tolerance: float) -> bool:
    """Returns whether two numbers differ by at most the tolerance, absolutely or relatively.

    Nothing is close to nan, and an infinity is only close to itself.
    """
    if math.isinf(number) or math.isinf(expected):
        return number == expected
    # For numbers below 1, the tolerance is absolute. For others it is relative to the smaller one.
    scale = max(1.0, min(abs(number), abs(expected)))
    return abs(number - expected) <= tolerance * scale
