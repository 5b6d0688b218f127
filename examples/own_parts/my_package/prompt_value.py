"""A custom value estimator: the prompt has a value, and no state after it has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune import StepValues, Valuation, ValueEstimator


@ValueEstimator.register("prompt_value")
@dataclass(frozen=True, kw_only=True)
class PromptValue(ValueEstimator):
    """The mean reward of the credit's `samples` continuations of the prompt. An answer is then one step,
    whose baseline never saw it."""

    unbiased = True

    def first_states(self, states: int) -> Sequence[int]:
        """Returns which of an answer's states are continued; 0 is the prompt."""
        return (0,)

    def values(self, valuation: Valuation) -> list[StepValues]:
        """Returns the values of each answer; a state without one is None, and no boundary."""
        valuation.sample_first(self)
        return valuation.values()
