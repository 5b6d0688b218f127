"""TEMPO: GRPO and, where answers of a group part, what the next token changed of their mean reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Answers, Need, OneLine
from treetune.lab.literature.token_level import beginnings
from treetune.rollouts.base import THREADS_REMEDY, Credit, TokenCredit
from treetune.vocabulary import Trajectory


@Credit.register("tempo")
@dataclass(frozen=True, kw_only=True)
class Tempo(TokenCredit):
    """A_t = (R − mean + V(s_{t+1}) − V(s_t)) / (std + eps), where V(s) is the mean reward of the group's
    answers that begin with s, itself among them (Tran et al., arXiv:2509.18314, and the authors' code).
    Where no answer parts from it the two V are the same, and what is left is GRPO's.

    **Biased**: a token before a branching has the whole answer's advantage beside its own, and its own reward
    in both values. On the tests' language, without `std`, the expected gradient is off by 23 % of its length
    with three answers (cosine 0.99).
    """

    std: bool = True
    """Whether advantages are divided by the standard deviation of the group's rewards."""
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the standard deviation."""

    needs = (
        Need(Answers(2), "it compares each answer with the others to its problem"),
        Need(OneLine(turns=True), "it looks for equal beginnings", THREADS_REMEDY),
    )

    @override
    def token_advantages(self, answers: Sequence[Trajectory]) -> Sequence[Sequence[float]]:
        import numpy as np

        rewards = [one.reward for one in answers]
        if len(set(rewards)) == 1:  # exactly zero, where rounding would leave 1e-17 / eps
            return [[0.0] * len(one.response_ids) for one in answers]
        centre, scale = fmean(rewards), stdev(rewards) + self.eps if self.std else 1.0
        rows = []
        for reward, alike_TN in zip(rewards, beginnings(answers), strict=True):
            values_T = alike_TN @ np.array(rewards) / alike_TN.sum(1)
            rows.append(((reward - centre + np.diff(values_T)) / scale).tolist())
        return rows
