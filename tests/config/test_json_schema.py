"""Promises of the JSON schema for editors:

* it accepts and rejects the same configurations as `check_config`, as far as a schema can see their mistakes;
* `treetune schema` prints it, with types, bounds, meanings and defaults.
"""

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
VISIBLE_TO_A_SCHEMA = ("unknown key of", "missing, should be", "missing: `type` says", "should be")


@cache
def validator() -> Draft202012Validator:
    schema = json_schema(root_families())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def paths_of_values(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all keys and items."""
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, name)
        if isinstance(inner, dict | list):
            yield from paths_of_values(inner, (*path, name))


def mutate(data: dict[str, Any], types: list[str], rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Change one key of a configuration: drop, add or misspell it, or give it another value or type."""
    changed = copy.deepcopy(data)
    # The schema doesn't know which Python modules exist.
    *above, key = rng.choice([path for path in paths_of_values(changed) if path[0] != "imports"])
    holder: Any = changed
    for name in above:
        holder = holder[name]
    kind = rng.choice(["drop", "add", "misspell", "value", "value", "number", "type"])
    if kind == "drop":
        holder.pop(key)
    elif kind == "add" and isinstance(holder, dict):
        holder["strange_key"] = rng.choice(OTHER_VALUES)
    elif kind == "misspell" and isinstance(holder, dict):
        holder[f"{key}s"] = holder.pop(key)
    elif kind == "type" and isinstance(holder[key], dict):
        holder[key]["type"] = rng.choice(types)
    elif kind == "number" and type(holder[key]) in (int, float):
        holder[key] = rng.choice([-holder[key], holder[key] * 1000, holder[key] + 0.5, str(holder[key])])
    else:
        holder[key] = copy.deepcopy(rng.choice(OTHER_VALUES))
    return f"{kind} at {'.'.join(map(str, [*above, key]))}", changed


def visible_mistakes(data: dict[str, Any]) -> list[str]:
    """Those that `check_config` tells and that a schema can see."""
    of_this_type = [family for family in root_families() if str(data.get("type")) in family.parts_by_name()]
    try:
        build((of_this_type or root_families())[0], data)
    except ConfigError as error:
        return [
            f"{issue.key}: {issue.what}"
            for issue in error.issues
            if issue.what.startswith(VISIBLE_TO_A_SCHEMA)
            or ("there is no" in issue.what and (issue.key or "").endswith("type"))
        ]
    except ValueError:  # of a part's check, which is asked where no value was wrong by itself
        return []
    return []


def test_schema_and_check_config_agree_on_500_mutations_of_shipped_configurations() -> None:
    rng = random.Random(26)
    types = sorted({name for family in Registrable.__subclasses__() for name in family.parts_by_name()})
    shipped = {name: loaded(name).data for name in SHIPPED}
    assert [name for name, data in shipped.items() if not validator().is_valid(data)] == []
    disagreements, rejected = [], 0
    for _ in range(MUTATIONS):
        name = rng.choice(SHIPPED)
        mutation, data = mutate(shipped[name], types, rng)
        mistakes = visible_mistakes(data)
        is_rejected = not validator().is_valid(data)
        rejected += is_rejected
        if bool(mistakes) != is_rejected:
            errors = [f"{error.json_path}: {error.message[:80]}" for error in validator().iter_errors(data)]
            disagreements.append(f"{name}, {mutation}: check_config {mistakes}, schema {errors}")
    assert not disagreements, "\n".join([f"{len(disagreements)} of {MUTATIONS}:", *disagreements])
    # About half of the mutations are mistakes; with far fewer, agreement would say little.
    assert MUTATIONS / 4 < rejected < MUTATIONS


def test_the_command_prints_types_bounds_meanings_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    shared = json.loads(capsys.readouterr().out)["$defs"]
    credit = next(definition for title, definition in shared.items() if title.endswith(" monte_carlo"))
    samples = credit["properties"]["samples"]
    assert (samples["type"], samples["exclusiveMinimum"], samples["default"]) == ("integer", 0, 9)
    assert samples["description"].startswith("The usual number of continuations of a state")
