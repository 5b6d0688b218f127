r"""The steps of the VinePPO paper's code on MATH, written from a description of what that code does.

The stages, one after the other:

1. Each formula is replaced by a mark (`_MaskedText`), so that stages 2 and 3 can't cut within a formula.
2. The text is cut after sentences and before newlines, and short parts are merged with the next one.
3. Parts are cut after formulas that end in a full stop.
4. The formulas come back, and parts are cut at the newlines within them.
5. Parts of more than 100 characters are cut in two near their middle, and so are their halves.

It differs from the paper's code where that raised an exception:

* A response that is one part of under 20 characters (``The answer is 5.``) lost its only boundary by merging.
  Here it is one step.
* The mark of a formula within another one (``\text{if $x>0$}`` in ``align*``) was never found again. Here the
  outermost formula counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from typing_extensions import override

from treetune.tasks.steps import StepSplitter

FORMULA_WIDTH = 60
"""The number of characters that a formula counts as, whatever its length, in stage 2, and in stage 5 when it
looks for the middle of a part."""

LENGTH_OF_SHORT_PART = 20
"""A part of fewer characters is merged in stages 2 and 3, unless it ends a sentence."""
LENGTH_OF_TINY_PART = 3
"""A part of fewer characters is merged in stage 4."""
LENGTH_OF_LONG_PART = 100
"""A part of more characters is cut in stage 5, and is never merged with the next one."""
SHORTEST_HALF_IN_TEXT = 40
SHORTEST_HALF_IN_FORMULA = 20
"""The fewest characters on either side of a cut in stage 5, in text and in a formula."""

_FORMULA_DELIMITERS = [
    ("[asy]", "[/asy]"),
    ("$\\begin{tabular}", "\\end{tabular}$"),
    ("\\begin{tabular}", "\\end{tabular}"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("$$", "$$"),
]
"""The texts that open and close formulas, for each kind. The kinds are masked one after the other, in this
order. Inline dollars follow, and then environments of any name."""

_SENTENCE_STOP = re.compile(r"(?<!\b[A-Za-z])(?<!\s[A-Za-z]{2})\.(?=\s+[A-Z])")
"""A full stop that ends a sentence. One after a single letter, or after a word of two letters, doesn't."""
_NEWLINE = re.compile("\n")
_DOLLAR = re.compile(r"(?<!\\)\$")
_BEGIN_ENVIRONMENT = re.compile(r"\\begin\{([^{}\n]{1,40})\}")
_ENDS_OF_SENTENCES = (".$", ".$$", ".\\)", ".\\]")
"""Ends of formulas that have a full stop in them."""
_OPENING_OF_FORMULA = re.compile(r"\$\$?|\\\(|\\\[|\\begin\{[^{}]*\}|\[asy\]")
_BREAKS_IN_TEXT = [re.compile(kind) for kind in (r",", r"\sand(?=\s)", r":", r"\sto(?=\s)")]
_BREAKS_IN_FORMULAS = [
    re.compile(kind)
    for kind in (r",\$", r",\\\)", r",\\\]", r"=", r"\\equiv", r"\+", r"\\cancelto")
]  # fmt: skip
"""Signs after which a long part may be cut. Earlier kinds are tried first."""


@StepSplitter.register("math_reference")
@dataclass(frozen=True, kw_only=True)
class MathReference(StepSplitter):
    """The paper's step boundaries, for runs that are compared with the paper. The head of this file describes
    them."""

    end_token: Literal["own_step", "last_step"] = "last_step"

    @override
    def boundaries(self, response: str) -> list[int]:
        if not response:
            return [0]
        # The five stages that the head of this file describes
        masked = _MaskedText(response)
        parts = masked.split_into_sentences()
        parts = masked.cut_after_formulas_that_end_sentences(parts)
        parts = masked.unmask_and_cut_lines(parts)
        parts = _merge_with_next(parts, _is_tiny)  # also a part of stage 4
        offsets = [0, *accumulate(len(part) for part in parts)]
        return masked.cut_long_parts(offsets)


class _Piece(NamedTuple):
    """A part of a masked text in stage 3."""

    text: str
    length_with_formulas: int
    """The number of characters, with those of the formulas in place of their marks."""
    ends_in_full_stop: bool
    """Whether it ends in a formula that has a full stop."""

    @property
    def is_short(self) -> bool:
        return self.length_with_formulas < LENGTH_OF_SHORT_PART and not self.ends_in_full_stop


class _MaskedText:
    """A text in which each formula is one mark: a character that the text doesn't have.

    Example: of ``Let $x=2$.`` the masked text is ``Let #.``, if the mark is ``#``, and the formulas are
    ``["$x=2$"]``.
    """

    def __init__(self, text: str) -> None:
        # The mark is a character that the text doesn't have. The search begins with the characters for
        # private use, which texts hardly ever contain.
        self._mark = next(chr(code) for code in range(0xE000, 0x110000) if chr(code) not in text)
        self._text = text
        self._formulas: list[str] = []
        """The formulas in the order of their marks."""
        # Pairs come first, since single dollars would cut $$x$$ in pieces. An environment may contain marks
        # of earlier formulas.
        for opening, closing in _FORMULA_DELIMITERS:
            self._mask(_spans_between(self._text, opening, closing))
        self._mask(_spans_between_dollars(self._text))
        self._mask(_spans_of_environments(self._text))

    def _mask(self, spans: Iterator[tuple[int, int]]) -> None:
        """Replaces spans of the text by marks. Marks within a span become part of its formula."""
        pieces: list[str] = []
        formulas: list[str] = []
        earlier_formulas = iter(self._formulas)
        last_end = 0
        for start, end in spans:
            text_before = self._text[last_end:start]
            # A mark before the span stays, and so does its formula. A mark within the span is replaced by its
            # formula, which becomes a part of the new one.
            formulas += [next(earlier_formulas) for _ in range(text_before.count(self._mark))]
            formulas.append(self._unmask(self._text[start:end], earlier_formulas))
            pieces += [text_before, self._mark]
            last_end = end
        self._formulas = [*formulas, *earlier_formulas]
        self._text = "".join(pieces) + self._text[last_end:]

    def _unmask(self, part: str, formulas: Iterator[str]) -> str:
        """Returns a part with the next of the formulas in place of each mark."""
        return "".join(next(formulas) if character == self._mark else character for character in part)

    def split_into_sentences(self) -> list[str]:
        """Stage 2: cuts the text, in which formulas are marks, after sentences and before newlines."""
        parts: list[str] = []
        sentence_ends = [stop.end() for stop in _SENTENCE_STOP.finditer(self._text)]
        for sentence in _split_at(self._text, sentence_ends):
            parts += _split_at(sentence, [newline.start() for newline in _NEWLINE.finditer(sentence)])
        # If several newlines follow each other, each of them but the last has become a separate part.
        parts = _merge_with_next(parts, lambda part: part == "\n")
        return _merge_with_next(parts, self._is_short)

    def _is_short(self, part: str) -> bool:
        """Returns whether a masked part is short and doesn't end a sentence."""
        width = len(part) + (FORMULA_WIDTH - 1) * part.count(self._mark)  # a mark is one character already
        return width < LENGTH_OF_SHORT_PART and not part.rstrip().endswith(".")

    def cut_after_formulas_that_end_sentences(self, parts: list[str]) -> list[str]:
        """Stage 3: cuts parts, in which formulas are marks, after formulas that end in a full stop.

        Short pieces are then merged with the next one.
        """
        formulas = iter(self._formulas)
        pieces: list[_Piece] = []
        for part in parts:
            text, length_with_formulas, ends_in_full_stop = "", 0, False
            for character in part:
                if ends_in_full_stop:  # the previous character was a formula that ends the piece
                    pieces.append(_Piece(text, length_with_formulas, ends_in_full_stop))
                    text, length_with_formulas, ends_in_full_stop = "", 0, False
                text += character
                if character == self._mark:
                    formula = next(formulas)
                    length_with_formulas += len(formula)
                    ends_in_full_stop = formula.endswith(_ENDS_OF_SENTENCES)
                else:
                    length_with_formulas += 1
            pieces.append(_Piece(text, length_with_formulas, ends_in_full_stop))
        merged: list[_Piece] = []
        for piece in pieces:
            if merged and merged[-1].is_short:
                previous = merged.pop()
                piece = _Piece(
                    previous.text + piece.text,
                    previous.length_with_formulas + piece.length_with_formulas,
                    piece.ends_in_full_stop,
                )
            merged.append(piece)
        texts = [piece.text for piece in merged]
        if len(texts) > 1 and merged[-1].is_short:  # no part follows that it could be merged with
            last_text = texts.pop()
            texts[-1] += last_text
        return texts

    def unmask_and_cut_lines(self, parts: list[str]) -> list[str]:
        """Stage 4: puts formulas in place of their marks, and cuts the parts at newlines within formulas."""
        formulas = iter(self._formulas)
        lines: list[str] = []
        for part in parts:
            line = ""
            for character in part:
                if character != self._mark:
                    line += character
                    continue
                formula = next(formulas)
                newlines = [newline.start() for newline in _NEWLINE.finditer(formula)]
                first_line, *other_lines = _split_at(formula, newlines)
                line += first_line
                for other_line in other_lines:
                    lines.append(line)
                    line = other_line
            lines.append(line)
        return [line for line in lines if line]

    def cut_long_parts(self, offsets: list[int]) -> list[int]:
        """Stage 5: cuts parts of more than `LENGTH_OF_LONG_PART` characters, and returns the boundaries of
        all parts.

        Args:
            offsets: The boundaries of the parts before this stage, in the text with its formulas.
        """
        formulas = iter(self._formulas)
        text = ""  # the text with its formulas
        # `text` with marks for all characters of formulas, so that no break in text is found in a formula.
        prose = ""
        widths: list[float] = []
        for character in self._text:
            if character == self._mark:
                formula = next(formulas)
                text += formula
                prose += self._mark * len(formula)
                # The characters of a formula are together `FORMULA_WIDTH` wide.
                widths += [FORMULA_WIDTH / len(formula)] * len(formula)
            else:
                text += character
                prose += character
                widths.append(1)
        positions = [0, *accumulate(widths)]
        cuts = set(offsets)
        to_cut = [(start, end, True) for start, end in pairwise(offsets)]
        while to_cut:
            start, end, may_be_cut_in_text = to_cut.pop()
            if end - start <= LENGTH_OF_LONG_PART:
                continue
            cut_in_text = None
            if may_be_cut_in_text:
                cut_in_text = _find_cut(prose, positions, start, end, _BREAKS_IN_TEXT, SHORTEST_HALF_IN_TEXT)
            cut = cut_in_text
            if cut is None:
                cut = _find_cut(text, positions, start, end, _BREAKS_IN_FORMULAS, SHORTEST_HALF_IN_FORMULA)
            if cut is not None:
                cuts.add(cut)
                # After a cut in a formula, the right half may not be cut in text any more, as in the paper's
                # code.
                to_cut += [(start, cut, True), (cut, end, cut_in_text is not None)]
        return sorted(cuts)


def _spans_between(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """Yields the spans from an opening to the next closing, with both of them."""
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            return
        yield start, end + len(closing)
        start = text.find(opening, end + len(closing))


def _spans_between_dollars(text: str) -> Iterator[tuple[int, int]]:
    """Yields the spans of formulas between single dollars.

    Two neighbouring dollars aren't an empty formula: the second dollar begins a formula.
    """
    start: int | None = None
    for dollar in _DOLLAR.finditer(text):
        if start is None or dollar.start() == start + 1:
            start = dollar.start()
        else:
            yield start, dollar.end()
            start = None


def _spans_of_environments(text: str) -> Iterator[tuple[int, int]]:
    r"""Yields the spans from each ``\begin{…}`` to the next ``\end`` of the same name.

    A ``\begin`` without such an end is skipped.
    """
    never_closed: set[str] = set()  # so that the text is searched once for each missing end
    position = 0
    while (begin := _BEGIN_ENVIRONMENT.search(text, position)) is not None:
        position = begin.end()
        closing = f"\\end{{{begin[1]}}}"
        end = -1 if closing in never_closed else text.find(closing, begin.end())
        if end < 0:
            never_closed.add(closing)
            continue
        position = end + len(closing)
        yield begin.start(), position


def _split_at(text: str, offsets: list[int]) -> list[str]:
    """Returns the parts of a text between offsets. Offsets at the ends of the text are ignored, so no part is
    empty, unless the text is."""
    inner_offsets = [offset for offset in offsets if 0 < offset < len(text)]
    return [text[start:end] for start, end in pairwise([0, *inner_offsets, len(text)])]


def _merge_with_next(parts: list[str], needs_next: Callable[[str], bool]) -> list[str]:
    """Merges a part with the next one as long as `needs_next` is True for the merged part. If it is still
    True after the last part, that is merged with the previous one. A part of more than `LENGTH_OF_LONG_PART`
    characters is never merged with the next one.
    """
    merged: list[str] = []
    current = ""
    for part in parts:
        current += part
        if len(current) > LENGTH_OF_LONG_PART or not needs_next(current):
            merged.append(current)
            current = ""
    if current:
        if merged:
            merged[-1] += current
        else:
            merged.append(current)
    return merged


def _is_tiny(part: str) -> bool:
    """Returns whether a part is only a newline, a few characters, or the opening of a formula."""
    return (
        part == "\n"
        or len(part) < LENGTH_OF_TINY_PART
        or _OPENING_OF_FORMULA.fullmatch(part.strip()) is not None
    )


def _find_cut(
    text: str,
    positions: Sequence[float],
    start: int,
    end: int,
    kinds: list[re.Pattern[str]],
    shortest_half: int,
) -> int | None:
    """Returns the offset after a sign near the middle of a part; None if no sign fits.

    Of each kind of sign only the one nearest to the middle is tried: if one of its halves is too short, the
    next kind follows, not the next sign.

    Args:
        text: The whole text.
        positions: The position of each offset in a line where a formula is `FORMULA_WIDTH` wide, however many
            characters it has. The middle of the part is measured in this line.
        start: The offset at which the part begins.
        end: The offset at which it ends.
        kinds: Signs to cut after, the preferred kinds first.
        shortest_half: The fewest characters of each half.
    """
    for kind in kinds:
        offsets = [sign.end() for sign in kind.finditer(text, start, end)]
        if not offsets:
            continue
        middle = (positions[start] + positions[end]) / 2
        nearest = min(offsets, key=lambda offset: abs(positions[offset] - middle))
        if start + shortest_half <= nearest <= end - shortest_half:
            return nearest
    return None
