"""Answers drawn as what grew: threads that were written side by side, and the tree that a problem's answers
share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any, Literal

import numpy as np

from treetune.lab.analyzers.step_credit import Shown
from treetune.threads.fork_join import EVENTS
from treetune.threads.format import TAGS, TagIds
from treetune.threads.numbers import ThreadCounts, count, critical_seconds
from treetune.view.charts import number
from treetune.view.store.tokens import text_of_each
from treetune.view.templates import coloured, earned_by_each, injected, render, shade
from treetune.view.text import visible
from treetune.vocabulary import Branch, Column, Episode, Segment, Trajectory, are_sampled, token_array

NUMBERS = {tag: position for position, tag in enumerate(TAGS, start=1)}
TAG_IDS = TagIds.of(lambda tag: (NUMBERS[tag],))
"""Numbers for counting without a tokenizer: a tag's text stands for its token, and 0 for every other."""

OUTLINE_NUMBER = re.compile(r"<Thread>\s*(\d+(?:\.\d+)*)\s*:")

SIDE_BY_SIDE = 4
"""More threads than these lie above each other, and can be folded."""

UNFOLDED = 12
"""Of more threads than these only the longest is open at first."""

NOTE = (
    "Threads that were written at the same time stand beside each other, or where they are many, in rows"
    ' that open. The <span class="way">marked way</span> is the critical path: what is outside of threads,'
    " and of each block the longest thread. Boxed numbers stand where a step begins."
    ' <span class="injected">Underlined</span> text was injected, not sampled.'
)


# An answer with threads


@dataclass(frozen=True)
class PlacedSegment:
    """Tokens ``[start, end)`` that entered the answer together, as `segment` says."""

    start: int
    end: int
    segment: Segment


Line = tuple[PlacedSegment, ...]
"""The segments of the answer, or those of a thread with all that is in it, in order."""

Span = tuple[int, int]
"""Tokens ``[start, end)``."""


@dataclass(frozen=True)
class DrawnBlock:
    """`head` is the text from the tag that opens the block to its first thread, `tail` that from its last
    thread to the tag that closes it; empty where the tag is lacking."""

    head: Span
    threads: tuple[Line, ...]
    tail: Span


@dataclass(frozen=True)
class ThreadedAnswer:
    """An answer with threads: the texts of its tokens, its training row and its trajectory, as far as these
    are at hand. The colours of advantages are full from `scale` on."""

    tokens: Sequence[str]
    episode: Episode | None
    trajectory: Trajectory | None
    scale: float

    @cached_property
    def texts(self) -> list[str]:
        return [text.strip() for text in self.tokens]

    @cached_property
    def trained(self) -> np.ndarray:
        if self.episode is not None:
            return self.episode.trained
        return are_sampled(self.trajectory.segments if self.trajectory is not None else ())

    @cached_property
    def advantages(self) -> list[float] | None:
        known = self.episode is not None and self.episode.advantages is not None
        return self.episode.advantages.tolist() if known else None  # type: ignore[union-attr]

    @cached_property
    def line(self) -> Line:
        """The answer stretch by stretch: from the trajectory, else as far as the episode alone knows."""
        segments = self.trajectory.segments if self.trajectory is not None else ()
        ends = np.cumsum([len(segment.token_ids) for segment in segments]).tolist()
        stretches = self.episode.stretches if self.episode is not None else ()
        if not stretches or ends == [one.end for one in stretches]:
            starts = (0, *ends)
            return tuple(PlacedSegment(a, b, one) for a, b, one in zip(starts, ends, segments))
        placed, start = [], 0  # of another cut of the answer: its segments are not those of the trajectory
        for one in stretches:
            sampled = bool(self.trained[start : one.end].any())
            origin: Literal["sampled", "injected"] = "sampled" if sampled else "injected"
            placed.append(PlacedSegment(start, one.end, Segment(token_array(()), origin, branch=one.branch)))
            start = one.end
        return tuple(placed)

    def counts(self, start: int, end: int, above: int = 0) -> ThreadCounts:
        """Counts tokens that lie in so many blocks."""
        numbers = [NUMBERS.get(text, 0) for text in self.texts[start:end]]
        deepest = max((len(one.segment.branch) for one in self.line), default=0)
        return count(numbers, TAG_IDS, max(0 if above else 1, deepest - above))

    @cached_property
    def has_own_credit(self) -> bool:
        """True where credit differs within what is trained, so that steps and threads must say theirs."""
        return len({round(a, 4) for a, on in zip(self.advantages or (), self.trained) if on}) > 1

    def mean_advantage(self, start: int, end: int) -> float | None:
        """Returns the mean over trained tokens; None where there are none."""
        both = zip((self.advantages or ())[start:end], self.trained[start:end])
        trained = [advantage for advantage, on in both if on]
        return fmean(trained) if trained else None

    @cached_property
    def states(self) -> Mapping[int, str]:
        """The remark where a step begins: the value of the state, and the step's advantage."""
        if self.episode is None:
            return {}
        values, ends = self.episode.step_values or (), self.episode.step_ends
        remarks = {}
        for step, (start, end) in enumerate(zip((0, *ends), ends)):
            words = [f"V {values[step]:.2f}"] if step < len(values) else []
            mean = self.mean_advantage(start, end) if self.has_own_credit else None
            words += [f"A {mean:+.2f}"] if mean is not None else []
            if words:
                remarks[start] = " ".join(words)
        return remarks


def _parts(answer: ThreadedAnswer, line: Line, depth: int) -> Iterator[Span | DrawnBlock]:
    """Yields text that is in no block, and blocks, in turn. A block has the text that belongs to it."""

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
                yield start, end
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
        yield DrawnBlock((behind, placed[0].start), tuple(tuple(threads[i]) for i in sorted(threads)), tail)
        behind = tail[1]


def _seconds_of(line: Line, depth: int) -> float | None:
    """Returns seconds of the slowest way through a line that lies in `depth` blocks; None where a part wasn't
    measured."""
    segments = [one.segment for one in line if one.segment.origin == "sampled"]
    if not segments or any(segment.seconds is None for segment in segments):
        return None
    return critical_seconds(segments, depth)


def _inner(answer: ThreadedAnswer, thread: Line) -> Span:
    """Returns a thread without its own tags, which count for its block."""
    start, end = thread[0].start, thread[-1].end
    if answer.texts[start : start + 1] == ["<Thread>"]:
        start += 1
    if end > start and answer.texts[end - 1] == "</Thread>":
        end -= 1
    return start, end


def threads_html(answer: ThreadedAnswer) -> str:
    """Returns the statistics and the threads; all text is escaped."""
    counts = answer.counts(0, len(answer.texts))
    longest, total = counts.num_tokens_in_the_longest_thread, counts.total_num_tokens
    facts = [
        f"{total} tokens, <b>{longest} on the critical path</b>",
        f"acceleration ratio {counts.acceleration_ratio:.3f}",
        f"{_counted(counts.parallel_count, 'block')} of {_counted(sum(counts.threads_of_blocks), 'thread')}",
    ]
    seconds = _seconds_of(answer.line, 0)
    if seconds is not None:
        sampling = sum(one.segment.seconds or 0.0 for one in answer.line if one.segment.origin == "sampled")
        facts.append(f"{number(seconds)} s on the slowest way, {number(sampling)} s in all requests")
    mean = answer.mean_advantage(0, len(answer.texts))
    if mean is not None and not answer.has_own_credit:
        facts.append(f"A {mean:+.2f} throughout")
    numbers = answer.trajectory.numbers if answer.trajectory is not None else {}
    events = {event: numbers.get(f"threads/{event}") for event in EVENTS}
    facts += [escape(f"{event.replace('_', ' ')}: {times:.0f}") for event, times in events.items() if times]
    line = _line_html(answer, answer.line, 0, is_critical=True)
    return f'<p class="counts">{" · ".join(facts)}</p>{line}'


def _counted(how_many: int, of: str) -> str:
    return f"{how_many} {of}{'' if how_many == 1 else 's'}"


def _line_html(answer: ThreadedAnswer, line: Line, depth: int, *, is_critical: bool) -> str:
    parts = []
    for part in _parts(answer, line, depth):
        if isinstance(part, DrawnBlock):
            parts.append(_block_html(answer, line, part, depth, is_critical=is_critical))
        else:
            parts.append(_text_html(answer, line, part, is_critical=is_critical))
    return f'<div class="line">{"".join(parts)}</div>'


def _text_html(answer: ThreadedAnswer, line: Line, span: Span, *, is_critical: bool) -> str:
    """Returns text of one line; what was injected is told from what was sampled."""
    tokens, advantages = answer.tokens, answer.advantages
    parts = []
    for one in line:
        low, high = max(span[0], one.start), min(span[1], one.end)
        if low >= high:
            continue
        if one.segment.origin == "injected":
            parts.append(injected(tokens[low:high]))
            continue
        cuts = sorted({low, high, *(state for state in answer.states if low < state < high)})
        for first, last in pairwise(cuts):
            own = advantages[first:last] if advantages else [0.0] * (last - first)
            if first in answer.states:
                parts.append(f'<span class="state">{answer.states[first]}</span>')
            parts.append(coloured(tokens[first:last], own, answer.scale))
    return f'<div class="run{" critical" if is_critical else ""}">{"".join(parts)}</div>'


def _block_html(
    answer: ThreadedAnswer, line: Line, block: DrawnBlock, depth: int, *, is_critical: bool
) -> str:
    counts = [answer.counts(*_inner(answer, thread), above=depth + 1) for thread in block.threads]
    lengths = [own.num_tokens_in_the_longest_thread for own in counts]
    longest, n_threads = lengths.index(max(lengths)), len(block.threads)
    drawn = []
    for position, thread in enumerate(block.threads):
        is_longest = position == longest
        facts = [_counted(lengths[position], "token")]
        if counts[position].with_parallel:
            facts[0] += f" of {counts[position].total_num_tokens}"
        seconds = _seconds_of(thread, depth + 1)
        facts += [f"{number(seconds)} s"] if seconds is not None else []
        mean = answer.mean_advantage(*_inner(answer, thread)) if answer.has_own_credit else None
        facts += [f"A {mean:+.2f}"] if mean is not None else []
        # The number of the thread's outline, as its header says it.
        outline = OUTLINE_NUMBER.search("".join(answer.tokens[thread[0].start : thread[0].end]))
        name = outline.group(1) if outline else str(position + 1)
        critical = is_critical and is_longest
        mark = '<span class="way">critical path</span>' if critical else "longest" if is_longest else ""
        head = (
            f'<b>{escape(name)}</b><span class="measures">{" · ".join(facts)}</span>'
            '<svg class="extent" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect width="{100 * lengths[position] / max(1, lengths[longest]):.1f}" height="6"/></svg>{mark}'
        )
        kind = f'class="thread{" critical" if critical else ""}"'
        text = _line_html(answer, thread, depth + 1, is_critical=critical)
        if n_threads <= SIDE_BY_SIDE:
            drawn.append(f"<section {kind}><header>{head}</header>{text}</section>")
        else:
            is_open = " open" if n_threads <= UNFOLDED or is_longest else ""
            drawn.append(f"<details {kind}{is_open}><summary>{head}</summary>{text}</details>")
    layout = "side" if n_threads <= SIDE_BY_SIDE else "rows"
    head, tail = (
        _text_html(answer, line, span, is_critical=is_critical) if span[0] < span[1] else ""
        for span in (block.head, block.tail)
    )
    many = " many" if n_threads > UNFOLDED else ""
    return f'<div class="block{many}">{head}<div class="threads {layout}">{"".join(drawn)}</div>{tail}</div>'


# The tree of a problem's answers

WIDE, HIGH, LEAST_HIGH = 1000, 520, 90
"""Units of a drawn tree; with few answers it is lower."""
ROOM = 26
"""Units of height that an answer has where there are few."""
FOLDED_BELOW = 2.0
"""Branches of the same step that would be lower than this are drawn as one, with others of about their value.
"""
BINS = 4
"""Parts of 0 to 1 by which values count as about the same."""
LABELLED = 13.0, 84.0
"""Height and width from which on a branch has its numbers written on it; from half the width on its value."""
OF_A_STEP = 90
"""Characters of a step that the table and the pointer show."""


@dataclass(eq=False)
class SharedStep:
    """A step that `answers` (their numbers) share, so many steps (`depth`) behind the prompt; or some
    `branches` that are drawn as one. `value` is of the state behind it, `advantage` the step's, as far as
    credit knows them; `expected` is the value, else the mean reward of its answers."""

    depth: int
    ids: Column = field(default_factory=lambda: token_array(()))
    value: Shown | None = None
    advantage: float | None = None
    answers: list[int] = field(default_factory=list)
    following: list[SharedStep] = field(default_factory=list)
    expected: float = 0.0
    branches: int = 1
    thread: str = ""
    """The thread that it lies in, as ``1.2``: block and thread, and so on inwards."""
    earned: float | None = None
    """The reward of a turn by itself."""
    continuations: Sequence[float | None] = ()
    """What those from the state behind it earned."""


def tree_html(
    group: Sequence[Episode],
    texts: Sequence[str],
    this: int,
    depth: int = 0,
    address: Callable[..., str] | None = None,
) -> str:
    """Returns the tree of all answers to one problem from the step on that answer `this` has after so many
    (`depth`); and a table of that answer's own steps. Steps are credit's, turns among them; where there are
    threads, what was written or injected at a time, one thread after the other. `texts` are of all tokens.
    `address` gives that of an answer, of the tree from one of its steps on, or of a state's continuations."""
    path = [_shared_steps(group)]
    while following := [step for step in path[-1].following if this in step.answers]:
        path += following
    scale = max((abs(step.advantage) for step in path if step.advantage is not None), default=0.0) or 1.0
    on_path = set(map(id, path))

    def href_of(step: SharedStep, above: SharedStep | None) -> str | None:
        if address is None:
            return None
        number = this if id(step) in on_path else step.answers[0]
        if step.branches > 1:
            return address(number, above.depth if above else 0)
        if not step.following:
            return address(number, None)
        return address(number, max(0, step.depth - 1) if above is None else step.depth)

    top = path[min(depth, len(path) - 1)]
    deepest = max(len(_ends(group[number])) for number in top.answers) - top.depth
    high = min(HIGH, max(LEAST_HIGH, ROOM * len(top.answers)))
    unit, width = high / len(top.answers), WIDE / (deepest + 1)
    drawn: list[dict[str, Any]] = []  # rectangles, with classes of the value and of the advantage
    todo: list[tuple[SharedStep, SharedStep | None, float]] = [(top, None, 0.0)]
    while todo:
        step, above, y = todo.pop()
        height, here = unit * len(step.answers), id(step) in on_path
        beside = f"  {step.advantage:+.2f}" if step.advantage is not None and width >= LABELLED[1] else ""
        drawn.append(
            {
                "x": round((step.depth - top.depth) * width, 2),
                "y": round(y, 2),
                "width": round(width - 1.5, 2),
                "height": round(max(0.4, height - min(1.0, height / 4)), 2),
                "shade": shade(min(1.0, max(0.0, step.expected)), 1.0),
                "credit": shade(step.advantage, scale) if step.advantage is not None else "",
                "label": f"{step.expected:.2f}{beside}"
                * (height >= LABELLED[0] and 2 * width >= LABELLED[1]),
                "words": _words_of(step, group, texts),
                "href": href_of(step, above),
                "here": here,
                "thread": step.thread,
            }
        )
        for one in _folded(step.following, FOLDED_BELOW / unit, on_path):
            todo.append((one, step, y))
            y += unit * len(one.answers)
    drawn.sort(key=lambda own: own["here"])  # what is outlined lies above the rest
    rows, start = [], 0
    for above, step in pairwise(path):
        start += len(above.ids)
        others = [one for one in above.following if one is not step]
        rows.append(
            {
                "number": step.depth,
                "text": visible("".join(text_of_each(texts, step.ids)))[: OF_A_STEP + 1],
                "before": above,
                "later": address and address(this, None, start),
                "after": step,
                "credit": shade(step.advantage, scale) if step.advantage is not None else "",
                "right": sum(group[number].correct for number in step.answers),
                "others": len(others),
                "alike": [
                    (one, address and address(one.answers[0], above.depth))
                    for one in _folded(others, len(group) + 1)
                ],
            }
        )
    return render(
        "tree.html",
        problem=group[this].group,
        answer=group[this].trajectory,
        drawn=drawn,
        wide=WIDE,
        high=high,
        rows=rows,
        shown=len(top.answers),
        there=len(group),
        above=address(this, top.depth - 1) if address and top.depth else None,
        whole=address(this, 0) if address and top.depth > 1 else None,
    )


def _words_of(step: SharedStep, group: Sequence[Episode], texts: Sequence[str]) -> str:
    """Describes a branch for the pointer."""
    known, right = step.value, sum(group[number].correct for number in step.answers)
    bounds = f" [{known.low:.2f}, {known.high:.2f}]" if known and known.low is not None else ""
    what = "the prompt"
    if step.branches > 1:
        what = f"{step.branches} branches of about the same value"
    elif step.depth:
        what = visible("".join(text_of_each(texts, step.ids)))[: OF_A_STEP + 1].replace("\n", " ↵ ")
    what = f"thread {step.thread}: {what}" if step.thread else what
    facts = [what, f"{'value behind it' if known else 'mean reward'} {step.expected:.3f}{bounds}"]
    facts += [f"of its continuations {earned_by_each(step.continuations)}"] if step.continuations else []
    facts += [f"advantage {step.advantage:+.3f}"] if step.advantage is not None else []
    facts += [f"earned {step.earned:+.3g}"] if step.earned is not None else []
    return " · ".join([*facts, f"{_counted(len(step.answers), 'answer')}, {right} right"])


def _shared_steps(group: Sequence[Episode]) -> SharedStep:
    """Returns the prompt, with all steps that follow it."""
    values = group[0].step_values
    root = SharedStep(0, value=Shown(values[0]) if values else None)
    root.continuations = group[0].continuations.get(0, ())
    known_steps: dict[tuple[int, Branch, bytes], SharedStep] = {}
    """By the step before (its id), the thread and the tokens."""
    for sample, episode in enumerate(group):
        step, begin = root, 0
        values, errors = episode.step_values or (), episode.step_errors or ()
        threaded, earned = _is_threaded(episode), episode.step_rewards
        root.answers.append(sample)
        for depth, (end, branch) in enumerate(_ends(episode), 1):
            ids = episode.response_ids[begin:end]
            key = id(step), branch, ids.tobytes()
            if key not in known_steps:  # no earlier answer went through it
                error = errors[depth] if depth < len(errors) else None
                known = depth < len(values) and (error is None or math.isfinite(error)) and not threaded
                value = Shown.of(values[depth], error, 0.0, max(1.0, episode.reward)) if known else None
                own = episode.advantages[begin:end] if episode.advantages is not None else np.empty(0)
                own = own[episode.trained[begin:end]] if len(own) else own
                mean = float(own.sum()) / len(own) if len(own) else None
                known_steps[key] = SharedStep(depth, ids, value, mean)
                known_steps[key].thread = " ".join(f"{block + 1}.{thread + 1}" for block, thread in branch)
                if depth <= len(earned) and not threaded:
                    known_steps[key].earned = earned[depth - 1]
                known_steps[key].continuations = episode.continuations.get(end, ())
                step.following.append(known_steps[key])
            step, begin = known_steps[key], end
            step.answers.append(sample)
    todo = [root]
    while todo:
        step = todo.pop()
        todo += step.following
        rewards = [group[number].reward for number in step.answers]
        step.expected = step.value.value if step.value else sum(rewards) / len(rewards)
    return root


def _is_threaded(episode: Episode) -> bool:
    return any(one.branch for one in episode.stretches)


def _ends(episode: Episode) -> Sequence[tuple[int, Branch]]:
    """Returns where the steps of an answer end in the tree, and the thread of each."""
    if _is_threaded(episode):
        return [(one.end, one.branch) for one in episode.stretches]
    ends = episode.step_ends or (len(episode.response_ids),)
    return [(end, ()) for end in ends]


def _folded(steps: Sequence[SharedStep], least: float, kept: Collection[int] = ()) -> list[SharedStep]:
    """Returns steps that follow the same one, the best first; those of fewer answers than `least`, but for
    what is `kept` (ids), as one with others of about the same value."""
    following, small = list[SharedStep](), dict[int, list[SharedStep]]()
    for one in steps:
        if len(one.answers) >= least or id(one) in kept:
            following.append(one)
        else:
            small.setdefault(round(BINS * one.expected), []).append(one)
    for own in small.values():
        answers = [number for one in own for number in one.answers]
        mean = math.fsum(one.expected * len(one.answers) for one in own) / len(answers)
        below = [last for one in own for last in one.following]
        merged = SharedStep(own[0].depth, answers=answers, following=below, expected=mean)
        following.append(
            replace(merged, branches=sum(one.branches for one in own)) if len(own) > 1 else own[0]
        )
    return sorted(following, key=lambda one: -one.expected)
