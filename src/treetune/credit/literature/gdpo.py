"""GDPO: several rewards, each normalised in its group before they are added (arXiv:2601.05242).

Example: of two answers one is right and badly formatted, the other wrong and well formatted. The sum of both
rewards is 1 for each answer, so GRPO's advantages are 0. With the weights 2 for being right and 1 for the
format, GDPO's advantages are 2 · 0.71 − 0.71 = 0.71 and −2 · 0.71 + 0.71 = −0.71.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Advantages, Answers, Need
from treetune.credit.base import Credit
from treetune.credit.episodes import whole_answer_episodes
from treetune.credit.grpo import group_advantages
from treetune.rollouts.context import RolloutContext
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Episode, Metrics, Trajectory

SCORE_NAME = "score"
"""The name of the grader's reward in `Gdpo.parts`."""


@Credit.register("gdpo")
@dataclass(frozen=True, kw_only=True)
class Gdpo(Credit):
    """GDPO: A_i = Σ_k w_k (r_ik − mean r_k) / (std r_k + `eps`), with mean and standard deviation over the
    answers to the problem (Liu et al., arXiv:2601.05242, as in verl's ``gdpo``).

    The rewards r_ik are numbers that the grader gives with its grade, such as those of a reward function that
    returns a dictionary. In the paper the sum is then normalised over the whole batch. The trainer's
    ``advantage_normalisation: 'whiten'`` does this over all tokens, as verl does.

    **Biased**, as GRPO is: each reward is divided by its own standard deviation. With the score as the only
    part, GDPO is GRPO: on the tests' language the expected gradient is too short by 15 % with three answers
    (cosine 1).
    """

    parts: Mapping[str, float]
    """The weight of each reward, by the name of the grader's number; ``score`` is the grader's reward
    itself. Example: ``{"score": 1.0, "rewards/format": 0.2}``."""
    eps: Annotated[float, Gt(0)] = 1e-6
    """Added to each standard deviation."""

    # `CreditForRewards` is left out: shaping changes the sum of the rewards, which this credit doesn't use.
    gives = (Advantages(before_training=True),)
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def __post_init__(self) -> None:
        if not any(self.parts.values()):
            raise ValueError(
                "parts gives no reward a weight: name the grader's numbers, such as"
                " {'score': 1.0, 'rewards/format': 0.2}"
            )

    @override
    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        advantages: list[float] = []
        for tree in trees:
            advantages += self._sum_parts(tree)
        return whole_answer_episodes(context, answers_of(trees), advantages)

    def _sum_parts(self, tree: Tree) -> list[float]:
        """Returns the advantage A_i of each answer to a problem: the weighted sum of its normalised
        rewards."""
        sums = [0.0] * len(tree.leaves)
        for name, weight in self.parts.items():
            rewards = [reward_part(answer, name) for answer in tree.leaves]
            normalised = group_advantages(rewards, std=True, eps=self.eps)
            for index, advantage in enumerate(normalised):
                sums[index] += weight * advantage
        return sums


def reward_part(answer: Trajectory, name: str) -> float:
    """Returns one of an answer's rewards. It is 0 if the grader failed on the answer, for example by a
    timeout, and so gave no numbers.

    Args:
        answer: The answer.
        name: The name of the reward; see `Gdpo.parts`.

    Raises:
        ValueError: The grader gave the answer numbers, but none of this name.
    """
    if name == SCORE_NAME:
        return answer.score
    numbers = answer.grade.numbers
    if name in numbers:
        return numbers[name]
    if answer.grade.outcome != "ok":
        return 0.0
    names = ", ".join(map(repr, [SCORE_NAME, *sorted(numbers)]))
    raise ValueError(
        f"gdpo: the grade of answer {answer.id} has no number {name!r}; it has {names}. Name these in parts,"
        " or let the reward function return a dictionary with the missing number"
    )
