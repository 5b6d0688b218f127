"""Tasks that know which characters of an answer decide: what exact truth is made of."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from treetune.vocabulary import Problem


@runtime_checkable
class KnowsDecisions(Protocol):
    """A task whose answers are decided at a few places, by one character each.

    Whoever wants a policy's exact value can take both ways at these places, each with its probability, and
    sample what lies between.
    """

    def decision(self, problem: Problem, response: str) -> str | None:
        """The character that is right next, where the next one decides; None elsewhere."""
        ...

    def decided(self, problem: Problem, response: str) -> float | None:
        """What the answer earns however it goes on; None where that is still open."""
        ...
