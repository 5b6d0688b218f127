"""One solution's way from sequential to parallel text, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treetune_data.analysis import failed_threads, independent_parts
from treetune_data.asking import Questions, Unreadable, all_of
from treetune_data.blocks import Block, Dropped, Rule, cut, saved_characters
from treetune_data.outlines import outlines
from treetune_data.parallel_text import Parts, Threaded, parallel_text
from treetune_data.references import Edit, rewritten
from treetune_threads.faults import faults
from treetune_threads.grammar import text_segments
from treetune_threads.tags import TAGS

_TAG = re.compile("|".join(map(re.escape, TAGS)))


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
    """What became of a solution: its parallel text, or why there is none, and each block's end."""

    text: str | None
    reason: str | None
    detail: str
    kept: tuple[Finished, ...]
    dropped: tuple[Dropped, ...]
    sequential_characters: int
    """Of the solution as it was."""

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
    """What the filter of the training data finds, and what a rollout would space in another way."""
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
