"""MaxRL: an answer's reward minus the mean reward of its group, divided by this mean (arXiv:2602.02710).

Example: of four answers one is right. Its advantage is (1 − 0.25) / 0.25 = 3, and that of the others is −1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from typing_extensions import override

from treetune.contracts import Advantages, Answers, Experiment, Finding, Need, innermost_rollout
from treetune.credit.base import Credit, GroupCredit


@Credit.register("max_rl")
@dataclass(frozen=True, kw_only=True)
class MaxRl(GroupCredit):
    """MaxRL: A_i = (r_i − m) / m, where m is the mean reward of the problem's n answers; 0 if no answer is
    right (Tajwar et al., arXiv:2602.02710, Algorithm 1; TRL and the authors' code add 1e-6 to the divisor).

    The expected gradient is that of −Σ_{k=1}^{n−1} (1−p)^k / k, where p is the probability of a right answer.
    These are the first n − 1 terms of the series of log p, and the gradient of log p is a sum over the
    gradients of pass@k. So a problem weighs (1 − (1−p)^{n−1}) / p times as much as in RLOO: up to n − 1 times
    if it is hard.

    **Biased** as a gradient of the mean reward: problems are reweighted. The direction for each problem is
    right. On the tests' language, whose p is 7/32, the expected gradient is 78 % too long with three answers
    (cosine 1).

    The paper's rewards are 0 and 1. Other rewards of 0 or more are accepted, but for them the expected
    gradient is not the one above. Shaping is refused, since a penalty could make the mean 0 or negative.
    """

    # `CreditForRewards` is left out, so that shaping is refused.
    gives = (Advantages(before_training=True),)
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        unfinished_reward = getattr(experiment.rollout, "unfinished_reward", None)
        if unfinished_reward is not None and unfinished_reward < 0:
            _, key = innermost_rollout(experiment.rollout)
            yield Finding(
                f"the credit 'max_rl' divides by the mean reward, and unfinished answers earn"
                f" {unfinished_reward}",
                f"{key}.unfinished_reward",
                "set it to 0, or choose the credit 'group'",
            )

    @override
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return mean_normalised_advantages(rewards)


def mean_normalised_advantages(rewards: Sequence[float]) -> list[float]:
    """Returns (r_i − m) / m, where m is the mean of the rewards. If all rewards are equal, returns zeros.

    Example: ``[1.0, 0.0, 0.0, 0.0]`` becomes ``[3.0, -1.0, -1.0, -1.0]``.

    Raises:
        ValueError: A reward is negative.
    """
    if min(rewards) < 0:
        raise ValueError(
            f"max_rl divides by the mean reward, and an answer earned {min(rewards)}: let the grader give"
            " rewards of 0 or more, or choose the credit 'group'"
        )
    # Equal rewards get exact zeros. If all are 0, the formula would divide by 0. If they are larger, it could
    # give about 1e-17, by rounding.
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean_reward = fmean(rewards)
    return [(reward - mean_reward) / mean_reward for reward in rewards]
