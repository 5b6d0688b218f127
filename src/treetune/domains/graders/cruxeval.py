"""The grader of CRUXEval: predictions of a function's output, or of an input."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

from annotated_types import MinLen
from typing_extensions import override

from treetune.domains.graders.code import SandboxedGrader
from treetune.domains.sandbox.base import ProgramLimits, ProgramOutcome, Sandbox
from treetune.domains.sandbox.bubblewrap import Bubblewrap
from treetune.exceptions import UnreadableValue
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import LONGEST_VALUE, fenced_blocks, last_between, read_value
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Problem


@Grader.register("cruxeval")
@dataclass(frozen=True, kw_only=True)
class CruxEval(SandboxedGrader):
    """Grades predictions of a Python function's return value, or of arguments for which it returns a given
    value (CRUXEval, Gu et al. 2024).

    The gold is JSON with the function `f` as ``code``. If the question asks for the output, the gold also has
    the ``input`` (the text between the parentheses of the call), and if it asks for an input, the ``output``.
    The answer is in the last fenced block after ``</think>``, or if there is none, between ``<answer>`` and
    ``</answer>``. The answer is a value (for an input: the arguments, or the call with them), or ``assert
    f(…) == …``, in which the part that the question gives is unchanged.

    The function is called in a sandbox. The answer is read as literals, and never executed.
    """

    votes_by_value: ClassVar[bool] = True

    sandbox: Sandbox = field(default_factory=Bubblewrap)
    limits: ProgramLimits = field(default_factory=lambda: ProgramLimits(seconds=5.0))
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        blocks = fenced_blocks(response)
        answer = blocks[-1] if blocks else last_between(response)
        return (answer or "").strip() or None

    @override
    def verdict(self, extracted: str, problem: Problem) -> float:
        gold = _read_gold(problem)
        asks_output = "input" in gold
        prediction = _read_prediction(extracted, asks_output)
        if prediction is None:
            return 0.0
        call, value = prediction
        if asks_output:
            call_of_question = _make_call(gold["input"])
            if call_of_question is None:
                raise ValueError(
                    f"the input {gold['input'][:100]!r} in the gold of problem {problem.id} is not arguments"
                    " that are literals, such as [1, 2], 'a'"
                )
            # In ``assert f(…) == …`` the call has to be the question's.
            is_other_call = call is not None and ast.dump(call) != ast.dump(call_of_question)
            if value is None or is_other_call:
                return 0.0
            outcome = self._value_of(gold["code"], call_of_question)
            if not outcome.ok:
                raise ValueError(f"the function of problem {problem.id} fails: {outcome.stderr[-300:]!r}")
            return float(_have_equal_values(outcome.stdout, value))
        # An input is asked for. In ``assert f(…) == …`` the value has to be the question's.
        is_other_value = value is not None and not _have_equal_values(gold["output"], value)
        if call is None or is_other_value:
            return 0.0
        outcome = self._value_of(gold["code"], call)
        return float(outcome.ok and _have_equal_values(outcome.stdout, gold["output"]))

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        """Returns whether two answers predict the same value, or the same arguments. The problem's
        function isn't called."""
        asks_output = "input" in _read_gold(problem)
        prediction = _read_prediction(answer, asks_output)
        other_prediction = _read_prediction(other, asks_output)
        if prediction is None or other_prediction is None:
            return False
        call, value = prediction
        other_call, other_value = other_prediction
        if asks_output:
            return value is not None and other_value is not None and _have_equal_values(value, other_value)
        return call is not None and other_call is not None and ast.dump(call) == ast.dump(other_call)

    def _value_of(self, code: str, call: ast.Call) -> ProgramOutcome:
        return self.sandbox.run(f"{code}\nprint(repr({ast.unparse(call)}))", limits=self.limits)


class _Prediction(NamedTuple):
    """The call and the value in an answer. Either is None if the answer doesn't have it."""

    call: ast.Call | None
    value: str | None


def _read_gold(problem: Problem) -> Mapping[str, str]:
    """Returns the problem's function as ``code``, with either its ``input`` or its ``output``, whichever the
    question gives. Raises ValueError for any other gold."""
    try:
        gold = json.loads(problem.gold)
        code = gold.get("code") or gold["functional"]
        if ("input" in gold) == ("output" in gold):
            raise ValueError("it should hold either the input or the output")
        name = "input" if "input" in gold else "output"
        return {name: str(gold[name]), "code": str(code)}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the gold of problem {problem.id} is not a function with an input or output: {error}"
        ) from error


def _read_prediction(text: str, asks_output: bool) -> _Prediction | None:
    """Reads an answer. Returns None if it can't be read.

    ``assert f(1) == 2`` has a call and a value. If an output is asked for, ``2`` has only a value. If an
    input is asked for, ``f(1)``, ``1`` and ``x=1`` have only a call.
    """
    if len(text) > LONGEST_VALUE:
        return None
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        statements = []  # several named arguments, x=1, y=2, aren't a statement
    assertions = [statement for statement in statements if isinstance(statement, ast.Assert)]
    if not assertions:
        if asks_output:
            return _Prediction(call=None, value=text)
        statement = statements[0] if len(statements) == 1 else None
        arguments = text
        if isinstance(statement, ast.Expr) and _is_call(statement.value):
            arguments = _text_of_arguments(statement.value)
        # `_make_call` makes a call again, but only of arguments that are literals. Otherwise it returns None.
        return _Prediction(_make_call(arguments), value=None)
    test = assertions[-1].test
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return None
    sides = [test.left, *test.comparators]
    calls = [side for side in sides if _is_call(side)]
    values = [side for side in sides if not _is_call(side)]
    if len(calls) != 1:
        return None
    call = _make_call(_text_of_arguments(calls[0]))
    return None if call is None else _Prediction(call, ast.unparse(values[0]))


def _text_of_arguments(call: ast.expr) -> str:
    """Returns ``1, x=2`` of the call ``f(1, x=2)``."""
    return ast.unparse(call)[len("f(") : -len(")")]


def _is_call(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "f"


def _make_call(arguments: str) -> ast.Call | None:
    """Returns the call of `f` with these arguments; None if they aren't literals."""
    try:
        # The newline ends a comment after the arguments.
        call = ast.parse(f"f({arguments}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or not _is_call(call):
            return None  # the text closes the call itself, as "1) or f(2" does
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            ast.literal_eval(argument)
        return call
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _have_equal_values(text: str, other_text: str) -> bool:
    """Returns whether two texts are equal values. If one of them can't be read, they have to be the same
    text."""
    try:
        return bool(read_value(text) == read_value(other_text))
    except UnreadableValue:
        return text.strip() == other_text.strip()
