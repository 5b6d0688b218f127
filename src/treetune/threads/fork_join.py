"""Writes an answer that forks into threads and joins them again. The caller gives the function that samples.

A line of text (the main one, or a thread) is sampled until it lists outlines. Then one thread for each
outline is sampled: its context is everything before the fork and its own header, but none of its siblings.
When all threads have ended, their texts are joined in the order of the outlines, and the line continues with
all threads in its context. (The grammar and the injected text are those of ThreadWeaver's training format.)
Each line is a task::

    main line   ──sample──▶ …</Outlines>  ┐fork                              ┌join  ──sample──▶ end of text
    thread 1                              ├── header 1 ──sample──▶ </Thread> ┤
    thread 2                              └── header 2 ──sample──▶ </Thread> ┘

The main line waits for all its threads. A thread waits for its own samples. If it has a block itself, it also
waits for the threads of that block.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from treetune.engine.requests import Completion
from treetune.threads.format import TagIds, outline_numbers
from treetune.vocabulary import Branch, FinishReason, Segment, TextCodec, TokenIds, concatenate, token_array

Stragglers = Literal["truncate", "drop", "go_on"]
Malformed = Literal["end", "go_on"]

EVENTS = {
    "malformed": "blocks without a readable outline",
    "duplicate_outlines": "outlines whose number was there already",
    "threads_over_cap": "outlines beyond max_threads",
    "ended_in_thread": "threads that ended the text",
    "truncated": "threads cut off at their limit",
    "dropped": "threads left out at their limit",
    "dropped_tokens": "tokens of threads that were left out",
    "budget_spent": "ends for want of tokens",
    "blocks_over_cap": "ends for want of blocks",
}
"""Events that are counted while an answer is sampled, and their descriptions."""


class ThreadLimits(Protocol):
    """The settings of the rollout `parallel_threads` that bound an answer."""

    @property
    def max_depth(self) -> int: ...
    @property
    def max_threads(self) -> int: ...
    @property
    def max_blocks(self) -> int: ...
    @property
    def thread_tokens(self) -> int | None: ...
    @property
    def stragglers(self) -> Stragglers: ...
    @property
    def malformed(self) -> Malformed: ...


@dataclass(frozen=True, eq=False)
class Glue:
    r"""The tokens that a rollout injects, and the ids of the tags.

    Example: `newline` has the tokens of ``\n``, which follows ``</Outlines>``; ``headers("1")`` has those of
    ``<Thread>\n1:``; `join` has those of ``\n``, after which the line continues when a block's threads have
    ended.
    """

    tags: TagIds
    codec: TextCodec
    newline: TokenIds
    end_thread: TokenIds
    end_block: TokenIds
    join: TokenIds
    headers: Callable[[str], TokenIds]
    """Returns the header of a thread, given the thread's number as a text, such as ``"1"``."""

    @staticmethod
    def of(codec: TextCodec, conclusion: bool) -> Glue:
        """Encodes the injected texts.

        Args:
            codec: The model's tokenizer.
            conclusion: Whether the policy writes a conclusion, in its tags, after the threads of a block.

        Raises:
            ValueError: The tokenizer does not have the tags as single tokens.
        """
        tags = TagIds.of(codec.encode)
        if tags is None:
            raise ValueError(
                "the rollout 'parallel_threads' needs <Parallel>, <Outlines>, <Thread> and their ends as"
                " single tokens, and the model's tokenizer does not have them: append"
                " configs/models/thread_tokens.jsonnet to --configs (model.added_tokens), or start from"
                " weights that were trained with them"
            )
        # After the threads of a block, `join` is injected if the line continues, and `end_block` if the
        # answer has ended.
        end_block, join = "\n</Parallel>", "\n"
        if conclusion:
            end_block, join = "\n<Conclusion>\n</Conclusion>\n</Parallel>", "\n<Conclusion>\n"
        encoded_headers: dict[str, TokenIds] = {}  # by thread number, so that each is encoded once

        def header(number: str) -> TokenIds:
            if number not in encoded_headers:
                encoded_headers[number] = token_array(codec.encode(f"<Thread>\n{number}:"))
            return encoded_headers[number]

        return Glue(
            tags,
            codec,
            newline=token_array(codec.encode("\n")),
            end_thread=token_array(codec.encode("\n</Thread>")),
            end_block=token_array(codec.encode(end_block)),
            join=token_array(codec.encode(join)),
            headers=header,
        )


@dataclass(frozen=True, eq=False)
class LineRequest:
    """The request for a line's next sample. `turn` counts the samples of the line from 0.

    Example: the first sample of the second thread of an answer's first block, after a prompt of one token,
    the outlines, and the thread's header::

        LineRequest(branch=((0, 1),), turn=0, context_ids=array([9, 0, 2, …, 4, 31]), max_tokens=80,
                    stop_ids=(5,))
    """

    branch: Branch
    turn: int
    context_ids: TokenIds
    """All tokens that the line is sampled after, the prompt included."""
    max_tokens: int
    stop_ids: tuple[int, ...]


SampleLine = Callable[[LineRequest], Awaitable[Completion]]
"""Returns the completion of a line's request. In `parallel_threads`, this function awaits the engine."""


@dataclass(eq=False)
class Line:
    """The main text of an answer, or one of its threads. `budget` is the largest number of tokens of the
    line, those of its blocks included.

    Example: a line that has sampled outlines, forked into two threads and continued after the join has the
    parts ``[Segment(...), Segment(newline), [Line(...), Line(...)], Segment(join), Segment(...)]``.
    """

    branch: Branch
    context_ids: TokenIds
    """All tokens before the line, the prompt included."""
    budget: int
    is_thread: bool = False
    parts: list[Segment | list[Line]] = field(default_factory=list)
    """The line's own segments and, at each place where it forked, a list of the threads, in their order."""
    n_requests: int = 0
    """The number of requests for this line so far."""
    n_blocks: int = 0
    """The number of blocks on this line so far."""
    dropped: bool = False
    """Whether the line is left out of the answer because it is a straggler."""
    left_out: bool = False
    """Whether `ForkJoin`'s `is_left_out` leaves the line out of the answer on purpose. It is then not
    sampled."""

    def segments(self) -> Iterator[Segment]:
        """Yields the segments of the line and of its threads, in the order of the joined text."""
        for part in self.parts:
            if isinstance(part, Segment):
                yield part
            else:
                for thread in part:
                    # A dropped thread was sampled and became too long. One that is left out was never
                    # sampled.
                    if not (thread.dropped or thread.left_out):
                        yield from thread.segments()

    def token_ids(self) -> TokenIds:
        return concatenate([segment.token_ids for segment in self.segments()])

    def length(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments())

    def inject(self, token_ids: TokenIds) -> None:
        self.parts.append(Segment(token_ids, origin="injected", branch=self.branch))


class ForkJoin:
    """Writes an answer of at most `budget` tokens after `prompt_ids`, whose samples come from `sample`.

    After `write`, `segments` are the whole answer in its joined order. An end of text inside a thread, a
    malformed block or a limit ends the answer early. Every thread that has been opened still completes its
    sample. After that, no line forks and none continues after a block, and open threads are closed by
    injected tags. A malformed block opens no thread, and stays as it was sampled.

    Args:
        glue: The tokens that are injected.
        limits: The limits of the answer and its threads.
        sample: Returns the completion of a line's request.
        prompt_ids: The tokens of the prompt.
        budget: The largest number of tokens of the answer, injected ones included.
        is_left_out: Returns whether the thread with a given branch is left out. Answers without some of their
            threads show what these threads are worth. A thread that is left out is not sampled and not a part
            of the answer. The line continues after a block even if all of the block's threads are left out.
    """

    def __init__(
        self,
        glue: Glue,
        limits: ThreadLimits,
        sample: SampleLine,
        prompt_ids: TokenIds,
        budget: int,
        is_left_out: Callable[[Branch], bool] = lambda branch: False,
    ) -> None:
        # The glue has the tokens that are injected between the samples, such as the header of a thread.
        self._glue, self._limits, self._sample = glue, limits, sample
        self._is_left_out = is_left_out
        self._main = Line(branch=(), context_ids=prompt_ids, budget=budget)
        self._forks = 0  # the blocks of the whole answer so far
        self._finish: FinishReason | None = None  # why the answer has ended; None while it goes on
        self.events: Counter[str] = Counter()
        """The counts of events by name, such as that of the threads that were ``truncated``."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._main.segments())

    @property
    def finish_reason(self) -> FinishReason:
        assert self._finish is not None, "the answer has not ended"
        return self._finish

    async def write(self) -> None:
        """Samples the answer to its end."""
        await self._write_line(self._main)

    async def _write_line(self, line: Line) -> None:
        """Samples, forks and joins until a line (the main text or a thread) ends."""
        tags = self._glue.tags
        while True:
            # Sample the line until it ends or lists outlines.
            max_tokens = self._tokens_for_sample(line)
            if max_tokens < 1:
                # This happens only after a block (the outlines and the threads of a fork), also a malformed
                # one. A fork leaves each thread at least one token for its first sample.
                self._cut(line)
                return
            completion = await self._sample(self._next_request(line, max_tokens))
            line.parts.append(completion.segment(line.branch))
            if completion.finish_reason == "length":
                self._cut(line)
                return
            last_token = int(completion.token_ids[-1])
            may_fork = len(line.branch) < self._limits.max_depth
            lists_outlines = last_token == tags.end_outlines
            if not (may_fork and lists_outlines):
                # The line ends here: with the end of the text, or with the closing tag of a thread. (Where a
                # line may not fork, `</Outlines>` doesn't stop a sample.)
                if not line.is_thread:
                    self._end("stop")
                elif last_token != tags.end_thread:  # the text ends inside the thread
                    self._end("stop", "ended_in_thread")
                    line.inject(self._glue.end_thread)
                return

            # Fork, and wait for the threads, which are written at the same time. If no thread was opened,
            # there is nothing to join: the line goes on after the outlines, or ends below.
            threads = self._fork(line)
            if threads:
                written_threads = [thread for thread in threads if not thread.left_out]
                await asyncio.gather(*(self._write_line(thread) for thread in written_threads))
                self._join(line, threads)

            # Continue the line, unless the answer has ended: at this block, or in another line.
            if self._finish is not None:
                if line.is_thread:
                    line.inject(self._glue.end_thread)
                return

    def _next_request(self, line: Line, max_tokens: int) -> LineRequest:
        """Returns the next request of a line (the main text or a thread), and counts it. The sample stops at
        tags that end or fork the line."""
        stop_ids: tuple[int, ...] = ()
        if line.is_thread:
            stop_ids += (self._glue.tags.end_thread,)
        if len(line.branch) < self._limits.max_depth:
            stop_ids += (self._glue.tags.end_outlines,)
        turn = line.n_requests
        line.n_requests += 1
        context_ids = concatenate([line.context_ids, line.token_ids()])
        return LineRequest(line.branch, turn, context_ids, max_tokens, stop_ids)

    def _end(self, reason: FinishReason, event: str | None = None) -> None:
        """Ends the answer for this reason, unless it has already ended for another one. Counts the event.

        Samples that have been requested for other lines (the main text or threads) are still completed. After
        them, no line forks, and none continues after a block: `_fork` and `_write_line` check `_finish`.
        """
        self._finish = self._finish or reason
        if event is not None:
            self.events[event] += 1

    def _cut(self, line: Line) -> None:
        """Ends a line (the main text or a thread) whose tokens are used up.

        With the main text the answer ends. A thread whose tokens are used up is a straggler, and `stragglers`
        says what follows.
        """
        if not line.is_thread:
            self._end("length", "budget_spent")
        elif self._limits.stragglers == "drop":
            # A dropped thread is not a part of the answer, so it needs no closing tag. The answer goes on.
            line.dropped = True
            self.events["dropped"] += 1
            self.events["dropped_tokens"] += line.length()
        elif self._limits.stragglers == "truncate":
            # The answer goes on after the other threads.
            self.events["truncated"] += 1
            line.inject(self._glue.end_thread)
        else:
            # "go_on": the thread has used its whole share, and the answer ends, as in ThreadWeaver's code.
            self._end("length", "budget_spent")
            line.inject(self._glue.end_thread)

    def _fork(self, line: Line) -> list[Line]:
        """Opens the threads of the outlines at the end of a line (the main text or a thread), and returns
        them.

        Returns an empty list in three cases: the answer has ended in another line; the block has no readable
        outline, which ends the answer unless `malformed` is ``go_on``; or the block is beyond a limit, which
        ends the answer.
        """
        if self._finish is not None:  # another thread ended the answer while this one was sampled
            return []
        glue, limits = self._glue, self._limits
        sampled = line.parts[-1]
        assert isinstance(sampled, Segment), "a line forks after a sample"
        outlines = outline_numbers(glue.codec.decode(sampled.token_ids))
        numbers = outlines.numbers[: limits.max_threads]
        if not numbers:
            self.events["malformed"] += 1
            if limits.malformed == "end":
                self._end("stop")
            return []
        if self._forks == limits.max_blocks:
            self._end("length", "blocks_over_cap")
            return []
        self.events["duplicate_outlines"] += outlines.duplicates
        self.events["threads_over_cap"] += len(outlines.numbers) - len(numbers)
        headers = [glue.headers(number) for number in numbers]
        # After the threads, `join` is injected if the line continues, and `end_block` if the answer has
        # ended. Tokens are reserved for the longer of the two.
        after_threads = max(len(glue.join), len(glue.end_block))
        # `_closing_tokens` are reserved for the end of the line itself, if it is a thread.
        reserved = len(glue.newline) + after_threads + self._closing_tokens(line)
        thread_budget = (line.budget - line.length() - reserved) // len(headers)
        longest_header = max(len(header) for header in headers)
        tokens_to_sample = thread_budget - longest_header - len(glue.end_thread)
        if tokens_to_sample < 1:
            self._end("length", "budget_spent")
            return []
        line.inject(glue.newline)
        context_ids = concatenate([line.context_ids, line.token_ids()])
        threads = []
        for position, header in enumerate(headers):
            branch = (*line.branch, (line.n_blocks, position))
            is_left_out = self._is_left_out(branch)
            thread = Line(branch, context_ids, thread_budget, is_thread=True, left_out=is_left_out)
            thread.inject(header)
            threads.append(thread)
        line.parts.append(threads)
        line.n_blocks += 1
        self._forks += 1
        return threads

    def _join(self, line: Line, threads: Sequence[Line]) -> None:
        """Injects the text after a block's threads: `join` if the line continues, or `end_block` if the
        answer has ended."""
        # If all threads were dropped as stragglers, the block has no result with which the line could
        # continue, so the answer ends. Threads that were left out on purpose don't count as dropped.
        if all(thread.dropped for thread in threads):
            self._end("length")
        if self._finish is None and self._remaining_tokens(line) - len(self._glue.join) < 1:
            self._end("length", "budget_spent")
        line.inject(self._glue.join if self._finish is None else self._glue.end_block)

    def _tokens_for_sample(self, line: Line) -> int:
        """Returns how many tokens the next sample of a line (the main text or a thread) may have."""
        max_tokens = self._remaining_tokens(line)
        thread_tokens = self._limits.thread_tokens
        # A thread that reaches `thread_tokens` is a straggler. With ``go_on`` this limit doesn't count.
        if line.is_thread and thread_tokens and self._limits.stragglers != "go_on":
            max_tokens = min(max_tokens, thread_tokens - self._tokens_after_header(line))
        return max_tokens

    def _remaining_tokens(self, line: Line) -> int:
        """Returns how many tokens of the line's budget are left, besides those that are reserved to close
        it."""
        return line.budget - line.length() - self._closing_tokens(line)

    def _closing_tokens(self, line: Line) -> int:
        """Returns how many tokens are injected to close the line if it is cut."""
        return len(self._glue.end_thread) if line.is_thread else 0

    def _tokens_after_header(self, thread: Line) -> int:
        """Returns the number of tokens of a thread after its header, those of blocks inside it included."""
        header = thread.parts[0]
        assert isinstance(header, Segment), "a thread begins with its header"
        return thread.length() - len(header.token_ids)
