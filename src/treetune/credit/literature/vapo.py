"""VC-PPO and VAPO: GAE with one λ for the critic's returns and another, by length, for the policy
(arXiv:2503.01491, arXiv:2504.05118).

Example: with α = 0.05, an answer of 100 tokens has the policy's λ = 1 − 1 / (0.05 · 100) = 0.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.credit.base import Credit
from treetune.credit.gae import Gae, gae


@Credit.register("vapo")
@dataclass(frozen=True, kw_only=True)
class DecoupledGae(Gae):
    """VC-PPO and VAPO: A_t = Σ_k (γ λ)^k δ_{t+k} with δ_t = r_t + γ V(s_{t+1}) − V(s_t), by one λ for the
    policy's advantages and another, `critic_lam` = 1, for the returns A_t + V(s_t) that the critic learns:
    VC-PPO's decoupled GAE (Yuan et al., arXiv:2503.01491), with `lam` 0.95 for the policy.

    With `alpha`, the policy's λ is 1 − 1/(α l) for an answer of l tokens: VAPO's length-adaptive GAE (Yue et
    al., arXiv:2504.05118, α = 0.05), with which the weights of later errors sum to α l. An answer of fewer
    than 1/α tokens gets λ = 0; the paper doesn't mention this case.

    Both papers first train the critic alone on a fixed policy. A credit can't: the critic here begins with
    the policy's training. **Biased** by the critic's errors, the more the smaller λ is: on the tests'
    language, whose answers have at most six tokens, by 87 % of the gradient's length with `alpha`, as with λ
    = 0, and by 14 % with λ = 0.95 (cosine 0.50 and 0.996)."""

    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """The policy's λ where `alpha` is null."""
    critic_lam: Annotated[float, Ge(0), Le(1)] = 1.0
    """The λ of the critic's returns."""
    alpha: Annotated[float, Gt(0)] | None = 0.05
    """α of the policy's λ = 1 − 1/(α l); null: the policy's λ is `lam`."""

    @override
    def from_values(
        self, rewards: Sequence[float], values: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        lam = self.lam
        if self.alpha is not None and rewards:
            # The formula gives a number below 0 for an answer of fewer than 1/α tokens.
            lam = max(0.0, 1 - 1 / (self.alpha * len(rewards)))
        advantages, _ = gae(rewards, values, self.gamma, lam)
        _, returns = gae(rewards, values, self.gamma, self.critic_lam)
        return advantages, returns
