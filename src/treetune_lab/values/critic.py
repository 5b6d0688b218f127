"""Values from the run's own value model: what PPO has, at the states of any rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from treetune.contracts import Experiment, Finding, Need, OneLine
from treetune.rollouts.critic import Critic, CriticSettings, check_critic_goes_on
from treetune.rollouts.values.valuation import AlongAnswer, Valuation, Value, ValueEstimator

if TYPE_CHECKING:
    from treetune.vocabulary import Column

CRITIC_NEEDS = (
    Need(
        OneLine(turns=True),
        "its critic learns from answers token by token",
        "choose values without a critic, such as 'continuations', or set the rollout's parallel to false",
    ),
)


UNKNOWN_VARIANCE = 0.25
"""The largest of one reward between 0 and 1: nobody knows by how much a critic is wrong."""


@ValueEstimator.register("critic")
@dataclass(frozen=True, kw_only=True)
class CriticValues(ValueEstimator):
    """What the run's critic holds each state to be worth, as it is before the iteration's training. Nothing
    is sampled. The critic learns the rewards of the answers that are trained on, as PPO's with γ = λ = 1.

    A step's advantage is the value behind it minus the value before it (the last one's: the reward minus the
    value before it): PPO's with λ = 0 from step to step (Schulman et al., arXiv:1506.02438, eq. 16).

    **Biased** by as much as the critic is wrong about what a step changed; with exact values it is exact. On
    the tests' language a critic that knows the length of a state alone is off by 0.26, and the expected
    gradient by 84 % of its length (cosine 0.55)."""

    unbiased = False

    critic: CriticSettings = field(default_factory=CriticSettings)

    needs = CRITIC_NEEDS

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return check_critic_goes_on(experiment, "the values 'critic'", "choose the values 'continuations'")

    @property
    def continues(self) -> bool:
        return False

    @property
    def critic_settings(self) -> CriticSettings:
        return self.critic

    def values(self, valuation: Valuation) -> list[list[AlongAnswer]]:
        return [
            [
                [None if value is None else Value(value, UNKNOWN_VARIANCE) for value in of_answer]
                for of_answer in of_tree
            ]
            for of_tree in critic_values(valuation)
        ]


def critic_values(valuation: Valuation) -> list[list[list[float | None]]]:
    """The critic's values of each answer of each tree, one for each state of its way; None behind the last
    sampled token. Collective."""
    critic = valuation.context.get(Critic)
    found = iter(critic.values([leaf for tree in valuation.trees for leaf in tree.leaves]))
    return [
        [[_at(values, place.length) for _, place in way] for way, values in zip(ways, found)]
        for ways in valuation.ways
    ]


def _at(values: Column, length: int) -> float | None:
    """Of the state behind so many tokens: what the critic says before the next sampled one."""
    return next((value for value in values[length:].tolist() if value == value), None)
