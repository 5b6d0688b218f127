"""Independent answers to each problem, each sampled from the prompt to its end."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from treetune.contracts import Answers, Feature, OneLine, SampledAnswers
from treetune.inference.base import Completion, Request, SamplingParams
from treetune.rollouts.answers import (
    SampledRollout,
    before_stop,
    encoded_prompt,
    is_decided,
    rank_share,
    steps_of,
    with_unfinished,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import AnswerObserver, RolloutContext
from treetune.rollouts.metrics import trajectory_metrics
from treetune.rollouts.numbers import measured
from treetune.seeds import derive_seed
from treetune.tasks.base import Task
from treetune.tree import Tree, answers_of
from treetune.vocabulary import Grade, Metrics, Problem, TextCodec, Trajectory


@Rollout.register("single_turn")
@dataclass(frozen=True, kw_only=True)
class SingleTurn(SampledRollout):
    """`samples` independent answers to each problem, of at most `max_tokens` tokens.

    An answer that the budget cut off earns `unfinished_reward`, even when a right answer is
    already in it: what is not brought to an end is not learnt from as a success.

    One of the strings in `stop` ends an answer as an end token does. Its tokens stay in the answer
    and are trained, since they were sampled; no end token that was not sampled is put behind them.
    The grader reads what stands before it. Evaluation leaves no problem out.
    """

    stop: tuple[str, ...] = ()
    """Strings that end an answer, and stay in it."""

    @property
    def gives(self) -> tuple[Feature, ...]:
        return SampledAnswers(), Answers(self.samples), OneLine()

    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        # All prompts, not this rank's only: if one does not fit, no rank is left waiting for another.
        for problem in problems:
            sampling = context.task.of(problem).sampling(self.sampling)
            encoded_prompt(context, problem, sampling.max_tokens, self.max_prompt_tokens)
        trees = sample_answers(
            context,
            rank_share(context, problems),
            samples=self.samples,
            sampling=self.sampling,
            unfinished_reward=self.unfinished_reward,
            max_prompt_tokens=self.max_prompt_tokens,
        )
        trees = measured(trees, context.codec)
        return trees, trajectory_metrics(context, answers_of(trees))


def for_fixed_problems(rollout: Rollout) -> Rollout:
    """What makes the answers where problems are fixed: `samples` to each, whatever training does with them.

    That is what the rollout says by its `sampler`, plain sampling with its settings where it says nothing,
    and the rollout itself where it doesn't sample.
    """
    sampling = rollout.sampling
    if rollout.sampler is not None or sampling is None:
        return rollout.sampler or rollout
    return SingleTurn(
        samples=rollout.samples,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=sampling.stop,
        unfinished_reward=rollout.unfinished_reward,
        max_prompt_tokens=rollout.max_prompt_tokens,
    )


def sample_answers(
    context: RolloutContext,
    problems: Sequence[Problem],
    *,
    samples: int,
    sampling: SamplingParams,
    unfinished_reward: float | None = 0.0,
    max_prompt_tokens: int | None = None,
    purpose: str = "rollout",
) -> list[Tree]:
    """The trees of `problems`, in their order, with `samples` graded answers each.

    The seed is derived from the run's, the iteration, the problem and `purpose`, so that an answer
    does not depend on what else is sampled. Answers are graded while others are still sampling, and where
    somebody waits for each, they are asked for one by one.

    Raises ValueError for a prompt that leaves no room for an answer in the context.
    """
    assert context.engine is not None, "a rollout that samples needs an engine"
    requests = [
        Request(
            prompt_ids=prompt_ids,
            seed=derive_seed(context.seed, context.iteration, problem.id, purpose),
            n=samples,
            sampling=replace(own, max_tokens=context.settings.token_budget(prompt_ids, own.max_tokens)),
            reads_logprobs=context.settings.reads_logprobs,
        )
        for problem in problems
        for own in [context.task.of(problem).sampling(sampling)]
        for prompt_ids in [encoded_prompt(context, problem, own.max_tokens, max_prompt_tokens)]
    ]
    answers: dict[tuple[int, int], tuple[Trajectory, Future[Grade]]] = {}
    observer = context.find(AnswerObserver)
    together = samples if observer is None else 1

    def on_result(index: int, completions: list[Completion]) -> None:
        place, first = divmod(index * together, samples)
        problem, request = problems[place], requests[place]
        for sample, completion in enumerate(completions, first):
            text = context.codec.decode(completion.token_ids)
            said = before_stop(text, request.sampling.stop)
            decided = is_decided(completion.finish_reason, unfinished_reward)
            grade = context.grader.submit(said, problem, decided=decided)
            answer = Trajectory(
                problem=problem,
                sample=sample,
                prompt_ids=request.prompt_ids,
                segments=(completion.segment(),),
                finish_reason=completion.finish_reason,
                text=text,
                grade=Grade(reward=0.0, outcome="no_answer"),  # until it has been graded
                step_ends=steps_of(context, problem, completion.token_ids, text, request.sampling.stop),
            )
            answers[place, sample] = answer, grade
            if observer is not None:
                observer.observe(answer, grade)
        context.log.progress(len(answers), len(requests) * samples)

    asked = [
        replace(request, seed=request.seed + first, n=together)
        for request in requests
        for first in range(0, samples, together)
    ]
    context.engine.generate(asked, on_result)
    assert len(answers) == len(requests) * samples, "the engine reports every request"
    trees = [Tree(problem, request.prompt_ids) for problem, request in zip(problems, requests, strict=True)]
    for place, tree in enumerate(trees):
        for sample in range(samples):
            answer, grade = answers[place, sample]
            tree.end(
                tree.add(answer.segments[0]),
                finish_reason=answer.finish_reason,
                text=answer.text,
                grade=with_unfinished(grade.result(), answer.finish_reason, unfinished_reward),
                step_ends=answer.step_ends,
            )
    return trees


@dataclass(frozen=True, kw_only=True)
class RolloutAround(Rollout):
    """How answers are made and sampled is the inner `rollout`'s affair."""

    rollout: Rollout

    @property
    def gives(self) -> tuple[Feature, ...]:
        return self.rollout.gives

    @property
    def samples(self) -> int:  # type: ignore[override]
        return self.rollout.samples

    @property
    def unfinished_reward(self) -> float | None:  # type: ignore[override]
        return self.rollout.unfinished_reward

    @property
    def max_prompt_tokens(self) -> int | None:  # type: ignore[override]
        return self.rollout.max_prompt_tokens

    @property
    def sampling(self) -> SamplingParams | None:
        return self.rollout.sampling

    @property
    def sampler(self) -> Rollout:
        return for_fixed_problems(self.rollout)

    def missing(self, task: Task) -> Sequence[str]:
        return self.rollout.missing(task)

    def prepare(self, codec: TextCodec) -> None:
        self.rollout.prepare(codec)
