"""λ-GRPO: GRPO in which a beginning that many answers share counts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Answers, Need, OneLine
from treetune.lab.literature.token_level import beginnings
from treetune.rollouts.base import THREADS_REMEDY, Credit, TokenCredit
from treetune.rollouts.credit import group_advantages
from treetune.vocabulary import Trajectory


@Credit.register("lambda_grpo")
@dataclass(frozen=True, kw_only=True)
class LambdaGrpo(TokenCredit):
    """GRPO's advantage of an answer (see `group`), divided at each token by how many of the group's answers
    begin with the same tokens up to this one, itself among them: the size of the token's process set
    (Sullivan, arXiv:2509.21154, and the author's code, which divides a token's KL by it as well).

    A process set of n answers has n tokens that are one, whose advantages add up to n times their mean.
    **Biased**: what many answers share counts less than the policy goes there. On the tests' language,
    without `std`, the expected gradient is off by 45 % of its length with three answers (cosine 0.997). Where
    answers share nothing it is GRPO's.
    """

    std: bool = True
    """Whether advantages are divided by the standard deviation of the group's rewards."""
    eps: Annotated[float, Gt(0)] = 1e-4
    """Added to the standard deviation."""

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(turns=True), "it looks for equal beginnings", THREADS_REMEDY),
    )

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        advantages = group_advantages([one.reward for one in answers], self.std, self.eps)
        return [
            (advantage / alike_TN[1:].sum(1)).tolist()
            for advantage, alike_TN in zip(advantages, beginnings(answers), strict=True)
        ]
