"""Rules for the states of answers, and how answers are continued from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from treetune.contracts import Need, OneLine
from treetune.inference.base import CONTINUATIONS, Completion, Later, Request, SamplingParams
from treetune.rollouts.answers import Growth, before_stop
from treetune.rollouts.base import STATES_REMEDY
from treetune.rollouts.context import AnswerSettings, RolloutContext
from treetune.rollouts.values import Beginning, Budget, EarlyContinuations, Estimate, OpenState, StateRule
from treetune.seeds import derive_seed
from treetune.vocabulary import Grade, Trajectory, joined


@dataclass(frozen=True, kw_only=True)
class OneLineStates(StateRule):
    """Anywhere in answers whose tokens were each sampled after all before it. Rules say where."""

    needs = (Need(OneLine(), "it continues answers from their beginnings", STATES_REMEDY),)

    def begins(self, context: RolloutContext) -> bool:
        return True

    def begin(
        self,
        context: RolloutContext,
        beginning: Beginning,
        budget: Budget,
        sampling: SamplingParams,
        purpose: str,
    ) -> OneLineState:
        state = OneLineState(context, beginning, budget, sampling, purpose)
        # What services do for values is counted with the values, whose phase comes later.
        state.held = [] if context.grader.has_services else None
        return state

    def estimate(
        self,
        context: RolloutContext,
        beginnings: Sequence[Beginning],
        budget: Budget,
        sampling: SamplingParams,
        purpose: str,
    ) -> list[Estimate]:
        """A continuation may use the tokens that its beginning left of the answer's budget."""
        assert context.engine is not None, "Monte-Carlo values need an engine"
        states = [
            _taken_up(context, one, budget, sampling, purpose)
            or OneLineState(context, one, budget, sampling, purpose)
            for one in beginnings
        ]
        owners: list[OneLineState] = []  # of each request, in their order
        done = total = sum(len(state.completions) for state in states)

        def asked(state: OneLineState) -> list[Request | Later]:
            nonlocal total
            found: list[Request | Later] = []
            for one in state.ask():
                if isinstance(one, Later):
                    found.append(Later(one.ready, partial(asked, state)))
                else:
                    owners.append(state)
                    total += one.n
                    found.append(one)
            return found

        def on_result(index: int, completions: list[Completion]) -> list[Request | Later]:
            nonlocal done
            owners[index].take(completions)
            further = asked(owners[index])
            done += len(completions)
            context.log.progress(done, total)
            return further

        requests = [request for state in states for request in asked(state)]
        if requests:
            context.engine.generate(requests, on_result)
        return [state.estimate() for state in states]


def continuations_asked_for(
    settings: AnswerSettings,
    seed: int,
    iteration: int,
    beginning: Beginning,
    sampling: SamplingParams,
    purpose: str,
    turn: int,
    count: int,
) -> Request:
    """The request for `count` continuations of a state in a turn of its budget, counted from 0; `sampling` as
    its problem has it. The viewer asks too: the journal knows an answered request by what was asked."""
    problem, prompt_ids, _ = beginning
    begun_ids = beginning.token_ids
    place = (iteration, problem.id, repr(tuple(begun_ids.tolist())), purpose)
    budget = settings.token_budget(prompt_ids, sampling.max_tokens)
    return Request(
        prompt_ids=joined([prompt_ids, begun_ids]),
        seed=derive_seed(seed, *(place if turn == 0 else (*place, turn))),
        n=count,
        sampling=replace(sampling, max_tokens=budget - len(begun_ids)),
        priority=CONTINUATIONS,
        reads_logprobs=False,
    )


def _taken_up(
    context: RolloutContext, beginning: Beginning, budget: Budget, sampling: SamplingParams, purpose: str
) -> OneLineState | None:
    """The state, where it was begun with while answers were sampled."""
    early = context.find(EarlyContinuations)
    state = None if early is None else early.states.get((beginning.key, sampling, purpose))
    if not isinstance(state, OneLineState) or state.budget != budget:
        return None
    held, state.held = state.held, None
    state.grade(held or ())
    return state


@dataclass
class OneLineState(OpenState):
    """A state and what is known of it so far. `turn` counts its requests. Where `held` is a list, completions
    wait there to be graded."""

    context: RolloutContext
    beginning: Beginning
    budget: Budget
    sampling: SamplingParams
    purpose: str
    turn: int = 0
    completions: list[Completion] = field(default_factory=list)
    grades: list[Future[Grade] | None] = field(default_factory=list)
    held: list[Completion] | None = None
    over: bool = False

    def ask(self) -> list[Request | Later]:
        if self.over or self.held:
            return []
        if self.turn and self.budget.adaptive:
            missing = next((one for one in self.grades if one is not None and not one.done()), None)
            if missing is not None:  # whoever waited here would keep what else has come in waiting
                return [Later(missing, self.ask)]
        count = self.budget.ask(self.turn, self.rewards)
        self.over = not count
        return [self.request(count)] if count else []

    def answered(self, index: int, completions: list[Completion]) -> list[Request | Later]:
        self.take(completions)
        return self.ask()

    @property
    def own_sampling(self) -> SamplingParams:
        """The problem's: domains have stop strings and budgets of their own."""
        return self.context.task.of(self.beginning.problem).sampling(self.sampling)

    def request(self, count: int) -> Request:
        context = self.context
        request = continuations_asked_for(
            context.settings,
            context.seed,
            context.iteration,
            self.beginning,
            self.own_sampling,
            self.purpose,
            self.turn,
            count,
        )
        self.turn += 1
        return request

    def take(self, completions: Sequence[Completion]) -> None:
        self.completions += completions
        if self.held is None:
            self.grade(completions)
        else:
            self.held += completions

    def grade(self, completions: Sequence[Completion]) -> None:
        context, begun_ids = self.context, self.beginning.token_ids
        for one in completions:
            if one.finish_reason == "length" and context.settings.unfinished_reward is not None:
                self.grades.append(None)
                continue
            text = context.codec.decode(joined([begun_ids, one.token_ids]))
            self.grades.append(
                context.grader.submit(before_stop(text, self.own_sampling.stop), self.beginning.problem)
            )

    def rewards(self) -> list[float]:
        """Of those that could be graded."""
        unfinished = self.context.settings.unfinished_reward or 0.0
        grades = [None if grade is None else grade.result() for grade in self.grades]
        return [
            unfinished if grade is None else grade.reward
            for grade in grades
            if grade is None or grade.is_known
        ]

    def estimate(self) -> Estimate:
        rewards = self.rewards()
        counted = self.budget.counted(rewards)
        return Estimate(
            rewards=tuple(counted),
            unfinished=sum(one.finish_reason == "length" for one in self.completions),
            tokens=sum(len(one.token_ids) for one in self.completions),
            unavailable=len(self.completions) - len(rewards),
            set_aside=len(rewards) - len(counted),
        )


@StateRule.register("step_boundaries")
@dataclass(frozen=True, kw_only=True)
class StepBoundaries(OneLineStates):
    """Before every step of the answer (Kazemnejad et al., arXiv:2410.01679, section 4)."""

    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return (0, *trajectory.step_ends[:-1])


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
