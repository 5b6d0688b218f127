"""An answer with threads as what was written in which order and side by side, read from its episode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import fmean
from typing import Any, Literal

from treetune.vocabulary import Segment, token_array
from treetune_threads.format import TAGS, TagIds
from treetune_threads.numbers import ThreadCounts, count, critical_seconds

NUMBERS = {tag: position for position, tag in enumerate(TAGS, start=1)}
TAG_IDS = TagIds.of(lambda tag: (NUMBERS[tag],))
"""For counting without a tokenizer: a tag's text stands for its token, and 0 for every other."""

OUTLINE_NUMBER = re.compile(r"<Thread>\s*(\d+(?:\.\d+)*)\s*:")


@dataclass(frozen=True)
class PlacedSegment:
    """Tokens ``[start, end)`` that entered the answer together, as `segment` says (its ids are left out)."""

    start: int
    end: int
    segment: Segment


@dataclass(frozen=True)
class Block:
    """`head` is the text from the tag that opens the block to its first thread, `tail` that from its last
    thread to the tag that closes it, as spans of tokens; empty where the tag is lacking."""

    head: tuple[int, int]
    threads: tuple[Line, ...]
    tail: tuple[int, int]


@dataclass(frozen=True)
class Run:
    """Tokens ``[start, end)`` of a line that are in none of its blocks."""

    start: int
    end: int


Line = tuple[PlacedSegment, ...]
"""The segments of the answer, or those of a thread with all that is in it, in order."""


@dataclass(frozen=True)
class ThreadedAnswer:
    """A row of `episodes.arrow` that has stretches, and what the trajectory says where it is at hand: its
    segments, and its named numbers.

    The colours of advantages are full from `scale` on.
    """

    row: Mapping[str, Any]
    segments: Sequence[Segment] | None
    numbers: Mapping[str, float]
    scale: float

    @cached_property
    def texts(self) -> list[str]:
        return [text.strip() for text in self.row["tokens"]]

    @cached_property
    def depth(self) -> int:
        return max(len(stretch["branch"]) for stretch in self.row["stretches"])

    def counts(self, start: int, end: int, above: int = 0) -> ThreadCounts:
        """Of tokens that lie in so many blocks."""
        numbers = [NUMBERS.get(text, 0) for text in self.texts[start:end]]
        return count(numbers, TAG_IDS, max(0 if above else 1, self.depth - above))

    @cached_property
    def line(self) -> Line:
        """Stretch by stretch: from the trajectory, else as far as the episode alone knows."""
        placed, start, trained = [], 0, self.row["trained"]
        for position, stretch in enumerate(self.row["stretches"]):
            end = stretch["end"]
            branch = tuple((block, thread) for block, thread in stretch["branch"])
            origin: Literal["sampled", "injected"] = "sampled" if any(trained[start:end]) else "injected"
            segment = Segment(token_array(()), origin, branch=branch)
            if self.segments is not None:
                segment = self.segments[position]
            placed.append(PlacedSegment(start, end, segment))
            start = end
        return tuple(placed)

    @cached_property
    def is_told_apart(self) -> bool:
        """Whether credit differs within what is trained, so that steps and threads must say theirs."""
        advantages = self.row.get("advantages") or ()
        return len({round(a, 4) for a, on in zip(advantages, self.row["trained"]) if on}) > 1

    def mean_advantage(self, start: int, end: int) -> float | None:
        """Of trained tokens; None where there are none."""
        both = zip((self.row.get("advantages") or ())[start:end], self.row["trained"][start:end])
        found = [advantage for advantage, on in both if on]
        return fmean(found) if found else None

    @cached_property
    def states(self) -> Mapping[int, str]:
        """What is to be said where a step begins: the value of the state, and the step's advantage."""
        values, ends = self.row.get("step_values") or (), self.row.get("step_ends") or ()
        told = {}
        for step, (start, end) in enumerate(zip((0, *ends), ends)):
            words = [f"V {values[step]:.2f}"] if step < len(values) else []
            mean = self.mean_advantage(start, end) if self.is_told_apart else None
            words += [f"A {mean:+.2f}"] if mean is not None else []
            if words:
                told[start] = " ".join(words)
        return told


def parted(answer: ThreadedAnswer, line: Line, depth: int) -> Iterator[Run | Block]:
    """Text and blocks in turn. A block has the text that belongs to it."""

    def block_of(one: PlacedSegment) -> int | None:
        return one.segment.branch[depth][0] if len(one.segment.branch) > depth else None

    groups = [(block, tuple(placed)) for block, placed in groupby(line, key=block_of)]
    texts, behind = answer.texts, line[0].start if line else 0
    for position, (block, placed) in enumerate(groups):
        start, end = max(behind, placed[0].start), placed[-1].end
        following = groups[position + 1] if position + 1 < len(groups) else None
        if block is None:
            if following is not None:
                end = next((i for i in reversed(range(start, end)) if texts[i] == "<Parallel>"), end)
            if start < end:
                yield Run(start, end)
            behind = end
            continue
        tail = (end, end)
        if following is not None and following[0] is None:
            upto = following[1][-1].end
            closes = next((i + 1 for i in range(end, upto) if texts[i] in ("<Parallel>", "</Parallel>")), end)
            tail = (end, closes) if texts[closes - 1] == "</Parallel>" else (end, end)
        threads: dict[int, list[PlacedSegment]] = {}
        for one in placed:
            threads.setdefault(one.segment.branch[depth][1], []).append(one)
        yield Block((behind, placed[0].start), tuple(tuple(threads[i]) for i in sorted(threads)), tail)
        behind = tail[1]


def sampled(line: Line) -> list[PlacedSegment]:
    """All that the policy wrote, in the line's blocks too."""
    return [one for one in line if one.segment.origin == "sampled"]


def seconds_of(line: Line, depth: int) -> float | None:
    """Measured, on the slowest way through a line that lies in `depth` blocks; None where a part wasn't."""
    segments = [one.segment for one in sampled(line)]
    if not segments or any(segment.seconds is None for segment in segments):
        return None
    return critical_seconds(segments, depth)


def inner(answer: ThreadedAnswer, thread: Line) -> tuple[int, int]:
    """Without the thread's own tags, which count for its block."""
    start, end = thread[0].start, thread[-1].end
    if answer.texts[start : start + 1] == ["<Thread>"]:
        start += 1
    if end > start and answer.texts[end - 1] == "</Thread>":
        end -= 1
    return start, end


def length(answer: ThreadedAnswer, thread: Line, depth: int) -> int:
    """The critical path of a thread that lies in `depth` blocks, in tokens."""
    return answer.counts(*inner(answer, thread), above=depth).num_tokens_in_the_longest_thread


def name_of(answer: ThreadedAnswer, thread: Line, position: int) -> str:
    """The number of the thread's outline, as its header says it."""
    text = "".join(answer.row["tokens"][thread[0].start : thread[0].end])
    found = OUTLINE_NUMBER.search(text)
    return found.group(1) if found else str(position + 1)
