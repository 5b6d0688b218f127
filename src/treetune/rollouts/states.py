"""Rules for the states of answers, and how an answer is continued from there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from typing_extensions import override

from treetune.contracts import Need, OneLine
from treetune.engine.base import CONTINUATIONS, Completion, Later, Request, SamplingParams
from treetune.rollouts.answers import GrowingRollout, Growth, Start, before_stop
from treetune.rollouts.base import STATES_REMEDY
from treetune.rollouts.context import AnswerSettings, RolloutContext
from treetune.rollouts.values import (
    AnswerPrefix,
    Budget,
    ContinuationPlan,
    EarlyContinuations,
    Estimate,
    OpenState,
    StateRule,
)
from treetune.seeds import derive_seed
from treetune.tasks.base import Task
from treetune.vocabulary import Grade, Trajectory, joined

# Answers of one line, which are continued from their beginnings


@dataclass(frozen=True, kw_only=True)
class OneLineStates(StateRule):
    """States anywhere in answers whose tokens were each sampled after all before it. Rules say where."""

    needs = (Need(OneLine(), "it continues answers from their beginnings", STATES_REMEDY),)

    @override
    def opens_early(self, context: RolloutContext) -> bool:
        return True

    @override
    def open(self, context: RolloutContext, prefix: AnswerPrefix, plan: ContinuationPlan) -> OneLineState:
        state = OneLineState(context, prefix, plan)
        # What services do for values is counted with the values, whose phase comes later.
        state.ungraded = [] if context.grader.has_services else None
        return state

    @override
    def estimate(
        self, context: RolloutContext, prefixes: Sequence[AnswerPrefix], plan: ContinuationPlan
    ) -> list[Estimate]:
        """Continues each state. A continuation may use the tokens that its prefix left of the answer's
        budget."""
        assert context.engine is not None, "Monte-Carlo values need an engine"
        early = context.find(EarlyContinuations)
        states = []
        for prefix in prefixes:
            state = early and early.find(prefix, plan)
            if isinstance(state, OneLineState):
                state.grade_waiting()
            else:
                state = OneLineState(context, prefix, plan)
            states.append(state)
        owners: list[OneLineState] = []  # of each request, in their order
        done = total = sum(len(state.completions) for state in states)

        def requests_of(state: OneLineState) -> list[Request | Later]:
            nonlocal total
            requests: list[Request | Later] = []
            for request in state.ask():
                if isinstance(request, Later):
                    requests.append(Later(request.ready, partial(requests_of, state)))
                else:
                    owners.append(state)
                    total += request.n
                    requests.append(request)
            return requests

        def on_result(index: int, completions: list[Completion]) -> list[Request | Later]:
            nonlocal done
            owners[index].take(completions)
            further = requests_of(owners[index])
            done += len(completions)
            context.log.progress(done, total)
            return further

        requests = [request for state in states for request in requests_of(state)]
        if requests:
            context.engine.generate(requests, on_result)
        return [state.estimate() for state in states]


@StateRule.register("step_boundaries")
@dataclass(frozen=True, kw_only=True)
class StepBoundaries(OneLineStates):
    """A state before every step of the answer (Kazemnejad et al., arXiv:2410.01679, section 4)."""

    @override
    def step_starts(self, trajectory: Trajectory) -> Sequence[int]:
        return (0, *trajectory.step_ends[:-1])

    @override
    def looks_back(self, task: Task) -> bool:
        return task.boundaries_look_back


def continuation_request(
    settings: AnswerSettings,
    seed: int,
    iteration: int,
    prefix: AnswerPrefix,
    sampling: SamplingParams,
    purpose: str,
    turn: int,
    count: int,
) -> Request:
    """Returns the request for `count` continuations of a state in a turn of its budget, counted from 0;
    `sampling` is that of its problem. The viewer makes it too: a journal knows an answered request by its
    content."""
    problem, prompt_ids, _ = prefix
    prefix_ids = prefix.token_ids
    key = (iteration, problem.id, repr(tuple(prefix_ids.tolist())), purpose)
    budget = settings.token_budget(prompt_ids, sampling.max_tokens)
    return Request(
        prompt_ids=joined([prompt_ids, prefix_ids]),
        seed=derive_seed(seed, *(key if turn == 0 else (*key, turn))),
        n=count,
        sampling=replace(sampling, max_tokens=budget - len(prefix_ids)),
        priority=CONTINUATIONS,
        reads_logprobs=False,
    )


@dataclass
class OneLineState(OpenState):
    """A state of an answer of one line, and its continuations so far."""

    context: RolloutContext
    prefix: AnswerPrefix
    plan: ContinuationPlan
    turn: int = 0
    """Requests so far."""
    completions: list[Completion] = field(default_factory=list)
    grades: list[Future[Grade] | None] = field(default_factory=list)
    """None for a continuation that was cut off, whose reward is known."""
    ungraded: list[Completion] | None = None
    """Completions that wait to be graded; None: each is graded as it comes."""
    is_over: bool = False

    def __post_init__(self) -> None:
        # The problem's own: domains have stop strings and budgets of their own.
        self.sampling = self.context.task.of(self.prefix.problem).sampling(self.plan.sampling)

    @override
    def ask(self) -> list[Request | Later]:
        if self.is_over or self.ungraded:
            return []
        if self.turn and self.plan.budget.adaptive:
            missing = next((grade for grade in self.grades if grade is not None and not grade.done()), None)
            if missing is not None:  # waiting here would hold up all other results
                return [Later(missing, self.ask)]
        count = self.plan.budget.ask(self.turn, self.rewards)
        self.is_over = not count
        if not count:
            return []
        context, turn = self.context, self.turn
        self.turn += 1
        return [
            continuation_request(
                context.settings,
                context.seed,
                context.iteration,
                self.prefix,
                self.sampling,
                self.plan.purpose,
                turn,
                count,
            )
        ]

    @override
    def answered(self, index: int, completions: list[Completion]) -> list[Request | Later]:
        self.take(completions)
        return self.ask()

    def take(self, completions: Sequence[Completion]) -> None:
        self.completions += completions
        if self.ungraded is None:
            self._grade(completions)
        else:
            self.ungraded += completions

    def grade_waiting(self) -> None:
        """Grades the completions that wait, and from now on each as it comes."""
        waiting, self.ungraded = self.ungraded, None
        self._grade(waiting or ())

    def _grade(self, completions: Sequence[Completion]) -> None:
        context, prefix_ids = self.context, self.prefix.token_ids
        for completion in completions:
            if completion.finish_reason == "length" and context.settings.unfinished_reward is not None:
                self.grades.append(None)
                continue
            text = context.codec.decode(joined([prefix_ids, completion.token_ids]))
            self.grades.append(
                context.grader.submit(before_stop(text, self.sampling.stop), self.prefix.problem)
            )

    def earned(self) -> list[float | None]:
        """Waits for the grades, and returns what each continuation earned; None: nobody could grade it."""
        unfinished = self.context.settings.unfinished_reward or 0.0
        grades = [None if grade is None else grade.result() for grade in self.grades]
        return [unfinished if grade is None else grade.reward if grade.is_known else None for grade in grades]

    def rewards(self) -> list[float]:
        return [reward for reward in self.earned() if reward is not None]

    def estimate(self) -> Estimate:
        earned = self.earned()
        return Estimate(
            earned=tuple(earned),
            rewards=tuple(self.plan.budget.counted([one for one in earned if one is not None])),
            unfinished=sum(one.finish_reason == "length" for one in self.completions),
            tokens=sum(len(one.token_ids) for one in self.completions),
        )


# Answers that only their rollout can continue


class WholeAnswers(StateRule):
    """A rule whose states are continued by the rollout that wrote the answers."""

    def state_seed(self, context: RolloutContext, prefix: AnswerPrefix, purpose: str) -> int:
        """Returns the seed of a state's continuations, which derives from the state alone."""
        raise NotImplementedError

    @override
    def opens_early(self, context: RolloutContext) -> bool:
        # What services do for values is counted with the values, whose phase comes later.
        return not context.grader.has_services

    @override
    def open(self, context: RolloutContext, prefix: AnswerPrefix, plan: ContinuationPlan) -> ContinuedAnswers:
        # The progress is that of the rollout's answers.
        quiet = replace(context, log=replace(context.log, progress=lambda done, total: None))
        starts = self._starts(context, prefix, plan.purpose, range(plan.budget.ask(0, lambda: ())))
        rollout = _rollout(context, plan.sampling)
        return ContinuedAnswers(partial(rollout.growing, _only_graded(quiet), starts))

    @override
    def estimate(
        self, context: RolloutContext, prefixes: Sequence[AnswerPrefix], plan: ContinuationPlan
    ) -> list[Estimate]:
        rollout, only_graded, budget = _rollout(context, plan.sampling), _only_graded(context), plan.budget
        early = context.find(EarlyContinuations)
        answers: list[list[Trajectory]] = []
        for prefix in prefixes:
            state = early and early.find(prefix, plan)
            growth = state.growth if isinstance(state, ContinuedAnswers) else None
            answers.append([] if growth is None else growth.answers())
        turns = [int(bool(of_state)) for of_state in answers]
        waiting = list(range(len(prefixes)))
        while waiting:
            counts = {
                number: budget.ask(turns[number], partial(_rewards, answers[number])) for number in waiting
            }
            owners = [number for number, count in counts.items() for _ in range(count)]
            starts = []
            for number, count in counts.items():
                first = len(answers[number])
                starts += self._starts(context, prefixes[number], plan.purpose, range(first, first + count))
            for number, answer in zip(owners, rollout.answers(only_graded, starts), strict=True):
                answers[number].append(answer)
            waiting = [number for number in waiting if counts[number]]
            for number in waiting:
                turns[number] += 1
        return [_estimate(*of_state, budget) for of_state in zip(prefixes, answers, strict=True)]

    def _starts(
        self, context: RolloutContext, prefix: AnswerPrefix, purpose: str, numbers: Sequence[int]
    ) -> list[Start]:
        seed = self.state_seed(context, prefix, purpose)
        return [
            Start(prefix.problem, prefix.prompt_ids, derive_seed(seed, number), prefix.segments)
            for number in numbers
        ]


@dataclass
class ContinuedAnswers(OpenState):
    """The first turn's answers through a state, written while others are sampled. Further turns wait until
    all answers are there."""

    grow: partial[Growth]
    growth: Growth | None = None

    @override
    def ask(self) -> list[Request | Later]:
        if self.growth is not None:
            return []
        self.growth = self.grow()
        return _behind_answers(self.growth.requests)

    @override
    def answered(self, index: int, completions: list[Completion]) -> list[Request | Later]:
        assert self.growth is not None, "asked before it was answered"
        return _behind_answers(self.growth.on_result(index, completions))


def _rollout(context: RolloutContext, sampling: SamplingParams) -> GrowingRollout:
    return replace(
        context.get(GrowingRollout),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


def _only_graded(context: RolloutContext) -> RolloutContext:
    return replace(context, settings=replace(context.settings, reads_logprobs=False))


def _behind_answers(requests: Sequence[Request | Later]) -> list[Request | Later]:
    """Returns the requests, and those that follow later, with the priority of continuations."""
    return [
        Later(request.ready, partial(lambda later: _behind_answers(later.requests()), request))
        if isinstance(request, Later)
        else replace(request, priority=CONTINUATIONS)
        for request in requests
    ]


def _rewards(answers: Sequence[Trajectory]) -> list[float]:
    return [answer.reward for answer in answers if answer.grade.is_known]


def _estimate(prefix: AnswerPrefix, answers: Sequence[Trajectory], budget: Budget) -> Estimate:
    known = sum(len(segment.token_ids) for segment in prefix.segments if segment.origin == "sampled")
    sampled = [len(s.token_ids) for one in answers for s in one.segments if s.origin == "sampled"]
    return Estimate(
        earned=tuple(answer.reward if answer.grade.is_known else None for answer in answers),
        rewards=tuple(budget.counted(_rewards(answers))),
        unfinished=sum(one.unfinished for one in answers),
        tokens=sum(sampled) - known * len(answers),
    )
