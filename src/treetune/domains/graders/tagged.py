"""Graders of answers between two tags, such as a word or a short text.

Exact match and F1 compare words without case, punctuation and articles, as in SQuAD (Rajpurkar et al., 2016,
arXiv:1606.05250).
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
from treetune.tasks.graders.extraction import CLOSING_TAG, OPENING_TAG, last_between, read_value
from treetune.tasks.thoughts import THINK_END
from treetune.vocabulary import Grade, Problem


@dataclass(frozen=True, kw_only=True)
class Tagged(Grader):
    r"""A grader whose answer is between two tags, after the last `think_end`: the text before the last
    `closing`, from the last `opening` that precedes it. The answer may have several lines.
    """

    opening: Annotated[str, MinLen(1)] = OPENING_TAG
    """The tag before an answer."""
    closing: Annotated[str, MinLen(1)] = CLOSING_TAG
    """The tag after an answer."""
    unclosed: bool = False
    """Whether the answer may end without `closing`, because this is a stop string, which graders don't see.
    Then the answer is the text after the last `opening`, up to a `closing` if there is one."""
    think_end: Annotated[str, MinLen(1)] | None = THINK_END
    """The text that ends a thought, which is not part of an answer. The default also recognizes the tags of
    other models (`tasks.thoughts`). null: the whole response counts."""

    # Safe in the run's own process: searches and comparisons take linear time, and values are bounded in
    # size.
    isolation: ClassVar[Isolation] = "inline"

    @override
    def extract(self, response: str, problem: Problem) -> str | None:
        return last_between(response, self.opening, self.closing, unclosed=self.unclosed)

    def write_in_tags(self, answer: str) -> str:
        """Returns an answer between the tags, for the end of a response. (If the closing tag is a newline,
        the end of the text takes its place.)"""
        return f"{self.opening}{answer}{self.closing}".rstrip("\n")


def grade_parts(right: int, parts: int, *, partial_reward: bool, message: str | None = None) -> Grade:
    """Grades an answer of which `right` of `parts` parts are right.

    If `partial_reward` is True, the reward is the share of right parts. If not, it is 1 if all parts are
    right, and otherwise 0. The grade always has the share as its number ``cells``.
    """
    share = right / parts
    reward = share if partial_reward or right == parts else 0.0
    return Grade(reward=reward, outcome="ok", message=message, numbers={"cells": share})


def comparable_text(text: str) -> str:
    """Returns a name or cell in the form for comparison: without case, and with single spaces."""
    return " ".join(text.casefold().split())


def comparable_texts(texts: Sequence[object]) -> list[str]:
    """Returns each of the objects as a text in the form for comparison (`comparable_text`)."""
    return [comparable_text(str(text)) for text in texts]


_MARKUP_AROUND_WORD = re.compile(r"\\(?:boxed|text|textbf|mathrm)(?=\{)|</?[bi]>")
_LABEL_BEFORE_WORD = re.compile(r"^(?:the )?(?:final )?answer(?: is|:)|^(?:it )?is\b", re.IGNORECASE)


@Grader.register("one_word")
@dataclass(frozen=True, kw_only=True)
class OneWord(Tagged):
    """Gives the reward 1 for the gold's word. Case is ignored, and so are spaces, newlines, quotes and full
    stops around the word, and "Answer:" before it. A sentence that contains the word is wrong.
    """

    votes_by_value: ClassVar[bool] = True

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        gold_word = strip_signs(problem.gold)
        if not gold_word:
            raise ValueError(f"the gold {problem.gold[:100]!r} contains no word")
        # `_MARKUP_AROUND_WORD` matches commands and tags around the word, such as <b>. `_LABEL_BEFORE_WORD`
        # matches what comes before the word, such as "Answer:".
        word = _LABEL_BEFORE_WORD.sub("", _MARKUP_AROUND_WORD.sub("", extracted.strip()))
        return Grade(reward=float(strip_signs(word) == gold_word), outcome="ok")


def strip_signs(text: str) -> str:
    """Returns a text without case, from its first letter or digit to its last."""
    text = comparable_text(unicodedata.normalize("NFC", text))
    offsets = [offset for offset, character in enumerate(text) if character.isalnum()]
    return text[offsets[0] : offsets[-1] + 1] if offsets else ""


# Short texts

MOST_COMPARED_CHARACTERS = 10_000
"""The most characters of an answer that are compared."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_KEYS_OF_GOLDS = ("target", "answers", "answer", "text", "gold")
"""The keys under which a gold that is an object may have its texts. The first of them that it has counts."""


@Grader.register("exact_match")
@dataclass(frozen=True, kw_only=True)
class ExactMatch(Tagged):
    """Gives the reward 1 for an answer with the same words, in the same order, as a gold. A problem may have
    several golds, one of which the answer has to match. They are written as a JSON list, or as an object with
    a list under ``target``, ``answers``, ``answer``, ``text`` or ``gold``.
    """

    votes_by_value: ClassVar[bool] = True

    @override
    def verdict(self, extracted: str, problem: Problem) -> Grade:
        answer = comparable_words(extracted)
        right = bool(answer) and any(answer == gold for gold in gold_words(problem.gold))
        return Grade(reward=float(right), outcome="ok")


@Grader.register("f1")
@dataclass(frozen=True, kw_only=True)
class F1(Tagged):
    """The reward is the F1 score of the answer's words and a gold's: twice the number of common words,
    divided by the number of all words of both. Of several golds (see `exact_match`) the best score counts.
    The order of words doesn't matter, unlike in `exact_match`.
    """

    votes_by_value: ClassVar[bool] = True

    @override
    def verdict(self, extracted: str, problem: Problem) -> float:
        answer = comparable_words(extracted)
        return max(f1_score(answer, gold) for gold in gold_words(problem.gold))


def f1_score(answer: Sequence[str], gold: Sequence[str]) -> float:
    """Returns the F1 score of two bags of words; 0 if one is empty."""
    if not answer or not gold:
        return 0.0
    common = sum((Counter(answer) & Counter(gold)).values())
    return 2 * common / (len(answer) + len(gold))


def comparable_words(text: str) -> Sequence[str]:
    """Returns the words of a text in small letters, without punctuation and articles. If nothing would be
    left, these are kept: "A" isn't equal to "the", nor "+" to "-"."""
    text = unicodedata.normalize("NFC", text[:MOST_COMPARED_CHARACTERS]).lower()
    without_punctuation = text.translate(_PUNCTUATION)
    without_articles = _ARTICLES.sub(" ", without_punctuation).split()
    return tuple(without_articles or without_punctuation.split() or text.split())


@lru_cache(maxsize=1024)
def gold_words(gold: str) -> Sequence[Sequence[str]]:
    """Returns the words of each gold: of two golds for ``["Rome", "the city of Rome"]``, of one for ``Rome``.
    Raises ValueError if there is no text."""
    value: Any = gold
    if gold.lstrip().startswith(("[", "{")):
        try:
            value = read_value(gold)
        except UnreadableValue:
            value = gold  # a text that begins with a bracket
    if isinstance(value, dict):  # {"answers": ["Rome"]}: the first of `_KEYS_OF_GOLDS` that it has counts
        value = next((value[key] for key in _KEYS_OF_GOLDS if key in value), ())
    golds = [str(text) for text in value] if isinstance(value, list | tuple) else [str(value)]
    golds = [text for text in golds if text.strip()]
    if not golds:
        raise ValueError(f"the gold {gold[:100]!r} contains no answer: give a text, or a JSON list of texts")
    return tuple(comparable_words(text) for text in golds)
