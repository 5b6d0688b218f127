"""The named numbers of answers with threads: lengths, form, seconds and what happened while they grew.

Names of lengths are those of the reference's statistics (ThreadWeaver). All numbers are of responses,
never of prompts, and all means are over answers, so that an answer of many threads weighs no more
than any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from treetune.rollouts.numbers import Number, NumberGroup
from treetune.vocabulary import Segment, TextCodec, Trajectory, are_sampled
from treetune_threads.counting import ThreadCounts, count
from treetune_threads.faults import faults
from treetune_threads.fork_join import EVENTS
from treetune_threads.tags import TagIds

TOTAL, LONGEST = "total_num_tokens", "num_tokens_in_the_longest_thread"

NUMBERS = {
    "with_parallel": Number(
        "share of answers with threads", share=True, while_training=True, label="with threads"
    ),
    LONGEST: Number(
        "tokens in the longest thread (critical path)",
        better="lower",
        largest=True,
        while_training=True,
        label="longest thread",
    ),
    TOTAL: Number("tokens of an answer", better="lower", largest=True, while_training=True),
    "acceleration_ratio": Number(
        "acceleration ratio: 1 − longest/total", better="higher", share=True, while_training=True
    ),
    "parallel_ratio": Number("share of tokens within blocks", share=True),
    "parallel_count": Number("blocks of an answer", largest=True),
    "thread_counts_per_block": Number("threads of a block", largest=True),
    "avg_tokens_per_parallel_block": Number("tokens of a block"),
    "format_correct": Number(
        "share with nothing against the grammar", better="higher", share=True, while_training=True
    ),
    "seconds_critical": Number(
        "seconds on the slowest way through an answer", better="lower", largest=True, while_training=True
    ),
    "seconds_sampling": Number("seconds in all requests for an answer", better="lower"),
    **{event: Number(words) for event, words in EVENTS.items()},
}
"""By short name; the `EVENTS` are counted by the rollout, the others measured of any answer."""

NO_TOKEN = -1


def counts_of(trajectory: Trajectory, tags: TagIds | None, *, only_forked: bool = False) -> ThreadCounts:
    """The lengths of an answer; its blocks may lie within each other as deep as the rollout let them.

    Threads are what stands between tags, as in the reference, also where a model wrote the tags by itself
    and nothing was sampled in parallel. With `only_forked`, a ``<Thread>`` that was sampled is text.
    """
    token_ids = trajectory.response_ids
    if only_forked and tags is not None:
        token_ids = token_ids.copy()
        sampled = are_sampled(trajectory.segments)
        token_ids[sampled & (token_ids == tags.thread)] = NO_TOKEN
    return count(token_ids.tolist(), tags, _depth(trajectory))


@NumberGroup.register("threads", NUMBERS, ratios={"speed_up": (TOTAL, LONGEST)})
def measure(trajectories: Sequence[Trajectory], codec: TextCodec) -> list[dict[str, float]]:
    """Numbers of each answer, by short name; none of one that was not asked for, and none at all where the
    tokenizer lacks the tags.

    ``thread_counts_per_block`` and ``avg_tokens_per_parallel_block`` are numbers of answers that opened
    a block, so others lack them. ``format_correct`` is 1 where the text breaks no rule of the grammar, which
    is also so without any block. ``seconds_sampling`` are those of all requests for the answer,
    ``seconds_critical`` those on its slowest way through the threads; both are measured, and lacking where
    a part of it was not.
    """
    tags = TagIds.of(codec.encode)
    return [
        {} if tags is None or not trajectory.segments else _statistics(trajectory, tags)
        for trajectory in trajectories
    ]


def _statistics(trajectory: Trajectory, tags: TagIds) -> dict[str, float]:
    counts = counts_of(trajectory, tags)
    numbers = {
        "total_num_tokens": float(counts.total_num_tokens),
        "num_tokens_in_the_longest_thread": float(counts.num_tokens_in_the_longest_thread),
        "acceleration_ratio": counts.acceleration_ratio,
        "parallel_ratio": counts.parallel_ratio,
        "parallel_count": float(counts.parallel_count),
        "with_parallel": float(counts.with_parallel),
        "format_correct": float(not faults(trajectory.text, nesting=_depth(trajectory) > 1)),
    }
    if counts.with_parallel:
        numbers["thread_counts_per_block"] = counts.thread_counts_per_block
        numbers["avg_tokens_per_parallel_block"] = counts.avg_tokens_per_parallel_block
    sampled = [segment for segment in trajectory.segments if segment.origin == "sampled"]
    seconds = [segment.seconds for segment in sampled if segment.seconds is not None]
    if sampled and len(seconds) == len(sampled):
        numbers["seconds_sampling"] = math.fsum(seconds)
        numbers["seconds_critical"] = critical_seconds(sampled)
    return numbers


def _depth(trajectory: Trajectory) -> int:
    """How deep blocks lay within each other; 1 also where nobody forked."""
    return max((1, *(len(segment.branch) for segment in trajectory.segments)))


def critical_seconds(segments: Sequence[Segment], depth: int = 0) -> float:
    """Seconds of the slowest way through: those of the line at `depth`, and of each of its blocks those
    of its slowest thread, with the blocks within it. What wasn't measured counts nothing."""
    line = [s.seconds for s in segments if len(s.branch) == depth and s.seconds is not None]
    blocks: dict[int, dict[int, list[Segment]]] = {}
    for segment in segments:
        if len(segment.branch) > depth:
            block, thread = segment.branch[depth]
            blocks.setdefault(block, {}).setdefault(thread, []).append(segment)
    slowest = [
        max(critical_seconds(thread, depth + 1) for thread in threads.values()) for threads in blocks.values()
    ]
    return math.fsum([*line, *slowest])
