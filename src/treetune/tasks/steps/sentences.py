"""Steps of solutions in prose with formulas, such as MATH's."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from annotated_types import Ge

from treetune.tasks.latex import braces
from treetune.tasks.steps.base import StepSplitter
from treetune.tasks.steps.formulas import Span, formulas

_CLOSINGS = r"(?:[$)\"'”’*]|\\[)\]])*+"
_SENTENCE_END = re.compile(rf"[.!?]{_CLOSINGS}(?=\s+[A-Z(\"“‘*$\\])")
_ENDS_A_SENTENCE = re.compile(rf"(?:[.!?:]{_CLOSINGS}|\\\\|\\\]|\\end\{{[A-Za-z]{{1,24}}\*?\}})\s*+\Z")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|St|vs|etc|cf|Eq|Fig|No|pp|resp)|\bi\.e|\be\.g|\b[A-Za-z]|(?:\A|\n)\s*\d+)\.\Z"
)
_LINE = re.compile(r"\n\s*+")
_ROW = re.compile(
    r"(?P<end>\\\\(?:\[[^\]\n]{0,12}\])?[ \t]{0,20}(?=\n))"
    r"|\\begin\{(?P<inner>[^{}\n]{1,24})\}|\\end\{[^{}\n]{1,24}\}"
)
_CLAUSE = re.compile(
    r"[,;:](?=\s)|(?P<before>\s(?:and|so|then|which|because|since|or)(?=\s)|(?<![<>!=:])=(?!=))"
)

_ROWS_ARE_STEPS = {
    "align", "aligned", "alignat", "alignedat", "gather", "gathered", "eqnarray", "split", "multline",
    "equation", "flalign",
}  # fmt: skip
_LOOK_BACK = 12
_LOOK_AT_END = 200
"""Characters at the end of a part in which its full stop must stand."""


@StepSplitter.register("math")
@dataclass(frozen=True, kw_only=True)
class Sentences(StepSplitter):
    r"""A step is a sentence, a line, or a row of a displayed formula, with the white space before it.

    Formulas are not cut inside, but for displayed ones at the end of a row (``\\`` and a newline).
    Parts shorter than `shortest` characters that end no sentence or formula go with what follows, the
    last one with what comes before. A part longer than `longest` is cut at a comma, a conjunction or a
    displayed equals sign near its middle, as long as there is one; null never does. An answer with
    nothing to cut at, however short, is one step. Time is linear in the text, but for sorting.
    """

    shortest: Annotated[int, Ge(1)] = 20
    longest: Annotated[int, Ge(40)] | None = 200

    def boundaries(self, response: str) -> list[int]:
        if not response:
            return [0]
        spans = formulas(response)
        offsets = self._merged(response, sorted({*_cuts(response, spans)} - {0, len(response)}))
        return offsets if self.longest is None else self._cut_long(response, spans, offsets)

    def _merged(self, text: str, cuts: list[int]) -> list[int]:
        """The cuts that leave no part too short."""
        offsets = [0]
        for cut in cuts:
            if self._is_step(text[offsets[-1] : cut]):
                offsets.append(cut)
        if len(offsets) > 1 and not self._is_step(text[offsets[-1] :]):
            offsets.pop()
        return [*offsets, len(text)]

    def _is_step(self, part: str) -> bool:
        said = part.strip()
        return len(said) >= self.shortest or bool(said and _ENDS_A_SENTENCE.search(said[-_LOOK_AT_END:]))

    def _cut_long(self, text: str, spans: list[Span], offsets: list[int]) -> list[int]:
        assert self.longest is not None
        if all(end - start <= self.longest for start, end in pairwise(offsets)):
            return offsets
        places = list(_clauses(text, spans))
        cuts = list(offsets)
        todo = list(pairwise(offsets))
        while todo:
            start, end = todo.pop()
            low, high = bisect_left(places, start + self.shortest), bisect_right(places, end - self.shortest)
            if end - start <= self.longest or low >= high:
                continue
            middle = bisect_left(places, (start + end) // 2, low, high)
            near = places[max(low, middle - 1) : min(high, middle + 1)]
            cut = min(near, key=lambda place: abs(2 * place - start - end))
            cuts.append(cut)
            todo += [(start, cut), (cut, end)]
        return sorted(cuts)


def _cuts(text: str, spans: list[Span]) -> Iterator[int]:
    inside = _Inside((span.start, span.end) for span in spans)
    for found in _SENTENCE_END.finditer(text):
        in_formula = found[0].endswith(("$", ")", "]"))
        before = text[max(found.start() - _LOOK_BACK, 0) : found.start() + 1]
        if not inside(found.end()) and (in_formula or not _ABBREVIATION.search(before)):
            yield found.end()
    for found in _LINE.finditer(text):
        if not inside(found.start()):
            yield found.start()
    for span in spans:
        if span.display:
            yield from _rows(text, span)


def _rows(text: str, span: Span) -> Iterator[int]:
    """Ends of the rows of a displayed formula, those of a matrix or a table in it left out."""
    environments: list[str] = []
    for found in _ROW.finditer(text, span.start, span.end):
        if found["inner"] is not None:
            environments.append(found["inner"].rstrip("*"))
        elif found["end"] is None:
            del environments[-1:]
        elif _ROWS_ARE_STEPS.issuperset(environments[-_LOOK_BACK:]):
            yield found.end()


def _clauses(text: str, spans: list[Span]) -> Iterator[int]:
    """Where a long part may be cut: not in a formula within a line, a figure or a group of braces."""
    whole = _Inside(
        (span.start, span.end)
        for span in spans
        if not span.display or text.startswith(("[asy]", "```", "\\begin{tabular"), span.start)
    )
    groups = _Inside(_outermost(braces(text)))
    for found in _CLAUSE.finditer(text):
        place = found.start() if found["before"] else found.end()
        if not whole(place) and not groups(place):
            yield place


def _outermost(pairs: dict[int, int]) -> Iterator[tuple[int, int]]:
    last = -1
    for start, end in sorted(pairs.items()):
        if start > last:
            yield start, end + 1
            last = end


class _Inside:
    """Whether a place is within one of some spans, which are in order and apart; its ends are not."""

    def __init__(self, spans: Iterator[tuple[int, int]]) -> None:
        self._spans: Sequence[tuple[int, int]] = list(spans)
        self._starts = [start for start, _ in self._spans]

    def __call__(self, place: int) -> bool:
        index = bisect_left(self._starts, place) - 1
        return index >= 0 and place < self._spans[index][1]
