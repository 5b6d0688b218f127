"""A custom credit for single tokens: tokens near the end of an answer count more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from annotated_types import Gt, Le

from treetune import Answers, Credit, Need, TokenCredit, Trajectory


@Credit.register("fading")
@dataclass(frozen=True, kw_only=True)
class Fading(TokenCredit):
    """The advantage of an answer in its group, (r − mean r) · `decay`^(tokens that still follow)."""

    decay: Annotated[float, Gt(0), Le(1)] = 0.99

    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def token_advantages(self, answers: Sequence[Trajectory]) -> list[list[float]]:
        """Returns one advantage for each token of each answer to a problem."""
        mean = fmean(answer.reward for answer in answers)
        return [
            [
                (answer.reward - mean) * self.decay**follow
                for follow in reversed(range(len(answer.response_ids)))
            ]
            for answer in answers
        ]
