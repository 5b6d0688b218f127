"""Makes problems with reasoning_gym: a request on standard input, an answer on standard output.

Run as ``python -m treetune.domains.puzzles.reasoning_gym_maker`` by the task, never by hand. A
process, because the order of sets goes into some data sets' problems: with a fixed ``PYTHONHASHSEED`` they
are the same in every run. And because a second of imports is then not paid by whoever reads a configuration.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override

from treetune.config.errors import did_you_mean
from treetune.domains.sandbox.inside.reasoning_gym_scores import as_settings, import_data_set, packed
from treetune.processes.worker import die_with_parent
from treetune.seeds import derive_seed

CHUNK = 500
"""Problems of one seed. The library makes problem i of a data set from seed + i."""

_VAIN = 1000
"""Draws in a row without a new problem after which a data set is taken to have no more."""

_OWN = {"seed": "the task's own `seed`", "size": "the task's `train_size`, `validation_size` and `test_size`"}


class Refused(ValueError):
    """Settings that the library doesn't take. The arguments: the key of the task, the fault, the remedy."""

    @override
    def __str__(self) -> str:
        return ": ".join(self.args[1:])


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints goes to the error stream
    warnings.simplefilter("ignore")
    request = json.load(sys.stdin)
    try:
        result = answered(request)
    except Refused as error:
        result = {"refused": error.args}
    json.dump(result, answer)
    answer.flush()


def answered(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the problems of the request's splits, no question twice in any of them, and the settings that
    differ from the data set's own, for its scorer."""
    kind, settings = opened(request)
    seen: set[str] = set()
    splits: dict[str, list[dict[str, str]]] = {}
    for split, count in request["splits"]:
        rows = _rows(kind, settings, request, split)
        splits[split] = _distinct(rows, seen, request["dataset"], split, count)
    own = type(settings)()
    names = [field.name for field in dataclasses.fields(settings)]
    changed = {name: value for name in names if (value := getattr(settings, name)) != getattr(own, name)}
    return {"splits": splits, "config": packed(changed | {"seed": 0})}


def opened(request: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the data set's class and its settings. Raises Refused."""
    name, config = request["dataset"], dict(request["config"])
    factory = import_data_set(request["module"])
    kind, of_settings = factory.DATASETS[name]
    known = [field.name for field in dataclasses.fields(of_settings) if field.name not in _OWN]
    for key in config:
        if key in _OWN:
            raise Refused("config", f"{key!r} is {_OWN[key]}", f"leave config.{key} out")
        if key not in known:
            raise Refused("config", f"data set {name!r} has no setting {key!r}", did_you_mean(key, known))
    try:
        settings = _at_level(factory.CURRICULA.get(name), of_settings, request)
        settings = dataclasses.replace(settings, **as_settings(of_settings, config), seed=0, size=CHUNK)
        kind(config=settings)  # which looks at its settings
    except Refused:
        raise
    except Exception as error:
        what = f"reasoning_gym doesn't take these settings of {name!r}: {error or type(error).__name__}"
        raise Refused("config", what, "mend what it names") from error
    return kind, settings


def _at_level(of_curriculum: Any, of_settings: Any, request: Mapping[str, Any]) -> Any:
    """Returns the settings at the requested levels, by default the data set's own."""
    name, level, levels = request["dataset"], request["level"], request["levels"]
    if level is None and not levels:
        return of_settings()
    key = "level" if level is not None else "levels"
    if of_curriculum is None:
        raise Refused(key, f"data set {name!r} has no levels", "say how hard it is in config")
    curriculum = of_curriculum()
    attributes = curriculum.attributes
    for attribute, wanted in levels.items():
        if attribute not in attributes:
            what = f"data set {name!r} has no levels of {attribute!r}"
            raise Refused("levels", what, did_you_mean(attribute, list(attributes)))
        _check_level("levels", attribute, wanted, len(attributes[attribute].levels))
    highest = max(len(one.levels) for one in attributes.values())
    if level is not None:
        _check_level("level", name, level, highest)
    for attribute, definition in attributes.items():
        wanted = levels.get(attribute, level)
        if wanted is not None:
            curriculum.set_attr_level(attribute, min(wanted, len(definition.levels) - 1))
    # From reasoning_gym.coaching, which imports nothing heavy.
    base = importlib.import_module("reasoning_gym.coaching.base_curriculum")
    context = base.DefaultCurriculumContext(mode=base.RangeAttributeMode(request["level_mode"]))
    return curriculum.generate_configuration({}, context=context)


def _check_level(key: str, what: str, wanted: int, there: int) -> None:
    if not 0 <= wanted < there:
        raise Refused(key, f"{what!r} has the levels 0 to {there - 1}, not {wanted}", "choose one of them")


def _rows(kind: Any, settings: Any, request: Mapping[str, Any], split: str) -> Iterator[dict[str, str] | str]:
    """Yields problem after problem, without end; a text where the library fails to make one."""
    chunk = 0
    while True:
        # numpy, which some data sets draw with, takes 32 bits.
        seed = derive_seed(request["seed"], request["dataset"], split, chunk) % 2**31
        data_set = kind(config=dataclasses.replace(settings, seed=seed))
        for index in range(CHUNK):
            _seed_globals(seed + index)
            try:
                entry = data_set[index]
            except Exception as error:
                yield repr(error)
                continue
            kept = {key: value for key, value in entry.items() if key != "question"}
            gold = entry["answer"]
            yield {
                "question": entry["question"],
                "gold": "" if gold is None else str(gold),
                "entry": packed(kept),
            }
        chunk += 1


def _seed_globals(seed: int) -> None:
    """Seeds the generators of the process, from which some data sets draw."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _distinct(
    rows: Iterator[dict[str, str] | str], seen: set[str], name: str, split: str, count: int
) -> list[dict[str, str]]:
    kept: list[dict[str, str]] = []
    vain, failure = 0, ""
    while len(kept) < count:
        row = next(rows)
        if isinstance(row, str) or row["question"] in seen:
            vain += 1
            failure = row if isinstance(row, str) else failure
            if vain == _VAIN:
                what = f"{count} problems are asked for, and {name!r} gave only {len(kept)} new ones"
                what += f"; the last failure was {failure}" if failure else ""
                raise Refused(f"{split}_size", what, "ask for fewer, or for harder ones")
            continue
        vain = 0
        seen.add(row["question"])
        kept.append(row)
    return kept


if __name__ == "__main__":
    main()
