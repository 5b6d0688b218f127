"""The text of a solution with threads, spaced as rollouts space it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
