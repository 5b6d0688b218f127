"""A credit of your own for tokens: tokens near the end of an answer count more."""

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
    """The advantage of a token is (r − mean r) · `decay`^(number of tokens that follow it)."""

    decay: Annotated[float, Gt(0), Le(1)] = 0.99

    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def token_advantages(self, answers: Sequence[Trajectory]) -> list[list[float]]:
        """Returns a list per answer to a problem, with an advantage for each token."""
        mean = fmean(answer.reward for answer in answers)
        rows = []
        for answer in answers:
            length = len(answer.response_ids)
            rows.append([(answer.reward - mean) * self.decay ** (length - 1 - t) for t in range(length)])
        return rows
