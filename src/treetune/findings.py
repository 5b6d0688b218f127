"""Collects the findings of a configuration's parts: mistakes, missing requirements and warnings.

`collect_findings` visits all parts of a configuration in order, calls the `check` of each, and compares the
features that parts need with the features that other parts give.

A part's need is met by a part in one of its own fields, in another field of the object that holds it, or in a
field of an object further out. So `evaluation.rollout` serves only the evaluation, and the experiment's
`rollout` serves all parts. If an inner part is to serve parts outside of the object that holds it, the object
repeats the inner part's features in its own `gives`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

from treetune.contracts import CONFIG_ROOT, Feature, Finding, KeyPath, Need, Part
from treetune.exceptions import Incomplete


@dataclass(frozen=True)
class Placed:
    """An object of a configuration, its key, and the objects that hold it, the innermost first.

    Example: ``Placed(chat, ("model", "chat"), (model, experiment))``.
    """

    part: Any
    path: KeyPath
    holders: tuple[Any, ...] = ()


class _Unknown:
    """Takes the place of a value that could not be read. Every use of it raises Incomplete.

    So the check of a part ends where it uses such a value. The mistake in the value itself is reported
    already, and any finding that follows from it would be a guess.
    """

    def _raise_incomplete(self, *arguments: Any, **named: Any) -> NoReturn:
        raise Incomplete

    # Python looks these methods up in the class and doesn't call __getattr__ for them, so each is set here.
    __getattr__ = _raise_incomplete
    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _raise_incomplete
    __iter__ = __len__ = __contains__ = __getitem__ = __call__ = _raise_incomplete
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _raise_incomplete
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __neg__ = _raise_incomplete
    __hash__ = object.__hash__  # parts that hold it may be keys of a cache
    __int__ = __float__ = __index__ = __str__ = __format__ = _raise_incomplete


UNKNOWN: Any = _Unknown()


def placed_parts(root: Any) -> Iterator[Placed]:
    """Yields the root and every object within it. An object comes before the objects that it holds."""
    return _walk(root, (), ())


def _walk(value: Any, path: KeyPath, holders: tuple[Any, ...]) -> Iterator[Placed]:
    """Yields the objects within a value, each with its key and the objects that hold it.

    Args:
        value: An object, a mapping or a list.
        path: The key of the value.
        holders: The objects that hold the value, the innermost first.
    """
    if value is UNKNOWN or isinstance(value, type):  # a class with fields is a dataclass for Python, too
        return
    if is_dataclass(value):
        yield Placed(value, path, holders)
        for name, child in _fields_of(value):
            yield from _walk(child, (*path, name), (value, *holders))
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _walk(child, (*path, str(name)), holders)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, child in enumerate(value):
            yield from _walk(child, (*path, str(index)), holders)


def _fields_of(part: Any) -> list[tuple[str, Any]]:
    """Returns the names and values of the fields that a configuration sets, without derived fields."""
    return [(field.name, getattr(part, field.name)) for field in fields(part) if field.init]


def collect_findings(root: Any, known_wrong: bool = False) -> list[tuple[KeyPath, Finding]]:
    """Returns all findings of a configuration's parts, each with the key to change.

    Args:
        root: The configuration's root.
        known_wrong: Whether mistakes have been found already. Parts may then hold `UNKNOWN` in place of
            values that couldn't be read, or values that their constructors would refuse. A check that raises
            an exception may do so because of such a value: it ends there, without a message.
    """
    # The exceptions that end a check without a message. Incomplete means that the check used a value that
    # couldn't be read.
    expected: tuple[type[Exception], ...] = (Exception,) if known_wrong else (Incomplete,)
    collected: list[tuple[KeyPath, Finding]] = []
    unmet: dict[Feature, list[tuple[Placed, Need]]] = {}
    for placed in placed_parts(root):
        if not isinstance(placed.part, Part):
            continue
        for need in _ask(lambda part: part.needs, placed.part, expected):
            if not _is_met(need, placed):
                unmet.setdefault(need.feature, []).append((placed, need))
        for finding in _ask(lambda part: part.check(root), placed.part, expected):
            # Parts of the same kind may find the same thing. It is reported once, at the first of them.
            if all(finding != earlier for _, earlier in collected):
                collected.append((finding.path(placed.path), finding))
    for feature, needing in unmet.items():
        collected.append(_finding_of_lack(feature, needing, root))
    return collected


def missing_requirements(parts: Iterable[Any], root: Any = UNKNOWN, kind: type[Part] = Part) -> list[str]:
    """Returns what these parts, and the parts within them, need and this machine doesn't have.

    Args:
        parts: The parts to check, with all parts within them.
        root: The configuration's root. Without it, a part reports only what doesn't depend on the root.
        kind: Only parts of this class are checked.

    Returns:
        A message for each missing requirement, with its remedy.
    """
    messages: list[str] = []
    for part in parts:
        for placed in placed_parts(part):
            if isinstance(placed.part, kind):
                # A check that uses an unknown value, such as an unknown root, raises Incomplete. Then `_ask`
                # returns the findings that the check has yielded before it raised.
                findings_of_part = _ask(lambda part: part.check(root), placed.part, (Incomplete,))
                messages += [finding.what for finding in findings_of_part if finding.level == "missing"]
    return list(dict.fromkeys(messages))


def _ask(
    question: Callable[[Part], Iterable[Any]], part: Part, expected: tuple[type[Exception], ...]
) -> list[Any]:
    """Returns what `question` gives for a part: its needs, or its findings.

    If an `expected` exception is raised, returns what was given before it.
    """
    answers: list[Any] = []
    with contextlib.suppress(*expected):
        answers.extend(question(part))  # if the iterable raises, the list keeps the earlier items
    return answers


def _is_met(need: Need, placed: Placed) -> bool:
    """Returns whether another part gives the feature that a part needs.

    A part works with the parts that are nearest to it. So its own inner parts are searched first, and then
    those of the objects that hold it, from the innermost object outwards. The search ends at the first object
    whose inner parts give a feature of the needed type, also if they give less than is needed. A part that
    could not be read counts as giving enough.
    """
    for holder in (placed.part, *placed.holders):
        features = _features_given_inside(holder)
        if any(feature is UNKNOWN for feature in features):
            return True
        features_of_type = [feature for feature in features if type(feature) is type(need.feature)]
        if features_of_type:
            try:
                return any(feature.meets(need.feature) for feature in features_of_type)
            except Incomplete:
                return True
    return False


def _features_given_inside(holder: Any) -> list[Any]:
    """Returns the features that the parts in an object's fields give, and UNKNOWN for a part that could not
    be read."""
    features: list[Any] = []
    for _, value in _fields_of(holder):
        parts = value if isinstance(value, tuple | list) else [value]
        for part in parts:
            if part is UNKNOWN:
                features.append(UNKNOWN)
            elif isinstance(part, Part):
                try:
                    features += part.gives
                except Incomplete:
                    features.append(UNKNOWN)
    return features


def _finding_of_lack(
    feature: Feature, needing: Sequence[tuple[Placed, Need]], root: Any
) -> tuple[KeyPath, Finding]:
    """Returns the finding that no part gives a feature: a single one, however many parts need the feature.

    Its key is that of the first part in `needing`, and its text names all of them.
    """
    placed, need = needing[0]
    needing_parts = " and ".join(f"{label(other)} ({other_need.because})" for other, other_need in needing)
    # The names of the features that have the needed type, but give less than is needed. Those inside the part
    # come first, and then those inside the objects that hold it, from the innermost object to the outermost.
    weaker_features: list[str] = []
    for holder in (placed.part, *placed.holders):
        for other_feature in _features_given_inside(holder):
            if type(other_feature) is type(feature):
                weaker_features.append(other_feature.words)
    lack = f"what is given is {weaker_features[0]}" if weaker_features else "nothing here gives that"
    verb = "needs" if len(needing) == 1 else "need"
    what = f"{needing_parts} {verb} {feature.words}, and {lack}"
    try:
        remedy = need.remedy or feature.remedy_in(root)
    except Incomplete:  # the part whose key the remedy would name could not be read
        remedy = feature.remedy
    # A key that begins with `CONFIG_ROOT` counts from the configuration's root, and not from the part.
    return placed.path, Finding(what, (CONFIG_ROOT, *placed.path), remedy)


def label(placed: Placed) -> str:
    """Names a part in messages.

    Its name is its key and `type`, such as ``credit 'group'``. A part without a `type` is named by its whole
    path, such as ``trainer.schedule``.
    """
    part, path = placed.part, placed.path
    type_name = part.registered_name() if hasattr(part, "registered_name") else None
    if type_name is None:
        return ".".join(path)
    # The path of a part in a list ends with a number, as in ("graders", "0"). The message then names the
    # list's key, "graders". The experiment itself has an empty path.
    key = next((step for step in reversed(path) if not step.isdecimal()), "configuration")
    return f"{key} {type_name!r}"
