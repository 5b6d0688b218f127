"""Step splitters: functions from a response to the offsets between its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen
from typing_extensions import override

from treetune.config.registrable import Registrable

ANOTHER_LINE = "\nThen the answer goes on in another line."
"""Long enough to be a step for every splitter, and too short to be cut."""


def as_if_going_on(boundaries: Callable[[str], list[int]], response: str) -> list[int]:
    """Returns the `boundaries` that a response has when another line follows it, and its length."""
    offsets = boundaries(response + ANOTHER_LINE)
    return [*(offset for offset in offsets if offset <= len(response)), len(response)]


def ends_of_lines(response: str) -> list[int]:
    """Returns 0 and the end of each line, its newline included: the steps of the embedded tasks."""
    offsets = [0]
    for line in response.split("\n")[:-1]:
        offsets.append(offsets[-1] + len(line) + 1)
    return offsets if offsets[-1] == len(response) else [*offsets, len(response)]


@dataclass(frozen=True, kw_only=True)
class StepSplitter(Registrable):
    """Cuts a response into steps, the states whose value a credit method may ask for.

    `boundaries` never raises, whatever the response: no answer is lost because it could not be cut.
    """

    end_token: Literal["own_step", "last_step"] = "own_step"
    """The step of the token that ends an answer: a step of its own where another token could have begun one
    (`Task.answer_boundaries`), or always the last step. With ``last_step`` Monte-Carlo credit gives it
    another baseline than the tokens that could have stood there, and its gradient is biased."""

    def boundaries(self, response: str) -> list[int]:
        """Returns character offsets, strictly rising from 0 to ``len(response)``; ``[0]`` for no text."""
        raise NotImplementedError

    def answer_boundaries(self, response: str) -> list[int]:
        """Returns `Task.answer_boundaries`, as `end_token` says."""
        if self.end_token == "last_step":
            return self.boundaries(response)
        return as_if_going_on(self.boundaries, response)


@StepSplitter.register("lines")
@dataclass(frozen=True, kw_only=True)
class Lines(StepSplitter):
    """A step is a line with text. Blank lines belong to the line that follows them, or to the last one at
    the end."""

    answer_marker: Annotated[str, MinLen(1)] = "####"
    """The beginning of the line with the final answer. Where newlines begin steps, that line belongs to the
    step before it: there is nothing left to decide once it begins."""
    newline: Literal["begins", "ends"] = "begins"
    """Whether a newline begins a step or ends one. Where it ``begins`` one, the token behind a step tells
    that the step has ended, so that the gradient of Monte-Carlo credit is unbiased only if every whole line
    is followed by a newline or the end. Where it ``ends`` one, a boundary depends on the text before it
    alone, and the gradient is unbiased without a condition."""

    @override
    def boundaries(self, response: str) -> list[int]:
        if not response:
            return [0]
        offsets, position = [0], 0
        if self.newline == "ends":
            for line in response.split("\n")[:-1]:
                position += len(line) + 1
                if line.strip() and position < len(response):
                    offsets.append(position)
            return [*offsets, len(response)]
        end_of_text = None  # the end of the last line with text
        for line in response.split("\n"):
            text = line.strip()
            if text:
                if end_of_text is not None and not text.startswith(self.answer_marker):
                    offsets.append(end_of_text)
                end_of_text = position + len(line)
            position += len(line) + 1
        return [*offsets, len(response)]


@StepSplitter.register("gsm8k_reference")
@dataclass(frozen=True, kw_only=True)
class Gsm8kReference(StepSplitter):
    r"""The steps of the VinePPO paper's code on GSM8K, which count blank lines in the middle.

    The answer begins at ``"\n#### "``; the text before it is cut before every newline. Leading
    blank lines go with the first line that has text, trailing ones and the answer with the last.
    A response with several answers, which that code drops, is here cut at the last of them.
    """

    end_token: Literal["own_step", "last_step"] = "last_step"

    @override
    def boundaries(self, response: str) -> list[int]:
        if not response:
            return [0]
        body, marker, _ = response.rpartition("\n#### ")
        if not marker:
            body = response
        lines = body.split("\n")
        with_text = [index for index, line in enumerate(lines) if line.strip()]
        offsets = [0]
        position = 0
        for index, line in enumerate(lines):
            if with_text and with_text[0] < index <= with_text[-1]:
                offsets.append(position - 1)
            position += len(line) + 1
        return [*offsets, len(response)]
