"""A task whose answers are split into steps by a rule of its configuration."""

from __future__ import annotations

from typing_extensions import override

from treetune.tasks.base import Task
from treetune.tasks.steps import StepSplitter


class SplitterTask(Task):
    """A task with a field `steps`: the rule that splits an answer into steps."""

    steps: StepSplitter

    @override
    def step_boundaries(self, response: str) -> list[int]:
        return self.steps.boundaries(response)

    @property
    @override
    def boundaries_look_back(self) -> bool:
        return self.steps.end_token == "own_step"
