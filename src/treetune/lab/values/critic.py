"""Values from the run's critic: alone, and as a control variate of continuations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from treetune.contracts import Experiment, Finding, Need, OneLine
from treetune.lab.values.over_another import OverAnother, Sums
from treetune.rollouts.base import Critic, CriticSettings, check_critic_goes_on
from treetune.rollouts.valuation import StepValues, Valuation, Value, ValueEstimator

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
class CriticEstimator(ValueEstimator):
    """The values of the run's critic, as it is before the iteration's training. Nothing is sampled. The
    critic learns the rewards of the answers that are trained on, as PPO's with γ = λ = 1.

    A step's advantage is the value behind it minus the value before it (the last one's: the reward minus the
    value before it): PPO's with λ = 0 from step to step (Schulman et al., arXiv:1506.02438, eq. 16).

    **Biased** by as much as the critic is wrong about what a step changed; with exact values it is exact. On
    the tests' language a critic that knows the length of a state alone is off by 0.26, and the expected
    gradient by 84 % of its length (cosine 0.55)."""

    unbiased = False

    critic: CriticSettings = field(default_factory=CriticSettings)
    """Settings of the critic's training."""

    needs = CRITIC_NEEDS

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return check_critic_goes_on(experiment, "the values 'critic'", "choose the values 'continuations'")

    @property
    @override
    def continues(self) -> bool:
        return False

    @property
    @override
    def critic_settings(self) -> CriticSettings:
        return self.critic

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        values: list[StepValues] = []
        for of_answer in critic_values(valuation):
            values.append([None if value is None else Value(value, UNKNOWN_VARIANCE) for value in of_answer])
        return values


def critic_values(valuation: Valuation) -> list[list[float | None]]:
    """Returns the critic's values of each answer, one for each of its states; None behind the last sampled
    token. Collective."""
    critic = valuation.context.get(Critic)
    of_tokens = critic.values([answer.trajectory for answer in valuation.answers])
    return [
        [_at(values, at.length) for at in answer.states]
        for answer, values in zip(valuation.answers, of_tokens, strict=True)
    ]


def _at(values: Column, length: int) -> float | None:
    """Returns the critic's value of the state behind so many tokens: that before the next sampled one."""
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
    """Settings of the critic's training."""

    needs = CRITIC_NEEDS

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return check_critic_goes_on(
            experiment, "the values 'control_variate'", "choose the values 'continuations'"
        )

    @property
    @override
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.over.unbiased and not self.over.learns_from_others

    @property
    @override
    def critic_settings(self) -> CriticSettings:
        return self.critic

    @override
    def values(self, valuation: Valuation) -> list[StepValues]:
        values, of_critic = self.over.values(valuation), critic_values(valuation)
        errors = [
            list(_errors(of_answer, critic, answer.reward))
            for of_answer, critic, answer in zip(values, of_critic, valuation.answers, strict=True)
        ]
        moments = [_moments(of_tree) for of_tree in valuation.by_tree(errors)]
        gathered = valuation.context.ranks.exchange("value-moments", moments)
        total = Sums((of_problem for of_rank in gathered for of_problem in of_rank), 3)
        squares, products, states = total.rounded()
        if states:
            # The two errors share no noise, so that the mean of their products is the critic's squared error.
            valuation.metrics["credit/critic_error"] = math.sqrt(max(products / states, 0.0))
            valuation.metrics["credit/critic_weight"] = 1 - _share(squares, products, states)
        # The share of each tree's answers is learnt from all other trees.
        shares = [_share(*total.without(of_tree)) for of_tree in moments]
        with_baselines: list[StepValues] = []
        for of_answer, critic, answer in zip(values, of_critic, valuation.answers, strict=True):
            share = shares[answer.states[0].tree]
            with_baselines.append(
                [
                    _with_baseline(value, of_state, share)
                    for value, of_state in zip(of_answer, critic, strict=True)
                ]
            )
        return with_baselines


def _moments(errors_of_answers: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """Returns the sums over a problem's states of the squares of the first errors and of the products of
    both, and how many states there are."""
    errors = [pair for of_answer in errors_of_answers for pair in of_answer]
    squares = math.fsum(before * before for before, _ in errors)
    products = math.fsum(before * after for before, after in errors)
    return squares, products, float(len(errors))


def _errors(
    values: StepValues, of_critic: Sequence[float | None], reward: float
) -> Iterator[tuple[float, float]]:
    """Yields how far a state's own value and the next one's are from the critic's value of it."""
    known = [(value, critic) for value, critic in zip(values, of_critic, strict=True) if value is not None]
    following = [*(value.value for value, _ in known[1:]), reward]
    for (value, critic), after in zip(known, following):
        if critic is not None:
            yield value.baseline_or_value - critic, after - critic


def _share(squares: float, products: float, states: float) -> float:
    """Returns c, the share of V − V_φ in V̂ − V_φ, from sums over states."""
    return min(max(products / squares, 0.0), 1.0) if states and squares > 0 else 1.0


def _with_baseline(value: Value | None, critic: float | None, share: float) -> Value | None:
    if value is None or critic is None:
        return value
    return value._replace(baseline=critic + share * (value.baseline_or_value - critic))
