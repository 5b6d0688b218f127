"""VC-PPO and VAPO: GAE with one λ for the critic's returns, and another λ for the policy's advantages, which
may depend on the length of the answer (arXiv:2503.01491, arXiv:2504.05118).

Example: with α = 0.05, the policy's λ for an answer of 100 tokens is 1 − 1 / (0.05 · 100) = 0.8.
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
    """VC-PPO and VAPO: A_t = Σ_k (γ λ)^k δ_{t+k} with δ_t = r_t + γ V(s_{t+1}) − V(s_t). The policy's
    advantages have one λ. The returns A_t + V(s_t) that the critic learns have another, `critic_lam` = 1.
    This is VC-PPO's decoupled GAE (Yuan et al., arXiv:2503.01491), with `lam` 0.95 for the policy.

    With `alpha`, the policy's λ is 1 − 1/(α l) for an answer of l tokens: VAPO's length-adaptive GAE (Yue et
    al., arXiv:2504.05118, α = 0.05). The weights λ^k of the errors δ then sum to about α l. An answer of
    fewer than 1/α tokens gets λ = 0; the paper doesn't mention this case.

    Both papers first train only the critic, on a fixed policy. A credit can't do this: here the critic begins
    to learn when the policy does. **Biased** by the critic's errors, the more the smaller λ is. On the tests'
    language, whose answers have at most six tokens, the expected gradient is off by 87 % of its length with
    `alpha` (cosine 0.50), as with λ = 0, and by 14 % with λ = 0.95 (cosine 0.996)."""

    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """The policy's λ if `alpha` is null."""
    critic_lam: Annotated[float, Ge(0), Le(1)] = 1.0
    """The λ of the critic's returns."""
    alpha: Annotated[float, Gt(0)] | None = 0.05
    """α of the policy's λ = 1 − 1/(α l); null: the policy's λ is `lam`."""

    @override
    def from_values(
        self, rewards: Sequence[float], values: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Returns the advantages of GAE with the policy's λ, which may grow with the answer's length, and the
        returns of GAE with the critic's λ."""
        lam = self.lam
        if self.alpha is not None and rewards:
            # For an answer of fewer than 1/α tokens, the formula gives a number below 0.
            lam = max(0.0, 1 - 1 / (self.alpha * len(rewards)))
        advantages, _ = gae(rewards, values, self.gamma, lam)
        _, returns = gae(rewards, values, self.gamma, self.critic_lam)
        return advantages, returns
