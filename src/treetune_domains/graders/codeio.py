"""Predicting what a program gives, or what it was given: CodeI/O (Li et al., 2025, arXiv:2502.07316)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt, MinLen

from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import (
    THINK_END,
    NoValue,
    after_thought,
    fenced_blocks,
    read_value,
    values,
)
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.codeio_program import outputs_of
from treetune_domains.sandbox.base import Limits, Sandbox
from treetune_domains.sandbox.bubblewrap import Bubblewrap

KEYS = ("output", "input")

_SPARE_SECONDS = 90.0
"""More than a sandbox takes to say that it can't start a program."""

_TRUTHS = {"true": True, "false": False}


@Grader.register("codeio")
@dataclass(frozen=True, kw_only=True)
class CodeIO(Grader):
    """Right is the value of the gold, all through: JSON, under ``output`` or ``input`` or without a key.

    The answer is the last fenced code block after the last `think_end` (or the first, as `block` says), or
    without one the last JSON object or list. It holds the value as the gold does: ``{"output": 3}``,
    ``"output": 3`` or ``3``, with no key beside it.

    Where an input is to be found, others than the gold's may give the same output. With `program`, the
    field of the row that holds the program, a predicted input is also right if the function `entry` returns
    for it what it returns for the gold's: both are run in the `sandbox`, within `limits`. Nothing of an
    answer is code there; it is data, which `entry` is called with.

    Values are equal in depth: lists as tuples, numbers to within `tolerance` of the gold's where one of them
    has decimals, a text that holds a JSON object or list as what it holds, ``"True"`` and ``"false"`` as
    truth values. A truth value is no number.
    """

    block: Literal["first", "last"] = "last"
    tolerance: Annotated[float, Ge(0), Lt(0.1)] = 1e-6
    think_end: Annotated[str, MinLen(1)] = THINK_END
    program: Annotated[str, MinLen(1)] | None = None
    entry: str = "main_solution"
    sandbox: Sandbox = field(default_factory=Bubblewrap)
    limits: Limits = field(default_factory=lambda: Limits(seconds=10.0))

    def __post_init__(self) -> None:
        if not self.entry.isidentifier():
            raise ValueError(f"entry is {self.entry!r}, which is no name of a function")

    @property
    def isolation(self) -> Isolation:  # type: ignore[override]
        return self.sandbox.isolation if self.program else "process"

    @property
    def deadline(self) -> float | None:  # type: ignore[override]
        return self.limits.seconds + _SPARE_SECONDS if self.program else None

    def missing(self) -> Sequence[str]:
        return self.sandbox.missing() if self.program else ()

    def extract(self, response: str, problem: Problem) -> str | None:
        said = after_thought(response, self.think_end)
        blocks = [block for block in fenced_blocks(said) if block.strip()]
        if blocks:
            return blocks[0 if self.block == "first" else -1].strip()
        return next((text for text, _ in values(said)), None)

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold, key = read_gold(problem.gold)
        try:
            given = read_prediction(extracted)
        except NoValue as error:
            return Grade(reward=0.0, outcome="ok", message=f"no value: {error}")
        said = candidates(given, key)
        right = any(self.equal(candidate, gold) for candidate in said)
        if not right and self.program is not None and key == "input":
            right = self._same_output(said[0], gold, problem)
        return Grade(reward=float(right), outcome="ok")

    def _same_output(self, given: Any, gold: Any, problem: Problem) -> bool:
        program = problem.data.get(str(self.program))
        if not isinstance(program, str):
            raise ValueError(f"problem {problem.id} has no program under {self.program!r}")
        meant, found = outputs_of(self.sandbox, program, self.entry, [gold, given], self.limits)
        if meant is None:
            raise ValueError(f"the program of problem {problem.id} gives nothing for the gold's input")
        return found is not None and self.equal(found, meant)

    def equal(self, given: Any, gold: Any) -> bool:
        """Whether two values say the same (see above). Values are nested no deeper than
        `extraction.DEEPEST_VALUE`."""
        given, gold = _normal(given), _normal(gold)
        if isinstance(given, bool) or isinstance(gold, bool):
            return given is gold
        if isinstance(given, int | float) and isinstance(gold, int | float):
            return self._near(given, gold)
        if isinstance(given, Mapping) and isinstance(gold, Mapping):
            one, other = ({str(key): value for key, value in side.items()} for side in (given, gold))
            return one.keys() == other.keys() and all(self.equal(one[key], other[key]) for key in one)
        if isinstance(given, list | tuple) and isinstance(gold, list | tuple):
            return len(given) == len(gold) and all(map(self.equal, given, gold))
        return type(given) is type(gold) and bool(given == gold)

    def _near(self, given: float, gold: float) -> bool:
        if given == gold or (isinstance(given, int) and isinstance(gold, int)):
            return given == gold
        try:
            one, other = float(given), float(gold)
        except OverflowError:
            return False
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return math.isclose(one, other, rel_tol=self.tolerance)


def _normal(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    if text[:1] in ("[", "{"):
        try:
            return read_value(text)
        except NoValue:
            return value
    return value


@lru_cache(maxsize=1024)
def read_gold(gold: str) -> tuple[Any, str | None]:
    """The value, and the key that it stood under. A gold that is no value is a text."""
    try:
        value = read_value(gold)
    except NoValue:
        return gold, None
    if isinstance(value, Mapping) and len(value) == 1:
        (key,) = value
        if key in KEYS:
            return value[key], key
    return value, None


def read_prediction(text: str) -> Any:
    """The value that an answer is, or that stands in it; ``"output": 3`` counts as an object.

    Raises NoValue where there is none.
    """
    for whole in (text, f"{{{text.strip().rstrip(',')}}}"):
        try:
            return read_value(whole)
        except NoValue:
            continue
    for _, value in values(text):
        return value
    raise NoValue("neither JSON nor a literal")


def candidates(given: Any, key: str | None) -> list[Any]:
    """What may be meant: all of it, and before that the value under the gold's key (under either where the
    gold has none) if that key stands alone: who says more than was asked has not settled on one answer."""
    if isinstance(given, Mapping) and len(given) == 1:
        ((said, value),) = given.items()
        if said == key or (key is None and said in KEYS):
            return [value, given]
    return [given]
