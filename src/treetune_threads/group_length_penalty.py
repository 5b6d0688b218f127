"""Where most answers to a problem are correct, long critical paths cost something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le

from treetune.contracts import Answers, Need
from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit.episodes import groups_of
from treetune.vocabulary import Trajectory
from treetune_threads.numbers import counts_of
from treetune_threads.tags import TagIds

EPSILON = 1e-6


def group_penalties(
    lengths: Sequence[int], correct: Sequence[bool], *, threshold: float, weight: float, window: int
) -> list[float]:
    """α O_i for each answer of a group, with O_i = clip((L_i − L_shortest correct) / window, 0, 1).

    α is 0 where the share of correct answers is below the threshold τ, and β (share − τ + ε) / (1 − τ + ε)
    from there on, β being the weight: all of it where all are correct (ThreadWeaver's group length penalty).
    """
    share = sum(correct) / len(correct)
    if share < threshold:
        return [0.0] * len(lengths)
    alpha = weight * (share - threshold + EPSILON) / (1.0 - threshold + EPSILON)
    shortest = min(length for length, ok in zip(lengths, correct, strict=True) if ok)
    return [alpha * min(1.0, max(0.0, (length - shortest) / window)) for length in lengths]


@Shaping.register("group_length_penalty")
@dataclass(frozen=True, kw_only=True)
class GroupLengthPenalty(Shaping):
    """Minus `group_penalties` of the critical paths, in tokens, of all answers to a problem. The
    reference has it with these settings, and off."""

    threshold: Annotated[float, Gt(0), Le(1)] = 0.8
    """Share of correct answers in the group from which on length costs anything."""
    weight: Annotated[float, Gt(0)] = 0.2
    """What the longest answers lose at most, where all are correct."""
    window: Annotated[int, Gt(0)] = 10_000
    """Tokens beyond the shortest correct answer at which the penalty is whole."""

    @property
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, Need(Answers(2), "it compares the answers to a problem"))

    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        tags = TagIds.of(context.codec.encode)
        bonuses = [0.0] * len(trajectories)
        for positions in groups_of(trajectories).values():
            group = [trajectories[position] for position in positions]
            penalties = group_penalties(
                [counts_of(one, tags).num_tokens_in_the_longest_thread for one in group],
                [one.grade.correct for one in group],
                threshold=self.threshold,
                weight=self.weight,
                window=self.window,
            )
            for position, penalty in zip(positions, penalties, strict=True):
                bonuses[position] = -penalty
        return bonuses
