"""The grammar of the command line: commands, their options and help, misspellings, completion."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import click

import treetune.cluster.commands
import treetune.data.commands
import treetune.lab.commands
import treetune.tables.commands
import treetune.threads.commands
import treetune.view.commands
import treetune.view.crediting.commands
import treetune.view.exports.commands
from treetune.cli import configuration, experiments
from treetune.cli.command import (
    HELP_WIDTH,
    SHARED_OPTIONS,
    Command,
    Options,
    format_examples,
    say,
)
from treetune.cli.completion import CONFIGURATION_SUFFIXES
from treetune.config.errors import nearest
from treetune.overriding import override

OWN_MODULES = (
    treetune.cluster.commands,
    treetune.data.commands,
    treetune.lab.commands,
    treetune.tables.commands,
    treetune.threads.commands,
    treetune.view.commands,
    treetune.view.crediting.commands,
    treetune.view.exports.commands,
)
"""Modules of this package with commands, in addition to those of `treetune.cli`."""

COMMANDS_ENTRY_POINT = "treetune.commands"
"""Entry points of users' packages that add commands: each names a module with `COMMANDS`."""


def _collect_commands() -> dict[str, Command]:
    """Returns all commands by their names, those of installed packages included.

    A package's command is left out, with a note, if another command has its name already: it would silently
    replace that other command.
    """
    modules: list[Any] = [experiments, configuration, *OWN_MODULES]
    treetune_commands: dict[str, Command] = {}
    for module in modules:
        treetune_commands |= {command.name: command for command in module.COMMANDS}
    help_commands = {command.name: command for command in HELP_COMMANDS}
    # `SHORT_NAMES` has short names of some commands: "check" for "check_config".
    owners = dict.fromkeys([*treetune_commands, *help_commands, *SHORT_NAMES.values()], "treetune")
    package_commands: dict[str, Command] = {}
    for entry in importlib.metadata.entry_points(group=COMMANDS_ENTRY_POINT):
        if entry.dist is not None and entry.dist.name == "treetune":
            continue  # version 0.1 named its own modules here, and may still be installed
        try:
            commands_of_package = _load_commands(entry)
        except (Exception, SystemExit) as error:  # a broken package mustn't end other commands
            print(f"note: the commands of {entry.value} can't be loaded: {error}", file=sys.stderr)
            continue
        for command in commands_of_package:
            if command.name in owners:
                print(
                    f"note: the command {command.name!r} of {entry.value} is left out, since"
                    f" {owners[command.name]} has a command of this name: rename it in that package's"
                    " COMMANDS",
                    file=sys.stderr,
                )
                continue
            owners[command.name] = entry.value
            package_commands[command.name] = command
    return treetune_commands | package_commands | help_commands


def _load_commands(entry: importlib.metadata.EntryPoint) -> tuple[Command, ...]:
    """Returns the commands that an entry point adds.

    Raises TypeError if the entry point's module has no valid COMMANDS, and whatever its import raises.
    """
    module = entry.load()
    if not hasattr(module, "COMMANDS"):
        raise TypeError("it has no COMMANDS; this should be a tuple of treetune.cli.command.Command")
    commands = module.COMMANDS
    if not isinstance(commands, tuple | list) or not all(isinstance(item, Command) for item in commands):
        text = textwrap.shorten(repr(commands), HELP_WIDTH, placeholder=" …")
        raise TypeError(f"COMMANDS should be a tuple of treetune.cli.command.Command, and is {text}")
    return tuple(commands)


def show_help(options: Options) -> int:
    """Prints the help of a command, of a group of commands with their examples, or of all commands. Without a
    topic, prints the overview."""
    topic, groups = options.topic, _group_commands()
    if topic in COMMANDS_BY_NAME:
        parse([topic, "--help"])  # ends the program
    if topic is None:
        say(overview())
    elif topic == "all":
        context = click.Context(PROGRAM, **CLICK_SETTINGS)
        formatter = context.make_formatter()
        # Not `click.Group.format_options`, which would also list the commands.
        click.Command.format_options(PROGRAM, context, formatter)
        say("\n\n".join([*map(_list_group, groups), f"{formatter.getvalue()}\n{EPILOG}"]))
    elif topic in groups:
        say(f"{_list_group(topic)}\n\n{format_examples(*groups[topic])}")
    else:
        raise ValueError(
            f"there is no command or group {topic!r}{_suggest_names(topic, [*COMMANDS_BY_NAME, *groups])}"
        )
    return 0


HELP_COMMANDS = (
    Command(
        "help",
        show_help,
        "show the help of a command, of a group of commands, or of all",
        "Shows the help of a command, the commands of a group with their examples, or all commands.",
        ("treetune help data", "treetune help check", "treetune help all"),
        (click.Argument(["topic"], required=False, metavar="[COMMAND|GROUP|all]"),),
    ),
)
COMMAND_GROUPS = {
    "basics": "run run_evaluation check_config explain_config list_parts configs plan doctor new",
    "inspect": "view watch report credit bisect_runs replay fork arena credit_worth",
    "tables": "make_table reproduce_table run_analyzers compare_analyses",
    "data": "prepare_data estimate_difficulty filter_data score_responses export_rows make_threads",
    "share": "certify verify model_card push_to_hub export_evaluation export_notes chat_template",
}
"""The headings under which help lists commands. Commands that are not listed here, such as those of installed
packages, are under `OTHER_GROUP`."""

OTHER_GROUP = "other"
"""The heading of commands that `COMMAND_GROUPS` doesn't list."""

SHORT_NAMES = {
    "run_evaluation": "evaluate",
    "check_config": "check",
    "explain_config": "explain",
    "list_parts": "parts",
    "bisect_runs": "bisect",
}
"""Short names of commands, which help and messages use. The full names still work."""

COMMAND_BY_FOREIGN_NAME = {
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
"""Names that other programs have for a command, each with the name that the command has here."""

COMMANDS = _collect_commands()
COMMANDS_BY_NAME = COMMANDS | {
    short: COMMANDS[name] for name, short in SHORT_NAMES.items() if name in COMMANDS
}

EPILOG = """\
APP_* environment variables are std.extVar('APP_…') in a configuration;
APP_SEED, APP_DIRECTORY and APP_EXPERIMENT_NAME set the keys of these names."""


def version() -> str:
    """Returns the versions of treetune and Python, and the commit: for the first line of a bug report."""
    import platform

    import treetune
    from treetune.runtime.manifest import read_code_commit

    commit = read_code_commit()
    parts = [f"treetune {treetune.__version__}", f"Python {platform.python_version()}"]
    if commit:
        parts.append(f"commit {commit}")
    return ", ".join(parts)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Returns the options of one command. Ends the program for help and for a wrong command line.

    The options of all commands (--configs, --override, --debug) may come before or after the command.
    """
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = PROGRAM.main(command_line, "treetune", standalone_mode=False, obj=COMMANDS, **CLICK_SETTINGS)
    except click.ClickException as error:
        program = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "treetune"
        print(f"{program}: {error.format_message()}\n{program} --help lists the options", file=sys.stderr)
        sys.exit(2)
    if not isinstance(result, Options):
        # Help or the version has been printed, and `result` is an exit code.
        sys.exit(result)
    return result


CLICK_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "terminal_width": HELP_WIDTH}
"""Settings of click for all commands."""


class _Program(click.Group):
    """The program `treetune`: finds the command that a command line names."""

    def __init__(self) -> None:
        show_version = click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="version, commit, Python",
        )
        # Without a command, click then says "Missing command", instead of showing help.
        super().__init__("treetune", params=[show_version, *SHARED_OPTIONS], no_args_is_help=False)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return COMMANDS_BY_NAME.get(cmd_name)

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [SHORT_NAMES.get(name, name) for name in COMMANDS]

    @override
    def get_help(self, ctx: click.Context) -> str:
        return overview()

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the name that help shows, the command, and the arguments after it."""
        name, *arguments = args
        if name in COMMANDS_BY_NAME:
            command = COMMANDS_BY_NAME[name]
            return SHORT_NAMES.get(command.name, command.name), command, arguments
        if name.endswith(CONFIGURATION_SUFFIXES):
            ctx.fail(f"{name} is a file, and a command comes first: treetune run {shlex.quote(name)}")
        similar_names = nearest(name, COMMANDS_BY_NAME)
        # The names of other programs come first: `train`, for example, is `run` here.
        near = COMMAND_BY_FOREIGN_NAME.get(name) or next(iter(similar_names), None)
        hint = (
            f"did you mean {SHORT_NAMES.get(near, near)}?" if near else "`treetune help` lists the commands"
        )
        ctx.fail(f"there is no command {name!r}: {hint}")


def _print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        print(version())
        ctx.exit()


def _group_commands() -> dict[str, list[Command]]:
    """Returns the commands by group, the basic ones first."""
    groups: dict[str, list[Command]] = {}
    grouped_names: set[str] = set()
    for group, names in COMMAND_GROUPS.items():
        grouped_names.update(names.split())
        groups[group] = [COMMANDS[name] for name in names.split() if name in COMMANDS]
    groups[OTHER_GROUP] = [command for name, command in COMMANDS.items() if name not in grouped_names]
    return {group: commands for group, commands in groups.items() if commands}


def overview() -> str:
    """Returns a help that fits a screen of 24 lines: the basic commands, and the names of most others."""
    lines = [
        "Reinforcement learning for language models: one configuration, one experiment.",
        "usage: treetune COMMAND FILE… [--override '{…}'] …",
    ]
    groups = _group_commands()
    groups.pop(OTHER_GROUP)  # there is no room for them
    for group, commands in groups.items():
        names = [SHORT_NAMES.get(command.name, command.name) for command in commands]
        if group == "basics":
            lines += [f"  {name:<9} {command.summary}" for name, command in zip(names, commands)]
        else:
            # Lines are shorter than HELP_WIDTH. The names form a column after 8 characters.
            lines += textwrap.wrap(f"{group:<8}{' '.join(names)}", HELP_WIDTH - 1, subsequent_indent=" " * 8)
        # One example for each group: the first that fits on a line.
        example_lines: list[str] = []
        for command in commands:
            example_lines += [f"  $ {example}" for example in command.examples]
        fitting_lines = [line for line in example_lines if len(line) < HELP_WIDTH]
        lines += fitting_lines[:1]
    return "\n".join([*lines, "more    treetune help all, treetune help GROUP, treetune help COMMAND"])


def _list_group(group: str) -> str:
    """Returns the help of a group: its commands, one or two lines each."""
    lines = [f"{group}:"]
    for command in _group_commands()[group]:
        name = SHORT_NAMES.get(command.name, command.name)
        # Lines are shorter than HELP_WIDTH. The summaries form a column after 30 characters.
        lines += textwrap.wrap(
            f"{name:<27} {command.summary}", HELP_WIDTH - 1, initial_indent="  ", subsequent_indent=" " * 30
        )
    return "\n".join(lines)


def _suggest_names(name: str, choices: Sequence[str] | dict[str, Command]) -> str:
    """Returns the end of a message about a wrong name: the nearest right name, or else all names."""
    similar_names = nearest(name, choices)
    if similar_names:
        return f": did you mean {similar_names[0]}?"
    return f"; there are {', '.join(sorted(choices))}"


PROGRAM = _Program()
