"""Partial rollouts: a long answer takes several iterations, so that no iteration has to wait for it to end.

Kimi k1.5, arXiv:2501.12599, section 2.6.2. Example, with ``tokens_per_iteration: 100``: an answer of 230
tokens is sampled by three policies, and is trained on in the third iteration::

    iteration 7    prompt ── 100 tokens of policy 7 ── carried over
    iteration 8              100 tokens of policy 8 ── carried over
    iteration 9               30 tokens of policy 9 ── graded, and trained on with its three segments
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Experiment, Finding, Need, StaleAnswers
from treetune.engine.programs import result_of
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.rollouts.answers import (
    UNGRADED,
    CountedSamples,
    apply_unfinished_reward,
    encode_prompt,
    is_decided,
    measure_trees,
    rank_share,
    split_steps,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext, require
from treetune.rollouts.single_turn import RolloutAround, SingleTurn
from treetune.seeds import derive_seed
from treetune.tasks.mixed import task_of
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Metrics, Problem, Segment, TokenIds, Trajectory, concatenate

AnswersBySample = dict[int, Trajectory]
"""The answers to one problem so far, by `Trajectory.sample`; empty if none has been begun."""


class _GroupInFlight(NamedTuple):
    """A problem in flight, and its answers so far."""

    problem: Problem
    answers: AnswersBySample


@Rollout.register("partial")
@dataclass(frozen=True, kw_only=True)
class PartialAnswers(RolloutAround):
    """Partial rollouts (Kimi k1.5, arXiv:2501.12599, section 2.6.2): an iteration samples up to
    `tokens_per_iteration` tokens of each answer of `rollout` (``single_turn``). An answer that has not ended
    continues in the next iteration with the new weights. Each segment has the policy version that sampled it.

    `problems_per_iteration` problems are in flight: those whose answers were carried over, and then new ones.
    A problem is ready when all its answers have ended, and is then trained on once. Problems that were begun
    first come first, so the result does not depend on which answers are sampled faster. If no problem is
    ready, the iteration samples another round of `tokens_per_iteration` tokens of each answer, until one is.
    Answers that are in flight at the end of a run are lost.

    Metrics: ``rollout/groups_begun``, the number of new problems; ``rollout/groups_carried``, the number of
    problems that are carried over to the next iteration; ``rollout/versions``, the mean number of policies
    that sampled an answer, over the answers that are trained on.
    """

    tokens_per_iteration: Annotated[int, Gt(0)]
    """The largest number of tokens of an answer that a round samples. An iteration has one round, or more if
    no problem is ready after the first one."""
    groups: Annotated[int, Gt(0)] | None = None
    """The largest number of problems that an iteration trains on, the earliest begun first; the others wait.
    If it is below `problems_per_iteration` (over-sampling), enough problems are ready in most iterations.
    null: all problems that are ready."""

    carries = True

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (Need(StaleAnswers(), "it trains on answers that earlier weights have begun"),)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if experiment.rollout is not self:
            yield Finding(
                "partial carries answers over between iterations, and only the experiment's own rollout can",
                "type",
                "put it around the others, or leave it out",
            )
        if not isinstance(self.rollout, SingleTurn):
            yield Finding("partial continues answers in one line", "rollout", "name {type: 'single_turn', …}")
            return
        if self.rollout.stop:
            yield Finding(
                "a stop string that lies across the end of an iteration would not be recognised",
                "rollout.stop",
                "leave it out, and let an end token end answers",
            )
        # With `groups`, something would be carried over even so: problems beyond this number wait.
        if self.tokens_per_iteration >= self.rollout.max_tokens and self.groups is None:
            yield Finding(
                f"answers have {self.rollout.max_tokens} tokens at most and may have"
                f" {self.tokens_per_iteration} in an iteration: none would be carried over",
                "tokens_per_iteration",
                "lower it, or leave 'partial' out",
            )
        problems = experiment.problems_per_iteration
        if self.groups is not None and problems is not None and self.groups > problems:
            yield Finding(
                f"{self.groups} groups are to be trained on, and {problems} problems are in flight",
                "groups",
                "lower it, or raise problems_per_iteration",
            )
        # `Experiment` doesn't declare `problem_sampling`: a runtime may have no such setting.
        if getattr(experiment, "problem_sampling", None) == "epochs":
            yield Finding(
                "problems in flight take the place of drawn problems, which are skipped, and problem_sampling"
                " 'epochs' promises to skip none",
                "$.problem_sampling",
                "set it to 'between_iterations'",
            )

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        carry_over = require(context.carry_over, "carry-over")
        # The carried answers to each problem, by `Trajectory.sample`. The problems have the order of
        # `carry_over.answers`: the one that was begun first comes first.
        in_flight: dict[str, AnswersBySample] = {}
        for answer in carry_over.answers:
            in_flight.setdefault(answer.problem.id, {})[answer.sample] = answer

        # As many problems are in flight as the iteration has: the carried ones, and then new ones.
        most_new = max(0, len(problems) - len(in_flight))
        new_problems = [problem for problem in problems if problem.id not in in_flight][:most_new]
        for problem in new_problems:  # every rank checks all prompts, so that all stop if one is too long
            max_tokens = self._sampling_of_problem(context, problem).max_tokens
            encode_prompt(context, problem, max_tokens, self.max_prompt_tokens)
        carried_problems = []
        for answers_of_problem in in_flight.values():
            any_answer = next(iter(answers_of_problem.values()))
            carried_problems.append(any_answer.problem)
        all_problems = carried_problems + new_problems
        groups = [
            _GroupInFlight(problem, in_flight.get(problem.id, {}))
            for problem in rank_share(context, all_problems)
        ]

        ready: list[str] = []  # the problems of all ranks whose answers have all ended
        sampling_round = 0
        while not ready:  # until at least one problem can be trained on
            groups = self._sample_further(context, groups, sampling_round)
            sampling_round += 1
            local_ready = [group.problem.id for group in groups if self._have_all_ended(context, group)]
            ready_by_rank = context.ranks.exchange("groups that have ended", local_ready)
            # Each rank has a contiguous part of `all_problems`, so `ready` keeps the order of `all_problems`,
            # in which the earliest begun come first.
            ready = list(itertools.chain.from_iterable(ready_by_rank))
        trained_problems = set(ready[: self.groups])  # if `groups` is None, all problems that are ready

        carried_answers: list[Trajectory] = []
        trained_answers: list[Trajectory] = []
        for problem, answers in groups:
            answers_in_order = [answers[sample] for sample in sorted(answers)]
            if problem.id in trained_problems:
                trained_answers += answers_in_order
            else:
                carried_answers += answers_in_order
        carry_over.keep(carried_answers)
        trees, metrics = measure_trees(context, trees_of(trained_answers))

        n_versions = 0  # the number of policy versions that sampled an answer, summed over the answers
        for answer in trained_answers:
            n_versions += len({segment.policy_version for segment in answer.segments})
        local_counts = [n_versions, len(trained_answers), len(trees)]
        counts_by_rank = context.ranks.exchange("partial answers", local_counts)
        versions_of_all = answers_of_all = trees_of_all = 0
        for versions_of_rank, answers_of_rank, trees_of_rank in counts_by_rank:
            versions_of_all += versions_of_rank
            answers_of_all += answers_of_rank
            trees_of_all += trees_of_rank
        return trees, metrics | {
            "rollout/groups_begun": float(len(new_problems)),
            "rollout/groups_carried": float(len(all_problems) - trees_of_all),
            "rollout/versions": versions_of_all / answers_of_all,
        }

    def _have_all_ended(self, context: RolloutContext, group: _GroupInFlight) -> bool:
        """Returns whether all answers to a problem have ended."""
        return all(self._has_ended(context, answer) for answer in group.answers.values())

    def _has_ended(self, context: RolloutContext, answer: Trajectory) -> bool:
        """Returns whether an answer has stopped, or has used up its tokens."""
        return answer.finish_reason == "stop" or self._remaining_tokens(context, answer) <= 0

    def _sampling_of_problem(self, context: RolloutContext, problem: Problem) -> SamplingParams:
        """Returns the sampling parameters of answers to a problem, as the problem's task adjusts them.

        Raises:
            ValueError: The task adds stop strings.
        """
        assert self.sampling is not None, "a rollout that samples has sampling parameters"
        sampling = task_of(context.task, problem).adjust_sampling(self.sampling)
        if sampling.stop:
            raise ValueError(
                f"problem {problem.id!r} is sampled with stop strings, and one that lies across the end of an"
                " iteration would not be recognised: choose the rollout 'single_turn' for its task"
            )
        return sampling

    def _remaining_tokens(self, context: RolloutContext, answer: Trajectory) -> int:
        """Returns how many more tokens an answer that hasn't stopped may have."""
        max_tokens = self._sampling_of_problem(context, answer.problem).max_tokens
        return context.settings.token_budget(answer.prompt_ids, max_tokens) - len(answer.response_ids)

    def _sample_further(
        self, context: RolloutContext, groups: Sequence[_GroupInFlight], sampling_round: int
    ) -> list[_GroupInFlight]:
        """Samples up to `tokens_per_iteration` more tokens of every answer that has not ended.

        The seeds derive from the run's seed, the iteration, the problem, the round and the answer's `sample`.
        So an answer does not depend on the others.
        """
        assert context.engine is not None, "a rollout that samples needs an engine"
        sampler = CountedSamples(context)  # samples, and shows in the run's log how many samples are there

        async def sample_all() -> list[_GroupInFlight]:
            coroutines = [self._sample_group(context, group, sampling_round, sampler) for group in groups]
            return await asyncio.gather(*coroutines)

        return context.engine.run(sample_all())

    async def _sample_group(
        self, context: RolloutContext, group: _GroupInFlight, sampling_round: int, sampler: CountedSamples
    ) -> _GroupInFlight:
        """Begins a problem's answers if it has none, or else continues those that have not ended."""
        problem = group.problem
        seed = derive_seed(context.seed, context.iteration, problem.id, "partial", sampling_round)
        if not group.answers:
            sampled = await self._begin_answers(context, problem, seed, sampler)
        else:
            continuations = []
            for _, answer in sorted(group.answers.items()):  # in the order of their numbers
                if not self._has_ended(context, answer):
                    continuations.append(self._continue_answer(context, answer, seed, sampler))
            sampled = await asyncio.gather(*continuations)
        return _GroupInFlight(problem, group.answers | {answer.sample: answer for answer in sampled})

    async def _begin_answers(
        self, context: RolloutContext, problem: Problem, seed: int, sampler: CountedSamples
    ) -> list[Trajectory]:
        """Samples the beginnings of a problem's answers, and returns them."""
        prompt_ids = context.codec.encode_prompt(problem)
        budget = context.settings.token_budget(
            prompt_ids, self._sampling_of_problem(context, problem).max_tokens
        )
        sampling = self._sampling_of_iteration(context, problem, budget)
        completions = await sampler.sample(Request(prompt_ids, seed=seed, n=self.samples, sampling=sampling))
        new_answers = (
            self._make_answer(context, problem, prompt_ids, sample, (completion.segment(),), completion)
            for sample, completion in enumerate(completions)
        )
        return await asyncio.gather(*new_answers)

    async def _continue_answer(
        self, context: RolloutContext, answer: Trajectory, seed: int, sampler: CountedSamples
    ) -> Trajectory:
        """Samples more tokens of an answer, and returns the longer answer."""
        problem, remaining_tokens = answer.problem, self._remaining_tokens(context, answer)
        request = Request(
            concatenate([answer.prompt_ids, answer.response_ids]),
            # The engine draws sample i of a request with `seed + i`. This request has only one sample, for
            # which i is 0. So the answer's number is added here.
            seed=seed + answer.sample,
            n=1,
            sampling=self._sampling_of_iteration(context, problem, remaining_tokens),
        )
        (completion,) = await sampler.sample(request)
        segments = (*answer.segments, completion.segment())
        return await self._make_answer(
            context, problem, answer.prompt_ids, answer.sample, segments, completion
        )

    def _sampling_of_iteration(
        self, context: RolloutContext, problem: Problem, remaining_tokens: int
    ) -> SamplingParams:
        """Returns the sampling parameters of an answer that may have `remaining_tokens` more tokens."""
        max_tokens = min(self.tokens_per_iteration, remaining_tokens)
        return replace(self._sampling_of_problem(context, problem), max_tokens=max_tokens)

    async def _make_answer(
        self,
        context: RolloutContext,
        problem: Problem,
        prompt_ids: TokenIds,
        sample: int,
        segments: tuple[Segment, ...],
        completion: Completion,
    ) -> Trajectory:
        """Returns the trajectory of an answer so far. It is graded only if the answer has ended."""
        response_ids = concatenate([segment.token_ids for segment in segments])
        text = context.codec.decode(response_ids)
        answer = Trajectory(
            problem=problem,
            sample=sample,
            prompt_ids=prompt_ids,
            segments=segments,
            finish_reason=completion.finish_reason,
            text=text,
            grade=UNGRADED,
            step_ends=split_steps(context, problem, response_ids, text),
        )
        if not self._has_ended(context, answer):
            return answer
        # If the answer was cut off and `unfinished_reward` is set, its reward is decided, whatever its grade
        # is. A grader that is a service is then not asked.
        decided = is_decided(answer.finish_reason, self.unfinished_reward)
        grade = await result_of(context.grader.submit(text, problem, decided=decided))
        return replace(
            answer, grade=apply_unfinished_reward(grade, answer.finish_reason, self.unfinished_reward)
        )
