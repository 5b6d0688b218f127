"""A program that makes problems with reasoning_gym. It reads a request and writes the problems as JSON.

The task `reasoning_gym` starts it. There are two reasons for a separate process. Some data sets' problems
depend on the order of sets, which is the same in every run with a fixed ``PYTHONHASHSEED``. And reading a
configuration needn't import the library.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override

from treetune.config.errors import did_you_mean
from treetune.domains.sandbox.inside.reasoning_gym_scores import import_data_set, make_settings, pack
from treetune.processes.worker import die_with_parent
from treetune.seeds import derive_seed

CHUNK_SIZE = 500
"""The number of problems with one seed. The library makes problem i of a data set with seed + i."""

_MOST_VAIN_DRAWS = 1000
"""The number of consecutive draws without a new problem after which a data set counts as exhausted."""

_SET_BY_TASK = {
    "seed": "the task's own `seed`",
    "size": "the task's `train_size`, `validation_size` and `test_size`",
}


class Refused(ValueError):
    """The library doesn't accept some settings. The arguments of this error are the task's key, the fault and
    the remedy."""

    @override
    def __str__(self) -> str:
        return ": ".join(self.args[1:])


def main() -> None:
    """Reads a request from standard input, and writes its problems or ``{"refused": […]}`` to standard
    output."""
    die_with_parent(int(sys.argv[1]))  # the argument is the parent's process ID
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints goes to the error stream
    warnings.simplefilter("ignore")
    request = json.load(sys.stdin)
    try:
        result = make_problems(request)
    except Refused as error:
        result = {"refused": error.args}
    json.dump(result, answer)
    answer.flush()


def make_problems(request: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the problems of the request's splits, and collects the settings that its scorer needs.

    Each question occurs once, in only one split. The settings are those that differ from the defaults.
    Example: for a request with ``"config": {"max_animals": 3}, "splits": [["train", 2]]`` the result is
    ``{"splits": {"train": [row, row]}, "config": '{"max_animals": 3, "seed": 0}'}``. Raises Refused.
    """
    data_set_class, settings = open_data_set(request)
    seen_questions: set[str] = set()
    splits: dict[str, list[dict[str, str]]] = {}
    for split, count in request["splits"]:
        rows = _draw_problems(data_set_class, settings, request, split)
        splits[split] = _take_distinct(rows, seen_questions, request["dataset"], split, count)
    defaults = type(settings)()
    changed_settings = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value != getattr(defaults, field.name):
            changed_settings[field.name] = value
    # The scorer makes a data set with these settings only to call its scoring, for which any seed will do.
    return {"splits": splits, "config": pack(changed_settings | {"seed": 0})}


def open_data_set(request: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the data set's class and its settings. Raises Refused."""
    name, config = request["dataset"], request["config"]
    factory = import_data_set(request["module"])
    data_set_class, settings_class = factory.DATASETS[name]
    keys = [field.name for field in dataclasses.fields(settings_class) if field.name not in _SET_BY_TASK]
    for key in config:
        if key in _SET_BY_TASK:
            raise Refused("config", f"{key!r} is {_SET_BY_TASK[key]}", f"leave config.{key} out")
        if key not in keys:
            raise Refused("config", f"data set {name!r} has no setting {key!r}", did_you_mean(key, keys))
    try:
        settings = _settings_at_level(factory.CURRICULA.get(name), settings_class, request)
        settings = dataclasses.replace(
            settings, **make_settings(settings_class, config), seed=0, size=CHUNK_SIZE
        )
        data_set_class(config=settings)  # raises where the settings don't fit each other
    except Refused:
        raise
    except Exception as error:
        fault = f"reasoning_gym doesn't take these settings of {name!r}: {str(error) or type(error).__name__}"
        raise Refused("config", fault, "change the settings that it names") from error
    return data_set_class, settings


def _settings_at_level(curriculum_class: Any, settings_class: Any, request: Mapping[str, Any]) -> Any:
    """Returns the settings at the requested levels, or the data set's defaults if the request has no levels.

    The request's `level` is for all attributes of the curriculum, and its `levels` has those of some
    attributes by their names. Raises Refused.
    """
    name, level, levels = request["dataset"], request["level"], request["levels"]
    if level is None and not levels:
        return settings_class()
    key = "level" if level is not None else "levels"
    if curriculum_class is None:
        raise Refused(key, f"data set {name!r} has no levels", "say how hard it is in config")
    curriculum = curriculum_class()
    attributes = curriculum.attributes
    for attribute, attribute_level in levels.items():
        if attribute not in attributes:
            fault = f"data set {name!r} has no levels of {attribute!r}"
            raise Refused("levels", fault, did_you_mean(attribute, list(attributes)))
        _check_level("levels", attribute, attribute_level, len(attributes[attribute].levels))
    most_levels = max(len(definition.levels) for definition in attributes.values())
    if level is not None:
        _check_level("level", name, level, most_levels)
    for attribute, definition in attributes.items():
        attribute_level = levels.get(attribute, level)
        if attribute_level is not None:
            # `level` is for all attributes. An attribute with fewer levels gets its highest one.
            highest = len(definition.levels) - 1
            curriculum.set_attr_level(attribute, min(attribute_level, highest))
    # Imported here, since the task `reasoning_gym` imports this module even where the library is missing.
    base = importlib.import_module("reasoning_gym.coaching.base_curriculum")
    # The context says how a level becomes a setting's range.
    context = base.DefaultCurriculumContext(mode=base.RangeAttributeMode(request["level_mode"]))
    # With `{}`, settings that are no attribute of the curriculum keep their defaults.
    return curriculum.generate_configuration({}, context=context)


def _check_level(key: str, name: str, level: int, count: int) -> None:
    """Raises Refused for a level that isn't one of the `count` of a data set, or of its attribute."""
    if not 0 <= level < count:
        raise Refused(key, f"{name!r} has the levels 0 to {count - 1}, not {level}", "choose one of them")


def _draw_problems(
    data_set_class: Any, settings: Any, request: Mapping[str, Any], split: str
) -> Iterator[dict[str, str] | str]:
    """Yields infinitely many problems. If the library fails to make one, it yields the error's text.

    A data set of the library has `CHUNK_SIZE` problems. After each such chunk, a data set with another seed
    follows.
    """
    for chunk in itertools.count():
        # Some data sets draw with numpy, whose seeds have 32 bits. `seed + index` has to fit, too.
        seed = derive_seed(request["seed"], request["dataset"], split, chunk) % 2**31
        data_set = data_set_class(config=dataclasses.replace(settings, seed=seed))
        for index in range(CHUNK_SIZE):
            _seed_globals(seed + index)
            try:
                entry = data_set[index]
            except Exception as error:
                yield repr(error)
                continue
            for_scorer = {key: value for key, value in entry.items() if key != "question"}
            gold = entry["answer"]
            yield {
                "question": entry["question"],
                "gold": "" if gold is None else str(gold),
                "entry": pack(for_scorer),
            }


def _seed_globals(seed: int) -> None:
    """Seeds the global random generators, which some data sets use."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _take_distinct(
    rows: Iterator[dict[str, str] | str], seen_questions: set[str], name: str, split: str, count: int
) -> list[dict[str, str]]:
    """Draws rows until there are `count` with new questions, which are added to `seen_questions`.

    Raises Refused after `_MOST_VAIN_DRAWS` consecutive draws that failed or repeated a question.
    """
    problems: list[dict[str, str]] = []
    vain_draws, failure = 0, ""
    while len(problems) < count:
        row = next(rows)
        if isinstance(row, str):  # the error of a draw that failed
            failure = row
        elif row["question"] not in seen_questions:
            vain_draws = 0
            seen_questions.add(row["question"])
            problems.append(row)
            continue
        vain_draws += 1
        if vain_draws == _MOST_VAIN_DRAWS:
            fault = f"{count} problems are asked for, and {name!r} gave only {len(problems)} new ones"
            fault += f"; the last failure was {failure}" if failure else ""
            raise Refused(f"{split}_size", fault, "ask for fewer, or for harder ones")
    return problems


if __name__ == "__main__":
    main()
