"""An answer drawn as its threads: what was written side by side stands side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any

from treetune.episode_generators.thread_metrics import critical_seconds
from treetune.reports.charts import number
from treetune.reports.tokens import coloured, plain
from treetune.tasks.threads.counting import ThreadCounts, count
from treetune.tasks.threads.tags import TAGS, TagIds
from treetune.vocabulary import Segment

SIDE_BY_SIDE = 4
"""More threads than these lie above each other, and can be folded."""

UNFOLDED = 12
"""Of more threads than these only the longest is open at first."""

NUMBERS = {tag: position for position, tag in enumerate(TAGS, start=1)}
TAG_IDS = TagIds.of(lambda tag: (NUMBERS[tag],))
"""For counting without a tokenizer: a tag's text stands for its token, and 0 for every other."""

OUTLINE_NUMBER = re.compile(r"<Thread>\s*(\d+(?:\.\d+)*)\s*:")

NOTE = (
    "Threads that were written at the same time stand beside each other, or where they are many, in rows"
    ' that open. The <span class="way">marked way</span> is the critical path: what is outside of threads,'
    ' and of each block the longest thread. Boxed numbers stand where a step begins. <span class="injected">Underlined</span> text was injected,'
    " not sampled."
)


@dataclass(frozen=True)
class Piece:
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
    start: int
    end: int


Line = tuple[Piece, ...]
"""The pieces of the answer, or those of a thread with all that is in it, in order."""


@dataclass(frozen=True)
class ThreadedAnswer:
    """A row of `episodes.arrow` that has stretches, and its segments where the trajectory is at hand.

    The colours of advantages are full from `scale` on.
    """

    row: Mapping[str, Any]
    segments: Sequence[Segment] | None
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
        pieces, start, trained = [], 0, self.row["trained"]
        for position, stretch in enumerate(self.row["stretches"]):
            end = stretch["end"]
            branch = tuple((block, thread) for block, thread in stretch["branch"])
            segment = Segment((), "sampled" if any(trained[start:end]) else "injected", branch=branch)
            if self.segments is not None:
                segment = self.segments[position]
            pieces.append(Piece(start, end, segment))
            start = end
        return tuple(pieces)

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
                told[start] = f'<span class="state">{" ".join(words)}</span>'
        return told


def threads_html(answer: ThreadedAnswer) -> str:
    """The statistics and the threads; all text is escaped."""
    return (
        f'<p class="counts">{_statistics(answer)}</p>{_line_html(answer, answer.line, 0, is_critical=True)}'
    )


def _statistics(answer: ThreadedAnswer) -> str:
    counts = answer.counts(0, len(answer.texts))
    longest, total = counts.num_tokens_in_the_longest_thread, counts.total_num_tokens
    parts = [
        f"{total} tokens, <b>{longest} on the critical path</b>",
        f"acceleration ratio {counts.acceleration_ratio:.3f}",
        f"{_many(counts.parallel_count, 'block')} of {_many(sum(counts.threads_of_blocks), 'thread')}",
    ]
    seconds = _seconds(answer.line, 0)
    if seconds is not None:
        sampling = sum(piece.segment.seconds or 0.0 for piece in _sampled(answer.line))
        parts.append(f"{number(seconds)} s on the slowest way, {number(sampling)} s in all requests")
    mean = answer.mean_advantage(0, len(answer.texts))
    if mean is not None and not answer.is_told_apart:
        parts.append(f"A {mean:+.2f} throughout")
    return " · ".join(parts)


def _many(how_many: int, of: str) -> str:
    return f"{how_many} {of}{'' if how_many == 1 else 's'}"


def _sampled(line: Line) -> list[Piece]:
    return [piece for piece in line if piece.segment.origin == "sampled"]


def _seconds(line: Line, depth: int) -> float | None:
    """Measured, on the line's slowest way; None where a part wasn't."""
    segments = [piece.segment for piece in _sampled(line)]
    if not segments or any(segment.seconds is None for segment in segments):
        return None
    return critical_seconds(segments, depth)


def _parted(answer: ThreadedAnswer, line: Line, depth: int) -> Iterator[Run | Block]:
    """Text and blocks in turn. A block has the text that belongs to it."""

    def block_of(piece: Piece) -> int | None:
        return piece.segment.branch[depth][0] if len(piece.segment.branch) > depth else None

    groups = [(block, tuple(pieces)) for block, pieces in groupby(line, key=block_of)]
    texts, behind = answer.texts, 0
    for position, (block, pieces) in enumerate(groups):
        start, end = max(behind, pieces[0].start), pieces[-1].end
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
        threads: dict[int, list[Piece]] = {}
        for piece in pieces:
            threads.setdefault(piece.segment.branch[depth][1], []).append(piece)
        yield Block((behind, pieces[0].start), tuple(tuple(threads[i]) for i in sorted(threads)), tail)
        behind = tail[1]


def _line_html(answer: ThreadedAnswer, line: Line, depth: int, *, is_critical: bool) -> str:
    parts = []
    for part in _parted(answer, line, depth):
        if isinstance(part, Run):
            parts.append(_run_html(answer, line, part.start, part.end, is_critical=is_critical))
        else:
            parts.append(_block_html(answer, line, part, depth, is_critical=is_critical))
    return f'<div class="line">{"".join(parts)}</div>'


def _run_html(answer: ThreadedAnswer, line: Line, start: int, end: int, *, is_critical: bool) -> str:
    """Text of one line; what was injected is told from what was sampled, tags from other text."""
    tokens, advantages = answer.row["tokens"], answer.row.get("advantages")
    parts = []
    for piece in line:
        low, high = max(start, piece.start), min(end, piece.end)
        if low >= high:
            continue
        if piece.segment.origin == "injected":
            parts.append(f'<span class="injected" title="injected">{plain(tokens[low:high])}</span>')
            continue
        cuts = sorted({low, high, *(state for state in answer.states if low < state < high)})
        for first, last in pairwise(cuts):
            own = advantages[first:last] if advantages else [0.0] * (last - first)
            parts.append(answer.states.get(first, "") + coloured(tokens[first:last], own, answer.scale))
    return f'<div class="run{" critical" if is_critical else ""}">{"".join(parts)}</div>'


def _block_html(answer: ThreadedAnswer, line: Line, block: Block, depth: int, *, is_critical: bool) -> str:
    lengths = [_length(answer, thread, depth + 1) for thread in block.threads]
    longest = lengths.index(max(lengths))
    n_threads = len(block.threads)
    lanes = "".join(
        _thread_html(
            answer,
            thread,
            depth + 1,
            name=_name(answer, thread, position),
            share=lengths[position] / max(1, lengths[longest]),
            is_longest=position == longest,
            is_critical=is_critical and position == longest,
            fold=None if n_threads <= SIDE_BY_SIDE else n_threads > UNFOLDED and position != longest,
        )
        for position, thread in enumerate(block.threads)
    )
    way = "side" if n_threads <= SIDE_BY_SIDE else "rows"
    head, tail = (
        _run_html(answer, line, *span, is_critical=is_critical) if span[0] < span[1] else ""
        for span in (block.head, block.tail)
    )
    many = " many" if n_threads > UNFOLDED else ""
    return f'<div class="block{many}">{head}<div class="threads {way}">{lanes}</div>{tail}</div>'


def _inner(answer: ThreadedAnswer, thread: Line) -> tuple[int, int]:
    """Without the thread's own tags, which count for its block."""
    start, end = thread[0].start, thread[-1].end
    if answer.texts[start : start + 1] == ["<Thread>"]:
        start += 1
    if end > start and answer.texts[end - 1] == "</Thread>":
        end -= 1
    return start, end


def _length(answer: ThreadedAnswer, thread: Line, depth: int) -> int:
    return answer.counts(*_inner(answer, thread), above=depth).num_tokens_in_the_longest_thread


def _name(answer: ThreadedAnswer, thread: Line, position: int) -> str:
    text = "".join(answer.row["tokens"][thread[0].start : thread[0].end])
    found = OUTLINE_NUMBER.search(text)
    return found.group(1) if found else str(position + 1)


def _thread_html(
    answer: ThreadedAnswer,
    thread: Line,
    depth: int,
    *,
    name: str,
    share: float,
    is_longest: bool,
    is_critical: bool,
    fold: bool | None,
) -> str:
    """One thread. `fold` is None where it can't be folded, else whether it is."""
    start, end = _inner(answer, thread)
    counts = answer.counts(start, end, above=depth)
    facts = [_many(counts.num_tokens_in_the_longest_thread, "token")]
    if counts.with_parallel:
        facts[0] += f" of {counts.total_num_tokens}"
    seconds = _seconds(thread, depth)
    facts += [f"{number(seconds)} s"] if seconds is not None else []
    mean = answer.mean_advantage(start, end) if answer.is_told_apart else None
    facts += [f"A {mean:+.2f}"] if mean is not None else []
    mark = '<span class="way">critical path</span>' if is_critical else "longest" if is_longest else ""
    head = (
        f'<b>{escape(name)}</b><span class="measures">{" · ".join(facts)}</span>'
        f'<span class="extent"><span style="width:{100 * share:.1f}%"></span></span>{mark}'
    )
    kind = f'class="thread{" critical" if is_critical else ""}"'
    inner = _line_html(answer, thread, depth, is_critical=is_critical)
    if fold is None:
        return f"<section {kind}><header>{head}</header>{inner}</section>"
    return f"<details {kind}{'' if fold else ' open'}><summary>{head}</summary>{inner}</details>"
