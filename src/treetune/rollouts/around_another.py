"""What a rollout that goes about with another one leaves to that one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treetune.contracts import Feature
from treetune.inference.base import SamplingParams
from treetune.rollouts.base import Rollout
from treetune.rollouts.single_turn import for_fixed_problems
from treetune.tasks.base import Task
from treetune.vocabulary import TextCodec


@dataclass(frozen=True, kw_only=True)
class RolloutAround(Rollout):
    """How answers are made and sampled is the inner `rollout`'s affair."""

    rollout: Rollout

    @property
    def gives(self) -> tuple[Feature, ...]:
        return self.rollout.gives

    @property
    def samples(self) -> int:  # type: ignore[override]
        return self.rollout.samples

    @property
    def unfinished_reward(self) -> float | None:  # type: ignore[override]
        return self.rollout.unfinished_reward

    @property
    def max_prompt_tokens(self) -> int | None:  # type: ignore[override]
        return self.rollout.max_prompt_tokens

    @property
    def sampling(self) -> SamplingParams | None:
        return self.rollout.sampling

    @property
    def sampler(self) -> Rollout:
        return for_fixed_problems(self.rollout)

    def missing(self, task: Task) -> Sequence[str]:
        return self.rollout.missing(task)

    def prepare(self, codec: TextCodec) -> None:
        self.rollout.prepare(codec)
