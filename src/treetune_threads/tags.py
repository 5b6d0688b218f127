"""The tags that open and close threads in an answer, as text and as tokens.

The grammar is ThreadWeaver's: ``<Parallel>``, in it ``<Outlines>`` with one numbered ``<Outline>`` per
thread, then the ``<Thread>``s, and perhaps a ``<Conclusion>``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

WORDS = ("Think", "Parallel", "Outlines", "Outline", "Thread", "Conclusion")
TAGS = tuple(tag for word in WORDS for tag in (f"<{word}>", f"</{word}>"))
"""The twelve tags, in the order in which they are added to a tokenizer."""


@dataclass(frozen=True)
class TagIds:
    """The token of each tag that the rollout and the counting are about. Each is one token."""

    parallel: int
    end_parallel: int
    outlines: int
    end_outlines: int
    thread: int
    end_thread: int

    @staticmethod
    def of(encode: Callable[[str], Sequence[int]]) -> TagIds | None:
        """None where the tokenizer takes several tokens for a tag, one for several, or can't write it."""
        ids = []
        for tag in ("<Parallel>", "</Parallel>", "<Outlines>", "</Outlines>", "<Thread>", "</Thread>"):
            try:
                encoded = encode(tag)
            except ValueError:
                return None
            if len(encoded) != 1:
                return None
            ids.append(encoded[0])
        # One that doesn't know any of them may have the same unknown token for all.
        return TagIds(*ids) if len(set(ids)) == len(ids) else None
