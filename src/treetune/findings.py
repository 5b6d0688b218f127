"""Collects what is wrong with a configuration, where a promise between its parts isn't met.

`findings` goes through the parts of a configuration as they stand and collects what each of them says,
whoever wrote it. A need is met by what stands beside the part that has it, or beside an object that holds the
part: what `evaluation.rollout` gives is for the evaluation alone, what `rollout` gives is for everybody. An
object that hands on what a part within it gives says so in its own `gives`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

from treetune.contracts import ROOT, Feature, Finding, KeyPath, Need, Part
from treetune.exceptions import Incomplete


@dataclass(frozen=True)
class Placed:
    """A part and where it stands, with what stands around it, from the nearest outwards."""

    part: Any
    path: KeyPath
    around: tuple[Any, ...] = ()


class _Unknown:
    """Stands for what couldn't be built: whoever uses it gets Incomplete."""


def _use(*arguments: Any, **named: Any) -> NoReturn:
    raise Incomplete


_USES = (
    "getattr bool eq ne lt le gt ge iter len contains getitem call add radd sub rsub mul rmul truediv"
    " rtruediv floordiv rfloordiv mod rmod neg int float index str format"
)
for _name in _USES.split():
    setattr(_Unknown, f"__{_name}__", _use)

UNKNOWN: Any = _Unknown()


def placed_parts(root: Any) -> Iterator[Placed]:
    """Yields the root and every object within it, those around a part before the part."""
    return _within(root, (), ())


def _within(value: Any, path: KeyPath, around: tuple[Any, ...]) -> Iterator[Placed]:
    if value is UNKNOWN or isinstance(value, type):
        return
    if is_dataclass(value):
        yield Placed(value, path, around)
        for name, inner in _children(value):
            yield from _within(inner, (*path, name), (value, *around))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _within(inner, (*path, str(name)), around)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for place, inner in enumerate(value):
            yield from _within(inner, (*path, str(place)), around)


def _children(part: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(part, field.name)) for field in fields(part) if field.init]


def findings(root: Any, known_wrong: bool = False) -> list[tuple[KeyPath, Finding]]:
    """Returns everything that the parts of a configuration find wrong with it, by the keys to change.

    In one that is `known_wrong` parts may hold `UNKNOWN` in place of values that couldn't be read, and values
    that their constructors would refuse: what depends on such isn't said.
    """
    blind: tuple[type[Exception], ...] = (Exception,) if known_wrong else (Incomplete,)
    found: list[tuple[KeyPath, Finding]] = []
    unmet: dict[Feature, list[tuple[Placed, Need]]] = {}
    for placed in placed_parts(root):
        if not isinstance(placed.part, Part):
            continue
        for need in _known(lambda part: part.needs, placed.part, blind):
            if not _is_met(need, placed):
                unmet.setdefault(need.feature, []).append((placed, need))
        for finding in _known(lambda part: part.check(root), placed.part, blind):
            if all(one != finding for _, one in found):
                found.append((finding.path(placed.path), finding))
    for feature, needing in unmet.items():
        found.append(_lacking(feature, needing))
    return found


def notes(root: Any) -> list[str]:
    """Returns the notes that the parts of a right configuration have on it."""
    parts = (placed.part for placed in placed_parts(root) if isinstance(placed.part, Part))
    return list(dict.fromkeys(note for part in parts for note in part.remarks(root)))


def _known(ask: Callable[[Part], Iterable[Any]], part: Part, blind: tuple[type[Exception], ...]) -> list[Any]:
    """Returns what a part says, up to where it meets a value that isn't as it should be."""
    said: list[Any] = []
    with contextlib.suppress(*blind):
        said.extend(ask(part))  # keeps what came before an error
    return said


def _is_met(need: Need, placed: Placed) -> bool:
    """Returns whether anything beside the part, or beside what holds it, gives enough; an unknown value
    might."""
    for holder in (placed.part, *placed.around):
        given = _given_by_children(holder)
        same = [feature for feature in given if type(feature) is type(need.feature)]
        if any(feature is UNKNOWN for feature in given):
            return True
        if same:
            try:
                return any(feature.meets(need.feature) for feature in same)
            except Incomplete:
                return True
    return False


def _given_by_children(holder: Any) -> list[Any]:
    given: list[Any] = []
    for _, child in _children(holder):
        several = child if isinstance(child, tuple | list) else [child]
        for part in several:
            if part is UNKNOWN:
                given.append(UNKNOWN)
            elif isinstance(part, Part):
                try:
                    given += part.gives
                except Incomplete:
                    given.append(UNKNOWN)
    return given


def _lacking(feature: Feature, needing: Sequence[tuple[Placed, Need]]) -> tuple[KeyPath, Finding]:
    """Returns one finding for one missing feature, however many parts need it."""
    placed, need = needing[0]
    who = " and ".join(f"{label(other)} ({theirs.because})" for other, theirs in needing)
    given = [
        one.words
        for holder in (placed.part, *placed.around)
        for one in _given_by_children(holder)
        if type(one) is type(feature)
    ]
    there = f"what is given is {given[0]}" if given else "nothing here gives that"
    what = f"{who} need{'s' if len(needing) == 1 else ''} {feature.words}, and {there}"
    return placed.path, Finding(what, (ROOT, *placed.path), need.remedy or feature.remedy)


def label(placed: Placed) -> str:
    """Returns the name of a part in messages: ``credit 'group'``, or the key where it stands."""
    part, path = placed.part, placed.path
    registered = part.registered() if hasattr(part, "registered") else {}
    names = [name for name, cls in registered.items() if cls is type(part)]
    word = next((step for step in reversed(path) if not step.isdecimal()), "configuration")
    return f"{word} {names[0]!r}" if names else ".".join(path)
