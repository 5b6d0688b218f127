"""An answer drawn as its threads: what was written side by side stands side by side."""

from __future__ import annotations

from html import escape
from itertools import pairwise

from treetune_threads.fork_join import EVENTS
from treetune_view.report.charts import number
from treetune_view.report.sections.threads.answer import (
    Block,
    Line,
    Run,
    ThreadedAnswer,
    inner,
    length,
    name_of,
    parted,
    sampled,
    seconds_of,
)
from treetune_view.report.tokens import coloured, injected

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
    seconds = seconds_of(answer.line, 0)
    if seconds is not None:
        sampling = sum(one.segment.seconds or 0.0 for one in sampled(answer.line))
        parts.append(f"{number(seconds)} s on the slowest way, {number(sampling)} s in all requests")
    mean = answer.mean_advantage(0, len(answer.texts))
    if mean is not None and not answer.is_told_apart:
        parts.append(f"A {mean:+.2f} throughout")
    events = {event: answer.numbers.get(f"threads/{event}") for event in EVENTS}
    parts += [escape(f"{event.replace('_', ' ')}: {times:.0f}") for event, times in events.items() if times]
    return " · ".join(parts)


def _many(how_many: int, of: str) -> str:
    return f"{how_many} {of}{'' if how_many == 1 else 's'}"


def _line_html(answer: ThreadedAnswer, line: Line, depth: int, *, is_critical: bool) -> str:
    parts = []
    for part in parted(answer, line, depth):
        if isinstance(part, Run):
            parts.append(_run_html(answer, line, part.start, part.end, is_critical=is_critical))
        else:
            parts.append(_block_html(answer, line, part, depth, is_critical=is_critical))
    return f'<div class="line">{"".join(parts)}</div>'


def _run_html(answer: ThreadedAnswer, line: Line, start: int, end: int, *, is_critical: bool) -> str:
    """Text of one line; what was injected is told from what was sampled."""
    tokens, advantages = answer.row["tokens"], answer.row.get("advantages")
    parts = []
    for one in line:
        low, high = max(start, one.start), min(end, one.end)
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


def _block_html(answer: ThreadedAnswer, line: Line, block: Block, depth: int, *, is_critical: bool) -> str:
    lengths = [length(answer, thread, depth + 1) for thread in block.threads]
    longest = lengths.index(max(lengths))
    n_threads = len(block.threads)
    lanes = "".join(
        _thread_html(
            answer,
            thread,
            depth + 1,
            name=name_of(answer, thread, position),
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
    start, end = inner(answer, thread)
    counts = answer.counts(start, end, above=depth)
    facts = [_many(counts.num_tokens_in_the_longest_thread, "token")]
    if counts.with_parallel:
        facts[0] += f" of {counts.total_num_tokens}"
    seconds = seconds_of(thread, depth)
    facts += [f"{number(seconds)} s"] if seconds is not None else []
    mean = answer.mean_advantage(start, end) if answer.is_told_apart else None
    facts += [f"A {mean:+.2f}"] if mean is not None else []
    mark = '<span class="way">critical path</span>' if is_critical else "longest" if is_longest else ""
    head = (
        f'<b>{escape(name)}</b><span class="measures">{" · ".join(facts)}</span>'
        '<svg class="extent" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * share:.1f}" height="6"/></svg>{mark}'
    )
    kind = f'class="thread{" critical" if is_critical else ""}"'
    text = _line_html(answer, thread, depth, is_critical=is_critical)
    if fold is None:
        return f"<section {kind}><header>{head}</header>{text}</section>"
    return f"<details {kind}{'' if fold else ' open'}><summary>{head}</summary>{text}</details>"
