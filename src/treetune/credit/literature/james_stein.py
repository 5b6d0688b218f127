"""The James-Stein baseline: RLOO's, shrunk towards the mean reward of the iteration's other problems
(arXiv:2511.03710).

Example: an answer's reward is 1, the mean reward of the problem's other answers is 0.5, and that of the other
problems 0.8. With λ = 0.2 the answer's baseline is 0.8 · 0.5 + 0.2 · 0.8 = 0.56, and its advantage 0.44.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import variance

from typing_extensions import override

from treetune.contracts import Answers, Need
from treetune.credit.base import Credit
from treetune.credit.episodes import whole_answer_episodes
from treetune.credit.rloo import leave_one_out_advantages
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics

EPS = 1e-6
"""Added to the sum of both variances before a division by it, as in the authors' code JSPO."""


@Credit.register("james_stein")
@dataclass(frozen=True, kw_only=True)
class JamesStein(Credit):
    """James-Stein baseline: A_i = R_i − (1 − λ) · m_i − λ · M (Zeng et al., arXiv:2511.03710, as in the
    authors' code JSPO).

    m_i is the mean reward of the problem's other answers, and M the mean of the other problems' mean rewards.
    λ = v / (v + s + 1e-6) is computed only from the other problems, too. v is the mean over problems of the
    (estimated) variance of a problem's mean reward, and s is the variance of the mean rewards among problems.
    So m_i is shrunk more towards M if there are few answers, and if problems are alike. The paper's first
    version multiplies λ by (n − 1)/n, its code does not.

    Unbiased: neither m_i nor M nor λ depends on the answer's own reward. If there is only one problem, this
    is RLOO. The method assumes that problems are drawn from one distribution. M and λ are the same on any
    number of ranks."""

    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        local_rewards = []  # for each of this rank's problems, the rewards of its answers
        for tree in trees:
            local_rewards.append([leaf.reward for leaf in tree.leaves])
        rewards_by_rank = context.ranks.exchange("shrinkage-rewards", local_rewards)
        rewards_of_all = list(itertools.chain.from_iterable(rewards_by_rank))
        # In `rewards_of_all`, this rank's problems come after those of the ranks before it.
        first_index = sum(map(len, rewards_by_rank[: context.ranks.rank]))
        advantages: list[float] = []
        for index, rewards in enumerate(local_rewards, first_index):
            other_problems = [*rewards_of_all[:index], *rewards_of_all[index + 1 :]]
            shrinkage, target = shrinkage_and_target(other_problems)
            for rloo_advantage, reward in zip(leave_one_out_advantages(rewards), rewards, strict=True):
                # R is the answer's reward, m the mean of the problem's other answers, M the target and λ the
                # shrinkage: (1 − λ)(R − m) + λ(R − M), which is R − (1 − λ) m − λ M.
                advantages.append((1 - shrinkage) * rloo_advantage + shrinkage * (reward - target))
        return whole_answer_episodes(context, answers_of(trees), advantages)


def shrinkage_and_target(others: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns the shrinkage λ (the weight of M in the baseline), and M, the mean of the other problems' mean
    rewards. Without other problems, λ is 0.

    Args:
        others: The rewards of the answers to each of the other problems.
    """
    if not others:
        return 0.0, 0.0
    means = [mean(rewards) for rewards in others]
    target = mean(means)
    # How far a problem's mean reward is from its expectation, since it has only a few answers.
    sampling_variance = mean([variance(rewards) / len(rewards) for rewards in others])
    # How far the mean rewards of problems are from their mean.
    variance_among_problems = mean([(problem_mean - target) ** 2 for problem_mean in means])
    shrinkage = sampling_variance / (sampling_variance + variance_among_problems + EPS)
    return shrinkage, target
