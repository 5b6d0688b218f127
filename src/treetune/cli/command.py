"""The parts of which commands are made: arguments, configurations, standard output."""

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
    """A command of the command line.

    Example: ``Command("doctor", doctor, "check this machine (…)", "Checks versions, …", ("treetune
    doctor",))``.
    """

    name: str
    run: Callable[[argparse.Namespace], int]
    """Returns the exit code."""
    words: str
    """What it does, in the list of commands: a verb first, without a full stop."""
    more: str
    """The description in its own help."""
    examples: tuple[str, ...]
    """Command lines that help shows."""
    arguments: tuple[Argument, ...] = ()
    in_ranks: bool = False
    """Whether `treetune run` may start it, in as many processes as there are GPUs."""
    takes_files: bool = False
    """Whether configuration files may follow it, as in ``treetune check grpo.jsonnet``. They are added as
    those of --configs are."""


def say(text: str) -> None:
    """Prints a text. Raises ClosedPipe if the program that reads the output has ended."""
    try:
        print(text, flush=True)
    except BrokenPipeError as error:
        # The interpreter flushes once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ClosedPipe from error


def files_of(options: argparse.Namespace) -> list[str]:
    """Returns the configuration files of a command line: ``--configs a,b --configs c`` gives a, b and c."""
    return [name.strip() for text in options.configs or () for name in text.split(",") if name.strip()]


def evaluated(options: argparse.Namespace) -> Config:
    """Returns the configuration of a command line, evaluated. Raises ConfigError."""
    from treetune.config.jsonnet import ENVIRONMENT_KEYS, load
    from treetune.config.schema import keys_of

    configs = files_of(options)
    config = load(configs, options.override or ())
    family = root_family(config)
    part = family.registered().get(str(config.data.get("type")))
    if part is None:
        return config
    # A table has no seed: APP_SEED is for its experiments.
    environment_keys = [key for key in ENVIRONMENT_KEYS if key in keys_of(part)]
    if len(environment_keys) == len(ENVIRONMENT_KEYS):
        return config
    return load(configs, options.override or (), environment_keys=environment_keys)


def root_family(config: Config, wanted: str = "an experiment") -> type[Registrable]:
    """Returns the family of a configuration's root: the one whose parts include its `type`, or else the one
    that is called `wanted`."""
    roots = root_families()
    name = config.data.get("type")
    fitting = [family for family in roots if isinstance(name, str) and name in family.registered()]
    return fitting[0] if fitting else next(family for family in roots if family.root == wanted)


def built(config: Config, command: str, wanted: str | None, more_folders: Sequence[str] = ()) -> Registrable:
    """Builds and checks the object graph of a configuration, and prints its warnings.

    Args:
        command: The name of the command, for messages.
        wanted: What the configuration must be: "an experiment", "a table" or "a data pipeline". None: any.
        more_folders: Further folders in which the user's modules are looked for.

    Raises:
        ConfigError: Everything that is wrong with the configuration.
    """
    from treetune.config.build import build_with_warnings
    from treetune.config.errors import ConfigIssue, wrapped
    from treetune.config.explain import Explanation, overridden
    from treetune.config.imports import import_parts
    from treetune.exceptions import ConfigError

    explanation = Explanation(config, more_folders)
    import_parts(config.data, explanation)
    family = root_family(config, wanted or "an experiment")
    if wanted is not None and family.root != wanted:
        issue = ConfigIssue(
            f"{command} works on {wanted}, and this configuration is {family.root}",
            key="type",
            source=explanation.source(("type",)),
            remedy="`treetune run` trains an experiment, `treetune make_table` writes a table, and the"
            " command that is called like its type, such as `treetune prepare_data`, runs a data pipeline",
        )
        raise ConfigError([issue])
    root, warnings = build_with_warnings(family, config.data, explanation)
    if os.environ.get("RANK", "0") == "0":
        for note in [*overridden(config), *warnings]:
            print(wrapped("note: ", note), file=sys.stderr)
    return root


def root_families() -> list[type[Registrable]]:
    """Returns the families of whole configurations: experiments, tables, data pipelines."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.registrable import Registrable

    return [family for family in Registrable.__subclasses__() if family.root]


def import_own_parts(experiment: Path) -> None:
    """Imports the user's parts that an experiment's configuration names, found from here."""
    from treetune.config.imports import import_parts

    stored = experiment / "config.json"
    import_parts(json.loads(stored.read_text()) if stored.is_file() else {})
