"""Predicting a program's output, or its input: CodeI/O (Li et al., 2025, arXiv:2502.07316)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt, MinLen
from typing_extensions import override

from treetune.contracts import Finding, lacking
from treetune.domains.graders.code import SPARE_SECONDS
from treetune.domains.sandbox.base import ProgramLimits, Sandbox
from treetune.domains.sandbox.bubblewrap import Bubblewrap
from treetune.exceptions import UnreadableValue
from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import fenced_blocks, find_values, read_value
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

KEYS = ("output", "input")

_TRUTHS = {"true": True, "false": False}

_MARK = "@@ output of the call: "
"""Before a line with the result of a call. What else the program prints is not looked at."""

_CALLS = """
if True:
    import json as _json, sys as _sys
    for _given in _json.loads(_sys.stdin.read()):
        try:
            if isinstance(_given, dict):
                _found = {entry}(**_given)
            else:
                _found = {entry}(*_given) if isinstance(_given, list) else {entry}(_given)
            _told = {{"value": _json.loads(_json.dumps(_found))}}
        except Exception as _error:
            _told = {{"error": repr(_error)[:200]}}
        print("\\n" + {mark!r} + _json.dumps(_told), flush=True)
"""


@Grader.register("codeio")
@dataclass(frozen=True, kw_only=True)
class CodeIO(Grader):
    """Right is the value of the gold, all through: JSON, under ``output`` or ``input`` or without a key.

    The answer is a fenced code block after the last `think_end`, or without one the last JSON object or list.
    It holds the value as the gold does: ``{"output": 3}``, ``"output": 3`` or ``3``, with no key beside it.

    Values are equal in depth: lists as tuples, numbers to within `tolerance` of the gold's where one of
    them has decimals, a text that holds a JSON object or list as its content, ``"True"`` and ``"false"``
    as truth values. A truth value is no number.
    """

    votes_by_value: ClassVar[bool] = True

    block: Literal["first", "last"] = "last"
    """The code block that counts, of several."""
    tolerance: Annotated[float, Ge(0), Lt(0.1)] = 1e-6
    """Relative, of numbers with decimals."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is no part of an answer; the default knows other models' tags, too
    (`tasks.thoughts`). null: all of a response counts."""
    program: Annotated[str, MinLen(1)] | None = None
    """The field of the row that holds the program. With it a predicted input other than the gold's is also
    right if the program's function returns the same for both. Nothing of an answer is code there; it is data,
    with which the function is called."""
    entry: str = "main_solution"
    """The function of the program."""
    sandbox: Sandbox = field(default_factory=Bubblewrap)
    """The sandbox that runs the program."""
    limits: ProgramLimits = field(default_factory=lambda: ProgramLimits(seconds=10.0))
    """Limits of both calls together."""

    def __post_init__(self) -> None:
        if not self.entry.isidentifier():
            raise ValueError(f"entry is {self.entry!r}, which is no name of a function")

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
            yield from lacking(self.sandbox.missing())

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
        readings = candidates(prediction, key)
        right = any(self.equal(candidate, gold) for candidate in readings)
        if not right and self.program is not None and key == "input":
            right = self._same_output(readings[0], gold, problem)
        return Grade(reward=float(right), outcome="ok")

    @override
    def same_answer(self, answer: str, other: str, problem: Problem) -> bool:
        """Returns whether two answers are one value. Different inputs for which the program returns the same
        are different answers."""
        _, key = read_gold(problem.gold)
        try:
            value, other_value = read_prediction(answer), read_prediction(other)
        except UnreadableValue:
            return False
        return self.equal(candidates(value, key)[0], candidates(other_value, key)[0])

    def _same_output(self, prediction: Any, gold: Any, problem: Problem) -> bool:
        """Runs the program on both inputs. An object is given as named arguments, a list as arguments in
        their order."""
        program = problem.data.get(str(self.program))
        if not isinstance(program, str):
            raise ValueError(f"problem {problem.id} has no program under {self.program!r}")
        calls = _CALLS.format(entry=self.entry, mark=_MARK)
        outcome = self.sandbox.run(
            f"{program}\n{calls}", stdin=json.dumps([gold, prediction]), limits=self.limits
        )
        # Missing are calls that weren't done within the limits; one without a value raised, or returned what
        # JSON doesn't have.
        results = []
        for line in outcome.stdout.split("\n"):
            if line.startswith(_MARK):
                results.append(json.loads(line.removeprefix(_MARK)))
        gold_result = results[0] if results else {}
        result = results[1] if len(results) > 1 else {}
        if "value" not in gold_result:
            raise ValueError(f"the program of problem {problem.id} gives nothing for the gold's input")
        return "value" in result and self.equal([result["value"]], [gold_result["value"]])

    def equal(self, value: Any, gold: Any) -> bool:
        """Compares two values in depth. They are nested no deeper than `extraction.DEEPEST_VALUE`."""
        value, gold = _normal(value), _normal(gold)
        if isinstance(value, bool) or isinstance(gold, bool):
            return value is gold
        if isinstance(value, int | float) and isinstance(gold, int | float):
            if value == gold or (isinstance(value, int) and isinstance(gold, int)):
                return value == gold
            try:
                number, gold_number = float(value), float(gold)
            except OverflowError:
                return False
            if math.isnan(number) or math.isnan(gold_number):
                return math.isnan(number) and math.isnan(gold_number)
            return math.isclose(number, gold_number, rel_tol=self.tolerance)
        if isinstance(value, Mapping) and isinstance(gold, Mapping):
            items = {str(key): item for key, item in value.items()}
            gold_items = {str(key): item for key, item in gold.items()}
            if items.keys() != gold_items.keys():
                return False
            return all(self.equal(items[key], gold_items[key]) for key in items)
        if isinstance(value, list | tuple) and isinstance(gold, list | tuple):
            return len(value) == len(gold) and all(map(self.equal, value, gold))
        return type(value) is type(gold) and bool(value == gold)


def _normal(value: Any) -> Any:
    """Returns True for ``"true"``, a list for the text ``"[1, 2]"``, and any other value as it is."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    if text[:1] in ("[", "{"):
        try:
            return read_value(text)
        except UnreadableValue:
            return value
    return value


@lru_cache(maxsize=1024)
def read_gold(gold: str) -> tuple[Any, str | None]:
    """Returns the value, and the key that it stood under. A gold that is no value is a text."""
    try:
        value = read_value(gold)
    except UnreadableValue:
        return gold, None
    if isinstance(value, Mapping) and len(value) == 1:
        (key,) = value
        if key in KEYS:
            return value[key], key
    return value, None


def read_prediction(text: str) -> Any:
    """Reads the value that an answer is, or that stands in it; ``"output": 3`` counts as an object.

    Raises UnreadableValue where there is none.
    """
    for whole in (text, f"{{{text.strip().rstrip(',')}}}"):
        try:
            return read_value(whole)
        except UnreadableValue:
            continue
    for _, value in find_values(text):
        return value
    raise UnreadableValue("neither JSON nor a literal")


def candidates(prediction: Any, key: str | None) -> list[Any]:
    """Returns the readings of an answer: all of it, and before that the value under the gold's key (under
    either where the gold has none) if that key stands alone: an answer that says more than was asked has not
    settled on one."""
    if isinstance(prediction, Mapping) and len(prediction) == 1:
        ((name, value),) = prediction.items()
        if name == key or (key is None and name in KEYS):
            return [value, prediction]
    return [prediction]
