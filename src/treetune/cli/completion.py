"""Completes words of a command line in a shell: files, keys, parts, commands."""

from __future__ import annotations

from pathlib import Path

import click

CONFIGURATION_SUFFIXES = (".jsonnet", ".json", ".yaml", ".yml")
"""Words of a command line with these endings are configuration files."""
BASE_SUFFIX = ".libsonnet"
"""So are words with this ending, which aren't completed: most of these files are no experiments."""


def complete_configs(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    """Returns the files that complete the last name of ``a.jsonnet,b.jsonn``: first those of the present
    folder, then treetune's."""
    from treetune.config.layers import CONFIGS

    earlier_names, comma, last = prefix.rpartition(",")
    if last.endswith("/"):
        folder, name = Path(last), ""  # all files of this folder
    else:
        folder, name = Path(last).parent, Path(last).name
    completions: dict[str, None] = {}  # in their order, each once
    # treetune's own files may be named with or without configs/: `configs/quickstart/…`, `quickstart/…`.
    for base in (Path.cwd(), CONFIGS, CONFIGS.parent):
        if not (base / folder).is_dir():
            continue
        for path in sorted((base / folder).iterdir()):
            if not path.name.startswith(name):
                continue
            shown = str(folder / path.name) if str(folder) != "." else path.name
            if path.is_dir() and not path.name.startswith("."):
                completions[f"{earlier_names}{comma}{shown}/"] = None
            elif path.suffix in CONFIGURATION_SUFFIXES:
                completions[f"{earlier_names}{comma}{shown}"] = None
    names = list(completions)
    if len(names) == 1 and names[0].endswith("/"):
        # A shell puts a space after a single completion, which would end the name at the folder.
        return complete_configs(ctx, parameter, names[0])
    return names


def complete_keys(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    """Returns the key paths of the configuration that the command line names so far."""
    from treetune.cli.command import Options, evaluated
    from treetune.config.errors import dotted
    from treetune.config.explain import key_paths
    from treetune.exceptions import ConfigError

    earlier = ctx.parent.params if ctx.parent else {}  # the options before the command's name
    options = Options(
        configs=[*earlier.get("configs", ()), *ctx.params.get("configs", ())],
        override=[*earlier.get("override", ()), *ctx.params.get("override", ())],
    )
    try:
        data = evaluated(options).data
    except ConfigError:
        return []  # the configuration is wrong, or not named yet
    return [path for path in map(dotted, key_paths(data)) if path.startswith(prefix)]


def complete_part_names(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.reference import describable

    return [name for name in describable() if name.startswith(prefix)]


def complete_family_names(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config import reference, schema

    names = [reference.as_word(schema.family_word(family)) for family in reference.families()]
    return [name for name in names if name.startswith(prefix)]


def complete_rank_commands(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    """Returns the commands that `treetune run` starts."""
    names = [command.name for command in ctx.obj.values() if command.in_ranks]
    return [name for name in names if name.startswith(prefix)]
