"""Writes remedies: what to change, and in which file, to fix a mistake in a configuration."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treetune.config import schema
from treetune.config.errors import ConfigIssue, did_you_mean, dotted_key, nearest
from treetune.config.explain import Explanation
from treetune.config.registrable import Registrable
from treetune.contracts import Finding, KeyPath
from treetune.findings import collect_findings

KEY_BY_FOREIGN_NAME = {
    "lr": "learning_rate",
    "batch_size": "minibatch_size",
    "max_new_tokens": "max_tokens",
    "num_generations": "samples",
    "group_size": "samples",
    "n": "samples",
    "model_name_or_path": "name_or_path",
}
"""Keys by their names in other libraries, each with its name here."""

_KEYWORDS = (
    "assert|else|error|false|for|function|if|import|importbin|importstr|in|local|null|self|super|tailstrict"
    "|then|true"
)
_FIELD_NAME = re.compile(rf"(?!(?:{_KEYWORDS})$)[A-Za-z_][A-Za-z0-9_]*")
"""A key that Jsonnet takes without quotation marks."""


@dataclass(frozen=True)
class Owner:
    """The class whose keys an object of the configuration has.

    Example: for ``credit: { type: 'gae' }``, the part `Gae` with the name ``gae``, of the family `Credit`.
    An object without ``type`` has neither name nor family.
    """

    part: type
    name: str | None = None
    family: type[Registrable] | None = None

    @property
    def label(self) -> str:
        """The class in messages, such as "credit 'group'"."""
        return (
            f"{schema.family_word(self.family)} {self.name!r}"
            if self.family
            else schema.family_word(self.part)
        )


def issue_of_unknown_key(
    key: KeyPath,
    owner: Owner,
    keys_by_object: Mapping[KeyPath, Sequence[str]],
    explanation: Explanation | None,
) -> ConfigIssue:
    """Returns the issue of an unknown key.

    Args:
        key: The path of the unknown key.
        owner: The class of the object that has the key.
        keys_by_object: The keys of all objects of the configuration, since the key may belong to another one.
        explanation: Tells which file sets a key.
    """
    name_in_file = key[-1]
    # If it is the name of a key in another library, such as `lr`, this is the name here: `learning_rate`.
    name = KEY_BY_FOREIGN_NAME.get(name_in_file, name_in_file)
    # The paths of other objects that have this key
    objects_with_key = [
        path for path, names in keys_by_object.items() if name in names and _is_writable(path)
    ]
    types = schema.registered_parts(owner.family).items() if owner.family else ()
    types_with_key = [repr(type_name) for type_name, part in types if name_in_file in schema.keys_of(part)]
    if types_with_key:
        # Often another file sets `type` in an object whose other keys belong to the earlier type.
        name_of_object = dotted_key(key[-2:-1])  # the key of the object around it; empty for the root object
        remedy = (
            f"it is a key of {' and '.join(types_with_key)}: choose that type or drop the key; where the type"
            f" was changed over another file's object, write `{name_of_object}: {{…}}` there, without `+`"
        )
    elif name == "type" and owner.family is None:
        remedy = f"there is only one kind of {owner.label}: leave it out"
    elif objects_with_key and not meant_key(key, owner):  # it isn't like a key that its own object may have
        remedy = f"it belongs elsewhere: {override_option((*objects_with_key[0], name))}"
    else:
        remedy = did_you_mean(name, list(schema.keys_of(owner.part)))
    where = find_source(key, explanation)
    source_of_type = find_source((*key[:-1], "type"), explanation)
    if types_with_key and source_of_type and source_of_type != where:
        where = f"{where}; the type is from {source_of_type}"
    return ConfigIssue(f"unknown key of {owner.label}", dotted_key(key), where, remedy)


def meant_key(key: KeyPath, owner: Owner) -> str | None:
    """Returns the key that an unknown one is a misspelling of."""
    match = nearest(KEY_BY_FOREIGN_NAME.get(key[-1], key[-1]), schema.keys_of(owner.part))
    return match[0] if match else None


def issue_of_missing_key(key: KeyPath, declared: schema.Key, explanation: Explanation | None) -> ConfigIssue:
    return _issue_of_missing(
        key, f"missing, should be {schema.describe_type(declared.annotation)}", None, explanation
    )


def issue_of_missing_type(
    key: KeyPath, family: type[Registrable], explanation: Explanation | None
) -> ConfigIssue:
    """Returns the issue of an object at `key` that has no `type`."""
    word = schema.family_word(family)
    fault = f"missing: `type` says which {word} this is"
    remedy = f"types of {word}: {schema.list_names(schema.registered_parts(family))}"
    return _issue_of_missing((*key, "type"), fault, remedy, explanation)


def _issue_of_missing(
    key: KeyPath, fault: str, further_remedy: str | None, explanation: Explanation | None
) -> ConfigIssue:
    """Returns the issue of a missing key. `fault` tells what is wrong, and `further_remedy` is added to the
    remedy.

    If a file sets the key, and a later file replaces the object around the key, the remedy is to extend that
    object.
    """
    setter_of_object = find_source(key[:-1], explanation)  # None for a key of the root object
    settings = explanation.settings(key) if explanation else []  # all places that set the key
    if settings and setter_of_object:
        # The most common mistake in Jsonnet: `trainer: {…}` instead of `trainer+: {…}`.
        remedy = (
            f"{settings[-1].location} sets it, and {setter_of_object} replaces the whole of"
            f" {dotted_key(key[:-1])}: write `{key[-2]}+: {{…}}` there to keep what was set before"
        )
        return ConfigIssue(fault, dotted_key(key), setter_of_object, remedy)
    where = "no file sets it"
    if setter_of_object:
        where += f"; the object is made by {setter_of_object}"
    remedy = "; ".join(filter(None, [how_to_set(key), further_remedy]))
    return ConfigIssue(fault, dotted_key(key), where, remedy)


def issue_of_refusal(
    key: KeyPath, owner: Owner, data: Mapping[str, Any], error: ValueError, explanation: Explanation | None
) -> ConfigIssue:
    """Returns the issue of an object whose values are right one by one, and wrong together.

    `owner` is the object's class, and `error` is what its constructor raised.
    """
    # A word in braces is a template's placeholder, not a key.
    words_of_message = set(re.findall(r"\w+", re.sub(r"\{\w+\}", "", str(error))))
    named_keys = [name for name in schema.keys_of(owner.part) if name in words_of_message]
    if named_keys:
        paths = " or ".join(dotted_key((*key, name)) for name in named_keys)
        remedy = f"change {paths}, e.g. {override_option((*key, named_keys[0]))}"
    elif key:
        remedy = f"change {dotted_key(key)}"
    else:
        # The root object has no path, and the message says which two values contradict each other.
        remedy = "change one of the two"
    where = find_source(key, explanation)
    keys_in_data = [name for name in named_keys if name in data]  # the others have their defaults
    if explanation and keys_in_data:
        where = ", ".join(f"{name} from {find_source((*key, name), explanation)}" for name in keys_in_data)
    return ConfigIssue(str(error), dotted_key(key) or "configuration", where, remedy)


def issue_of_finding(key: KeyPath, finding: Finding, explanation: Explanation | None) -> ConfigIssue:
    """Returns the issue of a problem that a part found in the configuration. `key` is the key to change."""
    where = find_source(key, explanation)
    example = ""
    if key and _is_writable(key) and "--override" not in finding.remedy:
        example = f"; e.g. {override_option(key)}"
    return ConfigIssue(finding.what, dotted_key(key) or "configuration", where, finding.remedy + example)


def issues_of_this_machine(root: Any, explanation: Explanation | None) -> list[ConfigIssue]:
    """Returns an issue for everything that the parts of a configuration need and this machine doesn't
    have: files, models, GPUs, packages."""
    issues = []
    for key, finding in collect_findings(root):
        if finding.level == "missing":
            where = find_source(key, explanation)
            issues.append(ConfigIssue(finding.what, dotted_key(key) or None, where, finding.remedy or None))
    return issues


def suggest_value(annotation: Any, data: Any) -> str | None:
    """Returns how to write the same value correctly; None if that can't be guessed."""
    expected = schema.describe_type(annotation)
    if isinstance(data, str):
        choices: list[str] = []  # the texts of Literals
        without_constraints, _ = schema.split_constraints(annotation)
        for alternative in schema.alternatives_of(without_constraints):
            choices += [value for value in getattr(alternative, "__args__", ()) if isinstance(value, str)]
        match = nearest(data, choices)
        if match:
            return f"did you mean {match[0]!r}?"
        # Whether the text would be a number in Jsonnet without its quotes
        is_number = re.fullmatch(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?", data)
        is_boolean = data in ("true", "false")
        if (is_number and "number" in expected) or (is_boolean and "true or false" in expected):
            return f"write it without quotes: {data}"
        if expected.startswith("a list of") and "strings" in expected:
            return f"write [{data!r}]"
    elif isinstance(data, int | float) and expected.startswith("a string"):
        return f"write it with quotes: '{json.dumps(data)}'"
    return None


def how_to_set(key: KeyPath) -> str | None:
    return f"set {dotted_key(key)} in a file, or {override_option(key)}" if key else None


def find_source(key: KeyPath, explanation: Explanation | None) -> str | None:
    """Returns the file and line that set a key, or else the object around it."""
    while explanation and key:
        setter = explanation.source(key)
        if setter:
            return setter
        key = key[:-1]
    return None


def override_option(key: KeyPath, value: str = "…") -> str:
    """Returns the option that sets a key, quoted for a shell.

    Example: ``--override '{trainer+: {learning_rate: 1e-4}}'``. Jsonnet can't change an item of a list, so
    the override sets the first list on the path as a whole.

    Args:
        key: The key's path.
        value: The value in Jsonnet.
    """
    for depth, part in enumerate(key):
        if part.isdecimal():  # the number of a list's item
            key, value = key[:depth], "[…]"
            break
    # The text grows from the last key outwards: `{learning_rate: 1e-4}`, then the object around it.
    text = value
    colon = ": "
    for part in reversed(key):
        name = part if _FIELD_NAME.fullmatch(part) else json.dumps(part, ensure_ascii=False)
        text = "{" + name + colon + text + "}"
        colon = "+: "  # the objects around the last key keep their other keys
    return f"--override {shlex.quote(text)}"


def shorten_value(value: Any) -> str:
    """Returns a value as JSON, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def _is_writable(key: KeyPath) -> bool:
    """Returns whether a path has keys only: Jsonnet can't change one item of a list."""
    return not any(part.isdecimal() for part in key)
