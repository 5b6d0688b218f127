"""Forking tokens: only the tokens with the highest entropy keep their advantages (arXiv:2506.01939).

Example: with ``share: 0.5``, tokens of the entropies ``[0.1, 0.9, 0.2, 0.8]`` and the advantage 1 get
``[0, 1, 0, 1]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import override

from treetune.contracts import Experiment, Finding
from treetune.credit.base import Credit
from treetune.credit.literature.token_level import Distributions, OverAnotherCredit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import pool_columns
from treetune.vocabulary import Episode


@Credit.register("forking_tokens")
@dataclass(frozen=True, kw_only=True)
class ForkingTokens(OverAnotherCredit):
    """Forking tokens: A'_t = A_t · 1[H_t ≥ τ], where A_t is another credit's advantage, H_t the entropy of
    the policy's distribution that token t was sampled from, and τ the entropy that the top `share` of tokens
    reach (Wang et al., arXiv:2506.01939, with 20 %). Tokens with an advantage of 0 still count in means over
    tokens. The paper takes the share of a minibatch, here it is of the iteration; tokens whose entropy is τ
    are all kept.

    It needs the distributions that tokens were sampled from (`Distributions`), which analyses have and runs
    don't. **Biased**: the tokens of which the policy is most certain are never trained. On the tests'
    language, with only three different entropies, over RLOO with two answers by 26 % of the gradient's length
    (cosine 0.97)."""

    share: Annotated[float, Gt(0), Le(1)] = 0.2
    """Share of the tokens that keep their advantages."""

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if experiment.credit is self:
            yield Finding(
                "it asks for entropies, and a run knows the probabilities of sampled tokens alone",
                "",
                "choose the credit 'probability_mask'",
            )

    @override
    def weigh_tokens(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Episode]:
        entropies_by_episode = [entropies_T for _, entropies_T in context.get(Distributions).along(episodes)]
        local_entropies: list[float] = []
        for entropies_T, episode in zip(entropies_by_episode, episodes, strict=True):
            local_entropies += entropies_T[episode.trained].tolist()
        of_all_ranks = sorted(pool_columns(context, "entropies", {"entropy": local_entropies})["entropy"])
        threshold = 0.0
        if of_all_ranks:
            kept_tokens = max(1, int(self.share * len(of_all_ranks)))
            threshold = of_all_ranks[-kept_tokens]
        return [
            replace(episode, advantages=episode.advantages * (entropies_T >= threshold))
            for entropies_T, episode in zip(entropies_by_episode, episodes, strict=True)
        ]
