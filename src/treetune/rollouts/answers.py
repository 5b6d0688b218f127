"""What all rollouts do alike: this rank's problems, prompts that fit, what an answer says, its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le

from treetune.contracts import Experiment, Finding
from treetune.inference.base import Completion, Later, Request, SamplingParams
from treetune.models.tokenizer import step_ends
from treetune.rollouts.base import Rollout
from treetune.rollouts.context import RolloutContext
from treetune.tasks.base import Task
from treetune.vocabulary import FinishReason, Grade, Problem, TokenIds, Trajectory

T = TypeVar("T")


class Growth(NamedTuple):
    """Answers on their way: what to sample first, who takes what was sampled and says what follows, and the
    graded answers once nothing does."""

    requests: Sequence[Request | Later]
    on_result: Callable[[int, list[Completion]], Sequence[Request | Later]]
    answers: Callable[[], list[Trajectory]]


@dataclass(frozen=True, kw_only=True)
class SampledRollout(Rollout):
    """What every rollout has that samples answers: how many to each problem, how long, how they are drawn."""

    samples: Annotated[int, Gt(0)] = 8
    """Answers to each problem."""
    max_tokens: Annotated[int, Gt(0)]
    """Of an answer, with all that is put into it."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """Of sampling, and of the log-probs in training; 0 takes the likeliest token."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Samples among the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Ge(-1)] = -1
    """Samples among so many of the likeliest tokens; -1: among all."""
    unfinished_reward: float | None = 0.0
    """What an answer earns that the budget cut off; None grades it like any other."""
    max_prompt_tokens: Annotated[int, Gt(0)] | None = None
    """Training leaves problems with longer prompts out, and what a prompt leaves of the context bounds its
    answers; None: every prompt must leave room for `max_tokens`."""

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.samples)
        if "" in self.sampling.stop:
            raise ValueError("stop has an empty string, which would end at once all that is sampled")

    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from check_lengths(self, experiment.context_length)
        yield from check_prompts(self, experiment)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=getattr(self, "stop", ()),
        )


def rank_share(context: RolloutContext, problems: Sequence[Problem]) -> Sequence[Problem]:
    """This rank's contiguous part of `problems`; sizes differ by at most one, and may be zero.

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
    """The part of `items` that is a rank's: all ranks' parts, one after the other, are the whole."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


def encoded_prompt(
    context: RolloutContext,
    problem: Problem,
    response_tokens: int,
    max_prompt_tokens: int | None = None,
) -> TokenIds:
    """The prompt's ids; ValueError naming the problem if they don't leave room for the response.

    That is all of `response_tokens`, or where `max_prompt_tokens` says how long prompts may be, what such
    a prompt leaves of the context (`AnswerSettings.token_budget`).
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
    """What is wrong where answers and prompts are longer than the context holds."""
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


EXAMPLES = 4
"""Problems whose prompts are looked at before anything starts."""


def check_prompts(rollout: Rollout, experiment: Experiment) -> Iterator[Finding]:
    """What is wrong where the first problems, as far as they are known at once, don't fit the context."""
    for task in experiment.task.parts():
        yield from _check_prompts_of(task, rollout, experiment)


def _check_prompts_of(task: Task, rollout: Rollout, experiment: Experiment) -> Iterator[Finding]:
    lengths = experiment.model.prompt_tokens([one.prompt for one in task.examples(EXAMPLES)])
    most, context = rollout.max_prompt_tokens, experiment.context_length
    if not lengths or rollout.sampling is None:
        return
    sampling = task.sampling(rollout.sampling)
    if sampling.max_tokens >= context:
        return
    if most is not None and min(lengths) > most:
        yield Finding(
            f"prompts of this task have {min(lengths)} tokens and more, and max_prompt_tokens is {most}: no"
            " problem would be left to train on",
            "max_prompt_tokens",
            f"raise it to {max(lengths)} or more",
        )
    elif most is None and max(lengths) + sampling.max_tokens > context:
        yield Finding(
            f"a prompt of {max(lengths)} tokens, as this task has, leaves {context - max(lengths)} of the"
            f" context_length of {context} for an answer of up to {sampling.max_tokens}",
            "max_tokens",
            f"raise context_length to {max(lengths) + sampling.max_tokens} or more, or lower max_tokens",
        )


def is_decided(finish_reason: FinishReason, unfinished_reward: float | None) -> bool:
    """Whether an answer earns what it earns whatever its grade is: it was cut off."""
    return finish_reason == "length" and unfinished_reward is not None


def with_unfinished(grade: Grade, finish_reason: FinishReason, unfinished_reward: float | None) -> Grade:
    """The grade of an answer; a cut one keeps what the grader found in it, but not its reward. What it earns
    is known then, whether or not somebody was there to grade it."""
    if unfinished_reward is None or not is_decided(finish_reason, unfinished_reward):
        return grade
    outcome = grade.outcome if grade.is_known else "no_answer"
    return replace(grade, reward=unfinished_reward, outcome=outcome, message="cut off by max_tokens")


def before_stop(text: str, stop: Sequence[str]) -> str:
    """What graders read: `text` up to a stop string, which belongs to what would have come next."""
    return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=len(text))]


def steps_of(
    context: RolloutContext, problem: Problem, response_ids: TokenIds, text: str, stop: Sequence[str] = ()
) -> tuple[int, ...]:
    """The step boundaries of the problem's task in `text` as token offsets into the response.

    A stop string ends an answer as an end token does: both belong to the last step, or where another token
    could have begun a step are one of their own (`Task.answer_boundaries`).
    """
    words = before_stop(text, stop)
    boundaries = [*context.task.of(problem).answer_boundaries(words)[:-1], len(text)]
    return step_ends(response_ids, boundaries, context.codec, text)
