"""The base class of estimators that change another estimator's values, and sums from which one problem can be
left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from typing_extensions import override

from treetune.credit.base import CriticSettings
from treetune.credit.states.base import Budget
from treetune.credit.values.base import ValueEstimator
from treetune.credit.values.continuations import FreshContinuations


@dataclass(frozen=True, kw_only=True)
class OverAnother(ValueEstimator):
    """An estimator that has another estimator sample the continuations and estimate the values, and then
    changes these values."""

    over: ValueEstimator = field(default_factory=FreshContinuations)
    """The other estimator, whose values are changed."""

    @property
    @override
    def continues(self) -> bool:
        return self.over.continues

    @property
    @override
    def asks_reference(self) -> bool:
        return self.over.asks_reference

    @property
    @override
    def critic_settings(self) -> CriticSettings | None:
        return self.over.critic_settings

    @override
    def budget(self, samples: int) -> Budget:
        return self.over.budget(samples)

    @override
    def first_states(self, states: int) -> Sequence[int]:
        return self.over.first_states(states)


class Sums:
    """Sums over problems, column by column, from which one problem can be left out exactly.

    An estimator that learns a number from the *other* problems needs, for each problem, the sums without this
    problem. If floats are added and then subtracted again, a rounding error remains that depends on the
    problem's own samples. Where two candidates for the number are equally good, this error would decide
    between them. Fractions have no rounding error.

    Example::

        sums = Sums([[0.1, 1.0], [0.2, 2.0]], columns=2)
        sums.as_floats() == [0.30000000000000004, 3.0]
        sums.without([0.1, 1.0]) == [0.2, 2.0]
    """

    def __init__(self, rows: Iterable[Sequence[float]], columns: int) -> None:
        """Adds up rows of `columns` numbers each. Without any rows, the sums are `columns` zeros."""
        # Fractions, so that a row can be subtracted later without a rounding error.
        self._exact = [Fraction() for _ in range(columns)]
        for row in rows:
            for column in range(columns):
                self._exact[column] += Fraction(row[column])

    def as_floats(self) -> list[float]:
        return [float(total) for total in self._exact]

    def without(self, row: Sequence[float]) -> list[float]:
        """Returns the sums of all problems but the one with this row."""
        return [float(total - Fraction(number)) for total, number in zip(self._exact, row, strict=True)]
