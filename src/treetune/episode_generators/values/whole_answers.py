"""States from which a rollout writes whole answers again: it alone knows how they go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from treetune.episode_generators.values.base import Beginning, Budget, Estimate
from treetune.vocabulary import Trajectory

Start = TypeVar("Start")


def estimated(
    beginnings: Sequence[Beginning],
    budget: Budget,
    start: Callable[[Beginning, int], Start],
    answers: Callable[[Sequence[Start]], Sequence[Trajectory]],
) -> list[Estimate]:
    """What answers through each state earn. `start` says how the answer of that number goes on from a state,
    and `answers` writes those of many starts, in their order."""
    found: list[list[Trajectory]] = [[] for _ in beginnings]
    waiting, turn = list(range(len(beginnings))), 0
    while waiting:
        counts = {place: budget.ask(turn, partial(_rewards, found[place])) for place in waiting}
        owners = [place for place, count in counts.items() for _ in range(count)]
        starts = [
            start(beginnings[place], len(found[place]) + again)
            for place, count in counts.items()
            for again in range(count)
        ]
        for place, answer in zip(owners, answers(starts), strict=True):
            found[place].append(answer)
        waiting, turn = [place for place in waiting if counts[place]], turn + 1
    return [_estimate(*of_state, budget) for of_state in zip(beginnings, found, strict=True)]


def _rewards(answers: Sequence[Trajectory]) -> list[float]:
    """Of those that could be graded."""
    return [answer.reward for answer in answers if answer.grade.is_known]


def _estimate(beginning: Beginning, answers: Sequence[Trajectory], budget: Budget) -> Estimate:
    known = sum(len(segment.token_ids) for segment in beginning.segments if segment.origin == "sampled")
    sampled = [len(s.token_ids) for one in answers for s in one.segments if s.origin == "sampled"]
    rewards = _rewards(answers)
    counted = budget.counted(rewards)
    return Estimate(
        rewards=tuple(counted),
        unfinished=sum(one.unfinished for one in answers),
        tokens=sum(sampled) - known * len(answers),
        unavailable=len(answers) - len(rewards),
        set_aside=len(rewards) - len(counted),
    )
