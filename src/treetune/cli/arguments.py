"""The grammar of the command line: commands, their options and help, misspellings, completion."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import treetune.cluster.commands
import treetune.data.commands
import treetune.lab.commands
import treetune.tables.commands
import treetune.threads.commands
import treetune.view.commands
import treetune.view.exports.commands
from treetune.cli import configuration, experiments
from treetune.cli.command import Argument, Command, say
from treetune.overriding import override

OWN_MODULES = (
    treetune.cluster.commands,
    treetune.data.commands,
    treetune.lab.commands,
    treetune.tables.commands,
    treetune.threads.commands,
    treetune.view.commands,
    treetune.view.exports.commands,
)
"""Modules of this package with commands, besides the core's."""

GROUP = "treetune.commands"
"""Entry points of users' packages that add commands: each names a module with `COMMANDS`."""


def _commands() -> dict[str, Command]:
    """Returns all commands by their names, those of installed packages included."""
    modules: list[Any] = [experiments, configuration, *OWN_MODULES]
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.dist is not None and entry.dist.name == "treetune":
            continue  # an installation of version 0.1, which named its own modules here
        try:
            modules.append(entry.load())
        except Exception as error:  # a broken package mustn't end other commands
            print(f"note: the commands of {entry.value} can't be loaded: {error}", file=sys.stderr)
    commands: dict[str, Command] = {}
    for module in modules:
        for command in module.COMMANDS:
            commands[command.name] = command
    for command in HELP:
        commands[command.name] = command
    return commands


def show_help(options: argparse.Namespace) -> int:
    """Prints the help of a command, of a group of commands with their examples, of all, or the overview."""
    topic, groups = options.topic, _groups()
    if topic in BY_NAME:
        grammar(topic).parse_args([topic, "--help"])  # ends the program
    if topic is None:
        say(overview())
    elif topic == "all":
        options_of_all = _CommandParser(usage=argparse.SUPPRESS, epilog=EPILOG, formatter_class=_layout)
        _add_shared(options_of_all)
        say("\n\n".join([*map(_listed, groups), options_of_all.format_help()]))
    elif topic in groups:
        say(f"{_listed(topic)}\n\n{_examples(*groups[topic])}")
    else:
        raise ValueError(f"there is no command or group {topic!r}{_suggest(topic, [*BY_NAME, *groups])}")
    return 0


HELP = (
    Command(
        "help",
        show_help,
        "show the help of a command, of a group of commands, or of all",
        "Shows the help of a command, the commands of a group with their examples, or all commands.",
        ("treetune help data", "treetune help check", "treetune help all"),
        (Argument("topic", {"nargs": "?", "metavar": "COMMAND|GROUP|all"}),),
    ),
)
GROUPS = {
    "basics": "run run_evaluation check_config explain_config list_parts configs plan doctor new",
    "inspect": "view watch report bisect_runs replay fork arena credit_worth",
    "tables": "make_table reproduce_table run_analyzers compare_analyses",
    "data": "prepare_data estimate_difficulty filter_data score_responses export_rows make_threads",
    "share": "certify verify model_card push_to_hub export_evaluation export_notes chat_template",
}
"""The headings under which help lists commands. All others, such as those of installed packages, are under
OTHER."""

OTHER = "other"

SHORT = {
    "run_evaluation": "evaluate",
    "check_config": "check",
    "explain_config": "explain",
    "list_parts": "parts",
    "bisect_runs": "bisect",
}
"""Short names of commands, which help and messages use. The full names still work."""

OTHERS_CALL_IT = {
    "train": "run",
    "start": "run",
    "resume": "run",
    "validate": "check",
    "lint": "check",
    "init": "new",
    "create": "new",
    "serve": "view",
    "dashboard": "view",
}
"""Commands of other programs, each with its name here."""

COMMANDS = _commands()
BY_NAME = COMMANDS | {short: COMMANDS[name] for name, short in SHORT.items() if name in COMMANDS}

WIDTH = 80
EPILOG = """\
APP_* environment variables are std.extVar('APP_…') in a configuration;
APP_SEED, APP_DIRECTORY and APP_EXPERIMENT_NAME set the keys of these names."""

_SHARED: dict[str, dict[str, Any]] = {
    "--configs": {
        "action": "append",
        "metavar": "A,B,…",
        "help": "Jsonnet, JSON or YAML files; each overrides those before it; treetune's own are found"
        " from any folder",
    },
    "--override": {
        "action": "append",
        "metavar": "'{…}'",
        "help": "a Jsonnet object that overrides the files; repeatable",
    },
    "--debug": {"action": "store_true", "help": "show tracebacks"},
}


CONFIGURATION_SUFFIXES = (".jsonnet", ".json", ".yaml", ".yml")
"""Endings of the words that are taken for configuration files."""

FILES = "configuration_files"
"""The argument of commands that take configuration files."""


class _CommandParser(argparse.ArgumentParser):
    """Reports a wrong command line in two lines: the mistake, and where to find help."""

    @override
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}\n{self.prog} --help lists the options", file=sys.stderr)
        sys.exit(2)


def version() -> str:
    """Returns the versions of treetune and Python, and the commit: for the first line of a bug report."""
    import treetune
    from treetune.runtime.manifest import code_commit

    commit = code_commit()
    parts = [f"treetune {treetune.__version__}", f"Python {platform.python_version()}"]
    if commit:
        parts.append(f"commit {commit}")
    return ", ".join(parts)


class _Version(argparse.Action):
    @override
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(version())
        parser.exit()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of one command.

    The options of all commands (--configs, --override, --debug) may come before or after the command.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    shared = _CommandParser(prog="treetune", add_help=False, allow_abbrev=False)
    _add_shared(shared)
    options, command_words = shared.parse_known_args(_name_files_by_option(words))
    _refuse_unknown(shared, command_words)
    if command_words[:1] in (["-h"], ["--help"]):
        command_words = ["help"]
    name = command_words[0] if command_words else ""
    options = grammar(name).parse_args(command_words, namespace=options)
    options.command = BY_NAME[options.command].name
    # Words such as `grpo`, which may be a file's name without its ending: a message says which was meant.
    names_without_ending = vars(options).pop(FILES, [])
    if names_without_ending:
        options.configs = [*(options.configs or ()), *names_without_ending]
    return options


def _name_files_by_option(words: Sequence[str]) -> list[str]:
    """Returns a command line with ``--configs FILE`` in place of each configuration file that follows a
    command.

    ``run a.jsonnet --num_gpus 2 b.jsonnet`` becomes ``run --configs a.jsonnet --num_gpus 2 --configs
    b.jsonnet``, so that files keep their order, whichever way each was named.
    """
    command: Command | None = None
    changed_words: list[str] = []
    is_value = False  # of the option before it
    for word in words:
        is_file = False
        if is_value:
            is_value = False
        elif word.startswith("-"):
            is_value = "=" not in word and _takes_value(word, command)
        elif command is None:
            command = BY_NAME.get(word)
            if command is None or not command.takes_files:
                return list(words)
        else:
            is_file = word.endswith(CONFIGURATION_SUFFIXES)
        changed_words += ["--configs", word] if is_file else [word]
    return changed_words


def _takes_value(option: str, command: Command | None) -> bool:
    """Returns whether the word after an option is the option's value."""
    settings = _SHARED.get(option)
    if settings is None and command is not None:
        settings = next(
            (argument.settings for argument in command.arguments if argument.name == option), None
        )
    if settings is None:
        return option in ("--local_rank", "--local-rank")
    return settings.get("action") in (None, "append")


def _groups() -> dict[str, list[Command]]:
    """Returns the commands by group, the basic ones first."""
    groups: dict[str, list[Command]] = {}
    grouped_names: set[str] = set()
    for group, names in GROUPS.items():
        grouped_names.update(names.split())
        groups[group] = [COMMANDS[name] for name in names.split() if name in COMMANDS]
    groups[OTHER] = [command for name, command in COMMANDS.items() if name not in grouped_names]
    return {group: commands for group, commands in groups.items() if commands}


def overview() -> str:
    """Returns a help that fits a screen of 24 lines: the basic commands, and the names of most others."""
    lines = [
        "Reinforcement learning for language models: one configuration, one experiment.",
        "usage: treetune COMMAND FILE… [--override '{…}'] …",
    ]
    groups = _groups()
    groups.pop(OTHER)
    for group, commands in groups.items():
        names = [SHORT.get(command.name, command.name) for command in commands]
        if group == "basics":
            lines += [f"  {name:<9} {command.words}" for name, command in zip(names, commands)]
        else:
            lines += textwrap.wrap(f"{group:<8}{' '.join(names)}", WIDTH - 1, subsequent_indent=" " * 8)
        examples = [example for command in commands for example in command.examples]
        lines += [f"  $ {example}" for example in examples if len(example) < WIDTH - 4][:1]
    return "\n".join([*lines, "more    treetune help all, treetune help GROUP, treetune help COMMAND"])


def _listed(group: str) -> str:
    """Returns the help of a group: its commands, one or two lines each."""
    lines = [f"{group}:"]
    for command in _groups()[group]:
        name = SHORT.get(command.name, command.name)
        lines += textwrap.wrap(
            f"{name:<27} {command.words}", WIDTH - 1, initial_indent="  ", subsequent_indent=" " * 30
        )
    return "\n".join(lines)


def _examples(*commands: Command) -> str:
    """Returns examples of commands as one types them into a shell, wrapped to the width of a screen."""
    lines = ["examples:"]
    for command in commands:
        for example in command.examples:
            # A quoted text stays on one line: its spaces are unbreakable until the lines are wrapped.
            unbroken = re.sub(r"'[^']*'|\"[^\"]*\"", lambda quoted: quoted[0].replace(" ", "\xa0"), example)
            pieces = textwrap.wrap(unbroken, WIDTH - 6, break_long_words=False, break_on_hyphens=False)
            lines.append("  " + " \\\n      ".join(pieces).replace("\xa0", " "))
    return "\n".join(lines)


def grammar(name: str = "") -> argparse.ArgumentParser:
    """Returns the parser of the command called `name`. Without such a command, it parses all commands, for
    help and completion."""
    parser = _CommandParser(prog="treetune", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="version, commit, Python")
    _add_shared(parser, default=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in [BY_NAME[name]] if name in BY_NAME else COMMANDS.values():
        sub = commands.add_parser(
            SHORT.get(command.name, command.name),
            aliases=[command.name] if command.name in SHORT else [],
            help=command.words,
            description=textwrap.fill(command.more, WIDTH - 1),
            epilog=_examples(command),
            formatter_class=_layout,
            allow_abbrev=False,
        )
        _add_shared(sub, default=argparse.SUPPRESS)
        for argument in command.arguments:
            added = sub.add_argument(argument.name, **argument.settings)
            if argument.completes:
                added.completer = COMPLETERS[argument.completes]  # type: ignore[attr-defined]
        if command.takes_files:
            # Last, since argparse gives words to arguments from left to right, and this one takes all.
            files = sub.add_argument(
                FILES, nargs="*", metavar="FILE", help="configuration files, as --configs names them"
            )
            files.completer = configs  # type: ignore[attr-defined]
    return parser


def _layout(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=WIDTH)


def _add_shared(parser: argparse.ArgumentParser, **settings: Any) -> None:
    """Adds the options of all commands; `settings` go to each of them."""
    for name, own_settings in _SHARED.items():
        action = parser.add_argument(name, **own_settings, **settings)
        if name == "--configs":
            action.completer = configs  # type: ignore[attr-defined]
    # DeepSpeed's launcher adds it without --no_local_rank. The rank is read from the environment.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS, **settings)


def _refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Ends the program for an unknown command or option, with the nearest one that exists."""
    if words and not words[0].startswith("-") and words[0] not in BY_NAME:
        word = words[0]
        if word.endswith(CONFIGURATION_SUFFIXES):
            parser.error(f"{word} is a file, and a command comes first: treetune run {shlex.quote(word)}")
        near = OTHERS_CALL_IT.get(word) or next(iter(get_close_matches(word, BY_NAME, n=1, cutoff=0.6)), None)
        hint = f"did you mean {SHORT.get(near, near)}?" if near else "`treetune help` lists the commands"
        parser.error(f"there is no command {word!r}: {hint}")
    command = BY_NAME.get(words[0]) if words else None
    command_arguments = [argument.name for argument in command.arguments] if command else ["--version"]
    command_options = [name for name in command_arguments if name.startswith("-")]
    options = [*_SHARED, *command_options, "--help"]
    for argument in words:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in options:
            parser.error(f"there is no option {name}{_suggest(name, options)}")


def _suggest(name: str, choices: Sequence[str] | dict[str, Command]) -> str:
    """Returns the end of a message about a wrong name: the nearest right name, or else all names."""
    near = get_close_matches(name, choices, n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(choices))}"


# Completion in a shell, if the user has set up argcomplete


def complete(parser: argparse.ArgumentParser) -> None:
    """Prints completions and ends the program, if a shell asks for them."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options="long")


def configs(prefix: str, **_: object) -> list[str]:
    """Returns the files that complete the last name of ``a.jsonnet,b.jsonn``: those here, then treetune's."""
    from treetune.config.layers import CONFIGS

    earlier_names, comma, last = prefix.rpartition(",")
    folder, name = (Path(last), "") if last.endswith("/") else (Path(last).parent, Path(last).name)
    completions: dict[str, None] = {}  # in their order, each once
    for base in (Path.cwd(), CONFIGS, CONFIGS.parent):
        for path in sorted((base / folder).iterdir()) if (base / folder).is_dir() else ():
            if not path.name.startswith(name):
                continue
            shown = str(folder / path.name) if str(folder) != "." else path.name
            if path.is_dir() and not path.name.startswith("."):
                completions[f"{earlier_names}{comma}{shown}/"] = None
            elif path.suffix in (".jsonnet", ".json", ".yaml", ".yml"):
                completions[f"{earlier_names}{comma}{shown}"] = None
    return list(completions)


def keys(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Returns the key paths of the configuration that the command line names so far."""
    from treetune.cli.command import evaluated
    from treetune.config.errors import dotted
    from treetune.config.explain import key_paths
    from treetune.exceptions import ConfigError

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

    names = [reference.as_word(schema.family_word(family)) for family in reference.families()]
    return [name for name in names if name.startswith(prefix)]


def rank_commands(prefix: str, **_: object) -> list[str]:
    """Returns the commands that `treetune run` starts."""
    names = [command.name for command in COMMANDS.values() if command.in_ranks]
    return [name for name in names if name.startswith(prefix)]


COMPLETERS: dict[str, Callable[..., list[str]]] = {
    "configs": configs,
    "keys": keys,
    "parts": part_names,
    "families": family_names,
    "rank_commands": rank_commands,
}
