r"""The steps of the VinePPO paper's code on MATH, made from a description of what it does.

Stages: formulas become placeholders; the text is cut after sentences, at newlines and after formulas
that end in a full stop; short parts are merged; formulas are cut at newlines; parts of more than 100
characters are cut in two, again and again.

It differs where the reference could not go on. A response that is one part of under 20 characters
("The answer is 5.") raised there, because its only boundary was merged away: here it is one step.
A formula in an environment (``\text{if $x>0$}`` in ``align*``) raised there, because its placeholder
was never found again: here the outermost formula counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from typing_extensions import override

from treetune.tasks.steps import StepSplitter

MASK = 60
"""Characters that a formula counts for: in the first stages, and on the way to the middle of a long part."""

SHORT = 20
TINY = 3
LONG = 100
HALF_TEXT = 40
HALF_MATH = 20

_PAIRS = [
    ("[asy]", "[/asy]"),
    ("$\\begin{tabular}", "\\end{tabular}$"),
    ("\\begin{tabular}", "\\end{tabular}"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("$$", "$$"),
]
"""Masked one kind after the other; then inline dollars, then environments of any name."""

_SENTENCE = re.compile(r"(?<!\b[A-Za-z])(?<!\s[A-Za-z]{2})\.(?=\s+[A-Z])")
_DOLLAR = re.compile(r"(?<!\\)\$")
_BEGIN = re.compile(r"\\begin\{([^{}\n]{1,40})\}")
_FULL_STOP = (".$", ".$$", ".\\)", ".\\]")
_OPENER = re.compile(r"\$\$?|\\\(|\\\[|\\begin\{[^{}]*\}|\[asy\]")
_TEXT_BREAKS = [re.compile(kind) for kind in (r",", r"\sand(?=\s)", r":", r"\sto(?=\s)")]
_MATH_BREAKS = [
    re.compile(kind)
    for kind in (r",\$", r",\\\)", r",\\\]", r"=", r"\\equiv", r"\+", r"\\cancelto")
]  # fmt: skip
"""What a long part is cut behind, the earlier the better."""


@StepSplitter.register("math_reference")
@dataclass(frozen=True, kw_only=True)
class MathReference(StepSplitter):
    """The paper's step boundaries, for runs that are compared with it: see the module."""

    end_token: Literal["own_step", "last_step"] = "last_step"

    @override
    def boundaries(self, response: str) -> list[int]:
        if not response:
            return [0]
        masked = _Masked(response)
        parts = masked.sentences()
        parts = masked.cut_after_full_stops(parts)
        parts = _merged(masked.lines_of_formulas(parts), _goes_with_the_next)
        return masked.long_ones_cut([0, *accumulate(map(len, parts))])


class _Masked:
    """A text whose formulas are one mark each; `_hidden` holds them in their order."""

    def __init__(self, text: str) -> None:
        self._mark = next(chr(code) for code in range(0xE000, 0x110000) if chr(code) not in text)
        self._text = text
        self._hidden: list[str] = []
        for opening, closing in _PAIRS:
            self._hide(_between(self._text, opening, closing))
        self._hide(_between_dollars(self._text))
        self._hide(_environments(self._text))

    def _hide(self, spans: Iterator[tuple[int, int]]) -> None:
        pieces: list[str] = []
        hidden: list[str] = []
        known = iter(self._hidden)
        last = 0
        for start, end in spans:
            before = self._text[last:start]
            hidden += [next(known) for _ in range(before.count(self._mark))]
            hidden.append("".join(next(known) if c == self._mark else c for c in self._text[start:end]))
            pieces += [before, self._mark]
            last = end
        self._hidden = [*hidden, *known]
        self._text = "".join(pieces) + self._text[last:]

    def _width(self, part: str) -> int:
        return len(part) + (MASK - 1) * part.count(self._mark)

    def sentences(self) -> list[str]:
        parts = _cut(self._text, (sign.end() for sign in _SENTENCE.finditer(self._text)))
        parts = [line for part in parts for line in _cut(part, (m.start() for m in re.finditer("\n", part)))]
        parts = _merged(parts, lambda part: part == "\n")
        return _merged(parts, lambda part: self._width(part) < SHORT and not part.rstrip().endswith("."))

    def cut_after_full_stops(self, parts: list[str]) -> list[str]:
        known = iter(self._hidden)
        pieces: list[
            tuple[str, bool, int]
        ] = []  # the part, whether its end is a formula's full stop, its length
        for part in parts:
            part_so_far, length = "", 0
            stop = False
            for character in part:
                if stop:
                    pieces.append((part_so_far, True, length))
                    part_so_far, length, stop = "", 0, False
                part_so_far += character
                if character == self._mark:
                    formula = next(known)
                    length += len(formula)
                    stop = formula.endswith(_FULL_STOP)
                else:
                    length += 1
            pieces.append((part_so_far, stop, length))
        merged: list[tuple[str, bool, int]] = []
        for piece in pieces:
            if merged and merged[-1][2] < SHORT and not merged[-1][1]:
                before = merged.pop()
                piece = (before[0] + piece[0], piece[1], before[2] + piece[2])
            merged.append(piece)
        if len(merged) > 1 and merged[-1][2] < SHORT and not merged[-1][1]:
            rest = merged.pop()[0]
            merged[-1] = (merged[-1][0] + rest, False, 0)
        return [part for part, _, _ in merged]

    def lines_of_formulas(self, parts: list[str]) -> list[str]:
        """The text again: each part with its formulas in place, cut at the newlines in them."""
        known = iter(self._hidden)
        lines: list[str] = []
        for part in parts:
            part_so_far: list[str] = []
            for character in part:
                if character != self._mark:
                    part_so_far.append(character)
                    continue
                first, *others = _cut(formula := next(known), (m.start() for m in re.finditer("\n", formula)))
                part_so_far.append(first)
                for line in others:
                    lines.append("".join(part_so_far))
                    part_so_far = [line]
            lines.append("".join(part_so_far))
        return [line for line in lines if line]

    def long_ones_cut(self, offsets: list[int]) -> list[int]:
        known = iter(self._hidden)
        text: list[str] = []
        masked_text: list[str] = []  # the same with formulas blotted out
        widths: list[float] = []
        for character in self._text:
            piece = next(known) if character == self._mark else character
            text.append(piece)
            masked_text.append(character * len(piece))
            widths += [MASK / len(piece) if character == self._mark else 1] * len(piece)
        places = [0, *accumulate(widths)]
        prose, formulas = ("".join(masked_text), places), ("".join(text), places)
        todo = [(start, end, False) for start, end in pairwise(offsets)]
        cuts = set(offsets)
        while todo:
            start, end, in_math = todo.pop()
            if end - start <= LONG:
                continue
            cut = None if in_math else _break(*prose, start, end, _TEXT_BREAKS, HALF_TEXT)
            after_text = cut is not None
            if cut is None:
                cut = _break(*formulas, start, end, _MATH_BREAKS, HALF_MATH)
            if cut is not None:
                cuts.add(cut)
                # Of a part that is cut in a formula, only the right half may not be cut in its text any more.
                todo += [(start, cut, False), (cut, end, not after_text)]
        return sorted(cuts)


def _between(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            return
        yield start, end + len(closing)
        start = text.find(opening, end + len(closing))


def _between_dollars(text: str) -> Iterator[tuple[int, int]]:
    start: int | None = None
    for sign in _DOLLAR.finditer(text):
        if start is None or sign.start() == start + 1:
            start = sign.start()
        else:
            yield start, sign.end()
            start = None


def _environments(text: str) -> Iterator[tuple[int, int]]:
    never_closed: set[str] = set()
    position = 0
    while (sign := _BEGIN.search(text, position)) is not None:
        position = sign.end()
        closing = f"\\end{{{sign[1]}}}"
        end = -1 if closing in never_closed else text.find(closing, sign.end())
        if end < 0:
            never_closed.add(closing)
            continue
        position = end + len(closing)
        yield sign.start(), position


def _cut(text: str, places: Iterator[int]) -> list[str]:
    """The non-empty parts between the places; one, perhaps empty, where there is nothing to cut."""
    offsets = [0, *(place for place in places if 0 < place < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(offsets)]


def _merged(parts: list[str], with_next: Callable[[str], bool]) -> list[str]:
    """Each part for which `with_next` holds before the next one; the last one behind the one before it."""
    merged: list[str] = []
    part_so_far = ""
    for part in parts:
        part_so_far += part
        if len(part_so_far) > LONG or not with_next(part_so_far):
            merged.append(part_so_far)
            part_so_far = ""
    if part_so_far:
        merged[-1:] = [merged[-1] + part_so_far] if merged else [part_so_far]
    return merged


def _goes_with_the_next(part: str) -> bool:
    stripped = part.strip()
    return part == "\n" or len(part) < TINY or _OPENER.fullmatch(stripped) is not None


def _break(
    text: str, widths: Sequence[float], start: int, end: int, kinds: list[re.Pattern[str]], half: int
) -> int | None:
    """Returns the offset behind the sign of the first kind whose nearest to the middle leaves both halves
    long enough.

    The middle is that of the widths, at which the characters begin. Only the nearest place of a kind
    is looked at: if one of its halves is too short, the next kind follows, not the next place.
    """
    for kind in kinds:
        places = [sign.end() for sign in kind.finditer(text, start, end)]
        if not places:
            continue
        middle = widths[start] + widths[end]
        place = min(places, key=lambda place: abs(2 * widths[place] - middle))
        if start + half <= place <= end - half:
            return place
    return None
