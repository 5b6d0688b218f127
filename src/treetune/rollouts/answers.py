"""Rollouts that sample answers: their settings, prompts that fit, the text that is graded, their skeleton."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Experiment, Finding
from treetune.engine.base import Completion, Request, SamplingParams
from treetune.models.tokenizer import step_ends
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import AnswerObserver, RolloutContext
from treetune.rollouts.metrics import trajectory_metrics
from treetune.rollouts.numbers import measured
from treetune.seeds import derive_seed
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import FinishReason, Grade, Metrics, Problem, Segment, TokenIds, Trajectory

T = TypeVar("T")

UNGRADED = Grade(reward=0.0, outcome="no_answer")
"""The grade of an answer until it has been graded."""

EXAMPLES = 4
"""Problems whose prompts are looked at before anything starts."""


@dataclass(frozen=True, kw_only=True)
class SampledRollout(Rollout):
    """The settings of every rollout that samples answers."""

    samples: Annotated[int, Gt(0)] = 8
    """Answers to each problem."""
    max_tokens: Annotated[int, Gt(0)]
    """Tokens of an answer, with all that is put into it."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """Temperature of sampling, and of the log-probs in training; 0 takes the likeliest token."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Samples among the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Ge(-1)] = -1
    """Samples among so many of the likeliest tokens; -1: among all."""
    unfinished_reward: float | None = 0.0
    """Reward of an answer that the budget cut off; None grades it like any other."""
    max_prompt_tokens: Annotated[int, Gt(0)] | None = None
    """Training leaves problems with longer prompts out, and what a prompt leaves of the context bounds its
    answers; None: every prompt must leave room for `max_tokens`."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.samples)
        if "" in self.sampling.stop:
            raise ValueError("stop has an empty string, which would end at once all that is sampled")

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        context, longest = experiment.context_length, self.max_prompt_tokens
        yield from check_lengths(self, context)
        for task in experiment.task.parts():
            lengths = experiment.model.prompt_tokens([problem.prompt for problem in task.examples(EXAMPLES)])
            max_tokens = task.sampling(self.sampling).max_tokens
            if not lengths or max_tokens >= context:
                continue
            if longest is not None and min(lengths) > longest:
                yield Finding(
                    f"prompts of this task have {min(lengths)} tokens and more, and max_prompt_tokens is"
                    f" {longest}: no problem would be left to train on",
                    "max_prompt_tokens",
                    f"raise it to {max(lengths)} or more",
                )
            elif longest is None and max(lengths) + max_tokens > context:
                yield Finding(
                    f"a prompt of {max(lengths)} tokens, as this task has, leaves {context - max(lengths)} of"
                    f" the context_length of {context} for an answer of up to {max_tokens}",
                    "max_tokens",
                    f"raise context_length to {max(lengths) + max_tokens} or more, or lower max_tokens",
                )

    @property
    @override
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=getattr(self, "stop", ()),
        )

    def encoded_prompts(self, context: RolloutContext, problems: Sequence[Problem]) -> dict[str, TokenIds]:
        """Returns the prompts of all problems of the iteration by the problem's id. Every rank encodes all of
        them, so that if one does not fit, no rank is left waiting for another.

        Raises ValueError for one that leaves no room for an answer in the context.
        """
        prompts = {}
        for problem in problems:
            max_tokens = context.task.of(problem).sampling(self.sampling).max_tokens
            prompts[problem.id] = encoded_prompt(context, problem, max_tokens, self.max_prompt_tokens)
        return prompts


class Start(NamedTuple):
    """An answer to be sampled: its problem, its seed, and the segments of it that are there already.

    Example: a new answer to ``2+2=?``, and one that goes on behind the first tokens of another answer::

        Start(problem, prompt_ids=array([17, 10, 17, 28]), seed=5122)
        Start(problem, prompt_ids=array([17, 10, 17, 28]), seed=733, segments=(Segment(array([8, 9])),))
    """

    problem: Problem
    prompt_ids: TokenIds
    seed: int
    segments: tuple[Segment, ...] = ()


class Announcer:
    """Announces each graded answer: it counts them in the run's log, and calls who observes answers."""

    def __init__(self, context: RolloutContext, answers: int) -> None:
        self._log, self._observer = context.log, context.find(AnswerObserver)
        self._announced, self._answers = 0, answers

    async def announce(self, answer: Trajectory) -> None:
        """Returns once the observer is done with the answer. Other answers go on meanwhile."""
        self._announced += 1
        self._log.progress(self._announced, self._answers)
        if self._observer is not None:
            await self._observer.observe(answer)


class CountedSamples:
    """Samples, and counts in the run's log the samples that were asked for and those that came."""

    def __init__(self, context: RolloutContext, already: int = 0) -> None:
        assert context.engine is not None, "whoever samples needs an engine"
        self._engine, self._log = context.engine, context.log
        self._asked = self._came = already

    async def sample(self, request: Request) -> list[Completion]:
        self._asked += request.n
        completions = await self._engine.sample(request)
        self._came += request.n
        self._log.progress(self._came, self._asked)
        return completions


@dataclass(frozen=True, kw_only=True)
class GrowingRollout(SampledRollout):
    """A rollout whose answers take several requests each, and can be continued from their middle."""

    seed_name: ClassVar[str]
    """Sets the seeds of its answers apart from those of other rollouts."""

    @property
    @override
    def sampler(self) -> Rollout | None:
        return self

    async def answers(self, context: RolloutContext, starts: Sequence[Start]) -> list[Trajectory]:
        """Samples and grades one answer from each start, and returns them in that order; `sample` is 0 in all
        of them. `Engine.run` runs this, or a program that awaits it.

        The seed of a request derives from its start's and from its place in the answer, so that an answer
        does not depend on what else is sampled, nor on the order in which anything comes in.
        """
        raise NotImplementedError

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        assert context.engine is not None, "a rollout that samples needs an engine"
        prompts = self.encoded_prompts(context, problems)
        starts = [
            Start(
                problem,
                prompts[problem.id],
                derive_seed(context.seed, context.iteration, problem.id, self.seed_name, sample),
            )
            for problem in rank_share(context, problems)
            for sample in range(self.samples)
        ]
        answers = context.engine.run(self.answers(context, starts))
        numbered = (replace(answer, sample=index % self.samples) for index, answer in enumerate(answers))
        return measured_trees(context, trees_of(numbered))


def measured_trees(context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Tree], Metrics]:
    """Returns the trees with the named numbers of their answers, and the metrics of all ranks. Collective."""
    trees = measured(trees, context.codec)
    return trees, trajectory_metrics(context, answers_of(trees))


def rank_share(context: RolloutContext, problems: Sequence[Problem]) -> Sequence[Problem]:
    """Returns this rank's contiguous part of `problems`; sizes differ by at most one, and may be zero.

    Raises ValueError for no problems at all, and for a problem that is listed twice: seeds derive
    from its id, so both would get the same answers.
    """
    if not problems:
        raise ValueError("there are no problems to roll out from")
    twice = [problem for problem, count in Counter(p.id for p in problems).items() if count > 1]
    if twice:
        raise ValueError(
            f"{len(twice)} problems are listed twice in iteration {context.iteration}, {twice[0]!r} "
            "the first: take fewer problems per iteration, or more samples of each"
        )
    return contiguous_share(problems, context.ranks.rank, context.ranks.world_size)


def contiguous_share(items: Sequence[T], rank: int, world_size: int) -> Sequence[T]:
    """Returns a rank's part of `items`: all ranks' parts, one after the other, are the whole."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


def encoded_prompt(
    context: RolloutContext,
    problem: Problem,
    response_tokens: int,
    max_prompt_tokens: int | None = None,
) -> TokenIds:
    """Returns the prompt's ids. Raises ValueError naming the problem if they leave no room for the response.

    That is room for all of `response_tokens`, or where `max_prompt_tokens` bounds prompts, what such a prompt
    leaves of the context (`AnswerSettings.token_budget`).
    """
    prompt_ids = context.codec.encode_prompt(problem)
    if not problem.prompt or not len(prompt_ids):
        raise ValueError(f"problem {problem.id!r} has an empty prompt")
    if max_prompt_tokens is not None and len(prompt_ids) > max_prompt_tokens:
        raise ValueError(
            f"problem {problem.id!r} has a prompt of {len(prompt_ids)} tokens; "
            f"max_prompt_tokens allows {max_prompt_tokens}"
        )
    needed = response_tokens if max_prompt_tokens is None else 1
    context_length = context.settings.context_length
    if len(prompt_ids) + needed > context_length:
        raise ValueError(
            f"problem {problem.id!r} has a prompt of {len(prompt_ids)} tokens, which leaves "
            f"{context_length - len(prompt_ids)} of the context of {context_length} "
            f"for a response of up to {response_tokens}; make context_length longer, or say with "
            "max_prompt_tokens which prompts to leave out of training"
        )
    return prompt_ids


def check_sampling(temperature: float, top_k: int, samples: int) -> None:
    """Raises ValueError for sampling parameters that leave no token, or no second answer."""
    if top_k == 0:
        raise ValueError("top_k is 0, which leaves no token to sample; use -1 for all tokens")
    if temperature == 0 and samples > 1:
        raise ValueError(f"temperature 0 gives the same answer {samples} times; set samples to 1 or raise it")


def check_lengths(rollout: Rollout, context_length: int) -> Iterator[Finding]:
    """Returns findings on answers and prompts that are longer than the context holds."""
    sampling, longest = rollout.sampling, rollout.max_prompt_tokens
    # Where long prompts are left out, an answer may have what a prompt leaves, be max_tokens more or not.
    most = context_length if longest is None else context_length + 1
    if sampling is not None and sampling.max_tokens >= most:
        yield Finding(
            f"an answer may have {sampling.max_tokens} tokens, and the context_length of {context_length}"
            " leaves no room for them beside a prompt",
            "max_tokens",
            "lower max_tokens, or raise context_length",
        )
    if longest is not None and longest >= context_length:
        yield Finding(
            f"a prompt of max_prompt_tokens = {longest} leaves nothing of the context_length of"
            f" {context_length} for an answer",
            "max_prompt_tokens",
            "lower the one or raise the other",
        )


def is_decided(finish_reason: FinishReason, unfinished_reward: float | None) -> bool:
    """Returns whether an answer's reward is known whatever its grade is, since it was cut off."""
    return finish_reason == "length" and unfinished_reward is not None


CUT_OFF = "cut off by max_tokens"
"""The message of the grade of an answer that the budget cut off, whatever its grader says."""


def with_unfinished(grade: Grade, finish_reason: FinishReason, unfinished_reward: float | None) -> Grade:
    """Returns the grade of an answer. One that was cut off keeps what the grader extracted, but not its
    reward, which is known then even if nobody was there to grade it."""
    if unfinished_reward is None or not is_decided(finish_reason, unfinished_reward):
        return grade
    outcome = grade.outcome if grade.is_known else "no_answer"
    return replace(grade, reward=unfinished_reward, outcome=outcome, message=CUT_OFF)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text that graders read: up to a stop string, which belongs to what would have come next."""
    end = len(text)
    for stop_string in stop:
        position = text.find(stop_string)
        if position >= 0:
            end = min(end, position)
    return text[:end]


def steps_of(
    context: RolloutContext, problem: Problem, response_ids: TokenIds, text: str, stop: Sequence[str] = ()
) -> tuple[int, ...]:
    """Returns the step boundaries of the problem's task in `text` as token offsets into the response.

    A stop string ends an answer as an end token does: both belong to the last step, or where another token
    could have begun a step are one of their own (`Task.answer_boundaries`).
    """
    graded_text = before_stop(text, stop)
    boundaries = [*context.task.of(problem).answer_boundaries(graded_text)[:-1], len(text)]
    return step_ends(response_ids, boundaries, context.codec, text)
