"""Commands that list what a configuration can choose."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING

from treetune.cli.command import Argument, Command, evaluated, say

if TYPE_CHECKING:
    from treetune.config.reference import PartEntry

WIDTH = 110


def list_parts(options: argparse.Namespace) -> int:
    from treetune.config import reference, schema

    _known_parts(options)
    families = reference.families()
    if options.family is not None:
        words = {reference.as_word(schema.family_word(family)): family for family in families}
        wanted = reference.as_word(options.family)
        if wanted not in words:
            raise _unknown("family of parts", options.family, list(words))
        families = [words[wanted]]
    for family in families:
        about = reference.summary(family)
        say(f"{schema.family_word(family)}" + (f": {about}" if about else ""))
        entries = reference.entries(family)
        width = max(len(entry.name or "") for entry in entries)
        for entry in entries:
            outside = f"(of {entry.part.__module__}) " if schema.is_from_outside(entry.part) else ""
            about = textwrap.shorten(
                outside + reference.summary(entry.part), WIDTH - width - 4, placeholder=" …"
            )
            say(f"  {entry.name:<{width}}  {about}")
        say("")
    return 0


def describe(options: argparse.Namespace) -> int:
    from treetune.config import reference

    _known_parts(options)
    known = reference.describable()
    found = known.get(options.part) or known.get(reference.as_word(options.part))
    if not found:
        raise _unknown("part", options.part, list(known))
    for entry in found:
        say("\n".join(_described(entry)))
        say("")
    return 0


def _described(entry: PartEntry) -> list[str]:
    lines = [f"{entry.title}  ({entry.place})", "", textwrap.indent(entry.text, "  "), ""]
    for key in entry.keys:
        default = "no default" if key.default is None else f"default {key.default}"
        lines.append(textwrap.fill(f"  {key.name}: {key.type}; {default}", WIDTH, subsequent_indent="      "))
        if key.meaning:
            lines.append(
                textwrap.fill(key.meaning, WIDTH, initial_indent="      ", subsequent_indent="      ")
            )
    return lines


def _known_parts(options: argparse.Namespace) -> None:
    """Registers our parts, those of installed packages, and those that a configuration imports."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.explain import Explanation
    from treetune.config.imports import import_parts

    config = evaluated(options) if options.configs or options.override else None
    import_parts(config.data if config else {}, Explanation(config) if config else None)


def _unknown(what: str, name: str, known: list[str]) -> ValueError:
    from treetune.config.errors import nearest

    near = nearest(name, known, count=3)
    return ValueError(
        f"there is no {what} {name!r}: "
        + (f"did you mean {' or '.join(near)}?" if near else "list_parts shows all of them")
    )


COMMANDS = (
    Command(
        "list_parts",
        list_parts,
        "what a configuration can choose by `type`, family by family",
        "Lists all registered parts with what they are, or those of one family. With --configs it also"
        " knows the parts that the configuration imports.",
        ("treetune list_parts", "treetune list_parts credit"),
        (
            Argument(
                "family",
                {"nargs": "?", "metavar": "FAMILY", "help": "such as credit; default: all"},
                completes="families",
            ),
        ),
    ),
    Command(
        "describe",
        describe,
        "a part's keys with types, bounds, defaults and meaning",
        "Describes a part by its `type` (group), with its family where others share the name (grader.math),"
        " or an object without type (evaluation_set).",
        ("treetune describe group", "treetune describe grader.math", "treetune describe evaluation_set"),
        (
            Argument(
                "part",
                {"metavar": "PART", "help": "such as group, grader.math or evaluation_set"},
                completes="parts",
            ),
        ),
    ),
)
