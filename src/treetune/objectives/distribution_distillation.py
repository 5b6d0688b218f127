"""Self-distillation on distributions: at each token of its own answers, the policy π learns the next-token
distribution of a teacher π_T. The teacher is a version of the model (`Teacher.weights`) that has a privileged
text in its prompt.

    policy    "2 + 3?"                      ── answer ──>  p = π(· | x, y_<t)        with gradient
    teacher   "2 + 3?  The answer is 5."    ── answer ──>  q = π_T(· | c, x, y_<t)   without gradient

Here x is the problem, c the privileged text, and y_<t the answer's tokens before token t.

The loss of a token is a divergence D of the two distributions over the vocabulary:

* ``forward_kl``: KL(q ‖ p) = Σ_v q(v)·(log q(v) − log p(v))
* ``reverse_kl``: KL(p ‖ q) = Σ_v p(v)·(log p(v) − log q(v))
* ``jsd``: the generalized Jensen-Shannon divergence β·KL(q ‖ m) + (1 − β)·KL(p ‖ m) with m = β·q + (1 − β)·p
  (Agarwal et al., arXiv:2306.13649, eq. 1)

Methods that use such a divergence:

* OPSD (Zhao et al., arXiv:2601.18734): over the whole vocabulary. The teacher is the start model.
* SDPO (Hübotter et al., arXiv:2601.20802): over the policy's k most likely tokens, and one more outcome for
  all other tokens, the *tail*. The teacher is a moving average of the policy's weights.
* SDPG (Liu et al., arXiv:2606.04036): a KL over the whole vocabulary, added to a policy gradient.

The formulas are those of the authors' public code and of TRL's trainer. Of the papers, only abstracts were
available for this file.

Example: the policy has the probabilities 0.5, 0.3 and 0.2, the teacher 0.8, 0.1 and 0.1. The reverse KL is
0.5·log(0.5 / 0.8) + 0.3·log(0.3 / 0.1) + 0.2·log(0.2 / 0.1) = 0.23. With `top_k` 1 and the tail as an outcome
it is 0.5·log(0.5 / 0.8) + 0.5·log(0.5 / 0.2) = 0.22.

The credit `self_distillation`, in contrast, uses only the sampled token. It gives a token v the advantage
log q(v) − log p(v). A policy gradient then minimises −(log q(v) − log p(v))·log p(v), with the difference in
parentheses held fixed. If v is sampled from p, the expected gradient of this loss is the gradient of the
reverse KL.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt
from typing_extensions import override

from treetune.contracts import Answers, Experiment, Feature, Finding, Need, SampledAnswers, StaleAnswers
from treetune.credit.base import MOST_EXAMPLE_PROBLEMS
from treetune.objectives.base import Objective, TokenBatch, capped_engine_ratio
from treetune.objectives.further_inputs import TeacherObjective
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.objectives.teacher import Teacher

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


@Objective.register("distribution_distillation")
@dataclass(frozen=True, kw_only=True)
class DistributionDistillation(TeacherObjective, ClippedPolicyGradient):
    """The loss `divergence_weight` · ``Σ w·D(π, π_T)`` + `advantage_weight` · PPO's loss, where D is a
    divergence of the policy π from the teacher π_T at a token, with the weights w of `aggregation`.

    A token of an answer without a privileged text has D = 0. It counts in the mean nevertheless, so that the
    loss estimates the mean of D over all sampled tokens, however many answers have a text. SDPO's code takes
    the mean over the answers with a text, in each micro-batch. With a single micro-batch, its loss is this
    one divided by ``train/with_teacher``, the share of their tokens.

    **Biased**: without PPO's loss, rewards enter only through the privileged text, and the policy becomes at
    most as good as its teacher. With the present policy as the teacher, nothing prevents a collapse: a model
    that writes the same nonsense after both prompts has D = 0.
    """

    teacher: Teacher = field(default_factory=Teacher)
    """The settings of the teacher. The trainer runs it before each forward pass of the policy."""
    divergence: Divergence = "reverse_kl"
    """D: ``forward_kl`` KL(π_T ‖ π), ``reverse_kl`` KL(π ‖ π_T), or ``jsd``, the generalized Jensen-Shannon
    divergence between them."""
    jsd_beta: Annotated[float, Gt(0), Lt(1)] = 0.5
    """β of ``jsd``, the teacher's share of the mixture. For β near 0, D/β is about the forward KL, and for β
    near 1, D/(1 − β) is about the reverse KL."""
    top_k: Annotated[int, Gt(0)] | None = None
    """The number of most likely tokens that D compares; null: the whole vocabulary."""
    top_k_of: Literal["policy", "teacher"] = "policy"
    """The model whose most likely tokens are compared. In SDPO, it is the policy."""
    tail: Literal["outcome", "dropped"] = "outcome"
    """The treatment of all tokens but the `top_k`: together they are one more outcome (``outcome``), or they
    are left out, and the probabilities of the `top_k` tokens are normalised to a sum of 1 (``dropped``)."""
    entry_clip: Annotated[float, Gt(0)] | None = None
    """The upper bound of what one token of the vocabulary (or the tail) adds to D at a position; null: no
    bound. What is above it has no gradient. Negative summands have no bound, so D can become negative. OPSD's
    code has 0.05, so that a few tokens of style don't dominate."""
    divergence_weight: Annotated[float, Gt(0)] = 1.0
    """The factor of D."""
    advantage_weight: Annotated[float, Ge(0)] = 0.0
    """The factor of PPO's loss. With 0, advantages aren't used, and the credit can be `none`."""
    importance_cap: Annotated[float, Gt(0)] | None = None
    """The cap of a correction for differences between engine and policy; null: no correction. D is multiplied
    by ``min(p / p_engine, cap)``. Here p is the present policy's probability of the sampled token, and
    p_engine the probability with which the engine sampled it. PPO's loss is corrected as in `ppo`. SDPO's
    code has the cap 2."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.advantage_weight:
            return
        for name in ("kl_coef", "importance_band", "importance_sequence", "ratio_threshold", "dual_clip"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} belongs to PPO's loss, and advantage_weight is 0: leave {name} out, or set"
                    " advantage_weight to 1"
                )

    @property
    @override
    def gives(self) -> tuple[Feature, ...]:
        # Without PPO's loss, answers of older weights are as good as new ones: D compares the policy with its
        # teacher at the tokens of an answer, whichever policy sampled them.
        return super().gives if self.advantage_weight else (StaleAnswers(),)

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        because = "the policy learns from a teacher at the tokens of its own answers"
        # With an `advantage_weight`, PPO's loss is added to the divergence, so its needs count.
        needs = list(super().needs) if self.advantage_weight else [Need(SampledAnswers(), because)]
        if self.teacher.context == "right_answer":
            needs.append(Need(Answers(2), "it shows the teacher another answer to the same problem"))
        return tuple(needs)

    @property
    @override
    def needs_reference(self) -> bool:  # type: ignore[override]
        return super().needs_reference or self.teacher.weights == "reference"

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        # The base class checks what PPO's loss needs. With the weight 0, PPO's loss isn't part of this loss.
        if self.advantage_weight:
            yield from super().check(experiment)
        if self.teacher.context == "gold":
            examples = experiment.task.examples(MOST_EXAMPLE_PROBLEMS)
            if examples and not any(problem.gold for problem in examples):
                yield Finding(
                    "the teacher's prompt has the problem's reference answer, and the first problems of the"
                    " task have none",
                    "teacher.context",
                    "choose a task with reference answers, or the context 'right_answer' or 'feedback'",
                )
        reference_model = experiment.credit.trainer_scores.reference_model
        if self.teacher.weights == "reference" and reference_model is not None:
            yield Finding(
                "the start model is the teacher, and the credit"
                f" {experiment.credit.registered_name()!r} puts another model in its place",
                "teacher.weights",
                "set it to 'policy' or 'average', or choose another credit, such as 'none'",
            )
        if experiment.restart == "every_iteration" and self.teacher.weights == "average":
            yield Finding(
                "restart 'every_iteration' trains the start weights in each iteration, and the teacher is the"
                " moving average over all iterations",
                "teacher.weights",
                "set it to 'reference', or restart to 'never'",
            )

    @property
    @override
    def compare_bytes(self) -> int:  # type: ignore[override]
        # Measured with PyTorch's profiler: `compare` needs five float32 tensors as large as the logits (5 · 4
        # bytes), and 13 for ``jsd`` over the whole vocabulary, because of the mixture.
        return 52 if self.divergence == "jsd" and self.top_k is None else 20

    @override
    def compare(self, logits_CV: Tensor, teacher_logits_CV: Tensor) -> tuple[Tensor, ...]:
        """Returns the divergence D of the policy π from the teacher π_T and, without gradient, KL(π ‖ π_T)
        over the whole vocabulary."""
        import torch

        logp_CV = logits_CV.log_softmax(-1)
        logq_CV = teacher_logits_CV.log_softmax(-1)
        with torch.no_grad():
            teacher_kl_C = (logp_CV.exp() * (logp_CV - logq_CV)).sum(-1)
        if self.top_k is not None and self.top_k < logits_CV.shape[-1]:
            ranking_CV = logits_CV if self.top_k_of == "policy" else teacher_logits_CV
            ids_CK = ranking_CV.topk(self.top_k, dim=-1).indices
            # From here on, V counts the outcomes that are compared.
            logp_CV = outcomes_of_tokens(logp_CV, ids_CK, self.tail)
            logq_CV = outcomes_of_tokens(logq_CV, ids_CK, self.tail)
        terms_CV = divergence_terms(logp_CV, logq_CV, self.divergence, self.jsd_beta)
        if self.entry_clip is not None:
            terms_CV = terms_CV.clamp(max=self.entry_clip)
        return terms_CV.sum(-1), teacher_kl_C

    @override
    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.has_teacher_N is not None, "the trainer runs the teacher when the objective has one"
        divergence_N, teacher_kl_N = batch.terms
        # The teacher's prompt shows more than the policy's, such as a right answer. For some answers there is
        # nothing more to show, so the teacher sees the policy's prompt. Their numbers are set to 0.
        divergence_N = divergence_N.where(batch.has_teacher_N, 0.0)
        teacher_kl_N = teacher_kl_N.where(batch.has_teacher_N, 0.0)
        metrics = {
            "train/divergence": batch.mean(divergence_N),
            "train/teacher_kl": batch.mean(teacher_kl_N),
            "train/with_teacher": batch.mean(batch.has_teacher_N),
        }
        if self.importance_cap is not None:
            divergence_N = divergence_N * capped_engine_ratio(batch, logprobs_N.detach(), self.importance_cap)
        loss = self.divergence_weight * (batch.weights_N * divergence_N).sum()
        if self.advantage_weight:
            policy_loss, policy_metrics = super().loss(batch, logprobs_N)
            loss = loss + self.advantage_weight * policy_loss
            metrics |= policy_metrics
        return loss, metrics


def outcomes_of_tokens(logprobs_CV: Tensor, ids_CK: Tensor, tail: Literal["outcome", "dropped"]) -> Tensor:
    """Returns the log-probs of a distribution with fewer outcomes: the K tokens `ids_CK` at each position,
    and, with the tail ``outcome``, all other tokens together as one more outcome.

    Example: three tokens have the probabilities 0.5, 0.3 and 0.2, and `ids_CK` has only the first. With the
    tail ``outcome``, there are two outcomes with the probabilities 0.5 and 0.5. With the tail ``dropped``,
    the only outcome has the probability 1.
    """
    import torch

    logprobs_CK = logprobs_CV.gather(-1, ids_CK)
    if tail == "dropped":
        return logprobs_CK.log_softmax(-1)
    # The other tokens' probabilities are added up, since 1 minus the sum over the K tokens could be rounded
    # to 0.
    log_tail_C1 = logprobs_CV.scatter(-1, ids_CK, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs_CK, log_tail_C1], dim=-1)


def divergence_terms(logp_CV: Tensor, logq_CV: Tensor, divergence: Divergence, beta: float) -> Tensor:
    """Returns the summand of each outcome in the divergence of the policy's distribution p and the teacher's
    q, shape [C, V].

    Args:
        logp_CV: log p, with gradient.
        logq_CV: log q.
        beta: β of ``jsd``.
    """
    if divergence == "forward_kl":
        return logq_CV.exp() * (logq_CV - logp_CV)
    if divergence == "reverse_kl":
        return logp_CV.exp() * (logp_CV - logq_CV)
    # "jsd": β KL(q ‖ M) + (1 − β) KL(p ‖ M), with the mixture M = β q + (1 − β) p.
    log_mixture_CV = (logq_CV + math.log(beta)).logaddexp(logp_CV + math.log1p(-beta))
    of_teacher_CV = logq_CV.exp() * (logq_CV - log_mixture_CV)
    of_policy_CV = logp_CV.exp() * (logp_CV - log_mixture_CV)
    return beta * of_teacher_CV + (1 - beta) * of_policy_CV
