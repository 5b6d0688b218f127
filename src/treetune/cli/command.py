"""The base of all commands: arguments, configurations, standard output."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.exceptions import ClosedPipe

if TYPE_CHECKING:
    from treetune.config.layers import Config
    from treetune.config.registrable import Registrable


@dataclass(frozen=True)
class Argument:
    """An argument of a command, as `argparse` takes it. `completes` names the completer of a shell."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    completes: str | None = None


@dataclass(frozen=True)
class Command:
    """A command. `words` stand in the list of commands, `more` and the examples in its own help."""

    name: str
    run: Callable[[argparse.Namespace], int]
    words: str
    more: str
    examples: tuple[str, ...]
    arguments: tuple[Argument, ...] = ()
    in_ranks: bool = False
    """Whether `treetune run` may start it, in as many processes as there are GPUs."""
    takes_files: bool = False
    """Whether configuration files may follow it, as in ``treetune check grpo.jsonnet``. They are added as
    those of --configs are."""


def say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError as error:
        # The interpreter flushes once more at exit: into nothing, then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ClosedPipe from error


def files_of(options: argparse.Namespace) -> list[str]:
    """Returns the files behind ``--configs``."""
    return [name.strip() for text in options.configs or () for name in text.split(",") if name.strip()]


def evaluated(options: argparse.Namespace) -> Config:
    """Returns the configuration that the options name."""
    from treetune.config.jsonnet import ENVIRONMENT_KEYS, load
    from treetune.config.schema import keys_of

    configs = files_of(options)
    config = load(configs, options.override or ())
    family = root_family(config)
    part = family.registered().get(str(config.data.get("type")))
    if part is None:
        return config
    # A table has no seed of its own: the environment's is for the experiments.
    environment_keys = [key for key in ENVIRONMENT_KEYS if key in keys_of(part)]
    if len(environment_keys) == len(ENVIRONMENT_KEYS):
        return config
    return load(configs, options.override or (), environment_keys=environment_keys)


def root_family(config: Config, wanted: str = "an experiment") -> type[Registrable]:
    """Returns the family of a configuration's root: the one that knows its `type`, or else the one that is
    wanted."""
    roots = root_families()
    name = config.data.get("type")
    knows = [family for family in roots if isinstance(name, str) and name in family.registered()]
    return knows[0] if knows else next(family for family in roots if family.root == wanted)


def built(config: Config, command: str, wanted: str | None, beside: Sequence[str] = ()) -> Registrable:
    """Returns the checked object graph of a configuration, which must be `wanted` ("a table"), if anything
    is. The user's parts are looked for in the folders `beside`, too."""
    from treetune.config.build import build_with_warnings
    from treetune.config.errors import ConfigIssue, wrapped
    from treetune.config.explain import Explanation, overridden
    from treetune.config.imports import import_parts
    from treetune.exceptions import ConfigError

    explanation = Explanation(config, beside)
    import_parts(config.data, explanation)
    family = root_family(config, wanted or "an experiment")
    if wanted is not None and family.root != wanted:
        issue = ConfigIssue(
            f"{command} works on {wanted}, and this configuration is {family.root}",
            key="type",
            source=explanation.source(("type",)),
            remedy="run_iteration_loop trains an experiment; make_table makes a table; a data pipeline is"
            " carried out by the command of its type, such as prepare_data",
        )
        raise ConfigError([issue])
    root, warnings = build_with_warnings(family, config.data, explanation)
    if os.environ.get("RANK", "0") == "0":
        for note in [*overridden(config), *warnings]:
            print(wrapped("note: ", note), file=sys.stderr)
    return root


def root_families() -> list[type[Registrable]]:
    """Returns what whole configurations are of: experiments, tables, data pipelines."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.registrable import Registrable

    return [family for family in Registrable.__subclasses__() if family.root]


def import_own_parts(experiment: Path) -> None:
    """Imports the user's parts that an experiment's configuration names, found from here."""
    from treetune.config.imports import import_parts

    stored = experiment / "config.json"
    import_parts(json.loads(stored.read_text()) if stored.is_file() else {})
