"""Among the answers to a problem, shorter ones earn more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from treetune.contracts import Answers, Experiment, Finding, Need
from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit.episodes import groups_of
from treetune.vocabulary import Trajectory


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
