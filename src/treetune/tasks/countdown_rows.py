"""Countdown from the published data sets: rows with `messages`, `target` and `nums`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import MinLen

from treetune.tasks.base import Task
from treetune.tasks.countdown import GRADER, check_template, prompted
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.countdown import MOST_DIGITS, gold_of
from treetune.tasks.rows import BadRow, RowsTask
from treetune.tasks.steps.base import StepSplitter
from treetune.tasks.steps.lines import Lines
from treetune.vocabulary import Problem

STEPS = Lines(answer_marker="<answer>")


@Task.register("countdown_rows")
@dataclass(frozen=True, kw_only=True)
class CountdownRows(RowsTask):
    """Rows hold the given numbers in `numbers_field`, a list of whole ones, and the whole number to
    reach in `target_field`. Where they come from, and what is held out, is said in `RowsTask`.

    `prompt` is a template with ``{numbers}`` and ``{target}``. Without one the row says the prompt
    itself, in `prompt_field`: a text, or the messages of a chat that end with the user's. These need a
    model that is asked in its chat template (`model.chat`), which says the system message too; a row
    that has one is bad unless it is `system`.
    """

    numbers_field: Annotated[str, MinLen(1)] = "nums"
    target_field: Annotated[str, MinLen(1)] = "target"
    prompt_field: Annotated[str, MinLen(1)] = "messages"
    prompt: str | None = None
    system: str | None = None
    grader: Grader = GRADER
    steps: StepSplitter = STEPS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None:
            check_template(self.prompt)

    def problem_of(self, row: dict[str, Any], id: str) -> Problem:
        numbers, target = self._of(row, self.numbers_field), self._of(row, self.target_field)
        if not isinstance(numbers, list | tuple) or not numbers:
            raise BadRow(f"its {self.numbers_field!r} is no list of numbers")
        for number in numbers:
            if not _whole(number) or number < 0:
                raise BadRow(
                    f"its {self.numbers_field!r} holds {number!r}, which is no whole number from 0 up"
                )
        if not _whole(target):
            raise BadRow(f"its {self.target_field!r} is {target!r}, no whole number")
        numbers = tuple(numbers)
        return Problem(
            id=id,
            prompt=self._said(row) if self.prompt is None else prompted(self.prompt, numbers, target),
            gold=gold_of(target, numbers),
            data={"numbers": numbers, "target": target},
        )

    def step_boundaries(self, response: str) -> list[int]:
        return self.steps.boundaries(response)

    def answer_boundaries(self, response: str) -> list[int]:
        return self.steps.answer_boundaries(response)

    def _of(self, row: Mapping[str, Any], key: str) -> Any:
        if key not in row:
            raise BadRow(f"it has no {key!r} (it has {', '.join(map(repr, sorted(row))) or 'nothing'})")
        return row[key]

    def _said(self, row: Mapping[str, Any]) -> str:
        said = self._of(row, self.prompt_field)
        if isinstance(said, str):
            return said
        turns = [turn for turn in said if isinstance(turn, Mapping)] if isinstance(said, list) else []
        roles = [turn.get("role") for turn in turns]
        if roles not in (["user"], ["system", "user"]) or not isinstance(turns[-1].get("content"), str):
            raise BadRow(
                f"its {self.prompt_field!r} is neither a text nor a chat of the user's one message, with or "
                "without a system message: give a prompt of your own"
            )
        if len(turns) == 2 and turns[0].get("content") != self.system:
            raise BadRow(
                f"its system message is {turns[0].get('content')!r}, and the task's is {self.system!r}: set "
                "`system` to it, and model.chat.system, which is what the model is told"
            )
        return str(turns[-1]["content"])


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**MOST_DIGITS
