"""Credit for pass@k: how much an answer adds to the best reward of k answers (arXiv:2508.10751,
arXiv:2505.15201, arXiv:2503.19595).

Example: of four answers one is right, and k is 2. Three of the six pairs contain the right answer. The mean
of the best reward over these three is 1, and over all pairs it is 0.5. So the advantage of the right answer
is 1 − 0.5 = 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from typing_extensions import override

from treetune.contracts import Advantages, Answers, CreditForRewards, Need
from treetune.credit.base import Credit, GroupCredit


@Credit.register("pass_at_k")
@dataclass(frozen=True, kw_only=True)
class PassAtK(GroupCredit):
    """Pass@k training: A_i = (M_i − b) / scale, where M_i is the mean, over all sets of `k` answers that
    contain answer i, of the best reward in the set.

    ==============================  ==================================================================
    `baseline` ``all_sets``,        Chen et al., arXiv:2508.10751, section 2.4 (eq. 14 and 15): b is the
    `std` true                      mean of the best reward over all sets of k answers, and the scale is
                                    its standard deviation over these sets
    `baseline` ``without_answer``,  Walder & Karkhanis, arXiv:2505.15201 (PKPO, s_loo-1): b is the mean
    `std` false                     over the same sets without answer i. With k = n, only the best answer
                                    has an advantage, its lead on the second best: Tang et al.,
                                    arXiv:2503.19595, verl's ``grpo_passk``
    ==============================  ==================================================================

    With rewards of 0 and 1, the best reward of a set is pass@k; other rewards are accepted too.

    With ``without_answer`` and without `std` the expected gradient is **exactly** 1/k of the gradient of
    pass@k (of the best of k rewards). With ``all_sets`` and without `std` it is (n−k)/(n k) of that gradient,
    in the right direction. With `std` problems are reweighted. As a gradient of the mean reward, the credit
    is **biased**: with rewards of 0 and 1 a problem that is solved with probability p weighs (1−p)^{k−1}
    times as much. On the tests' language, whose p is 7/32, the expected gradient with k = 2 and three answers
    is too short by 22 % with ``without_answer``, by 74 % with ``all_sets``, and by 45 % with ``all_sets`` and
    `std` (cosine 1 each).
    """

    k: Annotated[int, Ge(2)] = 4
    """The number of answers of which one has to be right."""
    baseline: Literal["all_sets", "without_answer"] = "all_sets"
    """The mean with which an answer is compared, see above."""
    std: bool = True
    """Whether advantages are divided by the standard deviation of the best reward over all sets."""
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the standard deviation."""

    gives = (Advantages(before_training=True), CreditForRewards())

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        # With ``all_sets``, k answers are too few: there is only one set, and it would be compared with
        # itself.
        fewest_answers = self.k + 1 if self.baseline == "all_sets" else self.k
        remedy = f"set the rollout's samples to {fewest_answers} or more, or the credit's k to less"
        return (Need(Answers(fewest_answers), f"it compares sets of {self.k} answers", remedy),)

    @override
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return pass_at_k_advantages(rewards, self.k, self.baseline, self.std, self.eps)


def pass_at_k_advantages(
    rewards: Sequence[float],
    k: int,
    baseline: Literal["all_sets", "without_answer"] = "all_sets",
    std: bool = False,
    eps: float = 1e-6,
) -> list[float]:
    """Returns each answer's advantage: a mean of best rewards, minus a baseline (see `PassAtK`).

    For each set of `k` answers that contains the answer, take the best reward in the set. The mean is over
    these sets.

    Example: ``pass_at_k_advantages([1.0, 0.0, 0.0, 0.0], 2)`` is about ``[0.5, -0.17, -0.17, -0.17]``.
    With fewer than `k` answers, which happens where some could not be graded, the advantages are 0.

    Args:
        rewards: The rewards of a problem's answers.
        k: The number of answers in a set.
        baseline: The number that is subtracted: the mean of the best reward over all sets of `k` answers
            (``all_sets``), or over all sets of k − 1 other answers (``without_answer``).
        std: Whether to divide by the standard deviation of the best reward over all sets of `k` answers.
        eps: Added to the standard deviation.
    """
    if len(rewards) < k or len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    mean_of_all_sets = mean_best(rewards, k)
    scale = 1.0
    if std:
        variance = mean_best(rewards, k, power=2) - mean_of_all_sets**2
        # Rounding may make the variance slightly negative.
        scale = math.sqrt(max(0.0, variance)) + eps
    advantages = []
    for index, reward in enumerate(rewards):
        others = [*rewards[:index], *rewards[index + 1 :]]
        # The mean of the best reward over all sets that contain this answer (M_i of `PassAtK`). In these sets
        # the other k − 1 answers vary, and the best reward is at least this answer's own.
        mean_with_answer = mean_best(others, k - 1, at_least=reward)
        if baseline == "all_sets":
            difference = mean_with_answer - mean_of_all_sets
        else:
            # The baseline is the mean over the same sets, from which this answer is removed.
            difference = mean_with_answer - mean_best(others, k - 1)
        advantages.append(difference / scale)
    return advantages


def mean_best(rewards: Sequence[float], k: int, *, at_least: float = -math.inf, power: int = 1) -> float:
    """Returns the mean of ``max(best, at_least) ** power`` over all sets of k of the rewards, where `best` is
    the best reward of a set.

    Example: ``mean_best([1.0, 0.0, 0.0], 2)`` is 2/3: two of the three pairs contain the 1.
    """
    ordered = sorted(rewards)
    sets = math.comb(len(ordered), k)
    total = 0.0
    for position, reward in enumerate(ordered):
        # If this reward is the best of a set, the set's k − 1 others come before it in `ordered`. (Of equal
        # rewards, the last one counts as the best, which makes no difference for the sum.)
        sets_with_this_best = math.comb(position, k - 1)
        total += sets_with_this_best * max(reward, at_least) ** power
    return total / sets
