"""The shipped configurations by kind, each with the sentence that its file begins with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from treetune.config.layers import CONFIGS_FOLDER, find_configuration_files

FOLDERS_BY_KIND: Mapping[str, tuple[str, ...]] = {
    "experiments": (
        "quickstart", ".", "countdown", "domains", "equal_cost", "guru", "hinted_sums", "multi_turn",
        "signposts", "spo", "threadweaver", "threadweaver/tiny",
    ),
    "tables": ("tables",),
    "data sets and pipelines": ("data", "data_pipelines"),
    "presets": ("presets",),
}  # fmt: skip
"""The folders below configs/ whose files are complete; "." is configs/ itself. Those under "experiments" can
be run. Files of other folders are fragments: named after an experiment, they change it. Helpers, such as
functions, are .libsonnet files and are not listed."""

FRAGMENTS_FOLDER = "fragments"

SENTENCE_END = re.compile(r"(?<!\bal)(?<!\beq)(?<!\bDr)(?<!e\.g)\.(?: |$)")
"""A dot that ends a sentence, and not an abbreviation such as "Yu et al." or "eq."."""


@dataclass(frozen=True)
class Entry:
    """A shipped configuration, such as Entry("presets", "presets/dapo.jsonnet", "DAPO (Yu et al., …)")."""

    kind: str
    name: str
    """The path below configs/, which `--configs` and `import` find from anywhere."""
    about: str
    """The first sentence of the comment at the file's head."""


def find_configurations(word: str = "") -> Iterator[Entry]:
    """Yields the configurations that have `word` in their name or their first sentence, kind by kind."""
    for path in sorted(find_configuration_files(CONFIGS_FOLDER), key=_sort_key):
        name = path.relative_to(CONFIGS_FOLDER)
        entry = Entry(kind_of(name), str(name), first_sentence(path.read_text(encoding="utf-8")))
        if word.lower() in f"{entry.name} {entry.about}".lower():
            yield entry


def _sort_key(path: Path) -> tuple[int, str]:
    """Returns the sort key of a configuration: folders in the order of `FOLDERS_BY_KIND`, then all others;
    then the name."""
    name = path.relative_to(CONFIGS_FOLDER)
    order = list(chain.from_iterable(FOLDERS_BY_KIND.values()))
    folder = str(name.parent)
    return (order.index(folder) if folder in order else len(order), str(name))


def kind_of(name: Path) -> str:
    """Returns the kind of a configuration. `name` is its path relative to configs/."""
    folder = str(name.parent)
    return next((kind for kind, folders in FOLDERS_BY_KIND.items() if folder in folders), FRAGMENTS_FOLDER)


def first_sentence(text: str) -> str:
    """Returns the first sentence of a file's leading ``//`` comment; "" if it has none."""
    comment_lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        comment_lines.append(line.removeprefix("//").strip())
    return SENTENCE_END.split(" ".join(comment_lines), maxsplit=1)[0]
