"""λ-GRPO: GRPO in which a prefix that several answers share counts only once (arXiv:2509.21154).

Example: of three answers, the first two share their first token. GRPO's advantage of the first answer is 0.6;
its tokens get ``[0.3, 0.6, 0.6]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Answers, Need, OneLine
from treetune.credit.base import THREADS_REMEDY, Credit, TokenCredit
from treetune.credit.grpo import group_advantages
from treetune.credit.literature.token_level import mark_shared_prefixes
from treetune.vocabulary import Trajectory


@Credit.register("lambda_grpo")
@dataclass(frozen=True, kw_only=True)
class LambdaGrpo(TokenCredit):
    """λ-GRPO: A_i,t = A_i / |λ_i,t|, where A_i is GRPO's advantage of answer i (see `group`), and |λ_i,t| is
    the size of the token's process set: how many answers of the group, i among them, begin with its first t
    tokens (Sullivan, arXiv:2509.21154, and the author's code, which divides a token's KL by it as well).

    A token that n answers share occurs n times in the batch, and GRPO would count it n times.
    **Biased**: shared tokens count less than in proportion to the probability with which the policy samples
    them. On the tests' language, without `std`, the expected gradient is off by 45 % of its length with three
    answers (cosine 0.997). Where answers share no prefix, the advantages are GRPO's.
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
        """Returns the group's advantage of each answer, divided at each token by the number of answers that
        begin with the same tokens up to this one."""
        advantages = group_advantages([answer.reward for answer in answers], self.std, self.eps)
        rows = []
        # An answer of T tokens has P = T + 1 prefixes, of 0, 1, …, T tokens. `has_prefix_PN` says for each
        # prefix which of the N answers begin with it. `sizes_T` is the number of these answers.
        for advantage, has_prefix_PN in zip(advantages, mark_shared_prefixes(answers), strict=True):
            # The prefix of 0 tokens, which is the prompt alone, is left out.
            sizes_T = has_prefix_PN[1:].sum(1)
            rows.append((advantage / sizes_T).tolist())
        return rows
