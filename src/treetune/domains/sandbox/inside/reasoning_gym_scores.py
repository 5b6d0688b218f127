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
from treetune.domains.sandbox.inside.reading import read_literal, teach

_TUPLE, _PAIRS, _FRACTION = "(tuple)", "(pairs)", "(fraction)"


def packed(value: Any) -> str:
    """Returns a value as JSON, from which `unpacked` makes an equal value of the same types.

    Scorers need tuples, dictionaries whose keys aren't texts, and fractions, which JSON doesn't have. Raises
    TypeError for any other type.
    """
    return json.dumps(_marked(value))


def unpacked(text: str) -> Any:
    """Returns the value that `packed` has written as this text."""
    return json.loads(text, object_hook=_unmarked)


def _marked(value: Any) -> Any:
    """Returns a value in JSON's types: ``{"(tuple)": [1, 2]}`` for (1, 2), ``{"(pairs)": [[1, 2]]}`` for
    {1: 2}."""
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
    """Returns the value of a JSON object of `_marked`. The values in it have been unmarked already."""
    if _TUPLE in value:
        return tuple(value[_TUPLE])
    if _PAIRS in value:
        return dict(value[_PAIRS])
    if _FRACTION in value:
        return Fraction(value[_FRACTION])
    return value


def as_settings(of_settings: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for a data set's settings, which are fields of the dataclass `of_settings`.

    If a setting's default is a member of an enumeration, the text in `values` becomes a member of it, too.
    Raises ValueError if the enumeration has no member with this value.
    """
    defaults = {setting.name: setting.default for setting in dataclasses.fields(of_settings)}
    settings = dict(values)
    for name, value in values.items():
        if isinstance(default := defaults.get(name), enum.Enum):
            settings[name] = type(default)(value)
    return settings


PACKAGE = "reasoning_gym"


def prepare() -> Callable[[Mapping[str, Any]], tuple[Callable[[str], float], bool]]:
    """Returns the function `MakeScore` of `scoring`."""
    _folder()  # raises if the library is missing, before any answer is scored
    return _scorer_of


def _scorer_of(problem: Mapping[str, Any]) -> tuple[Callable[[str], float], bool]:
    """Returns the function that scores answers to a problem, and whether it is proven to only compare them.

    The problem has the ``dataset``, its ``config`` and the ``entry`` (both as `packed` makes them), and the
    ``question``.
    """
    data_set = _data_set(problem["dataset"], problem["config"])
    entry = {"question": problem["question"], **unpacked(problem["entry"])}
    key = (problem["dataset"], problem["config"])
    if key not in _ONLY_COMPARES:
        teach(PACKAGE)  # replaces `eval` and `exec` in the library's modules
        _ONLY_COMPARES[key] = _only_compares(data_set)
        # A scorer imports modules and fills caches when it is first used. This happens here, so that children
        # inherit them. The score doesn't matter, nor does an error: some data sets have no answers to score.
        with contextlib.suppress(Exception):
            data_set.score_answer(entry["answer"], entry)

    def score(answer: str) -> float:
        return float(data_set.score_answer(answer, entry))

    return score, _ONLY_COMPARES[key]


_ONLY_COMPARES: dict[tuple[str, str], bool] = {}
"""Whether scorers are proven to only compare answers, by data sets and their settings."""


def _only_compares(data_set: Any) -> bool:
    """Returns whether the scorer only compares answers, given that our reader replaces `eval`."""
    try:
        prove_only_compares(data_set.score_answer, PACKAGE, harmless=(read_literal,))
    except NotProven:
        return False
    return True


@lru_cache(maxsize=256)
def _data_set(name: str, config: str) -> Any:
    """Makes the library's data set with the problems' settings, which some scorers use."""
    factory = import_data_set(modules_of_data_sets()[name])
    kind, of_settings = factory.DATASETS[name]
    return kind(config=of_settings(**as_settings(of_settings, unpacked(config))))


# The library's modules

_NAME = re.compile(r"^DATASET_NAME\s*=\s*[\"'](\w+)[\"']", re.MULTILINE)
_REGISTERED = re.compile(r"^register_dataset\(\s*(?:[\"'](\w+)[\"'])?", re.MULTILINE)

COMPOSITE = "composite"
"""The library registers this mixture of data sets as a data set."""


@lru_cache(maxsize=1)
def _folder() -> Path:
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
    folder = _folder()
    modules = {}
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for registered in _REGISTERED.finditer(text):
            # The file registers either a text or its constant DATASET_NAME.
            named = _NAME.search(text)
            name = registered[1] or (named[1] if named else None)
            if name is not None and name != COMPOSITE:  # `COMPOSITE` is only a mixture of data sets
                modules[name] = ".".join(["reasoning_gym", *file.relative_to(folder).with_suffix("").parts])
    return modules


def import_data_set(name: str) -> Any:
    """Imports a data set's module, and returns the library's registry, which then contains the data set.

    The packages around the module are replaced by empty ones, since to import them takes seconds, and takes
    memory, which makes each fork slower. If the module needs something from these packages, the whole library
    is imported instead.
    """
    folder = _folder()
    steps = name.split(".")[:-1]
    for count in range(1, len(steps) + 1):
        package = types.ModuleType(".".join(steps[:count]))
        package.__path__ = [str(folder.joinpath(*steps[1:count]))]
        sys.modules.setdefault(package.__name__, package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn about the syntax of some imported modules
        try:
            importlib.import_module(name)
        except ImportError:
            # First the empty packages are removed, and with them what was imported into them.
            for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "reasoning_gym"]:
                del sys.modules[loaded]
            importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory")
