"""A credit of your own with a critic: policy and critic learn with different λ (VC-PPO, arXiv:2503.01491)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from treetune import Credit, Gae, gae


@Credit.register("two_lambdas")
@dataclass(frozen=True, kw_only=True)
class TwoLambdas(Gae):
    """`gae` whose `lam` is only for the policy's advantages. `critic_lam` is for the critic's returns."""

    critic_lam: Annotated[float, Ge(0), Le(1)] = 1.0

    def from_values(
        self, rewards: Sequence[float], values: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Returns the advantages and returns of an answer. All four lists have a number per trained token."""
        advantages, _ = gae(rewards, values, self.gamma, self.lam)
        _, returns = gae(rewards, values, self.gamma, self.critic_lam)
        return advantages, returns
