"""MATH, the two sets that models trained on it are measured on as well, and the steps of their solutions:
prose with formulas, in which a full stop within a formula, a figure or a listing ends no sentence."""

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
from treetune.tasks.graders.extraction import braces
from treetune.tasks.rows import JsonLines
from treetune.tasks.steps import StepSplitter

_OPENING = re.compile(
    r"\\begin\{(?P<environment>[A-Za-z]{1,24}\*?)\}|(?P<asy>\[asy\])|(?P<listing>```)|(?P<dollars>\$\$?)"
    r"|\\(?P<bracket>[\[(])|\\.",
    re.DOTALL,
)
_END_OF_INLINE = re.compile(r"\\.|(?P<end>\$)|(?P<gap>\n[ \t]*\n)", re.DOTALL)
# Letters beyond Latin's plain ones: capitals of scripts with two cases, and scripts with one.
_CAPITAL = "".join(letter for letter in map(chr, range(0x80, 0x2000)) if letter.isupper())
_ONE_CASE = (
    r"\u05d0-\u05ea\u0620-\u064a\u0671-\u06d3\u0904-\u0963\u0985-\u0e3a\u0e40-\u10ff\u1200-\u135a"
    r"\u1780-\u17b3\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
)
_NO_SPACES = r"\u3040-\u30ff\u3400-\u9fff"
"""Scripts in which a sentence follows without a space."""
_STOPS = r"。！？｡।॥؟۔։።፧။។"
"""Signs that end a sentence and nothing else."""
_PROSE = re.compile(rf"[.!?]\s+(?:[A-Z][a-z]+\s|[{_CAPITAL}]\w+\s)|[{_STOPS}]")

_CLOSINGS = r"(?:[$)\"'”’*]|\\[)\]])*+"
_WIDE_CLOSINGS = r"(?:[$)\"'”’*」』）】》〉]|\\[)\]])*+"


def _sentence_end_before(characters: str) -> re.Pattern[str]:
    """Returns a pattern of sentence ends; `characters` may begin the next sentence after a space."""
    return re.compile(
        rf"[.!?]{_CLOSINGS}(?=\s+[{characters}])"
        rf"|[.!?]{_CLOSINGS}(?=[{_NO_SPACES}])"
        rf"|(?<![{_STOPS}])[{_STOPS}]++{_WIDE_CLOSINGS}(?=\s*\S)"  # a run of stops is tried once
        rf"|．{_WIDE_CLOSINGS}(?=\s*[^\s\d])"
        rf"|(?:\u037e|(?<=[\u0370-\u03ff]);){_CLOSINGS}(?=\s+[{_CAPITAL}])"  # the question mark of Greek
    )


_BEGINS_A_SENTENCE = rf"A-Z(\"“„‘«¿¡*$\\{_CAPITAL}{_ONE_CASE}"
_SENTENCE_END = _sentence_end_before(_BEGINS_A_SENTENCE)
_SENTENCE_END_ALSO_BEFORE_NUMBERS = _sentence_end_before(_BEGINS_A_SENTENCE + r"\d")
_ENDS_A_SENTENCE = re.compile(
    rf"(?:[.!?:]{_CLOSINGS}|[{_STOPS}．：\u037e]{_WIDE_CLOSINGS}|(?<=[\u0370-\u03ff]);|\\\\|\\\]|\\end\{{[A-Za-z]{{1,24}}\*?\}})\s*+\Z"
)
ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|St|vs|etc|cf|Eq|Fig|No|pp|resp)|\bi\.e|\be\.g|\b[A-Za-zА-Яа-яЁё]"
    r"|\b(?:рис|табл|см|ср|гл|стр|им|ул|напр|ур|теор|Рис|Табл|См|Ср)|\b[\u0370-\u03ff]\.[\u0370-\u03ff]"
    r"|(?:\A|\n)\s*\d+)\.\Z"
)
_LINE = re.compile(r"\n\s*+")
_ROW = re.compile(
    r"(?P<end>\\\\(?:\[[^\]\n]{0,12}\])?[ \t]{0,20}(?=\n))"
    r"|\\begin\{(?P<inner>[^{}\n]{1,24})\}|\\end\{[^{}\n]{1,24}\}"
)
_CLAUSE = re.compile(
    r"[,;:](?=\s)|[，；：、،؛]|(?P<before>\s(?:and|so|then|which|because|since|or)(?=\s)|(?<![<>!=:])=(?!=))"
)

_ROWS_ARE_STEPS = {
    "align", "aligned", "alignat", "alignedat", "gather", "gathered", "eqnarray", "split", "multline",
    "equation", "flalign",
}  # fmt: skip
_LOOK_BACK = 12
_LOOK_AT_END = 200
"""Characters at the end of a part in which its full stop must stand."""


class TextSpan(NamedTuple):
    """A stretch of text that belongs together. `display`: it has lines of its own, so that its rows may be
    steps."""

    start: int
    end: int
    display: bool


def formulas(text: str) -> list[TextSpan]:
    r"""Returns the outermost spans from left to right: ``$…$``, ``\(…\)``, ``$$…$$``, ``\[…\]``,
    environments, ``[asy]`` figures, listings. Linear in the text.

    What is not closed is no span: an unpaired dollar, or one that pairs only across a blank line or
    a sentence ("costs $5. She pays $6"), is text like any other.
    """
    spans: list[TextSpan] = []
    never_closed: set[str] = set()
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        position = opening.end()
        if opening[0] == "$":
            end = _end_of_inline(text, position)
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
        at = text.find(closing, position)
        if at < 0:
            never_closed.add(closing)
            continue
        position = at + len(closing)
        spans.append(TextSpan(opening.start(), position, display=opening["bracket"] != "("))
    return spans


def _end_of_inline(text: str, start: int) -> int | None:
    """Returns the offset behind the dollar that closes the one before `start`, or None."""
    position = start
    while (sign := _END_OF_INLINE.search(text, position)) is not None:
        if sign["gap"]:
            return None
        if sign["end"]:
            inside = text[start : sign.start()]
            return sign.end() if inside and not _PROSE.search(inside) else None
        position = sign.end()
    return None


@StepSplitter.register("math")
@dataclass(frozen=True, kw_only=True)
class Sentences(StepSplitter):
    r"""A step is a sentence, a line, or a row of a displayed formula, with the white space before it.

    Formulas are not cut inside, but for displayed ones at the end of a row (``\\`` and a newline).
    An answer with nothing to cut at, however short, is one step. Time is linear in the text, but for sorting.
    """

    shortest: Annotated[int, Ge(1)] = 20
    """Characters of the shortest part that ends no sentence or formula: shorter ones go with the part that
    follows, the last one with the part before it."""
    longest: Annotated[int, Ge(40)] | None = 200
    """Characters beyond which a part is cut at a comma, a conjunction or a displayed equals sign near its
    middle, as long as there is one; null never does."""

    @override
    def boundaries(self, response: str) -> list[int]:
        if not response:
            return [0]
        spans = formulas(response)
        offsets = [0]
        for cut in sorted({*_cuts(response, spans)} - {0, len(response)}):
            if self._is_step(response[offsets[-1] : cut]):
                offsets.append(cut)
        if len(offsets) > 1 and not self._is_step(response[offsets[-1] :]):
            offsets.pop()
        offsets.append(len(response))
        return offsets if self.longest is None else self._cut_long(response, spans, offsets, self.longest)

    def _is_step(self, part: str) -> bool:
        text = part.strip()
        return len(text) >= self.shortest or bool(text and _ENDS_A_SENTENCE.search(text[-_LOOK_AT_END:]))

    def _cut_long(self, text: str, spans: list[TextSpan], offsets: list[int], longest: int) -> list[int]:
        if all(end - start <= longest for start, end in pairwise(offsets)):
            return offsets
        places = list(_clauses(text, spans))
        cuts = list(offsets)
        todo = list(pairwise(offsets))
        while todo:
            start, end = todo.pop()
            low, high = bisect_left(places, start + self.shortest), bisect_right(places, end - self.shortest)
            if end - start <= longest or low >= high:
                continue
            middle = bisect_left(places, (start + end) // 2, low, high)
            near = places[max(low, middle - 1) : min(high, middle + 1)]
            cut = min(near, key=lambda place: abs(2 * place - start - end))
            cuts.append(cut)
            todo += [(start, cut), (cut, end)]
        return sorted(cuts)


def _cuts(text: str, spans: list[TextSpan]) -> Iterator[int]:
    """Yields the ends of sentences, the beginnings of lines, and the ends of rows of displayed formulas."""
    inside = _inside((span.start, span.end) for span in spans)
    yield from sentence_ends(text, spans)
    for line in _LINE.finditer(text):
        if not inside(line.start()):
            yield line.start()
    for span in spans:
        # The rows of a matrix or a table within the formula are no steps.
        environments: list[str] = []
        for sign in _ROW.finditer(text, span.start, span.end) if span.display else ():
            if sign["inner"] is not None:
                environments.append(sign["inner"].rstrip("*"))
            elif sign["end"] is None:
                del environments[-1:]
            elif _ROWS_ARE_STEPS.issuperset(environments[-_LOOK_BACK:]):
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
        spans: Its `formulas`, within which no sentence ends.
        abbreviation: Matches text that ends with the full stop of an abbreviation.
        before_numbers: Whether a sentence may begin with a number: ``Multiply x by 2. 7 is added.``
    """
    pattern = _SENTENCE_END_ALSO_BEFORE_NUMBERS if before_numbers else _SENTENCE_END
    is_inside = _inside((span.start, span.end) for span in spans)
    for end in pattern.finditer(text):
        if is_inside(end.end()):
            continue
        # An abbreviation ends in a Latin full stop, and nothing closes between this and the next word.
        may_abbreviate = end[0].startswith(".") and not end[0].endswith(("$", ")", "]"))
        before = text[max(end.start() - _LOOK_BACK, 0) : end.start() + 1]
        if may_abbreviate and abbreviation.search(before):
            continue
        yield end.end()


def _clauses(text: str, spans: list[TextSpan]) -> Iterator[int]:
    """Yields offsets at which a long part may be cut: not in a formula within a line, a figure or a group of
    braces."""
    whole = _inside(
        (span.start, span.end)
        for span in spans
        if not span.display or text.startswith(("[asy]", "```", "\\begin{tabular"), span.start)
    )
    outermost: list[tuple[int, int]] = []
    for start, end in sorted(braces(text).items()):
        if not outermost or start >= outermost[-1][1]:
            outermost.append((start, end + 1))
    groups = _inside(outermost)
    for sign in _CLAUSE.finditer(text):
        place = sign.start() if sign["before"] else sign.end()
        if not whole(place) and not groups(place):
            yield place


def _inside(spans: Iterable[tuple[int, int]]) -> Callable[[int], bool]:
    """Returns whether an offset is within one of some spans, which are in order and apart; their ends are
    not."""
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

    500 of the 12,000 are held out for validation, as many as in the VinePPO paper (11,500 / 500 /
    500), chosen here with `split_seed`: not the paper's own 500. A row has a `problem`, a worked
    `solution` and its `answer`; where that is missing, the gold is the solution, out of which
    graders take the box. `level` and `type` (or `subject`) go into `Problem.data`.
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
    """A set to measure on: `problem` and `answer` in each row of the test split, and no solutions."""

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
    """The open-ended English competition problems in text alone of OlympiadBench (He et al., 2024,
    arXiv:2402.14008): 674 of them."""

    test: tuple[str, ...] = ("data/olympiadbench/test.jsonl",)
    keep: tuple[str, ...] = ("type", "subject")
