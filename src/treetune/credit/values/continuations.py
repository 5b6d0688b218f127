"""VinePPO's values: the value of a state is the mean reward of fresh continuations.

Kazemnejad et al., arXiv:2410.01679, section 4. Example: nine continuations of a state, six of which end with
the right answer, give the value 0.67.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import override

from treetune.contracts import Answers, Finding, Need
from treetune.credit.values.base import StepValues, Valuation, ValueEstimator


@ValueEstimator.register("continuations")
@dataclass(frozen=True, kw_only=True)
class FreshContinuations(ValueEstimator):
    """The mean reward of fresh continuations, of which each state gets the credit's `samples` (Kazemnejad et
    al., arXiv:2410.01679, section 4).

    With `count_siblings`, the other answers to the problem that went through a state count as continuations
    of it, at no cost. An answer's own reward is left out, so that its values don't depend on its later
    tokens. Values are unbiased with `count_siblings` and without it."""

    unbiased = True

    count_siblings: bool = False
    """Whether the other answers through a state count as continuations of it."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        siblings = Need(Answers(2), "count_siblings counts the other answers", "set it to false")
        return (siblings,) if self.count_siblings else ()

    @override
    def first_states(self, states: int) -> Sequence[int]:
        return range(states)  # all of them: no state's value depends on another answer

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        valuation.sample_first(self)
        if not self.count_siblings:
            return valuation.values()
        return valuation.values_with(valuation.sibling_rewards())


def check_continuations(temperature: float) -> Iterator[Finding]:
    """Yields an error at temperature 0, where all continuations of a state would be the same."""
    if temperature == 0:
        yield Finding(
            "continuations are sampled at temperature 0, so that all of a state's earn the same",
            "temperature",
            "sample above 0, or choose a credit without continuations, such as 'group'",
        )
