"""Estimators that make more of another one's values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from treetune.rollouts.critic import CriticSettings
from treetune.rollouts.values.base import Budget
from treetune.rollouts.values.continuations import FreshContinuations
from treetune.rollouts.values.valuation import ValueEstimator


@dataclass(frozen=True, kw_only=True)
class OverAnother(ValueEstimator):
    """Asks for what the other one asks for."""

    over: ValueEstimator = field(default_factory=FreshContinuations)
    """Whose values."""

    @property
    def continues(self) -> bool:
        return self.over.continues

    @property
    def critic_settings(self) -> CriticSettings | None:
        return self.over.critic_settings

    def budget(self, samples: int) -> Budget:
        return self.over.budget(samples)

    def first_states(self, states: int) -> Sequence[int]:
        return self.over.first_states(states)


class Sums:
    """Sums over problems, column by column, exact until they are read: `without` a problem, nothing of that
    problem is left. Floats that are added and subtracted again leave its rounding, and where what is learnt
    from sums is decided by a tie, the rounding of the problem's own samples would decide it."""

    def __init__(self, parts: Iterable[Sequence[float]], columns: int) -> None:
        everyones = list(parts)
        self._exact = [sum((Fraction(one[at]) for one in everyones), Fraction()) for at in range(columns)]

    def rounded(self) -> list[float]:
        return [float(one) for one in self._exact]

    def without(self, part: Sequence[float]) -> list[float]:
        """Of all but one."""
        return [float(one - Fraction(own)) for one, own in zip(self._exact, part, strict=True)]
