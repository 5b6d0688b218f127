"""The building blocks of commands: arguments, configurations, standard output."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from treetune.cli.completion import BASE_SUFFIX, CONFIGURATION_SUFFIXES, complete_configs
from treetune.exceptions import ClosedPipe
from treetune.overriding import override

if TYPE_CHECKING:
    from treetune.config.layers import Config
    from treetune.config.registrable import Registrable


HELP_WIDTH = 80
"""Characters of a line of help."""

PATH = click.Path(path_type=Path)
"""The type of arguments that name a file or a folder."""

SHARED_OPTIONS = (
    click.Option(
        ["--configs"],
        multiple=True,
        metavar="A,B,…",
        help="Jsonnet, JSON or YAML files; each overrides those before it; treetune's own are found from any"
        " folder",
        shell_complete=complete_configs,
    ),
    click.Option(
        ["--override"],
        multiple=True,
        metavar="'{…}'",
        help="a Jsonnet object that overrides the files; repeatable",
    ),
    click.Option(["--debug"], is_flag=True, help="show tracebacks"),
    # DeepSpeed's launcher adds this option unless it is started with --no_local_rank. Its value isn't used:
    # the rank is read from the environment.
    click.Option(["--local_rank", "--local-rank"], hidden=True),
)
"""The options of all commands, which may come before or after the command's name."""

FILES_ARGUMENT = click.Argument(
    ["configuration_files"],
    nargs=-1,
    metavar="[FILE]...",
    help="configuration files, as --configs names them",
    shell_complete=complete_configs,
)


class Options(SimpleNamespace):
    """The options of a command line: an attribute for each option and argument of the command, and `command`,
    the command's full name."""


class WordsOption(click.Option):
    """An option that takes all words up to the next option: ``--languages slips "first of 8"``."""

    def __init__(self, names: Sequence[str], **settings: Any) -> None:
        super().__init__(names, multiple=True, **settings)


class Command(click.Command):
    """A command of the command line.

    Example: ``Command("doctor", doctor, "check this machine (…)", "Checks versions, …", ("treetune
    doctor",))``.
    """

    name: str

    def __init__(
        self,
        name: str,
        run: Callable[[Options], int],
        summary: str,
        description: str,
        examples: tuple[str, ...],
        arguments: tuple[click.Parameter, ...] = (),
        in_ranks: bool = False,
        takes_files: bool = False,
    ) -> None:
        """Makes a command.

        Args:
            run: Carries out the command, and returns the exit code.
            summary: The line in the list of commands, which begins with a verb and has no full stop.
            description: The text in its own help.
            examples: Command lines that help shows.
            arguments: Its own options and arguments.
            in_ranks: Whether `treetune run` may start it, in as many processes as there are GPUs.
            takes_files: Whether configuration files may follow it, as in ``treetune check grpo.jsonnet``.
                They are added as those of --configs are.
        """
        # `FILES_ARGUMENT` comes last: click gives words to arguments from left to right, and `FILES_ARGUMENT`
        # takes all words.
        parameters = [*SHARED_OPTIONS, *arguments, *([FILES_ARGUMENT] if takes_files else [])]
        super().__init__(name, params=parameters, help=description, short_help=summary)
        self.run, self.summary, self.description, self.examples = run, summary, description, examples
        self.arguments, self.in_ranks, self.takes_files = arguments, in_ranks, takes_files

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._name_options(args))

    def _name_options(self, words: Sequence[str]) -> list[str]:
        """Returns a command line in which each word that belongs to an option comes right after it.

        ``run a.jsonnet --num_gpus 2 b.jsonnet`` becomes ``run --configs a.jsonnet --num_gpus 2 --configs
        b.jsonnet``, so that files keep their order, whichever way each was named. ``--languages a b`` becomes
        ``--languages a --languages b``.
        """
        options: dict[str, click.Option] = {}  # those that take values, by their names such as --configs
        for parameter in self.params:
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                options |= dict.fromkeys(parameter.opts, parameter)
        changed_words: list[str] = []
        option: click.Option | None = None  # the latest option, if it takes a value
        has_value = False  # whether its first value has come
        for word in words:
            if option is not None and not has_value:
                has_value = True
            elif word.startswith("-"):
                option, has_value = options.get(word), False
            elif isinstance(option, WordsOption):  # it takes several values: this word is a further value
                changed_words.append(option.opts[0])
            elif self.takes_files and word.endswith((*CONFIGURATION_SUFFIXES, BASE_SUFFIX)):
                changed_words.append("--configs")
            changed_words.append(word)
        return changed_words

    @override
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{format_examples(self)}\n")

    @override
    def invoke(self, ctx: click.Context) -> Options:
        """Returns the options: those that came before the command, and its own."""
        options_before_command = ctx.parent.params if ctx.parent else {}
        parameters = dict(ctx.params)
        # `_name_options` has put --configs before each word with the ending of a configuration file. Other
        # words, such as `grpo`, may be files' names without their endings. They are passed on as files, so
        # that the message about a missing file names the file that was meant.
        files_without_ending = parameters.pop(FILES_ARGUMENT.name, ())
        options = Options(**parameters, command=self.name)
        options.configs = [*options_before_command["configs"], *options.configs, *files_without_ending]
        options.override = [*options_before_command["override"], *options.override]
        options.debug = options_before_command["debug"] or options.debug
        return options


def format_examples(*commands: Command) -> str:
    """Returns examples of commands as one types them into a shell, wrapped to the width of a screen."""
    lines = ["Examples:"]
    for command in commands:
        for example in command.examples:
            # Keeps a quoted text on one line: its spaces are non-breaking until the lines are wrapped.
            unbroken = re.sub(r"'[^']*'|\"[^\"]*\"", lambda quoted: quoted[0].replace(" ", "\xa0"), example)
            # All pieces but the first are indented by 6 spaces.
            pieces = textwrap.wrap(unbroken, HELP_WIDTH - 6, break_long_words=False, break_on_hyphens=False)
            lines.append("  " + " \\\n      ".join(pieces).replace("\xa0", " "))
    return "\n".join(lines)


def say(text: str) -> None:
    """Prints a text. Raises ClosedPipe if the program that reads the output has ended."""
    try:
        print(text, flush=True)
    except BrokenPipeError as error:
        # The interpreter flushes once more at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ClosedPipe from error


def files_of(options: Options) -> list[str]:
    """Returns the configuration files of a command line: ``--configs a,b --configs c`` gives a, b and c."""
    names: list[str] = []
    for text in options.configs or ():
        names += [name.strip() for name in text.split(",")]
    return [name for name in names if name]


def evaluate_configuration(options: Options) -> Config:
    """Returns the evaluated configuration of a command line. Raises ConfigError if it can't be evaluated."""
    from treetune.config.jsonnet import ENVIRONMENT_KEYS, load
    from treetune.config.schema import keys_of

    configs = files_of(options)
    config = load(configs, options.override or ())
    # The class that the whole configuration chooses by its `type`, such as a class of experiments or tables.
    type_name = config.data.get("type")
    parts = root_family(config).parts_by_name()
    root_class = parts.get(type_name) if isinstance(type_name, str) else None
    if root_class is None:
        return config
    # `load` has set keys from environment variables, such as `seed` from APP_SEED. The class may not have all
    # of these keys: a table has no seed, since APP_SEED is for its experiments. So the configuration is then
    # evaluated again with only the environment's keys that the class has.
    environment_keys = [key for key in ENVIRONMENT_KEYS if key in keys_of(root_class)]
    if len(environment_keys) == len(ENVIRONMENT_KEYS):
        return config
    return load(configs, options.override or (), environment_keys=environment_keys)


def root_family(config: Config, expected: str = "an experiment") -> type[Registrable]:
    """Returns the family of a configuration's root, such as the family of experiments.

    This is the family that has a part with the configuration's `type`. If no family has one, it is the family
    whose root is called `expected`.
    """
    families = root_families()
    name = config.data.get("type")
    for family in families:
        if isinstance(name, str) and name in family.parts_by_name():
            return family
    return next(family for family in families if family.root == expected)


def build_root(
    config: Config, command: str, expected: str | None, more_folders: Sequence[str] = ()
) -> Registrable:
    """Builds and checks the object graph of a configuration, and prints its warnings.

    Args:
        command: The name of the command, for messages.
        expected: What the configuration must be: "an experiment", "a table" or "a data pipeline". None: any.
        more_folders: Further folders in which the user's modules are looked for.

    Raises:
        ConfigError: Everything that is wrong with the configuration.
    """
    from treetune.config.build import build_with_warnings
    from treetune.config.errors import ConfigIssue, wrap_text
    from treetune.config.explain import Explanation, describe_overridden_files
    from treetune.config.imports import import_parts
    from treetune.exceptions import ConfigError

    explanation = Explanation(config, [*more_folders, *recorded_module_folders(config)])
    import_parts(config.data, explanation)
    # If the `type` is unknown, the mistake is reported as one in `expected`. If any kind of configuration is
    # expected, it is reported as one in an experiment.
    family = root_family(config) if expected is None else root_family(config, expected)
    if expected is not None and family.root != expected:
        issue = ConfigIssue(
            f"{command} works on {expected}, and this configuration is {family.root}",
            key="type",
            source=explanation.source(("type",)),
            remedy="`treetune run` trains an experiment, `treetune make_table` writes a table, and the"
            " command that is called like its type, such as `treetune prepare_data`, runs a data pipeline",
        )
        raise ConfigError([issue])
    root, warnings = build_with_warnings(family, config.data, explanation)
    if os.environ.get("RANK", "0") == "0":
        for note in [*describe_overridden_files(config), *warnings]:
            print(wrap_text("note: ", note), file=sys.stderr)
    return root


def recorded_module_folders(config: Config) -> list[str]:
    """Returns the folders in which runs found the user's modules, for each configuration file that is a run's
    stored configuration.

    The modules of such a run may be beside the files that it was started with, and aren't in its folder.
    """
    from treetune.runtime.directory import CONFIG, ExperimentDirectory
    from treetune.runtime.manifest import read_manifest

    module_folders: list[str] = []
    for layer in config.layers:
        if layer.path is not None and layer.path.name == CONFIG:
            manifest = read_manifest(ExperimentDirectory(layer.path.parent))
            module_folders += manifest.get("own_folders", ())
    return module_folders


def root_families() -> list[type[Registrable]]:
    """Returns the families of whole configurations: experiments, tables, data pipelines."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.registrable import Registrable

    return [family for family in Registrable.__subclasses__() if family.root]


def import_own_parts(experiment: Path) -> None:
    """Imports the user's parts that an experiment's stored configuration names. Their modules are looked for
    in the present folder."""
    from treetune.config.imports import import_parts
    from treetune.runtime.directory import ExperimentDirectory

    stored_config = ExperimentDirectory(experiment).config_file
    config = json.loads(stored_config.read_text()) if stored_config.is_file() else {}
    import_parts(config)  # even with an empty configuration, this imports the parts of installed packages
