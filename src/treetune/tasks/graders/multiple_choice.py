"""Questions with lettered options: GPQA, SuperGPQA and their like."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Le, MinLen

from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import THINK_END, after_thought
from treetune.tasks.latex import boxes
from treetune.vocabulary import Grade, Problem

_DRESS = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf|textit|mathit)\s?(?=\{)|[{}$*_`\"'“”‘’]")
_TOLD = re.compile(
    r"(?:\b(?:answer|choice|option)\b[ \t*_]*(?:(?:is|(?:would|must|should) be)\b|[:=]|\n)"
    r"|\bI (?:choose|pick|select)\b)"
    r"[ \t*_:]*(?:(?:therefore|thus|hence|clearly)\b[ \t*_:]*)?(?:\n[ \t*_]*)?"
    r"(?:(?:option|choice|answer|the letter)\b[ \t*_:]*)?(?P<said>[^\n]{0,200})"
    r"|\b(?:option|choice|answer) \(?(?P<named>[A-Z])\)? is (?:the )?(?:correct|right|best)\b",
    re.IGNORECASE,
)
_ALONE = re.compile(r"\(?(?P<letter>[A-Za-z])\)?\s*[.,;:!]?\s*")
_LABEL = re.compile(
    r"(?:option |choice )?"
    r"(?:\((?P<inner>[A-Z])\)|(?P<letter>[A-Z])(?:[).:]|(?= (?:because|since)\b| [-–—] )))(?=\s|$)"
)


@Grader.register("multiple_choice")
@dataclass(frozen=True, kw_only=True)
class MultipleChoice(Grader):
    r"""Right is a response that chooses the gold's letter. Nothing is ever guessed: a response without a
    choice has the outcome ``no_answer``, and so has one that names several letters at once.

    The choice stands in the last ``\boxed{…}`` or behind the last "answer is", "Answer:", "Final answer:" or
    the like, whichever comes later, after the last `think_end`. It is a letter alone in either case (``b``,
    ``(B)``, ``**B.**``, ``\text{B}``), or a capital with its option (``B) Paris``, ``(B) Paris``,
    ``B: Paris``). A letter within a word is no choice, nor is the first word of ``A dog``.

    Letters beyond the first `options` are no choices either. The gold is a letter, written in these ways.
    """

    options: Annotated[int, Le(26)] = 10
    think_end: Annotated[str, MinLen(1)] = THINK_END

    isolation: ClassVar[Isolation] = "inline"

    def extract(self, response: str, problem: Problem) -> str | None:
        said = after_thought(response, self.think_end)
        told = next(iter(deque(_TOLD.finditer(said), maxlen=1)), None)
        boxed = boxes(said)[-1:]
        if boxed and (told is None or boxed[0][1] > told.start()):
            return self._letter(boxed[0][2])
        return self._letter(told["named"] or told["said"]) if told is not None else None

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold = self._letter(problem.gold)
        if gold is None:
            raise ValueError(f"the gold {problem.gold[:100]!r} is none of the first {self.options} letters")
        return Grade(reward=float(extracted == gold), outcome="ok")

    def _letter(self, text: str) -> str | None:
        text = " ".join(_DRESS.sub("", text[:2000]).split())
        found = _ALONE.fullmatch(text)
        label = _LABEL.match(text) if found is None else None
        letter = found["letter"] if found else (label["inner"] or label["letter"]) if label else ""
        letter = letter.upper()
        return letter if letter and ord(letter) - ord("A") < self.options else None
