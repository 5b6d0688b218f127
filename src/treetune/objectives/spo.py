"""Learning from correct paths: every sampled token is brought nearer to being the policy's first choice.

Everything is computed from logits of shape [C, V], in their precision and in log space, and stays finite
where a probability is 0 or 1. Names: c is the sampled token, m the most likely one; p their probability.
Formulas and gradients: "Exploring Paths" (SPO), and the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import Need, StaleAnswers, WholeBatch
from treetune.objectives.base import Objective, TokenBatch, ratio_of
from treetune.vocabulary import CORRECT_SCORE

if TYPE_CHECKING:
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
        target[0].new_zeros(target[0].shape),
    )


def two_sided_jsd(target: tuple[Tensor, Tensor], policy: tuple[Tensor, Tensor]) -> Tensor:
    """The Jensen–Shannon divergence of two-sided distributions, given alike."""
    middle = tuple(t_C.logaddexp(p_C) - math.log(2) for t_C, p_C in zip(target, policy, strict=True))
    assert len(middle) == 2
    return 0.5 * (two_sided_kl(target, middle) + two_sided_kl(policy, middle))


def rank_target(logits_CV: Tensor, labels_C: Tensor, total_C: Tensor, max_rank: int) -> tuple[Tensor, ...]:
    """The distribution in which c is the first choice and all that were before it move down by one.

    With k the rank of c among the tokens (1 the most likely), ``T(c) = p_(1)``, ``T((i)) = p_(i+1)`` for
    i < k, and the rest as it was: a cyclic shift, so T sums to 1. Beyond `max_rank`, c and m change places
    instead. Returns log T and log p at the affected tokens, both [C, K], and which of them are real, [C, K]
    (none where k is 1). Work is O(K) beside one top-k, with K ≤ `max_rank` the largest rank in the chunk.
    """
    import torch

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
    middle_CK = log_target_CK.logaddexp(logp_CK) - math.log(2)
    return 0.5 * (kl_over(log_target_CK, middle_CK, real_CK) + kl_over(logp_CK, middle_CK, real_CK))


@Objective.register("spo")
@dataclass(frozen=True, kw_only=True)
class CorrectPaths(Objective):
    """SPO ("Exploring Paths"): no ratio, no baseline, no reference. With c the sampled token, m the most
    likely one, and p the policy at the sampling temperature, a position costs the divergence of p from a
    `target` T in which c is as likely as m is now.

    Each sequence counts as the mean over its trained tokens. Give it the selection ``all``, so that the batch
    is known. A minibatch without a correct answer takes no step.
    """

    target: Literal["max", "fixed", "rank"] = "max"
    """``max``: the two-sided ``T = (p_m, 1-p_m)`` against ``(p_c, 1-p_c)``; 0 where c is m.
    ``fixed``: ``(½, ½)`` against the same (§3.3). It pushes confident tokens down.
    ``rank``: c becomes the first choice and all that were before it move down by one (§4.3); beyond
    `max_rank` it changes places with m."""
    divergence: Literal["kl", "jsd"] = "kl"
    """``KL(T ‖ p)`` or the Jensen–Shannon divergence, which is at most log 2."""
    detach_target: bool = True
    """Makes the target a constant; without, m is pushed down as c is pulled up, without bound where p_c is
    near 0 (the reference's code)."""
    loss_on: Literal["correct", "all"] = "correct"
    """Takes the sequences whose score is at least `score_threshold`, or all."""
    normalise_by: Literal["batch", "correct"] = "correct"
    """Divides the sum by all of the minibatch's sequences (``batch``, §3.1: the loss grows as answers get
    better), or by the correct ones alone (``correct``, §3.2)."""
    mask: Literal["above", "below", "none"] = "none"
    """Leaves only positions with p_c ``above`` or ``below`` one half."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy, which the loss is less by; below 0 it makes the policy surer as it learns
    (§4.2: -0.1, -0.5 and -1)."""
    importance_cap: Annotated[float, Gt(0)] | None = None
    """Multiplies each token's cost by ``min(p / p_engine, cap)``; None leaves it out."""
    cross_entropy: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the negative log-likelihood that is mixed in (training on a corpus, §4.4)."""
    max_rank: Annotated[int, Gt(1)] = 64
    """Deepest rank at which the target ``rank`` is a shift."""
    score_threshold: float = CORRECT_SCORE
    """Score from which on an answer is correct."""

    measures_kl = True
    has_terms = True

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
        whole = Need(
            WholeBatch(),
            "it divides by all answers of the batch",
            "choose the selection 'all'; the objective passes over wrong answers itself",
        )
        return (*super().needs, whole) if self.normalise_by == "batch" else super().needs

    @override
    def sequence_weights(self, lengths: Sequence[int], scores: Sequence[float]) -> list[float]:
        taken = [self.loss_on == "all" or score >= self.score_threshold for score in scores]
        count = len(lengths) if self.normalise_by == "batch" else max(1, sum(taken))
        return [
            1 / (count * length) if is_taken else 0.0 for is_taken, length in zip(taken, lengths, strict=True)
        ]

    @override
    def terms(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, ...]:
        """The divergence at each position, and without gradient p_c and p_m."""
        total_C = logits_CV.logsumexp(-1)
        logp_c = logits_CV.gather(-1, labels_C[:, None]).squeeze(-1) - total_C
        best_C = logits_CV.detach().argmax(-1)
        logp_m = logits_CV.gather(-1, best_C[:, None]).squeeze(-1) - total_C
        if self.target == "rank":
            log_target_CK, logp_CK, real_CK = rank_target(logits_CV, labels_C, total_C, self.max_rank)
            if self.detach_target:
                log_target_CK = log_target_CK.detach()
            divergence = kl_over if self.divergence == "kl" else jsd_over
            cost_C = divergence(log_target_CK, logp_CK, real_CK)
        else:
            policy = logp_c, log_one_minus(logits_CV, labels_C, total_C)
            if self.target == "max":
                target = logp_m, log_one_minus(logits_CV, best_C, total_C)
            else:
                target = (logp_c.new_full(logp_c.shape, -math.log(2)),) * 2
            if self.detach_target:
                target = target[0].detach(), target[1].detach()
            two_sided = two_sided_kl if self.divergence == "kl" else two_sided_jsd
            cost_C = two_sided(target, policy)
            if self.target == "max":
                # Exactly nothing where c is as likely as m; what is left there is rounding.
                cost_C = cost_C.where(logp_c.detach() < logp_m.detach(), 0.0)
        if self.mask != "none":
            above_C = logp_c.detach() > -math.log(2)
            cost_C = cost_C.where(above_C if self.mask == "above" else ~above_C, 0.0)
        return cost_C, logp_c.detach().exp(), logp_m.detach().exp()

    @override
    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        cost_N, p_c_N, p_m_N = batch.terms
        metrics = {
            "spo/distance": batch.mean(cost_N),
            "spo/first_choice": batch.mean((p_c_N == p_m_N).to(p_c_N.dtype)),
            "spo/lacking": batch.mean(p_m_N - p_c_N),
        }
        if self.cross_entropy:
            cost_N = (1 - self.cross_entropy) * cost_N - self.cross_entropy * logprobs_N
        if self.importance_cap is not None:
            assert batch.behaviour_logprobs_N is not None, "sampled tokens carry the engine's log-probs"
            ratio_N = ratio_of(logprobs_N.detach() - batch.behaviour_logprobs_N)
            cost_N = cost_N * ratio_N.clamp(max=self.importance_cap)
        return (batch.weights_N * cost_N).sum(), metrics
