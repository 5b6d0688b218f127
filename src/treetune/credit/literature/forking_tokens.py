"""Forking tokens: only the tokens with the highest entropy keep their advantages (arXiv:2506.01939).

Example: with ``share: 0.5``, tokens of the entropies ``[0.1, 0.9, 0.2, 0.8]`` and the advantage 1 get
``[0, 1, 0, 1]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import override

from treetune.credit.base import Credit, TrainerScores
from treetune.credit.literature.token_level import OverAnotherCredit
from treetune.credit.literature.weighted_by import top_share_weights
from treetune.rollouts.context import RolloutContext, require
from treetune.vocabulary import Episode


@Credit.register("forking_tokens")
@dataclass(frozen=True, kw_only=True)
class ForkingTokens(OverAnotherCredit):
    """Forking tokens: A'_t = A_t · 1[H_t ≥ τ], where A_t is another credit's advantage, H_t the entropy of
    the policy's distribution from which token t was sampled, and τ the smallest entropy among the `share` of
    tokens with the largest entropies (Wang et al., arXiv:2506.01939, with 20 %). Tokens with an advantage of
    0 still count in means over tokens. The paper takes the share of a minibatch's tokens, this credit of the
    iteration's. All tokens whose entropy is τ are kept.

    It is the same as `weighted_by` with the signal ``entropy`` and the weights ``top_share``. In a run the
    trainer computes the entropies, with one more forward pass of the policy. **Biased**: the tokens of which
    the policy is most certain are never trained. On the tests' language, which has only three different
    entropies, the expected gradient over RLOO with two answers is off by 26 % of its length (cosine 0.97)."""

    share: Annotated[float, Gt(0), Le(1)] = 0.2
    """The share of the tokens that keep their advantages."""

    @property
    @override
    def trainer_scores(self) -> TrainerScores:
        scores = super().trainer_scores
        return replace(scores, distributions=True, passes=scores.passes + 1)

    @override
    def weigh_tokens(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Episode]:
        """Sets the advantages of all tokens to 0, except for the tokens with the largest entropies."""
        distributions = require(context.model_scores.distributions, "distributions")
        # `along` returns two columns for each row: Σ π² and the entropy of the policy's distributions.
        entropies = [entropies_T for _, entropies_T in distributions.along(episodes)]
        # 1 for the `share` of the iteration's trained tokens with the largest entropies, 0 for the others.
        weights = top_share_weights(context, episodes, entropies, self.share)
        rows = []
        for episode, weights_T in zip(episodes, weights, strict=True):
            assert episode.advantages is not None, "`needs` asks for a credit with advantages"
            rows.append(replace(episode, advantages=episode.advantages * weights_T))
        return rows
