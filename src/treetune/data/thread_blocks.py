"""Finds the independent parts of a solution, and cuts it there into blocks of threads."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from treetune.data import prompts
from treetune.data.asking import Questions
from treetune.domains.endpoints.settings import EndpointMessage
from treetune.exceptions import Unreadable
from treetune.threads.format import MOST_THREADS


class LineRange(NamedTuple):
    """The first and the last line of a thread, counted from 1. Example: `LineRange(first=4, last=9)`."""

    first: int
    last: int


ThreadGroup = list[LineRange]
"""The lines of the threads of a group. They don't need each other, so they may be written in parallel."""


class ThreadNumber(NamedTuple):
    """The number of a thread in its group, and the group's number, as prompts name them: both from 1."""

    group: int
    thread: int


_GROUP_TAG = re.compile(r"</?parallel>|</?thread>|<none\s*/>", re.IGNORECASE)
_LINE_RANGE = re.compile(r"\s*(?:lines?\s+)?(\d{1,9})(?:\s*[-–]\s*(\d{1,9}))?\s*", re.IGNORECASE)


def read_thread_groups(text: str) -> list[ThreadGroup]:
    """Returns the groups of an answer, each with the lines of its threads in the order of the answer.

    Text around the groups is ignored. Raises Unreadable for elements that aren't closed, are nested wrongly
    or contain anything else, and for an answer with neither a group nor ``<none/>``.

    Example: ``<parallel><thread>1-3</thread><thread>4</thread></parallel>`` is ``[[(1, 3), (4, 4)]]``.
    """
    groups: list[ThreadGroup] = []
    open_elements: list[str] = []  # the names of the elements that are open, the innermost last
    last_tag_end = 0
    says_none = False
    for match in _GROUP_TAG.finditer(text):
        tag, between = match[0].lower(), text[last_tag_end : match.start()]
        last_tag_end = match.end()
        # A group begins outside of all elements, and a thread directly in a group.
        opened_around_tag = [] if tag == "<parallel>" else ["parallel"]
        may_open_here = open_elements == opened_around_tag
        if tag.startswith("<none"):
            if open_elements:
                raise Unreadable(f"{tag} is inside of <{open_elements[-1]}>")
            says_none = True
        elif tag.startswith("</"):
            if not open_elements or open_elements[-1] != tag[2:-1]:
                raise Unreadable(f"{tag} closes nothing")
            if open_elements.pop() == "thread":
                groups[-1].append(_parse_lines(between))
            elif between.strip():
                raise Unreadable(f"a <parallel> contains {between.strip()[:60]!r} in addition to its threads")
        elif not may_open_here:
            element = f"inside of <{open_elements[-1]}>" if open_elements else "outside of <parallel>"
            raise Unreadable(f"{tag} is {element}")
        else:
            if open_elements and between.strip():
                raise Unreadable(f"a <parallel> contains {between.strip()[:60]!r} in addition to its threads")
            open_elements.append(tag[1:-1])
            if tag == "<parallel>":
                groups.append([])
    if open_elements:
        raise Unreadable(f"<{open_elements[-1]}> isn't closed")
    if not groups and not says_none:
        raise Unreadable("it contains neither <parallel> nor <none/>")
    return groups


def _parse_lines(text: str) -> LineRange:
    match = _LINE_RANGE.fullmatch(text)
    if match is None:
        raise Unreadable(f"a <thread> holds {text[:60]!r} and not a first and last line such as 4-9")
    return LineRange(first=int(match[1]), last=int(match[2] or match[1]))


CONTROL_CHARACTER = re.compile(r"[\x00-\x1f]")
"""Matches control characters. LaTeX whose backslashes aren't doubled in JSON turns into such characters: the
``\\f`` of ``\\frac`` into a form feed, and the ``\\t`` of ``\\times`` into a tab."""


def read_json_list(text: str) -> list[Any]:
    """Returns the JSON list in an answer, which may be between other text or in a code block.

    Raises Unreadable where there is none.
    """
    begin, end = text.find("["), text.rfind("]")
    if begin < 0 or end < begin:
        raise Unreadable("it contains no JSON list")
    try:
        items = json.loads(text[begin : end + 1])
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the text between the first [ and the last ] is not JSON: {error}") from error
    assert isinstance(items, list), "JSON that begins with a bracket is a list"
    return items


@dataclass(frozen=True)
class BlockRule:
    """The conditions under which a block of threads is kept."""

    min_saved: int
    """The fewest characters that a block has to save (`saved_characters`)."""
    max_threads: int = MOST_THREADS
    """The most threads of a block."""


@dataclass(frozen=True)
class SolutionBlock:
    """A stretch of a solution that is cut into threads."""

    first: int
    """The number of its first line, counted from 1 for the solution's first line."""
    last: int
    """The number of its last line."""
    threads: tuple[str, ...]
    """The text of each thread, without white space around it."""
    lines: tuple[LineRange, ...]
    """The first and the last line of each thread."""


@dataclass(frozen=True)
class DroppedBlock:
    """A block that stays sequential text. `reason` is one of a few texts, which the summary counts; `detail`
    says more about this block."""

    lines: tuple[LineRange, ...]
    reason: str
    detail: str = ""


def cut_blocks(
    groups: Sequence[ThreadGroup], lines: Sequence[str], rule: BlockRule
) -> tuple[list[SolutionBlock], list[DroppedBlock]]:
    """Returns the groups of threads to keep, as blocks in the solution's order, and the groups to drop.

    A thread is a part of the solution, given by its first and last line. The threads of a group don't need
    each other. A group becomes a block and is kept if all of this holds:

    * Its lines are in the solution, after the block that was kept before it.
    * Its threads follow each other, with nothing but blank lines between them.
    * At least two of its threads have text, and at most `rule.max_threads`.
    * Its threads save at least `rule.min_saved` characters (`saved_characters`).
    """
    blocks: list[SolutionBlock] = []
    dropped = []
    # In the order of their first lines. A group without threads comes first, and `_cut_block` drops it.
    for group in sorted(groups, key=lambda group: group[0] if group else LineRange(0, 0)):
        last_kept = blocks[-1].last if blocks else 0
        block = _cut_block(group, lines, rule, last_kept)
        if isinstance(block, SolutionBlock):
            blocks.append(block)
        else:
            dropped.append(block)
    return blocks, dropped


def _cut_block(
    group: ThreadGroup, lines: Sequence[str], rule: BlockRule, last_kept: int
) -> SolutionBlock | DroppedBlock:
    """Cuts a group of threads out of the solution's lines, or says why the group is dropped.

    Args:
        group: The first and last line of each thread.
        last_kept: The last line of all blocks that were kept so far; 0 without any.
    """

    def drop(reason: str, detail: str = "") -> DroppedBlock:
        return DroppedBlock(tuple(group), reason, detail)

    for first, last in group:
        if not 1 <= first <= last <= len(lines):
            return drop("lines that are not there", f"{first}-{last} of {len(lines)}")
    for (first, last), (next_first, _) in pairwise(group):
        if next_first <= last:
            return drop("threads overlap or are in disorder", f"{next_first} follows {first}-{last}")
        lines_between = lines[last : next_first - 1]
        if any(line.strip() for line in lines_between):
            return drop("lines between threads that are in none", f"{last + 1}-{next_first - 1}")
    if group and group[0].first <= last_kept:
        return drop("overlaps another block", f"{group[0].first} is before {last_kept + 1}")
    texts = ["\n".join(lines[first - 1 : last]).strip() for first, last in group]
    threads = tuple(text for text in texts if text)
    if len(threads) < 2:
        return drop("fewer than two threads with text")
    if len(threads) > rule.max_threads:
        return drop("too many threads", f"{len(threads)} of at most {rule.max_threads}")
    saved = saved_characters(threads)
    if saved < rule.min_saved:
        return drop("too little is saved", f"{saved} characters of {rule.min_saved}")
    lines_of_threads = tuple(thread_lines for thread_lines, text in zip(group, texts) if text)
    return SolutionBlock(group[0].first, group[-1].last, threads, lines_of_threads)


def saved_characters(threads: Sequence[str]) -> int:
    """Counts the characters that parallel threads save: the characters of all threads but the longest. These
    other threads are written at the same time as the longest one, and take no additional time.

    Example: threads of 30, 20 and 10 characters save 30.
    """
    lengths = [len(thread) for thread in threads]
    return sum(lengths) - max(lengths)


async def ask_for_groups(
    questions: Questions, problem: str, lines: Sequence[str]
) -> tuple[list[ThreadGroup], list[EndpointMessage]]:
    """Asks the model for groups of threads, and returns the groups and the conversation about them.

    A group has parts of the solution that don't need each other. Such a part is a thread, which is named by
    its first and last line.
    """
    numbered = "\n".join(f"{number}| {line}" for number, line in enumerate(lines, start=1))
    conversation: list[EndpointMessage] = []
    for step, task in (
        ("steps", prompts.STEPS.format(problem=problem, numbered=numbered, count=len(lines))),
        ("substeps", prompts.SUBSTEPS),
        ("groups", prompts.GROUPS),
        ("subgroups", prompts.SUBGROUPS),
    ):
        # These answers aren't used: the model reasons step by step before it names the lines. So any text is
        # accepted (`str`).
        _, conversation = await questions.ask(step, [*conversation, ("user", task)], str)
    return await questions.ask("ranges", [*conversation, ("user", prompts.RANGES)], read_thread_groups)


async def ask_for_failed_threads(
    questions: Questions, conversation: Sequence[EndpointMessage], blocks: Sequence[SolutionBlock]
) -> dict[int, str]:
    """Asks the model to check all threads. Returns the blocks with a thread that the model rejects: the
    reasons, by the block's index in `blocks`."""
    shown = "\n\n".join(_describe_block(number, block) for number, block in enumerate(blocks, start=1))
    threads: set[ThreadNumber] = set()
    for group, block in enumerate(blocks, start=1):
        threads |= {ThreadNumber(group, thread) for thread in range(1, len(block.threads) + 1)}
    task: EndpointMessage = ("user", prompts.CHECK.format(blocks=shown))
    read = partial(_read_self_check, threads)
    failed, _ = await questions.ask("check", [*conversation, task], read)
    reasons: dict[int, list[str]] = {}
    for (group, thread), note in sorted(failed.items()):
        reasons.setdefault(group - 1, []).append(f"thread {thread}: {note}")
    return {block_index: "; ".join(notes) for block_index, notes in reasons.items()}


def _read_self_check(threads: Set[ThreadNumber], text: str) -> dict[ThreadNumber, str]:
    """Returns the model's notes on the threads that failed. Raises Unreadable unless the model's answer has
    one verdict on each thread."""
    notes_on_failed: dict[ThreadNumber, str] = {}
    without_verdict = set(threads)
    for item in read_json_list(text):
        verdict = item if isinstance(item, dict) else {}  # {} is on thread 0 of group 0, which is unknown
        thread = ThreadNumber(verdict.get("group", 0), verdict.get("thread", 0))
        if thread not in without_verdict:
            raise Unreadable(
                f"a verdict is on an unknown thread, or on one for the second time: {str(item)[:100]}"
            )
        if not isinstance(verdict.get("pass"), bool):
            raise Unreadable(
                f"the verdict on group {thread.group}, thread {thread.thread} is neither true nor false"
            )
        without_verdict.remove(thread)
        if not verdict["pass"]:
            notes_on_failed[thread] = str(verdict.get("note", ""))[:500]
    if without_verdict:
        first = min(without_verdict)
        raise Unreadable(f"there is no verdict on group {first.group}, thread {first.thread}")
    return notes_on_failed


def _describe_block(number: int, block: SolutionBlock) -> str:
    """Returns a block's lines and the beginning of each of its threads, for the model's self-check."""
    described = [f"Group {number}, lines {block.first}-{block.last}:"]
    for i, ((first, last), text) in enumerate(zip(block.lines, block.threads), start=1):
        described.append(f"  thread {i}, lines {first}-{last}: {_beginning(text)}")
    return "\n".join(described)


def _beginning(text: str) -> str:
    """Returns the first 80 characters of a text, on one line."""
    on_one_line = " ".join(text.split())
    return on_one_line if len(on_one_line) <= 80 else f"{on_one_line[:80]} …"
