"""Learning from correct paths: every sampled token is brought nearer to being the policy's first choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le

from treetune.contracts import Need, StaleAnswers, WholeBatch
from treetune.trainers.objectives.base import Objective, TokenBatch
from treetune.vocabulary import CORRECT_SCORE

if TYPE_CHECKING:
    from torch import Tensor


@Objective.register("spo")
@dataclass(frozen=True, kw_only=True)
class CorrectPaths(Objective):
    """SPO ("Exploring Paths"): no ratio, no baseline, no reference. With c the sampled token, m the most
    likely one, and p the policy at the sampling temperature, a position costs the divergence of p from a
    target T in which c is as likely as m is now:

    * `target` ``max``: the two-sided ``T = (p_m, 1-p_m)`` against ``(p_c, 1-p_c)``; 0 where c is m.
    * ``fixed``: ``(½, ½)`` against the same (§3.3). It pushes confident tokens down.
    * ``rank``: c becomes the first choice and all that were before it move down by one
      (`token_distance.rank_target`, §4.3); beyond `max_rank` it changes places with m.

    `divergence` is ``KL(T ‖ p)`` or the Jensen–Shannon divergence, which is at most log 2. With
    `detach_target` the target is a constant; without, m is pushed down as c is pulled up, without bound
    where p_c is near 0 (the reference's code). `mask` leaves only positions with p_c ``above`` or ``below``
    one half.

    Each sequence counts as the mean over its trained tokens. `loss_on` ``correct`` takes those whose
    score is at least `score_threshold`; `normalise_by` ``batch`` divides their sum by all of the
    minibatch's sequences (§3.1: the loss grows as answers get better), ``correct`` by theirs alone (§3.2).
    Give it the selection ``all``, so that the batch is known. A minibatch without a correct answer takes
    no step. `importance_cap` multiplies each token's cost by ``min(p / p_engine, cap)``.
    `cross_entropy` mixes in that share of the negative log-likelihood (training on a corpus, §4.4).
    `entropy_coef` below 0 makes the policy surer as it learns (§4.2: -0.1, -0.5 and -1).
    """

    target: Literal["max", "fixed", "rank"] = "max"
    divergence: Literal["kl", "jsd"] = "kl"
    detach_target: bool = True
    loss_on: Literal["correct", "all"] = "correct"
    normalise_by: Literal["batch", "correct"] = "correct"
    mask: Literal["above", "below", "none"] = "none"
    entropy_coef: float = 0.0
    importance_cap: Annotated[float, Gt(0)] | None = None
    cross_entropy: Annotated[float, Ge(0), Le(1)] = 0.0
    max_rank: Annotated[int, Gt(1)] = 64
    score_threshold: float = CORRECT_SCORE

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
    def needs(self) -> tuple[Need, ...]:
        whole = Need(
            WholeBatch(),
            "it divides by all answers of the batch",
            "choose the selection 'all'; the objective passes over wrong answers itself",
        )
        return (*super().needs, whole) if self.normalise_by == "batch" else super().needs

    def sequence_weights(self, lengths: Sequence[int], scores: Sequence[float]) -> list[float]:
        taken = [self.loss_on == "all" or score >= self.score_threshold for score in scores]
        count = len(lengths) if self.normalise_by == "batch" else max(1, sum(taken))
        return [1 / (count * length) if one else 0.0 for one, length in zip(taken, lengths, strict=True)]

    def terms(self, logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, ...]:
        """The divergence at each position; and without gradient p_c and p_m."""
        from treetune.trainers.objectives import token_distance as distance

        total_C = logits_CV.logsumexp(-1)
        logp_c = logits_CV.gather(-1, labels_C[:, None]).squeeze(-1) - total_C
        best_C = logits_CV.detach().argmax(-1)
        logp_m = logits_CV.gather(-1, best_C[:, None]).squeeze(-1) - total_C
        if self.target == "rank":
            log_target_CK, logp_CK, real_CK = distance.rank_target(
                logits_CV, labels_C, total_C, self.max_rank
            )
            if self.detach_target:
                log_target_CK = log_target_CK.detach()
            over = distance.kl_over if self.divergence == "kl" else distance.jsd_over
            cost_C = over(log_target_CK, logp_CK, real_CK)
        else:
            policy = logp_c, distance.log_one_minus(logits_CV, labels_C, total_C)
            if self.target == "max":
                target = logp_m, distance.log_one_minus(logits_CV, best_C, total_C)
            else:
                target = (logp_c.new_full(logp_c.shape, -math.log(2)),) * 2
            if self.detach_target:
                target = target[0].detach(), target[1].detach()
            two_sided = distance.two_sided_kl if self.divergence == "kl" else distance.two_sided_jsd
            cost_C = two_sided(target, policy)
            if self.target == "max":
                # Exactly nothing where c is as likely as m; what is left there is rounding.
                cost_C = cost_C.where(logp_c.detach() < logp_m.detach(), 0.0)
        if self.mask != "none":
            above_C = logp_c.detach() > -math.log(2)
            cost_C = cost_C.where(above_C if self.mask == "above" else ~above_C, 0.0)
        return cost_C, logp_c.detach().exp(), logp_m.detach().exp()

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
            ratio_N = (logprobs_N.detach() - batch.behaviour_logprobs_N).exp()
            cost_N = cost_N * ratio_N.clamp(max=self.importance_cap)
        return (batch.weights_N * cost_N).sum(), metrics
