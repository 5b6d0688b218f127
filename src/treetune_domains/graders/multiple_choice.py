"""Questions with lettered options: GPQA, SuperGPQA and their like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Le, MinLen

from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import boxes
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem

_DRESS = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|textit|mathit)\s?(?=\{)|[{}$*_`\"'“”‘’]")
_ANSWER_IS = re.compile(
    r"(?:\b(?:answer|choice|option)\b[ \t*_]*(?:(?:is|(?:would|must|should) be)\b|[:=]|\n)"
    r"|\bI (?:choose|pick|select)\b)"
    r"[ \t*_:]*(?:(?:therefore|thus|hence|clearly)\b[ \t*_:]*)?(?:\n[ \t*_]*)?"
    r"(?:(?:option|choice|answer|the letter)\b[ \t*_:]*)?(?=(?P<text>[^\n]{0,200}))"
    r"|\b(?:option|choice|answer) \(?(?P<named>[A-Z])\)? is (?:the )?(?:correct|right|best)\b",
    re.IGNORECASE,
)
_ALONE = re.compile(r"\(?(?P<letter>[A-Za-z])\)?\s*[.,;:!]?\s*")
_LABEL = re.compile(
    r"(?:option |choice )?"
    r"(?:\((?P<inner>[A-Z])\)|(?P<letter>[A-Z])(?:[).:,]|(?= (?:because|since)\b| [-–—] )))(?=\s|$)"
)

_OPTION = r"(?:[B-HJ-Z](?![\w'’])|A(?![\w'’])(?! (?!is\b)[a-z])|I(?=\)|\W*$))"
_SAYS = re.compile(rf"(?<!\w){_OPTION}|\A\W*(?i:not|no|none|neither|all|any|both|either|un\w+)\b")
"""What is told of an answer without a letter and without a refusal, such as "this choice is the only one that
fits", takes nothing back."""
_HEDGED = re.compile(
    r"\A\W*(?:and\b\W*)?\(?[A-Z](?:[).,:;/]|$)|(?:[,/;&]|\band\b)\W*[A-Z]\)"
    r"|\b(?i:or|maybe|perhaps|possibly|probably|alternatively|wait|actually|rather)\b"
    r"(?:\W*\b(?:it|is|be|may|might|could|also|even|well|option|choice|answer|the|actually|maybe|rather)\b){0,6}"
    rf"\W*?{_OPTION}",
)
"""Behind a choice: another one."""
_REASON = re.compile(r"\b(?:because|since|[Bb]oth|[Ee]ither|[Nn]either)\b")
_JOINED = re.compile(
    r"(?:\b(?:or|and)\b[^\w\n]*(?:(?:the|correct|right|best|final)\s+)*|\}[^\S\n]*[$,/&]*[^\S\n]*)\Z"
)


@Grader.register("multiple_choice")
@dataclass(frozen=True, kw_only=True)
class MultipleChoice(Grader):
    r"""Right is a response that chooses the gold's letter. Nothing is ever guessed: a response without a
    choice has the outcome ``no_answer``, and so has one that names several letters at once.

    The choice stands in a ``\boxed{…}`` or behind "answer is", "Answer:", "Final answer:" or the like,
    after the last `think_end`; of several the last one counts, also on one line. It is a letter alone in
    either case (``b``, ``(B)``, ``**B.**``, ``\text{B}``), or a capital with its option (``B) Paris``,
    ``(B) Paris``, ``B: Paris``). A letter within a word is no choice, nor is the first word of ``A dog``.
    Two that are joined (``B or C``, ``(B), maybe (C)``, ``B. Wait, C``) are none. The gold is a letter,
    written in these ways.
    """

    options: Annotated[int, Le(26)] = 10
    """Letters beyond the first so many are no choices."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is no part of an answer; the default knows other models' tags, too
    (`tasks.thoughts`). null: all of a response counts."""

    isolation: ClassVar[Isolation] = "inline"

    def extract(self, response: str, problem: Problem) -> str | None:
        answer = response
        stated: list[tuple[int, str | None, str]] = []
        for start, end, content in boxes(answer):
            letter, rest = self._letter(content)
            stated.append((start, letter, rest + answer[end : end + 200].partition("\n")[0]))
        for match in _ANSWER_IS.finditer(answer):
            if match["named"]:
                letter, rest = self._letter(match["named"])[0], answer[match.end() : match.end() + 200]
            else:
                letter, rest = self._letter(match["text"])
            if letter or match["named"] or _SAYS.search(match["text"]):
                stated.append((match.start(), letter, rest.partition("\n")[0]))
        stated.sort(key=lambda one: one[0])
        if not stated:
            return None
        start, letter, rest = stated[-1]
        rest = _REASON.split(_DRESS.sub("", rest))[0]
        if any(re.findall("[A-Z]", hedge[0])[-1] != letter for hedge in _HEDGED.finditer(rest)):
            return None
        before, other, _ = stated[-2] if len(stated) > 1 else stated[-1]
        return (
            letter
            if other == letter or not _JOINED.search(answer[max(before, start - 200) : start])
            else None
        )

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold, _ = self._letter(problem.gold)
        if gold is None:
            raise ValueError(f"the gold {problem.gold[:100]!r} is none of the first {self.options} letters")
        return Grade(reward=float(extracted == gold), outcome="ok")

    def _letter(self, text: str) -> tuple[str | None, str]:
        """Returns the letter that a text chooses at its beginning, and what follows it."""
        text = " ".join(_DRESS.sub("", text[:2000]).split())
        alone = _ALONE.fullmatch(text)
        label = _LABEL.match(text) if alone is None else None
        letter = alone["letter"] if alone else (label["inner"] or label["letter"]) if label else ""
        rest = text[label.end() :] if label else ""
        letter = letter.upper()
        return (letter if letter and ord(letter) - ord("A") < self.options else None), rest
