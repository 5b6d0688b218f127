r"""The text of answers with threads: tags, grammar, faults, and demonstrations.

The grammar is ThreadWeaver's. The white space is that of the texts which a rollout injects between sampled
parts::

    answer      := (text | block)*
    block       := "<Parallel>" WS "<Outlines>" (WS outline)+ WS "</Outlines>" "\n"
                   thread+ "\n" ["<Conclusion>" "\n" text "</Conclusion>" WS] "</Parallel>"
    outline     := "<Outline>" NUMBER ":" text "</Outline>"
    thread      := "<Thread>" "\n" NUMBER ":" answer "\n</Thread>"
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from treetune.contracts import Finding
from treetune.rollouts.demonstrations import DemonstrationFormat
from treetune.vocabulary import Branch, Problem, Segment, TextCodec, concatenate, token_array

TAG_NAMES = ("Think", "Parallel", "Outlines", "Outline", "Thread", "Conclusion")
TAGS = tuple(itertools.chain.from_iterable((f"<{word}>", f"</{word}>") for word in TAG_NAMES))
"""The twelve tags, in the order in which they are added to a tokenizer: ``<Think>``, ``</Think>``, …"""


@dataclass(frozen=True)
class TagIds:
    """The ids of the tags that the rollout injects, stops at or counts. Each tag is one token."""

    parallel: int
    end_parallel: int
    outlines: int
    end_outlines: int
    thread: int
    end_thread: int

    @staticmethod
    def of(encode: Callable[[str], Sequence[int]]) -> TagIds | None:
        """Returns the ids of the tags, given the tokenizer's function from text to ids.

        Returns None if the tokenizer encodes a tag as several tokens or several tags as the same token, or if
        it can't encode a tag.
        """
        ids = []
        for tag in ("<Parallel>", "</Parallel>", "<Outlines>", "</Outlines>", "<Thread>", "</Thread>"):
            try:
                encoded = encode(tag)
            except ValueError:
                return None
            if len(encoded) != 1:
                return None
            ids.append(encoded[0])
        # A tokenizer without the tags may encode all of them as its unknown token.
        return TagIds(*ids) if len(set(ids)) == len(ids) else None


_TAG_OF_A_BLOCK = re.compile("|".join(re.escape(tag) for tag in TAGS if "Think" not in tag))
_OUTLINE_WITH_NUMBER = re.compile(r"<Outline> ?([0-9]+(?:\.[0-9]+)*):")
_WHITE_SPACE = re.compile(r"\s*")
_EXCERPT_CHARACTERS = 30
MOST_NESTED_BLOCKS = 100
"""The largest depth of blocks that `text_segments` reads. Its reader is recursive, and Python limits
recursion."""


@dataclass(frozen=True)
class TextSegment:
    r"""A part of a written answer: one sample of the model, or the text that is injected between two samples.
    It becomes a `Segment`.

    Example: ``TextSegment("<Thread>\n1:", injected=True, branch=((0, 0),))``.
    """

    text: str
    injected: bool
    branch: Branch


@dataclass(frozen=True)
class OutlineNumbers:
    """The numbers of a block's outlines.

    Example: the outlines 1, 2 and 2 give ``OutlineNumbers(("1", "2"), duplicates=1)``.
    """

    numbers: tuple[str, ...]
    """The different numbers, in the order in which they first appear."""
    duplicates: int
    """How many outlines repeat the number of an earlier outline."""


def text_segments(text: str) -> list[TextSegment]:
    """Cuts a written answer into the segments that a rollout would have made. Joined, they are the text.

    Sampled segments are the text up to ``</Outlines>``, each thread's text up to its ``</Thread>``, and the
    text from ``</Parallel>`` on. Injected segments are the newlines and thread headers between them, and the
    opening tag of a conclusion. Blocks within threads are cut in the same way. A text without blocks is one
    segment, and an empty text has none.

    Raises:
        ValueError: The text has another format or other white space than a rollout would inject. A model that
            learned from it would expect other text than the rollout injects.
    """
    return _Reader(text).read()


def has_threads(text: str) -> bool:
    """Returns whether the text has any tag of a block (`TAGS` without those of thoughts)."""
    return _TAG_OF_A_BLOCK.search(text) is not None


def outline_numbers(text: str) -> OutlineNumbers:
    """Reads the numbers of the threads to open from a text that ends with ``</Outlines>``.

    The reading is lenient, since a model wrote the text. Only the text after the last ``<Outlines>`` is read,
    or all text if there is none. There, every ``<Outline>`` counts that begins with a (dotted) number and a
    colon.
    """
    written_numbers = _OUTLINE_WITH_NUMBER.findall(text.rpartition("<Outlines>")[2])
    numbers = tuple(dict.fromkeys(written_numbers))
    return OutlineNumbers(numbers, len(written_numbers) - len(numbers))


class _Reader:
    """Reads a text from the beginning to the end, and cuts it where a rollout would stop or inject."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0  # the text before this position has been read
        self._cut_at = 0  # the text before this position is in `_segments` already
        self._segments: list[TextSegment] = []

    def read(self) -> list[TextSegment]:
        """Returns the segments of the whole text. Raises ValueError where the text breaks the grammar."""
        main_branch = ()  # the branch of the text outside of all threads
        self._read_line(main_branch)
        if self._at < len(self._text):
            raise self._format_error("no thread is open", "a <Thread> for every </Thread>")
        self._cut(main_branch)
        return self._segments

    def _read_line(self, branch: Branch) -> None:
        """Reads the text and blocks of a thread, or of the text outside of all threads.

        Stops before ``</Thread>``, or at the end of the text. Outside of all threads, `branch` is empty.
        """
        blocks = 0  # the number of blocks that have been read in this branch
        while (tag := self._next_tag()) == "<Parallel>":
            self._read_block(branch, blocks)
            blocks += 1
        if tag not in ("</Thread>", ""):
            where = "in a thread that isn't closed" if branch else "outside of a block"
            raise self._format_error(f"{tag} is {where}", "</Thread> before it" if branch else "<Parallel>")

    def _read_block(self, branch: Branch, block: int) -> None:
        """Reads a block, from its ``<Parallel>`` to its ``</Parallel>``.

        Args:
            branch: The branch of the text that contains the block.
            block: The number of the block within this branch, from 0.
        """
        if len(branch) == MOST_NESTED_BLOCKS:
            raise self._format_error(
                f"threads are more than {MOST_NESTED_BLOCKS} deep", "fewer blocks within blocks"
            )
        self._at += len("<Parallel>")
        self._skip_space()
        numbers = self._read_outlines()
        # `_cut` makes a segment of the text since the last cut: a sampled or an injected one.
        self._cut(branch)
        self._expect("\n", "one newline between </Outlines> and the first <Thread>")
        self._cut(branch, injected=True)
        for thread, number in enumerate(numbers):
            branch_of_thread = (*branch, (block, thread))
            self._expect(
                f"<Thread>\n{number}:",
                "a thread for each outline, in their order, each directly after the one before it, its"
                " number and a colon on a line of its own",
            )
            self._cut(branch_of_thread, injected=True)
            self._read_line(branch_of_thread)
            self._read_end_of_thread(number)
            self._cut(branch_of_thread)
        self._read_end_of_block(branch)

    def _read_outlines(self) -> list[str]:
        """Reads from ``<Outlines>`` to ``</Outlines>``, and returns the numbers of the outlines."""
        self._expect("<Outlines>", "<Outlines> after <Parallel>")
        begin = self._at
        written_numbers = []
        self._skip_space()
        while self._text.startswith("<Outline>", self._at):
            match = _OUTLINE_WITH_NUMBER.match(self._text, self._at)
            if match is None:
                raise self._format_error(
                    "an outline has no number", "<Outline>1: … with a number and a colon"
                )
            written_numbers.append(match[1])
            self._at = match.end()
            if self._next_tag() != "</Outline>":
                raise self._format_error(
                    f"outline {match[1]} isn't closed", "</Outline> at its end, no tags in it"
                )
            self._at += len("</Outline>")
            self._skip_space()
        self._expect("</Outlines>", "</Outlines> after the outlines, and only white space between them")
        # The numbers are read again, in the way of a rollout. For two outlines with the same number, a
        # rollout opens a single thread, so a repeated number is a fault.
        numbers = outline_numbers(self._text[begin : self._at])
        if not written_numbers or numbers.duplicates:
            fault = "two outlines have the same number" if written_numbers else "there are no outlines"
            raise self._format_error(fault, "at least one outline, each with a number of its own")
        return written_numbers

    def _read_end_of_thread(self, number: str) -> None:
        """Reads ``</Thread>``, which is at the beginning of a line."""
        if not self._text.startswith("</Thread>", self._at):
            raise self._format_error(f"thread {number} isn't closed", "</Thread> on a line of its own")
        if self._text[self._at - 1] != "\n":
            raise self._format_error(f"thread {number} ends within a line", "a newline before </Thread>")
        self._at += len("</Thread>")

    def _read_end_of_block(self, branch: Branch) -> None:
        """Reads from the last thread to the end of the block, with the conclusion if there is one."""
        correct_form = "one newline after the last thread, then </Parallel>, or <Conclusion> and a newline"
        # The rollout injects the text after the last thread (`Glue.join`): a newline, and with conclusions
        # also <Conclusion> and another newline. This text is cut off as an injected segment. The model
        # samples what follows, so </Parallel> is read after the cut and belongs to the next segment.
        self._expect("\n", correct_form)
        if self._text.startswith("</Parallel>", self._at):
            self._cut(branch, injected=True)
            self._at += len("</Parallel>")
            return
        self._expect("<Conclusion>\n", correct_form)
        self._cut(branch, injected=True)
        if self._next_tag() != "</Conclusion>":
            raise self._format_error("a conclusion isn't closed", "</Conclusion> at its end, no tags in it")
        self._at += len("</Conclusion>")
        self._skip_space()
        self._expect("</Parallel>", "</Parallel> after </Conclusion>")

    def _next_tag(self) -> str:
        """Advances to the beginning of the next tag, and returns the tag. Without a further tag, advances to
        the end of the text, and returns an empty text."""
        match = _TAG_OF_A_BLOCK.search(self._text, self._at)
        self._at = match.start() if match else len(self._text)
        return match[0] if match else ""

    def _skip_space(self) -> None:
        match = _WHITE_SPACE.match(self._text, self._at)
        assert match is not None, "the pattern matches the empty text, too"
        self._at = match.end()

    def _expect(self, expected: str, correct_form: str) -> None:
        """Reads the text `expected`. If another text is there, raises an error that describes the correct
        form."""
        if not self._text.startswith(expected, self._at):
            raise self._format_error(f"{expected!r} is missing", correct_form)
        self._at += len(expected)

    def _cut(self, branch: Branch, *, injected: bool = False) -> None:
        """Makes a segment of the text since the last cut, if there is any."""
        if self._at > self._cut_at:
            self._segments.append(TextSegment(self._text[self._cut_at : self._at], injected, branch))
        self._cut_at = self._at

    def _format_error(self, fault: str, correct_form: str) -> ValueError:
        """Returns an error about the position that has been reached, for the caller to raise."""
        line = self._text.count("\n", 0, self._at) + 1
        text_before = self._text[max(0, self._at - _EXCERPT_CHARACTERS) : self._at]
        text_after = self._text[self._at : self._at + _EXCERPT_CHARACTERS]
        return ValueError(
            f"a text with threads has another format than rollouts give it: {fault} in line {line} "
            f"(character {self._at}), between {text_before!r} and {text_after!r}; what would be right:"
            f" {correct_form}"
        )


MOST_THREADS = 50
"""The largest number of threads of a block in ThreadWeaver's public filter."""

Conclusions = Literal["allowed", "required", "refused"]

_PARALLEL_TAG = re.compile(r"</?Parallel>")
_NUMBER_AND_COLON = re.compile(r"\s*([0-9]{1,9}):")
"""The number and the colon at the beginning of an outline or a thread. The number has at most 9 digits: a
model may write thousands, which Python's `int` refuses."""
_PART_OPENING = re.compile(r"<(Outline|Thread|Conclusion)>")
_SIGN_OF_PART = {"Outline": "1", "Thread": "2", "Conclusion": "3"}
_DIGITS_TO_FILLER = str.maketrans("123", "xxx")
"""Replaces the digits that the text itself has, so that every digit of a skeleton stands for a part."""
_ORDER_OF_PARTS = re.compile(r"\s*<Outlines>[1\s]*+</Outlines>\s*2[2\s]*+3?\s*")
"""Matches the skeleton (`_split_parts`) of a block whose parts are in the right order. ``*+`` repeats without
backtracking, since backtracking would take quadratic time in a text that a model wrote."""
_SPACE_BETWEEN_THREADS = re.compile(r"2\s+2")
"""Matches white space between two threads in the skeleton of a block, where each 2 is a thread."""
_FILLER = "x"
"""Replaces each character of a block that has been checked, so that the thread around it has no tags."""


def find_format_faults(
    text: str,
    *,
    nesting: bool = False,
    conclusions: Conclusions = "allowed",
    adjacent: bool = False,
    most_threads: int = MOST_THREADS,
) -> list[str]:
    """Returns a message for each place where a text breaks a rule of ThreadWeaver's format (version 2).

    The rules are: there are as many ``<Parallel>`` as ``</Parallel>``, and no block is within another. A
    block has outlines, then as many threads, then perhaps a conclusion that isn't empty. Only white space is
    between these parts, and no part has tags in it. Each outline and each thread begins with its number and a
    colon. The outlines have the numbers 1, 2, 3, … in this order, and so have the threads.

    This check is more lenient than `text_segments` about white space, and stricter about numbers.

    Args:
        text: The text of an answer.
        nesting: Whether blocks may be within threads.
        conclusions: Whether blocks may, must or must not have a conclusion.
        adjacent: Whether white space between threads is a fault, too.
        most_threads: The largest number of threads of a block.

    Returns:
        The faults, such as ``["the block at character 12 has an empty conclusion"]``; empty for a well-formed
        text and for a text without blocks.
    """
    messages = []
    openings, closings = text.count("<Parallel>"), text.count("</Parallel>")
    if openings != closings:
        messages.append(f"there are {openings} <Parallel> and {closings} </Parallel>")
    begins_of_open_blocks: list[int] = []
    # Innermost blocks close first. When a block has been checked, filler replaces it, so that the thread
    # around it has no tags. The filler has the same length as the block, so that positions stay the same.
    for match in _PARALLEL_TAG.finditer(text):
        if match[0] == "<Parallel>":
            begins_of_open_blocks.append(match.start())
        elif begins_of_open_blocks:
            begin = begins_of_open_blocks.pop()
            block_name = f"the block at character {begin}"
            if begins_of_open_blocks and not nesting:
                messages.append(f"{block_name} is within another")
            body = text[begin + len("<Parallel>") : match.start()]
            for fault in _faults_of_block(body, conclusions, adjacent, most_threads):
                messages.append(f"{block_name} {fault}")
            text = text[:begin] + _FILLER * (match.end() - begin) + text[match.end() :]
    outside = _TAG_OF_A_BLOCK.search(text)
    # If the counts are unequal, a block that was never closed still has its tags. That is no further fault:
    # the counts are reported above.
    if outside and openings == closings:
        messages.append(f"{outside[0]} at character {outside.start()} is outside of all blocks")
    return messages


def _faults_of_block(body: str, conclusions: Conclusions, adjacent: bool, most_threads: int) -> list[str]:
    """Returns what is wrong with the text between ``<Parallel>`` and ``</Parallel>``."""
    counts = [body.count(tag) for tag in ("<Outline>", "</Outline>", "<Thread>", "</Thread>")]
    if len(set(counts)) > 1 or not counts[0]:
        # Nothing more can be checked: it isn't clear where the parts begin and end.
        return [
            "has {} <Outline>, {} </Outline>, {} <Thread> and {} </Thread>, which should be equally many, "
            "and at least one".format(*counts)
        ]
    messages = []
    if counts[0] > most_threads:
        messages.append(f"has {counts[0]} threads, more than {most_threads}")
    # The skeleton is the block's text with a digit in place of each part: 1 for an outline, 2 for a thread,
    # 3 for a conclusion.
    parts, skeleton = _split_parts(body)
    messages += _faults_of_parts("outline", [text for name, text in parts if name == "Outline"])
    messages += _faults_of_parts("thread", [text for name, text in parts if name == "Thread"])
    openings, closings = body.count("<Conclusion>"), body.count("</Conclusion>")
    conclusion = next((text for name, text in parts if name == "Conclusion"), None)
    if openings != closings or openings > 1:
        messages.append(
            f"has {openings} <Conclusion> and {closings} </Conclusion>, which should be one each or none"
        )
    elif conclusions == "refused" and openings:
        messages.append("has a conclusion")
    elif conclusions == "required" and not openings:
        messages.append("has no conclusion")
    elif openings and conclusion is None:
        messages.append("has </Conclusion> before <Conclusion>")
    elif conclusion is not None and not conclusion.strip():
        messages.append("has an empty conclusion")
    elif conclusion is not None:
        messages += _faults_of_tags("the conclusion", conclusion)
    if not _ORDER_OF_PARTS.fullmatch(skeleton):
        messages.append(
            "is not <Outlines>, outlines, </Outlines>, threads and perhaps a conclusion, in this order"
        )
    elif adjacent and _SPACE_BETWEEN_THREADS.search(skeleton):
        messages.append("has white space between threads")
    return messages


def _split_parts(body: str) -> tuple[list[tuple[str, str]], str]:
    """Returns the parts of a block, and its skeleton.

    The parts are its outlines, threads and conclusions: pairs of a name, such as ``"Outline"``, and the text
    between the tags. The skeleton is the block's text with each part replaced by one digit (`_SIGN_OF_PART`).

    Example: a block of two outlines and two threads has the skeleton ``<Outlines>11</Outlines>22``.

    The text is read in one pass: after a tag that is never closed, its closing tag isn't searched for again,
    since that would take quadratic time.
    """
    parts: list[tuple[str, str]] = []
    skeleton: list[str] = []
    never_closed: set[str] = set()
    position = 0
    while (opening := _PART_OPENING.search(body, position)) is not None:
        name = opening[1]
        closing = f"</{name}>"
        end = -1 if name in never_closed else body.find(closing, opening.end())
        if end < 0:
            # The opening tag stays in the skeleton, so `_ORDER_OF_PARTS` won't match it.
            never_closed.add(name)
            # `_DIGITS_TO_FILLER` replaces the digits of the text itself, since a digit stands for a part.
            skeleton.append(body[position : opening.end()].translate(_DIGITS_TO_FILLER))
            position = opening.end()
            continue
        parts.append((name, body[opening.end() : end]))
        skeleton += [body[position : opening.start()].translate(_DIGITS_TO_FILLER), _SIGN_OF_PART[name]]
        position = end + len(closing)
    skeleton.append(body[position:].translate(_DIGITS_TO_FILLER))
    return parts, "".join(skeleton)


def _faults_of_parts(part: Literal["outline", "thread"], texts: list[str]) -> list[str]:
    """Returns what is wrong with the numbers and tags of a block's outlines, or threads."""
    messages = []
    numbers = []
    for position, text in enumerate(texts, start=1):
        match = _NUMBER_AND_COLON.match(text)
        if match is None:
            messages.append(f"has {part} {position} without a number and a colon at its beginning")
        else:
            numbers.append(int(match[1]))
        messages += _faults_of_tags(f"{part} {position}", text)
    # The order is only checked if every part has a number. A missing number is reported above.
    if len(numbers) == len(texts) and numbers != list(range(1, len(texts) + 1)):
        listed = ", ".join(map(str, numbers))
        messages.append(f"numbers its {part}s {listed}, which should be 1 to {len(texts)} in this order")
    return messages


def _faults_of_tags(part_name: str, text: str) -> list[str]:
    """Returns the fault that a part has a tag in it, or an empty list if it has none."""
    tag = _TAG_OF_A_BLOCK.search(text)
    return [] if tag is None else [f"has {tag[0]} in {part_name}"]


_TAGS_ARE_NOT_SINGLE_TOKENS = "and the tokenizer takes several tokens for their tags, or has none"
_REMEDY = f"name them there: {', '.join(TAGS)}"


@DemonstrationFormat.register("threads")
class ThreadedDemonstration(DemonstrationFormat):
    """Demonstrations with threads, which become the segments that `parallel_threads` would have made."""

    @override
    def check(self, texts: Sequence[str], single_tokens: frozenset[str] | None) -> Iterator[Finding]:
        if single_tokens is None:  # the tokenizer's single tokens are not known yet
            return
        if single_tokens.issuperset(TAGS):
            return
        if any(has_threads(text) for text in texts):
            yield Finding(
                f"demonstrations of this task have threads, {_TAGS_ARE_NOT_SINGLE_TOKENS}",
                "$.model.added_tokens",
                _REMEDY,
            )

    @override
    def segments(self, codec: TextCodec, problem: Problem, text: str) -> tuple[Segment, ...] | None:
        """Returns the segments of a demonstration as a rollout would have made them; None if it has no
        threads."""
        if not has_threads(text):
            return None
        if TagIds.of(codec.encode) is None:
            raise ValueError(
                f"the demonstration of problem {problem.id!r} has threads, {_TAGS_ARE_NOT_SINGLE_TOKENS}:"
                f" name them in model.added_tokens ({', '.join(TAGS)})"
            )
        try:
            parts = text_segments(text)
        except ValueError as error:
            raise ValueError(f"the demonstration of problem {problem.id!r} can't be cut: {error}") from error
        # The first part follows the prompt. Each other part is encoded by itself: in a rollout, too, no token
        # crosses the boundary between sampled and injected text.
        encoded = [codec.encode_answer(problem, parts[0].text)]
        encoded += [token_array(codec.encode(part.text)) for part in parts[1:]]
        encoded[-1] = concatenate([encoded[-1], token_array([codec.eos_id])])
        return tuple(
            Segment(token_ids=ids, origin="injected" if part.injected else "sampled", branch=part.branch)
            for part, ids in zip(parts, encoded, strict=True)
        )
