"""VC-PPO and VAPO: a critic that learns what answers earned, and a policy whose λ knows their length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.rollouts.base import Credit
from treetune.rollouts.credit import Gae, gae


@Credit.register("vapo")
@dataclass(frozen=True, kw_only=True)
class DecoupledGae(Gae):
    """`gae` with one λ for the policy's advantages and another, 1, for the returns that the critic learns:
    VC-PPO's decoupled GAE (Yuan et al., arXiv:2503.01491), with `lam` 0.95 for the policy.

    With `alpha`, the policy's λ is 1 − 1/(α l) for an answer of l tokens: VAPO's length-adaptive GAE (Yue et
    al., arXiv:2504.05118, α = 0.05), under which the weights of later errors sum to α l. An answer of fewer
    than 1/α tokens has λ = 0, of which the paper says nothing.

    Both begin with a critic that has learnt what a fixed policy earns. That is none of a credit's: the critic
    here begins as the policy does. **Biased** by the critic's errors, the more the smaller λ is: on the
    tests' language, whose answers have six tokens at most, by 87 % of the gradient's length with `alpha`, as
    with λ = 0, and by 14 % with λ = 0.95 (cosine 0.50 and 0.996)."""

    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """The policy's λ where `alpha` is null."""
    critic_lam: Annotated[float, Ge(0), Le(1)] = 1.0
    """The λ of the critic's returns."""
    alpha: Annotated[float, Gt(0)] | None = 0.05
    """Makes the policy's λ 1 − 1/(α l); null: it is `lam`."""

    @override
    def from_values(
        self, rewards: Sequence[float], values: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        lam = self.lam
        if self.alpha is not None and rewards:
            lam = max(0.0, 1 - 1 / (self.alpha * len(rewards)))
        advantages, _ = gae(rewards, values, self.gamma, lam)
        _, returns = gae(rewards, values, self.gamma, self.critic_lam)
        return advantages, returns
