"""Rules for states that look at tokens, not at the text: every n tokens, and at tokens of low probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le
from typing_extensions import override

from treetune.credit.states.base import StateRule
from treetune.credit.states.one_line import OneLineStates
from treetune.tasks.base import Task
from treetune.vocabulary import Trajectory


@StateRule.register("every_n_tokens")
@dataclass(frozen=True, kw_only=True)
class EveryNTokens(OneLineStates):
    """Cuts an answer into steps of equally many tokens; the last step has the remaining ones.

    The position of a state depends on nothing that is sampled, so the gradient of unbiased values stays
    unbiased."""

    tokens: Annotated[int, Gt(0)]
    """The number of tokens in a step."""

    @override
    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return range(0, trajectory.step_ends[-1], self.tokens)

    @override
    def looks_back(self, task: Task) -> bool:
        return True

    @override
    def usual_states(self, tokens: float) -> float:
        return max(1.0, tokens / self.tokens)


@StateRule.register("low_probability")
@dataclass(frozen=True, kw_only=True)
class LowProbability(OneLineStates):
    """Ends a step at every n-th token that was sampled with a low probability, since the value may change
    where the policy had a choice (the cut points of SPO-chain, arXiv:2505.23564, section 4.1).

    The token itself belongs to the step that it ends. So a boundary depends only on the tokens before it, and
    the gradient of unbiased values stays unbiased. With `begin_with`, steps begin with such tokens instead,
    and the gradient is **biased**: on the tests' language, with `below` 0.6 and `every` 1, it is off by 18 %
    of its length (cosine 0.992).

    Example: with ``below: 0.5`` and ``every: 1``, an answer of 5 tokens that were sampled with the
    probabilities 0.9, 0.4, 0.8, 0.3, 0.9 has the states 0, 2 and 4.
    """

    below: Annotated[float, Gt(0), Le(1)] = 0.9
    """A token has a low probability if it was sampled with a probability smaller than this."""
    every: Annotated[int, Gt(0)] = 5
    """n: the number of tokens of low probability in a step."""
    begin_with: bool = False
    """Whether steps begin with the first, the (n + 1)-th, … token of low probability instead, as in the
    public code of SPO-chain. That code doesn't estimate the value of prompts: its mask leaves out the tokens
    before the first such token."""

    @override
    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        unlikely: list[int] = []  # the positions of tokens with a low probability
        length = 0
        for segment in trajectory.segments:
            # Tokens that the policy did not sample, such as a tool's reply, have no log-probs.
            if segment.logprobs is not None:
                for position, logprob in enumerate(segment.logprobs.tolist(), start=length):
                    if logprob < math.log(self.below):
                        unlikely.append(position)
            length += len(segment.token_ids)
        if self.begin_with:  # a step begins with every n-th unlikely token, from the first one on
            starts = unlikely[:: self.every]
        else:  # a step ends with every n-th unlikely token
            last_tokens = unlikely[self.every - 1 :: self.every]
            starts = [position + 1 for position in last_tokens]
        # No step begins after the last token.
        return sorted({0, *(start for start in starts if start < length)})

    @override
    def looks_back(self, task: Task) -> bool:
        return not self.begin_with
