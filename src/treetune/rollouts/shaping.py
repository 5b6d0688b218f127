"""Shaping: bonuses that are added to the graders' scores, between rollout and credit.

Example: with `length_penalty`, two right answers of 10 and 30 tokens, which both scored 1, earn 1.5 and 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt
from typing_extensions import override

from treetune.contracts import Answers, Experiment, Finding, Need, SampledAnswers
from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import deviation, mean, pool_columns
from treetune.tasks.mixed import task_of, trained_parts_of
from treetune.tree import Tree, answers_of, with_answers
from treetune.vocabulary import Metrics, Trajectory


def apply_shaping(
    context: RolloutContext, shapings: Sequence[Shaping], trees: Sequence[Tree]
) -> tuple[list[Tree], Metrics]:
    """Returns this rank's trees, each answer with the sum of its bonuses, and the metrics of all ranks.
    Collective.

    ``shaping/<label>`` is the mean bonus of a shaping, ``<label>/…`` are the numbers that it measures.
    ``episodes/reward`` becomes the mean reward with bonuses and ``episodes/reward_std`` their standard
    deviation, while ``episodes/score`` stays the mean of the graders' scores.
    """
    if not shapings:
        return list(trees), {}
    trajectories = answers_of(trees)
    columns: dict[str, Sequence[float]] = {}
    bonuses_by_shaping: list[Sequence[float]] = []
    for shaping in shapings:
        bonuses, measures = shaping.assess(context, trajectories)
        bonuses_by_shaping.append(bonuses)
        columns[f"shaping/{shaping.label}"] = bonuses
        for name, values in measures.items():
            columns[f"{shaping.label}/{name}"] = values
    bonuses_by_answer = zip(*bonuses_by_shaping, strict=True)
    answers_with_bonuses = []
    for trajectory, bonuses_of_answer in zip(trajectories, bonuses_by_answer, strict=True):
        answers_with_bonuses.append(replace(trajectory, bonus=math.fsum(bonuses_of_answer)))
    columns["episodes/reward"] = [trajectory.reward for trajectory in answers_with_bonuses]
    all_columns = pool_columns(context, "shaping-metrics", columns)
    metrics = {name: mean(values) for name, values in all_columns.items() if values}
    if all_columns["episodes/reward"]:
        metrics["episodes/reward_std"] = deviation(all_columns["episodes/reward"])
    return with_answers(trees, answers_with_bonuses), metrics


def indices_by_problem(trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
    """Returns the indices of the answers to each problem, by the problem's id. The problems are in the order
    of their first answers."""
    groups: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.problem.id, []).append(index)
    return groups


@Shaping.register("length_penalty")
@dataclass(frozen=True, kw_only=True)
class LengthPenalty(Shaping):
    """Adds `weight` times `length_bonuses`, which compare the lengths in tokens of the answers to a problem.

    With a weight of 1, the longest right answer still earns 0.5 and no wrong one more than 0.
    """

    weight: Annotated[float, Gt(0)] = 1.0
    """Factor of the bonuses."""
    from_iteration: Annotated[int, Ge(0)] = 0
    """The first iteration with the penalty, from 0 on. Its authors train without it at first, since it slows
    down the beginning."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, Need(Answers(2), "it compares the answers to a problem"))

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.from_iteration >= experiment.iterations:
            yield Finding(
                f"it begins at iteration {self.from_iteration} (from 0), and there are only"
                f" {experiment.iterations}",
                "from_iteration",
                "lower it, or leave the penalty out",
            )

    @override
    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        bonuses = [0.0] * len(trajectories)
        if context.iteration < self.from_iteration:
            return bonuses
        for indices in indices_by_problem(trajectories).values():
            lengths = [len(trajectories[index].response_ids) for index in indices]
            are_right = [trajectories[index].grade.correct for index in indices]
            for index, bonus in zip(indices, length_bonuses(lengths, are_right), strict=True):
                bonuses[index] = self.weight * bonus
        return bonuses


def length_bonuses(lengths: Sequence[int], are_right: Sequence[bool]) -> list[float]:
    """Returns λ = 0.5 − (length − shortest) / (longest − shortest) for right answers, min(0, λ) for wrong
    ones.

    If all answers are equally long, all bonuses are 0. This is the length reward of Kimi k1.5
    (arXiv:2501.12599, section 2.3.3).

    Example: two right answers of 10 and 20 tokens and a wrong one of 30 get ``[0.5, 0.0, -0.5]``.
    """
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    bonuses = []
    for length, is_right in zip(lengths, are_right, strict=True):
        bonus = 0.5 - (length - shortest) / (longest - shortest)
        bonuses.append(bonus if is_right else min(0.0, bonus))
    return bonuses


@Shaping.register("overlong_penalty")
@dataclass(frozen=True, kw_only=True)
class OverlongPenalty(Shaping):
    """DAPO's soft overlong punishment: `scale` times `overlong_bonus`, a penalty that grows over the last
    tokens of the rollout's `max_tokens`.

    DAPO samples at most 20480 tokens, of which the last 4096 are the cache. Its right answers earn 1 and
    wrong ones −1, so the full penalty is half of the difference between a right and a wrong answer.
    """

    cache: Annotated[int, Gt(0)]
    """The number of tokens before `max_tokens` over which the penalty grows from 0 to `scale`."""
    scale: Annotated[float, Gt(0)] = 1.0
    """The full penalty, which an answer of `max_tokens` tokens gets."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, Need(SampledAnswers(), "it is about the rollout's max_tokens"))

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        sampling = experiment.rollout.sampling
        if sampling is None:
            return  # `needs` reports it
        # The task may be a mixture of tasks (domains), which may set a lower `max_tokens` than the rollout.
        lowest_limit = sampling.max_tokens
        for task in trained_parts_of(experiment.task):
            lowest_limit = min(lowest_limit, task.adjust_sampling(sampling).max_tokens)
        if self.cache > lowest_limit:
            limit_text = "the rollout's max_tokens is"
            if lowest_limit < sampling.max_tokens:
                limit_text = "the smallest max_tokens of a domain is"
            yield Finding(
                f"the cache has {self.cache} tokens, and {limit_text} {lowest_limit}: an answer of no token"
                " would be punished",
                "cache",
                "make it smaller",
            )

    @override
    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        sampling = context.settings.sampling
        assert sampling is not None, "`needs` asks for a rollout that samples"
        bonuses = []
        for trajectory in trajectories:
            max_tokens = task_of(context.task, trajectory.problem).adjust_sampling(sampling).max_tokens
            bonus = overlong_bonus(len(trajectory.response_ids), max_tokens, self.cache)
            bonuses.append(self.scale * bonus)
        return bonuses


def overlong_bonus(length: int, longest: int, cache: int) -> float:
    """Returns 0 up to ``longest - cache`` tokens, then linearly down to −1 at `longest`, and −1 beyond.

    DAPO's soft overlong punishment (Yu et al., arXiv:2503.14476, eq. 13). Example: ``overlong_bonus(90, 100,
    20)`` is −0.5.
    """
    free_tokens = longest - cache
    return max(-1.0, min(0.0, (free_tokens - length) / cache))


@Shaping.register("wrong_answers")
@dataclass(frozen=True, kw_only=True)
class WrongAnswers(Shaping):
    """Subtracts a penalty from the reward of every answer that isn't right, whatever its score is, also if it
    was cut off."""

    penalty: Annotated[float, Gt(0)] = 1.0
    """The penalty. With 1 and a grader of 0 and 1, rewards are 1 and −1."""

    @override
    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        return [0.0 if trajectory.grade.correct else -self.penalty for trajectory in trajectories]
