"""The named numbers of answers with threads: lengths, format, seconds and events of sampling.

Lengths have the names of ThreadWeaver's statistics. All numbers are of responses, without prompts, and all
means are over answers, so that an answer with many threads does not weigh more than others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treetune.rollouts.numbers import Number, NumberGroup
from treetune.threads.fork_join import EVENTS
from treetune.threads.format import TagIds, find_format_faults
from treetune.vocabulary import Segment, TextCodec, Trajectory, are_sampled


@dataclass(frozen=True)
class ThreadCounts:
    """The lengths in tokens of an answer and its blocks, under ThreadWeaver's names.

    Example: an answer of 10 tokens before a block, a block with 8 tokens outside of its threads and threads
    of 30 and 20 tokens, and 5 tokens after it has ``total_num_tokens=73`` and
    ``num_tokens_in_the_longest_thread=53``.
    """

    total_num_tokens: int
    """The number of all tokens."""
    num_tokens_in_the_longest_thread: int
    """The length of the critical path: the tokens outside of threads, the threads' tags included, plus those
    of the longest thread of each block."""
    parallel_tokens: int = 0
    """The number of tokens within the outermost blocks."""
    threads_of_blocks: tuple[int, ...] = ()
    """The number of threads of each block, in the order in which the blocks end."""
    tokens_of_blocks: tuple[int, ...] = ()
    """The number of tokens between the tags of each block, in the same order."""

    @property
    def acceleration_ratio(self) -> float:
        """1 − critical path / total; 0 for an answer without tokens.

        Useless threads raise it, too: they add to the total alone. The shaping ``acceleration`` divides by a
        reference length instead.
        """
        if not self.total_num_tokens:
            return 0.0
        return 1.0 - self.num_tokens_in_the_longest_thread / self.total_num_tokens

    @property
    def parallel_ratio(self) -> float:
        """The share of the tokens that are within blocks."""
        return self.parallel_tokens / self.total_num_tokens if self.total_num_tokens else 0.0

    @property
    def parallel_count(self) -> int:
        """The number of blocks that were opened."""
        return len(self.threads_of_blocks)

    @property
    def with_parallel(self) -> bool:
        return bool(self.threads_of_blocks)

    @property
    def thread_counts_per_block(self) -> float:
        """The mean number of threads of a block; 0 without blocks."""
        return _mean_or_zero(self.threads_of_blocks)

    @property
    def avg_tokens_per_parallel_block(self) -> float:
        """The mean number of tokens of a block; 0 without blocks."""
        return _mean_or_zero(self.tokens_of_blocks)


def count_threads(token_ids: Sequence[int], tags: TagIds | None, depth: int = 1) -> ThreadCounts:
    """Counts the tokens of a response: all, those of the critical path, and those within blocks of threads.

    The critical path counts every token outside of blocks, the tags of blocks included. In a block, it counts
    the tokens outside of threads, the tags of all threads, and the inner tokens of the longest thread.

    A tag in the wrong place counts as text: ``<Parallel>`` in a block, ``<Thread>`` or ``</Parallel>`` in a
    thread, and ``</Thread>`` without an open thread. Blocks and threads that aren't closed end with the
    answer.

    Args:
        token_ids: The tokens of the response.
        tags: The ids of the tags. None if the tokenizer does not have them: the response then has no blocks.
        depth: The largest depth of blocks within each other. In ThreadWeaver it is 1: ``<Parallel>`` in a
            thread is text. With a larger depth, the length of a thread is that of its own critical path, and
            ``</Thread>`` ends a thread even if a block within it is still open.
    """
    if tags is None:
        return ThreadCounts(total_num_tokens=len(token_ids), num_tokens_in_the_longest_thread=len(token_ids))
    tag_ids = {tags.parallel, tags.end_parallel, tags.thread, tags.end_thread}
    reader = _ThreadReader()
    counted_tokens = 0
    for position, token in enumerate(token_ids):
        if token not in tag_ids:
            continue
        reader.count_tokens(position - counted_tokens)  # the tokens since the last tag
        counted_tokens = position + 1
        # The tag itself counts outside of the block or thread that it begins or ends. So it is counted before
        # a beginning and after an end.
        if reader.is_in_text:
            if token == tags.parallel and len(reader.open_blocks) < depth:
                reader.count_tokens(1)
                reader.begin_block(position + 1)
            elif token == tags.end_thread and reader.open_blocks:
                reader.end_thread()
                reader.count_tokens(1)
            else:
                reader.count_tokens(1)
        elif token == tags.thread:
            reader.count_tokens(1)
            reader.begin_thread()
        elif token == tags.end_parallel:
            reader.end_block(position)
            reader.count_tokens(1)
        elif token == tags.end_thread and len(reader.open_blocks) > 1:
            # The thread around this block ends, and with it the block.
            reader.end_block(position)
            reader.end_thread()
            reader.count_tokens(1)
        else:
            reader.count_tokens(1)
    reader.count_tokens(len(token_ids) - counted_tokens)
    # The end of the answer ends what is still open.
    while reader.open_blocks:
        if reader.is_in_text:
            reader.end_thread()
        reader.end_block(len(token_ids))
    return ThreadCounts(
        total_num_tokens=len(token_ids),
        num_tokens_in_the_longest_thread=reader.path_lengths[0],  # the critical path of the main text
        parallel_tokens=reader.parallel_tokens,
        threads_of_blocks=tuple(reader.threads_of_blocks),
        tokens_of_blocks=tuple(reader.tokens_of_blocks),
    )


class _ThreadReader:
    """The blocks and threads that are open at the token that `count_threads` reads, and the counts so far.

    A text is the main text or a thread, and `path_lengths` has an entry for each open text. Open block i is
    in the text of ``path_lengths[i]``: the first block in the main text, the second in a thread of the first
    block, and so on. So if there is one entry more than there are open blocks, the next token is in the
    innermost text. If there are as many, it is in the innermost block, outside of its threads.
    """

    def __init__(self) -> None:
        self.path_lengths = [0]
        """The critical path so far, in tokens, of the main text and of each open thread, the innermost
        last."""
        self.open_blocks: list[_Block] = []
        """The blocks that are open, the innermost last."""
        self.parallel_tokens = 0
        """The tokens within the outermost blocks that have ended."""
        self.threads_of_blocks: list[int] = []
        """The number of threads of each block, in the order in which the blocks end."""
        self.tokens_of_blocks: list[int] = []
        """The number of tokens of each block, in the same order."""

    @property
    def is_in_text(self) -> bool:
        """True in the main text and in threads, False in a block outside of its threads."""
        return len(self.path_lengths) > len(self.open_blocks)

    def count_tokens(self, number: int) -> None:
        """Counts `number` tokens of the innermost text or block."""
        if self.is_in_text:
            self.path_lengths[-1] += number
        else:
            self.open_blocks[-1].outside_threads += number

    def begin_block(self, position: int) -> None:
        """Begins a block whose first token is at `position`."""
        self.open_blocks.append(_Block(position))

    def begin_thread(self) -> None:
        """Begins a thread of the innermost block."""
        self.path_lengths.append(0)

    def end_thread(self) -> None:
        """Ends the innermost thread, whose length counts in its block if it is the longest so far."""
        block = self.open_blocks[-1]
        block.threads += 1
        block.longest_thread = max(block.longest_thread, self.path_lengths.pop())

    def end_block(self, position: int) -> None:
        """Ends the innermost block, whose last token is the one before `position`."""
        block = self.open_blocks.pop()
        # The block lengthens the critical path of the text around it, which is the innermost text again.
        self.path_lengths[-1] += block.outside_threads + block.longest_thread
        length = position - block.begin
        self.threads_of_blocks.append(block.threads)
        self.tokens_of_blocks.append(length)
        if not self.open_blocks:
            self.parallel_tokens += length


@dataclass
class _Block:
    """An open block."""

    begin: int
    """The position after its opening tag."""
    outside_threads: int = 0
    """Tokens outside of its threads, the threads' tags included."""
    longest_thread: int = 0
    """The critical path of its longest thread so far."""
    threads: int = 0
    """Threads that have ended."""


def _mean_or_zero(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


TOTAL_TOKENS, LONGEST_THREAD = "total_num_tokens", "num_tokens_in_the_longest_thread"

THREAD_NUMBERS = {
    "with_parallel": Number(
        "share of answers with threads", share=True, while_training=True, label="with threads"
    ),
    LONGEST_THREAD: Number(
        "tokens in the longest thread (critical path)",
        better="lower",
        largest=True,
        while_training=True,
        label="longest thread",
    ),
    TOTAL_TOKENS: Number("tokens of an answer", better="lower", largest=True, while_training=True),
    "acceleration_ratio": Number(
        "acceleration ratio: 1 − longest/total", better="higher", share=True, while_training=True
    ),
    "parallel_ratio": Number("share of tokens within blocks", share=True),
    "parallel_count": Number("blocks of an answer", largest=True),
    "thread_counts_per_block": Number("threads of a block", largest=True),
    "avg_tokens_per_parallel_block": Number("tokens of a block"),
    "format_correct": Number("share without format errors", better="higher", share=True, while_training=True),
    "seconds_critical": Number(
        "seconds on the slowest way through an answer", better="lower", largest=True, while_training=True
    ),
    "seconds_sampling": Number("seconds in all requests for an answer", better="lower"),
    **{event: Number(description) for event, description in EVENTS.items()},
}
"""The numbers by short name. Only the rollout counts the `EVENTS`. The other numbers are measured, whatever
rollout made the answer."""

NO_TOKEN = -1
"""An id that no token has. It replaces a tag that should not count as a tag."""


def count_threads_of_answer(
    trajectory: Trajectory, tags: TagIds | None, *, only_forked: bool = False
) -> ThreadCounts:
    """Returns the token counts of an answer.

    The model may write blocks at which the rollout did not fork. Blocks that are deeper than the rollout's
    deepest fork count as text. Example: in an answer with a fork within a thread, blocks are counted in the
    main text and in its threads, but not in threads of threads.

    As in ThreadWeaver, the text between tags is a thread even if the model wrote the tags itself and nothing
    was sampled in parallel. With `only_forked`, a ``<Thread>`` counts only if it was injected: the rollout
    injects the tag of each thread that it forks, so a tag that was sampled opens no thread.
    """
    token_ids = trajectory.response_ids
    if only_forked and tags is not None:
        token_ids = token_ids.copy()
        sampled = are_sampled(trajectory.segments)
        token_ids[sampled & (token_ids == tags.thread)] = NO_TOKEN
    return count_threads(token_ids.tolist(), tags, _depth_of_threads(trajectory))


@NumberGroup.register("threads", THREAD_NUMBERS, ratios={"speed_up": (TOTAL_TOKENS, LONGEST_THREAD)})
def measure_threads(trajectories: Sequence[Trajectory], codec: TextCodec) -> list[dict[str, float]]:
    """Returns the numbers of each answer, by short name.

    An answer has no numbers if the tokenizer does not have the tags, or if the answer has no segments, since
    its prompt filled the context.

    Only answers with a block have ``thread_counts_per_block`` and ``avg_tokens_per_parallel_block``.
    ``format_correct`` is 1 if the text breaks no rule of the format, which is also the case for a text
    without blocks. ``seconds_sampling`` is the sum of the seconds of all requests for the answer, and
    ``seconds_critical`` the sum on the slowest path through its threads. Both are missing if the seconds of
    any request are unknown.
    """
    tags = TagIds.of(codec.encode)
    numbers: list[dict[str, float]] = []
    for trajectory in trajectories:
        if tags is None or not trajectory.segments:
            numbers.append({})
        else:
            numbers.append(_measure_answer(trajectory, tags))
    return numbers


def _measure_answer(trajectory: Trajectory, tags: TagIds) -> dict[str, float]:
    """Returns the measured numbers of an answer, by short name."""
    counts = count_threads_of_answer(trajectory, tags)
    # Blocks within threads break the format, unless the rollout has forked within a thread of this answer.
    has_forked_in_thread = _depth_of_threads(trajectory) > 1
    numbers = {
        "total_num_tokens": float(counts.total_num_tokens),
        "num_tokens_in_the_longest_thread": float(counts.num_tokens_in_the_longest_thread),
        "acceleration_ratio": counts.acceleration_ratio,
        "parallel_ratio": counts.parallel_ratio,
        "parallel_count": float(counts.parallel_count),
        "with_parallel": float(counts.with_parallel),
        "format_correct": float(not find_format_faults(trajectory.text, nesting=has_forked_in_thread)),
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


def _depth_of_threads(trajectory: Trajectory) -> int:
    """Returns the largest depth of the threads that the rollout has forked: 1 for threads of the main text, 2
    for threads of these.

    Returns 1 even if the rollout has forked no threads. The model may have written blocks by itself, and
    these are counted if they are in the main text.
    """
    # A segment's `branch` has an entry for each fork around the segment.
    depths = [len(segment.branch) for segment in trajectory.segments]
    return max([1, *depths])


def critical_seconds(segments: Sequence[Segment], depth: int = 0) -> float:
    """Returns the seconds of the slowest path through a text: the answer, or one thread at `depth` above 0.

    The path consists of the text outside of its blocks, and of the slowest thread of each block. A thread
    with blocks has a slowest path of its own. Segments without seconds count 0.
    """
    # A segment's `branch` has an entry for each block around it. So these are the segments outside of the
    # blocks of this text.
    outside_seconds = [s.seconds for s in segments if len(s.branch) == depth and s.seconds is not None]
    blocks: dict[int, dict[int, list[Segment]]] = {}
    for segment in segments:
        if len(segment.branch) > depth:
            block, thread = segment.branch[depth]
            blocks.setdefault(block, {}).setdefault(thread, []).append(segment)
    slowest_seconds = []
    for threads in blocks.values():
        slowest_seconds.append(max(critical_seconds(thread, depth + 1) for thread in threads.values()))
    return math.fsum([*outside_seconds, *slowest_seconds])
