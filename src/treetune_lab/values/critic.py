"""Values from the run's critic: alone, and as a control variate of continuations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from treetune.contracts import Experiment, Finding, Need, OneLine
from treetune.rollouts.base import Critic, CriticSettings, check_critic_goes_on
from treetune.rollouts.valuation import StepValues, Valuation, Value, ValueEstimator
from treetune_lab.values.over_another import OverAnother, Sums

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

    def values(self, valuation: Valuation) -> list[list[StepValues]]:
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
    by_answer = iter(critic.values([leaf for tree in valuation.trees for leaf in tree.leaves]))
    return [
        [[_at(values, at.length) for _, at in states] for states, values in zip(of_tree, by_answer)]
        for of_tree in valuation.states
    ]


def _at(values: Column, length: int) -> float | None:
    """Of the state behind so many tokens: what the critic says before the next sampled one."""
    return next((value for value in values[length:].tolist() if value == value), None)


@ValueEstimator.register("control_variate")
@dataclass(frozen=True, kw_only=True)
class ControlVariate(OverAnother):
    """The critic as a control variate of another estimator's values, usually of continuations.

    A step's advantage is V̂(s') − b(s): what the other estimator V̂ says of the state behind the step, minus a
    baseline for the state before it, b = V_φ + c·(V̂ − V_φ), where V_φ is the critic's value. For any f that
    knows nothing of what was done in s, ∇log π(a|s)·f(s) has the mean 0. So has
    ∇log π(a|s)·(1 − c)·(V̂ − V_φ)(s), which is all that this differs by from the other's gradient: a control
    variate whose mean is known
    (Greensmith, Bartlett and Baxter, JMLR 5, 2004, section 4). It is as unbiased as the other, however wrong
    the critic: V_φ never stands for what a step has brought about, where its error would stay.

    c is learnt: V̂(s') has the mean V(s), and noise of its own, so that the least squares of V̂(s') − V_φ(s) on
    V̂(s) − V_φ(s) give the c with the least variance of all advantages. They are taken over the iteration's
    other problems, which share no sample with this one: from its own answers c would know what they did next.
    From 0 (the critic alone) to 1 (not at all); with one problem alone it is 1. Over an estimator that itself
    learns from other problems it is **biased** by as much as one problem weighs among them (of three on the
    tests' language by 0.6 %).

    Half of an advantage's noise is the baseline's, so that a perfect critic is worth twice the
    continuations, and no critic does harm on average."""

    learns_from_others = True

    critic: CriticSettings = field(default_factory=CriticSettings)

    needs = CRITIC_NEEDS

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return check_critic_goes_on(
            experiment, "the values 'control_variate'", "choose the values 'continuations'"
        )

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.over.unbiased and not self.over.learns_from_others

    @property
    def critic_settings(self) -> CriticSettings:
        return self.critic

    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        found, of_critic = self.over.values(valuation), critic_values(valuation)
        own = [
            Moments.of(
                [
                    errors
                    for along, judged, leaf in zip(of_tree, of_tree_critic, tree.leaves, strict=True)
                    for errors in _errors(along, judged, leaf.reward)
                ]
            )
            for of_tree, of_tree_critic, tree in zip(found, of_critic, valuation.trees, strict=True)
        ]
        everyones = [
            one for of_rank in valuation.context.ranks.exchange("value-moments", own) for one in of_rank
        ]
        total = Sums(everyones, len(Moments._fields))
        shares = [Moments(*total.without(one)).share for one in own]
        valuation.metrics |= Moments(*total.rounded()).metrics
        return [
            [
                [_with_baseline(*one, share) for one in zip(along, judged, strict=True)]
                for along, judged in zip(of_tree, of_tree_critic, strict=True)
            ]
            for of_tree, of_tree_critic, share in zip(found, of_critic, shares, strict=True)
        ]


class Moments(NamedTuple):
    """Of the critic's errors at so many states by two looks, the state's own and the next one's: the squares
    of the first, and the products."""

    squares: float
    products: float
    states: float

    @staticmethod
    def of(errors: Sequence[tuple[float, float]]) -> Moments:
        return Moments(
            math.fsum(own * own for own, _ in errors),
            math.fsum(own * after for own, after in errors),
            float(len(errors)),
        )

    @property
    def share(self) -> float:
        """c: how much of V̂ − V_φ is V − V_φ."""
        return min(max(self.products / self.squares, 0.0), 1.0) if self.states and self.squares > 0 else 1.0

    @property
    def metrics(self) -> dict[str, float]:
        """The two looks share no noise, so that the mean of their products is the critic's squared error."""
        if not self.states:
            return {}
        error = math.sqrt(max(self.products / self.states, 0.0))
        return {"credit/critic_error": error, "credit/critic_weight": 1 - self.share}


def _errors(
    along: StepValues, judged: Sequence[float | None], reward: float
) -> Iterator[tuple[float, float]]:
    """How far a state's own look and the next one's are from the critic's value of it, state by state."""
    known = [(one, of_critic) for one, of_critic in zip(along, judged, strict=True) if one is not None]
    looks = [*(one.value for one, _ in known[1:]), reward]
    for (one, of_critic), look in zip(known, looks):
        if of_critic is not None:
            yield one.baseline_or_value - of_critic, look - of_critic


def _with_baseline(one: Value | None, of_critic: float | None, share: float) -> Value | None:
    if one is None or of_critic is None:
        return one
    return one._replace(baseline=of_critic + share * (one.baseline_or_value - of_critic))
