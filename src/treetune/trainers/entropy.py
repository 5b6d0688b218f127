"""A coefficient of the entropy that is found while training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt


@dataclass(frozen=True, kw_only=True)
class EntropyTarget:
    """Holds the mean entropy at trained tokens near `target` (nats).

    After each step the coefficient goes up by `rate` times what the entropy lacks, within `lowest` and
    `highest`: integral control, as soft actor-critic finds its temperature (Haarnoja et al. 2018,
    arXiv:1812.05905, section 5). It begins at the objective's `entropy_coef`. With `lowest` 0 it only
    ever holds entropy up.
    """

    target: Annotated[float, Ge(0)]
    rate: Annotated[float, Gt(0)] = 1e-3
    lowest: float = 0.0
    highest: float = 0.1

    def __post_init__(self) -> None:
        if self.lowest >= self.highest:
            raise ValueError(f"entropy_target: lowest {self.lowest} must be below highest {self.highest}")


class EntropyCoefficient:
    """The coefficient at work: `value` is for the next step. Without a target it never changes."""

    FILE = "entropy.json"

    def __init__(self, start: float, target: EntropyTarget | None) -> None:
        self.start, self.target = start, target
        self.reset()

    def reset(self) -> None:
        self.value = self._bounded(self.start)

    def observe(self, entropy: float) -> None:
        """Told the entropy of the minibatch that a step was taken on, the same on every rank."""
        if self.target is not None:
            self.value = self._bounded(self.value + self.target.rate * (self.target.target - entropy))

    def _bounded(self, value: float) -> float:
        return value if self.target is None else min(max(value, self.target.lowest), self.target.highest)

    def save(self, directory: Path) -> None:
        """Only where it changes."""
        if self.target is not None:
            (directory / self.FILE).write_text(json.dumps({"value": self.value}))

    def load(self, directory: Path) -> None:
        """Raises RuntimeError where the state lacks it."""
        if self.target is None:
            return
        try:
            self.value = json.loads((directory / self.FILE).read_text())["value"]
        except FileNotFoundError as error:
            raise RuntimeError(
                f"{directory} was written without entropy_target: its coefficient is unknown; train from the"
                " beginning, in another directory"
            ) from error
