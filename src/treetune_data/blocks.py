"""From line numbers to blocks: a deterministic cut that keeps only what is worth running side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from treetune_data.reading import Lines
from treetune_threads.faults import MOST_THREADS


@dataclass(frozen=True)
class Rule:
    """What a block has to be worth: `min_saved` characters that need not be waited for, and at most
    `max_threads` threads."""

    min_saved: int
    max_threads: int = MOST_THREADS


@dataclass(frozen=True)
class Block:
    """A stretch of a solution: its threads' texts as they stand there, without white space around them, and
    the lines of each."""

    first: int
    last: int
    threads: tuple[str, ...]
    lines: tuple[Lines, ...]


@dataclass(frozen=True)
class Dropped:
    """A block that stays sequential text. `reason` is counted; `detail` says more."""

    lines: tuple[Lines, ...]
    reason: str
    detail: str = ""


def cut(
    groups: Sequence[Sequence[Lines]], lines: Sequence[str], rule: Rule
) -> tuple[list[Block], list[Dropped]]:
    """The blocks to keep, in the solution's order, and the others.

    Kept is a block whose threads follow each other within the solution, two at least of them with text, if at
    least `rule.min_saved` characters of them need not be waited for (all but the longest thread's).
    """
    kept: list[Block] = []
    dropped = []
    for group in sorted(groups, key=lambda group: group[0] if group else (0, 0)):
        block = _block(group, lines, rule, kept[-1].last if kept else 0)
        if isinstance(block, Block):
            kept.append(block)
        else:
            dropped.append(block)
    return kept, dropped


def _block(group: Sequence[Lines], lines: Sequence[str], rule: Rule, taken: int) -> Block | Dropped:
    def drop(reason: str, detail: str = "") -> Dropped:
        return Dropped(tuple(group), reason, detail)

    for first, last in group:
        if not 1 <= first <= last <= len(lines):
            return drop("lines that are not there", f"{first}-{last} of {len(lines)}")
    for (first, last), (following, _) in pairwise(group):
        if following <= last:
            return drop("threads overlap or are in disorder", f"{following} follows {first}-{last}")
        if any(line.strip() for line in lines[last : following - 1]):
            return drop("lines between threads that are in none", f"{last + 1}-{following - 1}")
    if group and group[0][0] <= taken:
        return drop("overlaps another block", f"{group[0][0]} is before {taken + 1}")
    texts = ["\n".join(lines[first - 1 : last]).strip() for first, last in group]
    threads = tuple(text for text in texts if text)
    if len(threads) < 2:
        return drop("fewer than two threads with text")
    if len(threads) > rule.max_threads:
        return drop("too many threads", f"{len(threads)} of at most {rule.max_threads}")
    saved = saved_characters(threads)
    if saved < rule.min_saved:
        return drop("too little is saved", f"{saved} characters of {rule.min_saved}")
    places = tuple(place for place, text in zip(group, texts) if text)
    return Block(group[0][0], group[-1][1], threads, places)


def saved_characters(threads: Sequence[str]) -> int:
    """Those that need not be waited for: of all threads but the longest."""
    return sum(map(len, threads)) - max(map(len, threads))
