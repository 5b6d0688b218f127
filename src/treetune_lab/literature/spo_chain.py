"""SPO-chain: values before every n-th token that the policy was unsure of, and a mask for the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt, Le

from treetune.contracts import Need, SampledAnswers
from treetune.rollouts.base import Credit
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.states import OneLineStates
from treetune.rollouts.values import StateRule
from treetune.vocabulary import Episode, Trajectory
from treetune_lab.literature.token_level import OverAnotherCredit, logprobs_of


@StateRule.register("spo_cut_points")
@dataclass(frozen=True, kw_only=True)
class CutPoints(OneLineStates):
    """Steps that begin with the first, the (n + 1)-th, … token that was sampled with a low probability
    (Guo et al., arXiv:2505.23564, section 4.1, as the public code of SPO-chain cuts).

    The code doesn't value the prompt unless an answer begins with such a token; what lies before the first
    one has no advantage there, and is none of its mask's. `low_probability` ends a step with the token.
    **Biased**: whether a state is valued depends on the token that is sampled there. On the tests' language,
    `below` 0.6 and with one such token a step, the expected gradient is off by 18 % of its length (cosine
    0.992); `low_probability` keeps it exact."""

    below: Annotated[float, Gt(0), Le(1)] = 0.9
    """Counts tokens that were sampled with a smaller probability."""
    every: Annotated[int, Gt(0)] = 5
    """Counted tokens of a step: n."""

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        import numpy as np

        unsure = np.flatnonzero(logprobs_of(trajectory) < math.log(self.below))
        return sorted({0, *unsure[:: self.every].tolist()})

    def usual_states(self, tokens: float) -> float:
        return max(1.0, tokens / self.every)


@Credit.register("probability_mask")
@dataclass(frozen=True, kw_only=True)
class ProbabilityMask(OverAnotherCredit):
    """Another credit's advantages at tokens that were sampled with a probability `below` a bound. The others
    are not trained, and no mean over tokens counts them (the public code of SPO, arXiv:2505.23564).

    An answer that has none keeps its tokens, with an advantage of 0. **Biased**: what the policy is sure of
    never changes. On the tests' language, over RLOO with two answers and below 0.6, by 26 % of the gradient's
    length (cosine 0.96). The selection `tokens` also leaves out what has no advantage."""

    below: Annotated[float, Gt(0), Le(1)] = 0.9
    """Keeps tokens that were sampled with a smaller probability."""

    @property
    def needs(self) -> tuple[Need, ...]:
        return (
            *super().needs,
            Need(SampledAnswers(), "it looks at the probabilities that tokens were sampled with"),
        )

    def weighed(
        self, context: RolloutContext, answers: Sequence[Trajectory], episodes: Sequence[Episode]
    ) -> list[Episode]:
        rows = []
        for answer, episode in zip(answers, episodes, strict=True):
            trained = episode.trained & (logprobs_of(answer) < math.log(self.below))
            assert episode.advantages is not None, "it needs them"
            nothing = replace(episode, advantages=episode.advantages * 0.0)
            rows.append(replace(episode, trained=trained) if trained.any() else nothing)
        return rows
