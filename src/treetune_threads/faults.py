"""What is wrong with a text that should have well-formed threads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from treetune_threads.tags import TAGS

MOST_THREADS = 50
"""The published filter's limit for one block."""

Conclusions = Literal["allowed", "required", "refused"]

_STRUCTURE = re.compile("|".join(re.escape(tag) for tag in TAGS if "Think" not in tag))
_ENDS = re.compile(r"</?Parallel>")
_OUTLINE = re.compile(r"<Outline>(.*?)</Outline>", re.DOTALL)
_THREAD = re.compile(r"<Thread>(.*?)</Thread>", re.DOTALL)
_CONCLUSION = re.compile(r"<Conclusion>(.*?)</Conclusion>", re.DOTALL)
_NUMBER = re.compile(r"\s*([0-9]+):")
_FILLER = "x"
"""Stands for the characters of a block that has been checked, in the thread around it."""


def faults(
    text: str,
    *,
    nesting: bool = False,
    conclusions: Conclusions = "allowed",
    adjacent: bool = False,
    most_threads: int = MOST_THREADS,
) -> list[str]:
    """Each rule of ThreadWeaver's format (version 2) that a text breaks, and where; empty for a
    well-formed one, so for one without blocks.

    As many ``<Parallel>`` as ``</Parallel>``, none within another (but in threads with `nesting`). In a
    block outlines, then as many threads, one to `most_threads`, then perhaps a conclusion, which isn't
    empty; nothing but white space between them (nothing at all between threads with `adjacent`), and no
    tags in them. Outlines and threads begin with their numbers and a colon, which are 1, 2, 3, … in both.

    Laxer than `text_segments` in white space, stricter in numbers.
    """
    rules = _Rules(nesting, conclusions, adjacent, most_threads)
    found = []
    opened, closed = text.count("<Parallel>"), text.count("</Parallel>")
    if opened != closed:
        found.append(f"there are {opened} <Parallel> and {closed} </Parallel>")
    open_at: list[int] = []
    # Innermost blocks close first; each is then filled, so that the block around it has plain threads.
    for match in _ENDS.finditer(text):
        if match[0] == "<Parallel>":
            open_at.append(match.start())
        elif open_at:
            begin = open_at.pop()
            where = f"the block at character {begin}"
            if open_at and not nesting:
                found.append(f"{where} is within another")
            body = text[begin + len("<Parallel>") : match.start()]
            found += [f"{where} {what}" for what in rules.broken(body)]
            text = text[:begin] + _FILLER * (match.end() - begin) + text[match.end() :]
    outside = _STRUCTURE.search(text)
    if outside and opened == closed:
        found.append(f"{outside[0]} at character {outside.start()} is outside of all blocks")
    return found


@dataclass(frozen=True)
class _Rules:
    nesting: bool
    conclusions: Conclusions
    adjacent: bool
    most_threads: int

    def broken(self, body: str) -> list[str]:
        """What is wrong with the text between ``<Parallel>`` and ``</Parallel>``."""
        counts = [body.count(tag) for tag in ("<Outline>", "</Outline>", "<Thread>", "</Thread>")]
        if len(set(counts)) > 1 or not counts[0]:
            return [
                "has {} <Outline>, {} </Outline>, {} <Thread> and {} </Thread>, which should be as many, "
                "and at least one".format(*counts)
            ]
        found = []
        if counts[0] > self.most_threads:
            found.append(f"has {counts[0]} threads, more than {self.most_threads}")
        outlines, threads = _OUTLINE.findall(body), _THREAD.findall(body)
        for what, texts in (("outline", outlines), ("thread", threads)):
            found += _broken_texts(what, texts)
        return found + self._broken_conclusion(body) + self._broken_order(body)

    def _broken_conclusion(self, body: str) -> list[str]:
        opened, closed = body.count("<Conclusion>"), body.count("</Conclusion>")
        if opened != closed or opened > 1:
            return [f"has {opened} <Conclusion> and {closed} </Conclusion>, which should be one each or none"]
        if self.conclusions == "refused" and opened:
            return ["has a conclusion"]
        if self.conclusions == "required" and not opened:
            return ["has no conclusion"]
        text = _CONCLUSION.search(body)
        if text is None:
            return ["has </Conclusion> before <Conclusion>"] if opened else []
        if not text[1].strip():
            return ["has an empty conclusion"]
        return _tags_in("the conclusion", text[1])

    def _broken_order(self, body: str) -> list[str]:
        """With the texts of outlines, threads and conclusion taken out, white space and their order are
        all that is left."""
        bare = _CONCLUSION.sub("C", _THREAD.sub("T", _OUTLINE.sub("O", body)))
        if not re.fullmatch(r"\s*<Outlines>[O\s]*</Outlines>\s*T[T\s]*C?\s*", bare):
            return [
                "is not <Outlines>, outlines, </Outlines>, threads and perhaps a conclusion, in this order"
            ]
        if self.adjacent and re.search(r"T\s+T", bare):
            return ["has white space between threads"]
        return []


def _broken_texts(what: str, texts: list[str]) -> list[str]:
    found = []
    numbers = []
    for position, text in enumerate(texts, start=1):
        match = _NUMBER.match(text)
        if match is None:
            found.append(f"has {what} {position} without a number and a colon at its beginning")
        else:
            numbers.append(int(match[1]))
        found += _tags_in(f"{what} {position}", text)
    if len(numbers) == len(texts) and numbers != list(range(1, len(texts) + 1)):
        listed = ", ".join(map(str, numbers))
        found.append(f"numbers its {what}s {listed}, which should be 1 to {len(texts)} in this order")
    return found


def _tags_in(where: str, text: str) -> list[str]:
    tag = _STRUCTURE.search(text)
    return [] if tag is None else [f"has {tag[0]} in {where}"]
