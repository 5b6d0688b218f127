"""SPO's probability mask: tokens that were sampled with a high probability are not trained (the public code
of arXiv:2505.23564).

Example, with ``below: 0.9``: of tokens that were sampled with the probabilities 0.95, 0.4 and 0.99, only the
second is trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import override

from treetune.contracts import Need, SampledAnswers
from treetune.credit.base import Credit
from treetune.credit.literature.token_level import OverAnotherCredit
from treetune.rollouts.context import RolloutContext
from treetune.vocabulary import Episode


@Credit.register("probability_mask")
@dataclass(frozen=True, kw_only=True)
class ProbabilityMask(OverAnotherCredit):
    """SPO's probability mask, M_t = 1[π(a_t) < `below`]: trains only the tokens that were sampled with a
    small probability, with another credit's advantages. The other tokens are not trained, and means over
    tokens don't count them (the public code of SPO, arXiv:2505.23564).

    An answer without such a token keeps all its tokens, with an advantage of 0. **Biased**: tokens of which
    the policy is certain are never trained. On the tests' language, over RLOO with two answers and with
    `below` 0.6, the expected gradient is off by 26 % of its length (cosine 0.96). The selection `tokens` also
    leaves out tokens without an advantage."""

    below: Annotated[float, Gt(0), Le(1)] = 0.9
    """Tokens that were sampled with a probability smaller than this are trained."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (
            *super().needs,
            Need(SampledAnswers(), "it looks at the probabilities that tokens were sampled with"),
        )

    @override
    def weigh_tokens(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Episode]:
        """Trains only the tokens that were sampled with a probability below `below`."""
        rows = []
        for episode in episodes:
            assert episode.advantages is not None and episode.behaviour_logprobs is not None
            trained = episode.trained & (episode.behaviour_logprobs < math.log(self.below))
            if trained.any():
                rows.append(replace(episode, trained=trained))
            else:
                # A credit must return a row for each answer, and the trainer takes no row without a trained
                # token. So this row keeps its tokens, with the advantage 0.
                rows.append(replace(episode, advantages=episode.advantages * 0.0))
        return rows
