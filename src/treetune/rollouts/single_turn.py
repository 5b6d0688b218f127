"""Samples independent answers to each problem, each from the prompt to its end (rollout `single_turn`).

One asyncio program has a task for each problem, and a task for each answer once it is sampled. The drawing in
`engine.programs` shows which task waits for which:

    prompt ── engine.sample ── decode ── grader (a process of its own) ── AnswerObserver ── leaf of the tree
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from treetune.contracts import Answers, Feature, OneLine, SampledAnswers
from treetune.engine.programs import result_of
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.rollouts.answers import (
    Announcer,
    SampledRollout,
    apply_unfinished_reward,
    cut_at_stop,
    encode_prompt,
    is_decided,
    measure_trees,
    rank_share,
    split_steps,
)
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.seeds import derive_seed
from treetune.tasks.mixed import task_of
from treetune.tree import Tree
from treetune.vocabulary import Metrics, Problem, TextCodec, Trajectory


@Rollout.register("single_turn")
@dataclass(frozen=True, kw_only=True)
class SingleTurn(SampledRollout):
    """`samples` independent answers to each problem, of at most `max_tokens` tokens.

    An answer that the budget cut off earns `unfinished_reward`, even if it already contains a right result:
    the policy should not learn from an unfinished answer as from a success.

    Each of the strings in `stop` ends an answer as an end token does. The tokens of the stop string stay in
    the answer and are trained, since they were sampled; no end token is appended after them. The grader reads
    the text before the stop string.
    """

    stop: tuple[str, ...] = ()
    """Strings that end an answer, and stay in it."""

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return SampledAnswers(), Answers(self.samples), OneLine()

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        return sample_each_in_one_turn(self, context, problems)


def sample_each_in_one_turn(
    rollout: SampledRollout, context: RolloutContext, problems: Sequence[Problem]
) -> tuple[list[Tree], Metrics]:
    """Returns the trees of this rank's share of the problems, and the metrics of all ranks. Each answer is
    sampled in one go, from the prompt to its end. Collective.

    It serves `single_turn`, and `parallel_threads` without threads.
    """
    # Every rank encodes the prompts of all ranks here, only to check them. So a prompt that is too long stops
    # all ranks, and no rank waits for one that has stopped. `sample_answers` encodes this rank's prompts
    # again: other callers, such as the credit `remax`, call it without this check.
    rollout.encode_prompts(context, problems)
    trees = sample_answers(
        context,
        rank_share(context, problems),
        samples=rollout.samples,
        sampling=rollout.sampling,
        unfinished_reward=rollout.unfinished_reward,
        max_prompt_tokens=rollout.max_prompt_tokens,
    )
    return measure_trees(context, trees)


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
    """Returns the trees of `problems`, in their order, with `samples` graded answers each.

    Answers are graded while others are still sampled. If the context has an `AnswerObserver`, each answer is
    a request of its own, since the observer is to get each answer as soon as it is sampled.

    Args:
        context: The context of the phase that samples: a rollout, or an evaluation.
        problems: The problems of this rank.
        samples: Answers to each problem.
        sampling: The sampling parameters, which the problem's task may change.
        unfinished_reward: See `SampledRollout`.
        max_prompt_tokens: See `SampledRollout`.
        purpose: A word that tells the seeds of different phases apart. The seed of a problem's answers comes
            from the run's seed, the iteration, the problem and this word. So an answer does not depend on
            what else is sampled.

    Raises:
        ValueError: A prompt is empty, is longer than `max_prompt_tokens`, or leaves no room for an answer in
            the context.
    """
    assert context.engine is not None, "a rollout that samples needs an engine"
    requests = []
    for problem in problems:
        task_sampling = task_of(context.task, problem).adjust_sampling(sampling)
        prompt_ids = encode_prompt(context, problem, task_sampling.max_tokens, max_prompt_tokens)
        max_tokens = context.settings.token_budget(prompt_ids, task_sampling.max_tokens)
        requests.append(
            Request(
                prompt_ids=prompt_ids,
                seed=derive_seed(context.seed, context.iteration, problem.id, purpose),
                n=samples,
                sampling=replace(task_sampling, max_tokens=max_tokens),
                priority=context.settings.priority,
                reads_logprobs=context.settings.reads_logprobs,
            )
        )
    announcer = Announcer(context, answers=len(requests) * samples)

    async def sample_trees() -> list[Tree]:
        coroutines = (
            _sample_tree(context, problem, request, unfinished_reward, announcer)
            for problem, request in zip(problems, requests, strict=True)
        )
        return await asyncio.gather(*coroutines)

    return context.engine.run(sample_trees())


async def _sample_tree(
    context: RolloutContext,
    problem: Problem,
    request: Request,
    unfinished_reward: float | None,
    announcer: Announcer,
) -> Tree:
    """Samples and grades the answers that a problem's request asks for, and returns their tree."""
    # The requests that are sent to the engine, by the number of their first sample: a single request for all
    # samples, or a request for each sample.
    requests = {0: request}
    if context.answer_observer is not None:
        # An observer must get each answer as soon as it is sampled, but a request is answered when all of its
        # samples are there. So each sample becomes a separate request. The engine gives sample i of a request
        # the seed ``seed + i``. The separate requests get these seeds, so the answers are the same.
        requests = {sample: replace(request, seed=request.seed + sample, n=1) for sample in range(request.n)}

    async def sample_and_grade(first_sample: int, sent_request: Request) -> list[Trajectory]:
        assert context.engine is not None, "a rollout that samples needs an engine"
        completions = await context.engine.sample(sent_request)
        graded_answers = (
            _grade_answer(context, problem, sent_request, sample, completion, unfinished_reward, announcer)
            for sample, completion in enumerate(completions, first_sample)
        )
        return await asyncio.gather(*graded_answers)

    answers_by_request = await asyncio.gather(
        *(sample_and_grade(first_sample, sent_request) for first_sample, sent_request in requests.items())
    )
    # `gather` keeps the order of the samples, whatever the order in which they are graded.
    tree = Tree(problem, request.prompt_ids)
    for answers in answers_by_request:
        for answer in answers:
            tree.add_answer(answer)
    return tree


async def _grade_answer(
    context: RolloutContext,
    problem: Problem,
    request: Request,
    sample: int,
    completion: Completion,
    unfinished_reward: float | None,
    announcer: Announcer,
) -> Trajectory:
    """Returns the completion as a graded answer."""
    text = context.codec.decode(completion.token_ids)
    stop = request.sampling.stop
    # If the answer gets `unfinished_reward` anyway, it is `decided`: no judge is asked about it.
    decided = is_decided(completion.finish_reason, unfinished_reward)
    grade = await result_of(context.grader.submit(cut_at_stop(text, stop), problem, decided=decided))
    answer = Trajectory(
        problem=problem,
        sample=sample,
        prompt_ids=request.prompt_ids,
        segments=(completion.segment(),),
        finish_reason=completion.finish_reason,
        text=text,
        grade=apply_unfinished_reward(grade, completion.finish_reason, unfinished_reward),
        step_ends=split_steps(context, problem, completion.token_ids, text, stop),
    )
    await announcer.announce(answer)
    return answer


def adapt_to_fixed_problems(rollout: Rollout) -> Rollout:
    """Returns a rollout that makes `samples` answers to each problem of a fixed list, as in evaluation.

    It is a `SingleTurn` with the settings of `rollout`, unless `rollout` has a `rollout_for_fixed_problems`,
    or samples nothing. Example: ``until_mixed`` draws further problems, so the rollout inside it answers the
    list.
    """
    if rollout.rollout_for_fixed_problems is not None:
        return rollout.rollout_for_fixed_problems
    sampling = rollout.sampling
    if sampling is None:
        return rollout  # a rollout that samples nothing, such as `demonstrations`
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


@dataclass(frozen=True, kw_only=True)
class RolloutAround(Rollout):
    """The base of rollouts that contain another rollout, which makes the answers."""

    rollout: Rollout
    """The rollout that makes the answers."""

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        return self.rollout.gives

    @property
    @override
    def samples(self) -> int:  # type: ignore[override]
        return self.rollout.samples

    @property
    @override
    def unfinished_reward(self) -> float | None:  # type: ignore[override]
        return self.rollout.unfinished_reward

    @property
    @override
    def max_prompt_tokens(self) -> int | None:  # type: ignore[override]
        return self.rollout.max_prompt_tokens

    @property
    @override
    def sampling(self) -> SamplingParams | None:
        return self.rollout.sampling

    @property
    @override
    def rollout_for_fixed_problems(self) -> Rollout:
        return adapt_to_fixed_problems(self.rollout)

    @override
    def most_problems(self, problems: int) -> int:
        return self.rollout.most_problems(problems)

    @override
    def most_answers(self, problems: int) -> int:
        return self.rollout.most_answers(problems)

    @override
    def check_at_start(self, codec: TextCodec) -> None:
        self.rollout.check_at_start(codec)
