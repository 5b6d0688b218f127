"""Forking tokens: advantages for those tokens alone at which the policy was least decided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import override

from treetune.contracts import Experiment, Finding
from treetune.lab.literature.token_level import Distributions, OverAnotherCredit
from treetune.rollouts.base import Credit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import pooled
from treetune.vocabulary import Episode


@Credit.register("forking_tokens")
@dataclass(frozen=True, kw_only=True)
class ForkingTokens(OverAnotherCredit):
    """Another credit's advantages at the `share` of the iteration's tokens before which the policy's entropy
    was highest, and 0 at the others, which means over tokens count all the same (Wang et al.,
    arXiv:2506.01939, with 20 %, where the share is of a minibatch; equal entropies are all kept).

    It asks the service `Distributions`, which analyses lend, and no run so far.
    **Biased**: the least undecided tokens never change. On the tests' language, whose entropies are three
    numbers, over RLOO with two answers by 26 % of the gradient's length (cosine 0.97)."""

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
    def weighed(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Episode]:
        entropies = [entropy for _, entropy in context.get(Distributions).along(episodes)]
        pairs = zip(entropies, episodes, strict=True)
        own = [one for entropy, episode in pairs for one in entropy[episode.trained].tolist()]
        everywhere = sorted(pooled(context, "entropies", {"entropy": own})["entropy"])
        least = everywhere[-max(1, int(self.share * len(everywhere)))] if everywhere else 0.0
        return [
            replace(episode, advantages=episode.advantages * (entropy >= least))
            for entropy, episode in zip(entropies, episodes, strict=True)
        ]
