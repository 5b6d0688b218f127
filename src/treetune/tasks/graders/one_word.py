"""Questions whose answer is one word, such as the next node of a path."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.tagged import Tagged, plain
from treetune.vocabulary import Grade, Problem

_DRESS = re.compile(r"\\(?:boxed|text|textbf|mathrm)(?=\{)|</?[bi]>")
_LABEL = re.compile(r"^(?:the )?(?:final )?answer(?: is|:)|^(?:it )?is\b", re.IGNORECASE)


@Grader.register("one_word")
@dataclass(frozen=True, kw_only=True)
class OneWord(Tagged):
    """Right is the gold's word, in any case, whatever spaces, newlines, quotes and full stops stand around
    it, and behind "Answer:". Another sentence that contains the word is not the word.
    """

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        word = bare(problem.gold)
        if not word:
            raise ValueError(f"the gold {problem.gold[:100]!r} holds no word")
        said = _LABEL.sub("", _DRESS.sub("", extracted.strip()))
        return Grade(reward=float(bare(said) == word), outcome="ok")


def bare(text: str) -> str:
    """In one case, without anything before the first letter or digit and behind the last."""
    text = plain(unicodedata.normalize("NFC", text))
    first = next((place for place, sign in enumerate(text) if sign.isalnum()), len(text))
    last = next((place for place in range(len(text), first, -1) if text[place - 1].isalnum()), first)
    return text[first:last]
