"""Graders of answers that stand between two tags, and the one of a single word."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import MinLen

from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import ANSWER, ANSWER_END, THINK_END, after_thought, last_between
from treetune.vocabulary import Grade, Problem


@dataclass(frozen=True, kw_only=True)
class Tagged(Grader):
    r"""The answer stands behind the last `think_end`, where there is one, between the last `closing` and the
    last `opening` before it, on however many lines. With `unclosed` it is what follows the last `opening`,
    up to a `closing` if there is one: for answers that a stop string ends, which graders don't see.
    """

    opening: Annotated[str, MinLen(1)] = ANSWER
    closing: Annotated[str, MinLen(1)] = ANSWER_END
    unclosed: bool = False
    think_end: Annotated[str, MinLen(1)] = THINK_END

    # Searches and comparisons in linear time, of values that are bounded in size.
    isolation: ClassVar[Isolation] = "inline"

    def extract(self, response: str, problem: Problem) -> str | None:
        said = after_thought(response, self.think_end)
        return last_between(said, self.opening, self.closing, unclosed=self.unclosed)

    def tagged(self, answer: str) -> str:
        """Writes an answer as this grader finds it at the end of a response. (A line's end that closes it is
        left to the end of the text.)"""
        return f"{self.opening}{answer}{self.closing}".rstrip("\n")


def of_parts(right: int, parts: int, *, pays: bool, message: str | None = None) -> Grade:
    """Grades an answer of which `right` of `parts` are as in the gold: 1 where all are, else 0, or
    with `pays` the share. The share is among the grade's numbers as ``cells``."""
    share = right / parts
    reward = 1.0 if right == parts else share if pays else 0.0
    return Grade(reward=reward, outcome="ok", message=message, numbers={"cells": share})


def plain(text: str) -> str:
    """Returns a name or cell for comparison: in one case, with single spaces."""
    return " ".join(text.casefold().split())


def all_plain(texts: Sequence[object]) -> list[str]:
    return [plain(str(text)) for text in texts]


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
        word_given = _LABEL.sub("", _DRESS.sub("", extracted.strip()))
        return Grade(reward=float(bare(word_given) == word), outcome="ok")


def bare(text: str) -> str:
    """Returns the text in one case, without anything before the first letter or digit and behind the last."""
    text = plain(unicodedata.normalize("NFC", text))
    first = next((i for i, sign in enumerate(text) if sign.isalnum()), len(text))
    last = next((i for i in range(len(text), first, -1) if text[i - 1].isalnum()), first)
    return text[first:last]
