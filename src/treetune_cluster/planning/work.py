"""How much an iteration samples and trains on, as far as a configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHARE_OF_THE_LIMIT = 0.5
"""Assumed mean length of an answer as a share of `max_tokens`, where nobody says better."""
TOKENS_OF_A_PROMPT = 256
"""Assumed mean, where the limits leave room for it."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of one iteration, over all ranks. `longest` bounds a row in tokens, `longest_answer` what of it is
    trained; other lengths are means."""

    problems: int
    is_known: bool
    """Whether the number of problems is; else all counts are for one."""
    answers: int
    answer_tokens: float
    prompt_tokens: float
    longest: int
    longest_answer: int
    continuations: int
    most_continuations: int
    rows: int
    steps: int
    epochs: int
    is_sampled: bool

    @property
    def sampled_tokens(self) -> float:
        """Of the answers."""
        return self.answers * self.answer_tokens if self.is_sampled else 0.0

    @property
    def continued_tokens(self) -> float:
        """Of continuations, which begin on average in the middle of an answer."""
        return self.continuations * self.answer_tokens / 2

    @property
    def row_tokens(self) -> float:
        return min(self.prompt_tokens + self.answer_tokens, float(self.longest))


def work_of(experiment: Any, answer_tokens: float | None = None) -> Work:
    """Of an experiment's iteration; `answer_tokens` is the mean length of an answer, if somebody knows it."""
    problems = experiment.problems_per_iteration or experiment.task.size("train")
    is_known, problems = problems is not None, problems or 1
    rollout, context = experiment.rollout, experiment.context_length
    sampling = rollout.sampling
    limit = min(sampling.max_tokens, context) if sampling is not None else context
    prompt_limit = rollout.max_prompt_tokens or context
    longest = min(context, prompt_limit + limit)
    length = min(answer_tokens or SHARE_OF_THE_LIMIT * limit, limit)
    answers = rollout.most_answers(problems)
    rows = experiment.selection.most_kept(answers, problems)
    size = experiment.trainer.minibatch_size or max(rows, 1)
    usual, most = experiment.credit.continuations(answers, length, limit)
    return Work(
        problems=problems,
        is_known=is_known,
        answers=answers,
        answer_tokens=length,
        prompt_tokens=max(1.0, min(TOKENS_OF_A_PROMPT, longest - length)),
        longest=longest,
        longest_answer=limit,
        continuations=usual,
        most_continuations=most,
        rows=rows,
        steps=experiment.trainer.epochs * max(1, -(-rows // size)),
        epochs=experiment.trainer.epochs,
        is_sampled=rollout.needs_engine,
    )
