"""Trees that branch as they grow longer, until they are as wide as wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from treetune.rollouts.values.base import StateRule
from treetune.vocabulary import Trajectory
from treetune_lab.trees.branching import Branches, Branching, next_states


@Branching.register("up_to_width")
@dataclass(frozen=True, kw_only=True)
class UpToWidth(Branching):
    """At each state of the rule the answers that are still being written share what is left of `width`
    answers, and none goes on in more than `most_ways` ways.

    With `states` at even distances these are TreePO's trees (Li et al., arXiv:2508.17445, section 3), without
    its early stops and its restarts from random places: answers that end early leave their share to the
    others. Who is being written at a state is known there, so that branches are fair samples.
    """

    unbiased = True

    states: StateRule
    width: Annotated[int, Gt(1)]
    """Answers of a tree."""
    most_ways: Annotated[int, Gt(1)] = 2

    def most_answers(self, samples: int) -> int:
        return max(samples, self.width)

    def branches(self, answers: Sequence[Trajectory], number: int) -> list[Branches]:
        going_on = next_states(self.states, answers, number)
        left = self.width - len(answers)
        found = []
        for place, (sample, tokens) in enumerate(going_on):
            share, more = divmod(max(left, 0), len(going_on))
            count = min(share + (place < more), self.most_ways - 1)
            if count:
                found.append(Branches(sample, tokens, count))
        return found
