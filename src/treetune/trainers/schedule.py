"""The learning rate over the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from treetune.config.registrable import Registrable


class Schedule(Registrable):
    """Learning rate as a factor of the configured one, for one step of the whole run."""

    warmup_steps: int = 0
    """The steps that training must have at least, for the warm-up to come to its end."""

    length_matters: str | None = None
    """What in it depends on how long training is, in words; None where nothing does."""

    def factor(self, step: int, total_steps: int) -> float:
        """For optimiser step `step` (0-based) of `total_steps`."""
        raise NotImplementedError


@Schedule.register("warmup")
@dataclass(frozen=True, kw_only=True)
class Warmup(Schedule):
    """Linear warm-up from one part of the rate to all of it, then constant or decaying to 0.

    The length of the warm-up is `steps`, or, where that is 0, `ratio` of the run's steps, rounded
    up. No step has rate 0: a step that can't move anything is wasted. `steps` beyond the run's are
    refused, unless `may_outlast_training`: for a short try of a long experiment.
    """

    steps: Annotated[int, Ge(0)] = 0
    ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up until the run's last step."""
    may_outlast_training: bool = False

    def __post_init__(self) -> None:
        if self.steps and self.ratio:
            raise ValueError("give the warm-up as steps or as ratio, not as both")

    @property
    def warmup_steps(self) -> int:  # type: ignore[override]
        return 0 if self.may_outlast_training else self.steps

    @property
    def length_matters(self) -> str | None:  # type: ignore[override]
        if self.decay != "constant":
            return f"its {self.decay} decay spans the whole of it"
        return "its warm-up is a part of the whole of it (ratio)" if self.ratio and not self.steps else None

    def factor(self, step: int, total_steps: int) -> float:
        warmup = self.steps or math.ceil(self.ratio * total_steps)
        if step < warmup:
            return (step + 1) / warmup
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
