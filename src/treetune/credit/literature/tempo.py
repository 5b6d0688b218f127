"""TEMPO: GRPO's advantage, plus the change of a state's mean reward at tokens where the answers of a group
branch (arXiv:2509.18314).

Example, without `std`: of the answers ``ab``, ``ac`` and ``d`` only ``ab`` earned 1. The group's mean is 1/3,
so GRPO's advantage of ``ab`` is 2/3. V is 1/3 at the prompt, 1/2 after ``a`` and 1 after ``ab``. So the
tokens of ``ab`` get 2/3 + (1/2 − 1/3) = 5/6 and 2/3 + (1 − 1/2) = 7/6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Answers, Need, OneLine
from treetune.credit.base import THREADS_REMEDY, Credit, TokenCredit
from treetune.credit.literature.token_level import mark_shared_prefixes
from treetune.vocabulary import Trajectory


@Credit.register("tempo")
@dataclass(frozen=True, kw_only=True)
class Tempo(TokenCredit):
    """TEMPO: A_t = (R − mean + V(s_{t+1}) − V(s_t)) / (std + eps), where V(s) is the mean reward of the
    group's answers that begin with s, this answer included (Tran et al., arXiv:2509.18314, and the authors'
    code). Where no other answer branches off at a token, both V are the same, and GRPO's advantage remains.

    **Biased**: a token gets the advantage of the whole answer in addition to its own, V(s_{t+1}) − V(s_t),
    and the answer's own reward is in both V. On the tests' language, without `std`, the expected gradient is
    off by 23 % of its length with three answers (cosine 0.99).
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

        rewards = [answer.reward for answer in answers]
        if len(set(rewards)) == 1:
            # Equal rewards get exactly zero. The formula could give about 1e-17 / eps, by rounding.
            return [[0.0] * len(answer.response_ids) for answer in answers]
        group_mean = fmean(rewards)
        scale = stdev(rewards) + self.eps if self.std else 1.0
        rewards_N = np.array(rewards)
        rows = []
        # An answer of T tokens has P = T + 1 prefixes, of 0, 1, …, T tokens.
        for reward, has_prefix_PN in zip(rewards, mark_shared_prefixes(answers), strict=True):
            # The value of a prefix is the mean reward of the answers that begin with it.
            values_P = has_prefix_PN @ rewards_N / has_prefix_PN.sum(1)
            value_changes_T = np.diff(values_P)
            advantages_T = (reward - group_mean + value_changes_T) / scale
            rows.append(advantages_T.tolist())
        return rows
