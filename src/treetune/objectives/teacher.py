"""The teacher of an objective that learns whole distributions: its prompt, and its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Lt
from typing_extensions import override

from treetune.credit.teacher_prompts import PrivilegedPrompt


@dataclass(frozen=True, kw_only=True)
class Teacher(PrivilegedPrompt):
    """The settings of the teacher: the prompt that it sees, and its weights."""

    weights: Literal["reference", "policy", "average"] = "reference"
    """The model that is the teacher: the start model (``reference``), the policy with its present weights in
    each step, without gradient (``policy``), or a moving average of the policy's weights (``average``)."""
    decay: Annotated[float, Gt(0), Lt(1)] | None = None
    """d of the moving average. The average begins at the start model, and after each optimizer step it
    becomes d·average + (1 − d)·policy. SDPO's code has 0.95. It must be null for other `weights`."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.weights == "average") != (self.decay is not None):
            raise ValueError(
                f"decay is {self.decay} and weights is {self.weights!r}, and a moving average needs both: set"
                " weights to 'average' and decay to a number such as 0.95, or decay to null"
            )
