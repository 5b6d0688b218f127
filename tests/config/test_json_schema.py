"""The schema that editors are given says of a configuration what `check_config` says, as far as one can."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.shipped import loaded
from treetune.cli.command import root_families
from treetune.config.build import build
from treetune.config.reference import json_schema
from treetune.config.registrable import Registrable
from treetune.exceptions import ConfigError
from treetune.main import main

MUTATIONS = 500
SHIPPED = (
    "countdown/tiny_grpo", "data_pipelines/estimate_difficulty", "data_pipelines/filter_data",
    "domains/tiny_grpo", "equal_cost/slips", "multi_turn/maze", "polIter_rho1bSft2_vineppo_MATH",
    "quickstart/dpo", "quickstart/ppo", "quickstart/restem", "quickstart/sft", "quickstart/tree",
    "quickstart/vineppo", "sft_deepseek7b_GSM8K", "tables/quickstart_methods", "tables/vineppo_k",
    "threadweaver/parallel",
)  # fmt: skip
OTHER_VALUES = (None, True, 0, -1, 1, 0.5, 10**9, "", "strange", "3", [], ["a"], {}, {"type": "strange"})
SEEN_BY_A_SCHEMA = ("unknown key of", "missing, should be", "missing: `type` says", "should be")


@cache
def validator() -> Draft202012Validator:
    schema = json_schema(root_families())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all keys and items."""
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, name)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, name))


def mutated(data: dict[str, Any], types: list[str], rng: random.Random) -> tuple[str, dict[str, Any]]:
    """One change of a configuration: a key goes, comes, is misspelt, or gets another value or type."""
    changed = copy.deepcopy(data)
    # What is imported is Python's, and what stands below a task of a mixture may be anybody's.
    *above, last = rng.choice([path for path in places(changed) if path[0] != "imports"])
    holder: Any = changed
    for name in above:
        holder = holder[name]
    kind = rng.choice(["drop", "add", "misspell", "value", "value", "number", "type"])
    if kind == "drop":
        holder.pop(last)
    elif kind == "add" and isinstance(holder, dict):
        holder["strange_key"] = rng.choice(OTHER_VALUES)
    elif kind == "misspell" and isinstance(holder, dict):
        holder[f"{last}s"] = holder.pop(last)
    elif kind == "type" and isinstance(holder[last], dict):
        holder[last]["type"] = rng.choice(types)
    elif kind == "number" and type(holder[last]) in (int, float):
        holder[last] = rng.choice([-holder[last], holder[last] * 1000, holder[last] + 0.5, str(holder[last])])
    else:
        holder[last] = copy.deepcopy(rng.choice(OTHER_VALUES))
    return f"{kind} at {'.'.join(map(str, [*above, last]))}", changed


def mistakes(data: dict[str, Any]) -> list[str]:
    """Those that `check_config` tells and that a schema can see."""
    known = [family for family in root_families() if str(data.get("type")) in family.registered()]
    try:
        build((known or root_families())[0], data)
    except ConfigError as error:
        return [
            f"{issue.key}: {issue.what}"
            for issue in error.issues
            if issue.what.startswith(SEEN_BY_A_SCHEMA)
            or ("there is no" in issue.what and (issue.key or "").endswith("type"))
        ]
    except ValueError:  # of a part's check, which is asked where no value was wrong by itself
        return []
    return []


def test_schema_and_check_config_agree_on_500_mutations_of_shipped_configurations() -> None:
    rng = random.Random(26)
    types = sorted({name for family in Registrable.__subclasses__() for name in family.registered()})
    shipped = {name: loaded(name).data for name in SHIPPED}
    assert [name for name, data in shipped.items() if not validator().is_valid(data)] == []
    apart, wrong = [], 0
    for _ in range(MUTATIONS):
        name = rng.choice(SHIPPED)
        what, data = mutated(shipped[name], types, rng)
        told, seen = mistakes(data), not validator().is_valid(data)
        wrong += seen
        if bool(told) != seen:
            errors = [f"{one.json_path}: {one.message[:80]}" for one in validator().iter_errors(data)]
            apart.append(f"{name}, {what}: check_config {told}, schema {errors}")
    assert not apart, "\n".join([f"{len(apart)} of {MUTATIONS}:", *apart])
    assert MUTATIONS / 4 < wrong < MUTATIONS, "half of the mutations are mistakes"


def test_the_command_prints_types_bounds_meanings_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    shared = json.loads(capsys.readouterr().out)["$defs"]
    credit = next(one for title, one in shared.items() if title.endswith(" monte_carlo"))
    samples = credit["properties"]["samples"]
    assert (samples["type"], samples["exclusiveMinimum"], samples["default"]) == ("integer", 0, 9)
    assert samples["description"].startswith("Continuations of a state")
