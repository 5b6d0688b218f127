"""The reference as Markdown: one page for each family of parts, one for the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator

from treetune.cli.arguments import COMMANDS, SHORT
from treetune.config import reference, schema
from treetune.config.reference import PartEntry
from treetune.config.registrable import Registrable

HEAD = "<!-- Made by scripts/make_reference.py from the code: change that, and make it anew. -->\n"


def pages() -> dict[str, str]:
    """Returns names and texts of the pages: one for each of our families, one of commands, and the index."""
    import treetune.parts  # noqa: F401  (registers them)

    families = []
    texts = {}
    for family in reference.families():
        if schema.package_of(family) == schema.OWN_PACKAGE:  # no family of an installed package
            families.append(family)
            texts[f"{reference.as_word(schema.family_word(family))}.md"] = _family_page(family)
    texts["commands.md"] = _commands_page()
    texts["index.md"] = _index(families)
    return {name: f"{HEAD}\n{text.rstrip()}\n" for name, text in sorted(texts.items())}


def _index(families: list[type[Registrable]]) -> str:
    lines = [
        "# Reference",
        "",
        "Everything that a configuration can choose by `type`, with keys, types, bounds, defaults and"
        " sources. `treetune list_parts` and `treetune describe PART` show the same, your own parts"
        " included; [the commands](commands.md) have a page of their own.",
        "",
        "| family | what it is | types |",
        "|---|---|---|",
    ]
    for family in families:
        word = schema.family_word(family)
        names = ", ".join(f"`{entry.name}`" for entry in _own(family))
        about = _cell(reference.summary(family))
        lines.append(f"| [{word}]({reference.as_word(word)}.md) | {about} | {names} |")
    return "\n".join(lines)


def _family_page(family: type[Registrable]) -> str:
    word = schema.family_word(family)
    lines = [f"# {word.capitalize()}", "", _prose(reference.docstring(family)), ""]
    entries = _own(family)
    plain: list[type] = []
    for entry in entries:
        lines += [f"## `{entry.name}`", "", *_part(entry)]
        plain += [part for part in reference.plain_parts(entry.part) if part not in plain]
    for part in plain:
        entry = reference.entry(part)
        lines += [f"## Object: {entry.family}", "", *_part(entry)]
    return "\n".join(lines)


def _own(family: type[Registrable]) -> list[PartEntry]:
    entries = reference.entries(family)
    return [entry for entry in entries if schema.package_of(entry.part) == schema.OWN_PACKAGE]


def _part(entry: PartEntry) -> Iterator[str]:
    yield _prose(entry.text)
    yield ""
    yield f"In `{entry.place}`."
    yield ""
    if not entry.keys:
        yield "It has no keys."
        yield ""
        return
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in entry.keys:
        default = "must be given" if key.default is None else f"`{key.default}`"
        cells = [f"`{key.name}`", _cell(key.type), default.replace("|", "\\|"), _cell(key.meaning)]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _commands_page() -> str:
    lines = ["# Commands", "", "Each has the same as its `--help`.", ""]
    for command in COMMANDS.values():
        names = filter(None, [SHORT.get(command.name), command.name])
        lines += [f"## {', '.join(f'`{name}`' for name in names)}", "", command.more, ""]
        for argument in command.arguments:
            about = argument.settings.get("help") or argument.settings.get("metavar", "")
            lines.append(f"* `{argument.name}`: {about}")
        lines += ["", "```bash", *command.examples, "```", ""]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """A docstring as Markdown: its code is marked with one backtick, its formulas stay what they are."""
    return re.sub(r"``(.+?)``", _code, text, flags=re.DOTALL)


def _code(match: re.Match[str]) -> str:
    inner = " ".join(match[1].split())
    return f"`` {inner} ``" if "`" in inner else f"`{inner}`"


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("\n", " ")
