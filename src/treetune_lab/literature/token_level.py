"""What entries that tell tokens apart share: the policy's distributions, common beginnings, and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treetune.rollouts.context import RolloutContext
from treetune.rollouts.credit import advantage_metrics, episode_of
from treetune.rollouts.valuation import shared_tokens
from treetune.tree import trees_of
from treetune.vocabulary import Column, Episode, Metrics, Trajectory


@dataclass(frozen=True)
class Distributions:
    """The distributions that answers were sampled from: a service of contexts. An engine reports the
    probability of the sampled token alone; a run lends none of these, who knows the policy's tables may."""

    along: Callable[[Sequence[Trajectory]], list[tuple[Column, Column]]]
    """Returns for each answer of this rank Σ_v π(v)² and the entropy in nats, each with one number for each
    response token: of the distribution that it was sampled from. Collective."""


def beginnings(answers: Sequence[Trajectory]) -> list[Column]:
    """Returns for each answer to a problem a mask of shape [T + 1, N]: whether answer n begins with its first
    t tokens. In row 0 and for the answer itself it is true. Answers in one line."""
    import numpy as np

    if not answers:
        return []
    ((tree),) = trees_of(answers)
    shared = shared_tokens(tree)
    masks = []
    for own, answer in enumerate(answers):
        shared[own][own] = len(answer.response_ids)
        masks.append(np.array(shared[own]) >= np.arange(len(answer.response_ids) + 1)[:, None])
    return masks


def token_rows(
    context: RolloutContext, answers: Sequence[Trajectory], advantages: Sequence[Column]
) -> tuple[list[Episode], Metrics]:
    """Returns episodes with an advantage for each response token, and metrics. Collective."""
    episodes = [
        replace(episode_of(context, answer), advantages=of_answer)
        for answer, of_answer in zip(answers, advantages, strict=True)
    ]
    return episodes, advantage_metrics(context, episodes)
