"""OPO: the group's mean reward, weighted by the answers' lengths, as the baseline (arXiv:2505.23585).

Example: an answer of 30 tokens earns 1, another of 10 tokens earns 0. Both have the baseline
(30 · 1 + 10 · 0) / 40 = 0.75, and the advantages 0.25 and −0.75.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from treetune.contracts import Advantages, Answers, CreditForRewards, Need
from treetune.credit.base import Credit
from treetune.credit.episodes import whole_answer_episodes
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics, are_sampled


@Credit.register("opo")
@dataclass(frozen=True, kw_only=True)
class OptimalBaseline(Credit):
    """OPO: A_i = r_i − b with b = Σ_j l_j r_j / Σ_j l_j, where l_j is the number of sampled tokens of answer
    j (Hao et al., arXiv:2505.23585, as in verl's ``opo``).

    The baseline with the least variance weighs each reward by the squared norm of its answer's gradient. The
    paper assumes that this norm is proportional to the number of tokens. `optimal_token_baseline` estimates
    the norm instead, token by token.

    **Biased**, since the answer's own reward and length are in b: on the tests' language the expected
    gradient is off by 40 % of its length with three answers (cosine 0.996).
    """

    gives = (Advantages(before_training=True), CreditForRewards())
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        """Gives all tokens of an answer the same advantage: its reward minus a mean of the rewards, in which
        each answer has its number of sampled tokens as its weight."""
        advantages: list[float] = []
        for tree in trees:
            rewards = [answer.reward for answer in tree.leaves]
            lengths = [int(are_sampled(answer.segments).sum()) for answer in tree.leaves]
            advantages += length_weighted_advantages(rewards, lengths)
        return whole_answer_episodes(context, answers_of(trees), advantages)


def length_weighted_advantages(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Returns r_i − b, where b is the mean of the rewards, weighted by the lengths.

    Example: ``length_weighted_advantages([1.0, 0.0], [30, 10])`` is ``[0.25, -0.75]``.
    """
    # Equal rewards get exactly 0. The formula could give about 1e-17, by rounding.
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    weighted_sum = sum(length * reward for length, reward in zip(lengths, rewards, strict=True))
    baseline = weighted_sum / sum(lengths)
    return [reward - baseline for reward in rewards]
