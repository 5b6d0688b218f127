"""Shaping: from graders' verdicts to what answers earn."""

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
from treetune.rollouts.metrics import mean, pooled
from treetune.tree import Tree, answers_of, with_answers
from treetune.vocabulary import Metrics, Trajectory


def shaped(
    context: RolloutContext, shapings: Sequence[Shaping], trees: Sequence[Tree]
) -> tuple[list[Tree], Metrics]:
    """Returns this rank's trees, each answer with the sum of all bonuses, and the metrics of all ranks.

    ``shaping/<label>`` is a part's mean bonus, ``<label>/…`` are the numbers that it measures;
    ``episodes/reward`` becomes the mean of what credit is given for, while ``episodes/score`` stays the
    graders' verdict. Collective.
    """
    if not shapings:
        return list(trees), {}
    trajectories = answers_of(trees)
    assessed = {shaping.label: shaping.assess(context, trajectories) for shaping in shapings}
    bonuses = {label: of_label for label, (of_label, _) in assessed.items()}
    earned = [
        replace(trajectory, bonus=math.fsum(of_trajectory))
        for trajectory, *of_trajectory in zip(trajectories, *bonuses.values(), strict=True)
    ]
    columns: dict[str, Sequence[float]] = {f"shaping/{label}": bonuses[label] for label in bonuses}
    for label, (_, measured) in assessed.items():
        columns |= {f"{label}/{name}": values for name, values in measured.items()}
    columns["episodes/reward"] = [trajectory.reward for trajectory in earned]
    gathered = pooled(context, "shaping-metrics", columns)
    return with_answers(trees, earned), {name: mean(values) for name, values in gathered.items() if values}


def groups_of(trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
    """Returns the indices of the answers to each problem, problems in their order of appearance."""
    groups: dict[str, list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.problem.id, []).append(index)
    return groups


@Shaping.register("length_penalty")
@dataclass(frozen=True, kw_only=True)
class LengthPenalty(Shaping):
    """`weight` times `length_bonuses`, in tokens, among the answers to a problem.

    With a weight of 1, the longest right answer still earns 0.5 and no wrong one more than 0.
    """

    weight: Annotated[float, Gt(0)] = 1.0
    """Factor of the bonuses."""
    from_iteration: Annotated[int, Ge(0)] = 0
    """Iteration (from 0) at which it sets in. Its authors train without it at first, since it slows the
    beginning down."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, Need(Answers(2), "it compares the answers to a problem"))

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.from_iteration >= experiment.iterations:
            yield Finding(
                f"it sets in at iteration {self.from_iteration} (from 0), and there are only"
                f" {experiment.iterations}",
                "from_iteration",
                "lower it, or leave the penalty out",
            )

    @override
    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        bonuses = [0.0] * len(trajectories)
        if context.iteration < self.from_iteration:
            return bonuses
        for indices in groups_of(trajectories).values():
            lengths = [len(trajectories[index].response_ids) for index in indices]
            right = [trajectories[index].grade.correct for index in indices]
            for index, bonus in zip(indices, length_bonuses(lengths, right), strict=True):
                bonuses[index] = self.weight * bonus
        return bonuses


def length_bonuses(lengths: Sequence[int], right: Sequence[bool]) -> list[float]:
    """λ = 0.5 − (length − shortest) / (longest − shortest) for right answers, min(0, λ) for wrong ones.

    The length reward of Kimi k1.5 (arXiv:2501.12599, section 2.3.3). Nothing where all are equally
    long: there is nothing to compare.
    """
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    lambdas = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [value if ok else min(0.0, value) for value, ok in zip(lambdas, right, strict=True)]


@Shaping.register("overlong_penalty")
@dataclass(frozen=True, kw_only=True)
class OverlongPenalty(Shaping):
    """`scale` times `overlong_bonus`: the last tokens of the rollout's `max_tokens` cost more and more.

    DAPO samples at most 20480 tokens, of which the last 4096 are the cache, and its right answers
    earn 1 and wrong ones −1: the full penalty is half of what lies between the two there.
    """

    cache: Annotated[int, Gt(0)]
    """Tokens before `max_tokens` in which the penalty grows."""
    scale: Annotated[float, Gt(0)] = 1.0
    """The whole penalty."""

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, Need(SampledAnswers(), "it is about the rollout's max_tokens"))

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        sampling = experiment.rollout.sampling
        if sampling is not None and self.cache > sampling.max_tokens:
            yield Finding(
                f"the cache has {self.cache} tokens, and the rollout's max_tokens is {sampling.max_tokens}:"
                " an answer of no token would be punished",
                "cache",
                "make it smaller",
            )

    @override
    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        sampling = context.settings.sampling
        assert sampling is not None, "`check` has seen that something is sampled"
        return [
            self.scale
            * overlong_bonus(
                len(trajectory.response_ids),
                context.task.of(trajectory.problem).sampling(sampling).max_tokens,
                self.cache,
            )
            for trajectory in trajectories
        ]


def overlong_bonus(length: int, longest: int, cache: int) -> float:
    """0 up to ``longest - cache`` tokens, then linearly down to −1 at `longest`, and −1 beyond.

    DAPO's soft overlong punishment (Yu et al., arXiv:2503.14476, eq. 13).
    """
    free = longest - cache
    return max(-1.0, min(0.0, (free - length) / cache))


@Shaping.register("wrong_answers")
@dataclass(frozen=True, kw_only=True)
class WrongAnswers(Shaping):
    """Less for every answer that isn't right, whatever it scored, also for one that was cut off."""

    penalty: Annotated[float, Gt(0)] = 1.0
    """How much less. With 1 and a grader of 0 and 1, rewards are 1 and −1."""

    @override
    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        return [0.0 if trajectory.grade.correct else -self.penalty for trajectory in trajectories]
