"""Promises about wrong configurations, on a sample of those of tests/endurance/wrong_configurations.py:

* each is refused with key, file and remedy;
* there are enough of every class, and the script tells a clear message from an unclear one.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.endurance import wrong_configurations as wrong

OF_EACH_CLASS = 3


@pytest.mark.parametrize("kind", wrong.CLASSES)
def test_wrong_configurations_are_refused_with_key_file_and_remedy(kind: str, tmp_path: Path) -> None:
    """The seed is fixed, so that a failure can be repeated; the script tries all of them."""
    sample = random.Random(f"{kind} 10").sample(wrong.mutations([kind]), OF_EACH_CLASS)
    for number, mutation in enumerate(sample):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = wrong.outcome(mutation, folder)
        assert outcome.verdict == "refused", f"{mutation.label}\n{outcome.message}"


def test_there_are_500_wrong_configurations_and_20_of_each_class() -> None:
    assert len(wrong.mutations()) >= 500
    assert all(len(wrong.mutations([kind])) >= 20 for kind in wrong.CLASSES)


@pytest.mark.parametrize(
    ("message", "is_clear"),
    [
        ("wrong configuration:\n\na.b: too small\n  where   x.jsonnet:3\n  remedy  make it larger", True),
        ("wrong configuration:\n\na.b: too small\n  where   x.jsonnet:3", False),
        ("wrong configuration:\n\na.b: too small\n  remedy  make it larger", False),
        ("wrong configuration:\n\nx.jsonnet:3:4: Jsonnet: odd\n    {\n    ^\n  remedy  close it", True),
        ("check_config failed: list index out of range\n--debug shows the traceback", False),
    ],
)
def test_a_message_is_clear_if_it_has_key_file_and_remedy(message: str, is_clear: bool) -> None:
    assert wrong.is_clear(message) is is_clear
