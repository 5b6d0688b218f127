"""A value estimator of your own: only the prompt has a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune import StepValues, Valuation, ValueEstimator


@ValueEstimator.register("prompt_value")
@dataclass(frozen=True, kw_only=True)
class PromptValue(ValueEstimator):
    """The prompt's value is the mean reward of the credit's `samples` continuations of it. An answer is then
    a single step, whose baseline does not depend on the answer."""

    unbiased = True

    def first_states(self, states: int) -> Sequence[int]:
        """Returns the indices of the states of an answer that are continued. State 0 is the prompt."""
        return (0,)

    def values(self, valuation: Valuation) -> list[StepValues]:
        """Returns the values of the states of each answer: None where a state has no value."""
        valuation.sample_first(self)
        return valuation.values()
