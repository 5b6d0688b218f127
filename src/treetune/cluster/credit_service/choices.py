"""Refuses everything in a client's settings that isn't plain data, or that names a part which isn't allowed.

In a configuration file of treetune, a text may be a Jsonnet program with imports, and a part may name a
function, a file or an address. A client of the service gets none of this: texts are names, numbers are small,
and `type` is one of the names below. A test examines the fields of the classes with these names.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from treetune.config.build import build
from treetune.config.registrable import Registrable
from treetune.credit.base import Credit
from treetune.tasks.steps import StepSplitter

ALLOWED_CREDITS = (
    "gigpo", "group", "hicra", "james_stein", "lambda_grpo", "monte_carlo", "optimal_token_baseline",
    "outcome", "probability_mask", "rloo", "tempo", "trace", "tree",
)  # fmt: skip
"""The credits that a client may choose."""
ALLOWED_VALUES = (
    "bisect", "com_mcs", "continuations", "filtered", "rredcot", "rtmc", "sequential", "siblings", "smoothed",
    "topped_up",
)  # fmt: skip
"""The value estimators that a client may choose within a credit."""
ALLOWED_STATES = ("every_n_tokens", "low_probability", "step_boundaries")
"""The rules for states that a client may choose within a credit."""
ALLOWED_STEPS = ("gsm8k_reference", "lines")
"""The rules that split answers into steps."""

MOST_DEPTH_OF_SETTING, MOST_ENTRIES_OF_VALUE, MOST_CHARACTERS_OF_TEXT, LARGEST_NUMBER = 8, 1000, 1000, 100_000
"""The deepest nesting of a setting, the most entries of an object or list, the most characters of a text, and
the largest number. So no single setting can make a request arbitrarily expensive."""

Family = TypeVar("Family", bound=Registrable)


def read_credit(setting: str | Mapping[str, Any], credits: Collection[str] = ALLOWED_CREDITS) -> Credit:
    """Returns the credit that a client has chosen.

    Args:
        credits: The names of the credits that the service allows.

    Raises:
        ConfigError: The configuration is wrong.
        ValueError: The configuration isn't allowed.
    """
    # A credit may contain a value estimator (ALLOWED_VALUES) and a rule for states (ALLOWED_STATES).
    return _read_part(Credit, setting, "credit", (*credits, *ALLOWED_VALUES, *ALLOWED_STATES))


def read_steps(setting: str | Mapping[str, Any]) -> StepSplitter:
    """Returns the rule for steps that a client has chosen; see `read_credit`."""
    return _read_part(StepSplitter, setting, "steps", ALLOWED_STEPS)


def _read_part(
    family: type[Family], setting: str | Mapping[str, Any], name: str, allowed: Collection[str]
) -> Family:
    """Returns the part that a setting describes. The setting is an object, or the part's `type` as a text.

    Args:
        name: What messages call the setting, such as ``credit``.
        allowed: Each `type` that the setting, or an object within it, may have.
    """
    # A client's text is only the name of a part here. In a configuration file, a text may also be a Jsonnet
    # program, and a client must not run programs.
    configuration = {"type": setting} if isinstance(setting, str) else dict(setting)
    _refuse_more_than_plain_data(configuration, name, allowed, depth=0)
    return build(family, configuration, key=(name,))


def _refuse_more_than_plain_data(value: Any, path: str, allowed: Collection[str], depth: int) -> None:
    """Raises ValueError for a value that isn't plain data, exceeds a bound, or chooses a part that isn't in
    `allowed`.

    Args:
        path: The key of the value, for messages: ``credit.values.samples``.
        depth: The number of objects and lists around the value.
    """
    if depth > MOST_DEPTH_OF_SETTING:
        raise ValueError(
            f"{path}: this service takes objects that are nested {MOST_DEPTH_OF_SETTING} deep at most"
        )
    if isinstance(value, str):
        if len(value) > MOST_CHARACTERS_OF_TEXT:
            raise ValueError(
                f"{path} has {len(value)} characters, and this service takes {MOST_CHARACTERS_OF_TEXT}"
            )
    elif isinstance(value, bool) or value is None:
        pass
    elif isinstance(value, int | float):
        if not math.isfinite(value) or abs(value) > LARGEST_NUMBER:
            raise ValueError(f"{path} is {value}, and this service takes numbers up to {LARGEST_NUMBER}")
    elif isinstance(value, Mapping):
        if len(value) > MOST_ENTRIES_OF_VALUE:
            raise ValueError(f"{path} has {len(value)} keys, and this service takes {MOST_ENTRIES_OF_VALUE}")
        part = value.get("type")
        if part is not None and part not in allowed:
            raise ValueError(
                f"{path}.type is {str(part)[:MOST_CHARACTERS_OF_TEXT]!r}, which this service doesn't allow:"
                f" choose one of {', '.join(sorted(allowed))}"
            )
        for key, entry in value.items():
            _refuse_more_than_plain_data(key, f"a key of {path}", allowed, depth)
            _refuse_more_than_plain_data(entry, f"{path}.{key}", allowed, depth + 1)
    elif isinstance(value, list):
        if len(value) > MOST_ENTRIES_OF_VALUE:
            raise ValueError(
                f"{path} has {len(value)} entries, and this service takes {MOST_ENTRIES_OF_VALUE}"
            )
        for number, entry in enumerate(value):
            _refuse_more_than_plain_data(entry, f"{path}.{number}", allowed, depth + 1)
    else:
        raise ValueError(f"{path} is of the type {type(value).__name__}: give JSON")
