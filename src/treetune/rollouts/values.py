"""Values of states: prefixes of answers, budgets of continuations, estimates, and rules for states."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from typing_extensions import override

from treetune.config.registrable import Registrable
from treetune.engine.base import SamplingParams
from treetune.rollouts.context import AnswerObserver, RolloutContext
from treetune.rollouts.metrics import mean
from treetune.tasks.base import Task
from treetune.vocabulary import Problem, Segment, TokenIds, Trajectory, joined

TOKENS_OF_A_STEP = 50
"""Tokens of a line of a mathematical solution, about: a guess for plans alone."""


class AnswerPrefix(NamedTuple):
    """A state as it is continued: the problem, its prompt, and the answer so far."""

    problem: Problem
    prompt_ids: TokenIds
    segments: tuple[Segment, ...]

    @staticmethod
    def of(problem: Problem, prompt_ids: TokenIds, path: Sequence[Segment], length: int) -> AnswerPrefix:
        """The first `length` tokens of an answer."""
        segments = []
        for segment in path:
            count = min(length, len(segment.token_ids))
            if not count:
                break
            segments.append(replace(segment, token_ids=segment.token_ids[:count], logprobs=None))
            length -= count
        return AnswerPrefix(problem, prompt_ids, tuple(segments))

    @property
    def token_ids(self) -> TokenIds:
        """The answer's tokens, without the prompt's."""
        return joined([segment.token_ids for segment in self.segments])

    @property
    def key(self) -> bytes:
        """A digest that only equal states share, on whichever rank."""
        digest = hashlib.blake2b(repr(self.problem.id).encode(), digest_size=16)
        for segment in self.segments:
            digest.update(repr((segment.branch, segment.origin, len(segment.token_ids))).encode())
            digest.update(segment.token_ids.tobytes())
        return digest.digest()


@dataclass(frozen=True)
class Estimate:
    """What a state's continuations earned, and their cost."""

    earned: tuple[float | None, ...]
    """The reward of each continuation, in the order of sampling; None where nobody could grade it."""
    rewards: tuple[float, ...]
    """Those that count: not of a pilot, which only decided how many there are."""
    unfinished: int
    """Continuations that were cut off."""
    tokens: int
    """Tokens that were sampled in all continuations."""

    @property
    def value(self) -> float | None:
        """The mean reward; None where no continuation could be graded."""
        return mean(self.rewards) if self.rewards else None


class Budget:
    """Decides how often a state is continued.

    Make it a frozen dataclass: continuations that began with their answer are found again by comparing
    budgets, and are requested twice where equal settings don't compare equal.
    """

    adaptive: bool = True
    """Whether the number of continuations depends on rewards."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most continuations that a state can have, for plans."""
        first = self.ask(0, tuple)
        return first, first

    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        """Returns how many continuations to sample next: in turn 0 of a state without any, and again whenever
        those of the turn before are there; 0 ends it. `rewards` waits for the grades of all so far."""
        raise NotImplementedError

    def counted(self, rewards: Sequence[float]) -> Sequence[float]:
        """Returns the rewards that the estimate is made of."""
        return rewards


@dataclass(frozen=True)
class FixedBudget(Budget):
    """The same number for every state: VinePPO's K (Kazemnejad et al., arXiv:2410.01679, section 4)."""

    samples: int

    adaptive = False

    @override
    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        return self.samples if turn == 0 else 0


class ContinuationPlan(NamedTuple):
    """How states are continued: how often, sampled how, and for which purpose. No two purposes share a
    continuation."""

    budget: Budget
    sampling: SamplingParams
    purpose: str = "value"


class StepRows(NamedTuple):
    """The steps of an answer as its training row has them."""

    ends: tuple[int, ...]
    advantages: Sequence[float]
    values: Sequence[float]
    """Value of the state before each step."""
    errors: Sequence[float]
    """Standard errors of the values."""


class StateRule(Registrable):
    """A rule for where values are wanted in an answer, and how the answer is continued from there."""

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        """Returns how many of the answer's tokens stand before each of its steps, from 0 on. There its states
        lie."""
        raise NotImplementedError

    def looks_back(self, task: Task) -> bool:
        """Returns whether the places of states in answers to the task's problems depend on nothing behind
        them, so that credit of unbiased values has the policy's gradient. False where a rule doesn't say
        so."""
        return False

    def usual_states(self, tokens: float) -> float:
        """Returns how many states an answer of so many tokens may have, for plans; a guess, where the text
        decides."""
        return max(1.0, tokens / TOKENS_OF_A_STEP)

    def step_rows(
        self,
        trajectory: Trajectory,
        advantages: Sequence[float],
        values: Sequence[float],
        errors: Sequence[float],
    ) -> StepRows:
        """Returns the steps for the training row, given one number of each kind for each state."""
        ends = (*tuple(self.step_starts(trajectory))[1:], trajectory.step_ends[-1])
        return StepRows(ends, advantages, values, errors)

    def begins_early(self, context: RolloutContext) -> bool:
        """Returns whether a state can be continued before all answers are there, with `begin`."""
        return False

    async def begin(self, context: RolloutContext, prefix: AnswerPrefix, plan: ContinuationPlan) -> Any:
        """Samples continuations of a state among the answers that are still sampled, and returns what
        `estimate` needs to go on from them: it finds that among the `EarlyContinuations`."""
        raise NotImplementedError

    def estimate(
        self, context: RolloutContext, prefixes: Sequence[AnswerPrefix], plan: ContinuationPlan
    ) -> list[Estimate]:
        """Continues each state. The seed of each continuation derives from the state and the plan's purpose
        alone, whichever rank samples it, and when."""
        raise NotImplementedError


@dataclass
class EarlyContinuations:
    """The continuations that credit samples with each answer, so that it needn't wait for the slowest one.

    They are the requests, with the seeds, that it would make afterwards. Answers that nobody could grade cost
    nothing, nor do problems of which fewer than `least` answers could be graded, since these are left out of
    training: an answer waits until so many of its problem's are there.

    A rollout takes part through `attached`; in the credit phase this object is a service of the context, and
    estimates take up what has `begun`.
    """

    rule: StateRule
    plan: ContinuationPlan
    first_states: Callable[[int], Sequence[int]]
    """Given how many states an answer has, returns those that are wanted whatever the others are."""
    max_states: int | None = None
    least: int = 1
    begun: dict[bytes, Any] = field(default_factory=dict)
    """What `StateRule.begin` returned, by the state's key; None while it is at work."""
    _graded: dict[str, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))
    """The answers of each problem that could be graded, in the order in which they came."""

    def attached(self, context: RolloutContext) -> RolloutContext:
        """Returns the rollout's context, with an observer that continues the states of each answer."""

        async def observe(answer: Trajectory) -> None:
            prefixes = self._new_states(answer)
            # The context without this observer: it isn't told of continuations.
            await asyncio.gather(*(self._begin(context, prefix) for prefix in prefixes))

        return context.with_services(AnswerObserver(observe))

    def find(self, prefix: AnswerPrefix, plan: ContinuationPlan) -> Any:
        """Returns what was begun of this state with this plan; None where nothing was."""
        return self.begun.get(prefix.key) if plan == self.plan else None

    def _new_states(self, answer: Trajectory) -> list[AnswerPrefix]:
        """Returns the states to begin with now that this answer is graded."""
        if not answer.grade.is_known:
            return []
        graded = self._graded[answer.problem.id]
        graded.append(answer)
        if len(graded) < self.least:
            return []
        # The first `least` answers begin together, each later one by itself.
        answers = graded if len(graded) == self.least else [answer]
        new = []
        for ready in answers:
            starts = self.rule.step_starts(ready)[: self.max_states]
            for index in self.first_states(len(starts)):
                prefix = AnswerPrefix.of(ready.problem, ready.prompt_ids, ready.segments, starts[index])
                if prefix.key not in self.begun:  # answers share states, the prompt at least
                    self.begun[prefix.key] = None
                    new.append(prefix)
        return new

    async def _begin(self, context: RolloutContext, prefix: AnswerPrefix) -> None:
        self.begun[prefix.key] = await self.rule.begin(context, prefix, self.plan)
