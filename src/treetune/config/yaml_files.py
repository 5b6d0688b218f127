"""YAML files as Jsonnet: YAML 1.2 with its core schema, read by PyYAML.

PyYAML finds the structure (anchors, quotes, lines). The meaning of a text without quotes is decided
here: PyYAML's rules are those of YAML 1.1, where ``no`` is false and ``1:30`` is 90.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from treetune.config.errors import ConfigIssue
from treetune.exceptions import ConfigError

if TYPE_CHECKING:
    import yaml

LARGEST_WHOLE_NUMBER = 2**53 - 1
"""Jsonnet's numbers are doubles: whole numbers beyond this would change silently."""

MOST_VALUES_OF_FILE, MOST_CHARACTERS_OF_VALUES = 100_000, 10_000_000
"""The most values of one file, and the most characters of its values. What aliases repeat is counted, too:
ten aliases of ten aliases, eight times over, are a hundred million values. A configuration has a few
hundred."""
DEEPEST_NESTING = 100
"""The most values within each other."""

# The core schema, section 10.3.2 of the specification of YAML 1.2.2.
_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

_TAG_PREFIX = "tag:yaml.org,2002:"
_PLAIN_TAG, _TEXT_TAG = _TAG_PREFIX + "plain", _TAG_PREFIX + "str"
"""The tags of texts without and with quotes. The first is made up here and doesn't occur in files."""

YamlScalar = str | int | float | bool | None


def jsonnet_of_yaml(text: str, name: str) -> str:
    """Returns a YAML file as Jsonnet, with each key on the same line as in the file. A key that ends with
    ``+`` is merged into the object of earlier files, as in Jsonnet::

        trainer+:            {"trainer"+:
          rate: .5     →     {"rate": 0.5}}

    Raises ConfigError, with line and column in the file that is called `name`, for invalid YAML, for two
    equal keys, and for values that a configuration can't hold.
    """
    reader = _YamlReader(name)
    top = _parse_document(text, reader)
    writer = _Writer(reader)
    writer.write_value(top)
    return "".join(writer.pieces)


def _parse_document(text: str, reader: _YamlReader) -> yaml.Node:
    """Returns the only document of a file. Raises ConfigError if the file has none, or two."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Leaves open what a text without quotes means."""

        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

        def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool] | bool) -> str:
            """Returns a node's tag. A text without quotes gets `_PLAIN_TAG`, and any other text
            `_TEXT_TAG`."""
            if kind is yaml.ScalarNode:
                # For a text, PyYAML gives a pair. Its first element is True if the text has neither quotes
                # nor a tag.
                is_plain = isinstance(implicit, tuple) and implicit[0]
                return _PLAIN_TAG if is_plain else _TEXT_TAG
            return str(super().resolve(kind, value, implicit))

    try:
        loader = Loader(text)
        try:
            top = loader.get_single_node()
        finally:
            loader.dispose()
        # A file may state its version in a line such as `%YAML 1.1`.
        stated_versions = [token.value for token in yaml.scan(text) if _is_version(token)]
        version = stated_versions[0] if stated_versions else (1, 2)
    except yaml.reader.ReaderError as error:
        lines_before = text[: error.position].split("\n")
        line_and_column = f"{len(lines_before)}:{len(lines_before[-1]) + 1}"
        reader.refuse_at(
            line_and_column, f"YAML can't have a character of code {error.character}", "leave it out"
        )
    except yaml.MarkedYAMLError as error:
        reader.refuse_unreadable(error)
    except RecursionError:
        reader.refuse_at("1:1", f"values lie more than {DEEPEST_NESTING} deep in each other", "flatten them")
    if version != (1, 2):
        reader.refuse_at(
            "1:1",
            f"it says that it is YAML {'.'.join(map(str, version))}, and is read as YAML 1.2",
            "leave the line %YAML out: yes, no, on and off are texts, and true and false the truth values",
        )
    if top is None:
        reader.refuse_at("1:1", "the file holds nothing", "give it a key, or leave it out of --configs")
    if not isinstance(top, yaml.MappingNode):
        reader.refuse(top, "a configuration is an object, and this isn't", "give keys, such as 'seed: 1'")
    return top


def _is_version(token: yaml.Token) -> bool:
    return getattr(token, "id", "") == "<directive>" and getattr(token, "name", "") == "YAML"


@dataclass
class _YamlReader:
    """Interprets the nodes of a file, and reports mistakes with their line and column."""

    name: str
    _fields: dict[int, Mapping[str, _Field]] = field(default_factory=dict)
    """The fields of each object, by its identity. They are kept, since merges of merges would be read again
    and again."""

    def refuse_at(self, line_and_column: str, fault: str, remedy: str) -> NoReturn:
        raise ConfigError([ConfigIssue(fault, f"{self.name}:{line_and_column}", remedy=remedy)])

    def refuse(self, node: yaml.Node, fault: str, remedy: str) -> NoReturn:
        """Raises ConfigError for a node, with its line and column."""
        self.refuse_at(f"{node.start_mark.line + 1}:{node.start_mark.column + 1}", fault, remedy)

    def refuse_unreadable(self, error: yaml.MarkedYAMLError) -> NoReturn:
        """Raises ConfigError for an error of PyYAML's, with remedies for the most common mistakes."""
        mark = error.problem_mark or error.context_mark
        line_and_column = "1:1" if mark is None else f"{mark.line + 1}:{mark.column + 1}"
        problem = " ".join(filter(None, [error.problem, error.context]))
        remedy = "fix it there, or just before"
        if "found another document" in problem:
            problem = "a second document begins"
            remedy = "a configuration is one document: put the parts after --- into files of their own"
        elif "'\\t'" in problem:
            problem, remedy = "a tab is used for indentation", "indent with spaces"
        elif "alias" in problem:
            remedy = "a string that begins with * needs quotes; an alias needs its &anchor further up"
        elif problem.startswith("mapping values are not allowed"):
            remedy = "a string with ': ' in it needs quotes; keys of an object are on lines of their own"
        self.refuse_at(line_and_column, f"this can't be read as YAML: {problem}", remedy)

    def scalar(self, node: yaml.ScalarNode) -> YamlScalar:
        """Returns the value of a text: by its tag, such as ``!!int``, or without a tag by its spelling."""
        text = str(node.value)
        # The kind is "plain" without quotes and tag, and "str" with quotes. All other kinds are tags.
        kind = node.tag.removeprefix(_TAG_PREFIX)
        if kind == "str":
            return text
        if kind in ("plain", "null") and _NULL.fullmatch(text):
            return None
        if kind in ("plain", "bool") and (_TRUE.fullmatch(text) or _FALSE.fullmatch(text)):
            return bool(_TRUE.fullmatch(text))
        if kind in ("plain", "int", "float"):
            number = self._number(node, text)
            fits_kind = isinstance(number, int) or kind != "int"
            if number is not None and fits_kind:
                return number
        if kind == "plain":
            return text
        if kind in ("null", "bool", "int", "float"):
            self.refuse(node, f"the tag !!{kind} doesn't fit {text!r}", "leave the tag out")
        self.refuse_tag(node)

    def _number(self, node: yaml.ScalarNode, text: str) -> int | float | None:
        """Returns the number that a text spells; None if it spells none."""
        whole_number = None
        if _DECIMAL.fullmatch(text):
            # Python refuses to convert a text of more than 4,300 digits. A number of 400 characters is far
            # above the largest one, and is refused below like any number above it.
            whole_number = int(text) if len(text) < 400 else LARGEST_WHOLE_NUMBER + 1
        elif _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
            whole_number = int(text, 0)
        if whole_number is not None:
            if abs(whole_number) > LARGEST_WHOLE_NUMBER:
                self.refuse(
                    node,
                    f"{text[:40]} is beyond 2**53 - 1 = {LARGEST_WHOLE_NUMBER}, where Jsonnet's numbers"
                    " lose digits",
                    f"give a whole number of at most {LARGEST_WHOLE_NUMBER}, or put quotes around a text",
                )
            return whole_number
        if _FLOAT.fullmatch(text):
            number = float(text)
            if math.isfinite(number):
                return number
        elif not _NOT_FINITE.fullmatch(text):
            return None
        # The text is a number, but not a finite one: 1e999 or .inf.
        self.refuse(
            node,
            f"{text[:40]} isn't finite, and a configuration holds finite numbers only",
            "give a number, null where the key takes it for 'no bound', or put quotes around a text",
        )

    def refuse_tag(self, node: yaml.Node) -> NoReturn:
        shown = node.tag.replace(_TAG_PREFIX, "!!")
        self.refuse(node, f"the tag {shown} makes nothing that a configuration can hold", "leave the tag out")

    def key(self, node: yaml.Node) -> _Key:
        """Returns a key: its name, and whether it ends with ``+``.

        The name is the text in the file, even if the text spells a number or a truth value.
        """
        import yaml

        if not isinstance(node, yaml.ScalarNode):
            self.refuse(node, "a key can't be a list or an object", "give a string")
        if node.tag not in (_PLAIN_TAG, _TEXT_TAG):
            self.refuse_tag(node)
        text = str(node.value)
        if not text.rstrip("+"):
            self.refuse(node, "a key is missing before the colon", "give one")
        if text.endswith("++"):
            self.refuse(node, f"the key {text!r} ends with more than one +", "write one + after the key")
        return _Key(text.removesuffix("+"), merges=text.endswith("+"))

    def fields(self, node: yaml.MappingNode, merging_objects: tuple[int, ...] = ()) -> Mapping[str, _Field]:
        """Returns the fields of an object by their names, with those that ``<<`` adds from other objects.

        If ``<<`` adds a field whose name the object itself has, the object's own field counts.

        Args:
            merging_objects: The identities of the objects that merge this one, directly or by others. They
                show whether an object merges itself, which is refused.
        """
        import yaml

        if id(node) in self._fields:
            return self._fields[id(node)]
        own_fields: dict[str, _Field] = {}
        inherited: dict[str, _Field] = {}
        merge_line: int | None = None  # the line of `<<`
        for key_node, value in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _PLAIN_TAG and key_node.value == "<<":
                if merge_line is not None:
                    self._refuse_second(key_node, "<<", merge_line)
                merge_line = line
                bases = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for base in bases:
                    if not isinstance(base, yaml.MappingNode):
                        self.refuse(
                            value,
                            "<< merges something that isn't an object",
                            "give an alias of an object, or a list",
                        )
                    if id(base) in (*merging_objects, id(node)):
                        self.refuse(value, "an object merges itself", "leave the alias out")
                    for name, inherited_field in self.fields(base, (*merging_objects, id(node))).items():
                        inherited.setdefault(name, inherited_field)
                continue
            key = self.key(key_node)
            if key.name in own_fields:
                self._refuse_second(key_node, key.name, own_fields[key.name].line)
            own_fields[key.name] = _Field(key, value, line)
        self._fields[id(node)] = {**inherited, **own_fields}
        return self._fields[id(node)]

    def _refuse_second(self, node: yaml.Node, name: str, first_line: int) -> NoReturn:
        self.refuse(node, f"the key {name!r} occurs again, after line {first_line}", "leave one of them out")


class _Key(NamedTuple):
    """A key in a YAML file: ``trainer+:`` is ``_Key("trainer", True)``."""

    name: str
    merges: bool
    """Whether its object is merged into the one of earlier files."""


class _Field(NamedTuple):
    """A key of an object with its value, and the line on which the key is."""

    key: _Key
    value: yaml.Node
    line: int


@dataclass
class _Writer:
    """Writes a file's values as Jsonnet."""

    reader: _YamlReader
    pieces: list[str] = field(default_factory=list)
    """The Jsonnet text so far."""
    line: int = 1
    """The line on which the text ends so far."""
    values: int = 0
    """The number of values that were written so far, those included that aliases repeat."""
    characters: int = 0
    """Characters of all single values."""

    def write_value(self, node: yaml.Node, containing_values: tuple[int, ...] = ()) -> None:
        """Writes a value as Jsonnet. Raises ConfigError for a value that a configuration can't hold.

        Each item of a list and each key is on the same line as in the YAML file. What an alias repeats is on
        the line of the alias.

        Args:
            node: The value.
            containing_values: The identities of the objects and lists that contain this value.
        """
        import yaml

        self.values += 1
        if self.values > MOST_VALUES_OF_FILE:
            self.reader.refuse(
                node,
                f"the file has more than {MOST_VALUES_OF_FILE:,} values, with what aliases repeat",
                "write less",
            )
        if len(containing_values) >= DEEPEST_NESTING:
            self.reader.refuse(
                node, f"values lie more than {DEEPEST_NESTING} deep in each other", "flatten them"
            )
        if id(node) in containing_values:
            self.reader.refuse(node, "a value holds an alias of itself", "leave the alias out")
        if isinstance(node, yaml.ScalarNode):
            piece = json.dumps(self.reader.scalar(node))
            self.characters += len(piece)
            if self.characters > MOST_CHARACTERS_OF_VALUES:
                self.reader.refuse(
                    node,
                    f"the file has more than {MOST_CHARACTERS_OF_VALUES:,} characters, with what aliases"
                    " repeat",
                    "write less",
                )
            self.pieces.append(piece)
            return
        if node.tag not in (_TAG_PREFIX + "map", _TAG_PREFIX + "seq"):
            self.reader.refuse_tag(node)
        inner = (*containing_values, id(node))
        if isinstance(node, yaml.SequenceNode):
            self.pieces.append("[")
            for item in node.value:
                self._go_to_line(item.start_mark.line + 1)
                self.write_value(item, inner)
                self.pieces.append(", ")
            self.pieces.append("]")
            return
        assert isinstance(node, yaml.MappingNode), node
        self.pieces.append("{")
        for key, value, line in self.reader.fields(node).values():
            self._go_to_line(line)
            self.pieces.append(f"{json.dumps(key.name)}{'+' if key.merges else ''}: ")
            self.write_value(value, inner)
            self.pieces.append(", ")
        self.pieces.append("}")

    def _go_to_line(self, line: int) -> None:
        """Begins new lines up to that one. Values that an alias repeats are on the alias's line."""
        if line > self.line:
            self.pieces.append("\n" * (line - self.line))
            self.line = line
