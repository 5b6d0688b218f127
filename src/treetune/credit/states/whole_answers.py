"""States of answers with threads or turns, which only the rollout that made the answers can continue.

An answer with threads, or with turns and a tool, is not the completion of one prompt by the engine. So the
rollout itself resumes from a state: it makes whole answers from a `Start` with the segments of the prefix.
The value of the state is the mean reward of these answers.

    for each round of the budget:
        the starts of all unfinished states ── GrowingRollout.answers ──> graded answers through each state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from typing_extensions import override

from treetune.credit.states.base import AnswerPrefix, Budget, ContinuationPlan, Estimate, StateRule
from treetune.engine.requests import CONTINUATION_PRIORITY, SamplingParams
from treetune.rollouts.answers import GrowingRollout, Start, require_growing_rollout
from treetune.rollouts.context import RolloutContext
from treetune.seeds import derive_seed
from treetune.vocabulary import Segment, Trajectory


class WholeAnswers(StateRule):
    """A rule whose states are continued by the rollout that made the answers."""

    def state_seed(self, context: RolloutContext, prefix: AnswerPrefix, purpose: str) -> int:
        """Returns the seed of a state's continuations. It must not depend on other states."""
        raise NotImplementedError

    @override
    def begins_early(self, context: RolloutContext) -> bool:
        # The use of services (such as a judge's tokens) is counted by phase. For early continuations it would
        # be counted in the rollout phase, and not in the credit phase, to which it belongs.
        return not context.grader.has_services

    @override
    async def begin(
        self, context: RolloutContext, prefix: AnswerPrefix, plan: ContinuationPlan
    ) -> list[Trajectory]:
        """Samples the first round of a state's continuations, as many as the budget asks for.

        Returns whole answers that begin with the state. `estimate` samples the further rounds in the credit
        phase.
        """
        # Continuations report no progress, since the progress in the log is that of the rollout's answers.
        quiet_log = replace(context.log, progress=lambda done, total: None)
        quiet_context = replace(context, log=quiet_log)
        first_count = plan.budget.ask(0, _no_rewards)
        starts = self._make_starts(context, prefix, plan.purpose, range(first_count))
        rollout = _rollout_of_continuations(context, plan.sampling)
        return await rollout.answers(_context_of_continuations(quiet_context), starts)

    @override
    def estimate(
        self, context: RolloutContext, prefixes: Sequence[AnswerPrefix], plan: ContinuationPlan
    ) -> list[Estimate]:
        """Continues each state by whole answers that begin with it, round by round."""
        assert context.engine is not None, "Monte-Carlo values need an engine"
        budget = plan.budget
        rollout = _rollout_of_continuations(context, plan.sampling)
        context_of_continuations = _context_of_continuations(context)
        early = context.early_continuations
        answers_by_state: list[list[Trajectory]] = []
        for prefix in prefixes:
            early_answers = None if early is None else early.find(prefix.key, plan)
            answers_by_state.append([] if early_answers is None else list(early_answers))
        # A state with early answers has gone through its first round already.
        rounds_by_state = [1 if answers else 0 for answers in answers_by_state]
        # All states go through their rounds together, in one call of the rollout for each round. So the
        # rollout's bound on the number of answers in flight holds for all states together.
        unfinished_states = list(range(len(prefixes)))
        while unfinished_states:
            state_of_start: list[int] = []  # for each of `starts`, the index of its state
            starts: list[Start] = []
            for state in unfinished_states:
                answers = answers_by_state[state]
                count = budget.ask(rounds_by_state[state], partial(_list_known_rewards, answers))
                numbers = range(len(answers), len(answers) + count)
                starts += self._make_starts(context, prefixes[state], plan.purpose, numbers)
                state_of_start += [state] * count
            sampled = context.engine.run(rollout.answers(context_of_continuations, starts))
            for state, answer in zip(state_of_start, sampled, strict=True):
                answers_by_state[state].append(answer)
            # Each state that had a start, once. A state for which the budget asked for nothing is finished.
            unfinished_states = list(dict.fromkeys(state_of_start))
            for state in unfinished_states:
                rounds_by_state[state] += 1
        return [
            _make_estimate(prefix, answers, budget)
            for prefix, answers in zip(prefixes, answers_by_state, strict=True)
        ]

    def _make_starts(
        self, context: RolloutContext, prefix: AnswerPrefix, purpose: str, numbers: Sequence[int]
    ) -> list[Start]:
        """Returns the starts of the state's continuations with these `numbers`; its first one has number 0.

        A start describes an answer to be sampled: it begins with the segments of the state (`prefix`), and
        has a seed that derives from the state and the number.
        """
        seed = self.state_seed(context, prefix, purpose)
        return [
            Start(prefix.problem, prefix.prompt_ids, derive_seed(seed, number), prefix.segments)
            for number in numbers
        ]


def _no_rewards() -> Sequence[float]:
    """Returns the rewards so far of a state that has no continuations yet."""
    return ()


def _rollout_of_continuations(context: RolloutContext, sampling: SamplingParams) -> GrowingRollout:
    """Returns the rollout that made the answers, with the sampling parameters of continuations."""
    return replace(
        require_growing_rollout(context),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


def _context_of_continuations(context: RolloutContext) -> RolloutContext:
    """Returns the context for continuations. They have a lower priority in the engine's queue than answers,
    and their log-probs are not read."""
    settings = replace(context.settings, reads_logprobs=False, priority=CONTINUATION_PRIORITY)
    return replace(context, settings=settings)


def _list_known_rewards(answers: Sequence[Trajectory]) -> list[float]:
    return [answer.reward for answer in answers if answer.grade.is_known]


def _make_estimate(prefix: AnswerPrefix, answers: Sequence[Trajectory], budget: Budget) -> Estimate:
    """Returns the estimate of a state from its continuations: answers that begin with its prefix."""
    tokens_of_prefix = _count_sampled_tokens(prefix.segments)
    # A budget may leave rewards out of the value, such as those of a pilot, a first round that only decides
    # how many continuations follow. `all_rewards` below has the rewards of all continuations.
    rewards_for_value = budget.counted(_list_known_rewards(answers))
    return Estimate(
        all_rewards=tuple(answer.reward if answer.grade.is_known else None for answer in answers),
        rewards=tuple(rewards_for_value),
        unfinished=sum(answer.unfinished for answer in answers),
        tokens=sum(_count_sampled_tokens(answer.segments) - tokens_of_prefix for answer in answers),
    )


def _count_sampled_tokens(segments: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in segments if segment.origin == "sampled")
