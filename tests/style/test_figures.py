"""Figures of the sources that a reader feels. Where they fall, lower the limits. They were raised twice, for
capabilities that docs/results/house.md lists with their lines."""

from __future__ import annotations

from tests.support import house

CIRCLES, LARGEST = 4, 4
"""Circles of files that import each other, also within functions or for types alone. The aim is 3."""

HEADLESS_SHARE = 0.01

LIMITS = {
    "files": 361,
    "lines": 75_100,
    "functions": 4_456,
    "functions of at most 3 lines": 1_196,
    "classes": 751,
    "modules that one other imports": 70,
}


def test_few_files_import_each_other_in_a_circle() -> None:
    found = house.circles()
    words = "\n".join(", ".join(circle) for circle in found)
    assert len(found) <= CIRCLES and all(len(circle) <= LARGEST for circle in found), words


def test_docstrings_have_a_head() -> None:
    """A function's begins with a verb ("Returns …"), a class's with a noun ("A …")."""
    found, documented = house.headless()
    assert len(found) <= HEADLESS_SHARE * documented, "\n".join(found)


def test_the_house_has_not_grown() -> None:
    """What a new capability adds is paid for by something that becomes unnecessary, shared or a library's."""
    counts = house.counts()
    grown = {name: (counts[name], limit) for name, limit in LIMITS.items() if counts[name] > limit}
    assert not grown
