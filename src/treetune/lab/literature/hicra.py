"""HICRA: another credit's advantages, raised at tokens of phrases that plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import override

from treetune.lab.literature.token_level import OverAnotherCredit
from treetune.models.tokenizer import token_offsets
from treetune.rollouts.base import Credit
from treetune.rollouts.context import RolloutContext
from treetune.vocabulary import Column, Episode, TextCodec, TokenIds


@Credit.register("hicra")
@dataclass(frozen=True, kw_only=True)
class HierarchyAware(OverAnotherCredit):
    """A + α |A| at the tokens of `phrases`, A at the others: what plans is rewarded more and punished less
    (Wang et al., arXiv:2509.03646; a public port of the authors' branch, without the part of it that raises
    undecided tokens of long right answers).

    The authors find their phrases, of three to five words, among a model's right answers to a task.
    **Biased**: towards phrases, also where they don't help; over RLOO in the tests' language, where ``;a``
    plans, by 12 % of the gradient's length (cosine 0.997)."""

    phrases: tuple[str, ...]
    """Texts that plan, in whatever case they are written."""
    alpha: Annotated[float, Gt(0), Le(1)] = 0.2
    """α: with 1, a planning token is never punished."""

    @override
    def weighed(self, context: RolloutContext, episodes: Sequence[Episode]) -> list[Episode]:
        import numpy as np

        rows = []
        for episode in episodes:
            assert episode.advantages is not None, "it needs them"
            plans = in_phrases(episode.response_ids, context.codec, self.phrases)
            raised = episode.advantages + self.alpha * np.abs(episode.advantages) * plans
            rows.append(replace(episode, advantages=raised))
        return rows


def in_phrases(token_ids: TokenIds, codec: TextCodec, phrases: Sequence[str]) -> Column:
    """Returns which tokens have a character of a phrase: bool of shape [T]."""
    import numpy as np

    text = codec.decode(token_ids)
    marked: Column = np.zeros(len(text) + 1, np.bool_)
    for phrase in phrases:
        for found in re.finditer(re.escape(phrase), text, re.IGNORECASE):
            marked[found.start() : found.end()] = True
    offsets = [*token_offsets(token_ids, codec, text), len(text)]
    return np.array([bool(marked[start:end].any()) for start, end in pairwise(offsets)], np.bool_)
