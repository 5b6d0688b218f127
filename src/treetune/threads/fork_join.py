"""How an answer forks into threads and joins them again, whoever samples it.

A line of text (the main one, or a thread) is sampled until it lists outlines; then one thread per outline is
sampled after everything before it, its own header and none of its siblings; when all have ended, their text
is joined in the order of the outlines, and the line goes on in sight of all of them. (The grammar and the
order of what is injected are those of ThreadWeaver's training format.) Each line is a task::

    main line   ──sample──▶ …</Outlines>  ┐fork                              ┌join  ──sample──▶ end of text
    thread 1                              ├── header 1 ──sample──▶ </Thread> ┤
    thread 2                              └── header 2 ──sample──▶ </Thread> ┘

The main line waits for all its threads; a thread waits for its own samples, and for its own threads where
blocks lie within each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from treetune.engine.base import Completion
from treetune.threads.format import TagIds, outline_numbers
from treetune.vocabulary import Branch, FinishReason, Segment, TextCodec, TokenIds, joined, token_array

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
"""What is counted of an answer while it grows, and in words."""


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
    """The tokens that are injected, and the tags. Raises ValueError in `of`."""

    tags: TagIds
    codec: TextCodec
    newline: TokenIds
    end_thread: TokenIds
    end_block: TokenIds
    join: TokenIds
    headers: Callable[[str], TokenIds]

    @staticmethod
    def of(codec: TextCodec, conclusion: bool) -> Glue:
        tags = TagIds.of(codec.encode)
        if tags is None:
            raise ValueError(
                "the rollout 'parallel_threads' needs <Parallel>, <Outlines>, <Thread> and their ends as"
                " single tokens, and the model's tokenizer has none such: put"
                " configs/models/thread_tokens.jsonnet on the right (model.added_tokens), or start from"
                " weights that were trained with them"
            )
        end_block, join = "\n</Parallel>", "\n"
        if conclusion:
            end_block, join = "\n<Conclusion>\n</Conclusion>\n</Parallel>", "\n<Conclusion>\n"
        headers: dict[str, TokenIds] = {}

        def header(number: str) -> TokenIds:
            if number not in headers:
                headers[number] = token_array(codec.encode(f"<Thread>\n{number}:"))
            return headers[number]

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
    """A sample that a line needs now, its `turn`-th.

    Example: the first sample of the second thread of an answer's first block, behind a prompt of one token,
    the outlines, and the thread's header::

        LineRequest(branch=((0, 1),), turn=0, context_ids=array([9, 0, 2, …, 4, 31]), max_tokens=80,
                    stop_ids=(5,))
    """

    branch: Branch
    turn: int
    context_ids: TokenIds
    """All that the line sees, the prompt included."""
    max_tokens: int
    stop_ids: tuple[int, ...]


Sample = Callable[[LineRequest], Awaitable[Completion]]


@dataclass(eq=False)
class Line:
    """The main text, or a thread. `budget` bounds all tokens on it, those of its blocks included."""

    branch: Branch
    context_ids: TokenIds
    """All before the line, the prompt included."""
    budget: int
    is_thread: bool = False
    parts: list[Segment | list[Line]] = field(default_factory=list)
    """Its own segments and, where it forked, the threads of the block, in their order."""
    samples: int = 0
    blocks: int = 0
    dropped: bool = False

    def segments(self) -> Iterator[Segment]:
        for part in self.parts:
            if isinstance(part, Segment):
                yield part
            else:
                for thread in part:
                    if not thread.dropped:
                        yield from thread.segments()

    def token_ids(self) -> TokenIds:
        return joined([segment.token_ids for segment in self.segments()])

    def length(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments())

    def inject(self, token_ids: TokenIds) -> None:
        self.parts.append(Segment(token_ids, origin="injected", branch=self.branch))


class ForkJoin:
    """An answer of at most `budget` tokens after `prompt_ids`, whose lines are written by `sample`.

    Once `write` has returned, `segments` hold the whole answer in its joined order. Whatever ends it early
    (an end of text inside a thread, a malformed block, a limit) does so once the threads that have begun have
    ended; the text that is open is closed by injected tags.
    """

    def __init__(
        self, glue: Glue, limits: ThreadLimits, sample: Sample, prompt_ids: TokenIds, budget: int
    ) -> None:
        self._glue, self._limits, self._sample = glue, limits, sample
        self._main = Line((), prompt_ids, budget)
        self._forks = 0
        self._finish: FinishReason | None = None
        self.events: Counter[str] = Counter()

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._main.segments())

    @property
    def finish_reason(self) -> FinishReason:
        assert self._finish is not None, "the answer has not ended"
        return self._finish

    async def write(self) -> None:
        """Writes the answer to its end."""
        await self._write_line(self._main)

    async def _write_line(self, line: Line) -> None:
        """Samples, forks and joins until the line ends."""
        tags = self._glue.tags
        while True:
            room = self._room_for_sample(line)
            if room < 1:
                # Only behind a join: a fork leaves each thread a token at least.
                self._cut(line)
                return
            completion = await self._sample(self._next_request(line, room))
            line.parts.append(completion.segment(line.branch))
            if completion.finish_reason == "length":
                self._cut(line)
                return
            last = int(completion.token_ids[-1])
            lists_outlines = last == tags.end_outlines and len(line.branch) < self._limits.max_depth
            if not lists_outlines:
                if not line.is_thread:
                    self._end("stop")
                elif last != tags.end_thread:  # the text ends inside the thread
                    self._end("stop", "ended_in_thread")
                    line.inject(self._glue.end_thread)
                return
            threads = self._fork(line)
            if threads:
                await asyncio.gather(*(self._write_line(thread) for thread in threads))
                self._join(line, threads)
            if self._finish is not None:
                if line.is_thread:
                    line.inject(self._glue.end_thread)
                return

    def _next_request(self, line: Line, room: int) -> LineRequest:
        stop_ids: tuple[int, ...] = ()
        if line.is_thread:
            stop_ids += (self._glue.tags.end_thread,)
        if len(line.branch) < self._limits.max_depth:
            stop_ids += (self._glue.tags.end_outlines,)
        turn = line.samples
        line.samples += 1
        return LineRequest(line.branch, turn, joined([line.context_ids, line.token_ids()]), room, stop_ids)

    def _end(self, reason: FinishReason, event: str | None = None) -> None:
        """Ends the answer: nothing more is sampled once the threads that have begun have ended. The first
        reason stands."""
        self._finish = self._finish or reason
        if event is not None:
            self.events[event] += 1

    def _cut(self, line: Line) -> None:
        """Ends a line that came to its last token."""
        if not line.is_thread:
            self._end("length", "budget_spent")
            return
        if self._limits.stragglers == "drop":
            line.dropped = True
            self.events["dropped"] += 1
            self.events["dropped_tokens"] += line.length()
            return
        if self._limits.stragglers == "truncate":
            self.events["truncated"] += 1
        else:
            self._end("length", "budget_spent")
        line.inject(self._glue.end_thread)

    def _fork(self, line: Line) -> list[Line]:
        """Returns the threads that the outlines at the line's end open. Returns none where they open none:
        then the answer has ended, unless malformed blocks go on."""
        if self._finish is not None:  # another thread ended the answer while this was sampled
            return []
        glue, limits = self._glue, self._limits
        sampled = line.parts[-1]
        assert isinstance(sampled, Segment), "a line forks behind a sample"
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
        # What has to fit behind the threads, whether the line goes on or ends there.
        behind = len(glue.newline) + max(len(glue.join), len(glue.end_block)) + self._closing(line)
        share = (line.budget - line.length() - behind) // len(headers)
        if share - max(map(len, headers)) - len(glue.end_thread) < 1:
            self._end("length", "budget_spent")
            return []
        line.inject(glue.newline)
        context_ids = joined([line.context_ids, line.token_ids()])
        threads = []
        for position, header in enumerate(headers):
            branch = (*line.branch, (line.blocks, position))
            thread = Line(branch, context_ids, share, is_thread=True)
            thread.inject(header)
            threads.append(thread)
        line.parts.append(threads)
        line.blocks += 1
        self._forks += 1
        return threads

    def _join(self, line: Line, threads: Sequence[Line]) -> None:
        """Injects what stands behind a block: the text that the line goes on from, or the block's end where
        the answer has ended."""
        if all(thread.dropped for thread in threads):
            self._end("length")
        if self._finish is None and self._room(line) - len(self._glue.join) < 1:
            self._end("length", "budget_spent")
        line.inject(self._glue.join if self._finish is None else self._glue.end_block)

    def _room_for_sample(self, line: Line) -> int:
        room = self._room(line)
        if line.is_thread and self._limits.stragglers != "go_on" and self._limits.thread_tokens:
            room = min(room, self._limits.thread_tokens - self._sampled(line))
        return room

    def _room(self, line: Line) -> int:
        return line.budget - line.length() - self._closing(line)

    def _closing(self, line: Line) -> int:
        """Returns the tokens that have to be left for closing the line if it is cut."""
        return len(self._glue.end_thread) if line.is_thread else 0

    def _sampled(self, line: Line) -> int:
        """Returns the tokens of the thread beside its header, those of blocks within it included."""
        return line.length() - len(line.parts[0].token_ids) if isinstance(line.parts[0], Segment) else 0
