"""States of answers in one line, which are continued from token ids: VinePPO's continuations.

An answer is *in one line* if each of its tokens was sampled after all tokens before it (no threads). Then a
state is continued by one request: the prompt's ids and the prefix's ids are the new prompt.

    for each state, at the same time:
        round 0:  sample n continuations ── each is graded together with its prefix, in the grader's processes
        round 1:  wait for the grades, if the budget depends on them ── sample more, or stop
        ...
        Estimate: the rewards of all continuations

All states run as tasks of one program (`engine.programs`). Each state waits only for its own samples and
grades.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from typing_extensions import override

from treetune.contracts import Need, OneLine
from treetune.credit.states.base import (
    STATES_REMEDY,
    AnswerPrefix,
    ContinuationPlan,
    Estimate,
    StateRule,
)
from treetune.engine.programs import result_of
from treetune.engine.requests import CONTINUATION_PRIORITY, Completion, Request, SamplingParams
from treetune.rollouts.answers import CountedSamples, cut_at_stop
from treetune.rollouts.context import AnswerSettings, RolloutContext
from treetune.seeds import derive_seed
from treetune.tasks.base import Task
from treetune.tasks.mixed import task_of
from treetune.vocabulary import Grade, Trajectory, concatenate


@dataclass(frozen=True, kw_only=True)
class OneLineStates(StateRule):
    """A base class of rules for answers in one line, in which each token was sampled after all tokens before
    it. States may lie anywhere.

    Override `step_starts` to say where they lie.
    """

    needs = (Need(OneLine(), "it continues answers from their beginnings", STATES_REMEDY),)

    @override
    def begins_early(self, context: RolloutContext) -> bool:
        return True

    @override
    async def begin(
        self, context: RolloutContext, prefix: AnswerPrefix, plan: ContinuationPlan
    ) -> OneLineContinuations:
        """Samples the first round of a state's continuations or, if no grader is a service, all rounds."""
        assert context.engine is not None, "answers that are sampled have an engine"
        continuations = OneLineContinuations(context, prefix, plan)
        if context.grader.has_services:
            # The use of services (such as a judge's tokens) is counted by phase, and grading continuations
            # belongs to the credit phase. So continuations are only sampled here, in the rollout phase.
            # `estimate` grades them in the credit phase.
            await continuations.sample_next_round(context.engine.sample)
        else:
            await continuations.sample_all_rounds(context.engine.sample)
        return continuations

    @override
    def estimate(
        self, context: RolloutContext, prefixes: Sequence[AnswerPrefix], plan: ContinuationPlan
    ) -> list[Estimate]:
        """Continues each state. Prefix and continuation together may have as many tokens as an answer."""
        assert context.engine is not None, "Monte-Carlo values need an engine"
        early = context.early_continuations
        continuations_by_state: list[OneLineContinuations] = []
        for prefix in prefixes:
            # The continuations that were sampled during the rollout; the others are sampled here.
            continuations = None if early is None else early.find(prefix.key, plan)
            if continuations is None:
                continuations = OneLineContinuations(context, prefix, plan)
            continuations_by_state.append(continuations)
        sampled_early = sum(len(continuations.completions) for continuations in continuations_by_state)
        counted_samples = CountedSamples(context, earlier_samples=sampled_early)

        async def estimate_all() -> list[Estimate]:
            sample = counted_samples.sample
            return await asyncio.gather(
                *(continuations.estimate(sample) for continuations in continuations_by_state)
            )

        return context.engine.run(estimate_all())


@StateRule.register("step_boundaries")
@dataclass(frozen=True, kw_only=True)
class StepBoundaries(OneLineStates):
    """A state before every step of the answer (Kazemnejad et al., arXiv:2410.01679, section 4).

    The task says what a step is, such as a line. Example: an answer whose steps end after 6, 12 and 15 tokens
    has the states 0, 6 and 12.
    """

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
    round_number: int,
    count: int,
) -> Request:
    """Returns the request for `count` continuations of a state.

    The viewer builds the same request, too, to find the continuations in the journal: the journal identifies
    an answered request by its content.

    Args:
        settings: The context's settings for answers.
        seed: The run's seed.
        iteration: The iteration, from 0 on.
        prefix: The state.
        sampling: The sampling parameters for the problem of the state.
        purpose: The purpose of the `ContinuationPlan`, on which the seed depends.
        round_number: The budget's round, from 0 on.
        count: The number of continuations.
    """
    problem, prompt_ids, _ = prefix
    prefix_ids = prefix.token_ids
    seed_key: tuple[int | str, ...] = (iteration, problem.id, repr(tuple(prefix_ids.tolist())), purpose)
    # Each later round adds its number, so it samples other continuations than the rounds before it. A fixed
    # budget such as VinePPO's has only round 0.
    if round_number > 0:
        seed_key = (*seed_key, round_number)
    budget = settings.token_budget(prompt_ids, sampling.max_tokens)
    return Request(
        prompt_ids=concatenate([prompt_ids, prefix_ids]),
        seed=derive_seed(seed, *seed_key),
        n=count,
        sampling=replace(sampling, max_tokens=budget - len(prefix_ids)),
        priority=CONTINUATION_PRIORITY,
        reads_logprobs=False,
    )


SampleFunction = Callable[[Request], Awaitable[list[Completion]]]
"""The type of `Engine.sample`, and of `CountedSamples.sample`, which also counts the samples."""


@dataclass
class OneLineContinuations:
    """The continuations of one state, while they are sampled and graded."""

    context: RolloutContext
    prefix: AnswerPrefix
    plan: ContinuationPlan
    rounds: int = 0
    """The number of rounds of the budget so far. Each is one request."""
    completions: list[Completion] = field(default_factory=list)
    """All continuations so far, in the order of sampling."""
    grade_futures: list[Future[Grade] | None] = field(default_factory=list)
    """One entry for each of the first `completions`; the later ones have not been submitted to the grader
    yet. None for a continuation that was cut off and whose reward is known without a grade."""

    def __post_init__(self) -> None:
        # The parameters are those of the problem's own task: in a mixture, each domain has its own stop
        # strings and token budget.
        self.sampling = task_of(self.context.task, self.prefix.problem).adjust_sampling(self.plan.sampling)

    async def estimate(self, sample: SampleFunction) -> Estimate:
        """Samples the continuations that the budget still asks for, waits for all grades, and returns the
        estimate."""
        await self.sample_all_rounds(sample)
        await self._wait_for_grades()
        all_rewards = self._list_rewards()
        rewards = [reward for reward in all_rewards if reward is not None]
        # A budget may leave rewards out: the rewards of a pilot, the first continuations, only decide how
        # many further continuations are sampled.
        rewards_for_value = self.plan.budget.counted(rewards)
        return Estimate(
            all_rewards=tuple(all_rewards),
            rewards=tuple(rewards_for_value),
            unfinished=sum(completion.finish_reason == "length" for completion in self.completions),
            tokens=sum(len(completion.token_ids) for completion in self.completions),
        )

    async def sample_all_rounds(self, sample: SampleFunction) -> None:
        """Samples round by round until the budget asks for no more, and has each continuation graded."""
        self._submit_to_grader()
        while await self.sample_next_round(sample):
            self._submit_to_grader()

    async def sample_next_round(self, sample: SampleFunction) -> bool:
        """Samples as many continuations as the budget asks for next. Returns whether it asked for any."""
        if self.rounds and self.plan.budget.adaptive:
            await self._wait_for_grades()  # the budget reads them
        count = self.plan.budget.ask(self.rounds, self._list_known_rewards)
        if not count:
            return False
        request = continuation_request(
            self.context.settings,
            self.context.seed,
            self.context.iteration,
            self.prefix,
            self.sampling,
            self.plan.purpose,
            self.rounds,
            count,
        )
        self.rounds += 1
        self.completions += await sample(request)
        return True

    def _submit_to_grader(self) -> None:
        """Submits to the grader the continuations that it has not seen yet."""
        context, prefix_ids = self.context, self.prefix.token_ids
        unsubmitted = self.completions[len(self.grade_futures) :]
        for completion in unsubmitted:
            was_cut_off = completion.finish_reason == "length"
            if was_cut_off and context.settings.unfinished_reward is not None:
                self.grade_futures.append(None)  # its reward is known without a grade
                continue
            text = context.codec.decode(concatenate([prefix_ids, completion.token_ids]))
            graded_text = cut_at_stop(text, self.sampling.stop)
            self.grade_futures.append(context.grader.submit(graded_text, self.prefix.problem))

    async def _wait_for_grades(self) -> None:
        for future in self.grade_futures:
            if future is not None:
                await result_of(future)

    def _list_rewards(self) -> list[float | None]:
        """Returns the reward of each continuation that has an entry in `grade_futures`; None for one that
        could not be graded."""
        unfinished_reward = self.context.settings.unfinished_reward
        all_rewards: list[float | None] = []
        for future in self.grade_futures:
            if future is None:  # the continuation was cut off, so it earns `unfinished_reward` ungraded
                assert unfinished_reward is not None, "without this setting, every continuation is graded"
                all_rewards.append(unfinished_reward)
                continue
            grade = future.result()
            all_rewards.append(grade.reward if grade.is_known else None)
        return all_rewards

    def _list_known_rewards(self) -> list[float]:
        return [reward for reward in self._list_rewards() if reward is not None]
