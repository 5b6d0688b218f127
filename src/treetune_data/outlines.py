"""What each thread is to do, said before any of it is done, and without its results."""

from __future__ import annotations

import re
from collections.abc import Sequence

from treetune_data import prompts
from treetune_data.asking import Questions, Unreadable
from treetune_data.reading import CONTROL, json_list

MOST_SENTENCES = 2
MOST_CHARACTERS = 600

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SENTENCE_END = re.compile(r"[.!?](?=\s+[^\sa-z]|\s*$)")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|resp|Eq|Eqs|Fig|No)\.", re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z]+>")


async def outlines(questions: Questions, problem: str, known: str, threads: Sequence[str]) -> list[str]:
    """One line per thread. Raises Unreadable where the model gives none that would do."""
    parts = "\n\n".join(
        f'<part number="{number}">\n{text}\n</part>' for number, text in enumerate(threads, start=1)
    )
    asked = prompts.OUTLINES.format(count=len(threads), problem=problem, known=known, parts=parts)

    def read(answer: str) -> list[str]:
        items = json_list(answer)
        if len(items) != len(threads):
            raise Unreadable(f"there are {len(items)} announcements for {len(threads)} pieces of work")
        return [_outline(item, i, f"{problem}\n{known}", text, len(threads)) for i, (item, text) in
                enumerate(zip(items, threads), start=1)]  # fmt: skip

    return (await questions.ask("outlines", [("user", asked)], read))[0]


def _outline(item: object, number: int, known: str, thread: str, count: int) -> str:
    where = f"announcement {number}"
    if not isinstance(item, str) or not item.strip():
        raise Unreadable(f"{where} is no text")
    text = item.strip()
    if CONTROL.search(text):
        raise Unreadable(f"{where} holds a line break or another control character; are backslashes doubled?")
    if _TAG.search(text):
        raise Unreadable(f"{where} holds a tag")
    if len(text) > MOST_CHARACTERS or sentences(text) > MOST_SENTENCES:
        raise Unreadable(f"{where} is longer than {MOST_SENTENCES} short sentences")
    leaked = results_in(text, known, thread, count)
    if leaked:
        raise Unreadable(
            f"{where} names {', '.join(leaked)}, which is only found there: it gives away a result"
        )
    return text


def sentences(text: str) -> int:
    """How many there are; a dot within a number or behind a common abbreviation ends none."""
    return max(1, len(_SENTENCE_END.findall(_ABBREVIATION.sub("", text))))


def results_in(outline: str, known: str, thread: str, count: int) -> list[str]:
    """Numbers of an outline that its thread finds and nothing before it holds. (Those up to `count` may
    only count the threads.)"""
    before = set(_NUMBER.findall(known)) | set(map(str, range(count + 1)))
    found = set(_NUMBER.findall(thread))
    return [number for number in dict.fromkeys(_NUMBER.findall(outline)) if number in found - before]
