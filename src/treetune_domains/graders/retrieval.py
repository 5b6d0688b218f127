"""Questions on facts whose answer is a short text: exact match and F1, as SQuAD measures them.

Both compare words without case, punctuation and articles (Rajpurkar et al., 2016, arXiv:1606.05250).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import NoValue, read_value
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders.tagged import Tagged

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

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        said = words(extracted)
        return Grade(reward=float(any(said == gold for gold in gold_words(problem.gold))), outcome="ok")


@Grader.register("f1")
@dataclass(frozen=True, kw_only=True)
class F1(Tagged):
    """An answer earns the F1 of its words and a gold's, the best of several (written as in `exact_match`):
    twice the words that both have, over all words of both. Words in another order earn all; then
    `exact_match` is the stricter one.
    """

    def verdict(self, extracted: str, problem: Problem) -> float:
        said = words(extracted)
        return max(overlap(said, gold) for gold in gold_words(problem.gold))


def overlap(said: Sequence[str], gold: Sequence[str]) -> float:
    """F1 of two bags of words; two empty ones are alike."""
    if not said or not gold:
        return float(not said and not gold)
    both = sum((Counter(said) & Counter(gold)).values())
    return 2 * both / (len(said) + len(gold))


def words(text: str) -> Sequence[str]:
    """In small letters, without punctuation and articles."""
    text = unicodedata.normalize("NFC", text[:LONGEST]).lower().translate(_PUNCTUATION)
    return tuple(_ARTICLES.sub(" ", text).split())


@lru_cache(maxsize=1024)
def gold_words(gold: str) -> Sequence[Sequence[str]]:
    """Of each gold its words. Raises ValueError for a gold that holds no text."""
    golds = _texts(gold)
    if not golds or not any(map(str.strip, golds)):
        raise ValueError(f"the gold {gold[:100]!r} holds no answer: give a text, or a JSON list of texts")
    return tuple(words(one) for one in golds)


def _texts(gold: str) -> Sequence[str]:
    if not gold.lstrip().startswith(("[", "{")):
        return (gold,)
    try:
        value: Any = read_value(gold)
    except NoValue:
        return (gold,)
    if isinstance(value, dict):
        value = next((value[key] for key in _KEYS if key in value), ())
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]
