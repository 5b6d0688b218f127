"""Learning from correct paths (SPO, "Exploring Paths"): makes every sampled token of a correct answer more
like the policy's first choice.

At a position, c is the sampled token, m the most likely token, p_c and p_m their probabilities under the
policy p, and T the target, a distribution in which c is as likely as m is now. The loss is a divergence of p
from T. It is computed in log space from logits of shape [C, V], so that it stays finite if a probability is 0
or 1.

A two-sided distribution has only two outcomes, one token and all others. It is a pair of tensors of shape
[C], ``(log p, log(1-p))``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Need, StaleAnswers, WholeBatch
from treetune.objectives.base import Objective, TokenBatch, capped_engine_ratio, needs_of_importance_cap
from treetune.objectives.further_inputs import DistributionObjective
from treetune.vocabulary import CORRECT_SCORE

if TYPE_CHECKING:
    from torch import Tensor


def log_one_minus(logits_CV: Tensor, tokens_C: Tensor, total_C: Tensor) -> Tensor:
    """Returns ``log(1 - p)`` of one token at each position, shape [C].

    It is computed as the log of the other tokens' mass divided by the whole mass, since ``log1p(-p)`` would
    be -inf once p is rounded to 1.

    Args:
        logits_CV: The logits.
        tokens_C: The token at each position.
        total_C: The log-sum-exp of each position's logits.
    """
    others_CV = logits_CV.scatter(-1, tokens_C[:, None], -math.inf)
    return others_CV.logsumexp(-1) - total_C


def two_sided_kl(target: tuple[Tensor, Tensor], policy: tuple[Tensor, Tensor]) -> Tensor:
    """Returns ``KL(T ‖ p)`` of two-sided distributions, shape [C].

    A two-sided distribution is a pair of log-probs at each position, [C] each: that of a token, and that of
    all other tokens together.
    """
    log_t_C, log_not_t_C = target
    log_p_C, log_not_p_C = policy
    return log_t_C.exp() * (log_t_C - log_p_C) + log_not_t_C.exp() * (log_not_t_C - log_not_p_C)


def two_sided_jsd(target: tuple[Tensor, Tensor], policy: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the Jensen–Shannon divergence of two-sided distributions, shape [C].

    A two-sided distribution is a pair of log-probs at each position, [C] each: that of a token, and that of
    all other tokens together.
    """
    log_t_C, log_not_t_C = target
    log_p_C, log_not_p_C = policy
    # The log-probs of the mean of both distributions.
    log_mean_C = log_t_C.logaddexp(log_p_C) - math.log(2)
    log_not_mean_C = log_not_t_C.logaddexp(log_not_p_C) - math.log(2)
    mean = log_mean_C, log_not_mean_C
    return 0.5 * (two_sided_kl(target, mean) + two_sided_kl(policy, mean))


def rank_target(logits_CV: Tensor, labels_C: Tensor, total_C: Tensor, max_rank: int) -> tuple[Tensor, ...]:
    """Returns the target in which c becomes the first choice and each token before c moves down by one rank.

    At each position, c is the sampled token (`labels_C`), m the most likely token, p the policy's
    distribution and T the target.

    Let k be the rank of c (1 is the most likely token) and p_(i) the probability of rank i. Then T gives c
    the probability p_(1), and the token of rank i < k the probability p_(i+1): a cyclic shift, so that T sums
    to 1. All other tokens keep their probabilities. If k exceeds `max_rank`, c and m are exchanged instead.

    Example: p = (0.5, 0.3, 0.1, …) with c at rank 3 gives T = (0.3, 0.1, 0.5, …) for the same tokens.

    Returns:
        ``log T``, ``log p`` and a mask of the tokens whose probability changes, [C, K] each: at each
        position, of K tokens by their rank. An exchanged c is at rank 2. The mask is empty where k is 1. K is
        the largest rank in the chunk, at most `max_rank` but at least 2.
    """
    import torch

    label_logits_C1 = logits_CV.gather(-1, labels_C[:, None])
    ranks_C = 1 + (logits_CV > label_logits_C1).sum(-1)
    # Beyond `max_rank`, c is treated as if it had rank 2: a cyclic shift of two tokens exchanges them.
    treated_ranks_C = ranks_C.where(ranks_C <= max_rank, 2)
    # The width is at least 2, since c and m may be exchanged. A chunk without positions has no largest rank.
    width = max(2, int(treated_ranks_C.max())) if len(ranks_C) else 2
    top_logits_CK = logits_CV.topk(min(width, logits_CV.shape[-1]), dim=-1).values
    index_K = torch.arange(top_logits_CK.shape[-1], device=logits_CV.device)
    label_index_C1 = treated_ranks_C[:, None] - 1
    # At c's index, c's own logit is used. If another token has the same probability, `topk` may have returned
    # the other token's logit, and the other token would get the gradient.
    logp_CK = torch.where(index_K == label_index_C1, label_logits_C1, top_logits_CK) - total_C[:, None]
    next_logp_CK = torch.cat([logp_CK[:, 1:], logp_CK[:, :1]], dim=-1)
    log_target_CK = torch.where(index_K == label_index_C1, logp_CK[:, :1], next_logp_CK)
    # The tokens up to c change. If c is the first choice already, none does.
    is_changed_CK = (index_K <= label_index_C1) & (ranks_C > 1)[:, None]
    return log_target_CK, logp_CK, is_changed_CK


def rank_kl(log_target_CK: Tensor, logp_CK: Tensor, is_changed_CK: Tensor) -> Tensor:
    """Returns ``KL(T ‖ p) = Σ (T log(T/p) - T + p)`` of the target T and the policy p, summed over the tokens
    whose probability changes (`is_changed_CK`). `rank_target` returns the arguments.

    T only permutes the probabilities of the changed tokens, so ``-T + p`` adds 0 to the sum. It is there for
    the gradient with a detached T. Unchanged tokens are left out of the sum: T equals p for them, so
    ``T log(T/p)`` is 0, but its gradient is ``-∇p``. All probabilities sum to 1, so these gradients sum to
    ``+∇p`` summed over the changed tokens. That is the gradient of ``-T + p``.
    """
    target_CK, p_CK = log_target_CK.exp(), logp_CK.exp()
    divergence_CK = target_CK * (log_target_CK - logp_CK) - target_CK + p_CK
    return divergence_CK.where(is_changed_CK, 0.0).sum(-1)


def rank_jsd(log_target_CK: Tensor, logp_CK: Tensor, is_changed_CK: Tensor) -> Tensor:
    """Returns the Jensen–Shannon divergence ``½ Σ T log(T/M) + ½ Σ p log(p/M)`` with M = (T+p)/2, summed over
    the tokens whose probability changes (`is_changed_CK`). It is at most log 2.

    `rank_target` returns the arguments.
    """
    # The log-probs of M.
    middle_CK = log_target_CK.logaddexp(logp_CK) - math.log(2)
    kl_of_target_C = rank_kl(log_target_CK, middle_CK, is_changed_CK)
    kl_of_policy_C = rank_kl(logp_CK, middle_CK, is_changed_CK)
    return 0.5 * (kl_of_target_C + kl_of_policy_C)


@Objective.register("spo")
@dataclass(frozen=True, kw_only=True)
class CorrectPaths(DistributionObjective):
    """SPO ("Exploring Paths"): a loss without ratios, baselines and a reference model. Let c be the sampled
    token at a position, m the most likely token, and p the policy at the sampling temperature. The loss of
    the position is the divergence of p from a `target` T, in which c is as likely as m is now.

    The loss of a sequence is the mean over its trained tokens. Give it the selection ``all``, so that it
    knows the whole batch. A minibatch without a correct answer takes no step.
    """

    target: Literal["max", "fixed", "rank"] = "max"
    """T. ``max``: the two-sided distribution ``T = (p_m, 1-p_m)``, compared with ``(p_c, 1-p_c)``; the
    divergence is 0 where c is m. ``fixed``: ``(½, ½)``, compared with ``(p_c, 1-p_c)``, too (§3.3). It pushes
    down tokens with p_c above one half. ``rank``: c becomes the first choice, and all tokens that were before
    it move down by one rank (§4.3). If the rank of c is beyond `max_rank`, c and m are exchanged instead."""
    divergence: Literal["kl", "jsd"] = "kl"
    """``kl``: ``KL(T ‖ p)``. ``jsd``: the Jensen–Shannon divergence, which is at most log 2."""
    detach_target: bool = True
    """Whether the target has no gradient. With a gradient (as in the reference's code), m is pushed down
    while c is pulled up, without bound where p_c is near 0."""
    loss_on: Literal["correct", "all"] = "correct"
    """The sequences with a loss: those whose score is at least `score_threshold` (``correct``), or all."""
    normalise_by: Literal["batch", "correct"] = "correct"
    """The divisor of the sum over sequences: the number of all sequences of the minibatch (``batch``, §3.1:
    the loss grows as answers get better), or of the correct ones (``correct``, §3.2)."""
    mask: Literal["above", "below", "none"] = "none"
    """Keeps the loss only at positions with p_c ``above`` or ``below`` one half; ``none``: at all
    positions."""
    entropy_coef: float = 0.0
    """The weight of the mean entropy, which is subtracted from the loss. Below 0 it decreases the entropy
    (§4.2: -0.1, -0.5 and -1)."""
    importance_cap: Annotated[float, Gt(0)] | None = None
    """Multiplies each token's loss by ``min(p / p_engine, cap)``; null: no such factor."""
    cross_entropy: Annotated[float, Ge(0), Le(1)] = 0.0
    """The share x of the negative log-likelihood in a token's loss; the divergence has the share 1 - x
    (training on a corpus, §4.4)."""
    max_rank: Annotated[int, Gt(1)] = 64
    """The largest rank of c for which the target ``rank`` shifts tokens."""
    score_threshold: float = CORRECT_SCORE
    """The smallest score of a correct answer."""

    measures_kl = True

    gives = (StaleAnswers(),)

    def __post_init__(self) -> None:
        if self.loss_on == "all" and self.normalise_by == "correct":
            raise ValueError(
                "loss_on 'all' takes every sequence, so normalise_by 'correct' would divide by another number"
                " than is summed: use normalise_by 'batch'"
            )

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        whole_batch = Need(
            WholeBatch(),
            "it divides by all answers of the batch",
            "choose the selection 'all'; the objective passes over wrong answers itself",
        )
        needs = needs_of_importance_cap(self.importance_cap)
        return (*needs, whole_batch) if self.normalise_by == "batch" else needs

    @override
    def sequence_weights(self, lengths: Sequence[int], scores: Sequence[float]) -> list[float]:
        is_taken = [self.loss_on == "all" or score >= self.score_threshold for score in scores]
        # The count is at least 1: in a minibatch without a correct answer, nothing is divided by 0.
        count = len(lengths) if self.normalise_by == "batch" else max(1, sum(is_taken))
        weights = []
        for length, taken in zip(lengths, is_taken, strict=True):
            weights.append(1 / (count * length) if taken else 0.0)
        return weights

    @override
    def terms(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, ...]:
        """Returns the divergence at each position, and p_c and p_m without gradient.

        p_c is the probability of the sampled token c (`labels_C`), p_m that of the most likely token m.
        """
        total_C = logits_CV.logsumexp(-1)
        logp_c_C = logits_CV.gather(-1, labels_C[:, None]).squeeze(-1) - total_C
        best_C = logits_CV.detach().argmax(-1)
        logp_m_C = logits_CV.gather(-1, best_C[:, None]).squeeze(-1) - total_C
        if self.target == "rank":
            divergence_C = self._divergence_from_rank_target(logits_CV, labels_C, total_C)
        else:
            policy = logp_c_C, log_one_minus(logits_CV, labels_C, total_C)
            if self.target == "max":
                target = logp_m_C, log_one_minus(logits_CV, best_C, total_C)
            else:  # "fixed"
                log_half_C = logp_c_C.new_full(logp_c_C.shape, -math.log(2))
                target = log_half_C, log_half_C
            if self.detach_target:
                target = target[0].detach(), target[1].detach()
            two_sided_divergence = two_sided_kl if self.divergence == "kl" else two_sided_jsd
            divergence_C = two_sided_divergence(target, policy)
            if self.target == "max":
                # If c is as likely as m, the divergence is set to exactly 0. Rounding would leave a small
                # number.
                is_less_likely_C = logp_c_C.detach() < logp_m_C.detach()
                divergence_C = divergence_C.where(is_less_likely_C, 0.0)
        if self.mask != "none":
            is_above_half_C = logp_c_C.detach() > -math.log(2)
            is_kept_C = is_above_half_C if self.mask == "above" else ~is_above_half_C
            divergence_C = divergence_C.where(is_kept_C, 0.0)
        return divergence_C, logp_c_C.detach().exp(), logp_m_C.detach().exp()

    def _divergence_from_rank_target(self, logits_CV: Tensor, labels_C: Tensor, total_C: Tensor) -> Tensor:
        """Returns the divergence of the policy from the target ``rank`` at each position, [C].

        Args:
            total_C: The log-sum-exp of each position's logits.
        """
        log_target_CK, logp_CK, is_changed_CK = rank_target(logits_CV, labels_C, total_C, self.max_rank)
        if self.detach_target:
            log_target_CK = log_target_CK.detach()
        divergence = rank_kl if self.divergence == "kl" else rank_jsd
        return divergence(log_target_CK, logp_CK, is_changed_CK)

    @override
    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # c is the sampled token, and m the most likely one.
        divergence_N, p_c_N, p_m_N = batch.terms
        metrics = {
            "spo/distance": batch.mean(divergence_N),
            "spo/first_choice": batch.mean(p_c_N == p_m_N),
            "spo/lacking": batch.mean(p_m_N - p_c_N),
        }
        loss_N = divergence_N
        if self.cross_entropy:
            loss_N = (1 - self.cross_entropy) * divergence_N - self.cross_entropy * logprobs_N
        if self.importance_cap is not None:
            loss_N = loss_N * capped_engine_ratio(batch, logprobs_N.detach(), self.importance_cap)
        return (batch.weights_N * loss_N).sum(), metrics
