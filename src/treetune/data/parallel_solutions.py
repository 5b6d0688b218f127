"""Makes parallel text of one sequential solution with a language model's help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from treetune.data import prompts
from treetune.data.asking import Questions, wait_for_all
from treetune.data.thread_blocks import (
    CONTROL_CHARACTER,
    BlockRule,
    DroppedBlock,
    LineRange,
    SolutionBlock,
    ask_for_failed_threads,
    ask_for_groups,
    cut_blocks,
    read_json_list,
    saved_characters,
)
from treetune.domains.math_tasks import find_formulas, sentence_ends
from treetune.exceptions import Rejected, Unreadable
from treetune.threads.format import TAGS, find_format_faults, text_segments

MOST_SENTENCES_OF_OUTLINE = 2
MOST_CHARACTERS_OF_OUTLINE = 600
"""Bounds of an outline."""

_THREAD_TAG = re.compile("|".join(re.escape(tag) for tag in TAGS))
_ANY_TAG = re.compile(r"</?[A-Za-z]+>")
_NUMBER_IN_TEXT = re.compile(r"\d+(?:[.,]\d+)*")
# In an outline a single capital letter before a full stop is a point or a case ("Find A. Then find B."), not
# an initial. Letters with a full stop after each ("e.g.", "U.S.", "π.χ.") are an abbreviation.
_ABBREVIATION = re.compile(
    r"(?:\b[a-z]\.[a-z]|\b(?:cf|vs|resp|Eqs?|Figs?|No|рис|табл|см|ср|гл|стр|напр|ур|теор)|(?-i:\b[а-яё])"
    r"|\b[\u03b1-\u03c9]\.[\u03b1-\u03c9])\.\Z",
    re.IGNORECASE,
)
_PARTS_OF_SOLUTION = re.compile(
    r"\A(?P<opening>\s*<think>\n?)?(?P<thought>.*?)(?P<ending></think>.*)?\Z", re.DOTALL
)


@dataclass(frozen=True)
class ThreadedBlock:
    """A block that takes the place of the lines `first` to `last`, which are counted from 1. `edits` are the
    changes in its threads."""

    first: int
    last: int
    outlines: tuple[str, ...]
    threads: tuple[str, ...]
    edits: tuple[dict[str, Any], ...] = ()


async def make_parallel(
    questions: Questions, problem: str, solution: str, *, rule: BlockRule, self_check: bool
) -> dict[str, Any]:
    """Returns the record of a solution: its parallel text, or the reason why there is none, and the blocks
    that were kept and those that were dropped.

    If a request to the model can't be answered, the request's error is raised.
    """
    dropped_blocks: list[DroppedBlock] = []  # `_convert_solution` adds to it, also if it raises Rejected
    kept_blocks: list[ThreadedBlock] = []
    text, reason, detail = None, None, ""
    try:
        kept_blocks, text = await _convert_solution(
            questions, problem, solution, rule, self_check, dropped_blocks
        )
    except Rejected as end:
        reason, detail = end.reason, end.detail
    return {
        "outcome": "rejected" if text is None else "accepted",
        "reason": reason,
        "detail": detail,
        "text": text,
        "blocks": [
            {
                "lines": [block.first, block.last],
                "outlines": list(block.outlines),
                "threads": list(block.threads),
                "edits": list(block.edits),
            }
            for block in kept_blocks
        ],
        "dropped": [asdict(block) for block in dropped_blocks],
        "statistics": None if text is None else _measure_solution(solution, text, kept_blocks),
    }


def _measure_solution(solution: str, text: str, blocks: Sequence[ThreadedBlock]) -> dict[str, float]:
    """Counts blocks, threads and edits, and measures lengths in characters, since there is no tokenizer here.

    The critical path of the parallel solution has only the longest thread of each block, because the threads
    of a block are written at the same time. The acceleration ratio is the share of the text that is
    not on the critical path.

    Args:
        solution: The solution before it was made parallel.
        text: The parallel solution.
        blocks: Its blocks of threads.
    """
    critical_characters = len(text) - sum(saved_characters(block.threads) for block in blocks)
    return {
        "blocks": len(blocks),
        "threads": sum(len(block.threads) for block in blocks),
        "edits": sum(len(block.edits) for block in blocks),
        "sequential_characters": len(solution),
        "characters": len(text),
        "critical_characters": critical_characters,
        "acceleration_ratio": round(1 - critical_characters / len(text), 6),
    }


async def _convert_solution(
    questions: Questions,
    problem: str,
    solution: str,
    rule: BlockRule,
    self_check: bool,
    dropped_blocks: list[DroppedBlock],
) -> tuple[list[ThreadedBlock], str]:
    """Returns the blocks of threads, and the parallel text. Raises Rejected if the solution has none.

    Args:
        dropped_blocks: A list to which the blocks that stay sequential are added, also if Rejected is raised.
    """
    parts = split_solution(solution)
    lines = parts.thought.split("\n")
    if _THREAD_TAG.search(solution):
        raise Rejected("the solution has thread tags already")
    lines_with_text = [line for line in lines if line.strip()]
    # A block saves fewer characters than the thought has, and two threads need two lines.
    if len(parts.thought.strip()) <= rule.min_saved or len(lines_with_text) < 2:
        raise Rejected("the solution is too short")
    try:
        groups, conversation = await ask_for_groups(questions, problem, lines)
    except Unreadable as error:
        raise Rejected("the analysis can't be read", str(error)) from error
    blocks, dropped_groups = cut_blocks(groups, lines, rule)
    dropped_blocks += dropped_groups
    if self_check and blocks:
        try:
            failed = await ask_for_failed_threads(questions, conversation, blocks)
        except Unreadable as error:
            raise Rejected("the self-check can't be read", str(error)) from error
        dropped_blocks += [
            _drop(blocks[number], "failed the self-check", reason) for number, reason in failed.items()
        ]
        blocks = [block for number, block in enumerate(blocks) if number not in failed]
    results = await wait_for_all([_finish_block(questions, problem, lines, block, rule) for block in blocks])
    dropped_blocks += [result for result in results if isinstance(result, DroppedBlock)]
    kept_blocks = [result for result in results if isinstance(result, ThreadedBlock)]
    if not kept_blocks:
        raise Rejected("no independent parts were found" if not groups else "no block was kept")
    text = write_parallel_text(parts, lines, kept_blocks)
    format_faults = find_format_faults(text, conclusions="refused", adjacent=True)
    try:
        text_segments(text)  # is stricter about white space than `find_format_faults`
    except ValueError as error:
        format_faults.append(str(error))
    if format_faults:
        raise Rejected("the text breaks the rules of the format", "; ".join(format_faults))
    return kept_blocks, text


async def _finish_block(
    questions: Questions, problem: str, lines: Sequence[str], block: SolutionBlock, rule: BlockRule
) -> ThreadedBlock | DroppedBlock:
    """Removes references between a block's threads, and writes an outline of each thread.

    Returns a `DroppedBlock` with the reason if the model's edits or outlines can't be used, or if the block
    saves too few characters. A block saves the characters of all its threads but the longest.
    """
    text_before = "\n".join(lines[: block.first - 1])
    try:
        threads, edits = await _remove_references(questions, problem, text_before, block.threads)
    except Unreadable as error:
        return _drop(block, "the edits can't be applied", str(error))
    if saved_characters(threads) < rule.min_saved:
        return _drop(block, "too little is saved", f"{saved_characters(threads)} characters after the edits")
    try:
        outlines = await _ask_for_outlines(questions, problem, text_before, threads)
    except Unreadable as error:
        return _drop(block, "the outlines can't be used", str(error))
    return ThreadedBlock(block.first, block.last, tuple(outlines), threads, tuple(edits))


def _drop(block: SolutionBlock, reason: str, detail: str) -> DroppedBlock:
    return DroppedBlock((LineRange(block.first, block.last),), reason, detail)


# References between threads: the model proposes replacements, which must fit exactly (`apply_edits`)


async def _remove_references(
    questions: Questions, problem: str, text_before: str, threads: Sequence[str]
) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Returns the threads' texts without references to each other, and the changes.

    If thread 2 referred to thread 1, a change is
    ``{"thread": 2, "sibling": 1, "source": "as above", "destination": "with 12"}``.

    Each thread is compared with every earlier one, since a text that was written from top to bottom refers
    back only. Raises Unreadable if the model's edits can't be applied.
    """
    numbers = range(1, len(threads) + 1)
    results = await wait_for_all(
        [_rewrite_thread(questions, problem, text_before, threads, number) for number in numbers]
    )
    rewritten_threads = tuple(text for text, _ in results)
    all_edits: list[dict[str, Any]] = []
    for _, edits_of_thread in results:
        all_edits += edits_of_thread
    return rewritten_threads, all_edits


async def _rewrite_thread(
    questions: Questions, problem: str, text_before: str, threads: Sequence[str], number: int
) -> tuple[str, list[dict[str, Any]]]:
    """Returns the text of the thread with this number without references to earlier threads, and the changes.
    Numbers of threads count from 1."""
    text = threads[number - 1]
    changes: list[dict[str, Any]] = []
    for earlier_number in range(1, number):
        earlier_thread = threads[earlier_number - 1]  # a reader of this thread doesn't see it
        question = prompts.REFERENCES.format(
            problem=problem, known=text_before, hidden=earlier_thread, part=text
        )
        read_edits = partial(_read_edits, text)
        (text, edits), _ = await questions.ask("references", [("user", question)], read_edits)
        for edit in edits:
            changes.append({"thread": number, "sibling": earlier_number, **edit._asdict()})
    return text, changes


class Edit(NamedTuple):
    """A replacement of a text, `source`, by another one, `destination`."""

    source: str
    destination: str


def _read_edits(text: str, answer: str) -> tuple[str, list[Edit]]:
    """Applies the replacements in an answer of the model to a text."""
    return apply_edits(text, read_json_list(answer))


def apply_edits(text: str, replacements: Sequence[object]) -> tuple[str, list[Edit]]:
    """Applies the model's replacements to a text. Returns the text, and the replacements that change it.

    Raises Unreadable if an item isn't a replacement, if its source doesn't occur exactly once, if its
    destination adds a tag or a control character, or if no text is left.
    """
    edits = []
    for item in replacements:
        source = item.get("source") if isinstance(item, dict) else None
        destination = item.get("destination") if isinstance(item, dict) else None
        if not isinstance(source, str) or not isinstance(destination, str) or not source:
            raise Unreadable(f"a replacement isn't a source and a destination text: {str(item)[:100]}")
        if _THREAD_TAG.search(destination):
            raise Unreadable(f"a destination holds a tag: {destination[:100]!r}")
        if set(CONTROL_CHARACTER.findall(destination)) - set(source):
            raise Unreadable(
                f"a destination brings in a line break or another control character: {destination[:100]!r};"
                " are backslashes doubled?"
            )
        # Not `str.count`, which skips a source that overlaps the one before it.
        count = sum(text.startswith(source, start) for start in range(len(text)))
        if count != 1:
            raise Unreadable(f"a source occurs {count} times in the part and not once: {source[:100]!r}")
        text = text.replace(source, destination)
        if source != destination:
            edits.append(Edit(source, destination))
    if not text.strip():
        raise Unreadable("nothing is left of the part")
    return text.strip(), edits


# Outlines: the work of each thread, announced before any of it is done, and without its results


async def _ask_for_outlines(
    questions: Questions, problem: str, text_before: str, threads: Sequence[str]
) -> list[str]:
    """Asks the model for an outline of each thread, and returns the outlines. Raises Unreadable if the model
    writes no valid ones.

    Args:
        text_before: The solution's text before the threads. A result that is in it or in the problem is
            known, so an outline gives nothing away with it.
    """
    parts = "\n\n".join(
        f'<part number="{number}">\n{text}\n</part>' for number, text in enumerate(threads, start=1)
    )
    question = prompts.OUTLINES.format(count=len(threads), problem=problem, known=text_before, parts=parts)

    def read_outlines(answer: str) -> list[str]:
        """Returns the outlines in the model's answer, which is a JSON list with one for each thread."""
        items = read_json_list(answer)
        # The model reads these messages. Its prompt calls outlines announcements, and threads pieces of work.
        if len(items) != len(threads):
            raise Unreadable(f"there are {len(items)} announcements for {len(threads)} pieces of work")
        known_text = f"{problem}\n{text_before}"
        return [
            _check_outline(item, f"announcement {number}", known_text, text, len(threads))
            for number, (item, text) in enumerate(zip(items, threads), start=1)
        ]

    outlines, _ = await questions.ask("outlines", [("user", question)], read_outlines)
    return outlines


def _check_outline(item: object, outline_name: str, known_text: str, thread: str, count: int) -> str:
    """Returns an outline from the model's answer. Raises Unreadable if the item isn't a valid outline, or
    gives away a result.

    Args:
        outline_name: The outline's name in the message.
        known_text: The problem and the solution's text before the threads.
        thread: The text of the outline's thread.
        count: The number of threads. Numbers up to `count` give away nothing: they may count threads.
    """
    if not isinstance(item, str) or not item.strip():
        raise Unreadable(f"{outline_name} isn't a text")
    text = item.strip()
    if CONTROL_CHARACTER.search(text):
        raise Unreadable(
            f"{outline_name} holds a line break or another control character; are backslashes doubled?"
        )
    if _ANY_TAG.search(text):
        raise Unreadable(f"{outline_name} holds a tag")
    if len(text) > MOST_CHARACTERS_OF_OUTLINE or count_sentences(text) > MOST_SENTENCES_OF_OUTLINE:
        raise Unreadable(f"{outline_name} is longer than {MOST_SENTENCES_OF_OUTLINE} short sentences")
    # An outline comes before its thread, and must not name a number that only the thread finds. In the
    # message, "there" means in the thread.
    numbers_of_thread = find_results(text, known_text, thread, count)
    if numbers_of_thread:
        raise Unreadable(
            f"{outline_name} names {', '.join(numbers_of_thread)}, which is only found there: it gives away a"
            " result"
        )
    return text


def count_sentences(text: str) -> int:
    """Counts the sentences of an outline in any script. A full stop within a number, a formula or an
    abbreviation ends no sentence."""
    ends = list(sentence_ends(text, find_formulas(text), _ABBREVIATION, before_numbers=True))
    return 1 + len(ends)


def find_results(outline: str, known_text: str, thread: str, count: int) -> list[str]:
    """Returns the numbers in an outline that its thread computes: they occur in the thread, and not in
    `known_text`, the text before it. Numbers up to `count` are ignored, since they may count the threads."""
    numbers_before = set(_NUMBER_IN_TEXT.findall(known_text)) | set(map(str, range(count + 1)))
    computed = set(_NUMBER_IN_TEXT.findall(thread)) - numbers_before
    return [number for number in dict.fromkeys(_NUMBER_IN_TEXT.findall(outline)) if number in computed]


# The text of a solution with threads, with the same white space as in rollouts


class SolutionParts(NamedTuple):
    """A solution in three parts. Only the thought may be cut into threads.

    Example: ``SolutionParts("<think>\\n", "a\\nb\\n", "</think>\\n\\nThe answer is a.")``.
    """

    opening: str
    thought: str
    ending: str


def split_solution(solution: str) -> SolutionParts:
    """Returns the parts of a solution. Without thought tags, all of it is thought."""
    match = _PARTS_OF_SOLUTION.match(solution)
    assert match is not None, "it matches every text"
    return SolutionParts(match["opening"] or "", match["thought"], match["ending"] or "")


def write_parallel_text(parts: SolutionParts, lines: Sequence[str], blocks: Sequence[ThreadedBlock]) -> str:
    """Returns the whole solution, with the blocks in place of their lines.

    A block has one newline before the first thread, none between threads, one before each ``</Thread>`` and
    one after the last thread.

    Args:
        parts: The parts of the solution.
        lines: The lines of its thought.
        blocks: The blocks, sorted by their lines.
    """
    written_parts: list[str] = []
    lines_written = 0
    for block in blocks:
        outlines = "\n".join(
            f"<Outline>{number}: {text}</Outline>" for number, text in enumerate(block.outlines, start=1)
        )
        threads = "".join(
            f"<Thread>\n{number}: {text}\n</Thread>" for number, text in enumerate(block.threads, start=1)
        )
        written_parts += lines[lines_written : block.first - 1]  # `first` counts from 1
        written_parts.append(f"<Parallel>\n<Outlines>\n{outlines}\n</Outlines>\n{threads}\n</Parallel>")
        lines_written = block.last
    written_parts += lines[lines_written:]
    return parts.opening + "\n".join(written_parts) + parts.ending
