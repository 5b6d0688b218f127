"""What all rollouts do alike: this rank's problems, prompts that fit, steps in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from treetune.episode_generators.base import GenerationContext
from treetune.models.tokenizer import step_ends
from treetune.vocabulary import Problem, TokenIds


def rank_share(context: GenerationContext, problems: Sequence[Problem]) -> Sequence[Problem]:
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
    start = len(problems) * context.rank // context.world_size
    end = len(problems) * (context.rank + 1) // context.world_size
    return problems[start:end]


def encoded_prompt(
    context: GenerationContext,
    problem: Problem,
    response_tokens: int,
    max_prompt_tokens: int | None = None,
) -> TokenIds:
    """The prompt's ids; ValueError naming the problem if they don't leave room for the response."""
    prompt_ids = context.codec.encode(problem.prompt)
    if not prompt_ids:
        raise ValueError(f"problem {problem.id!r} has an empty prompt")
    if max_prompt_tokens is not None and len(prompt_ids) > max_prompt_tokens:
        raise ValueError(
            f"problem {problem.id!r} has a prompt of {len(prompt_ids)} tokens; "
            f"max_prompt_tokens allows {max_prompt_tokens}"
        )
    if len(prompt_ids) + response_tokens > context.context_length:
        raise ValueError(
            f"problem {problem.id!r} has a prompt of {len(prompt_ids)} tokens, which leaves "
            f"{context.context_length - len(prompt_ids)} of the context of {context.context_length} "
            f"for a response of up to {response_tokens}"
        )
    return prompt_ids


def steps_of(context: GenerationContext, response_ids: TokenIds, text: str) -> tuple[int, ...]:
    """The task's step boundaries in `text` as token offsets into the response."""
    return step_ends(response_ids, context.task.step_boundaries(text), context.codec)
