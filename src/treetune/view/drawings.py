"""Draws answers with parallel threads, and the tree of all answers to a problem, as HTML.

An answer with threads, and what the classes here call its parts:

    text  <Parallel> <Outlines>…</Outlines> <Thread>1: …</Thread> <Thread>2: …</Thread> <Conclusion>…
    </Parallel>
          └── Block: head ────────────────┘ └── thread 0 ───────┘ └── thread 1 ───────┘ └── tail ────────────┘
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any, Literal

import numpy as np

from treetune.lab.analyzers.step_credit import Shown
from treetune.threads.fork_join import EVENTS
from treetune.threads.format import TAGS, TagIds
from treetune.threads.numbers import ThreadCounts, count_threads, critical_seconds
from treetune.view.charts import format_number
from treetune.view.store.tokens import text_of_each
from treetune.view.templates import coloured_html, earned_by_each, injected_html, render, shade_classes
from treetune.view.text import make_visible
from treetune.vocabulary import Branch, Column, Episode, Segment, Trajectory, are_sampled, token_array

TAG_NUMBERS = {tag: position for position, tag in enumerate(TAGS, start=1)}
TAG_IDS = TagIds.of(lambda tag: (TAG_NUMBERS[tag],))
"""Ids of tags for counting without a tokenizer: each tag has a number, and all other tokens have 0."""

# The number of a thread's outline, at the thread's beginning: "1.2" of "<Thread> 1.2: …".
OUTLINE_NUMBER = re.compile(r"<Thread>\s*(\d+(?:\.\d+)*)\s*:")

MOST_THREADS_SIDE_BY_SIDE = 4
"""The most threads of a block that are drawn next to each other. If a block has more, they are drawn in rows,
which can be folded."""

MOST_OPEN_ROWS = 12
"""The most rows of a block that are all open at first. If there are more, only the longest thread is open."""

DRAWING_NOTE = (
    "Threads that were written at the same time are next to each other; many threads are in rows that open."
    ' The <span class="way">marked path</span> is the critical path: the text outside of threads, and the'
    " longest thread of each block. Boxed numbers mark the beginning of a step."
    ' <span class="injected">Underlined</span> text was injected, not sampled.'
)


# An answer with threads


@dataclass(frozen=True)
class PlacedSegment:
    """A segment with its position: tokens ``[start, end)`` of the answer."""

    start: int
    end: int
    segment: Segment


PlacedSegments = tuple[PlacedSegment, ...]
"""The segments of the answer, or of a thread with its inner threads, in order."""

TokenSpan = tuple[int, int]
"""Tokens ``[start, end)``."""


@dataclass(frozen=True)
class DrawnBlock:
    """A block of parallel threads. See the drawing at the head of this file."""

    head: TokenSpan
    """The tokens from the tag that opens the block up to its first thread."""
    threads: tuple[PlacedSegments, ...]
    """The segments of each thread."""
    tail: TokenSpan
    """The tokens after the last thread, up to the tag that closes the block; empty if the block isn't
    closed."""


@dataclass(frozen=True)
class ThreadedAnswer:
    """An answer with threads, from its training row, its trajectory, or both."""

    tokens: Sequence[str]
    """The text of each token."""
    episode: Episode | None
    """The training row; None if the answer wasn't trained on."""
    trajectory: Trajectory | None
    """The answer as it was sampled; None if it isn't stored."""
    scale: float
    """The absolute advantage from which on the colour is full."""

    @cached_property
    def texts(self) -> list[str]:
        """The text of each token without space around it, to compare it with tags."""
        return [text.strip() for text in self.tokens]

    @cached_property
    def trained(self) -> np.ndarray:
        """Whether each token was trained; without an episode, whether it was sampled."""
        if self.episode is not None:
            return self.episode.trained
        return are_sampled(self.trajectory.segments if self.trajectory is not None else ())

    @cached_property
    def advantages(self) -> list[float] | None:
        """The advantage of each token; None if the answer has no credit."""
        if self.episode is None or self.episode.advantages is None:
            return None
        return self.episode.advantages.tolist()

    @cached_property
    def line(self) -> PlacedSegments:
        """The segments of the answer, each with its position.

        They are the trajectory's segments. If there is no trajectory, or if the episode's stretches end at
        other tokens than the segments, they are made from the stretches. (A stretch is a segment of which the
        episode stores only the end and the branch.)
        """
        segments = self.trajectory.segments if self.trajectory is not None else ()
        ends = np.cumsum([len(segment.token_ids) for segment in segments]).tolist()
        stretches = self.episode.stretches if self.episode is not None else ()
        if not stretches or ends == [stretch.end for stretch in stretches]:
            starts = (0, *ends)
            return tuple(map(PlacedSegment, starts, ends, segments))
        placed, start = [], 0
        for stretch in stretches:
            is_trained = bool(self.trained[start : stretch.end].any())
            origin: Literal["sampled", "injected"] = "sampled" if is_trained else "injected"
            # The segment gets no token ids: a drawing needs only its origin, branch, start and end.
            segment = Segment(token_array(()), origin, branch=stretch.branch)
            placed.append(PlacedSegment(start, stretch.end, segment))
            start = stretch.end
        return tuple(placed)

    def counts(self, start: int, end: int, outer_blocks: int = 0) -> ThreadCounts:
        """Counts the tokens ``[start, end)``: all, those of the critical path, and those in blocks.

        Blocks are counted up to the depth to which this answer was split into threads. Blocks outside of all
        threads are counted even if the answer was not split. The tags of deeper blocks count as text.

        Args:
            start: The first token.
            end: The token after the last one.
            outer_blocks: The number of blocks that all these tokens are inside of.
        """
        # The numbers of tags, and 0 for all other tokens.
        numbers = [TAG_NUMBERS.get(text, 0) for text in self.texts[start:end]]
        deepest = max((len(placed.segment.branch) for placed in self.line), default=0)
        # The largest depth, counted from these tokens, of the blocks that are counted.
        least_depth = 1 if outer_blocks == 0 else 0
        depth = max(least_depth, deepest - outer_blocks)
        return count_threads(numbers, TAG_IDS, depth)

    @cached_property
    def has_varying_credit(self) -> bool:
        """Whether trained tokens have different advantages. Each step and thread then shows its own."""
        pairs = zip(self.advantages or (), self.trained)
        return len({round(advantage, 4) for advantage, is_trained in pairs if is_trained}) > 1

    def mean_advantage(self, start: int, end: int) -> float | None:
        """Returns the mean advantage of the trained tokens in ``[start, end)``; None if there are none."""
        pairs = zip((self.advantages or ())[start:end], self.trained[start:end])
        advantages = [advantage for advantage, is_trained in pairs if is_trained]
        return fmean(advantages) if advantages else None

    @cached_property
    def states(self) -> Mapping[int, str]:
        """The remark on each step, by the position of the step's first token.

        It has the value of the state before the step and, if advantages differ within the answer, the step's
        advantage. Example: `{0: "V 0.50 A +0.25", 12: "V 0.75 A +0.25"}`.
        """
        if self.episode is None:
            return {}
        values, ends = self.episode.step_values or (), self.episode.step_ends
        remarks = {}
        for step, (start, end) in enumerate(zip((0, *ends), ends)):
            facts = []
            if step < len(values):
                facts.append(f"V {values[step]:.2f}")
            mean = self.mean_advantage(start, end) if self.has_varying_credit else None
            if mean is not None:
                facts.append(f"A {mean:+.2f}")
            if facts:
                remarks[start] = " ".join(facts)
        return remarks


def _split_into_parts(
    answer: ThreadedAnswer, line: PlacedSegments, depth: int
) -> Iterator[TokenSpan | DrawnBlock]:
    """Yields the parts of a line in order: the spans of text outside of blocks, and the blocks.

    A line is the whole answer, or a thread with its inner threads, and it is inside of `depth` blocks.

    The head of a block is the text from ``<Parallel>`` to the first thread, and its tail the text from the
    last thread to ``</Parallel>``. Segments don't separate them from the text around the block, so the tags
    are searched for.
    """

    def block_of(placed: PlacedSegment) -> int | None:
        """Returns the number of the block at this depth that a segment is in; None for text outside."""
        branch = placed.segment.branch
        # An entry of `branch` has a block's number, and the number of the thread in this block.
        return branch[depth][0] if len(branch) > depth else None

    groups = [(block, tuple(members)) for block, members in groupby(line, key=block_of)]
    texts = answer.texts
    yielded_to = line[0].start if line else 0
    for position, (block, members) in enumerate(groups):
        start, end = max(yielded_to, members[0].start), members[-1].end
        following = groups[position + 1] if position + 1 < len(groups) else None
        if block is None:
            if following is not None:  # the head of the block that follows begins at the last <Parallel>
                opening_tags = [i for i in range(start, end) if texts[i] == "<Parallel>"]
                end = opening_tags[-1] if opening_tags else end
            if start < end:
                yield start, end
            yielded_to = end
            continue
        # The text after the threads begins with the tail if a </Parallel> comes before the next <Parallel>.
        tail = (end, end)
        if following is not None and following[0] is None:
            search_end = following[1][-1].end
            tags = [i for i in range(end, search_end) if texts[i] in ("<Parallel>", "</Parallel>")]
            if tags and texts[tags[0]] == "</Parallel>":
                tail = (end, tags[0] + 1)
        threads: dict[int, list[PlacedSegment]] = {}
        for placed in members:
            threads.setdefault(placed.segment.branch[depth][1], []).append(placed)
        # The text before this block was yielded only up to the tag that opens the block: the head begins
        # there.
        head = (yielded_to, members[0].start)
        yield DrawnBlock(head, tuple(tuple(threads[number]) for number in sorted(threads)), tail)
        yielded_to = tail[1]


def _seconds_of(line: PlacedSegments, depth: int) -> float | None:
    """Returns the seconds of the slowest path through a line that is inside of `depth` blocks.

    A line is the whole answer, or a thread with its inner threads. Returns None if the seconds of a sampled
    segment weren't measured, or if no segment was sampled.
    """
    segments = [placed.segment for placed in line if placed.segment.origin == "sampled"]
    if not segments or any(segment.seconds is None for segment in segments):
        return None
    return critical_seconds(segments, depth)


def _without_tags(answer: ThreadedAnswer, thread: PlacedSegments) -> TokenSpan:
    """Returns the span of a thread without ``<Thread>`` and ``</Thread>``, which count as tokens of its block
    and not of the thread."""
    start, end = thread[0].start, thread[-1].end
    if answer.texts[start : start + 1] == ["<Thread>"]:
        start += 1
    if end > start and answer.texts[end - 1] == "</Thread>":
        end -= 1
    return start, end


def threads_html(answer: ThreadedAnswer) -> str:
    """Returns an answer with threads as HTML: a line of statistics, and its text with the threads of each
    block. All text is escaped."""
    counts = answer.counts(0, len(answer.texts))
    longest, total = counts.num_tokens_in_the_longest_thread, counts.total_num_tokens
    facts = [
        f"{total} tokens, <b>{longest} on the critical path</b>",
        f"acceleration ratio {counts.acceleration_ratio:.3f}",
        f"{_count_text(counts.parallel_count, 'block')} of"
        f" {_count_text(sum(counts.threads_of_blocks), 'thread')}",
    ]
    seconds = _seconds_of(answer.line, depth=0)
    if seconds is not None:
        sampled = [placed.segment for placed in answer.line if placed.segment.origin == "sampled"]
        all_seconds = sum(segment.seconds or 0.0 for segment in sampled)
        facts.append(
            f"{format_number(seconds)} s on the slowest path, {format_number(all_seconds)} s in all requests"
        )
    mean = answer.mean_advantage(0, len(answer.texts))
    if mean is not None and not answer.has_varying_credit:
        facts.append(f"A {mean:+.2f} throughout")
    numbers = answer.trajectory.numbers if answer.trajectory is not None else {}
    events = {event: numbers.get(f"threads/{event}") for event in EVENTS}
    facts += [escape(f"{event.replace('_', ' ')}: {times:.0f}") for event, times in events.items() if times]
    line = _line_html(answer, answer.line, depth=0, is_critical=True)
    return f'<p class="counts">{" · ".join(facts)}</p>{line}'


def _count_text(amount: int, noun: str) -> str:
    """Returns an amount with its noun: "1 block", "3 blocks"."""
    return f"{amount} {noun}{'' if amount == 1 else 's'}"


def _line_html(answer: ThreadedAnswer, line: PlacedSegments, depth: int, *, is_critical: bool) -> str:
    """Returns the HTML of a line: its text and its blocks, in order.

    A line is the whole answer, or a thread with its inner threads. It is inside of `depth` blocks.
    `is_critical` says whether it is on the critical path.
    """
    parts = []
    for part in _split_into_parts(answer, line, depth):
        if isinstance(part, DrawnBlock):
            parts.append(_block_html(answer, line, part, depth, is_critical=is_critical))
        else:
            parts.append(_text_html(answer, line, part, is_critical=is_critical))
    return f'<div class="line">{"".join(parts)}</div>'


def _text_html(answer: ThreadedAnswer, line: PlacedSegments, span: TokenSpan, *, is_critical: bool) -> str:
    """Returns the HTML of the text of a span in a line.

    Sampled tokens are coloured by advantage, with a remark at the beginning of each step. Injected tokens are
    marked as such.
    """
    tokens, advantages = answer.tokens, answer.advantages
    html_parts = []
    for placed in line:
        start, end = max(span[0], placed.start), min(span[1], placed.end)
        if start >= end:
            continue
        if placed.segment.origin == "injected":
            html_parts.append(injected_html(tokens[start:end]))
            continue
        # A step may begin within a segment, and its remark is put before its first token.
        states_inside = [state for state in answer.states if start < state < end]
        for begin, stop in pairwise(sorted({start, end, *states_inside})):
            if begin in answer.states:
                html_parts.append(f'<span class="state">{answer.states[begin]}</span>')
            # Without credit, nothing is coloured: 0 has no colour.
            shown_advantages = advantages[begin:stop] if advantages else [0.0] * (stop - begin)
            html_parts.append(coloured_html(tokens[begin:stop], shown_advantages, answer.scale))
    return f'<div class="run{" critical" if is_critical else ""}">{"".join(html_parts)}</div>'


def _block_html(
    answer: ThreadedAnswer, line: PlacedSegments, block: DrawnBlock, depth: int, *, is_critical: bool
) -> str:
    """Returns the HTML of a block: its head, its threads and its tail.

    Up to `MOST_THREADS_SIDE_BY_SIDE` threads are next to each other, and more are in rows that fold. If the
    block is on the critical path (`is_critical`), its longest thread is on this path, too.
    """
    counts = [
        answer.counts(*_without_tags(answer, thread), outer_blocks=depth + 1) for thread in block.threads
    ]
    lengths = [thread_counts.num_tokens_in_the_longest_thread for thread_counts in counts]
    longest, n_threads = lengths.index(max(lengths)), len(block.threads)
    drawings = []
    for position, thread in enumerate(block.threads):
        is_longest = position == longest
        is_on_path = is_critical and is_longest
        header = _thread_header(answer, thread, counts[position], depth, position)
        extent = 100 * lengths[position] / max(1, lengths[longest])
        header += (
            '<svg class="extent" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect width="{extent:.1f}" height="6"/></svg>'
        )
        if is_on_path:
            header += '<span class="way">critical path</span>'
        elif is_longest:
            header += "longest"
        css_class = f'class="thread{" critical" if is_on_path else ""}"'
        text = _line_html(answer, thread, depth + 1, is_critical=is_on_path)
        if n_threads <= MOST_THREADS_SIDE_BY_SIDE:
            drawings.append(f"<section {css_class}><header>{header}</header>{text}</section>")
        else:
            is_open = " open" if n_threads <= MOST_OPEN_ROWS or is_longest else ""
            drawings.append(f"<details {css_class}{is_open}><summary>{header}</summary>{text}</details>")
    layout = "side" if n_threads <= MOST_THREADS_SIDE_BY_SIDE else "rows"
    head, tail = (
        _text_html(answer, line, span, is_critical=is_critical) if span[0] < span[1] else ""
        for span in (block.head, block.tail)
    )
    class_of_many = " many" if n_threads > MOST_OPEN_ROWS else ""
    threads = f'<div class="threads {layout}">{"".join(drawings)}</div>'
    return f'<div class="block{class_of_many}">{head}{threads}{tail}</div>'


def _thread_header(
    answer: ThreadedAnswer, thread: PlacedSegments, counts: ThreadCounts, depth: int, position: int
) -> str:
    """Returns a thread's name and measures: its length, its seconds and its mean advantage."""
    facts = [_count_text(counts.num_tokens_in_the_longest_thread, "token")]
    if counts.with_parallel:  # the thread has inner blocks, so its longest path has only some of its tokens
        facts[0] += f" of {counts.total_num_tokens}"
    seconds = _seconds_of(thread, depth + 1)
    if seconds is not None:
        facts.append(f"{format_number(seconds)} s")
    if answer.has_varying_credit:
        mean = answer.mean_advantage(*_without_tags(answer, thread))
        if mean is not None:
            facts.append(f"A {mean:+.2f}")
    # The thread is named by the number of its outline, which is written at its beginning, or else by its
    # place.
    outline = OUTLINE_NUMBER.search("".join(answer.tokens[thread[0].start : thread[0].end]))
    name = outline.group(1) if outline else str(position + 1)
    return f'<b>{escape(name)}</b><span class="measures">{" · ".join(facts)}</span>'


# The tree of a problem's answers

TREE_WIDTH, MOST_TREE_HEIGHT, LEAST_TREE_HEIGHT = 1000, 520, 90
"""The width, the greatest height and the least height of a drawn tree, in SVG units."""
ANSWER_HEIGHT = 26
"""The height of one answer in a drawn tree, in SVG units, unless there are so many that they must be
lower."""
LEAST_BRANCH_HEIGHT = 2.0
"""The height in SVG units below which a branch is too low. Such branches after the same step are merged if
they have similar values."""
VALUE_BINS = 4
"""The number of bins for values from 0 to 1: values in the same bin are similar."""
LEAST_LABELLED_SIZE = 13.0, 84.0
"""The least height and width, in SVG units, of a branch on which its value and its advantage are written.
Half the width is enough for the value without the advantage."""
CHARACTERS_OF_STEP = 90
"""The number of characters of a step that the table and the tooltip show."""


@dataclass(eq=False)
class SharedStep:
    """A node of the tree: a step that one or several answers take, or several branches merged into one node.

    Example: `SharedStep(depth=2, ids=…, value=Shown(0.75), advantage=0.25, answers=[0, 3], expected=0.75)` is
    the second step of answers 0 and 3, after which 0.75 is expected.
    """

    depth: int
    """The number of steps from the prompt, which has depth 0."""
    ids: Column = field(default_factory=lambda: token_array(()))
    value: Shown | None = None
    """The value of the state after the step; None if credit has no value there."""
    advantage: float | None = None
    """The mean advantage of the step's trained tokens; None if there are none, or without credit."""
    answers: list[int] = field(default_factory=list)
    """The answers that take this step, as positions in the group."""
    following: list[SharedStep] = field(default_factory=list)
    """The nodes of the steps that directly follow this one."""
    expected: float = 0.0
    """The number of `value`, or without a value the mean reward of the answers."""
    branch_count: int = 1
    """The number of branches that are merged into this node."""
    thread: str = ""
    """The step's thread: ``1.2`` is the second thread of the first block, and ``1.2 1.1`` is the first thread
    of the first block within it. Empty outside of threads."""
    reward: float | None = None
    """The reward that the step itself earned, such as that of a turn; None if steps have no rewards."""
    continuations: Sequence[float | None] = ()
    """The rewards of the continuations from the state after the step."""


def tree_html(
    group: Sequence[Episode],
    texts: Sequence[str],
    this_answer: int,
    depth: int = 0,
    address: Callable[..., str] | None = None,
) -> str:
    """Returns the tree of all answers to a problem as HTML, and a table of one answer's steps.

    The steps are those of credit, where a turn is a step, too. If answers have threads, the steps are instead
    the stretches of tokens that were sampled or injected together, thread after thread.

    Args:
        group: the training rows of all answers to the problem.
        texts: the text of every token of the vocabulary.
        this_answer: the position in the group of the answer whose steps are in the table.
        depth: the step of that answer with which the drawn tree begins; 0 is the prompt, and thus the whole
            tree.
        address: returns the address of a page about the answer `number` of the group. If it is None,
            nothing is linked.

            * `address(number, None)` is the answer itself.
            * `address(number, depth)` is the tree that begins at the step `depth` of the answer.
            * `address(number, None, start)` is a page of the continuations from the state after `start`
              tokens.
    """
    path = [_shared_steps(group)]  # the nodes of the answer `this_answer`, from the prompt to its last step
    while following := [step for step in path[-1].following if this_answer in step.answers]:  # one, or none
        path += following
    scale = max((abs(step.advantage) for step in path if step.advantage is not None), default=0.0) or 1.0
    top = path[min(depth, len(path) - 1)]
    height = min(MOST_TREE_HEIGHT, max(LEAST_TREE_HEIGHT, ANSWER_HEIGHT * len(top.answers)))
    # Links to the tree that begins a step earlier, and to the whole tree.
    above = whole = None
    if address and top.depth > 0:
        above = address(this_answer, top.depth - 1)
        if top.depth > 1:  # for the depth 1, `above` is already the address of the whole tree
            whole = address(this_answer, 0)
    return render(
        "tree.html",
        problem=group[this_answer].group,
        answer=group[this_answer].trajectory,
        rectangles=_TreeDrawing(group, texts, this_answer, path, top, height, scale, address).rectangles(),
        wide=TREE_WIDTH,
        high=height,
        rows=_path_rows(group, texts, this_answer, path, scale, address),
        shown=len(top.answers),
        answer_count=len(group),
        above=above,
        whole=whole,
    )


@dataclass(frozen=True)
class _TreeDrawing:
    """A drawing of the tree of answers to a problem, from the node `top` on: a rectangle for each node.

    The height of a rectangle is in proportion to the number of the node's answers.
    """

    group: Sequence[Episode]
    texts: Sequence[str]
    this_answer: int
    """The position in the group of the answer that the page is about."""
    path: Sequence[SharedStep]
    """The nodes of this answer."""
    top: SharedStep
    height: float
    scale: float
    address: Callable[..., str] | None

    @cached_property
    def _ids_on_path(self) -> set[int]:
        return set(map(id, self.path))

    @cached_property
    def _width_of_node(self) -> float:
        deepest = max(len(_ends_of_steps(self.group[number])) for number in self.top.answers)
        return TREE_WIDTH / (deepest - self.top.depth + 1)

    @cached_property
    def _height_of_answer(self) -> float:
        return self.height / len(self.top.answers)

    def rectangles(self) -> list[dict[str, Any]]:
        """Returns the rectangles, those of the path last."""
        least_answers = LEAST_BRANCH_HEIGHT / self._height_of_answer
        rectangles: list[dict[str, Any]] = []
        unvisited: list[tuple[SharedStep, SharedStep | None, float]] = [(self.top, None, 0.0)]
        while unvisited:
            step, parent, y = unvisited.pop()
            rectangles.append(self._make_rectangle(step, parent, y))
            # Branches that would be lower than `LEAST_BRANCH_HEIGHT` are merged with similar ones.
            for following in _merge_small_branches(step.following, least_answers, self._ids_on_path):
                unvisited.append((following, step, y))
                y += self._height_of_answer * len(following.answers)
        # SVG draws later elements above earlier ones, and the outlines of the path must not be hidden.
        rectangles.sort(key=lambda rectangle: rectangle["here"])
        return rectangles

    def _make_rectangle(self, step: SharedStep, parent: SharedStep | None, y: float) -> dict[str, Any]:
        height = self._height_of_answer * len(step.answers)
        return {
            "x": round((step.depth - self.top.depth) * self._width_of_node, 2),
            "y": round(y, 2),
            # A little smaller than the place of a rectangle, so that there are gaps between them.
            "width": round(self._width_of_node - 1.5, 2),
            "height": round(max(0.4, height - min(1.0, height / 4)), 2),
            "shade": shade_classes(min(1.0, max(0.0, step.expected)), 1.0),
            "credit": shade_classes(step.advantage, self.scale) if step.advantage is not None else "",
            "label": self._label_of(step, height),
            "tooltip": _make_tooltip(step, self.group, self.texts),
            "href": self._href_of(step, parent),
            "here": id(step) in self._ids_on_path,
            "thread": step.thread,
        }

    def _label_of(self, step: SharedStep, height: float) -> str:
        """Returns the numbers that there is room for: ``0.75  +0.25``, ``0.75`` or none."""
        least_height, least_width = LEAST_LABELLED_SIZE
        width = self._width_of_node
        # One number needs half the width of two.
        if height < least_height or 2 * width < least_width:
            return ""
        label = f"{step.expected:.2f}"
        if step.advantage is not None and width >= least_width:
            label += f"  {step.advantage:+.2f}"
        return label

    def _href_of(self, step: SharedStep, parent: SharedStep | None) -> str | None:
        """Returns where a click on a node leads; `parent` is the node before it, and None at the top."""
        if self.address is None:
            return None
        # The answer that the link leads to: the answer of this page (`this_answer`) if it takes the step.
        number = self.this_answer if id(step) in self._ids_on_path else step.answers[0]
        # Merged branches lead to the tree from the node before them, where each branch is drawn higher.
        if step.branch_count > 1:
            return self.address(number, parent.depth if parent else 0)
        if not step.following:  # an answer's last step leads to the answer itself
            return self.address(number, None)
        if parent is None:  # the top of this tree leads to the tree that begins one step earlier
            return self.address(number, max(0, step.depth - 1))
        return self.address(number, step.depth)


def _path_rows(
    group: Sequence[Episode],
    texts: Sequence[str],
    this_answer: int,
    path: Sequence[SharedStep],
    scale: float,
    address: Callable[..., str] | None,
) -> list[dict[str, Any]]:
    """Returns a row of the table for each step of the answer `this_answer`, as values for ``tree.html``."""
    rows, start = [], 0  # `start` is the number of the answer's tokens before the step
    for parent, step in pairwise(path):
        start += len(parent.ids)  # the prompt, the first node of the path, has no ids
        other_steps = [other for other in parent.following if other is not step]
        # No branch has more answers than the group. So all count as small, and those of similar value merge.
        merged_steps = _merge_small_branches(other_steps, least=len(group) + 1)
        rows.append(
            {
                "number": step.depth,
                "text": make_visible("".join(text_of_each(texts, step.ids)))[:CHARACTERS_OF_STEP],
                "before": parent,
                # The page of the continuations from the state before the step.
                "later": address and address(this_answer, None, start),
                "after": step,
                "credit": shade_classes(step.advantage, scale) if step.advantage is not None else "",
                "right": sum(group[number].correct for number in step.answers),
                "others": len(other_steps),
                # (node, address of the tree in which its branches are drawn)
                "sibling_groups": [
                    (merged, address and address(merged.answers[0], parent.depth)) for merged in merged_steps
                ],
            }
        )
    return rows


def _make_tooltip(step: SharedStep, group: Sequence[Episode], texts: Sequence[str]) -> str:
    """Returns the text that the browser shows when the pointer is on a branch."""
    if step.branch_count > 1:  # small branches of similar value are merged into one node
        title = f"{step.branch_count} branches of about the same value"
    elif step.depth:
        title = make_visible("".join(text_of_each(texts, step.ids)))[:CHARACTERS_OF_STEP].replace("\n", " ↵ ")
    else:
        title = "the prompt"
    facts = [f"thread {step.thread}: {title}" if step.thread else title]
    if step.value is None:
        facts.append(f"mean reward {step.expected:.3f}")
    elif step.value.low is None:
        facts.append(f"value after it {step.expected:.3f}")
    else:
        bounds = f"[{step.value.low:.2f}, {step.value.high:.2f}]"
        facts.append(f"value after it {step.expected:.3f} {bounds}")
    if step.continuations:
        facts.append(f"of its continuations {earned_by_each(step.continuations)}")
    if step.advantage is not None:
        facts.append(f"advantage {step.advantage:+.3f}")
    if step.reward is not None:
        facts.append(f"earned {step.reward:+.3g}")
    correct = sum(group[number].correct for number in step.answers)
    facts.append(f"{_count_text(len(step.answers), 'answer')}, {correct} correct")
    return " · ".join(facts)


def _shared_steps(group: Sequence[Episode]) -> SharedStep:
    """Builds the tree of all answers, and returns its root, the prompt.

    Answers share a step if all their tokens up to the end of the step are equal and in the same threads.
    """
    # The prompt, its value and its continuations are the same for all answers.
    values = group[0].step_values
    root = SharedStep(0, value=Shown(values[0]) if values else None)
    root.continuations = group[0].continuations.get(0, ())
    # The key of a step is the `id` of the node before it, its thread, and its tokens.
    steps: dict[tuple[int, Branch, bytes], SharedStep] = {}
    for position, episode in enumerate(group):
        step, begin = root, 0
        root.answers.append(position)
        for depth, (end, branch) in enumerate(_ends_of_steps(episode), 1):
            key = id(step), branch, episode.response_ids[begin:end].tobytes()
            if key not in steps:  # no earlier answer has this step
                steps[key] = _new_step(episode, depth, begin, end, branch)
                step.following.append(steps[key])
            step, begin = steps[key], end
            step.answers.append(position)
    unvisited = [root]
    while unvisited:
        step = unvisited.pop()
        unvisited += step.following
        rewards = [group[position].reward for position in step.answers]
        # The expected reward of a node that credit gave no value is the mean reward of its answers.
        step.expected = step.value.value if step.value else sum(rewards) / len(rewards)
    return root


def _new_step(episode: Episode, depth: int, begin: int, end: int, branch: Branch) -> SharedStep:
    """Returns the node of an episode's step that has the tokens ``[begin, end)``.

    The step is the `depth`-th of the answer, counted from 1.
    """
    value, reward = None, None
    if not _is_threaded(episode):  # the stretches of threads are not the steps of credit
        # `values[i]` is the value of the state before the step i, counted from 0. So the value after the
        # `depth`-th step, counted from 1, is `values[depth]`.
        values, errors = episode.step_values or (), episode.step_errors or ()
        error = errors[depth] if depth < len(errors) else None
        # If credit merged two steps, the second repeats the value of the first, with an infinite error. Such
        # a value is left out.
        if depth < len(values) and (error is None or math.isfinite(error)):
            # The interval of the value is cut off at 0, and at 1 or the answer's reward if that is higher.
            value = Shown.of(values[depth], error, 0.0, max(1.0, episode.reward))
        if depth <= len(episode.step_rewards):
            reward = episode.step_rewards[depth - 1]
    mean_advantage = None
    if episode.advantages is not None:
        advantages = episode.advantages[begin:end][episode.trained[begin:end]]
        if len(advantages):
            mean_advantage = float(advantages.sum()) / len(advantages)
    return SharedStep(
        depth,
        episode.response_ids[begin:end],
        value,
        mean_advantage,
        thread=" ".join(f"{block + 1}.{thread + 1}" for block, thread in branch),
        reward=reward,
        continuations=episode.continuations.get(end, ()),
    )


def _is_threaded(episode: Episode) -> bool:
    """Returns whether a token of the answer is in a thread."""
    return any(stretch.branch for stretch in episode.stretches)


def _ends_of_steps(episode: Episode) -> Sequence[tuple[int, Branch]]:
    """Returns (end, thread) for each step of an answer in the tree, where `end` is the token after the step.

    If the answer has threads, the steps of the tree are its stretches: tokens that were sampled or injected
    together. If it has no threads, they are the steps of credit, or the whole answer if there are none.
    """
    if _is_threaded(episode):
        return [(stretch.end, stretch.branch) for stretch in episode.stretches]
    ends = episode.step_ends or (len(episode.response_ids),)
    return [(end, ()) for end in ends]


def _merge_small_branches(
    steps: Sequence[SharedStep], least: float, always_kept: Collection[int] = ()
) -> list[SharedStep]:
    """Returns the branches after a step, the best first, with small branches of similar value merged.

    Args:
        steps: The branches: nodes that follow the same node.
        least: The number of answers below which a branch is small.
        always_kept: The `id` of each node that is never merged, even if it is small.
    """
    branches, small_by_bin = list[SharedStep](), dict[int, list[SharedStep]]()
    for step in steps:
        if len(step.answers) >= least or id(step) in always_kept:
            branches.append(step)
        else:
            small_by_bin.setdefault(round(VALUE_BINS * step.expected), []).append(step)
    for similar in small_by_bin.values():
        if len(similar) == 1:
            branches.append(similar[0])
            continue
        branch_count = sum(step.branch_count for step in similar)
        merged = SharedStep(similar[0].depth, branch_count=branch_count)
        for step in similar:
            merged.answers += step.answers
            merged.following += step.following
        total = math.fsum(step.expected * len(step.answers) for step in similar)
        merged.expected = total / len(merged.answers)
        branches.append(merged)
    return sorted(branches, key=lambda step: -step.expected)
