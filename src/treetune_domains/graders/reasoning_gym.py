"""The scorers of reasoning_gym's data sets, each for its own problems."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

from annotated_types import MinLen

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import ANSWER, ANSWER_END, last_between
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

_TUPLE, _PAIRS, _FRACTION = "(tuple)", "(pairs)", "(fraction)"


@Grader.register("reasoning_gym")
@dataclass(frozen=True, kw_only=True)
class ReasoningGymGrader(Grader):
    """Gives the score of the library's scorer of the problem's data set, from 0 to 1; 1 is correct.

    The answer stands between the last `opening` and the `closing` behind it, across newlines, and
    without the spaces around it.

    An empty answer is ``no_answer``, also where a scorer would give it a hundredth. Where a scorer
    raises on what an answer says, the answer is wrong, and the message says what was raised.
    """

    opening: Annotated[str, MinLen(1)] = ANSWER
    """The tag before an answer."""
    closing: Annotated[str, MinLen(1)] = ANSWER_END
    """The tag behind it."""
    unclosed: bool = False
    """Takes what follows the last `opening`, up to a `closing` if there is one: for answers that a stop
    string ends, which graders don't see."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is no part of an answer; the default knows other models' tags, too
    (`tasks.thoughts`). null: all of a response counts."""

    def prepare(self) -> None:
        _library()

    def extract(self, response: str, problem: Problem) -> str | None:
        return last_between(response, self.opening, self.closing, unclosed=self.unclosed)

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        data_set = _data_set(problem.data["dataset"], problem.data["config"])
        entry = {"question": problem.data["question"], **unpacked(problem.data["entry"])}
        try:
            score = float(data_set.score_answer(extracted, entry))
        except Exception as error:
            return Grade(reward=0.0, outcome="ok", message=f"the scorer raised {error!r}")
        if not math.isfinite(score):
            return Grade(reward=0.0, outcome="ok", message=f"the scorer said {score}")
        return Grade(reward=score, outcome="ok")


def packed(value: Any) -> str:
    """Packs a value into one text, from which `unpacked` makes the same: scorers compare with more than JSON.

    Beside JSON's these are tuples, objects with other keys than texts, and fractions. Raises TypeError for
    anything else.
    """
    return json.dumps(_marked(value))


def unpacked(text: str) -> Any:
    return json.loads(text, object_hook=_unmarked)


def _marked(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_marked(inner) for inner in value]}
    if isinstance(value, list):
        return [_marked(inner) for inner in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _marked(inner) for key, inner in value.items()}
        return {_PAIRS: [[_marked(key), _marked(inner)] for key, inner in value.items()]}
    if isinstance(value, Fraction):
        return {_FRACTION: str(value)}
    return value


def _unmarked(value: dict[str, Any]) -> Any:
    if _TUPLE in value:
        return tuple(value[_TUPLE])
    if _PAIRS in value:
        return dict(value[_PAIRS])
    if _FRACTION in value:
        return Fraction(value[_FRACTION])
    return value


@lru_cache(maxsize=64)
def _data_set(name: str, config: str) -> Any:
    """Makes the library's object whose scorer it is, with the problems' settings: some scorers look at
    them."""
    data_sets = _library().factory.DATASETS
    kind, of_settings = data_sets[name]
    return kind(config=of_settings(**as_settings(of_settings, unpacked(config))))


def as_settings(of_settings: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for a data set's settings, with texts made into enumerations where the settings have
    these.

    Raises ValueError for a text that such an enumeration doesn't have.
    """
    defaults = {one.name: one.default for one in dataclasses.fields(of_settings)}
    made = dict(values)
    for name, value in values.items():
        if isinstance(default := defaults.get(name), enum.Enum):
            made[name] = type(default)(value)
    return made


def _library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # syntax that newer Pythons warn of, in what the library imports
        import reasoning_gym
        import reasoning_gym.factory
    return reasoning_gym
