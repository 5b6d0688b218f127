"""States from which a rollout writes whole answers again: it alone knows how they go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from treetune.inference.base import CONTINUATIONS, Completion, Later, Request, SamplingParams
from treetune.rollouts.answers import Growth
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.values.base import Beginning, Budget, Estimate, OpenState, StateRule
from treetune.rollouts.values.early import EarlyContinuations
from treetune.vocabulary import Trajectory

Start = TypeVar("Start")
Written = TypeVar("Written", contravariant=True)


@dataclass
class BegunAnswers(OpenState, Generic[Start]):
    """The first turn's answers through a state, written while others are sampled. Further turns wait until
    all answers are there."""

    beginning: Beginning
    budget: Budget
    start: Callable[[Beginning, int], Start]
    growing: Callable[[Sequence[Start]], Growth]
    growth: Growth | None = None

    def ask(self) -> list[Request | Later]:
        if self.growth is not None:
            return []
        count = self.budget.ask(0, lambda: ())
        self.growth = self.growing([self.start(self.beginning, again) for again in range(count)])
        return _behind_answers(self.growth.requests)

    def answered(self, index: int, completions: list[Completion]) -> list[Request | Later]:
        assert self.growth is not None, "asked before it was answered"
        return _behind_answers(self.growth.on_result(index, completions))


class Writer(Protocol[Written]):
    """A rollout that can write answers from where they are told to start."""

    def growing(self, context: RolloutContext, starts: Sequence[Written]) -> Growth:
        """The requests of such answers, and what follows from theirs."""

    def answers(self, context: RolloutContext, starts: Sequence[Written]) -> Sequence[Trajectory]:
        """Such answers, in their order."""


class WholeAnswers(StateRule, Generic[Start]):
    """A rule whose states are gone on from by the rollout that wrote the answers."""

    def writer(self, context: RolloutContext, sampling: SamplingParams) -> Writer[Start]:
        """The rollout, sampled so."""
        raise NotImplementedError

    def start(self, context: RolloutContext, beginning: Beginning, again: int, purpose: str) -> Start:
        """Where the answer of that number goes on. The seed derives from the state alone, whoever comes by
        it."""
        raise NotImplementedError

    def begins(self, context: RolloutContext) -> bool:
        # What services do for values is counted with the values, whose phase comes later.
        return not context.grader.has_services

    def begin(
        self,
        context: RolloutContext,
        beginning: Beginning,
        budget: Budget,
        sampling: SamplingParams,
        purpose: str,
    ) -> BegunAnswers[Start]:
        # The progress is that of the rollout's answers.
        quiet = replace(_only_graded(context), log=replace(context.log, progress=lambda done, total: None))
        return BegunAnswers(
            beginning,
            budget,
            lambda beginning, again: self.start(context, beginning, again, purpose),
            partial(self.writer(context, sampling).growing, quiet),
        )

    def estimate(
        self,
        context: RolloutContext,
        beginnings: Sequence[Beginning],
        budget: Budget,
        sampling: SamplingParams,
        purpose: str,
    ) -> list[Estimate]:
        early = context.find(EarlyContinuations)
        states = [early and early.states.get((one.key, sampling, purpose)) for one in beginnings]
        return estimated(
            beginnings,
            budget,
            lambda beginning, again: self.start(context, beginning, again, purpose),
            partial(self.writer(context, sampling).answers, _only_graded(context)),
            [state if isinstance(state, BegunAnswers) else None for state in states],
        )


def _only_graded(context: RolloutContext) -> RolloutContext:
    return replace(context, settings=replace(context.settings, reads_logprobs=False))


def _behind_answers(requests: Sequence[Request | Later]) -> list[Request | Later]:
    return [
        Later(one.ready, partial(_heard, one))
        if isinstance(one, Later)
        else replace(one, priority=CONTINUATIONS)
        for one in requests
    ]


def _heard(later: Later) -> list[Request | Later]:
    return _behind_answers(later.requests())


def estimated(
    beginnings: Sequence[Beginning],
    budget: Budget,
    start: Callable[[Beginning, int], Start],
    answers: Callable[[Sequence[Start]], Sequence[Trajectory]],
    begun: Sequence[BegunAnswers[Start] | None] = (),
) -> list[Estimate]:
    """What answers through each state earn. `start` says how the answer of that number goes on from a state,
    and `answers` writes those of many starts, in their order. `begun` are the states whose first turn was
    written already."""
    found: list[list[Trajectory]] = [[] for _ in beginnings]
    for place, one in enumerate(begun):
        if one is not None and one.growth is not None and one.budget == budget:
            found[place] += one.growth.answers()
    turns = [int(bool(of_state)) for of_state in found]
    waiting = list(range(len(beginnings)))
    while waiting:
        counts = {place: budget.ask(turns[place], partial(_rewards, found[place])) for place in waiting}
        owners = [place for place, count in counts.items() for _ in range(count)]
        starts = [
            start(beginnings[place], len(found[place]) + again)
            for place, count in counts.items()
            for again in range(count)
        ]
        for place, answer in zip(owners, answers(starts), strict=True):
            found[place].append(answer)
        waiting = [place for place in waiting if counts[place]]
        for place in waiting:
            turns[place] += 1
    return [_estimate(*of_state, budget) for of_state in zip(beginnings, found, strict=True)]


def _rewards(answers: Sequence[Trajectory]) -> list[float]:
    """Of those that could be graded."""
    return [answer.reward for answer in answers if answer.grade.is_known]


def _estimate(beginning: Beginning, answers: Sequence[Trajectory], budget: Budget) -> Estimate:
    known = sum(len(segment.token_ids) for segment in beginning.segments if segment.origin == "sampled")
    sampled = [len(s.token_ids) for one in answers for s in one.segments if s.origin == "sampled"]
    rewards = _rewards(answers)
    counted = budget.counted(rewards)
    return Estimate(
        rewards=tuple(counted),
        unfinished=sum(one.unfinished for one in answers),
        tokens=sum(sampled) - known * len(answers),
        unavailable=len(answers) - len(rewards),
        set_aside=len(rewards) - len(counted),
    )
