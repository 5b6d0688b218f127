"""What a tool is: text in, text out, under a name."""

from __future__ import annotations

from collections.abc import Sequence

from treetune.config.registrable import Registrable


class Tool(Registrable):
    """Answers a call. Sub-classes are frozen dataclasses, picklable, and forget each call."""

    name: str
    """What the policy calls it by."""

    def prepare(self) -> None:
        """Called once in each worker process, before the deadlines begin: slow imports and indices belong
        here."""

    def missing(self) -> Sequence[str]:
        """What it needs and isn't there, in words, with what to do about it."""
        return ()

    def call(self, argument: str) -> str:
        """What the policy reads as the result.

        Raises `Unavailable` where what it needs isn't there; what was wrong with the argument is a result.
        """
        raise NotImplementedError
