"""The texts of keys, which `treetune describe` prints, speak of values as configurations have them."""

from __future__ import annotations

import re

import treetune.parts  # noqa: F401  (registers the parts)
from treetune.config.reference import find_describable_entries

ABOUT_PYTHON = {("treetune.data.pipelines.PrepareData", "expand")}
"""Texts about what a function in Python returns."""


def test_a_key_without_a_value_is_null_as_in_jsonnet_and_not_none() -> None:
    speaking_of_none = []
    for entries in find_describable_entries().values():
        for entry in entries:
            for key in entry.keys:
                if (entry.qualified_name, key.name) in ABOUT_PYTHON:
                    continue
                if re.search(r"\bNone\b", key.meaning):
                    speaking_of_none.append(f"{entry.title}: {key.name}: {key.meaning}")
    assert sorted(set(speaking_of_none)) == []
