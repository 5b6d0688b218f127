"""Answers that take several iterations, so that none waits for the longest."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Experiment, Finding, Need, StaleAnswers
from treetune.engine.base import Completion, Request, SamplingParams
from treetune.engine.programs import result_of
from treetune.rollouts.answers import (
    UNGRADED,
    CountedSamples,
    encoded_prompt,
    is_decided,
    measured_trees,
    rank_share,
    steps_of,
    with_unfinished,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import CarryOver, RolloutContext
from treetune.rollouts.single_turn import RolloutAround, SingleTurn
from treetune.seeds import derive_seed
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Metrics, Problem, Segment, TokenIds, Trajectory, joined

Answers = dict[int, Trajectory]
"""Answers to a problem, as far as they have come, by sample; none where it is to be begun."""


@Rollout.register("partial")
@dataclass(frozen=True, kw_only=True)
class PartialAnswers(RolloutAround):
    """An iteration samples at most `tokens_per_iteration` tokens of each answer of `rollout`
    (``single_turn``). An answer that isn't at its end then goes on in the next iteration, from the weights of
    then: each segment has the policy version that sampled it (partial rollouts: Kimi k1.5, arXiv:2501.12599,
    section 2.6.2).

    So many problems are in flight as the iteration has (`problems_per_iteration`): those whose answers were
    carried over, and then new ones. A problem is trained on once all its answers are at their end, and then
    once. No problem is left out for being slow: every one that is begun is trained on, those that wait in the
    order in which they were begun, and nothing depends on the clock. What the end of a run finds in flight is
    lost. An iteration goes on until one problem at least can be trained on.

    ``rollout/groups_begun``; ``rollout/groups_carried`` over to the next iteration; ``rollout/versions``: how
    many policies an answer that is trained on was sampled by, on average.
    """

    tokens_per_iteration: Annotated[int, Gt(0)]
    """Tokens of an answer that an iteration samples at most."""
    groups: Annotated[int, Gt(0)] | None = None
    """Problems of an iteration at most, the earliest begun first; others wait. With fewer of them than
    problems in flight, an iteration is as large as it should be though some take longer (over-sampling). None
    takes all that are there."""

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
            yield Finding(
                "partial goes on with answers in one line", "rollout", "name {type: 'single_turn', …}"
            )
            return
        if self.rollout.stop:
            yield Finding(
                "a stop string that lies across the end of an iteration would not be seen",
                "rollout.stop",
                "leave it out, and let an end token end answers",
            )
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
        if getattr(experiment, "problem_sampling", None) == "epochs":
            yield Finding(
                "drawn problems for which there is no room beside those in flight are passed over, which"
                " problem_sampling 'epochs' promises not to do",
                "$.problem_sampling",
                "set it to 'between_iterations'",
            )

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        carry_over = context.get(CarryOver)
        in_flight: dict[str, Answers] = {}  # by problem, in the order in which they were begun
        for answer in carry_over.answers:
            in_flight.setdefault(answer.problem.id, {})[answer.sample] = answer
        room = max(0, len(problems) - len(in_flight))
        new = [problem for problem in problems if problem.id not in in_flight][:room]
        for problem in new:
            max_tokens = self._sampling(context, problem).max_tokens
            encoded_prompt(context, problem, max_tokens, self.max_prompt_tokens)
        carried = [next(iter(answers.values())).problem for answers in in_flight.values()]
        asked = carried + new
        groups = [(problem, in_flight.get(problem.id, {})) for problem in rank_share(context, asked)]
        ended: list[str] = []  # problems of all ranks whose answers are all at their end
        turn = 0
        while not ended:
            self._sample_further(context, groups, turn)
            turn += 1
            ended_here = [problem.id for problem, answers in groups if self._have_ended(context, answers)]
            of_ranks = context.ranks.exchange("groups that have ended", [ended_here])
            ended = [problem_id for (ended_there,) in of_ranks for problem_id in ended_there]
        chosen = set(ended[: self.groups])
        kept: list[Trajectory] = []
        trained: list[Trajectory] = []
        for problem, answers in groups:
            in_order = [answers[sample] for sample in sorted(answers)]
            if problem.id in chosen:
                trained += in_order
            else:
                kept += in_order
        carry_over.keep(kept)
        trees, metrics = measured_trees(context, trees_of(trained))
        versions = 0
        for answer in answers_of(trees):
            versions += len({segment.policy_version for segment in answer.segments})
        counts = [(versions, len(answers_of(trees)), len(trees))]
        of_ranks = context.ranks.exchange("partial answers", counts)
        all_versions = sum(count[0] for (count,) in of_ranks)
        all_answers = sum(count[1] for (count,) in of_ranks)
        all_trees = sum(count[2] for (count,) in of_ranks)
        return trees, metrics | {
            "rollout/groups_begun": float(len(new)),
            "rollout/groups_carried": float(len(asked) - all_trees),
            "rollout/versions": all_versions / all_answers,
        }

    def _have_ended(self, context: RolloutContext, answers: Answers) -> bool:
        return not any(self._tokens_left(context, answer) for answer in answers.values())

    def _sampling(self, context: RolloutContext, problem: Problem) -> SamplingParams:
        """Returns the task's sampling parameters. Raises ValueError for a task with stop strings of its
        own."""
        assert self.sampling is not None
        sampling = context.task.of(problem).sampling(self.sampling)
        if sampling.stop:
            raise ValueError(
                f"problem {problem.id!r} is sampled with stop strings, and one that lies across the end of an"
                " iteration would not be seen: choose the rollout 'single_turn' for its task"
            )
        return sampling

    def _tokens_left(self, context: RolloutContext, answer: Trajectory) -> int:
        """Returns how many tokens an answer may still have; 0 where it is at its end."""
        if answer.finish_reason == "stop":
            return 0
        max_tokens = self._sampling(context, answer.problem).max_tokens
        return context.settings.token_budget(answer.prompt_ids, max_tokens) - len(answer.response_ids)

    def _sample_further(
        self, context: RolloutContext, groups: Sequence[tuple[Problem, Answers]], turn: int
    ) -> None:
        """Samples up to `tokens_per_iteration` tokens more for every answer that isn't at its end, and puts
        the longer answers into their groups. The seed of an answer derives from the iteration, the problem
        and its sample, and from nothing that another answer does."""
        assert context.engine is not None, "a rollout that samples needs an engine"
        counted = CountedSamples(context)

        async def sample_all() -> None:
            await asyncio.gather(
                *(self._sample_group(context, problem, answers, turn, counted) for problem, answers in groups)
            )

        context.engine.run(sample_all())

    async def _sample_group(
        self,
        context: RolloutContext,
        problem: Problem,
        answers: Answers,
        turn: int,
        counted: CountedSamples,
    ) -> None:
        """Begins a problem's answers where there are none, and goes on with those that aren't at their
        end."""
        seed = derive_seed(context.seed, context.iteration, problem.id, "partial", turn)
        sampling = self._sampling(context, problem)

        def bounded(tokens_left: int) -> SamplingParams:
            return replace(sampling, max_tokens=min(self.tokens_per_iteration, tokens_left))

        async def begin() -> None:
            prompt_ids = context.codec.encode_prompt(problem)
            left = context.settings.token_budget(prompt_ids, sampling.max_tokens)
            request = Request(prompt_ids, seed=seed, n=self.samples, sampling=bounded(left))
            completions = await counted.sample(request)
            begun = (
                self._answer(context, problem, prompt_ids, sample, (completion.segment(),), completion)
                for sample, completion in enumerate(completions)
            )
            for answer in await asyncio.gather(*begun):
                answers[answer.sample] = answer

        async def go_on(before: Trajectory, left: int) -> None:
            request = Request(
                joined([before.prompt_ids, before.response_ids]),
                seed=seed + before.sample,
                n=1,
                sampling=bounded(left),
            )
            (completion,) = await counted.sample(request)
            segments = (*before.segments, completion.segment())
            answers[before.sample] = await self._answer(
                context, problem, before.prompt_ids, before.sample, segments, completion
            )

        if not answers:
            await begin()
            return
        unfinished = [(answer, self._tokens_left(context, answer)) for _, answer in sorted(answers.items())]
        await asyncio.gather(*(go_on(answer, left) for answer, left in unfinished if left))

    async def _answer(
        self,
        context: RolloutContext,
        problem: Problem,
        prompt_ids: TokenIds,
        sample: int,
        segments: tuple[Segment, ...],
        completion: Completion,
    ) -> Trajectory:
        """Returns an answer as far as it has come, graded if it is at its end."""
        response_ids = joined([segment.token_ids for segment in segments])
        text = context.codec.decode(response_ids)
        answer = Trajectory(
            problem=problem,
            sample=sample,
            prompt_ids=prompt_ids,
            segments=segments,
            finish_reason=completion.finish_reason,
            text=text,
            grade=UNGRADED,
            step_ends=steps_of(context, problem, response_ids, text),
        )
        if self._tokens_left(context, answer):
            return answer
        decided = is_decided(answer.finish_reason, self.unfinished_reward)
        grade = await result_of(context.grader.submit(text, problem, decided=decided))
        return replace(answer, grade=with_unfinished(grade, answer.finish_reason, self.unfinished_reward))
