"""Trees that branch at the states of a rule, level by level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, MinLen

from treetune.rollouts.values.base import StateRule
from treetune.vocabulary import Trajectory
from treetune_lab.trees.branching import Branches, Branching, next_states


@Branching.register("at_states")
@dataclass(frozen=True, kw_only=True)
class AtStates(Branching):
    """Every answer goes on in ``ways[0]`` ways from its first state, each of these in ``ways[1]`` ways from
    its second, and so on. An answer that ends before has no more of them.

    With `states` at every 600 tokens, six answers from the prompt and `ways` [6, 6] this is the tree of
    SPO-tree (Guo et al., arXiv:2505.23564). There it grows by segments; here by whole answers, which go
    on as they began in one of the ways. The trees are the same in distribution.
    """

    unbiased = True

    states: StateRule
    """Where it branches: a rule that looks at nothing behind a state keeps the gradient unbiased."""
    ways: Annotated[tuple[Annotated[int, Gt(1)], ...], MinLen(1)]
    """In how many ways an answer goes on from its first state, from its second, …"""

    def most_answers(self, samples: int) -> int:
        return samples * math.prod(self.ways)

    def branches(self, answers: Sequence[Trajectory], number: int) -> list[Branches]:
        if number == len(self.ways):
            return []
        return [
            Branches(sample, tokens, self.ways[number] - 1)
            for sample, tokens in next_states(self.states, answers, number)
        ]
