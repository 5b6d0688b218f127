"""A penalty for answers that come near the budget of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.contracts import Experiment, Finding, Need, SampledAnswers
from treetune.rollouts.base import Shaping
from treetune.rollouts.context import RolloutContext
from treetune.vocabulary import Trajectory


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
