"""Rules for the states of answers, and how an answer is continued from there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from typing_extensions import override

from treetune.contracts import Need, OneLine
from treetune.engine.base import CONTINUATIONS, Completion, Request, SamplingParams
from treetune.engine.programs import result_of
from treetune.rollouts.answers import CountedSamples, GrowingRollout, Start, before_stop
from treetune.rollouts.base import STATES_REMEDY
from treetune.rollouts.context import AnswerSettings, RolloutContext
from treetune.rollouts.values import (
    AnswerPrefix,
    Budget,
    ContinuationPlan,
    EarlyContinuations,
    Estimate,
    StateRule,
)
from treetune.seeds import derive_seed
from treetune.tasks.base import Task
from treetune.vocabulary import Grade, Segment, Trajectory, joined

# Answers of one line, which are continued from their beginnings


@dataclass(frozen=True, kw_only=True)
class OneLineStates(StateRule):
    """States anywhere in answers whose tokens were each sampled after all before it. Rules say where."""

    needs = (Need(OneLine(), "it continues answers from their beginnings", STATES_REMEDY),)

    @override
    def begins_early(self, context: RolloutContext) -> bool:
        return True

    @override
    async def begin(
        self, context: RolloutContext, prefix: AnswerPrefix, plan: ContinuationPlan
    ) -> OneLineContinuations:
        assert context.engine is not None, "answers that are sampled have an engine"
        continuations = OneLineContinuations(context, prefix, plan)
        if context.grader.has_services:
            # What services do for values is counted with the values, whose phase comes later: `estimate`
            # has these graded.
            await continuations.sample_next_turn(context.engine.sample)
        else:
            await continuations.sample_all_turns(context.engine.sample)
        return continuations

    @override
    def estimate(
        self, context: RolloutContext, prefixes: Sequence[AnswerPrefix], plan: ContinuationPlan
    ) -> list[Estimate]:
        """Continues each state. A continuation may use the tokens that its prefix left of the answer's
        budget."""
        assert context.engine is not None, "Monte-Carlo values need an engine"
        early = context.find(EarlyContinuations)
        states: list[OneLineContinuations] = []
        for prefix in prefixes:
            begun = None if early is None else early.find(prefix, plan)
            states.append(begun or OneLineContinuations(context, prefix, plan))
        counted = CountedSamples(context, already=sum(len(state.completions) for state in states))

        async def estimate_all() -> list[Estimate]:
            return await asyncio.gather(*(state.estimate(counted.sample) for state in states))

        return context.engine.run(estimate_all())


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


Sample = Callable[[Request], Awaitable[list[Completion]]]


@dataclass
class OneLineContinuations:
    """The continuations of a state of an answer of one line, so far."""

    context: RolloutContext
    prefix: AnswerPrefix
    plan: ContinuationPlan
    turns: int = 0
    """Requests so far."""
    completions: list[Completion] = field(default_factory=list)
    grades: list[Future[Grade] | None] = field(default_factory=list)
    """Of the first completions: those behind them wait to be graded. None for a continuation that was cut
    off, whose reward is known."""

    def __post_init__(self) -> None:
        # The problem's own: domains have stop strings and budgets of their own.
        self.sampling = self.context.task.of(self.prefix.problem).sampling(self.plan.sampling)

    async def estimate(self, sample: Sample) -> Estimate:
        """Samples what the budget asks for still, and returns what the continuations earned."""
        await self.sample_all_turns(sample)
        await self._wait_for_grades()
        earned = self._earned()
        rewards = [reward for reward in earned if reward is not None]
        return Estimate(
            earned=tuple(earned),
            rewards=tuple(self.plan.budget.counted(rewards)),
            unfinished=sum(completion.finish_reason == "length" for completion in self.completions),
            tokens=sum(len(completion.token_ids) for completion in self.completions),
        )

    async def sample_all_turns(self, sample: Sample) -> None:
        """Samples turn after turn until the budget asks for no more, and has each continuation graded."""
        self._submit_to_grader()
        while await self.sample_next_turn(sample):
            self._submit_to_grader()

    async def sample_next_turn(self, sample: Sample) -> bool:
        """Samples as many continuations as the budget asks for next. Returns whether it asked for any."""
        if self.turns and self.plan.budget.adaptive:
            await self._wait_for_grades()  # those decide how many follow
        count = self.plan.budget.ask(self.turns, self._rewards)
        if not count:
            return False
        request = continuation_request(
            self.context.settings,
            self.context.seed,
            self.context.iteration,
            self.prefix,
            self.sampling,
            self.plan.purpose,
            self.turns,
            count,
        )
        self.turns += 1
        self.completions += await sample(request)
        return True

    def _submit_to_grader(self) -> None:
        """Has the continuations graded that wait for it."""
        context, prefix_ids = self.context, self.prefix.token_ids
        for completion in self.completions[len(self.grades) :]:
            if completion.finish_reason == "length" and context.settings.unfinished_reward is not None:
                self.grades.append(None)
                continue
            text = context.codec.decode(joined([prefix_ids, completion.token_ids]))
            graded_text = before_stop(text, self.sampling.stop)
            self.grades.append(context.grader.submit(graded_text, self.prefix.problem))

    async def _wait_for_grades(self) -> None:
        for grade in self.grades:
            if grade is not None:
                await result_of(grade)

    def _earned(self) -> list[float | None]:
        """Returns what each graded continuation earned; None: nobody could grade it."""
        earned: list[float | None] = []
        for future in self.grades:
            if future is None:
                earned.append(self.context.settings.unfinished_reward or 0.0)
                continue
            grade = future.result()
            earned.append(grade.reward if grade.is_known else None)
        return earned

    def _rewards(self) -> list[float]:
        return [reward for reward in self._earned() if reward is not None]


# Answers that only their rollout can continue


class WholeAnswers(StateRule):
    """A rule whose states are continued by the rollout that wrote the answers."""

    def state_seed(self, context: RolloutContext, prefix: AnswerPrefix, purpose: str) -> int:
        """Returns the seed of a state's continuations, which derives from the state alone."""
        raise NotImplementedError

    @override
    def begins_early(self, context: RolloutContext) -> bool:
        # What services do for values is counted with the values, whose phase comes later.
        return not context.grader.has_services

    @override
    async def begin(
        self, context: RolloutContext, prefix: AnswerPrefix, plan: ContinuationPlan
    ) -> list[Trajectory]:
        """Returns the first turn's answers through the state. Further turns wait until all answers are
        there."""
        # The progress that the log shows is that of the rollout's answers.
        quiet = replace(context, log=replace(context.log, progress=lambda done, total: None))
        first_turn = plan.budget.ask(0, tuple)
        starts = self._starts(context, prefix, plan.purpose, range(first_turn))
        return await _rollout(context, plan.sampling).answers(_only_graded(quiet), starts)

    @override
    def estimate(
        self, context: RolloutContext, prefixes: Sequence[AnswerPrefix], plan: ContinuationPlan
    ) -> list[Estimate]:
        assert context.engine is not None, "Monte-Carlo values need an engine"
        rollout, only_graded, budget = _rollout(context, plan.sampling), _only_graded(context), plan.budget
        early = context.find(EarlyContinuations)
        answers: list[list[Trajectory]] = []  # through each state
        for prefix in prefixes:
            begun = None if early is None else early.find(prefix, plan)
            answers.append(list(begun or ()))
        turns = [1 if through_state else 0 for through_state in answers]
        # All states take their turns together, so that the rollout bounds how many answers are in flight.
        unsure = list(range(len(prefixes)))
        while unsure:
            owners: list[int] = []  # the state of each start
            starts: list[Start] = []
            for state in unsure:
                count = budget.ask(turns[state], partial(_rewards, answers[state]))
                first = len(answers[state])
                numbers = range(first, first + count)
                starts += self._starts(context, prefixes[state], plan.purpose, numbers)
                owners += [state] * count
            sampled = context.engine.run(rollout.answers(only_graded, starts))
            for state, answer in zip(owners, sampled, strict=True):
                answers[state].append(answer)
            unsure = list(dict.fromkeys(owners))
            for state in unsure:
                turns[state] += 1
        return [_estimate(prefix, through, budget) for prefix, through in zip(prefixes, answers, strict=True)]

    def _starts(
        self, context: RolloutContext, prefix: AnswerPrefix, purpose: str, numbers: Sequence[int]
    ) -> list[Start]:
        seed = self.state_seed(context, prefix, purpose)
        return [
            Start(prefix.problem, prefix.prompt_ids, derive_seed(seed, number), prefix.segments)
            for number in numbers
        ]


def _rollout(context: RolloutContext, sampling: SamplingParams) -> GrowingRollout:
    return replace(
        context.get(GrowingRollout),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


def _only_graded(context: RolloutContext) -> RolloutContext:
    """Returns the context of answers that wait behind others, and that are graded and no more."""
    settings = replace(context.settings, reads_logprobs=False, priority=CONTINUATIONS)
    return replace(context, settings=settings)


def _rewards(answers: Sequence[Trajectory]) -> list[float]:
    return [answer.reward for answer in answers if answer.grade.is_known]


def _estimate(prefix: AnswerPrefix, answers: Sequence[Trajectory], budget: Budget) -> Estimate:
    sampled_before = _sampled_tokens(prefix.segments)
    return Estimate(
        earned=tuple(answer.reward if answer.grade.is_known else None for answer in answers),
        rewards=tuple(budget.counted(_rewards(answers))),
        unfinished=sum(answer.unfinished for answer in answers),
        tokens=sum(_sampled_tokens(answer.segments) - sampled_before for answer in answers),
    )


def _sampled_tokens(segments: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in segments if segment.origin == "sampled")
