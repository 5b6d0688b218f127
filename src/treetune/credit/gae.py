"""PPO's credit: generalised advantage estimation (GAE) over the values of a critic.

Schulman et al., arXiv:1506.02438, eq. 16. `Gae.assign` only makes rows, without advantages. The trainer then
runs its critic over these rows, and `Gae.from_values` makes advantages of the critic's values, answer by
answer:

    answers ── Gae.assign ──> episodes ── the trainer's critic ──> values ── Gae.from_values ──> advantages
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le
from typing_extensions import override

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
from treetune.credit.base import (
    THREADS_REMEDY,
    UNUSED_ADVANTAGES_REMEDY,
    Credit,
    CriticSettings,
    check_critic_is_kept,
)
from treetune.credit.episodes import make_episode
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics

Numeric = TypeVar("Numeric", bound=Any)
"""A float, or a tensor of shape [B] with one number for each answer of a batch."""

FromValues = Callable[[Sequence[float], Sequence[float]], tuple[Sequence[float], Sequence[float]]]
"""Computes an answer's advantages and returns from its rewards and the critic's values, token by token; see
`Gae.from_values`."""


@Credit.register("gae")
@dataclass(frozen=True, kw_only=True)
class Gae(Credit):
    """PPO with a critic (Schulman et al., arXiv:1707.06347, arXiv:1506.02438): A_t = Σ_k (γλ)^k δ_{t+k},
    where δ_t = r_t + γ V(s_{t+1}) − V(s_t) and the trainer's critic gives V.

    The defaults, γ = λ = 1, are those of the PPO baseline in VinePPO (arXiv:2410.01679): the critic is only a
    baseline, and the gradient is unbiased however wrong the critic is. With a smaller λ it is **biased** by
    the critic's errors. On the tests' language, with a critic that only knows the length of a state, the
    expected gradient is off by 75 % of its length with λ = 0.5 (cosine 0.66), and by 87 % with λ = 0 (cosine
    0.50).
    """

    gamma: Annotated[float, Ge(0), Le(1)] = 1.0
    """The discount γ per token: for a token, a reward that comes n tokens later counts γ^n."""
    lam: Annotated[float, Ge(0), Le(1)] = 1.0
    """The weight λ of what comes after the next value. With 1, an advantage is the discounted sum of the
    rewards from the token on, minus the token's value: later values don't count. With 0, it is the token's
    own reward plus the discounted value of the next token, minus the token's value."""
    critic: CriticSettings = field(default_factory=CriticSettings)
    """Settings of the critic's training."""

    gives = (Advantages(), CriticValues(), CreditForRewards())
    needs = (
        Need(OneLine(turns=True), "it goes back along an answer token by token", THREADS_REMEDY),
        Need(UseOfAdvantages(), "it trains a critic for them", UNUSED_ADVANTAGES_REMEDY),
    )

    @property
    @override
    def critic_settings(self) -> CriticSettings | None:
        return self.critic

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        remedy = "choose a credit without a critic, such as 'none'"
        yield from check_critic_is_kept(experiment, "credit 'gae'", remedy)

    def from_values(
        self, rewards: Sequence[float], values: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Computes the advantages and returns of one answer from the critic's values. The trainer calls this.

        Args:
            rewards: The reward of each trained token, less the penalties that the objective puts into the
                reward. Example: ``[0.0, 0.0, 1.0]``.
            values: The critic's value of the state before each trained token. Example: ``[0.4, 0.5, 0.8]``.

        Returns:
            The advantages of the tokens, and the returns that the critic learns. Example, with γ = λ = 1:
            ``[0.6, 0.5, 0.2], [1.0, 1.0, 1.0]``. A method whose policy and critic have different λ returns
            the advantages of one recursion and the returns of another (`vapo`).
        """
        return gae(rewards, values, self.gamma, self.lam)

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        return [make_episode(context, answer) for answer in answers_of(trees)], {}


def from_values_of(credit: Credit) -> FromValues | None:
    """Returns the `Gae.from_values` of a credit that leaves values to the trainer; None for other credit."""
    return credit.from_values if isinstance(credit, Gae) and credit.leaves_values_to_trainer else None


def gae(
    rewards: Sequence[Numeric], values: Sequence[Numeric], gamma: float, lam: float
) -> tuple[list[Numeric], list[Numeric]]:
    """Returns the advantages and returns of one answer, or of a batch of equally long ones.

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γλ A_{t+1}, backwards from V_T = A_T = 0 after the last
    action; the return that the critic learns is A_t + V_t (Schulman et al., arXiv:1506.02438, eq. 16). With
    γ = λ = 1, A_t = Σ_{s≥t} r_s − V_t.

    Example: ``gae([0.0, 0.0, 1.0], [0.4, 0.5, 0.8], 1.0, 1.0)`` is about
    ``([0.6, 0.5, 0.2], [1.0, 1.0, 1.0])``.

    Args:
        rewards: One entry for each action in the order of time: floats, or tensors of shape [B]. Pass a
            tensor [B, T] as ``tensor.unbind(1)``, and put the result together with ``torch.stack(..., 1)``.
            Leave out actions that are not trained, which are injected tokens and padding.
        values: ``values[t]`` is the value of the state before action t.
        gamma: The discount γ.
        lam: The weight λ of later values.

    Raises:
        ValueError: There are more or fewer values than rewards.
    """
    if len(rewards) != len(values):
        raise ValueError(f"gae needs one value per reward, got {len(values)} and {len(rewards)}")
    advantages: list[Numeric] = []  # from the last action to the first
    next_value: Any = 0.0
    next_advantage: Any = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        advantages.append(advantage)
        next_value, next_advantage = value, advantage
    advantages.reverse()
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    return advantages, returns
