"""Advantages from what the trainer's models say: KL in the reward, critic values, normalisation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from treetune.rollouts.credit.gae import gae
from treetune.vocabulary import Episode


def check_unthreaded(episodes: Iterable[Episode]) -> None:
    """Raises ValueError for answers with threads, along which there is no one state after another."""
    for episode in episodes:
        if episode.stretches:
            raise ValueError(
                f"episode {episode.trajectory} has threads, and what a critic learns goes back along an"
                " answer token by token, which threads don't follow in one order: choose a credit such as"
                " 'group'"
            )


def token_rewards(
    starts: Sequence[int],
    rewards: Sequence[float],
    penalties_N: Tensor | None,
    on_the_way: Sequence[Sequence[tuple[int, float]]] = (),
) -> Tensor:
    """Each trained token's reward, shape [N], less the penalty: the sequence's at its last one, but for what
    is earned `on_the_way`, by the number of the token within its sequence."""
    rewards_N = torch.zeros(starts[-1])
    rewards_N[torch.tensor(starts[1:]) - 1] = torch.tensor(rewards, dtype=torch.float32)
    for start, end, earned in zip(starts, starts[1:], on_the_way):
        for token, reward in earned:
            rewards_N[start + token] += reward
            rewards_N[end - 1] -= reward
    return rewards_N if penalties_N is None else rewards_N - penalties_N


def critic_advantages(
    starts: Sequence[int], rewards_N: Tensor, values_N: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns over each sequence's trained tokens."""
    pairs = [gae(rewards_N[a:b].tolist(), values_N[a:b].tolist(), gamma, lam) for a, b in pairwise(starts)]
    return torch.cat([torch.tensor(a) for a, _ in pairs]), torch.cat([torch.tensor(r) for _, r in pairs])


def rewards_to_come(starts: Sequence[int], rewards_N: Tensor) -> Tensor:
    """What each sequence earns from each of its trained tokens on."""
    return torch.cat([rewards_N[a:b].flip(0).cumsum(0).flip(0) for a, b in pairwise(starts)])


def less_future_penalty(starts: Sequence[int], advantages_N: Tensor, penalties_N: Tensor) -> Tensor:
    """Advantages that were given before training, less the penalties still to come from each token.

    With the penalty in the reward, the policy gradient weighs a token by everything that follows
    it, its own penalty included; what came before it can't be its doing.
    """
    return advantages_N - rewards_to_come(starts, penalties_N)


def normalised_by_domain(
    advantages_N: Tensor, how: str, starts: Sequence[int], domains: Sequence[str]
) -> Tensor:
    """`normalised` over the tokens of each domain's sequences."""
    result_N = advantages_N.clone()
    for domain in dict.fromkeys(domains):
        spans = [ab for ab, own in zip(pairwise(starts), domains, strict=True) if own == domain]
        index = torch.cat([torch.arange(a, b) for a, b in spans])
        result_N[index] = normalised(advantages_N[index], how)
    return result_N


def normalised(advantages_N: Tensor, how: str) -> Tensor:
    """``whiten``: ``(A - mean) / sqrt(var + 1e-8)``; ``scale``: without the mean. Over all N tokens."""
    if how == "none" or len(advantages_N) < 2:
        return advantages_N
    wide = advantages_N.double()
    deviation = (wide.var() + 1e-8).sqrt()
    centred = wide - wide.mean() if how == "whiten" else wide
    return (centred / deviation).float()
