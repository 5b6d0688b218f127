"""Scores given texts for credits: the log-probs of their tokens after a state of an answer, or after another
prompt.

    credit ── texts of this rank ── each distinct text is scored once ──> log-probs of each text
                                          │
              scorer 'policy'             ├─> `Engine.score`: the engine, with the weights that sampled
              scorer 'reference'          └─> `ReferenceScores`: the trainer, with the reference's weights

Nothing is sampled, so a text costs only one forward pass. `GoldScores` scores a problem's reference answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from treetune.contracts import Experiment, Finding, Need, OneLine, TextScores, innermost_rollout
from treetune.credit.base import MOST_EXAMPLE_PROBLEMS
from treetune.rollouts.context import RolloutContext, require
from treetune.rollouts.model_scores import ScoredText
from treetune.vocabulary import Column, Metrics, Problem, TokenIds, concatenate, token_array

LEAST_LOGPROB = -100.0
"""Smaller log-probs of a token are raised to this one, so that no credit is infinite. vLLM reports −9999 for
a token of probability 0."""


def score_texts(
    context: RolloutContext, texts: Sequence[ScoredText], scorer: Literal["policy", "reference"]
) -> tuple[list[Column], Metrics]:
    """Returns the log-probs of each text's tokens, in the order of the texts, and the cost over all ranks as
    metrics. Equal texts of a rank are scored once. Collective.

    ``credit/value_tokens`` is the number of tokens that were scored, ``credit/scored_prompt_tokens`` that of
    the tokens before them. The model also runs over the latter, unless they are in the engine's prefix cache.
    """
    distinct: dict[tuple[bytes, bytes], ScoredText] = {}
    keys = []
    for text in texts:
        key = text.prompt_ids.tobytes(), text.text_ids.tobytes()
        distinct[key] = text
        keys.append(key)
    if scorer == "reference":
        reference = require(context.model_scores.reference, "reference scores")
        logprobs = reference.logprobs(list(distinct.values()))
    else:
        logprobs = _score_by_engine(context, list(distinct.values()))
    logprobs_by_key = dict(zip(distinct, logprobs, strict=True))
    cost = {
        "credit/scored_texts": len(distinct),
        "credit/value_tokens": sum(len(text.text_ids) for text in distinct.values()),
        "credit/scored_prompt_tokens": sum(len(text.prompt_ids) for text in distinct.values()),
    }
    cost_by_rank = context.ranks.exchange("scored-texts", cost)
    metrics: Metrics = dict.fromkeys(cost, 0.0)
    for cost_of_rank in cost_by_rank:
        for name, count in cost_of_rank.items():
            metrics[name] += count
    return [logprobs_by_key[key] for key in keys], metrics


def _score_by_engine(context: RolloutContext, texts: Sequence[ScoredText]) -> list[Column]:
    """Returns the log-probs of each text's tokens, which the policy's engine scores."""
    engine = context.engine
    assert engine is not None, "answers that are sampled have an engine"

    async def score_all() -> list[Column]:
        scores = (engine.score(text.prompt_ids, text.text_ids) for text in texts)
        return await asyncio.gather(*scores)

    return engine.run(score_all())


class ProblemState(NamedTuple):
    """A state of an answer after which the reference answer is scored."""

    problem: Problem
    token_ids: TokenIds
    """The prompt's tokens, and those of the answer so far."""


@dataclass(frozen=True, kw_only=True)
class GoldScores:
    """A base class of parts that score a problem's reference answer after states of answers."""

    lead_in: str = ""
    """The text between a state and the reference answer, such as ``"\\n#### "``. It isn't scored. Choose the
    text after which the policy writes its results."""
    scorer: Literal["policy", "reference"] = "policy"
    """The model that scores: the policy that sampled the answers, by the engine, or the trainer's
    ``reference`` (the start model)."""

    def gold_logprobs(
        self, context: RolloutContext, states: Sequence[ProblemState]
    ) -> tuple[list[Column | None], Metrics]:
        """Returns the log-probs of the reference answer's tokens after each state, and the cost as metrics
        (`score_texts`). For a state after which the text doesn't fit into the context, None takes the place
        of the log-probs. Collective.

        Raises:
            ValueError: A problem has no reference answer.
        """
        lead_in_ids = token_array(context.codec.encode(self.lead_in)) if self.lead_in else token_array([])
        gold_ids_by_problem: dict[str, TokenIds] = {}
        texts: list[ScoredText | None] = []
        for problem, token_ids in states:
            if problem.id not in gold_ids_by_problem:
                gold_ids_by_problem[problem.id] = _gold_ids(context, problem)
            text = ScoredText(concatenate([token_ids, lead_in_ids]), gold_ids_by_problem[problem.id])
            # The length has to be strictly less, since vLLM samples one token after the text that it scores.
            fits = len(text.prompt_ids) + len(text.text_ids) < context.settings.context_length
            texts.append(text if fits else None)
        fitting_texts = [text for text in texts if text is not None]
        scores, metrics = score_texts(context, fitting_texts, self.scorer)
        # `scores` has an entry only for each text that fits, in the order of the texts.
        upcoming = iter(scores)
        logprobs_of_states: list[Column | None] = []
        for text_of_state in texts:
            if text_of_state is None:
                logprobs_of_states.append(None)
            else:
                logprobs_of_states.append(next(upcoming).clip(min=LEAST_LOGPROB))
        return logprobs_of_states, metrics

    def gold_needs(self) -> tuple[Need, ...]:
        """Returns what the part needs for its scores."""
        # Answers in one line have no parallel threads. With `turns=True`, they may have several turns.
        one_line = Need(
            OneLine(turns=True),
            "it scores the reference answer after the tokens so far",
            "set the rollout's parallel to false, or choose the credit 'group'",
        )
        engine = Need(TextScores(), "it scores the reference answer after each state")
        return (one_line, engine) if self.scorer == "policy" else (one_line,)

    def check_gold(self, experiment: Experiment) -> Iterable[Finding]:
        """Yields a finding for a task without reference answers, and for a run without a reference model that
        can score."""
        yield from check_reference_answers(experiment)
        if self.scorer == "reference":
            yield from check_reference_model(experiment)


def check_reference_answers(experiment: Experiment) -> Iterator[Finding]:
    """Yields a finding for a task without reference answers."""
    examples = experiment.task.examples(MOST_EXAMPLE_PROBLEMS)
    if examples and not any(problem.gold for problem in examples):
        yield Finding(
            "it reads the problems' reference answers, and the first problems of the task have none",
            "type",
            "choose a task with reference answers, or the credit 'group'",
        )


def check_reference_model(
    experiment: Experiment,
    use: str = "scorer is 'reference'",
    key: str = "scorer",
    alternative: str = "set scorer to 'policy'",
) -> Iterator[Finding]:
    """Yields a finding for a run whose reference model can't work for the credit.

    Args:
        experiment: The experiment's configuration.
        use: The use of the reference model, for the message. Example: ``"signal is 'deviation'"``.
        key: The setting of the credit to change.
        alternative: A way to do without the reference model, for the remedy.
    """
    if not experiment.trainer.keeps_reference:
        yield Finding(
            f"{use}, and the trainer keeps no reference model",
            key,
            f"set trainer.measure_kl to true, or {alternative}",
        )
    elif experiment.trainer.reference_scores == "while_sampling":
        yield Finding(
            f"{use}, and with trainer.reference_scores 'while_sampling' the reference may"
            " still score answers in another thread",
            key,
            f"set trainer.reference_scores to 'before_training', or {alternative}",
        )


def check_uncut_sampling(experiment: Experiment, reason: str) -> Iterator[Finding]:
    """Yields a finding for a rollout with top-p or top-k, since its log-probs are those of cut distributions.

    Args:
        experiment: The experiment's configuration.
        reason: The reason why distributions must not be cut, for the message. Example: ``"the reward model's
            log-probs are those of whole distributions"``.
    """
    sampling = experiment.rollout.sampling
    if sampling is not None and (sampling.top_p < 1 or sampling.top_k > 0):
        _, key = innermost_rollout(experiment.rollout)
        yield Finding(
            f"{reason}, and answers are sampled with top_p {sampling.top_p:g} and top_k {sampling.top_k}",
            f"{key}.top_p",
            "set rollout's top_p to 1 and top_k to -1",
        )


def _gold_ids(context: RolloutContext, problem: Problem) -> TokenIds:
    """Returns the tokens of the problem's reference answer. Raises ValueError if it has none."""
    ids = token_array(context.codec.encode(problem.gold)) if problem.gold else token_array([])
    if not len(ids):
        raise ValueError(
            f"problem {problem.id!r} has no reference answer, which the credit scores: leave the problem out,"
            " or choose the credit 'group'"
        )
    return ids
