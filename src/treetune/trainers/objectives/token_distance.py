"""How far a sampled token is from being the policy's first choice, position by position.

Everything is computed from logits of shape [C, V], in their precision and in log space, and stays finite
where a probability is 0 or 1. Names: c is the sampled token, m the most likely one; p their probability.
Formulas and gradients: "Exploring Paths" (SPO), and the tests beside this file's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_one_minus(logits_CV: Tensor, tokens_C: Tensor, total_C: Tensor) -> Tensor:
    """``log(1 - p)`` of one token each, shape [C]: the others' mass over all of it (`total_C`, log-sum-exp).

    ``log1p(-p)`` would have lost it where p rounds to 1.
    """
    others_CV = logits_CV.scatter(-1, tokens_C[:, None], -math.inf)
    return others_CV.logsumexp(-1) - total_C


def two_sided_kl(target: tuple[Tensor, Tensor], policy: tuple[Tensor, Tensor]) -> Tensor:
    """``KL(T ‖ p)`` of two-sided distributions, each given as (log p, log(1-p)) of shape [C]."""
    return sum(
        (t_C.exp() * (t_C - p_C) for t_C, p_C in zip(target, policy, strict=True)),
        torch.zeros_like(target[0]),
    )


def two_sided_jsd(target: tuple[Tensor, Tensor], policy: tuple[Tensor, Tensor]) -> Tensor:
    """The Jensen–Shannon divergence of the same."""
    middle = tuple(torch.logaddexp(t_C, p_C) - math.log(2) for t_C, p_C in zip(target, policy, strict=True))
    assert len(middle) == 2
    return 0.5 * (two_sided_kl(target, middle) + two_sided_kl(policy, middle))


def rank_target(logits_CV: Tensor, labels_C: Tensor, total_C: Tensor, max_rank: int) -> tuple[Tensor, ...]:
    """The distribution in which c is the first choice and all that were before it move down by one.

    With k the rank of c among the tokens (1 the most likely), ``T(c) = p_(1)``, ``T((i)) = p_(i+1)`` for
    i < k, and the rest as it was: a cyclic shift, so T sums to 1. Beyond `max_rank`, c and m change places
    instead. Returns log T and log p at the affected tokens, both [C, K], and which of them are real, [C, K]
    (none where k is 1). Work is O(K) beside one top-k, with K ≤ `max_rank` the largest rank in the chunk.
    """
    label_logits_C1 = logits_CV.gather(-1, labels_C[:, None])
    ranks_C = 1 + (logits_CV > label_logits_C1).sum(-1)
    limit = min(max_rank, logits_CV.shape[-1])
    within_C = ranks_C <= limit
    width = max(2, int(ranks_C.where(within_C, 2).max())) if len(ranks_C) else 2
    top_CK = logits_CV.topk(min(width, logits_CV.shape[-1]), dim=-1).values
    places_K = torch.arange(top_CK.shape[-1], device=logits_CV.device)
    # Too deep: c stands right behind m, and the shift of two is their exchange.
    last_C1 = ranks_C.where(within_C, 2)[:, None] - 1
    # c itself, and not one that is exactly as likely: the gradient has to reach it.
    logp_CK = torch.where(places_K == last_C1, label_logits_C1, top_CK) - total_C[:, None]
    shifted_CK = torch.cat([logp_CK[:, 1:], logp_CK[:, :1]], dim=-1)
    log_target_CK = torch.where(places_K == last_C1, logp_CK[:, :1], shifted_CK)
    real_CK = (places_K <= last_C1) & (ranks_C > 1)[:, None]
    return log_target_CK, logp_CK, real_CK


def kl_over(log_target_CK: Tensor, logp_CK: Tensor, real_CK: Tensor) -> Tensor:
    """``KL(T ‖ p)`` from the affected tokens alone: ``Σ T log(T/p) - T + p``.

    The last two add up to 0, and bring in the gradient of the rest, where T is a constant that p equals.
    """
    target_CK, p_CK = log_target_CK.exp(), logp_CK.exp()
    cost_CK = target_CK * (log_target_CK - logp_CK) - target_CK + p_CK
    return cost_CK.where(real_CK, 0.0).sum(-1)


def jsd_over(log_target_CK: Tensor, logp_CK: Tensor, real_CK: Tensor) -> Tensor:
    """``½ Σ T log(T/M) + ½ Σ p log(p/M)``, M = (T+p)/2: at most log 2."""
    middle_CK = torch.logaddexp(log_target_CK, logp_CK) - math.log(2)
    return 0.5 * (kl_over(log_target_CK, middle_CK, real_CK) + kl_over(logp_CK, middle_CK, real_CK))
