"""Generalised advantage estimation; the values come from the critic, which lives in the trainer.

`Gae` hands the episodes on without advantages. `gae` is the recursion that the trainer runs; it
knows neither torch nor lists, only + and *.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le

from treetune.contracts import (
    Advantages,
    CreditForRewards,
    CriticValues,
    Experiment,
    Finding,
    Need,
    OneLine,
    UseOfAdvantages,
)
from treetune.rollouts.base import THREADS_REMEDY, UNUSED_REMEDY, Credit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit.episodes import episode_of
from treetune.rollouts.critic import CriticSettings, check_critic_goes_on
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics

Number = TypeVar("Number", bound=Any)


def gae(
    rewards: Sequence[Number], values: Sequence[Number], gamma: float, lam: float
) -> tuple[list[Number], list[Number]]:
    """Advantages and returns of one answer, or of a batch of equally long ones.

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


@Credit.register("gae")
@dataclass(frozen=True, kw_only=True)
class Gae(Credit):
    """PPO's credit: the trainer's critic values every token, `gae` makes advantages of them.

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

    gives = (Advantages(), CriticValues(), CreditForRewards())
    needs = (
        Need(OneLine(turns=True), "it goes back along an answer token by token", THREADS_REMEDY),
        Need(UseOfAdvantages(), "it trains a critic for them", UNUSED_REMEDY),
    )

    @property
    def critic_settings(self) -> CriticSettings:
        return self.critic

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        remedy = "choose a credit without a critic, such as 'none'"
        yield from check_critic_goes_on(experiment, "credit 'gae'", remedy)

    def from_values(
        self, rewards: Sequence[float], values: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        return gae(rewards, values, self.gamma, self.lam)

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        return [episode_of(context, answer) for answer in answers_of(trees)], {}
