"""The grader of CodeI/O: predictions of a program's output, or of its input (Li et al., 2025,
arXiv:2502.07316)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt, MinLen
from typing_extensions import override

from treetune.contracts import Finding, report_missing
from treetune.domains.graders.code import SPARE_SECONDS
from treetune.domains.sandbox.base import ProgramLimits, Sandbox
from treetune.domains.sandbox.bubblewrap import Bubblewrap
from treetune.exceptions import UnreadableValue
from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import fenced_blocks, find_values, read_value
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

VALUE_KEYS = ("output", "input")
"""The keys under which golds and answers may have their value."""

_BOOLEANS = {"true": True, "false": False}
"""Texts that equal booleans."""

_OUTPUT_MARK = "@@ output of the call: "
"""The beginning of a line with the result of a call. Other lines that the program prints are ignored."""

_CODE_OF_CALLS = """
import json as _json, sys as _sys
for _input in _json.loads(_sys.stdin.read()):
    try:
        if isinstance(_input, dict):
            _output = {entry}(**_input)
        else:
            _output = {entry}(*_input) if isinstance(_input, list) else {entry}(_input)
        _result = {{"value": _json.loads(_json.dumps(_output))}}
    except Exception as _error:
        _result = {{"error": repr(_error)[:200]}}
    print("\\n" + {mark!r} + _json.dumps(_result), flush=True)
"""
"""The code that is put after the problem's program. It reads a list of inputs from standard input, calls the
program's function with each of them, and prints each result on a separate line."""


@Grader.register("codeio")
@dataclass(frozen=True, kw_only=True)
class CodeIO(Grader):
    """Gives the reward 1 for the gold's value. The gold is JSON: an object with the value under the key
    ``output`` or ``input``, or only the value.

    The answer is a fenced code block after the last `think_end`, or if there is none, the last JSON object or
    list. It contains the value in one of the forms ``{"output": 3}``, ``"output": 3`` and ``3``, without
    other keys.

    Values are compared in depth. Lists equal tuples. If one of two numbers has decimals, they may differ by
    `tolerance`. A text that is a JSON object or list equals that object or list, and the texts ``"True"`` and
    ``"false"`` equal booleans. A boolean doesn't equal a number.
    """

    votes_by_value: ClassVar[bool] = True

    block: Literal["first", "last"] = "last"
    """The code block that counts if there are several."""
    tolerance: Annotated[float, Ge(0), Lt(0.1)] = 1e-6
    """The relative tolerance of numbers with decimals."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""
    program: Annotated[str, MinLen(1)] | None = None
    """The row's key with the problem's program. If it is set, a predicted input that differs from the gold's
    is also right if the program's function returns the same value for both. The answer itself is never
    executed, because the function is only called with it. null: such an input is wrong."""
    entry: str = "main_solution"
    """The function of the program."""
    sandbox: Sandbox = field(default_factory=Bubblewrap)
    """The sandbox that runs the program."""
    limits: ProgramLimits = field(default_factory=lambda: ProgramLimits(seconds=10.0))
    """Limits of both calls together."""

    def __post_init__(self) -> None:
        if not self.entry.isidentifier():
            raise ValueError(f"entry is {self.entry!r}, which is not a name of a function")

    @property
    @override
    def isolation(self) -> Isolation:  # type: ignore[override]
        return self.sandbox.isolation if self.program else "process"

    @property
    @override
    def deadline(self) -> float | None:  # type: ignore[override]
        return self.limits.seconds + SPARE_SECONDS if self.program else None

    @override
    def check(self, experiment: Any) -> Iterable[Finding]:
        if self.program:
            yield from report_missing(self.sandbox.missing())

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        blocks = [block for block in fenced_blocks(response) if block.strip()]
        if blocks:
            return blocks[0 if self.block == "first" else -1].strip()
        return next((text for text, _ in find_values(response)), None)

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold, key = read_gold(problem.gold)
        try:
            prediction = read_prediction(extracted)
        except UnreadableValue as error:
            return Grade(reward=0.0, outcome="ok", message=f"no value: {error}")
        values = possible_values(prediction, key)
        right = any(self.are_equal(value, gold) for value in values)
        if not right and self.program is not None and key == "input":
            # Another input may have the same output. The sandbox is needed only for such answers.
            predicted_input = values[0]  # without the key "input", if the answer has it
            right = self._same_output(predicted_input, gold, problem)
        return Grade(reward=float(right), outcome="ok")

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        """Returns whether two answers are the same value. Different inputs are different answers, even if the
        program returns the same value for both."""
        _, key = read_gold(problem.gold)
        try:
            value, other_value = read_prediction(answer), read_prediction(other)
        except UnreadableValue:
            return False
        return self.are_equal(possible_values(value, key)[0], possible_values(other_value, key)[0])

    def _same_output(self, predicted_input: Any, gold_input: Any, problem: Problem) -> bool:
        """Returns whether the program's function returns the same value for both inputs.

        An input that is an object gives the arguments by their names. An input that is a list gives the
        arguments in their order.
        """
        assert self.program is not None, "without a program nothing is called"
        program = problem.data.get(self.program)
        if not isinstance(program, str):
            raise ValueError(f"problem {problem.id} has no program under {self.program!r}")
        calls = _CODE_OF_CALLS.format(entry=self.entry, mark=_OUTPUT_MARK)
        outcome = self.sandbox.run(
            f"{program}\n{calls}", stdin=json.dumps([gold_input, predicted_input]), limits=self.limits
        )
        # A result is missing if the call exceeded a limit. It has no value if the call raised, or returned a
        # value that JSON doesn't have.
        results = []
        for line in outcome.stdout.split("\n"):
            if line.startswith(_OUTPUT_MARK):
                results.append(json.loads(line.removeprefix(_OUTPUT_MARK)))
        gold_result = results[0] if results else {}
        result = results[1] if len(results) > 1 else {}
        if "value" not in gold_result:
            raise ValueError(f"the program of problem {problem.id} returns no value for the gold's input")
        return "value" in result and self.are_equal(result["value"], gold_result["value"])

    def are_equal(self, value: Any, gold: Any) -> bool:
        """Compares two values in depth, which is at most `extraction.DEEPEST_VALUE`."""
        value, gold = _read_text_as_value(value), _read_text_as_value(gold)
        if isinstance(value, bool) or isinstance(gold, bool):
            return value is gold  # before the numbers, since True == 1 in Python
        if isinstance(value, int | float) and isinstance(gold, int | float):
            return self._are_equal_numbers(value, gold)
        if isinstance(value, Mapping) and isinstance(gold, Mapping):
            # Keys are texts in JSON, and may be numbers in a Python literal.
            items = {str(key): item for key, item in value.items()}
            gold_items = {str(key): item for key, item in gold.items()}
            if items.keys() != gold_items.keys():
                return False
            return all(self.are_equal(items[key], gold_items[key]) for key in items)
        if isinstance(value, list | tuple) and isinstance(gold, list | tuple):
            return len(value) == len(gold) and all(map(self.are_equal, value, gold))
        return type(value) is type(gold) and bool(value == gold)

    def _are_equal_numbers(self, value: float, gold: float) -> bool:
        if value == gold:
            return True
        if isinstance(value, int) and isinstance(gold, int):
            return False  # two whole numbers have no tolerance
        try:
            number, gold_number = float(value), float(gold)
        except OverflowError:  # an integer that is larger than all floats
            return False
        if math.isnan(number) or math.isnan(gold_number):
            return math.isnan(number) and math.isnan(gold_number)
        return math.isclose(number, gold_number, rel_tol=self.tolerance)


def _read_text_as_value(value: Any) -> Any:
    """Returns True for the text ``"true"``, a list for the text ``"[1, 2]"``, and any other value as it
    is."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if text[:1] in ("[", "{"):
        try:
            return read_value(text)
        except UnreadableValue:
            return value
    return value


@lru_cache(maxsize=1024)
def read_gold(gold: str) -> tuple[Any, str | None]:
    """Returns the value of a gold and its key: (3, "output") for ``{"output": 3}``. The key is ``output`` or
    ``input``; for a gold without such a key it is None. A gold that is neither JSON nor a literal of Python
    is a text."""
    try:
        value = read_value(gold)
    except UnreadableValue:
        return gold, None
    if isinstance(value, Mapping) and len(value) == 1:
        (key,) = value
        if key in VALUE_KEYS:
            return value[key], key
    return value, None


def read_prediction(text: str) -> Any:
    """Reads the value of an answer: the whole answer or, if that is no value, the last value in brackets.

    ``"output": 3`` is read as the object ``{"output": 3}``. Raises UnreadableValue if there is no value.
    """
    in_braces = f"{{{text.strip().rstrip(',')}}}"  # {"output": 3} for "output": 3,
    for candidate in (text, in_braces):
        try:
            return read_value(candidate)
        except UnreadableValue:
            continue
    for _, value in find_values(text):  # the last value comes first
        return value
    raise UnreadableValue("neither JSON nor a literal")


def possible_values(prediction: Any, key: str | None) -> list[Any]:
    """Returns the possible meanings of an answer.

    An answer whose only key is the gold's key may mean the value under this key, or the whole answer. If the
    gold has no key (`key` is None), this holds for each key of `VALUE_KEYS`. Any other answer has one
    meaning, its own value.
    """
    if isinstance(prediction, Mapping) and len(prediction) == 1:
        ((name, value),) = prediction.items()
        if name == key or (key is None and name in VALUE_KEYS):
            return [value, prediction]
    return [prediction]
