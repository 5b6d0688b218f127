"""Graders of answers that stand between two tags, such as a word or a short text.

Exact match and F1 compare words without case, punctuation and articles, as SQuAD measures them (Rajpurkar et
al., 2016, arXiv:1606.05250).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen
from typing_extensions import override

from treetune.exceptions import UnreadableValue
from treetune.tasks.graders.base import Grader, Isolation
from treetune.tasks.graders.extraction import ANSWER, ANSWER_END, last_between, read_value
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem


@dataclass(frozen=True, kw_only=True)
class Tagged(Grader):
    r"""The answer stands behind the last `think_end`, where there is one, between the last `closing` and the
    last `opening` before it, on however many lines.
    """

    opening: Annotated[str, MinLen(1)] = ANSWER
    """The tag before an answer."""
    closing: Annotated[str, MinLen(1)] = ANSWER_END
    """The tag behind it."""
    unclosed: bool = False
    """Takes what follows the last `opening`, up to a `closing` if there is one: for answers that a stop
    string ends, which graders don't see."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is no part of an answer; the default knows other models' tags, too
    (`tasks.thoughts`). null: all of a response counts."""

    # Searches and comparisons in linear time, of values that are bounded in size.
    isolation: ClassVar[Isolation] = "inline"

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        return last_between(response, self.opening, self.closing, unclosed=self.unclosed)

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

    votes_by_value: ClassVar[bool] = True

    @override
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


# Short texts

LONGEST = 10_000
"""Characters of an answer that are compared."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_KEYS = ("target", "answers", "answer", "text", "gold")


@Grader.register("exact_match")
@dataclass(frozen=True, kw_only=True)
class ExactMatch(Tagged):
    """Right is an answer whose words are those of a gold. Several golds are a JSON list, or an object with a
    list under ``target``, ``answers``, ``answer``, ``text`` or ``gold``; one is enough.
    """

    votes_by_value: ClassVar[bool] = True

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        answer = words(extracted)
        right = bool(answer) and any(answer == gold for gold in gold_words(problem.gold))
        return Grade(reward=float(right), outcome="ok")


@Grader.register("f1")
@dataclass(frozen=True, kw_only=True)
class F1(Tagged):
    """An answer earns the F1 of its words and a gold's, the best of several (written as in `exact_match`):
    twice the words that both have, over all words of both. Words in another order earn all; then
    `exact_match` is the stricter one.
    """

    votes_by_value: ClassVar[bool] = True

    @override
    def verdict(self, extracted: str, problem: Problem) -> float:
        answer = words(extracted)
        return max(overlap(answer, gold) for gold in gold_words(problem.gold))


def overlap(answer: Sequence[str], gold: Sequence[str]) -> float:
    """Computes the F1 of two bags of words; 0 where one is empty."""
    if not answer or not gold:
        return 0.0
    both = sum((Counter(answer) & Counter(gold)).values())
    return 2 * both / (len(answer) + len(gold))


def words(text: str) -> Sequence[str]:
    """Returns the words in small letters, without punctuation and articles. A text that has nothing else
    keeps them: the option A is not the word "the", nor is + the sign -."""
    text = unicodedata.normalize("NFC", text[:LONGEST]).lower()
    without_punctuation = text.translate(_PUNCTUATION)
    without_articles = _ARTICLES.sub(" ", without_punctuation).split()
    return tuple(without_articles or without_punctuation.split() or text.split())


@lru_cache(maxsize=1024)
def gold_words(gold: str) -> Sequence[Sequence[str]]:
    """Returns the words of each gold. Raises ValueError for a gold that holds no text."""
    golds: Sequence[str] = (gold,)
    if gold.lstrip().startswith(("[", "{")):
        try:
            value: Any = read_value(gold)
        except UnreadableValue:
            value = gold
        if isinstance(value, dict):
            value = next((value[key] for key in _KEYS if key in value), ())
        golds = [str(text) for text in value] if isinstance(value, list | tuple) else [str(value)]
    if not golds or not any(map(str.strip, golds)):
        raise ValueError(f"the gold {gold[:100]!r} holds no answer: give a text, or a JSON list of texts")
    return tuple(words(text) for text in golds if text.strip())
