"""The scorers of reasoning_gym's data sets, for `scoring`; and how problems are packed for them."""

from __future__ import annotations

import dataclasses
import enum
import json
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

_TUPLE, _PAIRS, _FRACTION = "(tuple)", "(pairs)", "(fraction)"


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


def as_settings(of_settings: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for a data set's settings, with texts made into enumerations where the settings have
    these.

    Raises ValueError for a text that such an enumeration doesn't have.
    """
    defaults = {setting.name: setting.default for setting in dataclasses.fields(of_settings)}
    made = dict(values)
    for name, value in values.items():
        if isinstance(default := defaults.get(name), enum.Enum):
            made[name] = type(default)(value)
    return made


def prepare() -> Callable[[Mapping[str, Any]], Callable[[str], float]]:
    """Imports the library, and returns what makes the scorer of a problem."""
    _library()
    return _scorer_of


def _scorer_of(problem: Mapping[str, Any]) -> Callable[[str], float]:
    data_set = _data_set(problem["dataset"], problem["config"])
    entry = {"question": problem["question"], **unpacked(problem["entry"])}

    def score(answer: str) -> float:
        return float(data_set.score_answer(answer, entry))

    return score


@lru_cache(maxsize=64)
def _data_set(name: str, config: str) -> Any:
    """Makes the library's object whose scorer it is, with the problems' settings: some scorers look at
    them."""
    kind, of_settings = _library().factory.DATASETS[name]
    return kind(config=of_settings(**as_settings(of_settings, unpacked(config))))


def _library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # syntax that newer Pythons warn of, in what the library imports
        import reasoning_gym
        import reasoning_gym.factory
    return reasoning_gym
