"""What an answer with threads looks like as text, and which parts of it no model writes.

::

    answer      := (text | block)*
    block       := "<Parallel>" WS "<Outlines>" (WS outline)+ WS "</Outlines>" "\\n"
                   thread+ "\\n" ["<Conclusion>" "\\n" text "</Conclusion>" WS] "</Parallel>"
    outline     := "<Outline>" NUMBER ":" text "</Outline>"
    thread      := "<Thread>" "\\n" NUMBER ":" answer "\\n</Thread>"

The grammar is ThreadWeaver's; what a rollout injects between sampled parts fixes the white space.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from treetune.vocabulary import Branch
from treetune_threads.tags import TAGS

_STRUCTURE = re.compile("|".join(re.escape(tag) for tag in TAGS if "Think" not in tag))
_NUMBERED = re.compile(r"<Outline> ?([0-9]+(?:\.[0-9]+)*):")
_SPACE = re.compile(r"\s*")
_EXCERPT = 30


@dataclass(frozen=True)
class TextSegment:
    """A part of a written answer that enters it at once: one sample of the model's, or what is injected
    between two (the same words as of a `Segment`)."""

    text: str
    injected: bool
    branch: Branch


@dataclass(frozen=True)
class Numbers:
    """The numbers of the outlines that a block has, each once, in their order; `duplicates` says how
    many more there were."""

    numbers: tuple[str, ...]
    duplicates: int


def text_segments(text: str) -> list[TextSegment]:
    """A written answer cut as a rollout would have made it; the segments one after the other are the text.

    Sampled are: what goes up to ``</Outlines>``, each thread's text up to its ``</Thread>``, and what
    goes on with ``</Parallel>``. Injected are the newlines and thread headers between them, and with a
    conclusion its opening. Blocks within threads are cut alike. A text without blocks is one segment, no
    text is none.

    Raises ValueError, saying where and what would be right, for a text of another form or other white
    space: a model that learned it would not meet again what the rollout injects.
    """
    return _Reader(text).read()


def has_threads(text: str) -> bool:
    """Whether any tag of a block is in the text."""
    return _STRUCTURE.search(text) is not None


def outline_numbers(text: str) -> Numbers:
    """What a rollout reads off a text that ends with ``</Outlines>``: which threads to open.

    Lax, since a model wrote it: whatever begins an ``<Outline>`` with a (dotted) number and a colon
    counts, behind the last ``<Outlines>``, if there is one.
    """
    found = _NUMBERED.findall(text.rpartition("<Outlines>")[2])
    numbers = tuple(dict.fromkeys(found))
    return Numbers(numbers, len(found) - len(numbers))


def without_threads(text: str) -> str:
    """The sequential text that is left without tags, outlines and thread headers: the text before a
    block, its threads' texts in their order, each on lines of its own, its conclusion, what follows.

    For any text; what isn't closed loses its tags alone.
    """
    for pattern, left in _REMOVED:
        text = pattern.sub(left, text)
    return text


_REMOVED = [
    (re.compile(r"<Outlines>(?:(?!<Outlines>)[\s\S])*?</Outlines>\s*"), ""),
    (re.compile(r"<Outline>(?:(?!<Outline>)[\s\S])*?</Outline>\s*"), ""),
    (re.compile(r"<Thread>\s*(?:[0-9]+(?:\.[0-9]+)*: ?)?"), ""),
    (re.compile(r"\n?</Thread>\s*"), "\n"),
    (re.compile(r"<(?:Parallel|Conclusion)>\s*"), ""),
    (re.compile(r"\n?</Conclusion>\s*"), "\n"),
    (re.compile(r"</Parallel>\n?|</?Outlines?>"), ""),
]


class _Reader:
    """Reads a text from front to back and cuts it where a rollout would stop or inject."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0  # up to here it is read
        self._cut_at = 0  # up to here it is cut
        self._segments: list[TextSegment] = []

    def read(self) -> list[TextSegment]:
        self._line(())
        if self._at < len(self._text):
            raise self._wrong("no thread is open", "a <Thread> for every </Thread>")
        self._cut(())
        return self._segments

    def _line(self, branch: Branch) -> None:
        """Text and blocks, up to the tag that ends the line: ``</Thread>``, or the end of the text."""
        blocks = 0
        while (tag := self._next_tag()) == "<Parallel>":
            self._block(branch, blocks)
            blocks += 1
        if tag not in ("</Thread>", ""):
            where = "in a thread that isn't closed" if branch else "outside of a block"
            raise self._wrong(f"{tag} stands {where}", "</Thread> before it" if branch else "<Parallel>")

    def _block(self, branch: Branch, block: int) -> None:
        self._at += len("<Parallel>")
        self._skip_space()
        numbers = self._outlines()
        self._cut(branch)
        self._expect("\n", "one newline between </Outlines> and the first <Thread>")
        self._cut(branch, injected=True)
        for thread, number in enumerate(numbers):
            inside = (*branch, (block, thread))
            self._expect(
                f"<Thread>\n{number}:",
                "a thread for each outline, in their order, each right behind the one before it, its number "
                "and a colon on a line of its own",
            )
            self._cut(inside, injected=True)
            self._line(inside)
            self._end_of_thread(number)
            self._cut(inside)
        self._end_of_block(branch)

    def _outlines(self) -> list[str]:
        self._expect("<Outlines>", "<Outlines> behind <Parallel>")
        begin = self._at
        written = []
        self._skip_space()
        while self._text.startswith("<Outline>", self._at):
            match = _NUMBERED.match(self._text, self._at)
            if match is None:
                raise self._wrong("an outline has no number", "<Outline>1: … with a number and a colon")
            written.append(match[1])
            self._at = match.end()
            if self._next_tag() != "</Outline>":
                raise self._wrong(f"outline {match[1]} isn't closed", "</Outline> at its end, no tags in it")
            self._at += len("</Outline>")
            self._skip_space()
        self._expect("</Outlines>", "</Outlines> behind the outlines, nothing but white space between them")
        numbers = outline_numbers(self._text[begin : self._at])
        if not written or numbers.duplicates:
            what = "two outlines have the same number" if written else "there are no outlines"
            raise self._wrong(what, "at least one outline, each with a number of its own")
        return written

    def _end_of_thread(self, number: str) -> None:
        if not self._text.startswith("</Thread>", self._at):
            raise self._wrong(f"thread {number} isn't closed", "</Thread> on a line of its own")
        if self._text[self._at - 1] != "\n":
            raise self._wrong(f"thread {number} ends within a line", "a newline before </Thread>")
        self._at += len("</Thread>")

    def _end_of_block(self, branch: Branch) -> None:
        behind = "one newline behind the last thread, then </Parallel>, or <Conclusion> and a newline"
        self._expect("\n", behind)
        if self._text.startswith("</Parallel>", self._at):
            self._cut(branch, injected=True)
            self._at += len("</Parallel>")
            return
        self._expect("<Conclusion>\n", behind)
        self._cut(branch, injected=True)
        if self._next_tag() != "</Conclusion>":
            raise self._wrong("a conclusion isn't closed", "</Conclusion> at its end, no tags in it")
        self._at += len("</Conclusion>")
        self._skip_space()
        self._expect("</Parallel>", "</Parallel> behind </Conclusion>")

    def _next_tag(self) -> str:
        """Goes on to the next tag; the empty text at the end."""
        match = _STRUCTURE.search(self._text, self._at)
        self._at = match.start() if match else len(self._text)
        return match[0] if match else ""

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None, "it matches nothing too"
        self._at = match.end()

    def _expect(self, expected: str, right: str) -> None:
        if not self._text.startswith(expected, self._at):
            raise self._wrong(f"{expected!r} is missing", right)
        self._at += len(expected)

    def _cut(self, branch: Branch, *, injected: bool = False) -> None:
        """What has been read since the last cut becomes a segment."""
        if self._at > self._cut_at:
            self._segments.append(TextSegment(self._text[self._cut_at : self._at], injected, branch))
        self._cut_at = self._at

    def _wrong(self, what: str, right: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        here = self._text[self._at : self._at + _EXCERPT]
        before = self._text[max(0, self._at - _EXCERPT) : self._at]
        return ValueError(
            f"a text with threads has another form than rollouts give it: {what} in line {line} "
            f"(character {self._at}), between {before!r} and {here!r}; what would be right: {right}"
        )
