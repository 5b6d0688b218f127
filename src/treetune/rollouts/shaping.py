"""Shaping: from graders' verdicts to what answers earn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt

from treetune.contracts import Answers, Experiment, Finding, Need, SampledAnswers
from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import groups_of
from treetune.rollouts.metrics import mean, pooled
from treetune.tree import Tree, answers_of, with_answers
from treetune.vocabulary import Metrics, Trajectory


def shaped(
    context: RolloutContext, shapings: Sequence[Shaping], trees: Sequence[Tree]
) -> tuple[list[Tree], Metrics]:
    """This rank's trees, each answer with the sum of all bonuses, and the metrics of all ranks.

    ``shaping/<label>`` is a part's mean bonus, ``<label>/…`` what else it tells; ``episodes/reward`` becomes
    the mean of what credit is given for, while ``episodes/score`` stays what graders said. Collective.
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
    everyones = pooled(context, "shaping-metrics", columns)
    return with_answers(trees, earned), {name: mean(values) for name, values in everyones.items() if values}


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


@Shaping.register("length_penalty")
@dataclass(frozen=True, kw_only=True)
class LengthPenalty(Shaping):
    """`weight` times `length_bonuses`, in tokens, among the answers to a problem.

    With a weight of 1, the longest right answer still earns 0.5 and no wrong one more than 0. Its
    authors train without it at first, since it slows the beginning down: `from_iteration` (from 0) says
    when it sets in.
    """

    weight: Annotated[float, Gt(0)] = 1.0
    from_iteration: Annotated[int, Ge(0)] = 0

    @property
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, Need(Answers(2), "it compares the answers to a problem"))

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if self.from_iteration >= experiment.iterations:
            yield Finding(
                f"it sets in at iteration {self.from_iteration} (from 0), and there are only"
                f" {experiment.iterations}",
                "from_iteration",
                "lower it, or leave the penalty out",
            )

    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        bonuses = [0.0] * len(trajectories)
        if context.iteration < self.from_iteration:
            return bonuses
        for positions in groups_of(trajectories).values():
            group = [trajectories[position] for position in positions]
            lengths = [len(trajectory.response_ids) for trajectory in group]
            right = [trajectory.grade.correct for trajectory in group]
            for position, bonus in zip(positions, length_bonuses(lengths, right), strict=True):
                bonuses[position] = self.weight * bonus
        return bonuses


def overlong_bonus(length: int, longest: int, cache: int) -> float:
    """0 up to ``longest - cache`` tokens, then linearly down to −1 at `longest`, and −1 beyond.

    DAPO's soft overlong punishment (Yu et al., arXiv:2503.14476, eq. 13).
    """
    free = longest - cache
    return max(-1.0, min(0.0, (free - length) / cache))


@Shaping.register("overlong_penalty")
@dataclass(frozen=True, kw_only=True)
class OverlongPenalty(Shaping):
    """`scale` times `overlong_bonus`: the last `cache` of the rollout's `max_tokens` cost more and more.

    DAPO samples at most 20480 tokens, of which the last 4096 are the cache, and its right answers
    earn 1 and wrong ones −1: the full penalty is half of what lies between the two there.
    """

    cache: Annotated[int, Gt(0)]
    scale: Annotated[float, Gt(0)] = 1.0

    @property
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, Need(SampledAnswers(), "it is about the rollout's max_tokens"))

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        sampling = experiment.rollout.sampling
        if sampling is not None and self.cache > sampling.max_tokens:
            yield Finding(
                f"the cache has {self.cache} tokens, and the rollout's max_tokens is {sampling.max_tokens}:"
                " an answer of no token would be punished",
                "cache",
                "make it smaller",
            )

    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        assert context.settings.sampling is not None, "`check` has seen that something is sampled"
        bonuses = []
        for one in trajectories:
            longest = context.task.of(one.problem).sampling(context.settings.sampling).max_tokens
            bonuses.append(self.scale * overlong_bonus(len(one.response_ids), longest, self.cache))
        return bonuses


@Shaping.register("wrong_answers")
@dataclass(frozen=True, kw_only=True)
class WrongAnswers(Shaping):
    """`penalty` less for every answer that isn't right, whatever it scored, also for one that was cut
    off. With 1 and a grader of 0 and 1, rewards are 1 and −1."""

    penalty: Annotated[float, Gt(0)] = 1.0

    def bonuses(self, context: RolloutContext, trajectories: Sequence[Trajectory]) -> list[float]:
        return [0.0 if trajectory.grade.correct else -self.penalty for trajectory in trajectories]
