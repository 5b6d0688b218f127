"""Builds a checked graph of parts from a plain object. The constructors' signatures are the schema."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import ValidationError

from treetune.config import imports, remedies, schema
from treetune.config.errors import ConfigIssue, dotted_key, nearest
from treetune.config.explain import MISSING_VALUE, Explanation, value_at
from treetune.config.registrable import Registrable
from treetune.contracts import KeyPath
from treetune.exceptions import ConfigError
from treetune.findings import UNKNOWN, collect_findings

F = TypeVar("F", bound=Registrable)


def build(family: type[F], data: Any, explanation: Explanation | None = None, key: KeyPath = ()) -> F:
    """Builds the part of `family` that ``data`` (``{type: …, …}``) describes, with all parts in it.

    The modules in a root's `imports` are imported first, since they may register parts that it names.

    Args:
        explanation: Tells which file set which key, for messages.
        key: The path of ``data`` in the configuration, if it isn't the root.

    Raises:
        ConfigError: All mistakes at once.
    """
    return build_with_warnings(family, data, explanation, key)[0]


def build_with_warnings(
    family: type[F], data: Any, explanation: Explanation | None = None, key: KeyPath = ()
) -> tuple[F, list[str]]:
    """Returns what `build` returns, and the parts' warnings. There are none for a part that is built by
    itself, since only whole configurations are checked.

    Raises ConfigError.
    """
    is_whole_configuration = not key
    if is_whole_configuration:  # only the root of a configuration has the key `imports`
        imports.import_parts(data, explanation)
    builder = _Builder(explanation)
    part = builder.value(family, data, key)
    builder.check(part)  # does nothing for a part that is built by itself
    issues = builder.issues()
    if issues:
        raise ConfigError(issues)
    assert isinstance(part, family)
    return part, list(dict.fromkeys(builder.warnings))


def check_root(root: F) -> F:
    """Checks a root that was made in Python, without a configuration, and returns it.

    Raises ConfigError if the root or a part of it is wrong.
    """
    builder = _Builder(None)
    builder.check(root)
    if issues := builder.issues():
        raise ConfigError(issues)
    return root


def keys_at(family: type[Registrable], data: Any, path: KeyPath) -> Mapping[str, schema.Key]:
    """Returns the keys that the object at `path` of ``data`` may have, with their defaults.

    They are empty if there is no such object, or if it has no `type`.
    """
    part = part_at(family, data, path)
    return schema.keys_of(part) if part else {}


def part_at(family: type[Registrable], data: Any, path: KeyPath) -> type | None:
    """Returns the class of the object at `path`; None if there is no such object, or if it has no `type`."""
    # Follows the annotations from the root down: those of a part's keys, and those of a container's items.
    annotation: Any = family
    for depth, name in enumerate(path):
        inner = schema.split_constraints(annotation)[0]
        part = _part_class(inner, value_at(data, path[:depth]))
        keys = schema.keys_of(part) if part else {}
        # Of `None | list[Part]`, the first container among the alternatives is ("list", (Part,)).
        containers = [schema.item_types(alternative) for alternative in schema.alternatives_of(inner)]
        kind, item_annotations = next(filter(None, containers), ("", ()))
        if name in keys:
            annotation = keys[name].annotation
        elif kind == "tuple" and name.isdecimal() and int(name) < len(item_annotations):
            annotation = item_annotations[int(name)]  # each item of a tuple has its own
        elif kind in ("list", "object") and item_annotations:
            annotation = item_annotations[0]
        else:
            return None
    return _part_class(schema.split_constraints(annotation)[0], value_at(data, path))


def _part_class(annotation: Any, data: Any) -> type | None:
    """Returns the class of the object that `data` describes; None if the annotation and `type` don't tell.

    The annotation has the class itself, or a family, or a union of such. A family is a base class, and the
    key `type` of `data` names one of its registered subclasses.
    """
    for alternative in schema.alternatives_of(annotation):
        if schema.is_family(alternative) and isinstance(data, dict):
            type_name = data.get("type", alternative.default)
            part = schema.registered_parts(alternative).get(type_name)
            if part is not None:
                return part
        if schema.is_plain_part(alternative):
            assert isinstance(alternative, type)
            return alternative
    return None


@dataclass(frozen=True)
class _Alternatives:
    """The alternatives of a type that holds parts, sorted by how their values are built.

    Example: ``None | str | Rollout | list[Rollout]`` has ``allows_null=True, plain=[str],
    families=[Rollout], further=[list[Rollout]]``.
    """

    allows_null: bool
    plain: list[Any]
    """Types without parts, such as `str`. A text, a number or a boolean belongs to them, since values with
    parts are objects and lists."""
    families: list[type[Registrable]]
    """Families of parts, whose objects have a `type`."""
    further: list[Any]
    """Classes outside of families, whose objects have no `type`, and lists and objects of parts."""


def _sort_alternatives(annotation: Any) -> _Alternatives:
    alternatives = schema.alternatives_of(annotation)
    types = [alternative for alternative in alternatives if alternative is not type(None)]
    return _Alternatives(
        allows_null=type(None) in alternatives,
        plain=[kind for kind in types if not schema.holds_parts(kind)],
        families=[kind for kind in types if schema.is_family(kind)],
        further=[kind for kind in types if schema.holds_parts(kind) and not schema.is_family(kind)],
    )


class _Builder:
    """Builds the parts of a configuration, and collects all mistakes on the way."""

    def __init__(self, explanation: Explanation | None) -> None:
        self._explanation = explanation
        self._issues: list[tuple[KeyPath, ConfigIssue]] = []
        self._unknown: list[tuple[KeyPath, remedies.Owner]] = []
        """Keys that their objects don't have, each with the object's class."""
        self._missing: list[tuple[KeyPath, schema.Key]] = []
        """Required keys that aren't there."""
        self._keys_at: dict[KeyPath, list[str]] = {}
        """The keys that each object may have, by its path."""
        self.warnings: list[str] = []

    def value(self, annotation: Any, data: Any, key: KeyPath) -> Any:
        """Returns `data` as a value of the type `annotation`. Notes the mistakes in it.

        A wrong value becomes UNKNOWN. An object that contains a mistake is made without its constructor, so
        that other parts can still look at its other keys.
        """
        inner, constraints = schema.split_constraints(annotation)
        if not schema.holds_parts(inner):
            return self._build_plain_value(annotation, data, key)
        if constraints and not self._fits_constraints(annotation, constraints, data, key):
            return UNKNOWN
        alternatives = _sort_alternatives(inner)
        if data is None and alternatives.allows_null:
            return None
        if alternatives.plain and not isinstance(data, dict | list):
            plain_union = functools.reduce(operator.or_, alternatives.plain)  # such as `int | str`
            return self._build_plain_value(plain_union, data, key)
        # If there are only families, `_build_family_part` also gets data that is no object. It then notes
        # that the data should be an object with a `type`.
        if alternatives.families and (isinstance(data, dict) or not alternatives.further):
            return self._build_family_part(alternatives.families, data, key)
        # Without a `type`, nothing tells several such alternatives apart. So the first one is taken.
        further = alternatives.further[0]
        if schema.is_plain_part(further):
            return self._build_object(remedies.Owner(further), data, key)
        return self._build_container(schema.split_constraints(further)[0], data, key)

    def check(self, part: Any) -> None:
        """Notes the errors and warnings that the parts of a whole configuration find. Things that are missing
        on this machine are left to `treetune check` and to the commands that need them."""
        # The attribute `root` is the name of a whole configuration, such as "an experiment". A part alone has
        # no such name. It can't be checked against other parts.
        if part is UNKNOWN or not isinstance(part, Registrable) or part.root is None:
            return
        keys_with_issues = {key for key, _ in self._issues}
        # After a mistake, a check may raise an exception because of a wrong value. `collect_findings` ignores
        # that.
        has_mistakes = self._count_mistakes() > 0
        for key, finding in collect_findings(part, known_wrong=has_mistakes):
            if finding.level == "warning":
                self.warnings.append(finding.what)
            # A key that has an issue already, because its own value is wrong, gets no second one.
            elif finding.level == "error" and key not in keys_with_issues:
                issue = remedies.issue_of_finding(key, finding, self._explanation)
                self._issues.append((key, issue))

    def issues(self) -> list[ConfigIssue]:
        """Returns all mistakes, in the order of their keys."""
        issues = list(self._issues)
        meant_keys: set[KeyPath] = set()  # the valid keys of which unknown keys are probably misspellings
        for key, owner in self._unknown:
            issues.append((key, remedies.issue_of_unknown_key(key, owner, self._keys_at, self._explanation)))
            meant_key = remedies.meant_key(key, owner)
            if meant_key is not None:
                meant_keys.add((*key[:-1], meant_key))
        for key, declared in self._missing:
            if key not in meant_keys:  # one misspelling is one mistake, not an unknown and a missing key
                issues.append((key, remedies.issue_of_missing_key(key, declared, self._explanation)))
        return [issue for _, issue in sorted(issues, key=lambda key_and_issue: key_and_issue[0])]

    def _build_family_part(self, families: Sequence[type[Registrable]], data: Any, key: KeyPath) -> Any:
        """Makes the part that `type` chooses among those of the families."""
        registered: dict[str, type] = {}
        for family in families:
            registered |= schema.registered_parts(family)
        # Of several families, the first one decides the default `type`, and is named in messages.
        main_family = families[0]
        word = schema.family_word(main_family)
        names = schema.list_names(registered)
        if not isinstance(data, dict):
            fault = f"should be an object {{type: …}}, is {remedies.shorten_value(data)}"
            # Looked up in a list: `data` may be a list itself, and a dictionary can't look up a list.
            is_type = data in list(registered)
            remedy = f"write {{type: '{data}'}}" if is_type else remedies.how_to_set(key)
            return self._note_wrong(key, fault, f"{remedy}; types of {word}: {names}")
        name = data.get("type", main_family.default)
        if name is None and "type" not in data:  # ``type: null`` isn't missing, but a wrong type
            self._issues.append((key, remedies.issue_of_missing_type(key, main_family, self._explanation)))
            return UNKNOWN
        if not isinstance(name, str) or name not in registered:
            near = nearest(str(name), registered)
            suggestion = f"did you mean {near[0]!r}? " if near else ""
            remedy = f"{suggestion}Types of {word}: {names}"
            if not near:
                remedy += "; for a part of your own, set imports: ['my_package.my_part']"
            return self._note_wrong(
                (*key, "type"), f"there is no {word} {remedies.shorten_value(name)}", remedy
            )
        without_type = {field: item for field, item in data.items() if field != "type"}
        return self._build_object(remedies.Owner(registered[name], name, main_family), without_type, key)

    def _build_object(self, owner: remedies.Owner, data: Any, key: KeyPath) -> Any:
        """Makes an object of one class, and notes unknown, missing and wrong keys."""
        if not isinstance(data, dict):
            fault = f"should be {schema.describe_type(owner.part)}, is {remedies.shorten_value(data)}"
            return self._note_wrong(key, fault, remedies.how_to_set(key))
        keys = schema.keys_of(owner.part)
        mistakes_before = self._count_mistakes()
        self._keys_at[key] = list(keys)
        for name in data.keys() - keys.keys():
            self._unknown.append(((*key, name), owner))
        values = {}
        for name, declared in keys.items():
            if name in data:
                values[name] = self.value(declared.annotation, data[name], (*key, name))
            elif declared.required:
                self._missing.append(((*key, name), declared))
        if not key:
            # A root may have the key `imports`, but its class has no such field. `build_with_warnings` has
            # imported these modules already.
            values.pop(schema.IMPORTS_KEY.name, None)
        if self._count_mistakes() == mistakes_before:
            try:
                return owner.part(**values)
            except ValueError as error:
                self._issues.append(
                    (key, remedies.issue_of_refusal(key, owner, data, error, self._explanation))
                )
        # The object can't be made by its constructor, but other parts can still look at its keys.
        return _make_incomplete_part(owner.part, keys, values)

    def _count_mistakes(self) -> int:
        return len(self._issues) + len(self._unknown) + len(self._missing)

    def _build_container(self, annotation: Any, data: Any, key: KeyPath) -> Any:
        """Makes a list, a tuple or an object of parts, each of them at its own key."""
        container = schema.item_types(annotation)
        assert container is not None
        kind, item_annotations = container
        has_right_type = isinstance(data, dict) if kind == "object" else isinstance(data, list)
        if not has_right_type:
            fault = f"should be {schema.describe_type(annotation)}, is {remedies.shorten_value(data)}"
            return self._note_wrong(key, fault, remedies.how_to_set(key))
        if isinstance(data, dict):
            return {name: self.value(item_annotations[0], item, (*key, name)) for name, item in data.items()}
        if kind == "tuple" and len(item_annotations) != len(data):
            fault = f"should be {schema.describe_type(annotation)}, has {len(data)}"
            return self._note_wrong(key, fault, remedies.how_to_set(key))
        # A tuple has an annotation for each item, a list one for all.
        annotations = item_annotations if kind == "tuple" else item_annotations * len(data)
        values = []
        for index, (item_annotation, item) in enumerate(zip(annotations, data, strict=True)):
            values.append(self.value(item_annotation, item, (*key, str(index))))
        origin = getattr(annotation, "__origin__", list)  # of `set[Part]`: set
        # Any other origin, such as `Sequence`, becomes a tuple.
        return origin(values) if origin in (list, set, frozenset) else tuple(values)

    def _build_plain_value(self, annotation: Any, data: Any, key: KeyPath) -> Any:
        """Converts a plain value to its type, such as a list to a tuple.

        A plain value has no parts in it: no objects that become instances of configured classes. If the value
        is wrong, the first mistake in it is noted, and the result is UNKNOWN.
        """
        try:
            # Strict and from JSON: "3" isn't taken for a number, and a list may become a tuple.
            return schema.validator_of(annotation).validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            details = error.errors()[0]
        # In a list or object of plain values, the message names the item that is wrong. `loc` is the path to
        # it, such as ("sizes", 2). The path may go on in a value that isn't a list or object.
        for step in details["loc"]:
            container = schema.item_types(schema.split_constraints(annotation)[0])
            item = value_at(data, (str(step),))
            if container is None or item is MISSING_VALUE:
                break
            kind, item_annotations = container
            if not item_annotations:  # a container of anything
                break
            data = item
            key = (*key, str(step))
            # A tuple has an annotation for each item, a list and an object have one for all.
            annotation = item_annotations[int(step)] if kind == "tuple" else item_annotations[0]
        fault = f"should be {schema.describe_type(annotation)}, is {remedies.shorten_value(data)}"
        if details["type"] in ("value_error", "predicate_failed"):  # the type's description doesn't say why
            fault += f" ({details['msg']})"
        return self._note_wrong(
            key, fault, remedies.suggest_value(annotation, data) or remedies.how_to_set(key)
        )

    def _fits_constraints(
        self, annotation: Any, constraints: tuple[Any, ...], data: Any, key: KeyPath
    ) -> bool:
        """Returns whether a list or object of parts fits its constraints, which bound its length. If it
        doesn't, notes the mistake."""
        if not isinstance(data, list | dict):
            return True  # its type is checked where it is built
        # The items are checked where they are built. So here they have the type Any.
        plain_type: Any = dict[str, Any] if isinstance(data, dict) else list[Any]
        for constraint in constraints:
            plain_type = Annotated[plain_type, constraint]
        try:
            schema.validator_of(plain_type).validate_python(data, strict=True)
        except ValidationError:
            fault = f"should be {schema.describe_type(annotation)}, has {len(data)}"
            self._note_wrong(key, fault, remedies.how_to_set(key))
            return False
        return True

    def _note_wrong(self, key: KeyPath, fault: str, remedy: str | None) -> Any:
        """Notes a mistake at a key. Returns UNKNOWN."""
        source = remedies.find_source(key, self._explanation)
        self._issues.append((key, ConfigIssue(fault, dotted_key(key) or "configuration", source, remedy)))
        return UNKNOWN


def _make_incomplete_part(part: type, keys: Mapping[str, schema.Key], values: Mapping[str, Any]) -> Any:
    """Returns an object of the class, made without its constructor, so that other parts can look at it.

    The object is for a configuration with mistakes. A required key without a value is UNKNOWN in it.
    """
    instance: Any = object.__new__(part)
    for name, declared in keys.items():
        value = values.get(name, UNKNOWN if declared.required else declared.default)
        object.__setattr__(instance, name, value)  # a frozen class has no other way
    return instance
