"""MATH, two further test sets for models that are trained on it, and the steps of their solutions.

Solutions are prose with formulas. A full stop within a formula, a figure or a listing ends no sentence.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

from annotated_types import Ge, Gt, MinLen
from typing_extensions import override

from treetune.domains.graders.math import MathGrader
from treetune.tasks.base import Task
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import find_braces
from treetune.tasks.rows import JsonLines
from treetune.tasks.steps import StepSplitter

_OPENING_OF_SPAN = re.compile(
    r"\\begin\{(?P<environment>[A-Za-z]{1,24}\*?)\}|(?P<asy>\[asy\])|(?P<listing>```)|(?P<dollars>\$\$?)"
    r"|\\(?P<bracket>[\[(])|\\.",
    re.DOTALL,
)
"""The opening of a formula, a figure or a listing, or an escaped character, which opens nothing."""
_END_OF_INLINE = re.compile(r"\\.|(?P<end>\$)|(?P<gap>\n[ \t]*\n)", re.DOTALL)
"""The signs to look for in a formula between dollars: an escaped character, the end of the formula, or a
blank line, which the formula can't contain."""
# Letters outside of ASCII that may begin a sentence: capitals of scripts with two cases, and letters of
# scripts with one.
_CAPITALS_OUTSIDE_ASCII = "".join(letter for letter in map(chr, range(0x80, 0x2000)) if letter.isupper())
_LETTERS_WITHOUT_CASE = (
    r"\u05d0-\u05ea\u0620-\u064a\u0671-\u06d3\u0904-\u0963\u0985-\u0e3a\u0e40-\u10ff\u1200-\u135a"
    r"\u1780-\u17b3\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
)
_SCRIPTS_WITHOUT_SPACES = r"\u3040-\u30ff\u3400-\u9fff"
"""Scripts in which a sentence follows without a space."""
_FULL_STOPS = r"。！？｡।॥؟۔։።፧။។"
"""Signs that only ever end a sentence."""
_END_BEFORE_PROSE = re.compile(rf"[.!?]\s+(?:[A-Z][a-z]+\s|[{_CAPITALS_OUTSIDE_ASCII}]\w+\s)|[{_FULL_STOPS}]")
"""The end of a sentence that prose follows, which no inline formula contains."""

_CLOSING_SIGNS = r"(?:[$)\"'”’*]|\\[)\]])*+"
_WIDE_CLOSING_SIGNS = r"(?:[$)\"'”’*」』）】》〉]|\\[)\]])*+"
"""Closing brackets, quotes and dollars after the sign that ends a sentence, which still belong to it; the
second pattern also has those of East Asian scripts."""


def _sentence_end_before(characters: str) -> re.Pattern[str]:
    """Returns a pattern that matches the ends of sentences.

    `characters` are those with which the next sentence may begin after a space, written as in the brackets of
    a regular expression: ``A-Z(``.
    """
    return re.compile(
        rf"[.!?]{_CLOSING_SIGNS}(?=\s+[{characters}])"  # "x is 2. Then"
        rf"|[.!?]{_CLOSING_SIGNS}(?=[{_SCRIPTS_WITHOUT_SPACES}])"  # before a script without spaces
        # ++: a run of stops is tried only once.
        rf"|(?<![{_FULL_STOPS}])[{_FULL_STOPS}]++{_WIDE_CLOSING_SIGNS}(?=\s*\S)"
        # A wide full stop ends a sentence, except before a digit: there it is a decimal point.
        rf"|．{_WIDE_CLOSING_SIGNS}(?=\s*[^\s\d])"
        # Greek has two question marks: a sign of its own (037e), and a semicolon after a Greek letter.
        rf"|(?:\u037e|(?<=[\u0370-\u03ff]);){_CLOSING_SIGNS}(?=\s+[{_CAPITALS_OUTSIDE_ASCII}])"
    )


_BEGINS_A_SENTENCE = rf"A-Z(\"“„‘«¿¡*$\\{_CAPITALS_OUTSIDE_ASCII}{_LETTERS_WITHOUT_CASE}"
_SENTENCE_END = _sentence_end_before(_BEGINS_A_SENTENCE)
_SENTENCE_END_ALSO_BEFORE_NUMBERS = _sentence_end_before(_BEGINS_A_SENTENCE + r"\d")
_ENDS_A_SENTENCE = re.compile(
    rf"(?:[.!?:]{_CLOSING_SIGNS}|[{_FULL_STOPS}．：\u037e]{_WIDE_CLOSING_SIGNS}|(?<=[\u0370-\u03ff]);|\\\\|\\\]|\\end\{{[A-Za-z]{{1,24}}\*?\}})\s*+\Z"
)
"""The end of a part that ends a sentence or a displayed formula."""
ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|St|vs|etc|cf|Eq|Fig|No|pp|resp)|\bi\.e|\be\.g|\b[A-Za-zА-Яа-яЁё]"
    r"|\b(?:рис|табл|см|ср|гл|стр|им|ул|напр|ур|теор|Рис|Табл|См|Ср)|\b[\u0370-\u03ff]\.[\u0370-\u03ff]"
    r"|(?:\A|\n)\s*\d+)\.\Z"
)
"""The end of a text in an abbreviation, an initial, or the number of a list's item."""
_LINE_BREAK = re.compile(r"\n\s*+")
_ROW_END_OR_ENVIRONMENT = re.compile(
    r"(?P<end>\\\\(?:\[[^\]\n]{0,12}\])?[ \t]{0,20}(?=\n))"
    r"|\\begin\{(?P<inner>[^{}\n]{1,24})\}|\\end\{[^{}\n]{1,24}\}"
)
"""The end of a formula's row (``\\\\``), or the begin or end of an environment."""
_CLAUSE_END = re.compile(
    r"[,;:](?=\s)|[，；：、،؛]|(?P<before>\s(?:and|so|then|which|because|since|or)(?=\s)|(?<![<>!=:])=(?!=))"
)

"""A sign after which a long part may be cut, or a word or an equals sign before which it may be cut (the
group `before`)."""

_ROWS_ARE_STEPS = {
    "align", "aligned", "alignat", "alignedat", "gather", "gathered", "eqnarray", "split", "multline",
    "equation", "flalign",
}  # fmt: skip
"""Environments whose rows may be steps. Rows of other environments, such as matrices, are not steps."""
_LOOK_BACK = 12
"""The number of characters before a full stop in which an abbreviation is searched, and also the number of
innermost environments that are looked at."""
_LOOK_AT_END = 200
"""The number of characters at the end of a part in which its full stop must be."""


class TextSpan(NamedTuple):
    """A formula, a figure or a listing in a text.

    Example: the first formula of ``Let $x=2$.`` is ``TextSpan(start=4, end=9, display=False)``.
    """

    start: int
    end: int
    display: bool
    """Whether it is displayed on separate lines. Then its rows may be steps."""


def find_formulas(text: str) -> list[TextSpan]:
    r"""Returns the outermost formulas of a text from left to right, with figures and listings.

    These are ``$…$``, ``\(…\)``, ``$$…$$``, ``\[…\]``, environments, ``[asy]`` figures, and listings. An
    opening that is never closed is ordinary text, and so is a dollar whose partner would come after a blank
    line or the end of a sentence ("costs $5. She pays $6"). The time is linear in the text.
    """
    spans: list[TextSpan] = []
    never_closed: set[str] = set()
    position = 0
    while (opening := _OPENING_OF_SPAN.search(text, position)) is not None:
        position = opening.end()
        if opening[0] == "$":
            end = _find_end_of_inline(text, position)
            if end is not None:
                spans.append(TextSpan(opening.start(), end, display=False))
                position = end
            continue
        if opening["environment"]:
            closing = f"\\end{{{opening['environment']}}}"
        elif opening["bracket"]:
            closing = {"[": "\\]", "(": "\\)"}[opening["bracket"]]
        else:  # an escaped character has no closing sign
            closing = {"[asy]": "[/asy]", "```": "```", "$$": "$$"}.get(opening[0], "")
        if not closing or closing in never_closed:
            continue
        closing_start = text.find(closing, position)
        if closing_start < 0:
            never_closed.add(closing)  # so that the rest of the text is searched only once for it
            continue
        position = closing_start + len(closing)
        # Of these spans, only \(…\) is within a line of text. Figures and listings are displayed, too.
        spans.append(TextSpan(opening.start(), position, display=opening["bracket"] != "("))
    return spans


def _find_end_of_inline(text: str, start: int) -> int | None:
    """Returns the offset after the dollar that closes the formula whose text begins at `start`, or None."""
    position = start
    while (sign := _END_OF_INLINE.search(text, position)) is not None:
        if sign["gap"]:
            return None  # a blank line: the dollar opens no formula
        if sign["end"]:
            inside = text[start : sign.start()]
            # In "costs $5. She pays $6", a sentence ends between the dollars. So these are two prices.
            is_formula = inside != "" and not _END_BEFORE_PROSE.search(inside)
            return sign.end() if is_formula else None
        position = sign.end()  # the sign is an escaped character, such as the dollar in "\$5"
    return None


@StepSplitter.register("math")
@dataclass(frozen=True, kw_only=True)
class Sentences(StepSplitter):
    r"""A step is a sentence, a line, or a row of a displayed formula, with the white space before it.

    A formula is never cut, except a displayed one at the end of a row (``\\`` and a newline). An answer
    without a place to cut is one step, however short it is. Apart from sorting, the time is linear in the
    text.
    """

    shortest: Annotated[int, Ge(1)] = 20
    """A part with fewer characters that doesn't end a sentence or a formula is merged with the next part. If
    it is the last part, it is merged with the previous one."""
    longest: Annotated[int, Ge(40)] | None = 200
    """A part with more characters is cut near its middle at a comma, a conjunction or a displayed equals
    sign, if it has one, and its halves likewise. null: parts are never cut for their length."""

    @override
    def boundaries(self, response: str) -> list[int]:
        if not response:
            return [0]
        spans = find_formulas(response)
        possible_cuts = set(_possible_cuts(response, spans)) - {0, len(response)}
        offsets = [0]
        for cut in sorted(possible_cuts):
            if self._is_step(response[offsets[-1] : cut]):  # otherwise it is merged with the next part
                offsets.append(cut)
        if len(offsets) > 1 and not self._is_step(response[offsets[-1] :]):
            offsets.pop()  # the last part is merged with the one before it
        offsets.append(len(response))
        if self.longest is None:
            return offsets
        return self._cut_long_parts(response, spans, offsets, self.longest)

    def _is_step(self, part: str) -> bool:
        text = part.strip()
        return len(text) >= self.shortest or bool(text and _ENDS_A_SENTENCE.search(text[-_LOOK_AT_END:]))

    def _cut_long_parts(
        self, text: str, spans: list[TextSpan], offsets: list[int], longest: int
    ) -> list[int]:
        """Returns the boundaries of parts, with further ones near the middle of each long part."""
        if all(end - start <= longest for start, end in pairwise(offsets)):
            return offsets
        clause_ends = list(_clause_ends(text, spans))  # in order
        cuts = list(offsets)
        to_cut = list(pairwise(offsets))
        while to_cut:
            start, end = to_cut.pop()
            # The clause ends with the indices from `low` to `high` - 1 leave both halves long enough.
            low = bisect_left(clause_ends, start + self.shortest)
            high = bisect_right(clause_ends, end - self.shortest)
            if end - start <= longest or low >= high:
                continue
            # The clause end nearest to the middle is the last one before it or the first one after it.
            first_after = bisect_left(clause_ends, (start + end) // 2, low, high)
            neighbours = clause_ends[max(low, first_after - 1) : min(high, first_after + 1)]
            # Twice the distance from the middle, a whole number.
            cut = min(neighbours, key=lambda offset: abs(2 * offset - (start + end)))
            cuts.append(cut)
            to_cut += [(start, cut), (cut, end)]
        return sorted(cuts)


def _possible_cuts(text: str, spans: list[TextSpan]) -> Iterator[int]:
    """Yields the ends of sentences, of lines, and of rows of displayed formulas."""
    is_inside = _make_is_inside((span.start, span.end) for span in spans)
    yield from sentence_ends(text, spans)
    for line_break in _LINE_BREAK.finditer(text):
        if not is_inside(line_break.start()):
            yield line_break.start()
    for span in spans:
        if span.display:
            yield from _row_ends(text, span)


def _row_ends(text: str, span: TextSpan) -> Iterator[int]:
    """Yields the ends of a displayed formula's rows, but not of those of a matrix or a table within it."""
    environments: list[str] = []  # those that are open, the innermost last
    for sign in _ROW_END_OR_ENVIRONMENT.finditer(text, span.start, span.end):
        if sign["inner"] is not None:
            environments.append(sign["inner"].rstrip("*"))
        elif sign["end"] is None:
            # The sign is neither a \begin nor the end of a row. So it is an \end, whose \begin may be
            # missing.
            del environments[-1:]
        elif _ROWS_ARE_STEPS.issuperset(environments[-_LOOK_BACK:]):
            # None of the innermost environments is a matrix or a table. (Only a fixed number of them is
            # looked at, so that the time is linear.)
            yield sign.end()


def sentence_ends(
    text: str,
    spans: Iterable[TextSpan],
    abbreviation: re.Pattern[str] = ABBREVIATION,
    *,
    before_numbers: bool = False,
) -> Iterator[int]:
    """Yields the offset after each sentence that another sentence follows, in Latin and other scripts.

    Args:
        text: Prose with formulas.
        spans: The text's formulas (see `find_formulas`). No sentence ends within them.
        abbreviation: Matches text that ends with the full stop of an abbreviation.
        before_numbers: Whether a sentence may begin with a number: ``Multiply x by 2. 7 is added.``
    """
    pattern = _SENTENCE_END_ALSO_BEFORE_NUMBERS if before_numbers else _SENTENCE_END
    is_inside = _make_is_inside((span.start, span.end) for span in spans)
    for end in pattern.finditer(text):
        if is_inside(end.end()):
            continue
        # Only a Latin full stop may belong to an abbreviation, as in ``i.e. the sum``. With a closing sign
        # after it, as in ``(and so on, etc.)``, the sentence ends nevertheless.
        may_abbreviate = end[0].startswith(".") and not end[0].endswith(("$", ")", "]"))
        text_before = text[max(end.start() - _LOOK_BACK, 0) : end.start() + 1]
        if may_abbreviate and abbreviation.search(text_before):
            continue
        yield end.end()


def _clause_ends(text: str, spans: list[TextSpan]) -> Iterator[int]:
    """Yields offsets at which a long part may be cut: not within an inline formula, a figure, a listing, a
    table, or a group of braces."""
    uncut_spans: list[tuple[int, int]] = []
    for span in spans:
        is_inline_formula = not span.display
        is_figure_listing_or_table = text.startswith(("[asy]", "```", "\\begin{tabular"), span.start)
        if is_inline_formula or is_figure_listing_or_table:
            uncut_spans.append((span.start, span.end))
    outermost_groups: list[tuple[int, int]] = []
    for start, end in sorted(find_braces(text).items()):
        if not outermost_groups or start >= outermost_groups[-1][1]:
            outermost_groups.append((start, end + 1))
    is_in_span, is_in_group = _make_is_inside(uncut_spans), _make_is_inside(outermost_groups)
    for sign in _CLAUSE_END.finditer(text):
        # A cut is after punctuation, and before a word such as "because" or an equals sign (`before`).
        offset = sign.start() if sign["before"] else sign.end()
        if not is_in_span(offset) and not is_in_group(offset):
            yield offset


def _make_is_inside(spans: Iterable[tuple[int, int]]) -> Callable[[int], bool]:
    """Returns a function that says whether an offset is within one of the spans, after its start and before
    its end. The spans are in order and don't overlap."""
    ordered = list(spans)
    starts = [start for start, _ in ordered]

    def is_inside(offset: int) -> bool:
        index = bisect_left(starts, offset) - 1
        return index >= 0 and offset < ordered[index][1]

    return is_inside


MATH_GRADER, SENTENCES = MathGrader(), Sentences()


@Task.register("math")
@dataclass(frozen=True, kw_only=True)
class Math(JsonLines):
    """MATH (Hendrycks et al., 2021, arXiv:2103.03874) in the split of Lightman et al. (2023,
    arXiv:2305.20050): 12,000 problems to train on and the 500 of MATH-500 to test on.

    Of the 12,000 problems 500 are held out for validation, as many as in the VinePPO paper (11,500 / 500 /
    500). They are chosen with `split_seed`, and are not the paper's own 500. A row has a `problem`, a worked
    `solution` and its `answer`. If the answer is missing, the gold is the solution, in which graders read the
    box.
    `level` and `type` (or `subject`) go into `Problem.data`.
    """

    train: tuple[str, ...] = ("data/math/train.jsonl",)
    test: tuple[str, ...] = ("data/math/test.jsonl",)
    validation_size: Annotated[int, Gt(0)] | None = 500
    problem_field: Annotated[str, MinLen(1)] = "problem"
    gold_fallback: str | None = "solution"
    demonstration_field: str | None = "solution"
    keep: tuple[str, ...] = ("level", "type", "subject")
    grader: Grader = MATH_GRADER
    steps: StepSplitter = SENTENCES


@dataclass(frozen=True, kw_only=True)
class OnlyTest(JsonLines):
    """A test set without solutions: each row of the test split has a `problem` and an `answer`."""

    problem_field: Annotated[str, MinLen(1)] = "problem"
    grader: Grader = MATH_GRADER
    steps: StepSplitter = SENTENCES


@Task.register("college_math")
@dataclass(frozen=True, kw_only=True)
class CollegeMath(OnlyTest):
    """2,818 exercises from college textbooks (Tang et al., 2024, MathScale, arXiv:2403.02884)."""

    test: tuple[str, ...] = ("data/college_math/test.jsonl",)


@Task.register("olympiadbench")
@dataclass(frozen=True, kw_only=True)
class OlympiadBench(OnlyTest):
    """The 674 open-ended English competition problems of OlympiadBench that have no pictures (He et al.,
    2024, arXiv:2402.14008)."""

    test: tuple[str, ...] = ("data/olympiadbench/test.jsonl",)
    keep: tuple[str, ...] = ("type", "subject")
