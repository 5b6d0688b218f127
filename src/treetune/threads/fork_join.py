"""The state machine of an answer that forks into threads and joins them again, without an engine.

It returns the calls to make and takes what was sampled. A line of text (the main one, or a thread) is
sampled until it lists outlines; then one thread per outline is sampled after everything before it, its
own header and none of its siblings; when all have ended, their text is joined in the order of the
outlines, and the line goes on in sight of all of them. (The grammar and the order of what is injected
are those of ThreadWeaver's training format.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
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


class Limits(Protocol):
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
class Call:
    """A request that an answer needs now: its `turn`-th on the `branch`, after `context_ids` (the
    prompt's included)."""

    branch: Branch
    turn: int
    context_ids: TokenIds
    max_tokens: int
    stop_ids: tuple[int, ...]


@dataclass(eq=False)
class _Line:
    """The main text, or a thread. `budget` bounds all tokens on it, those of its blocks included."""

    branch: Branch
    context_ids: TokenIds
    budget: int
    parent: _Line | None = None
    parts: list[Segment | list[_Line]] = field(default_factory=list)
    turn: int = 0
    blocks: int = 0
    closed: bool = False
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
    """An answer of at most `budget` tokens after `prompt_ids`.

    `begin` returns the first call; `receive` takes the completion of a call and returns the calls that
    follow. It is `done` once none is out: then `segments` hold the whole answer in its joined order.

    Whatever ends it early (an end of text inside a thread, a malformed block, a limit) does so once the
    threads that are out have come in; the text that is open is closed by injected tags.
    """

    def __init__(self, glue: Glue, limits: Limits, prompt_ids: TokenIds, budget: int) -> None:
        self._glue, self._limits = glue, limits
        self._main = _Line((), prompt_ids, budget)
        self._out: dict[tuple[Branch, int], _Line] = {}
        self._forks = 0
        self._finish: FinishReason | None = None
        self.events: Counter[str] = Counter()

    @property
    def done(self) -> bool:
        return not self._out

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._main.segments())

    @property
    def finish_reason(self) -> FinishReason:
        assert self._finish is not None, "the answer has not ended"
        return self._finish

    def begin(self) -> list[Call]:
        return self._go_on(self._main)

    def receive(self, call: Call, completion: Completion) -> list[Call]:
        line = self._out.pop((call.branch, call.turn))
        line.parts.append(completion.segment(line.branch))
        last = int(completion.token_ids[-1])
        if completion.finish_reason == "length":
            return self._limit_reached(line)
        if last == self._glue.tags.end_outlines and len(line.branch) < self._limits.max_depth:
            return self._fork(line)
        if line.parent is not None and last == self._glue.tags.end_thread:
            return self._close(line)
        if line.parent is not None:
            self._end("stop", "ended_in_thread")
            line.inject(self._glue.end_thread)
            return self._close(line)
        self._end("stop")
        return self._close(line)

    def _end(self, reason: FinishReason, event: str | None = None) -> None:
        """Ends the answer: there is no further call. The first reason stands."""
        self._finish = self._finish or reason
        if event is not None:
            self.events[event] += 1

    def _limit_reached(self, line: _Line) -> list[Call]:
        if line.parent is None:
            self._end("length", "budget_spent")
            return self._close(line)
        if self._limits.stragglers == "drop":
            line.dropped = True
            self.events["dropped"] += 1
            self.events["dropped_tokens"] += line.length()
            return self._close(line)
        if self._limits.stragglers == "truncate":
            self.events["truncated"] += 1
        else:
            self._end("length", "budget_spent")
        line.inject(self._glue.end_thread)
        return self._close(line)

    def _fork(self, line: _Line) -> list[Call]:
        if self._finish is not None:  # a sibling ended the answer while this was sampled
            return self._stop(line)
        glue, limits = self._glue, self._limits
        sampled = line.parts[-1]
        assert isinstance(sampled, Segment)
        outlines = outline_numbers(glue.codec.decode(sampled.token_ids))
        numbers = outlines.numbers[: limits.max_threads]
        if not numbers:
            self.events["malformed"] += 1
            if limits.malformed == "go_on":
                return self._go_on(line)
            self._end("stop")
            return self._stop(line)
        if self._forks == limits.max_blocks:
            self._end("length", "blocks_over_cap")
            return self._stop(line)
        self.events["duplicate_outlines"] += outlines.duplicates
        self.events["threads_over_cap"] += len(outlines.numbers) - len(numbers)
        headers = [glue.headers(number) for number in numbers]
        glued = len(glue.newline) + max(len(glue.join), len(glue.end_block)) + self._closing(line)
        share = (line.budget - line.length() - glued) // len(headers)
        if share - max(map(len, headers)) - len(glue.end_thread) < 1:
            self._end("length", "budget_spent")
            return self._stop(line)
        line.inject(glue.newline)
        context_ids = joined([line.context_ids, line.token_ids()])
        threads = []
        for place, header in enumerate(headers):
            thread = _Line((*line.branch, (line.blocks, place)), context_ids, share, line)
            thread.inject(header)
            threads.append(thread)
        line.parts.append(threads)
        line.blocks += 1
        self._forks += 1
        return [call for thread in threads for call in self._go_on(thread)]

    def _close(self, line: _Line) -> list[Call]:
        """Ends the line. Its block is joined if it was the last of its siblings."""
        line.closed = True
        parent = line.parent
        if parent is None:
            return []
        block = parent.parts[-1]
        assert isinstance(block, list)
        return self._join(parent) if all(thread.closed for thread in block) else []

    def _join(self, line: _Line) -> list[Call]:
        block = line.parts[-1]
        assert isinstance(block, list)
        if all(thread.dropped for thread in block):
            self._end("length")
        if self._finish is None and self._room(line) - len(self._glue.join) < 1:
            self._end("length", "budget_spent")
        if self._finish is not None:
            line.inject(self._glue.end_block)
            return self._stop(line)
        line.inject(self._glue.join)
        return self._go_on(line)

    def _stop(self, line: _Line) -> list[Call]:
        """Ends the line without sampling more, since the answer ends."""
        if line.parent is not None:
            line.inject(self._glue.end_thread)
        return self._close(line)

    def _go_on(self, line: _Line) -> list[Call]:
        if self._finish is not None:
            return self._stop(line)
        room = self._room(line)
        if line.parent is not None and self._limits.stragglers != "go_on" and self._limits.thread_tokens:
            room = min(room, self._limits.thread_tokens - self._sampled(line))
        if room < 1:
            # Only behind a join: a fork leaves each thread a token at least.
            return self._limit_reached(line)
        stop_ids: tuple[int, ...] = ()
        if line.parent is not None:
            stop_ids += (self._glue.tags.end_thread,)
        if len(line.branch) < self._limits.max_depth:
            stop_ids += (self._glue.tags.end_outlines,)
        call = Call(line.branch, line.turn, joined([line.context_ids, line.token_ids()]), room, stop_ids)
        line.turn += 1
        self._out[line.branch, call.turn] = line
        return [call]

    def _room(self, line: _Line) -> int:
        return line.budget - line.length() - self._closing(line)

    def _closing(self, line: _Line) -> int:
        """Returns the tokens that have to be left for closing the line if it is cut."""
        return 0 if line.parent is None else len(self._glue.end_thread)

    def _sampled(self, line: _Line) -> int:
        """Returns the tokens of the thread beside its header, those of blocks within it included."""
        return line.length() - len(line.parts[0].token_ids) if isinstance(line.parts[0], Segment) else 0
