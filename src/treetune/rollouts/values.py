"""Values of states: states, budgets of continuations, estimates, and the rules that say where states lie."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from treetune.config.registrable import Registrable
from treetune.inference.base import Completion, Later, Request, SamplingParams
from treetune.inference.pipelined import PipelinedEngine
from treetune.rollouts.answers import with_unfinished
from treetune.rollouts.context import AnswerObserver, RolloutContext
from treetune.rollouts.metrics import mean
from treetune.vocabulary import Grade, Problem, Segment, TokenIds, Trajectory, joined

TOKENS_OF_A_STEP = 50
"""Of a line of a mathematical solution, about: a guess for plans alone."""


@dataclass(frozen=True)
class Estimate:
    """What continuations of a state earned; how many were cut off, their sampled tokens in all, and how many
    could not be graded, and how many were set aside because they decided how many there are: neither are
    among the rewards."""

    rewards: tuple[float, ...]
    unfinished: int
    tokens: int
    unavailable: int = 0
    set_aside: int = 0

    @property
    def samples(self) -> int:
        """Continuations in all."""
        return len(self.rewards) + self.unavailable + self.set_aside

    @property
    def value(self) -> float | None:
        """None where no continuation could be graded: nobody knows what the state is worth."""
        return mean(self.rewards) if self.rewards else None


class Beginning(NamedTuple):
    """A state as whoever goes on from it needs it: what was asked, and what is there of the answer."""

    problem: Problem
    prompt_ids: TokenIds
    segments: tuple[Segment, ...]

    @staticmethod
    def of(problem: Problem, prompt_ids: TokenIds, path: Sequence[Segment], length: int) -> Beginning:
        """The first `length` tokens of an answer."""
        segments = []
        for segment in path:
            own = min(length, len(segment.token_ids))
            if not own:
                break
            segments.append(replace(segment, token_ids=segment.token_ids[:own], logprobs=None))
            length -= own
        return Beginning(problem, prompt_ids, tuple(segments))

    @property
    def token_ids(self) -> TokenIds:
        """Without the prompt's."""
        return joined([segment.token_ids for segment in self.segments])

    @property
    def key(self) -> bytes:
        """The same for equal states alone, on whichever rank."""
        digest = hashlib.blake2b(repr(self.problem.id).encode(), digest_size=16)
        for segment in self.segments:
            digest.update(repr((segment.branch, segment.origin, len(segment.token_ids))).encode())
            digest.update(segment.token_ids.tobytes())
        return digest.digest()


class Budget:
    """Decides how often a state is gone on from."""

    adaptive: bool = True
    """Whether what it asks for depends on rewards."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most continuations that a state can have, for whoever plans a run."""
        first = self.ask(0, tuple)
        return first, first

    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        """How many continuations to sample next: in turn 0 of a state that nothing is known of, and again
        whenever those of the turn before are there. 0: it is known well enough. `rewards` waits for the
        grades of all so far.
        """
        raise NotImplementedError

    def counted(self, rewards: Sequence[float]) -> Sequence[float]:
        """Those that the estimate is made of: all, unless some were sampled to decide how many to ask for."""
        return rewards


@dataclass(frozen=True)
class FixedBudget(Budget):
    """The same number for every state: VinePPO's K (Kazemnejad et al., arXiv:2410.01679, section 4)."""

    samples: int

    adaptive = False

    def ask(self, turn: int, rewards: Callable[[], Sequence[float]]) -> int:
        return self.samples if turn == 0 else 0


class OpenState:
    """A state that is being gone on from, by whoever gives its requests to the engine."""

    def ask(self) -> Sequence[Request | Later]:
        """What to sample next; nothing where something is on its way, or enough is known."""
        raise NotImplementedError

    def answered(self, index: int, completions: list[Completion]) -> Sequence[Request | Later]:
        """Takes what was sampled, and asks on. As `OnResult`; its requests are answered one by one."""
        raise NotImplementedError


class Steps(NamedTuple):
    """Steps of an answer as its training row has them: where each ends, what it and its beginning are
    worth, and the latter's standard error."""

    ends: tuple[int, ...]
    advantages: Sequence[float]
    values: Sequence[float]
    errors: Sequence[float]


class StateRule(Registrable):
    """Where values are wanted in an answer, and how it is gone on with from there."""

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        """How many of the answer's tokens stand before each of its steps: there are its states, from 0 on."""
        raise NotImplementedError

    def usual_states(self, tokens: float) -> float:
        """How many an answer of so many tokens may have, for whoever plans a run; a guess, where the text
        decides."""
        return max(1.0, tokens / TOKENS_OF_A_STEP)

    def laid_out(
        self,
        trajectory: Trajectory,
        advantages: Sequence[float],
        values: Sequence[float],
        errors: Sequence[float],
    ) -> Steps:
        """Advantages and values of its steps, and the values' standard errors, by where steps end."""
        ends = (*tuple(self.step_starts(trajectory))[1:], trajectory.step_ends[-1])
        return Steps(ends, advantages, values, errors)

    def begins(self, context: RolloutContext) -> bool:
        """Whether a state can be gone on from before all answers are there: `begin`."""
        return False

    def begin(
        self,
        context: RolloutContext,
        beginning: Beginning,
        budget: Budget,
        sampling: SamplingParams,
        purpose: str,
    ) -> OpenState:
        """Begins to go on from a state. Kept in the context's `begun`, it is what `estimate` goes on with."""
        raise NotImplementedError

    def estimate(
        self,
        context: RolloutContext,
        beginnings: Sequence[Beginning],
        budget: Budget,
        sampling: SamplingParams,
        purpose: str,
    ) -> list[Estimate]:
        """What continuations of each state earn. The seed of each derives from the state and `purpose`
        alone, whoever samples it, and when."""
        raise NotImplementedError


@dataclass
class EarlyContinuations:
    """The continuations that credit requests with each answer, so that it needn't wait for the slowest one.

    They are the requests, with the seeds, that it would make afterwards. Answers that nobody could grade cost
    nothing, nor do problems of which fewer than `least` answers could be graded, since these are left out of
    training: an answer waits until so many of its problem's are there.

    A rollout takes part through `attached`; in the credit phase this object is a service of the context, and
    estimates take up the `states` that it began.
    """

    rule: StateRule
    budget: Budget
    sampling: SamplingParams
    first_states: Callable[[int], Sequence[int]]
    """Given how many states an answer has, returns those that are wanted whatever the others are."""
    max_states: int | None = None
    least: int = 1
    purpose: str = "value"
    states: dict[Any, OpenState] = field(default_factory=dict)
    """The states that were continued, by key, sampling and purpose."""
    engine: PipelinedEngine = field(init=False)
    _graded: dict[str, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))

    def attached(self, context: RolloutContext) -> RolloutContext:
        """Returns the rollout's context, with an engine that samples continuations among its answers."""
        assert context.engine is not None, "answers that are sampled need an engine"
        self.engine = PipelinedEngine(context.engine)

        def observe(answer: Trajectory, grade: Future[Grade]) -> None:
            def graded() -> tuple[()]:
                self._take(context, answer, grade.result())
                return ()  # the requests are made on the side

            if grade.done():
                graded()
            else:
                self.engine.also([Later(grade, graded)], _no_request)

        return context.with_services(AnswerObserver(observe), engine=self.engine)

    def _take(self, context: RolloutContext, answer: Trajectory, grade: Grade) -> None:
        if not with_unfinished(grade, answer.finish_reason, context.settings.unfinished_reward).is_known:
            return
        of_problem = self._graded[answer.problem.id]
        of_problem.append(answer)
        if len(of_problem) < self.least:
            return
        # The first `least` answers begin together, each later one by itself.
        for ready in of_problem if len(of_problem) == self.least else of_problem[-1:]:
            starts = self.rule.step_starts(ready)[: self.max_states]
            for index in self.first_states(len(starts)):
                beginning = Beginning.of(ready.problem, ready.prompt_ids, ready.segments, starts[index])
                key = beginning.key, self.sampling, self.purpose
                if key not in self.states:
                    state = self.rule.begin(context, beginning, self.budget, self.sampling, self.purpose)
                    self.states[key] = state
                    self.engine.also(state.ask(), state.answered)


def _no_request(index: int, completions: list[Completion]) -> None:
    raise AssertionError("nothing was requested")
