"""Completes words of a command line in a shell: files, parts, commands."""

from __future__ import annotations

from pathlib import Path

import click

CONFIGURATION_SUFFIXES = (".jsonnet", ".json", ".yaml", ".yml")
"""Words of a command line with these endings are configuration files."""
BASE_SUFFIX = ".libsonnet"
"""Words with this ending are configuration files, too, but they aren't completed: most of these files are no
experiments."""


def complete_configs(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    """Returns the completions of the last name in a list such as ``a.jsonnet,b.jsonn``: first the files of
    the present folder, then treetune's own."""
    from treetune.config.layers import CONFIGS_FOLDER

    earlier_names, comma, last_name = prefix.rpartition(",")
    if last_name.endswith("/"):
        folder, name = Path(last_name), ""  # all files of this folder
    else:
        folder, name = Path(last_name).parent, Path(last_name).name
    completions: dict[str, None] = {}  # in their order, each once
    # treetune's own files may be named with or without configs/: `configs/quickstart/…`, `quickstart/…`.
    for base in (Path.cwd(), CONFIGS_FOLDER, CONFIGS_FOLDER.parent):
        if not (base / folder).is_dir():
            continue
        for path in sorted((base / folder).iterdir()):
            if not path.name.startswith(name):
                continue
            shown_path = str(folder / path.name)
            if path.is_dir() and not path.name.startswith("."):
                completions[f"{earlier_names}{comma}{shown_path}/"] = None
            elif path.suffix in CONFIGURATION_SUFFIXES:
                completions[f"{earlier_names}{comma}{shown_path}"] = None
    names = list(completions)
    if len(names) == 1 and names[0].endswith("/"):
        # A shell puts a space after a single completion, which would end the name at the folder.
        return complete_configs(ctx, parameter, names[0])
    return names


def complete_part_names(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.reference import find_describable_entries

    return [name for name in find_describable_entries() if name.startswith(prefix)]


def complete_family_names(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config import reference, schema

    names = [reference.with_underscores(schema.family_word(family)) for family in reference.list_families()]
    return [name for name in names if name.startswith(prefix)]


def complete_rank_commands(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    """Returns the names of commands that `treetune run` can start in ranks."""
    names = [command.name for command in ctx.obj.values() if command.in_ranks]
    return [name for name in names if name.startswith(prefix)]
