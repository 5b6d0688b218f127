"""Credit without a baseline: what the answer earned, for every token of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune.contracts import Advantages, CreditForRewards
from treetune.episode_generators.base import Credit, GenerationContext
from treetune.episode_generators.credit.episodes import episode_of, whole_answer
from treetune.vocabulary import Episode, Metrics, Trajectory


@Credit.register("outcome")
@dataclass(frozen=True, kw_only=True)
class Outcome(Credit):
    """REINFORCE (Williams 1992) with a zero baseline: A_i = r_i."""

    gives = (Advantages(before_training=True), CreditForRewards())

    def assign(
        self, context: GenerationContext, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Episode], Metrics]:
        return whole_answer(context, trajectories, (t.reward for t in trajectories))


@Credit.register("none")
@dataclass(frozen=True, kw_only=True)
class NoCredit(Credit):
    """No advantages, for objectives that need none (`mle`)."""

    gives = (CreditForRewards(),)

    def assign(
        self, context: GenerationContext, trajectories: Sequence[Trajectory]
    ) -> tuple[list[Episode], Metrics]:
        return [episode_of(context, trajectory) for trajectory in trajectories], {}
