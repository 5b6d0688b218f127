"""What a step splitter is: a function from a response to the offsets between its steps."""

from __future__ import annotations

from treetune.config.registrable import Registrable


class StepSplitter(Registrable):
    """Cuts a response into steps, the states whose value a credit method may ask for.

    `boundaries` never raises, whatever the response: no answer is lost because it could not be cut.
    """

    def boundaries(self, response: str) -> list[int]:
        """Character offsets, strictly rising from 0 to ``len(response)``; ``[0]`` for no text."""
        raise NotImplementedError


def joined(parts: list[str]) -> list[int]:
    """The boundaries of non-empty parts that, put together, are the response."""
    offsets = [0]
    for part in parts:
        offsets.append(offsets[-1] + len(part))
    return offsets
