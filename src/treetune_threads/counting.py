"""How long an answer with threads is, and how long where its threads are written at the same time.

The rules are those of ThreadWeaver's statistics: one pass over token ids, in which tags count only where
they can open or close something and are text everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treetune_threads.tags import TagIds


@dataclass(frozen=True)
class ThreadCounts:
    """Lengths in tokens, under the names that the reference has for them.

    `num_tokens_in_the_longest_thread` is the critical path: what lies outside of threads, their tags
    included, and of each block its longest thread. `threads_of_blocks` and `tokens_of_blocks` (what
    stands between a block's tags) are in the order in which blocks end; `parallel_tokens` are those of
    the outermost blocks.
    """

    total_num_tokens: int
    num_tokens_in_the_longest_thread: int
    parallel_tokens: int = 0
    threads_of_blocks: tuple[int, ...] = ()
    tokens_of_blocks: tuple[int, ...] = ()

    @property
    def acceleration_ratio(self) -> float:
        """1 − critical path / total. It rises with every thread that adds nothing: see the shaping
        ``acceleration`` for ratios that don't."""
        if not self.total_num_tokens:
            return 0.0
        return 1.0 - self.num_tokens_in_the_longest_thread / self.total_num_tokens

    @property
    def parallel_ratio(self) -> float:
        """The share of tokens that are within blocks."""
        return self.parallel_tokens / self.total_num_tokens if self.total_num_tokens else 0.0

    @property
    def parallel_count(self) -> int:
        """How many blocks were opened."""
        return len(self.threads_of_blocks)

    @property
    def with_parallel(self) -> bool:
        return bool(self.threads_of_blocks)

    @property
    def thread_counts_per_block(self) -> float:
        """Mean over blocks; 0 without any."""
        return _mean(self.threads_of_blocks)

    @property
    def avg_tokens_per_parallel_block(self) -> float:
        """Mean over blocks; 0 without any."""
        return _mean(self.tokens_of_blocks)


def count(token_ids: Sequence[int], tags: TagIds | None, depth: int = 1) -> ThreadCounts:
    """The lengths of a response. Without `tags` (the tokenizer has none) all of it is one line.

    Outside of blocks every token counts, the tags of blocks too. In a block, what is outside of its
    threads counts, and so do the tags of all threads; of the threads' inner tokens those of the longest
    alone. ``<Parallel>`` in a block, ``<Thread>`` and ``</Parallel>`` in a thread, and ``</Thread>``
    where no thread is open are text. What isn't closed ends with the answer.

    The reference knows blocks within threads as text only. With a `depth` above 1, ``<Parallel>`` opens
    a block in threads too, down to so many blocks within each other; a thread is then as long as its own
    critical path, and ``</Thread>`` ends it even where a block within it was left open.
    """
    if tags is None:
        return ThreadCounts(len(token_ids), len(token_ids))
    tally = _Tally()
    answer = _Line()
    lines, blocks = [answer], list[_Block]()  # the open ones; each block lies in the line of its number
    for position, token in enumerate(token_ids):
        line = lines[-1]
        if len(lines) > len(blocks):
            if token == tags.parallel and len(blocks) < depth:
                line.length += 1
                blocks.append(_Block(position + 1))
            elif token == tags.end_thread and blocks:
                lines.pop()
                blocks[-1].take(line)
                blocks[-1].sequential += 1
            else:
                line.length += 1
            continue
        block = blocks[-1]
        if token == tags.thread:
            block.sequential += 1
            lines.append(_Line())
        elif token == tags.end_parallel:
            tally.close(blocks, line, position)
            line.length += 1
        elif token == tags.end_thread and len(blocks) > 1:
            tally.close(blocks, line, position)
            lines.pop()
            blocks[-1].take(line)
            blocks[-1].sequential += 1
        else:
            block.sequential += 1
    while blocks:
        if len(lines) > len(blocks):
            blocks[-1].take(lines.pop())
        tally.close(blocks, lines[-1], len(token_ids))
    return ThreadCounts(
        len(token_ids), answer.length, tally.parallel, tuple(tally.threads), tuple(tally.tokens)
    )


@dataclass
class _Line:
    """The answer outside of blocks, or a thread: its critical path so far."""

    length: int = 0


@dataclass
class _Block:
    """`begin` is the position behind its opening tag."""

    begin: int
    sequential: int = 0
    longest: int = 0
    threads: int = 0

    def take(self, thread: _Line) -> None:
        self.threads += 1
        self.longest = max(self.longest, thread.length)


@dataclass
class _Tally:
    """What is known of blocks that have ended."""

    parallel: int = 0
    threads: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def close(self, blocks: list[_Block], line: _Line, end: int) -> None:
        """The last of the open `blocks`, in `line`, ends before position `end`."""
        block = blocks.pop()
        line.length += block.sequential + block.longest
        self.threads.append(block.threads)
        self.tokens.append(end - block.begin)
        if not blocks:
            self.parallel += end - block.begin


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
