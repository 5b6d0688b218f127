"""Credit for whole answers and from a critic, and the training rows that every credit makes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import (
    Advantages,
    Answers,
    CreditForRewards,
    CriticValues,
    Experiment,
    Finding,
    Need,
    OneLine,
    UseOfAdvantages,
)
from treetune.rollouts.base import (
    THREADS_REMEDY,
    UNUSED_REMEDY,
    Credit,
    CriticSettings,
    GroupCredit,
    check_critic_goes_on,
)
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean, pooled
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Column, Episode, Metrics, Stretch, Trajectory, are_sampled, joined

Number = TypeVar("Number", bound=Any)

# Training rows


def episode_of(
    context: RolloutContext,
    trajectory: Trajectory,
    step_advantages: Sequence[float] | None = None,
    step_values: Sequence[float] | None = None,
    step_errors: Sequence[float] | None = None,
) -> Episode:
    """Returns the training row of an answer; every token of step i gets `step_advantages[i]`.

    Injected tokens are not trained; their behaviour log-prob reads 0. The policy version is the
    oldest that sampled any of it, or the present one where nobody did (demonstrations).
    """
    import numpy as np

    segments, ends, response_ids = trajectory.segments, trajectory.step_ends, trajectory.response_ids
    assert ends[-1:] == (len(response_ids),), f"{trajectory.id}: steps don't cover the response"
    advantages: Column | None = None
    if step_advantages is not None:
        advantages = np.repeat(np.array(step_advantages, np.float64), np.diff(ends, prepend=0))
    logprobs: Column | None = None
    if all(segment.origin == "injected" or segment.logprobs is not None for segment in segments):
        logprobs = joined(
            [
                np.zeros(len(segment.token_ids), np.float32)
                if segment.origin == "injected" or segment.logprobs is None
                else segment.logprobs
                for segment in segments
            ]
        )
        assert len(logprobs) == len(response_ids), f"{trajectory.id}: a log-prob per token"
    stretches: tuple[Stretch, ...] = ()
    if any(segment.branch for segment in segments):
        segment_ends = itertools.accumulate(len(segment.token_ids) for segment in segments)
        stretches = tuple(Stretch(end, s.branch) for end, s in zip(segment_ends, segments, strict=True))
    versions = [s.policy_version for s in segments if s.policy_version is not None]
    return Episode(
        prompt_ids=trajectory.prompt_ids,
        response_ids=response_ids,
        trained=are_sampled(segments),
        reward=trajectory.reward,
        score=trajectory.score,
        group=trajectory.problem.id,
        trajectory=trajectory.id,
        policy_version=min(versions, default=context.iteration),
        finish_reason=trajectory.finish_reason,
        advantages=advantages,
        behaviour_logprobs=logprobs,
        step_ends=ends,
        step_values=None if step_values is None else tuple(step_values),
        step_errors=None if step_errors is None else tuple(step_errors),
        text=trajectory.text,
        stretches=stretches,
        step_rewards=trajectory.step_rewards,
        domain=trajectory.problem.domain,
    )


def scoring_row(answer: Trajectory) -> Episode:
    """Returns the row that a model runs over to score an answer; nothing is trained on it."""
    return Episode(
        prompt_ids=answer.prompt_ids,
        response_ids=answer.response_ids,
        trained=are_sampled(answer.segments),
        reward=answer.reward,
        group=answer.problem.id,
        trajectory=answer.id,
        policy_version=0,
    )


def whole_answer(
    context: RolloutContext, trajectories: Sequence[Trajectory], advantages: Iterable[float]
) -> tuple[list[Episode], Metrics]:
    """Returns episodes in which all tokens of an answer share one advantage, and metrics. Collective."""
    episodes = [
        episode_of(context, trajectory, [advantage] * len(trajectory.step_ends))
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
    ]
    return episodes, advantage_metrics(context, episodes)


def advantage_metrics(context: RolloutContext, episodes: Sequence[Episode]) -> Metrics:
    """Returns mean, standard deviation and share of zeros of the advantages over all ranks' trained tokens.

    Collective.
    """
    import numpy as np

    advantages: list[float] = []
    tokens: list[float] = []
    for episode in episodes:
        assert episode.advantages is not None
        trained = episode.advantages[episode.trained]
        # Runs of one value, not tokens: what the ranks exchange stays small.
        begins = np.flatnonzero(np.diff(trained, prepend=np.nan))
        advantages += trained[begins].tolist()
        tokens += np.diff(begins, append=len(trained)).tolist()
    columns = pooled(context, "credit-metrics", {"advantage": advantages, "tokens": tokens})
    advantages, tokens = columns["advantage"], columns["tokens"]
    if not advantages:
        return {}
    centre = mean(advantages, tokens)
    return {
        "credit/advantage_mean": centre,
        "credit/advantage_std": math.sqrt(mean([(a - centre) ** 2 for a in advantages], tokens)),
        "credit/advantage_zero": mean([float(a == 0.0) for a in advantages], tokens),
    }


# Credit for whole answers


@Credit.register("group")
@dataclass(frozen=True, kw_only=True)
class Group(GroupCredit):
    """GRPO's credit (`std` true) or Dr. GRPO's (false), relative to the other answers to the problem: see
    `group_advantages`."""

    std: bool = True
    """Whether advantages are divided by the standard deviation of the group's rewards."""
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the standard deviation, which may be 0."""

    gives = (Advantages(before_training=True), CreditForRewards())
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    @override
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return group_advantages(rewards, self.std, self.eps)


def group_advantages(rewards: Sequence[float], std: bool, eps: float) -> list[float]:
    """A_i = r_i − mean(r), divided by (std(r) + eps) if `std`.

    With `std` this is GRPO (Shao et al., arXiv:2402.03300, section 4.1.2), whose published
    implementations take the unbiased standard deviation; without it, Dr. GRPO (Liu et al.,
    arXiv:2503.20783, section 3.2). The mean holds r_i itself, which shrinks the expected gradient
    to (n−1)/n of the true one; `rloo` does not. With `std` problems weigh otherwise, too, by how much their
    answers differ (that of the tests' language 0.71 with n = 2, 0.85 with 3). Equal rewards, and one answer
    alone, give zero.
    """
    # Exactly zero, where the rounded mean of equal rewards would leave 1e-17 / eps.
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    centre = fmean(rewards)
    scale = stdev(rewards) + eps if std else 1.0
    return [(reward - centre) / scale for reward in rewards]


@Credit.register("rloo")
@dataclass(frozen=True, kw_only=True)
class Rloo(GroupCredit):
    """RLOO's credit, relative to the mean of the other answers: see `leave_one_out_advantages`."""

    gives = (Advantages(before_training=True), CreditForRewards())
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    @override
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return leave_one_out_advantages(rewards)

    @override
    def is_unbiased(self, context: RolloutContext) -> bool:
        return type(self).advantages is Rloo.advantages  # a class built on this one may give others


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i − mean of r_j over j ≠ i: an unbiased policy gradient.

    Kool et al. 2019 (Buy 4 REINFORCE samples, get a baseline for free), brought to language models
    by Ahmadian et al. (arXiv:2402.14740). Raises ValueError for fewer than two rewards.
    """
    if len(rewards) < 2:
        raise ValueError(
            "rloo compares each answer with the others, and there is one answer: set the rollout's"
            " `samples` to 2 or more"
        )
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


@Credit.register("outcome")
@dataclass(frozen=True, kw_only=True)
class Outcome(GroupCredit):
    """REINFORCE (Williams 1992) with a zero baseline: every token gets what its answer earned, A_i = r_i."""

    gives = (Advantages(before_training=True), CreditForRewards())

    @override
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return rewards

    @override
    def is_unbiased(self, context: RolloutContext) -> bool:
        return type(self).advantages is Outcome.advantages  # a class built on this one may give others


@Credit.register("none")
@dataclass(frozen=True, kw_only=True)
class NoCredit(Credit):
    """Gives no advantages, for objectives that need none (`mle`)."""

    gives = (CreditForRewards(),)

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        return [episode_of(context, answer) for answer in answers_of(trees)], {}


# Credit from the trainer's critic


@Credit.register("gae")
@dataclass(frozen=True, kw_only=True)
class Gae(Credit):
    """PPO's credit: the trainer's critic values every token, `gae` makes advantages of the values.

    The defaults, γ = λ = 1, are those of the PPO baseline in VinePPO (arXiv:2410.01679): the critic is a
    baseline and no more, and the gradient unbiased however wrong it is. **Biased** with a smaller λ, by the
    critic's errors: on the tests' language one that knows the length of a state alone is off by 75 % of the
    gradient's length with λ = 0.5, by 87 % with λ = 0 (cosine 0.66 and 0.50).
    """

    gamma: Annotated[float, Ge(0), Le(1)] = 1.0
    """Discount of what is earned a token later."""
    lam: Annotated[float, Ge(0), Le(1)] = 1.0
    """Weight of later values: 1 trusts the rewards, 0 the next token's value alone."""
    critic: CriticSettings = field(default_factory=CriticSettings)
    """Settings of the critic's training."""

    gives = (Advantages(), CriticValues(), CreditForRewards())
    needs = (
        Need(OneLine(turns=True), "it goes back along an answer token by token", THREADS_REMEDY),
        Need(UseOfAdvantages(), "it trains a critic for them", UNUSED_REMEDY),
    )

    @property
    @override
    def critic_settings(self) -> CriticSettings | None:
        return self.critic

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        remedy = "choose a credit without a critic, such as 'none'"
        yield from check_critic_goes_on(experiment, "credit 'gae'", remedy)

    @override
    def from_values(
        self, rewards: Sequence[float], values: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        return gae(rewards, values, self.gamma, self.lam)

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        return [episode_of(context, answer) for answer in answers_of(trees)], {}


def gae(
    rewards: Sequence[Number], values: Sequence[Number], gamma: float, lam: float
) -> tuple[list[Number], list[Number]]:
    """Returns advantages and returns of one answer, or of a batch of equally long ones: generalised advantage
    estimation.

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γλ A_{t+1}, backwards from V_T = A_T = 0 after the
    last action; the return that the critic learns is A_t + V_t (Schulman et al., arXiv:1506.02438,
    eq. 16). With γ = λ = 1, A_t = Σ_{s≥t} r_s − V_t.

    `rewards` and `values` have one entry per action in the order of time, floats or tensors [B]:
    a tensor [B, T] goes in as ``tensor.unbind(1)`` and comes out for ``torch.stack(..., 1)``.
    `values[t]` is the value of the state before action t. Leave out what is not trained, injected
    tokens and padding, beforehand. Raises ValueError for unequal lengths.
    """
    if len(rewards) != len(values):
        raise ValueError(f"gae needs one value per reward, got {len(values)} and {len(rewards)}")
    advantages: list[Number] = []
    next_value: Any = 0.0
    next_advantage: Any = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    advantages.reverse()
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    return advantages, returns
