"""HICRA: another credit's advantages, raised at the tokens of planning phrases (arXiv:2509.03646).

Example, with α = 0.2: the advantages ``[0.5, 0.5, -0.5]`` become ``[0.6, 0.5, -0.4]`` if the first and the
last token belong to phrases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import override

from treetune.credit.base import Credit
from treetune.credit.literature.token_level import OverAnotherCredit
from treetune.models.tokenizer import token_offsets
from treetune.rollouts.context import RolloutContext
from treetune.vocabulary import Column, Episode, TextCodec, TokenIds


@Credit.register("hicra")
@dataclass(frozen=True, kw_only=True)
class HierarchyAware(OverAnotherCredit):
    """HICRA: A'_t = A_t + α |A_t| at the tokens of `phrases`, and A_t at the others, so that planning is
    rewarded more and punished less (Wang et al., arXiv:2509.03646, after a public port of a branch of the
    authors' code). This branch also raises the advantages of high-entropy tokens in long correct answers;
    this credit doesn't.

    The authors take their phrases, of three to five words, from a model's correct answers to a task.
    **Biased** towards the phrases, also where they don't help. On the tests' language, over RLOO, with the
    phrase ``;a``, the expected gradient is off by 12 % of its length (cosine 0.997)."""

    phrases: tuple[str, ...]
    """Planning phrases, such as "let's try another way". Case does not matter."""
    alpha: Annotated[float, Gt(0), Le(1)] = 0.2
    """α. With 1, a planning token never has a negative advantage."""

    @override
    def weigh_tokens(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Episode]:
        """Adds α · abs(advantage) to the advantages of the tokens in planning phrases."""
        import numpy as np

        rows = []
        for episode in episodes:
            assert episode.advantages is not None, "`needs` asks for a credit with advantages"
            is_planning_T = mark_phrases(episode.response_ids, context.codec, self.phrases)
            raised_T = episode.advantages + self.alpha * np.abs(episode.advantages) * is_planning_T
            rows.append(replace(episode, advantages=raised_T))
        return rows


def mark_phrases(token_ids: TokenIds, codec: TextCodec, phrases: Sequence[str]) -> Column:
    """Returns a mask of the tokens that overlap a phrase, ignoring case, shape [T]."""
    import numpy as np

    text = codec.decode(token_ids)
    is_in_phrase: Column = np.zeros(len(text), np.bool_)  # one entry for each character
    for phrase in phrases:
        for match in re.finditer(re.escape(phrase), text, re.IGNORECASE):
            is_in_phrase[match.start() : match.end()] = True
    offsets = [*token_offsets(token_ids, codec, text), len(text)]
    return np.array([bool(is_in_phrase[start:end].any()) for start, end in pairwise(offsets)], np.bool_)
