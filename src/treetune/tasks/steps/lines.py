"""Steps of solutions that are written one step a line, such as GSM8K's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen

from treetune.tasks.steps.base import StepSplitter


def ends_of_lines(response: str) -> list[int]:
    """0, and where each line ends, its newline included: the steps of the embedded tasks."""
    offsets = [0]
    for line in response.split("\n")[:-1]:
        offsets.append(offsets[-1] + len(line) + 1)
    return offsets if offsets[-1] == len(response) else [*offsets, len(response)]


@StepSplitter.register("lines")
@dataclass(frozen=True, kw_only=True)
class Lines(StepSplitter):
    """A step is a line that says something. Blank lines belong to the line that follows them, or to the last
    one at the end.

    Where a newline ``begins`` a step, the line of the final answer (one that begins with `answer_marker`)
    belongs to the step before it: there is nothing left to decide once it begins. Whether a step ends is told
    by the token behind it, so the gradient of Monte-Carlo credit is unbiased only where every whole line is
    followed by a newline or the end.

    Where it ``ends`` one, a boundary depends on what stands before it alone, and the gradient is unbiased
    without a condition. The final answer's line is a step of its own then.
    """

    answer_marker: Annotated[str, MinLen(1)] = "####"
    newline: Literal["begins", "ends"] = "begins"
    """What a newline does to steps."""

    def boundaries(self, response: str) -> list[int]:
        if not response:
            return [0]
        return self._ends(response) if self.newline == "ends" else self._begins(response)

    def _ends(self, response: str) -> list[int]:
        position, offsets = 0, [0]
        for line in response.split("\n")[:-1]:
            position += len(line) + 1
            if line.strip() and position < len(response):
                offsets.append(position)
        return [*offsets, len(response)]

    def _begins(self, response: str) -> list[int]:
        offsets = [0]
        end = None  # of the last line with text
        position = 0
        for line in response.split("\n"):
            text = line.strip()
            if text:
                if end is not None and not text.startswith(self.answer_marker):
                    offsets.append(end)
                end = position + len(line)
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
