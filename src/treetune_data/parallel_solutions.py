"""Makes parallel text of one sequential solution with a language model's help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treetune_data import prompts
from treetune_data.asking import Questions, Unreadable, all_of
from treetune_data.thread_blocks import (
    CONTROL,
    Block,
    Dropped,
    Rule,
    cut,
    failed_threads,
    independent_parts,
    json_list,
    saved_characters,
)
from treetune_threads.format import TAGS, faults, text_segments

_TAG = re.compile("|".join(re.escape(tag) for tag in TAGS))


@dataclass(frozen=True)
class Edit:
    """A change in `thread`: `source` became `destination` because of `sibling` (both counted from 1)."""

    thread: int
    sibling: int
    source: str
    destination: str


async def rewritten(
    questions: Questions, problem: str, known: str, threads: Sequence[str]
) -> tuple[tuple[str, ...], list[Edit]]:
    """The threads' texts without references to each other, and what was changed.

    Each thread is held against every earlier one, in their order: what was written from top to bottom looks
    back. Raises Unreadable where the model's edits can't be applied.
    """

    async def rewrite(thread: int) -> tuple[str, list[Edit]]:
        text, edits = threads[thread - 1], []
        for sibling in range(1, thread):
            current = text
            asked = prompts.REFERENCES.format(
                problem=problem, known=known, hidden=threads[sibling - 1], part=current
            )

            def read(answer: str, current: str = current) -> tuple[str, list[tuple[str, str]]]:
                return _apply(current, json_list(answer))

            (text, changed), _ = await questions.ask("references", [("user", asked)], read)
            edits += [Edit(thread, sibling, source, destination) for source, destination in changed]
        return text, edits

    results = await all_of([rewrite(thread) for thread in range(1, len(threads) + 1)])
    return tuple(text for text, _ in results), [edit for _, edits in results for edit in edits]


def _apply(text: str, items: Sequence[object]) -> tuple[str, list[tuple[str, str]]]:
    edits = []
    for item in items:
        source = item.get("source") if isinstance(item, dict) else None
        destination = item.get("destination") if isinstance(item, dict) else None
        if not isinstance(source, str) or not isinstance(destination, str) or not source:
            raise Unreadable(f"a replacement is no source and destination in words: {str(item)[:100]}")
        if _TAG.search(destination):
            raise Unreadable(f"a destination holds a tag: {destination[:100]!r}")
        if set(CONTROL.findall(destination)) - set(source):
            raise Unreadable(
                f"a destination brings in a line break or another control character: {destination[:100]!r};"
                " are backslashes doubled?"
            )
        count = occurrences(text, source)
        if count != 1:
            raise Unreadable(f"a source occurs {count} times in the part and not once: {source[:100]!r}")
        text = text.replace(source, destination)
        if source != destination:
            edits.append((source, destination))
    if not text.strip():
        raise Unreadable("nothing is left of the part")
    return text.strip(), edits


def occurrences(text: str, part: str) -> int:
    """Returns how often `part` begins in the text, also where two overlap."""
    count, at = 0, text.find(part)
    while at >= 0:
        count, at = count + 1, text.find(part, at + 1)
    return count


MOST_SENTENCES = 2
MOST_CHARACTERS = 600

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SENTENCE_END = re.compile(r"[.!?](?=\s+[^\sa-z]|\s*$)")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|resp|Eq|Eqs|Fig|No)\.", re.IGNORECASE)
_ANY_TAG = re.compile(r"</?[A-Za-z]+>")


async def outlines(questions: Questions, problem: str, known: str, threads: Sequence[str]) -> list[str]:
    """Returns one line per thread. Raises Unreadable where the model gives none that would do."""
    parts = "\n\n".join(
        f'<part number="{number}">\n{text}\n</part>' for number, text in enumerate(threads, start=1)
    )
    asked = prompts.OUTLINES.format(count=len(threads), problem=problem, known=known, parts=parts)

    def read(answer: str) -> list[str]:
        items = json_list(answer)
        if len(items) != len(threads):
            raise Unreadable(f"there are {len(items)} announcements for {len(threads)} pieces of work")
        return [_outline(item, i, f"{problem}\n{known}", text, len(threads)) for i, (item, text) in
                enumerate(zip(items, threads), start=1)]  # fmt: skip

    return (await questions.ask("outlines", [("user", asked)], read))[0]


def _outline(item: object, number: int, known: str, thread: str, count: int) -> str:
    where = f"announcement {number}"
    if not isinstance(item, str) or not item.strip():
        raise Unreadable(f"{where} is no text")
    text = item.strip()
    if CONTROL.search(text):
        raise Unreadable(f"{where} holds a line break or another control character; are backslashes doubled?")
    if _ANY_TAG.search(text):
        raise Unreadable(f"{where} holds a tag")
    if len(text) > MOST_CHARACTERS or sentences(text) > MOST_SENTENCES:
        raise Unreadable(f"{where} is longer than {MOST_SENTENCES} short sentences")
    leaked = results_in(text, known, thread, count)
    if leaked:
        raise Unreadable(
            f"{where} names {', '.join(leaked)}, which is only found there: it gives away a result"
        )
    return text


def sentences(text: str) -> int:
    """Counts sentences; a dot within a number or behind a common abbreviation ends none."""
    return max(1, len(_SENTENCE_END.findall(_ABBREVIATION.sub("", text))))


def results_in(outline: str, known: str, thread: str, count: int) -> list[str]:
    """Numbers of an outline that its thread finds and nothing before it holds. (Those up to `count` may
    only count the threads.)"""
    before = set(_NUMBER.findall(known)) | set(map(str, range(count + 1)))
    found = set(_NUMBER.findall(thread))
    return [number for number in dict.fromkeys(_NUMBER.findall(outline)) if number in found - before]


_THOUGHT = re.compile(r"\A(?P<opening>\s*<think>\n?)?(?P<body>.*?)(?P<rest></think>.*)?\Z", re.DOTALL)


@dataclass(frozen=True)
class Parts:
    """A solution's thought, which may be divided, between what opens it and what follows it. Without
    thought tags, the solution is all thought."""

    opening: str
    body: str
    rest: str

    @staticmethod
    def of(solution: str) -> Parts:
        match = _THOUGHT.match(solution)
        assert match is not None, "it matches every text"
        return Parts(match["opening"] or "", match["body"], match["rest"] or "")


@dataclass(frozen=True)
class Threaded:
    """A block as it will stand in the text, in place of the lines `first` to `last`."""

    first: int
    last: int
    outlines: tuple[str, ...]
    threads: tuple[str, ...]


def block_text(block: Threaded) -> str:
    """``<Parallel>`` to ``</Parallel>``: one newline before the first thread, none between threads, one
    before each ``</Thread>`` and one behind the last."""
    outlines = "\n".join(
        f"<Outline>{number}: {words}</Outline>" for number, words in enumerate(block.outlines, start=1)
    )
    threads = "".join(
        f"<Thread>\n{number}: {text}\n</Thread>" for number, text in enumerate(block.threads, start=1)
    )
    return f"<Parallel>\n<Outlines>\n{outlines}\n</Outlines>\n{threads}\n</Parallel>"


def parallel_text(parts: Parts, lines: Sequence[str], blocks: Sequence[Threaded]) -> str:
    """The whole solution; `blocks` in their order, `lines` those of the body."""
    written: list[str] = []
    at = 0
    for block in blocks:
        written += [*lines[at : block.first - 1], block_text(block)]
        at = block.last
    return parts.opening + "\n".join([*written, *lines[at:]]) + parts.rest


class Rejected(Exception):
    """The solution can't be made parallel. `reason` is counted; `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Finished:
    """A block that went all the way, with what was changed in its threads."""

    source: Block
    threaded: Threaded
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Way:
    """The end of a solution: its parallel text, or why there is none, and each block's end."""

    text: str | None
    reason: str | None
    detail: str
    kept: tuple[Finished, ...]
    dropped: tuple[Dropped, ...]
    sequential_characters: int
    """The length of the solution as it was."""

    def as_row(self) -> dict[str, Any]:
        kept = [
            {
                "lines": [block.threaded.first, block.threaded.last],
                "outlines": list(block.threaded.outlines),
                "threads": list(block.threaded.threads),
                "edits": [asdict(edit) for edit in block.edits],
            }
            for block in self.kept
        ]
        return {
            "outcome": "rejected" if self.text is None else "accepted",
            "reason": self.reason,
            "detail": self.detail,
            "text": self.text,
            "blocks": kept,
            "dropped": [asdict(block) for block in self.dropped],
            "statistics": self._statistics() if self.text is not None else None,
        }

    def _statistics(self) -> dict[str, float]:
        """Counts, and lengths in characters: no tokenizer is known here. The critical path is everything but
        what the threads beside each block's longest say."""
        assert self.text is not None
        threads = [block.threaded.threads for block in self.kept]
        characters = len(self.text)
        critical = characters - sum(map(saved_characters, threads))
        return {
            "blocks": len(threads),
            "threads": sum(map(len, threads)),
            "edits": sum(len(block.edits) for block in self.kept),
            "sequential_characters": self.sequential_characters,
            "characters": characters,
            "critical_characters": critical,
            "acceleration_ratio": round(1 - critical / characters, 6),
        }


async def make_parallel(
    questions: Questions, problem: str, solution: str, *, rule: Rule, self_check: bool
) -> Way:
    """Raises what asking raises where an answer can't be had. All else is an end of the solution."""
    dropped: list[Dropped] = []
    try:
        kept, text = await _convert(questions, problem, solution, rule, self_check, dropped)
    except Rejected as end:
        return Way(None, end.reason, end.detail, (), tuple(dropped), len(solution))
    return Way(text, None, "", tuple(kept), tuple(dropped), len(solution))


async def _convert(
    questions: Questions,
    problem: str,
    solution: str,
    rule: Rule,
    self_check: bool,
    dropped: list[Dropped],
) -> tuple[list[Finished], str]:
    parts = Parts.of(solution)
    lines = parts.body.split("\n")
    if _TAG.search(solution):
        raise Rejected("the solution has thread tags already")
    if len(parts.body.strip()) <= rule.min_saved or len([line for line in lines if line.strip()]) < 2:
        raise Rejected("the solution is too short")
    try:
        groups, conversation = await independent_parts(questions, problem, lines)
    except Unreadable as error:
        raise Rejected("the analysis can't be read", str(error)) from error
    blocks, left = cut(groups, lines, rule)
    dropped += left
    if self_check and blocks:
        try:
            failed = await failed_threads(questions, conversation, blocks)
        except Unreadable as error:
            raise Rejected("the self-check can't be read", str(error)) from error
        dropped += [_drop(blocks[place], "failed the self-check", why) for place, why in failed.items()]
        blocks = [block for place, block in enumerate(blocks) if place not in failed]
    ends = await all_of([_finish(questions, problem, lines, block, rule) for block in blocks])
    dropped += [end for end in ends if isinstance(end, Dropped)]
    kept = [end for end in ends if isinstance(end, Finished)]
    if not kept:
        raise Rejected("no independent parts were found" if not groups else "no block was kept")
    text = parallel_text(parts, lines, [block.threaded for block in kept])
    if wrong := _broken_rules(text):
        raise Rejected("the text breaks the rules of the format", wrong)
    return kept, text


def _broken_rules(text: str) -> str:
    """Returns what the filter of the training data finds, and what a rollout would space in another way."""
    wrong = faults(text, conclusions="refused", adjacent=True)
    try:
        text_segments(text)
    except ValueError as error:
        wrong.append(str(error))
    return "; ".join(wrong)


async def _finish(
    questions: Questions, problem: str, lines: Sequence[str], block: Block, rule: Rule
) -> Finished | Dropped:
    known = "\n".join(lines[: block.first - 1])
    try:
        threads, edits = await rewritten(questions, problem, known, block.threads)
    except Unreadable as error:
        return _drop(block, "the edits can't be applied", str(error))
    if saved_characters(threads) < rule.min_saved:
        return _drop(block, "too little is saved", f"{saved_characters(threads)} characters after the edits")
    try:
        words = await outlines(questions, problem, known, threads)
    except Unreadable as error:
        return _drop(block, "the outlines can't be used", str(error))
    return Finished(block, Threaded(block.first, block.last, tuple(words), threads), tuple(edits))


def _drop(block: Block, reason: str, detail: str) -> Dropped:
    return Dropped(((block.first, block.last),), reason, detail)
