"""Values from the run's critic: alone, and as a control variate of continuations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

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
"""The variance of a critic's value. How wrong a critic is isn't known, so this is the largest variance that
one reward between 0 and 1 can have."""


@ValueEstimator.register("critic")
@dataclass(frozen=True, kw_only=True)
class CriticValues(ValueEstimator):
    """V_φ(s): the values of the run's critic, as it is before the iteration's training. Nothing is sampled.
    The critic learns the rewards of the answers that are trained on, as PPO's with γ = λ = 1.

    A step's advantage is V_φ(s') − V_φ(s), the last step's is reward − V_φ(s): PPO's with λ = 0, from step to
    step (GAE, Schulman et al., arXiv:1506.02438, eq. 16).

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
    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        values_by_tree: list[list[StepValues]] = []
        for critic_of_tree in critic_values(valuation):
            values_of_tree: list[StepValues] = []
            for critic_of_answer in critic_of_tree:
                values_of_tree.append(
                    [None if value is None else Value(value, UNKNOWN_VARIANCE) for value in critic_of_answer]
                )
            values_by_tree.append(values_of_tree)
        return values_by_tree


CriticOfAnswer = list[float | None]
"""The critic's values of the states of one answer; None after the last sampled token."""


def critic_values(valuation: Valuation) -> list[list[CriticOfAnswer]]:
    """Returns the critic's values by tree and answer. Collective."""
    answers = [leaf for tree in valuation.trees for leaf in tree.leaves]
    columns = iter(valuation.context.get(Critic).values(answers))  # for each answer a value before each token
    values_by_tree: list[list[CriticOfAnswer]] = []
    for states_of_tree in valuation.states:
        values_of_tree: list[CriticOfAnswer] = []
        for states in states_of_tree:
            column = next(columns)
            values_of_tree.append([_value_after(column, position.length) for _, position in states])
        values_by_tree.append(values_of_tree)
    return values_by_tree


def _value_after(column: Column, length: int) -> float | None:
    """Returns the critic's value of the state after `length` tokens of an answer.

    The critic has no value (NaN) before tokens that the policy did not sample, such as a tool's reply. The
    value before the next sampled token stands for such a state."""
    return next((value for value in column[length:].tolist() if not math.isnan(value)), None)


@ValueEstimator.register("control_variate")
@dataclass(frozen=True, kw_only=True)
class ControlVariate(OverAnother):
    """Uses the critic as a control variate of another estimator's values V̂, usually of continuations.

    A step's advantage is V̂(s') − b(s) with the baseline b = V_φ + c·(V̂ − V_φ), where V_φ is the critic's
    value. For any f that doesn't depend on the action taken in s, ∇log π(a|s)·f(s) has the mean 0. So has
    ∇log π(a|s)·(1 − c)·(V̂ − V_φ)(s), the only difference from the other estimator's gradient: it is a
    control variate whose mean is known (Greensmith, Bartlett and Baxter, JMLR 5, 2004, section 4). So this is
    as unbiased as the other estimator, however wrong the critic is: V_φ is only a baseline, and never the
    value after a step, where its error would bias the gradient.

    c is learnt. V̂(s') has the mean V(s) and noise of its own, so the least squares of V̂(s') − V_φ(s) on
    V̂(s) − V_φ(s) give the c with the least variance of advantages. They are taken over the iteration's other
    problems, which share no sample with this one: a c from the problem's own answers would depend on their
    actions. c goes from 0 (the baseline is the critic alone) to 1 (the critic plays no part). With one
    problem alone it is 1. Over an estimator that itself learns from other problems it is **biased** by the
    weight of one problem among them (of three on the tests' language by 0.6 %).

    Half of an advantage's noise is the baseline's. So a perfect critic is worth twice the continuations, and
    no critic does harm on average."""

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
    def values(self, valuation: Valuation) -> list[list[StepValues]]:
        values_by_tree = self.over.values(valuation)
        critic_by_tree = critic_values(valuation)
        moments_by_tree = []
        for values_of_tree, critic_of_tree, tree in zip(
            values_by_tree, critic_by_tree, valuation.trees, strict=True
        ):
            differences: list[_Differences] = []
            for values, critic, leaf in zip(values_of_tree, critic_of_tree, tree.leaves, strict=True):
                differences += _differences_from_critic(values, critic, leaf.reward)
            moments_by_tree.append(_moments_of(differences))

        moments_by_rank = valuation.context.ranks.exchange("value-moments", moments_by_tree)
        moments_of_all = Sums(itertools.chain.from_iterable(moments_by_rank), len(_Moments._fields))
        total = _Moments(*moments_of_all.rounded())
        if total.states:
            # The two differences share no noise, so the mean of their products is the critic's squared error.
            critic_squared_error = total.products / total.states
            valuation.metrics["credit/critic_error"] = math.sqrt(max(critic_squared_error, 0.0))
            valuation.metrics["credit/critic_weight"] = 1 - _share(total)

        result: list[list[StepValues]] = []
        for values_of_tree, critic_of_tree, moments in zip(
            values_by_tree, critic_by_tree, moments_by_tree, strict=True
        ):
            # A share that depended on the problem's own samples would bias its gradient.
            share = _share(_Moments(*moments_of_all.without(moments)))
            result.append(
                [
                    _with_baselines(values, critic, share)
                    for values, critic in zip(values_of_tree, critic_of_tree, strict=True)
                ]
            )
        return result


class _Differences(NamedTuple):
    """What two estimates of V(s) differ by from the critic's V_φ(s), for one state s."""

    at_state: float
    """V̂(s) − V_φ(s)."""
    after_step: float
    """V̂(s') − V_φ(s), with the next valued state s', or with the reward after the last state."""


class _Moments(NamedTuple):
    """Sums over the states of one problem, or of several."""

    squares: float
    """Of (V̂(s) − V_φ(s))²."""
    products: float
    """Of (V̂(s) − V_φ(s)) · (V̂(s') − V_φ(s))."""
    states: float
    """The number of states."""


def _differences_from_critic(
    values: StepValues, critic: CriticOfAnswer, reward: float
) -> Iterator[_Differences]:
    """Yields the differences at each state of an answer that has a value of the other estimator and one of
    the critic."""
    valued = [
        (value, of_critic) for value, of_critic in zip(values, critic, strict=True) if value is not None
    ]
    next_values = [*(value.value for value, _ in valued[1:]), reward]
    for (value, of_critic), next_value in zip(valued, next_values):
        if of_critic is not None:
            yield _Differences(value.baseline_or_value - of_critic, next_value - of_critic)


def _moments_of(differences: Sequence[_Differences]) -> _Moments:
    return _Moments(
        squares=math.fsum(pair.at_state * pair.at_state for pair in differences),
        products=math.fsum(pair.at_state * pair.after_step for pair in differences),
        states=float(len(differences)),
    )


def _share(moments: _Moments) -> float:
    """Returns c, the share of V̂ − V_φ that isn't noise: the slope of V̂(s') − V_φ(s) on V̂(s) − V_φ(s).

    It is 1, which leaves the critic out, where nothing is known of the critic."""
    if moments.states and moments.squares > 0:
        return min(max(moments.products / moments.squares, 0.0), 1.0)
    return 1.0


def _with_baselines(values: StepValues, critic: CriticOfAnswer, share: float) -> StepValues:
    """Returns the values with the baselines V_φ + c·(V̂ − V_φ), where the critic has a value."""
    result: StepValues = []
    for value, of_critic in zip(values, critic, strict=True):
        if value is not None and of_critic is not None:
            value = value._replace(baseline=of_critic + share * (value.baseline_or_value - of_critic))
        result.append(value)
    return result
