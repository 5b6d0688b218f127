"""What a shell completes: ``eval "$(register-python-argcomplete treetune)"``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers a shell that asks for completions, and ends; returns at once where none asks."""
    import argcomplete

    for action in _actions(parser):
        completer = COMPLETERS.get(getattr(action, "completes", None) or "")
        if completer is not None:
            action.completer = completer  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options="long")


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _actions(sub)


def configs(prefix: str, **_: object) -> list[str]:
    """Returns files for the last name of ``a.jsonnet,b.jsonn``: here, then below configs/."""
    from treetune.config.jsonnet import CONFIGS, in_folder

    before, comma, last = prefix.rpartition(",")
    folder, name = (Path(last), "") if last.endswith("/") else (Path(last).parent, Path(last).name)
    found: dict[str, None] = {}
    for base in (Path.cwd(), CONFIGS):
        for path in in_folder(base / folder) if (base / folder).is_dir() else ():
            if not path.name.startswith(name):
                continue
            shown = str(folder / path.name) if str(folder) != "." else path.name
            if path.is_dir() and not path.name.startswith("."):
                found[f"{before}{comma}{shown}/"] = None
            elif path.suffix == ".jsonnet":
                found[f"{before}{comma}{shown}"] = None
    return list(found)


def keys(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Key paths of the configuration that stands on the line already."""
    from treetune.cli.command import evaluated
    from treetune.config.errors import ConfigError, dotted
    from treetune.config.explain import key_paths

    try:
        data = evaluated(parsed_args).data
    except ConfigError:
        return []
    return [path for path in map(dotted, key_paths(data)) if path.startswith(prefix)]


def part_names(prefix: str, **_: object) -> list[str]:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.reference import describable

    return [name for name in describable() if name.startswith(prefix)]


def family_names(prefix: str, **_: object) -> list[str]:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config import reference, schema

    words = [reference.as_word(schema.family_word(family)) for family in reference.families()]
    return [word for word in words if word.startswith(prefix)]


COMPLETERS: dict[str, Callable[..., list[str]]] = {
    "configs": configs,
    "keys": keys,
    "parts": part_names,
    "families": family_names,
}
