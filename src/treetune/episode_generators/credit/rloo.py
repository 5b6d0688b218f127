"""Credit relative to the mean of the other answers: leave one out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treetune.contracts import Advantages, Answers, CreditForRewards, Need
from treetune.episode_generators.base import Credit, GenerationContext
from treetune.episode_generators.credit.episodes import groups_of, whole_answer
from treetune.vocabulary import Episode, Metrics, Trajectory


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """A_i = r_i − mean of r_j over j ≠ i: an unbiased policy gradient.

    Kool et al. 2019 (Buy 4 REINFORCE samples, get a baseline for free), brought to language models
    by Ahmadian et al. (arXiv:2402.14740). Raises ValueError for fewer than two rewards.
    """
    if len(rewards) < 2:
        raise ValueError("rloo compares each answer with the others to its problem: take samples >= 2")
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


@Credit.register("rloo")
@dataclass(frozen=True, kw_only=True)
class Rloo(Credit):
    """RLOO's credit: see `leave_one_out_advantages`."""

    gives = (Advantages(before_training=True), CreditForRewards())
    needs = (Need(Answers(2), "it compares each answer with the others to its problem"),)

    def assign(
        self, context: GenerationContext, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Episode], Metrics]:
        advantages = [0.0] * len(trajectories)
        for problem, positions in groups_of(trajectories).items():
            if len(positions) < 2:
                raise ValueError(
                    f"rloo: problem {problem!r} has one answer and nothing to compare it with; "
                    "set the rollout's `samples` to 2 or more"
                )
            rewards = [trajectories[position].reward for position in positions]
            for position, advantage in zip(positions, leave_one_out_advantages(rewards), strict=True):
                advantages[position] = advantage
        return whole_answer(context, trajectories, advantages)
