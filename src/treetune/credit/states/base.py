"""States of answers, how they are continued, and the estimates of their values.

A *state* is a prefix of an answer: the prompt and the first tokens of the response. Its *value* is the reward
that the policy earns on average when it continues from there. Monte-Carlo credit estimates this value: it
samples *continuations* of the state, grades each of them together with the prefix, and takes the mean reward.

The classes of this module, for an answer ``1+1=2\\n2+2=4`` and the state before its second step:

    StateRule          where the states of an answer lie       step_starts(answer) == [0, 6]
    AnswerPrefix       a state, as it is continued             AnswerPrefix(problem, prompt_ids, segments)
    Budget             how many continuations a state gets     FixedBudget(samples=9)
    ContinuationPlan   a budget, and the sampling parameters   ContinuationPlan(FixedBudget(9), sampling)
    Estimate           rewards and cost of continuations       Estimate(all_rewards=(1.0, 0.0, ...), ...)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.engine.requests import SamplingParams
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import mean
from treetune.tasks.base import Task
from treetune.vocabulary import Problem, Segment, TokenIds, Trajectory, concatenate

TOKENS_OF_A_STEP = 50
"""A guess of the tokens of a step, about those of a line of a mathematical solution. Only plans use it."""

STATES_REMEDY = (
    "choose the credit 'group', or 'monte_carlo' with states {type: 'threads'} for threads and"
    " {type: 'turns'} for turns"
)


class AnswerPrefix(NamedTuple):
    """A state as it is continued: the problem, its prompt, and the answer so far."""

    problem: Problem
    prompt_ids: TokenIds
    segments: tuple[Segment, ...]

    @staticmethod
    def of(problem: Problem, prompt_ids: TokenIds, path: Sequence[Segment], length: int) -> AnswerPrefix:
        """Returns the prefix of the first `length` tokens of an answer with the segments `path`."""
        segments = []
        remaining_tokens = length
        for segment in path:
            count = min(remaining_tokens, len(segment.token_ids))
            if not count:
                break
            # Log-probs are left out, since continuations are never trained on.
            segments.append(replace(segment, token_ids=segment.token_ids[:count], logprobs=None))
            remaining_tokens -= count
        return AnswerPrefix(problem, prompt_ids, tuple(segments))

    @property
    def token_ids(self) -> TokenIds:
        """The answer's tokens, without the prompt's."""
        return concatenate([segment.token_ids for segment in self.segments])

    @property
    def key(self) -> bytes:
        """A digest of the prefix. Equal prefixes have the same digest, also on different ranks; different
        prefixes have different digests."""
        digest = hashlib.blake2b(repr(self.problem.id).encode(), digest_size=16)
        for segment in self.segments:
            digest.update(repr((segment.branch, segment.origin, len(segment.token_ids))).encode())
            digest.update(segment.token_ids.tobytes())
        return digest.digest()


@dataclass(frozen=True)
class Estimate:
    """The rewards of a state's continuations, and their cost.

    Example: three continuations, of which the second could not be graded::

        Estimate(all_rewards=(1.0, None, 0.0), rewards=(1.0, 0.0), unfinished=0, tokens=57)   # value 0.5
    """

    all_rewards: tuple[float | None, ...]
    """The reward of each continuation, in the order of sampling; None for one that could not be graded."""
    rewards: tuple[float, ...]
    """The rewards that count towards the value (`Budget.counted`). Those of a pilot don't: they only decided
    how many continuations follow."""
    unfinished: int
    """The number of continuations that were cut off at the token limit."""
    tokens: int
    """The number of tokens that were sampled in all continuations."""

    @property
    def value(self) -> float | None:
        """The mean reward; None where no continuation could be graded."""
        return mean(self.rewards) if self.rewards else None


class Budget:
    """Decides how many continuations a state gets, from the rewards of its continuations so far.

    For each state, a budget is asked in rounds (`ask`): how many continuations to sample first, and after
    each round how many more. It doesn't know which state it is asked for. An estimator that gives different
    states different budgets calls `Valuation.sample` several times.

    Make a subclass a frozen dataclass. Continuations that were sampled early are found again only if the
    budget is equal to the earlier one: if budgets with equal settings don't compare equal, the continuations
    are sampled twice.
    """

    adaptive: bool = True
    """Whether the number of continuations depends on rewards."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of continuations that a state can have, for plans."""
        first_count = self.ask(0, lambda: ())  # before the first round there are no rewards
        return first_count, first_count

    def ask(self, round_number: int, rewards: Callable[[], Sequence[float]]) -> int:
        """Returns how many continuations to sample in this round; 0 ends the sampling.

        Args:
            round_number: 0 for a state without continuations. It increases by one with each round.
            rewards: Returns the rewards of all continuations so far, without those that could not be graded.
        """
        raise NotImplementedError

    def counted(self, rewards: Sequence[float]) -> Sequence[float]:
        """Returns the rewards that count towards the value."""
        return rewards


@dataclass(frozen=True)
class FixedBudget(Budget):
    """Gives every state the same number of continuations: VinePPO's K (Kazemnejad et al., arXiv:2410.01679,
    section 4)."""

    samples: int

    adaptive = False

    @override
    def ask(self, round_number: int, rewards: Callable[[], Sequence[float]]) -> int:
        return self.samples if round_number == 0 else 0


class ContinuationPlan(NamedTuple):
    """How states are continued: how often, with which sampling parameters, and for which purpose.

    Example: VinePPO's, ``ContinuationPlan(FixedBudget(9), SamplingParams(max_tokens=1024), "value")``.
    """

    budget: Budget
    sampling: SamplingParams
    purpose: str = "value"
    """A word from which seeds are derived, so that two purposes never get the same continuation."""


class StepRows(NamedTuple):
    """The steps of an answer as its training row has them. Each field has one entry for each step."""

    ends: tuple[int, ...]
    """The number of response tokens up to the end of each step."""
    advantages: Sequence[float]
    values: Sequence[float]
    """The value of the state before each step."""
    errors: Sequence[float]
    """The standard errors of the values."""


class StateRule(Registrable):
    """Decides where the states of an answer lie, and how the answer is continued from each of them."""

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        """Returns for each step of an answer the number of response tokens before it. The answer's states are
        at these positions.

        Example: ``[0, 6, 12]`` for an answer of three steps; 0 is the state of the prompt.
        """
        raise NotImplementedError

    def looks_back(self, task: Task) -> bool:
        """Returns whether the position of a state depends only on the tokens before it, in answers to the
        task's problems. If it does, and values are unbiased, the expected gradient is the policy gradient. A
        rule that does not override this counts as one whose positions depend on more."""
        return False

    def usual_states(self, tokens: float) -> float:
        """Estimates how many states an answer of this number of tokens has, for plans."""
        return max(1.0, tokens / TOKENS_OF_A_STEP)

    def step_rows(
        self,
        trajectory: Trajectory,
        advantages: Sequence[float],
        values: Sequence[float],
        errors: Sequence[float],
    ) -> StepRows:
        """Returns the steps of the training row.

        A rule overrides this if the row has other steps than those between two states.

        Args:
            trajectory: The answer.
            advantages: The advantage of the step after each state.
            values: The value of each state.
            errors: The standard error of each of `values`.
        """
        # A step ends where the next one begins, and the last one where the answer ends.
        ends = (*tuple(self.step_starts(trajectory))[1:], trajectory.step_ends[-1])
        return StepRows(ends, advantages, values, errors)

    def begins_early(self, context: RolloutContext) -> bool:
        """Returns whether a state can be continued with `begin` before all answers are sampled."""
        return False

    async def begin(self, context: RolloutContext, prefix: AnswerPrefix, plan: ContinuationPlan) -> Any:
        """Samples continuations of a state while other answers are still sampled.

        Returns:
            An object from which `estimate` resumes these continuations. `estimate` gets it from
            `EarlyContinuations.find`.
        """
        raise NotImplementedError

    def estimate(
        self, context: RolloutContext, prefixes: Sequence[AnswerPrefix], plan: ContinuationPlan
    ) -> list[Estimate]:
        """Continues each state, and returns the estimates in the order of the states.

        The seed of each continuation derives from the state and `plan.purpose`, but not from the rank or the
        time. So the result doesn't depend on which rank samples the continuation, or when.
        """
        raise NotImplementedError
