"""Answers that take several iterations, so that none waits for the longest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Experiment, Finding, Need, StaleAnswers
from treetune.engine.base import Completion, Request, SamplingParams
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
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Grade, Metrics, Problem, TokenIds, Trajectory, joined

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
        new = [one for one in problems if one.id not in in_flight][: max(0, len(problems) - len(in_flight))]
        for problem in new:
            max_tokens = self._sampling(context, problem).max_tokens
            encoded_prompt(context, problem, max_tokens, self.max_prompt_tokens)
        asked = [next(iter(answers.values())).problem for answers in in_flight.values()] + new
        groups = [(problem, in_flight.get(problem.id, {})) for problem in rank_share(context, asked)]
        ended: list[str] = []
        turn = 0
        while not ended:
            self._sample(context, groups, turn)
            local = [
                problem.id
                for problem, answers in groups
                if not any(self._tokens_left(context, answer) for answer in answers.values())
            ]
            ended = [id for (ids,) in context.ranks.exchange("groups that have ended", [local]) for id in ids]
            turn += 1
        chosen = set(ended[: self.groups])
        in_order = {
            problem.id: [answers[sample] for sample in sorted(answers)] for problem, answers in groups
        }
        carry_over.keep([one for id, answers in in_order.items() if id not in chosen for one in answers])
        trees, metrics = measured_trees(
            context, trees_of(one for id, answers in in_order.items() if id in chosen for one in answers)
        )
        versions = [len({part.policy_version for part in one.segments}) for one in answers_of(trees)]
        counts = context.ranks.exchange("partial answers", [(sum(versions), len(versions), len(trees))])
        total, trained_answers, trained = (
            sum(column) for column in zip(*(one for (one,) in counts), strict=True)
        )
        return trees, metrics | {
            "rollout/groups_begun": float(len(new)),
            "rollout/groups_carried": float(len(asked) - trained),
            "rollout/versions": total / trained_answers,
        }

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

    def _sample(self, context: RolloutContext, groups: Sequence[tuple[Problem, Answers]], turn: int) -> None:
        """Samples up to `tokens_per_iteration` tokens more for every answer that isn't at its end, and puts
        the longer answers into their groups. The seed of an answer derives from the iteration, the problem
        and its sample, and from nothing that another answer does."""
        assert context.engine is not None, "a rollout that samples needs an engine"
        requests: list[Request] = []
        owners: list[tuple[Problem, Answers, Trajectory | None]] = []
        for problem, answers in groups:
            seed = derive_seed(context.seed, context.iteration, problem.id, "partial", turn)
            sampling = self._sampling(context, problem)

            # The ids so far, their answer (None: all answers, from the prompt), and the tokens left to it.
            parts: list[tuple[TokenIds, Trajectory | None, int]] = []
            if not answers:
                prompt_ids = context.codec.encode_prompt(problem)
                left = context.settings.token_budget(prompt_ids, sampling.max_tokens)
                parts.append((prompt_ids, None, left))
            for sample in sorted(answers):
                before = answers[sample]
                if left := self._tokens_left(context, before):
                    parts.append((joined([before.prompt_ids, before.response_ids]), before, left))
            for ids, part, left in parts:
                own = replace(sampling, max_tokens=min(self.tokens_per_iteration, left))
                first, n = (0, self.samples) if part is None else (part.sample, 1)
                requests.append(Request(prompt_ids=ids, seed=seed + first, n=n, sampling=own))
                owners.append((problem, answers, part))
        grown: list[tuple[Answers, Trajectory, Future[Grade] | None]] = []
        total = sum(request.n for request in requests)

        def on_result(index: int, completions: list[Completion]) -> None:
            problem, answers, before = owners[index]
            for sample, completion in enumerate(completions):
                segments = (*(() if before is None else before.segments), completion.segment())
                response_ids = joined([segment.token_ids for segment in segments])
                text = context.codec.decode(response_ids)
                answer = Trajectory(
                    problem=problem,
                    sample=sample if before is None else before.sample,
                    prompt_ids=requests[index].prompt_ids if before is None else before.prompt_ids,
                    segments=segments,
                    finish_reason=completion.finish_reason,
                    text=text,
                    grade=UNGRADED,
                    step_ends=steps_of(context, problem, response_ids, text),
                )
                grade = None
                if not self._tokens_left(context, answer):
                    decided = is_decided(answer.finish_reason, self.unfinished_reward)
                    grade = context.grader.submit(text, problem, decided=decided)
                grown.append((answers, answer, grade))
            context.log.progress(len(grown), total)

        context.engine.generate(requests, on_result)
        for answers, answer, grade in grown:
            if grade is not None:
                known = with_unfinished(grade.result(), answer.finish_reason, self.unfinished_reward)
                answer = replace(answer, grade=known)
            answers[answer.sample] = answer
