"""Answers that take several iterations, so that none waits for the longest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Gt

from treetune.contracts import Experiment, Finding, Need, StaleAnswers
from treetune.inference.base import Completion, Request, SamplingParams
from treetune.rollouts.answers import (
    UNGRADED,
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
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Grade, Metrics, Problem, Segment, TokenIds, Trajectory, joined


@Rollout.register("partial")
@dataclass(frozen=True, kw_only=True)
class PartialAnswers(RolloutAround):
    """`rollout` (``single_turn``), of each of whose answers an iteration samples at most
    `tokens_per_iteration` tokens. One that isn't at its end then goes on in the next iteration, from the
    weights of then: each segment has the policy version that sampled it (partial rollouts: Kimi k1.5,
    arXiv:2501.12599, section 2.6.2).

    So many problems are in flight as the iteration has (`problems_per_iteration`): those whose answers were
    carried over, and then new ones. A problem is trained on once all its answers are at their end, and then
    once. `groups` bounds how many are in an iteration, the earliest begun first, and others wait: with fewer
    of them than problems in flight, an iteration is as large as it should be though some take longer
    (over-sampling). None takes all that are there.

    No problem is left out for being slow: every one that is begun is trained on, those that wait in the order
    in which they were begun, and nothing depends on the clock. What the end of a run finds in flight is lost.
    An iteration goes on until one problem at least can be trained on.

    ``rollout/groups_begun``; ``rollout/groups_carried`` over to the next iteration; ``rollout/versions``: how
    many policies an answer that is trained on was sampled by, on average.
    """

    tokens_per_iteration: Annotated[int, Gt(0)]
    groups: Annotated[int, Gt(0)] | None = None

    carries = True

    @property
    def needs(self) -> tuple[Need, ...]:
        return (Need(StaleAnswers(), "it trains on answers that earlier weights have begun"),)

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

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        carry_over = context.get(CarryOver)
        in_flight = _groups(carry_over.answers)
        new = [one for one in problems if one.id not in in_flight][: max(0, len(problems) - len(in_flight))]
        for problem in new:
            encoded_prompt(
                context, problem, self._sampling(context, problem).max_tokens, self.max_prompt_tokens
            )
        everyones = [one.problem for one in in_flight.values()] + new
        own = [in_flight.get(one.id) or _Group(one) for one in rank_share(context, everyones)]
        ended: list[str] = []
        stretch = 0
        while not ended:
            self._sample(context, own, stretch)
            mine = [group.problem.id for group in own if self._has_ended(context, group)]
            ended = [id for (ids,) in context.ranks.exchange("groups that have ended", [mine]) for id in ids]
            stretch += 1
        chosen = set(ended[: self.groups])
        left = [group for group in own if group.problem.id not in chosen]
        carry_over.keep([answer for group in left for answer in group.answers])
        trees, metrics = measured_trees(
            context, [_tree(group) for group in own if group.problem.id in chosen]
        )
        return trees, metrics | self._metrics(context, trees, new, everyones)

    def _sampling(self, context: RolloutContext, problem: Problem) -> SamplingParams:
        """As the task wants it; raises ValueError for a task with stop strings of its own."""
        assert self.sampling is not None
        sampling = context.task.of(problem).sampling(self.sampling)
        if sampling.stop:
            raise ValueError(
                f"problem {problem.id!r} is sampled with stop strings, and one that lies across the end of an"
                " iteration would not be seen: choose the rollout 'single_turn' for its task"
            )
        return sampling

    def _budget(self, context: RolloutContext, problem: Problem, prompt_ids: TokenIds) -> int:
        """Tokens that an answer may have in all."""
        return context.settings.token_budget(prompt_ids, self._sampling(context, problem).max_tokens)

    def _has_ended(self, context: RolloutContext, group: _Group) -> bool:
        return all(not self._left(context, answer) for answer in group.answers)

    def _left(self, context: RolloutContext, answer: Trajectory) -> int:
        """How many tokens it may still have; 0 where it is at its end."""
        if answer.finish_reason == "stop":
            return 0
        return self._budget(context, answer.problem, answer.prompt_ids) - len(answer.response_ids)

    def _sample(self, context: RolloutContext, groups: Sequence[_Group], stretch: int) -> None:
        """Up to `tokens_per_iteration` tokens more for every answer that isn't at its end. Its seed derives
        from the iteration, the problem and the answer, and from nothing that another answer does."""
        assert context.engine is not None, "a rollout that samples needs an engine"
        asked: list[Request] = []
        whose: list[tuple[_Group, Trajectory | None]] = []
        for group in groups:
            for answer, prompt_ids, first, n, left in self._unended(context, group):
                seed = derive_seed(context.seed, context.iteration, group.problem.id, "partial", stretch)
                tokens = min(self.tokens_per_iteration, left)
                sampling = replace(self._sampling(context, group.problem), max_tokens=tokens)
                asked.append(Request(prompt_ids=prompt_ids, seed=seed + first, n=n, sampling=sampling))
                whose.append((group, answer))
        grades: list[tuple[_Group, Trajectory, Future[Grade] | None]] = []

        def on_result(index: int, completions: list[Completion]) -> None:
            group, before = whose[index]
            for sample, completion in enumerate(completions):
                answer = self._grown(context, group, before, sample, completion)
                grade = None
                if not self._left(context, answer):
                    decided = is_decided(answer.finish_reason, self.unfinished_reward)
                    grade = context.grader.submit(answer.text, answer.problem, decided=decided)
                grades.append((group, answer, grade))
            context.log.progress(len(grades), sum(request.n for request in asked))

        context.engine.generate(asked, on_result)
        for group, answer, grade in grades:
            if grade is not None:
                known = with_unfinished(grade.result(), answer.finish_reason, self.unfinished_reward)
                answer = replace(answer, grade=known)
            group.by_sample[answer.sample] = answer

    def _unended(
        self, context: RolloutContext, group: _Group
    ) -> Iterator[tuple[Trajectory | None, TokenIds, int, int, int]]:
        """What there is to sample from: an answer (None: all, from the prompt), the ids so far, which sample
        it is, how many, and the tokens that it may still have."""
        if not group.by_sample:
            prompt_ids = context.codec.encode_prompt(group.problem)
            yield None, prompt_ids, 0, self.samples, self._budget(context, group.problem, prompt_ids)
        for answer in group.answers:
            if left := self._left(context, answer):
                ids = joined([answer.prompt_ids, answer.response_ids])
                yield answer, ids, answer.sample, 1, left

    def _grown(
        self,
        context: RolloutContext,
        group: _Group,
        before: Trajectory | None,
        sample: int,
        completion: Completion,
    ) -> Trajectory:
        """The answer with what was sampled now; nothing is known of its worth yet."""
        earlier: tuple[Segment, ...] = () if before is None else before.segments
        segments = (*earlier, completion.segment())
        response_ids = joined([segment.token_ids for segment in segments])
        text = context.codec.decode(response_ids)
        return Trajectory(
            problem=group.problem,
            sample=sample if before is None else before.sample,
            prompt_ids=context.codec.encode_prompt(group.problem) if before is None else before.prompt_ids,
            segments=segments,
            finish_reason=completion.finish_reason,
            text=text,
            grade=UNGRADED,
            step_ends=steps_of(context, group.problem, response_ids, text),
        )

    def _metrics(
        self,
        context: RolloutContext,
        trees: Sequence[Tree],
        new: Sequence[Problem],
        everyones: Sequence[Problem],
    ) -> Metrics:
        """Of all ranks. Collective."""
        own = [len({part.policy_version for part in one.segments}) for one in answers_of(trees)]
        counts = context.ranks.exchange("partial answers", [(sum(own), len(own), len(trees))])
        versions, answers, trained = (sum(column) for column in zip(*(one for (one,) in counts), strict=True))
        return {
            "rollout/groups_begun": float(len(new)),
            "rollout/groups_carried": float(len(everyones) - trained),
            "rollout/versions": versions / answers,
        }


@dataclass
class _Group:
    """A problem's answers, as far as they have come, by sample; none where it is to be begun."""

    problem: Problem
    by_sample: dict[int, Trajectory] = field(default_factory=dict)

    @property
    def answers(self) -> list[Trajectory]:
        return [self.by_sample[sample] for sample in sorted(self.by_sample)]


def _groups(answers: Sequence[Trajectory]) -> dict[str, _Group]:
    """By the problem's id, in the order in which they were begun."""
    groups: dict[str, _Group] = {}
    for answer in answers:
        groups.setdefault(answer.problem.id, _Group(answer.problem)).by_sample[answer.sample] = answer
    return groups


def _tree(group: _Group) -> Tree:
    tree = Tree(group.problem, group.answers[0].prompt_ids)
    for answer in group.answers:
        tree.take(answer)
    return tree
