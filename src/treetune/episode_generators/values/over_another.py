"""Estimators that make more of another one's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treetune.episode_generators.critic import CriticSettings
from treetune.episode_generators.values.base import Budget
from treetune.episode_generators.values.continuations import FreshContinuations
from treetune.episode_generators.values.valuation import ValueEstimator


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
