"""Commands that print, check and explain a configuration, and list what a configuration can choose."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from treetune.cli.command import (
    Command,
    Options,
    build_root,
    evaluate_configuration,
    recorded_module_folders,
    root_families,
    root_family,
    say,
)
from treetune.cli.completion import complete_family_names, complete_part_names

LIST_WIDTH = 110
"""Characters of a line of lists and descriptions."""

if TYPE_CHECKING:
    from treetune.config.errors import ConfigIssue
    from treetune.config.explain import Explanation, Setting
    from treetune.config.layers import Config
    from treetune.config.reference import PartEntry
    from treetune.config.schema import Key


def print_config(options: Options) -> int:
    """Prints the evaluated configuration as JSON."""
    say(json.dumps(evaluate_configuration(options).data, indent=2, ensure_ascii=False))
    return 0


def check_config(options: Options) -> int:
    """Checks a configuration: prints notes, and ``fine`` if there is no error.

    Raises:
        ConfigError: All mistakes of the configuration. If there are none, all that this machine lacks for it.
    """
    config = evaluate_configuration(options)
    root = build_root(config, options.command, expected=None)  # any kind of configuration
    from treetune.config.errors import wrap_text
    from treetune.config.explain import Explanation
    from treetune.config.remedies import issues_of_this_machine
    from treetune.contracts import Root
    from treetune.exceptions import ConfigError

    explanation = Explanation(config)
    try:
        # Experiments and tables can be examined. A data pipeline isn't a Root, and has no notes.
        notes = list(root.examine(config.data)) if isinstance(root, Root) else []
    except ConfigError as error:
        raise ConfigError([_add_source(issue, explanation) for issue in error.issues]) from error
    for note in notes:
        label = "" if note.startswith("warning: ") else "note: "
        print(wrap_text(label, note), file=sys.stderr)
    if not options.config_only:
        _warn_of_another_run(config, root)
    issues_of_machine = issues_of_this_machine(root, explanation)
    if issues_of_machine and not options.config_only:
        raise ConfigError(
            issues_of_machine, "missing on this machine (`check --config-only` leaves this out)"
        )
    for issue in issues_of_machine:
        print(wrap_text("note: ", f"missing here: {issue.key}: {issue.what}"), file=sys.stderr)
    say(f"fine: {config.data['type']} {config.data.get('experiment_name', '')}".rstrip())
    return 0


def _warn_of_another_run(config: Config, root: object) -> None:
    """Prints a warning if `treetune run` would not start the experiment, because the experiment's folder
    holds a run with another configuration, or can't be read."""
    from treetune.config.errors import wrap_text
    from treetune.exceptions import Damaged, FolderRefused
    from treetune.runtime.base import PolicyIteration
    from treetune.runtime.directory import ExperimentDirectory
    from treetune.runtime.manifest import refuse_other_configuration

    if not isinstance(root, PolicyIteration):  # a table or a data pipeline
        return
    try:
        refuse_other_configuration(ExperimentDirectory.of(root), root, config.data)
    except (FolderRefused, Damaged, OSError) as error:
        print(wrap_text("", f"warning: `treetune run` will not start: {error}"), file=sys.stderr)


def _add_source(issue: ConfigIssue, explanation: Explanation) -> ConfigIssue:
    """Returns an issue with the file that set the wrong value, if it doesn't name one yet."""
    from treetune.config.remedies import find_source

    path = tuple((issue.key or "").split("."))
    return replace(issue, source=issue.source or find_source(path, explanation))


def explain_config(options: Options) -> int:
    """Prints the value of a key, what the key means, and everything that sets it."""
    from treetune.config.explain import MISSING_VALUE, Explanation
    from treetune.config.imports import import_parts

    config, name = evaluate_configuration(options), options.key
    path = tuple(name.split("."))
    explanation = Explanation(config, recorded_module_folders(config))
    import_parts(config.data, explanation)
    value, settings = explanation.value(path), explanation.settings(path)
    owner, key = _find_declaration(config, path)
    if value is not MISSING_VALUE:
        say(f"{name} = {_format_value(value)}")
    elif key and not key.required:
        say(f"{name} = {_format_value(key.default)}  (the default: nothing sets it)")
    elif settings:
        # A file set it in an object that a later file replaces as a whole.
        say(f"{name} is not set: what set it was replaced by {explanation.source(path[:-1])}")
    elif key:
        say(f"{name} is not set, and has no default")
    else:
        raise _unknown_key(config, name)
    value_of_example = key.default if key and value is MISSING_VALUE else value
    for line in [
        *_describe_key(path[-1], owner, key),
        *_example_override(path, value_of_example),
        *_describe_keys_below(config, path, value),
        *_list_settings(settings),
    ]:
        say(line)
    return 0


def _find_declaration(config: Config, path: tuple[str, ...]) -> tuple[type | None, Key | None]:
    """Returns the class that has the key at `path`, and the key's declaration."""
    from treetune.config.build import part_at
    from treetune.config.schema import keys_of

    owner = part_at(root_family(config), config.data, path[:-1])
    if owner is None:
        return None, None
    return owner, keys_of(owner).get(path[-1])


def _describe_key(name: str, owner: type | None, key: Key | None) -> Iterator[str]:
    """Yields lines with the type, bounds, default and meaning of a key. For the key `type`, a line with the
    types to choose from comes first."""
    if owner is None:
        return
    from treetune.config.errors import wrap_text
    from treetune.config.reference import key_entry
    from treetune.config.schema import family_of, family_word, list_names

    if name == "type" and (family := family_of(owner)):
        yield wrap_text("  type      ", f"a {family_word(family)}: {list_names(family.parts_by_name())}")
    if key is None:
        return

    entry = key_entry(owner, key)
    default = "it must be given" if entry.default is None else f"by default {entry.default}"
    yield wrap_text("  type      ", f"{entry.type}; {default}")
    if entry.meaning:
        yield wrap_text("  meaning   ", entry.meaning)


def _example_override(path: tuple[str, ...], value: Any) -> Iterator[str]:
    """Yields an example of --override that sets a key to `value`.

    Yields nothing for a key without a value, for an object or a list, and for a key in a list.
    """
    from treetune.config.remedies import override_option
    from treetune.config.schema import NO_DEFAULT

    has_plain_value = value is not NO_DEFAULT and not isinstance(value, dict | list)
    if has_plain_value and all(map(str.isidentifier, path)):  # the path of an item of a list has a number
        yield f"  example   {override_option(path, _format_value(value))}"


def _describe_keys_below(config: Config, path: tuple[str, ...], value: Any) -> Iterator[str]:
    """Yields the keys of the part at a path, with their values."""
    from treetune.config.build import part_at
    from treetune.config.reference import part_entry

    part = part_at(root_family(config), config.data, path) if isinstance(value, dict) else None
    if part is None:
        return
    keys = part_entry(part).keys
    yield f"  keys      of {part.__module__}.{part.__qualname__}:"
    width = max((len(key.name) for key in keys), default=0)
    for key in keys:
        text = _format_value(value[key.name]) if key.name in value else f"{key.default}  (the default)"
        if len(text) > 50:
            text = f"{text[:49]}…"
        yield f"    {key.name:<{width}}  {text:<24}  {key.type}"


def _list_settings(settings: Sequence[Setting]) -> list[str]:
    """Returns a line for each file, variable or override that sets a key: its place and the value there."""
    width = max((len(setting.location) for setting in settings), default=0)
    return [f"  {setting.location:<{width}}  {_format_value(setting.value)}" for setting in settings]


def complete_keys(ctx: click.Context, parameter: click.Parameter, prefix: str) -> list[str]:
    """Returns the key paths of the configuration that the command line names so far."""
    from treetune.config.errors import dotted_key
    from treetune.config.explain import key_paths
    from treetune.exceptions import ConfigError

    options_before_command = ctx.parent.params if ctx.parent else {}  # the options before the command's name
    options = Options(
        configs=[*options_before_command.get("configs", ()), *ctx.params.get("configs", ())],
        override=[*options_before_command.get("override", ()), *ctx.params.get("override", ())],
    )
    try:
        data = evaluate_configuration(options).data
    except ConfigError:
        return []  # the configuration is wrong, or not named yet
    return [path for path in map(dotted_key, key_paths(data)) if path.startswith(prefix)]


def _unknown_key(config: Config, name: str) -> ValueError:
    """Returns the error about a key that doesn't exist, with the nearest of the existing ones."""
    from treetune.config.build import keys_at
    from treetune.config.errors import ConfigIssue, dotted_key, nearest
    from treetune.config.explain import key_paths
    from treetune.exceptions import ConfigError

    path = tuple(name.split("."))
    siblings = keys_at(root_family(config), config.data, path[:-1])
    # Keys that are set, and other keys of the same object, which may have their defaults.
    candidates = {*key_paths(config.data), *((*path[:-1], sibling) for sibling in siblings)}
    near = nearest(name, sorted(map(dotted_key, candidates)), count=3)
    remedy = f"did you mean {' or '.join(near)}?" if near else "`treetune print_config` shows all of them"
    return ConfigError([ConfigIssue("there is no such key", name, remedy=remedy)])


def _format_value(value: Any) -> str:
    """Returns a value as JSON. For a value that is computed, returns words."""
    from treetune.config.explain import COMPUTED_VALUE, as_plain

    return repr(value) if value is COMPUTED_VALUE else json.dumps(value, ensure_ascii=False, default=as_plain)


# Parts


def list_parts(options: Options) -> int:
    """Prints the parts of all families, or of one, with at most two lines about each part."""
    from treetune.config import reference, schema

    _register_parts(options)
    families = reference.list_families()
    if options.family is not None:
        by_name = {reference.with_underscores(schema.family_word(family)): family for family in families}
        name = reference.with_underscores(options.family)
        if name not in by_name:
            raise _unknown_name("family of parts", options.family, list(by_name))
        families = [by_name[name]]
    for family in families:
        first_sentence = reference.first_sentence_of(family)
        heading = schema.family_word(family)
        say(f"{heading}: {first_sentence}" if first_sentence else heading)
        entries = reference.part_entries(family)
        # The parts of a family have names: `or ""` is for the type checker.
        width = max(len(entry.name or "") for entry in entries)
        for entry in entries:
            origin = f"(of {entry.part.__module__}) " if schema.is_from_outside(entry.part) else ""
            lines = textwrap.wrap(
                origin + reference.first_sentence_of(entry.part),
                LIST_WIDTH - width - 4,
                max_lines=2,
                placeholder=" …",
                break_on_hyphens=False,
            )
            say(f"  {entry.name:<{width}}  {lines[0] if lines else ''}")
            for line in lines[1:]:
                say(f"  {'':<{width}}  {line}")
        say("")
    return 0


def describe(options: Options) -> int:
    """Prints the docstring and the keys of a part."""
    from treetune.config import reference, schema

    _register_parts(options)
    entries_by_name = reference.find_describable_entries()
    # The user may write spaces or capitals, as in "Model Source", where names have underscores.
    normalized_name = reference.with_underscores(options.part)
    entries = entries_by_name.get(options.part) or entries_by_name.get(normalized_name)
    if not entries:
        families = reference.list_families()
        family_names = {reference.with_underscores(schema.family_word(family)) for family in families}
        if normalized_name in family_names:
            raise ValueError(
                f"{options.part!r} is a family of parts: `treetune parts {options.part}` lists them, and"
                f" `treetune describe {options.part}.NAME` describes one"
            )
        raise _unknown_name("part", options.part, list(entries_by_name))
    for entry in entries:  # several families may have a part of this name
        say("\n".join(_describe_part(entry)))
        say("")
    return 0


def print_schema(options: Options) -> int:
    """Prints the JSON schema of whole configurations."""
    from treetune.config.reference import json_schema

    _register_parts(options)
    say(json.dumps(json_schema(root_families()), indent=1, ensure_ascii=False))
    return 0


def _describe_part(entry: PartEntry) -> list[str]:
    """Returns the lines about a part: its name, its docstring, and its keys with their defaults."""
    lines = [f"{entry.title}  ({entry.qualified_name})", "", textwrap.indent(entry.text, "  "), ""]
    for key in entry.keys:
        default = "no default" if key.default is None else f"default {key.default}"
        lines.append(
            textwrap.fill(f"  {key.name}: {key.type}; {default}", LIST_WIDTH, subsequent_indent="      ")
        )
        if key.meaning:
            lines.append(
                textwrap.fill(key.meaning, LIST_WIDTH, initial_indent="      ", subsequent_indent="      ")
            )
    return lines


def _register_parts(options: Options) -> None:
    """Registers treetune's parts, those of installed packages, and those that a configuration imports."""
    import treetune.parts  # noqa: F401  (registers them)
    from treetune.config.explain import Explanation
    from treetune.config.imports import import_parts

    if options.configs or options.override:
        config = evaluate_configuration(options)
        import_parts(config.data, Explanation(config, recorded_module_folders(config)))
    else:
        import_parts({})  # imports the parts of installed packages alone


def _unknown_name(what: str, name: str, names: list[str]) -> ValueError:
    """Returns the error about an unknown part or family, with the nearest of the existing names."""
    from treetune.config.errors import nearest

    near = nearest(name, names, count=3)
    remedy = f"did you mean {' or '.join(near)}?" if near else "`treetune parts` lists them"
    return ValueError(f"there is no {what} {name!r}: {remedy}")


def list_configurations(options: Options) -> int:
    """Prints the shipped configurations by kind: all, or those with a word in their name or first line."""
    from treetune.config.catalogue import find_configurations

    listed = list(find_configurations(options.word or ""))
    if not listed:
        raise ValueError(
            f"no configuration has {options.word!r} in its name or its first line:"
            " `treetune configs` lists all of them"
        )
    width = max(len(entry.name) for entry in listed)
    kind = None
    for entry in listed:
        if entry.kind != kind:  # a heading, with an empty line before all but the first
            say(entry.kind if kind is None else f"\n{entry.kind}")
            kind = entry.kind
        about = entry.about
        if sys.stdout.isatty():  # a program that reads the list, such as `grep`, gets the whole text
            about = textwrap.shorten(about, LIST_WIDTH, placeholder=" …")
        say(f"  {entry.name:{width}}  {about}")
    return 0


EXAMPLE_OPTIONS = "--configs configs/quickstart/vineppo.jsonnet"

COMMANDS = (
    Command(
        "print_config",
        print_config,
        "print the evaluated configuration as JSON",
        "Evaluates the files, the environment's APP_* variables and the overrides, and prints the resulting"
        " object. It checks nothing.",
        (f"treetune print_config {EXAMPLE_OPTIONS} --override '{{seed: 3}}'",),
        takes_files=True,
    ),
    Command(
        "check_config",
        check_config,
        "list all mistakes of a configuration, and what is missing here",
        "Lists everything that is wrong with an experiment, a table or a data pipeline: each mistake with its"
        " key, the file that made it and a remedy. It also lists the files, models, GPUs and packages that"
        " the experiment needs and this machine doesn't have. The exit code is then 2. Nothing is started.",
        ("treetune check quickstart/sft.jsonnet", f"treetune check {EXAMPLE_OPTIONS} --config-only"),
        (
            click.Option(
                ["--config-only"],
                is_flag=True,
                help="what this machine doesn't have is a note, for a run on another one",
            ),
        ),
        takes_files=True,
    ),
    Command(
        "explain_config",
        explain_config,
        "show a key's value, type and meaning, and every file that sets it",
        "Shows the value of a key, its type with bounds and default, its meaning, and every file, variable"
        " and override that sets it; the last one wins. For an object it lists the keys.",
        (
            f"treetune explain {EXAMPLE_OPTIONS} trainer.learning_rate",
            f"treetune explain {EXAMPLE_OPTIONS} credit",
        ),
        (
            click.Argument(
                ["key"],
                metavar="KEY.PATH",
                help="such as trainer.learning_rate",
                shell_complete=complete_keys,
            ),
        ),
        takes_files=True,
    ),
    Command(
        "configs",
        list_configurations,
        "list the shipped configurations, a line each",
        "Lists the experiments, tables, data sets, presets and fragments below configs/, each with the first"
        " sentence of its file. With WORD it lists those whose name or sentence contains it.",
        ("treetune configs", "treetune configs grpo"),
        (
            click.Argument(
                ["word"], required=False, metavar="[WORD]", help="such as grpo or MATH; default: all"
            ),
        ),
    ),
    Command(
        "list_parts",
        list_parts,
        "list what a configuration can choose by `type`, family by family",
        "Lists all registered parts with a line about each, or those of one family. With a configuration it"
        " includes the parts that this imports.",
        ("treetune parts", "treetune parts credit"),
        (
            click.Argument(
                ["family"],
                required=False,
                metavar="[FAMILY]",
                help="such as credit; default: all",
                shell_complete=complete_family_names,
            ),
        ),
        takes_files=True,
    ),
    Command(
        "describe",
        describe,
        "show a part's keys with types, bounds, defaults and meaning",
        "Describes a part by its `type` (group), with its family if several parts share the name"
        " (grader.math), or an object without type (evaluation_set).",
        ("treetune describe group", "treetune describe grader.math", "treetune describe evaluation_set"),
        (
            click.Argument(
                ["part"],
                metavar="PART",
                help="such as group, grader.math or evaluation_set",
                shell_complete=complete_part_names,
            ),
        ),
        takes_files=True,
    ),
    Command(
        "schema",
        print_schema,
        "print a JSON schema of experiments, tables and pipelines, for editors",
        "Prints a JSON schema: parts, keys, types, bounds, meanings, defaults. With it, an editor completes"
        " and checks experiments in YAML or JSON as you write them. With a configuration it includes the"
        " parts that this imports.",
        ("treetune schema", "treetune schema --configs examples/own_parts/rank.jsonnet"),
        takes_files=True,
    ),
)
