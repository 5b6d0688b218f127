"""The James-Stein baseline: RLOO's, shrunk towards what the iteration's other problems earn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import variance

from typing_extensions import override

from treetune.contracts import Answers, Need
from treetune.rollouts.base import Credit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import leave_one_out_advantages, whole_answer
from treetune.rollouts.metrics import mean
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics

EPS = 1e-6
"""Added to the sum of both variances: JSPO's."""


@Credit.register("james_stein")
@dataclass(frozen=True, kw_only=True)
class JamesStein(Credit):
    """The reward less (1 − λ) · the mean of the problem's other answers − λ · the mean of all other problems
    (Zeng et al., arXiv:2511.03710, as the authors' code JSPO has it).

    λ = v / (v + s + 1e-6), from the other problems alone: v is the mean of the variances of their means as
    estimates, s the variance of these means among problems. So few answers and problems that are alike
    shrink much. The paper's first version multiplies λ by (n − 1)/n, its code does not.

    Unbiased: neither baseline nor λ knows the answer's own reward. With one problem alone this is RLOO. It
    takes problems to be drawn alike; what is learnt from others is the same on any number of ranks."""

    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        own = [[leaf.reward for leaf in tree.leaves] for tree in trees]
        of_ranks = context.ranks.exchange("shrinkage-rewards", own)
        everywhere = [rewards for of_rank in of_ranks for rewards in of_rank]
        first = sum(map(len, of_ranks[: context.ranks.rank]))
        advantages: list[float] = []
        for number, rewards in enumerate(own, first):
            shrinkage, target = shrinkage_and_target([*everywhere[:number], *everywhere[number + 1 :]])
            advantages += [
                (1 - shrinkage) * alone + shrinkage * (reward - target)
                for alone, reward in zip(leave_one_out_advantages(rewards), rewards, strict=True)
            ]
        return whole_answer(context, answers_of(trees), advantages)


def shrinkage_and_target(others: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns λ and the number that a problem's mean is shrunk towards, from the rewards of the other
    problems; no shrinkage where there are none."""
    if not others:
        return 0.0, 0.0
    means = [mean(rewards) for rewards in others]
    target = mean(means)
    noise = mean([variance(rewards) / len(rewards) for rewards in others])
    spread = mean([(one - target) ** 2 for one in means])
    return noise / (noise + spread + EPS), target
