"""Values from the run's critic: its own values (`critic`), and the critic as a control variate of another
estimator's values, such as those of continuations (`control_variate`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from treetune.contracts import Experiment, Finding, Need, OneLine
from treetune.credit.base import CriticSettings, check_critic_is_kept
from treetune.credit.values.base import StepValues, Valuation, Value, ValueEstimator
from treetune.credit.values.over_another import OverAnother, Sums
from treetune.rollouts.context import require

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
"""The variance that is given to a critic's values, since their error is not known: the largest variance that
a reward between 0 and 1 can have."""


@ValueEstimator.register("critic")
@dataclass(frozen=True, kw_only=True)
class CriticEstimator(ValueEstimator):
    """The values of the run's critic, as it is before the iteration's training. Nothing is sampled. The
    critic learns the rewards of the answers that are trained on, as PPO's critic does with γ = λ = 1.

    A step's advantage is the value after the step minus the value before it; for the last step, the reward
    takes the place of the value after it. This is PPO's advantage with λ = 0, for steps in place of tokens
    (Schulman et al., arXiv:1506.02438, eq. 16).

    **Biased** by the critic's error about what a step changed; with exact values the advantages are exact. On
    the tests' language, the values of a critic that only knows the length of a state are off by 0.26, and the
    expected gradient by 84 % of its length (cosine 0.55)."""

    unbiased = False

    critic: CriticSettings = field(default_factory=CriticSettings)
    """Settings of the critic's training."""

    needs = CRITIC_NEEDS

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return check_critic_is_kept(experiment, "the values 'critic'", "choose the values 'continuations'")

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
        """Returns the critic's value of each state."""
        values: list[StepValues] = []
        for step_values in critic_values(valuation):
            values.append(
                [None if value is None else Value(value, UNKNOWN_VARIANCE) for value in step_values]
            )
        return values


def critic_values(valuation: Valuation) -> list[list[float | None]]:
    """Returns the critic's value of each state of each answer. Collective.

    A state after which no token was sampled has the value None.
    """
    critic = require(valuation.context.model_scores.critic, "critic")
    values_of_tokens = critic.values([answer.trajectory for answer in valuation.answers])
    values_of_states = []
    for answer, values_T in zip(valuation.answers, values_of_tokens, strict=True):
        values_of_states.append([_value_at(values_T, answer_state.length) for answer_state in answer.states])
    return values_of_states


def _value_at(values_T: Column, length: int) -> float | None:
    """Returns the critic's value of the state after `length` tokens; None if no sampled token follows.

    `values_T` has the critic's value before each sampled token, and NaN before injected tokens. The state's
    value is the value before the next sampled token.
    """
    for value in values_T[length:].tolist():
        if not math.isnan(value):
            return float(value)
    return None


class _Differences(NamedTuple):
    """Two differences from the critic's value V_φ(s) of a state s. Their noise is independent."""

    of_state: float
    """V̂(s) − V_φ(s), where V̂(s) is the other estimator's value of the state itself."""
    of_next_state: float
    """V̂(s') − V_φ(s), where V̂(s') is the other estimator's value of the next state; after the last state,
    the answer's reward."""


class _Moments(NamedTuple):
    """Sums over states, from which c is learnt, the weight of the other estimator in the baseline."""

    squares: float
    """The sum of `_Differences.of_state` squared."""
    products: float
    """The sum of `_Differences.of_state` times `_Differences.of_next_state`."""
    states: float
    """The number of states."""

    @property
    def share(self) -> float:
        """c, by least squares, between 0 and 1; 1 without any states, or if V̂ and V_φ agree everywhere."""
        if not self.states or self.squares <= 0:
            return 1.0
        return min(max(self.products / self.squares, 0.0), 1.0)


@ValueEstimator.register("control_variate")
@dataclass(frozen=True, kw_only=True)
class ControlVariate(OverAnother):
    """The critic as a control variate of another estimator's values, usually of continuations.

    A step's advantage is V̂(s') − b(s): the other estimator's value V̂ of the state after the step, minus a
    baseline for the state before it, b = V_φ + c·(V̂ − V_φ), where V_φ is the critic's value. For any f that
    does not depend on the action in s, ∇log π(a|s)·f(s) has the mean 0. The gradient differs from the other
    estimator's only by ∇log π(a|s)·(1 − c)·(V̂ − V_φ)(s), which is such a term: a control variate whose mean
    is known (Greensmith, Bartlett and Baxter, JMLR 5, 2004, section 4). So advantages are as unbiased as with
    the other estimator, however wrong the critic is. V_φ is only used in baselines. As the value after a step
    it would bias advantages by its error.

    c is learnt. V̂(s') has the mean V(s), and its noise is independent of that of V̂(s). So the least squares
    of V̂(s') − V_φ(s) on V̂(s) − V_φ(s) give the c with which advantages have the least variance. The least
    squares are taken over the iteration's other problems, which share no sample with this one: a c that is
    learnt from a problem's own answers would depend on what these did next. c is between 0 (only the critic
    counts) and 1 (the critic doesn't count); if there is no other problem, it is 1. If the other estimator
    itself learns from other problems, advantages are **biased** by as much as one problem weighs among them
    (with three problems on the tests' language by 0.6 %).

    Half of an advantage's noise is the baseline's, so a perfect critic is worth as much as twice the
    continuations, and no critic does harm on average."""

    learns_from_others = True

    critic: CriticSettings = field(default_factory=CriticSettings)
    """Settings of the critic's training."""

    needs = CRITIC_NEEDS

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        return check_critic_is_kept(
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
        """Returns the values of the estimator `over`. Their baselines mix them with the critic's values."""
        values = self.over.values(valuation)
        values_of_critic = critic_values(valuation)
        differences = []
        for step_values, critic, answer in zip(values, values_of_critic, valuation.answers, strict=True):
            differences.append(_subtract_critic(step_values, critic, answer.reward))
        moments_by_tree = []
        for differences_of_tree in valuation.by_tree(differences):
            moments_by_tree.append(_sum_moments(differences_of_tree))
        moments_by_rank = valuation.context.ranks.exchange("value-moments", moments_by_tree)
        all_moments = list(itertools.chain.from_iterable(moments_by_rank))
        sums = Sums(all_moments, columns=len(_Moments._fields))
        # `_Moments.share` is the weight of a state's estimated value in its baseline. The critic's value has
        # the weight 1 - share.
        total_moments = _Moments(*sums.as_floats())
        if total_moments.states:
            # The noise of a state's two differences is independent, so the mean of their products estimates
            # the critic's mean squared error.
            critic_error = math.sqrt(max(total_moments.products / total_moments.states, 0.0))
            valuation.metrics["credit/critic_error"] = critic_error
            valuation.metrics["credit/critic_weight"] = 1 - total_moments.share
        # The share for a tree's answers is learnt from all other trees.
        share_by_tree = []
        for moments in moments_by_tree:
            moments_of_other_trees = _Moments(*sums.without(moments))
            share_by_tree.append(moments_of_other_trees.share)
        values_with_baselines: list[StepValues] = []
        for step_values, critic, answer in zip(values, values_of_critic, valuation.answers, strict=True):
            tree_index = answer.states[0].tree  # the same in all states of an answer
            share = share_by_tree[tree_index]
            pairs = zip(step_values, critic, strict=True)
            values_with_baselines.append(
                [_mix_baseline(value, value_of_critic, share) for value, value_of_critic in pairs]
            )
        return values_with_baselines


def _subtract_critic(
    step_values: StepValues, values_of_critic: Sequence[float | None], reward: float
) -> list[_Differences]:
    """Returns two differences for each state.

    They are the state's baseline and the value of the next state, both minus the critic's value of the state.
    The last state has no next state: the answer's reward takes the place of that value. States without a
    value, or without a critic's value, are left out.
    """
    pairs = zip(step_values, values_of_critic, strict=True)
    valued = [(value, critic) for value, critic in pairs if value is not None]
    next_values = [*(value.value for value, _ in valued[1:]), reward]
    differences = []
    # Not strict: if no state has a value, `next_values` still has the reward.
    for (value, critic), next_value in zip(valued, next_values):
        if critic is not None:
            differences.append(_Differences(value.baseline_or_value - critic, next_value - critic))
    return differences


def _sum_moments(differences_by_answer: Sequence[Sequence[_Differences]]) -> _Moments:
    """Returns the sums over the states of a problem's answers, from which `_Moments.share` is computed."""
    all_differences: list[_Differences] = []
    for differences_of_answer in differences_by_answer:
        all_differences += differences_of_answer
    return _Moments(
        squares=math.fsum(pair.of_state * pair.of_state for pair in all_differences),
        products=math.fsum(pair.of_state * pair.of_next_state for pair in all_differences),
        states=float(len(all_differences)),
    )


def _mix_baseline(value: Value | None, critic: float | None, share: float) -> Value | None:
    """Returns a value with the baseline b = V_φ + c·(V̂ − V_φ), where V_φ is `critic` and c is `share`.

    V̂ is the value itself, or its baseline if it has one. If `critic` is None, the value is unchanged.
    """
    if value is None or critic is None:
        return value
    return value._replace(baseline=critic + share * (value.baseline_or_value - critic))
