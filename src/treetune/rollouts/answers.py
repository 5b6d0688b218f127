"""Shared code of rollouts that sample answers: settings, prompts that fit, graded text and step boundaries.

* `SampledRollout` has the settings of every rollout that samples: `samples`, `max_tokens`, `temperature`, …
* `GrowingRollout` is the base of rollouts whose answers take several requests (turns, threads). A sub-class
  only writes `answers`, a program that awaits the engine; the base class's `run` calls it.
* The functions below these classes prepare prompts and finish answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Experiment, Finding
from treetune.engine.requests import Completion, Request, SamplingParams
from treetune.models.tokenizer import step_ends
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.rollouts.metrics import trajectory_metrics
from treetune.rollouts.numbers import add_measured_numbers
from treetune.seeds import derive_seed
from treetune.tasks.mixed import parts_of, task_of
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import FinishReason, Grade, Metrics, Problem, Segment, TokenIds, Trajectory

T = TypeVar("T")

UNGRADED = Grade(reward=0.0, outcome="no_answer")
"""The grade of an answer that has not been graded yet."""

MOST_EXAMPLE_PROBLEMS = 4
"""The number of example problems of a task that `check` looks at."""


@dataclass(frozen=True, kw_only=True)
class SampledRollout(Rollout):
    """The settings of every rollout that samples answers."""

    samples: Annotated[int, Gt(0)] = 8
    """The number of answers to each problem."""
    max_tokens: Annotated[int, Gt(0)]
    """The largest number of tokens of an answer, injected ones included."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """The temperature of sampling, and of the log-probs in training. 0 takes the most likely token."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Samples from the most likely tokens that together have this probability."""
    top_k: Annotated[int, Ge(-1)] = -1
    """The number of most likely tokens to sample from; -1: all tokens."""
    unfinished_reward: float | None = 0.0
    """The reward of an answer that the budget cut off. null: such an answer is graded like any other."""
    max_prompt_tokens: Annotated[int, Gt(0)] | None = None
    """Training leaves out problems with longer prompts. An answer may then have `max_tokens`, or the rest of
    the context after its prompt if that is less. null: no problem is left out, and every prompt must leave
    room for `max_tokens`."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.samples)
        if "" in self.sampling.stop:
            raise ValueError("stop has an empty string, which would end every answer at once")

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        context_length, longest_prompt = experiment.context_length, self.max_prompt_tokens
        yield from check_lengths(self, context_length)
        for task in parts_of(experiment.task):
            lengths = experiment.model.prompt_tokens(
                [problem.prompt for problem in task.examples(MOST_EXAMPLE_PROBLEMS)]
            )
            max_tokens = task.adjust_sampling(self.sampling).max_tokens
            # `lengths` is None if the tokenizer must be loaded to count tokens. If `max_tokens` is too large,
            # `check_lengths` has reported that already.
            if not lengths or max_tokens >= _too_many_tokens(self, context_length):
                continue
            if longest_prompt is not None and min(lengths) > longest_prompt:
                yield Finding(
                    f"prompts of this task have {min(lengths)} tokens and more, and max_prompt_tokens is"
                    f" {longest_prompt}: no problem would be left to train on",
                    "max_prompt_tokens",
                    f"raise it to {max(lengths)} or more",
                )
            elif longest_prompt is None and max(lengths) + max_tokens > context_length:
                yield Finding(
                    f"a prompt of {max(lengths)} tokens, as this task has, leaves"
                    f" {context_length - max(lengths)} of the context_length of {context_length} for an"
                    f" answer of up to {max_tokens}",
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
            stop=getattr(self, "stop", ()),  # only some of these rollouts have the setting
        )

    def encode_prompts(self, context: RolloutContext, problems: Sequence[Problem]) -> dict[str, TokenIds]:
        """Returns the token ids of the prompts of all problems of the iteration, by the problem's id.

        Every rank encodes all prompts. So if one prompt does not fit, all ranks stop, and no rank waits for
        one that has stopped.

        Raises:
            ValueError: A prompt leaves no room for an answer in the context.
        """
        prompts = {}
        for problem in problems:
            max_tokens = task_of(context.task, problem).adjust_sampling(self.sampling).max_tokens
            prompts[problem.id] = encode_prompt(context, problem, max_tokens, self.max_prompt_tokens)
        return prompts


class Start(NamedTuple):
    """An answer to be sampled: its problem, its seed, and the segments that it begins with.

    Example: a new answer to ``2+2=?``, and one that continues the first tokens of another answer::

        Start(problem, prompt_ids=array([17, 10, 17, 28]), seed=5122)
        Start(problem, prompt_ids=array([17, 10, 17, 28]), seed=733, segments=(Segment(array([8, 9])),))
    """

    problem: Problem
    prompt_ids: TokenIds
    seed: int
    segments: tuple[Segment, ...] = ()


class Announcer:
    """Announces each graded answer: counts it in the run's log, and calls the context's `answer_observer`."""

    def __init__(self, context: RolloutContext, answers: int) -> None:
        self._log, self._observer = context.log, context.answer_observer
        self._announced, self._answers = 0, answers

    async def announce(self, answer: Trajectory) -> None:
        """Returns when the observer is done with the answer. Other answers continue meanwhile."""
        self._announced += 1
        self._log.progress(self._announced, self._answers)
        if self._observer is not None:
            await self._observer.observe(answer)


class CountedSamples:
    """Sends requests to the engine. Shows in the run's log how many samples were requested, and how many have
    arrived."""

    def __init__(self, context: RolloutContext, earlier_samples: int = 0) -> None:
        """Begins to count. `earlier_samples` have arrived already, and count as requested and done."""
        assert context.engine is not None, "sampling needs an engine"
        self._engine, self._log = context.engine, context.log
        self._requested = self._done = earlier_samples

    async def sample(self, request: Request) -> list[Completion]:
        """Samples what a request asks for, and returns it.

        The log then shows how many samples have arrived, of all that were requested so far.
        """
        self._requested += request.n
        completions = await self._engine.sample(request)
        self._done += request.n
        self._log.progress(self._done, self._requested)
        return completions


@dataclass(frozen=True, kw_only=True)
class GrowingRollout(SampledRollout):
    """A rollout whose answers take several requests each, and can be continued from their middle."""

    seed_name: ClassVar[str]
    """A part of the answers' seeds, so that two rollouts sample with different seeds."""

    @property
    @override
    def rollout_for_fixed_problems(self) -> Rollout | None:
        return self

    async def answers(self, context: RolloutContext, starts: Sequence[Start]) -> list[Trajectory]:
        """Samples and grades one answer from each start, and returns the answers in the order of `starts`.
        `Trajectory.sample` is 0 in all of them.

        Call it with `Engine.run`, or await it in a coroutine that `Engine.run` runs. The seed of a request
        derives from the seed of its start and the request's position in the answer. So an answer depends
        neither on what else is sampled nor on the order in which samples arrive.
        """
        raise NotImplementedError

    @override
    def run(self, context: RolloutContext, problems: Sequence[Problem]) -> tuple[list[Tree], Metrics]:
        assert context.engine is not None, "a rollout that samples needs an engine"
        prompts = self.encode_prompts(context, problems)
        starts = []
        for problem in rank_share(context, problems):
            for sample in range(self.samples):
                seed = derive_seed(context.seed, context.iteration, problem.id, self.seed_name, sample)
                starts.append(Start(problem, prompts[problem.id], seed))
        answers = context.engine.run(self.answers(context, starts))
        # `self.answers` gives each answer the number 0. Here the answers to each problem are numbered: they
        # are `samples` neighbours in the list.
        numbered = [replace(answer, sample=index % self.samples) for index, answer in enumerate(answers)]
        return measure_trees(context, trees_of(numbered))


def require_growing_rollout(context: RolloutContext) -> GrowingRollout:
    """Returns the context's rollout, for a part that continues answers with it.

    Raises LookupError if the context has no rollout, or one that can't continue answers from their middle.
    """
    if not isinstance(context.rollout, GrowingRollout):
        raise LookupError("this phase of the run has no rollout that continues answers from their middle")
    return context.rollout


def measure_trees(context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Tree], Metrics]:
    """Returns the trees with the named numbers of their answers, and the metrics of all ranks. Collective."""
    trees = add_measured_numbers(trees, context.codec)
    return trees, trajectory_metrics(context, answers_of(trees))


def rank_share(context: RolloutContext, problems: Sequence[Problem]) -> Sequence[Problem]:
    """Returns this rank's contiguous part of `problems`. The ranks' parts differ in size by at most one, and
    may be empty.

    Raises:
        ValueError: There are no problems, or a problem is listed twice. Seeds derive from a problem's id, so
            the problem would get the same answers twice.
    """
    if not problems:
        raise ValueError("there are no problems to roll out from")
    counts = Counter(problem.id for problem in problems)
    repeated_ids = [problem_id for problem_id, count in counts.items() if count > 1]
    if repeated_ids:
        raise ValueError(
            f"{len(repeated_ids)} problems are listed twice in iteration {context.iteration},"
            f" {repeated_ids[0]!r} the first: take fewer problems per iteration, or more samples of each"
        )
    return contiguous_share(problems, context.ranks.rank, context.ranks.world_size)


def contiguous_share(items: Sequence[T], rank: int, world_size: int) -> Sequence[T]:
    """Returns a rank's contiguous part of `items`. The parts of all ranks in rank order make up `items`.

    Example: of 5 items, ranks 0 and 1 of 2 have 2 and 3.
    """
    begin = len(items) * rank // world_size
    end = len(items) * (rank + 1) // world_size
    return items[begin:end]


def encode_prompt(
    context: RolloutContext,
    problem: Problem,
    response_tokens: int,
    max_prompt_tokens: int | None = None,
) -> TokenIds:
    """Returns the token ids of a problem's prompt, after checking its length.

    Args:
        context: The context of the phase.
        problem: The problem.
        response_tokens: The largest length of a response.
        max_prompt_tokens: The bound on prompts. Without it, the prompt must leave room for `response_tokens`.
            With it, the prompt need only leave room for one token: `AnswerSettings.token_budget` limits the
            response to the rest of the context.

    Raises:
        ValueError: The prompt is empty, longer than `max_prompt_tokens`, or leaves no room for the response.
    """
    prompt_ids = context.codec.encode_prompt(problem)
    # Counting tokens is not enough: a chat template adds some even to a problem without text.
    if not problem.prompt or not len(prompt_ids):
        raise ValueError(f"problem {problem.id!r} has an empty prompt")
    if max_prompt_tokens is not None and len(prompt_ids) > max_prompt_tokens:
        raise ValueError(
            f"problem {problem.id!r} has a prompt of {len(prompt_ids)} tokens; "
            f"max_prompt_tokens allows {max_prompt_tokens}"
        )
    least_room = response_tokens if max_prompt_tokens is None else 1
    context_length = context.settings.context_length
    if len(prompt_ids) + least_room > context_length:
        raise ValueError(
            f"problem {problem.id!r} has a prompt of {len(prompt_ids)} tokens, which leaves "
            f"{context_length - len(prompt_ids)} of the context of {context_length} "
            f"for a response of up to {response_tokens}; raise context_length, or set "
            "max_prompt_tokens to leave longer prompts out of training"
        )
    return prompt_ids


def check_sampling(temperature: float, top_k: int, samples: int) -> None:
    """Raises ValueError if `top_k` leaves no token to sample, or if several samples would all be the same."""
    if top_k == 0:
        raise ValueError("top_k is 0, which leaves no token to sample; use -1 for all tokens")
    if temperature == 0 and samples > 1:
        raise ValueError(f"temperature 0 gives the same answer {samples} times; set samples to 1 or raise it")


def check_lengths(rollout: Rollout, context_length: int) -> Iterator[Finding]:
    """Yields a finding for each limit on answers or prompts that doesn't fit into the context."""
    sampling, longest_prompt = rollout.sampling, rollout.max_prompt_tokens
    if sampling is not None and sampling.max_tokens >= _too_many_tokens(rollout, context_length):
        yield Finding(
            f"an answer may have {sampling.max_tokens} tokens, and the context_length of {context_length}"
            " leaves no room for them and a prompt",
            "max_tokens",
            "lower max_tokens, or raise context_length",
        )
    if longest_prompt is not None and longest_prompt >= context_length:
        yield Finding(
            f"a prompt of max_prompt_tokens = {longest_prompt} leaves nothing of the context_length of"
            f" {context_length} for an answer",
            "max_prompt_tokens",
            "lower max_prompt_tokens, or raise context_length",
        )


def _too_many_tokens(rollout: Rollout, context_length: int) -> int:
    """Returns the smallest `max_tokens` that doesn't fit into the context.

    Without `max_prompt_tokens`, each prompt must leave room for `max_tokens` in the context, so `max_tokens`
    must be smaller than the context. With it, a prompt need only leave room for one token, and an answer is
    cut off at the end of the context. So `max_tokens` may be as large as the context.
    """
    return context_length if rollout.max_prompt_tokens is None else context_length + 1


def is_decided(finish_reason: FinishReason, unfinished_reward: float | None) -> bool:
    """Returns whether an answer was cut off and its reward is therefore known, whatever its grade is."""
    return finish_reason == "length" and unfinished_reward is not None


CUT_OFF_MESSAGE = "cut off by max_tokens"
"""The message of the grade of an answer that the budget cut off, whatever its grader says."""


def apply_unfinished_reward(
    grade: Grade, finish_reason: FinishReason, unfinished_reward: float | None
) -> Grade:
    """Returns the grade of an answer, with the reward `unfinished_reward` if it was cut off.

    The grade of such an answer keeps what the grader extracted. Its reward is known even if the grader was
    unavailable.
    """
    # `is_decided` is also False if `unfinished_reward` is None. The check for None is repeated for the type
    # checker.
    if unfinished_reward is None or not is_decided(finish_reason, unfinished_reward):
        return grade
    outcome = grade.outcome if grade.is_known else "no_answer"
    return replace(grade, reward=unfinished_reward, outcome=outcome, message=CUT_OFF_MESSAGE)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text that graders read: the text up to the first stop string.

    Example: ``cut_at_stop("4\\n\\nProblem:", ["Problem:"])`` is ``"4\\n\\n"``.
    """
    end = len(text)
    for stop_string in stop:
        position = text.find(stop_string)
        if position >= 0:
            end = min(end, position)
    return text[:end]


def split_steps(
    context: RolloutContext, problem: Problem, response_ids: TokenIds, text: str, stop: Sequence[str] = ()
) -> tuple[int, ...]:
    """Returns the ends of an answer's steps as token offsets into the response.

    Example: ``(6, 12, 15)`` for an answer of three lines and 15 tokens.

    An answer ends with an end token or a stop string. `Task.answer_boundaries` decides whether this end is a
    step of its own, or belongs to the last step.
    """
    graded_text = cut_at_stop(text, stop)
    boundaries = task_of(context.task, problem).answer_boundaries(graded_text)
    # The last boundary is the end of the graded text. The last step reaches to the end of the whole text, so
    # that the tokens of a stop string belong to it.
    boundaries = [*boundaries[:-1], len(text)]
    return step_ends(response_ids, boundaries, context.codec, text)
