"""Step splitters: rules that split a response into steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen
from typing_extensions import override

from treetune.config.registrable import Registrable

ANOTHER_LINE = "\nThen the answer goes on in another line."
"""A line that every splitter regards as exactly one step: it is long enough to be a step of its own, and too
short to be split."""


def boundaries_if_continued(boundaries: Callable[[str], list[int]], response: str) -> list[int]:
    """Returns the step boundaries within a response that another line would follow, and then its length."""
    offsets = boundaries(response + ANOTHER_LINE)
    return [*(offset for offset in offsets if offset <= len(response)), len(response)]


def ends_of_lines(response: str) -> list[int]:
    """Returns 0 and the offset after each line and its newline: ``[0, 4, 7]`` for ``a=1\\nb=2``."""
    offsets = [0]
    for line in response.split("\n")[:-1]:
        offsets.append(offsets[-1] + len(line) + 1)
    if offsets[-1] < len(response):  # the last line has no newline
        offsets.append(len(response))
    return offsets


@dataclass(frozen=True, kw_only=True)
class StepSplitter(Registrable):
    """Splits a response into steps. Credit methods may estimate the value of the state before each step.

    `boundaries` never raises, so that no answer is lost because it can't be split.
    """

    end_token: Literal["own_step", "last_step"] = "own_step"
    """The step of the token that ends an answer. ``own_step``: the token is a step of its own if the answer
    ends where a step ends, and belongs to the last step if the answer ends within a step
    (`Task.answer_boundaries`). ``last_step``: it always belongs to the last step. Monte Carlo credit then
    gives it another baseline than other tokens in its place, so the gradient is biased."""

    def boundaries(self, response: str) -> list[int]:
        """Returns the character offsets of the step boundaries, strictly rising from 0 to ``len(response)``.
        Returns ``[0]`` for an empty response."""
        raise NotImplementedError


@StepSplitter.register("lines")
@dataclass(frozen=True, kw_only=True)
class Lines(StepSplitter):
    """A step is a line with text. Blank lines belong to the next line.

    Blank lines at the end of the response belong to the last line if newlines begin steps. If newlines end
    steps, they are a step of their own, since the text before them doesn't show that no further line follows.
    """

    answer_marker: Annotated[str, MinLen(1)] = "####"
    """The beginning of the line with the final answer. If newlines begin steps, this line belongs to the step
    before it, because nothing is left to decide after that."""
    newline: Literal["begins", "ends"] = "begins"
    """Whether a newline begins a step or ends one. If it ``ends`` one, a boundary depends only on the text
    before it, and the gradient of Monte Carlo credit is always unbiased. If it ``begins`` one, only the token
    after a step shows that the step has ended. The gradient is then unbiased only if every complete line is
    followed by a newline or the end of the answer."""

    @override
    def boundaries(self, response: str) -> list[int]:
        """Returns 0, the offsets at which further steps begin, and the length of the response."""
        if not response:
            return [0]
        lines = response.split("\n")
        inner = self._after_newlines(lines) if self.newline == "ends" else self._before_newlines(lines)
        return [0, *inner, len(response)]

    def _after_newlines(self, lines: Sequence[str]) -> list[int]:
        """Returns the offsets at which steps after the first one begin, if a newline ends a step."""
        text_length = sum(map(len, lines)) + len(lines) - 1
        offsets = []
        position = 0
        for line in lines[:-1]:  # the last line has no newline
            position += len(line) + 1  # after the line's newline
            # No step begins at the end of the text, or after a blank line, which belongs to the next line.
            if line.strip() and position < text_length:
                offsets.append(position)
        return offsets

    def _before_newlines(self, lines: Sequence[str]) -> list[int]:
        """Returns the offsets at which steps after the first one begin, if a newline begins a step."""
        offsets = []
        position = 0
        end_of_previous = None  # the end of the previous line with text, without its newline
        for line in lines:
            text = line.strip()
            if text:
                # The newline after the previous line with text begins this step. A line with the final answer
                # begins no step: it belongs to the previous step.
                if end_of_previous is not None and not text.startswith(self.answer_marker):
                    offsets.append(end_of_previous)
                end_of_previous = position + len(line)
            position += len(line) + 1
        return offsets


@StepSplitter.register("gsm8k_reference")
@dataclass(frozen=True, kw_only=True)
class Gsm8kReference(StepSplitter):
    r"""Splits a response as the VinePPO paper's code does on GSM8K: blank lines in the middle are steps.

    The answer begins at ``"\n#### "``. Every newline in the text before it begins a step. Blank lines at the
    beginning of this text belong to the first line with text. Blank lines at its end and the answer belong to
    the last line with text. The paper's code drops a response with several answers. Here the last answer
    counts.
    """

    end_token: Literal["own_step", "last_step"] = "last_step"

    @override
    def boundaries(self, response: str) -> list[int]:
        """Returns 0, the offsets at which further steps begin, and the length of the response."""
        if not response:
            return [0]
        # The line with the answer (``#### 42``) begins no step: it is part of the last one.
        body, marker, _ = response.rpartition("\n#### ")
        if not marker:
            body = response
        lines = body.split("\n")
        indices_with_text = [index for index, line in enumerate(lines) if line.strip()]
        offsets = [0]
        position = 0
        for index, line in enumerate(lines):
            # A step begins at every line after the first one with text, up to the last one with text.
            if indices_with_text and indices_with_text[0] < index <= indices_with_text[-1]:
                offsets.append(position - 1)  # before the newline that begins the line
            position += len(line) + 1
        return [*offsets, len(response)]
