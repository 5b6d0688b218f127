"""Promises of the reference of parts and keys:

* it has a page for every family and a meaning for every key;
* a key's meaning is the text below its field, or the sentences of the nearest class's docstring that name it;
* an entry has types, bounds and defaults.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Gt

from treetune.config import reference

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Base:
    """The base class. `width` is in metres (Muster et al. 2020, eq. 3). Its `colour` is red."""

    width: Annotated[float, Gt(0)] = 1.0
    colour: str = "red"


@dataclass(frozen=True)
class Part(Base):
    """A part; ``depth`` in code is no mention of it.

    With `colour` blue it is cold, e.g. `0` degrees.
    """

    depth: int = 2
    """Steps below
    the ground."""
    unexplained: int = 0


def test_the_reference_has_a_page_for_every_family_and_a_meaning_for_every_key() -> None:
    """A new key says what it means: a sentence of the docstring that names it, or a text below the field.
    In a process of its own: other tests register parts."""
    program = (
        "import json, sys\n"
        "from treetune.cli.pages import make_pages\n"
        "from treetune.config import reference\n"
        "import treetune.parts\n"
        "unexplained = set()\n"
        "for entries in reference.find_describable_entries().values():\n"
        "    for entry in entries:\n"
        "        unexplained_keys = [key.name for key in entry.keys if not key.meaning]\n"
        "        unexplained |= {f'{entry.qualified_name}.{name}' for name in unexplained_keys}\n"
        "json.dump([make_pages(), sorted(unexplained)], sys.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    pages, unexplained = json.loads(done.stdout)
    assert unexplained == []
    links = re.findall(r"\]\(([\w.]+\.md)\)", pages["index.md"])
    assert set(links) | {"index.md"} == pages.keys()
    assert "## `vineppo`" not in pages["credit.md"] and "## `monte_carlo`" in pages["credit.md"]
    assert "## `run_iteration_loop`" in pages["commands.md"]


def test_a_key_means_what_stands_below_its_field_or_the_sentences_that_name_it_of_the_nearest_class() -> None:
    assert reference.meaning_of_key(Part, "depth") == "Steps below the ground."
    assert reference.meaning_of_key(Part, "colour") == "With `colour` blue it is cold, e.g. `0` degrees."
    assert reference.meaning_of_key(Base, "colour") == "Its `colour` is red."
    assert reference.meaning_of_key(Part, "width") == "`width` is in metres (Muster et al. 2020, eq. 3)."
    assert reference.meaning_of_key(Part, "unexplained") == ""


def test_an_entry_has_types_bounds_and_defaults() -> None:
    keys = {key.name: key for key in reference.part_entry(Part).keys}
    assert (keys["width"].type, keys["width"].default) == ("a number greater than 0", "1.0")
    assert keys["colour"].default == '"red"'
