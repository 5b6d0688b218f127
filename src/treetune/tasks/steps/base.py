"""What a step splitter is: a function from a response to the offsets between its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from treetune.config.registrable import Registrable

ANOTHER_LINE = "\nThen the answer goes on in another line."
"""Long enough to be a step for every splitter, and too short to be cut."""


def as_if_going_on(boundaries: Callable[[str], list[int]], response: str) -> list[int]:
    """What `boundaries` finds in a response that another line follows, and the response's length."""
    found = boundaries(response + ANOTHER_LINE)
    return [*(offset for offset in found if offset <= len(response)), len(response)]


@dataclass(frozen=True, kw_only=True)
class StepSplitter(Registrable):
    """Cuts a response into steps, the states whose value a credit method may ask for.

    `boundaries` never raises, whatever the response: no answer is lost because it could not be cut.

    `end_token` says where the token belongs that ends an answer: in a step of its own where another could
    have begun one (`Task.answer_boundaries`), or always in the last step. Then Monte-Carlo credit holds it
    against another value than the tokens that could have stood there, and its gradient is biased.
    """

    end_token: Literal["own_step", "last_step"] = "own_step"

    def boundaries(self, response: str) -> list[int]:
        """Character offsets, strictly rising from 0 to ``len(response)``; ``[0]`` for no text."""
        raise NotImplementedError

    def answer_boundaries(self, response: str) -> list[int]:
        """`Task.answer_boundaries`, as `end_token` says."""
        if self.end_token == "last_step":
            return self.boundaries(response)
        return as_if_going_on(self.boundaries, response)


def joined(parts: list[str]) -> list[int]:
    """The boundaries of non-empty parts that, put together, are the response."""
    offsets = [0]
    for part in parts:
        offsets.append(offsets[-1] + len(part))
    return offsets
