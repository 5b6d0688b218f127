"""The scorers of reasoning_gym's data sets for `scoring`, and the JSON form of their problems."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.util
import json
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from treetune.domains.sandbox.inside.comparing import NotProven, prove_only_compares
from treetune.domains.sandbox.inside.reading import read_literal, replace_eval_and_exec

_TUPLE_KEY, _PAIRS_KEY, _FRACTION_KEY = "(tuple)", "(pairs)", "(fraction)"


def pack(value: Any) -> str:
    """Returns a value as JSON, from which `unpack` makes an equal value of the same types.

    Besides JSON's types, scorers need tuples, fractions, and dictionaries whose keys aren't texts. Raises
    TypeError for any other type.
    """
    return json.dumps(_mark_types(value))


def unpack(text: str) -> Any:
    """Returns the value that `pack` has written as this text."""
    return json.loads(text, object_hook=_restore_type)


def _mark_types(value: Any) -> Any:
    """Returns a value in JSON's types: ``{"(tuple)": [1, 2]}`` for (1, 2), ``{"(pairs)": [[1, 2]]}`` for
    {1: 2}."""
    if isinstance(value, tuple):
        return {_TUPLE_KEY: [_mark_types(item) for item in value]}
    if isinstance(value, list):
        return [_mark_types(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _mark_types(item) for key, item in value.items()}
        return {_PAIRS_KEY: [[_mark_types(key), _mark_types(item)] for key, item in value.items()]}
    if isinstance(value, Fraction):
        return {_FRACTION_KEY: str(value)}
    return value


def _restore_type(value: dict[str, Any]) -> Any:
    """Returns the value of a JSON object of `_mark_types`. The values in it have their types already."""
    if _TUPLE_KEY in value:
        return tuple(value[_TUPLE_KEY])
    if _PAIRS_KEY in value:
        return dict(value[_PAIRS_KEY])
    if _FRACTION_KEY in value:
        return Fraction(value[_FRACTION_KEY])
    return value


def make_settings(settings_class: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for a data set's settings, which are fields of the dataclass `settings_class`.

    If a setting's default is a member of an enumeration, the text in `values` becomes a member of it, too.
    Raises ValueError if the enumeration has no member with this value.
    """
    defaults = {setting.name: setting.default for setting in dataclasses.fields(settings_class)}
    settings = dict(values)
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(default, enum.Enum):
            settings[name] = type(default)(value)
    return settings


PACKAGE = "reasoning_gym"


def prepare() -> Callable[[Mapping[str, Any]], tuple[Callable[[str], float], bool]]:
    """Returns the function `MakeScore` of `scoring`."""
    _library_folder()  # raises if the library is missing, before any answer is scored
    return _scorer_of


def _scorer_of(problem: Mapping[str, Any]) -> tuple[Callable[[str], float], bool]:
    """Returns the function that scores answers to a problem, and whether it is proven to only compare them.

    The problem has the ``dataset``, its ``config`` and the ``entry`` (both as `pack` makes them), and the
    ``question``.
    """
    data_set = _make_data_set(problem["dataset"], problem["config"])
    entry = {"question": problem["question"], **unpack(problem["entry"])}
    key = (problem["dataset"], problem["config"])
    if key not in _PROVEN_TO_COMPARE:
        replace_eval_and_exec(PACKAGE)  # replaces `eval` and `exec` in the library's modules
        _PROVEN_TO_COMPARE[key] = _is_proven_to_compare(data_set)
        # A scorer imports modules and fills caches when it is first used. This happens here, so that children
        # inherit them. The score doesn't matter, nor does an error: some data sets have no answers to score.
        with contextlib.suppress(Exception):
            data_set.score_answer(entry["answer"], entry)

    def score(answer: str) -> float:
        return float(data_set.score_answer(answer, entry))

    return score, _PROVEN_TO_COMPARE[key]


_PROVEN_TO_COMPARE: dict[tuple[str, str], bool] = {}
"""Whether scorers are proven to only compare answers, by data sets and their settings."""


def _is_proven_to_compare(data_set: Any) -> bool:
    """Returns whether the scorer only compares answers, given that our reader replaces `eval`."""
    try:
        prove_only_compares(data_set.score_answer, PACKAGE, harmless=(read_literal,))
    except NotProven:
        return False
    return True


@lru_cache(maxsize=256)
def _make_data_set(name: str, config: str) -> Any:
    """Makes the library's data set with the problems' settings, which some scorers use."""
    factory = import_data_set(modules_of_data_sets()[name])
    kind, settings_class = factory.DATASETS[name]
    return kind(config=settings_class(**make_settings(settings_class, unpack(config))))


# The library's modules

_DATASET_NAME = re.compile(r"^DATASET_NAME\s*=\s*[\"'](\w+)[\"']", re.MULTILINE)
_REGISTRATION = re.compile(r"^register_dataset\(\s*(?:[\"'](\w+)[\"'])?", re.MULTILINE)

COMPOSITE = "composite"
"""The library registers this mixture of data sets as a data set."""


@lru_cache(maxsize=1)
def _library_folder() -> Path:
    """Returns the library's folder. Raises ModuleNotFoundError if it isn't installed."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the package reasoning_gym is not installed")
    return Path(spec.submodule_search_locations[0])


@lru_cache(maxsize=1)
def modules_of_data_sets() -> Mapping[str, str]:
    """Returns the module of each data set. It searches the library's files, since importing takes seconds.

    Raises ModuleNotFoundError if the library isn't installed.
    """
    folder = _library_folder()
    modules = {}
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        constant = _DATASET_NAME.search(text)  # ``DATASET_NAME = "zebra"``
        for registration in _REGISTRATION.finditer(text):
            name: str | None = registration[1]  # ``register_dataset("zebra", …)``
            if name is None and constant is not None:  # ``register_dataset(DATASET_NAME, …)``
                name = constant[1]
            if name is not None and name != COMPOSITE:  # `COMPOSITE` is only a mixture of data sets
                modules[name] = ".".join(["reasoning_gym", *file.relative_to(folder).with_suffix("").parts])
    return modules


def import_data_set(name: str) -> Any:
    """Imports a data set's module, and returns the library's registry, which then contains the data set.

    The packages around the module are replaced by empty ones. To import them would take seconds, and more
    memory would make each fork slower. If the module needs something from these packages, the whole library
    is imported instead.
    """
    # For the module reasoning_gym.logic.zebra, these are the packages reasoning_gym and reasoning_gym.logic.
    folder = _library_folder()
    _, *subpackages, _ = name.split(".")
    for count in range(len(subpackages) + 1):
        package = types.ModuleType(".".join(["reasoning_gym", *subpackages[:count]]))
        package.__path__ = [str(folder.joinpath(*subpackages[:count]))]
        sys.modules.setdefault(package.__name__, package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn about the syntax of some imported modules
        try:
            importlib.import_module(name)
        except ImportError:
            # First the empty packages are removed, and with them what was imported into them.
            loaded_names = [loaded for loaded in sys.modules if loaded.partition(".")[0] == "reasoning_gym"]
            for loaded in loaded_names:
                del sys.modules[loaded]
            importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory")
