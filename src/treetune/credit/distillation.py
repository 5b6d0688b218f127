"""On-policy distillation: a teacher's log-probs of the policy's samples as credit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from treetune.contracts import Advantages, Experiment, Finding
from treetune.credit.base import Credit, GroupCredit, TrainerScores
from treetune.models.sources import ModelSource


@Credit.register("distillation")
@dataclass(frozen=True, kw_only=True)
class Distillation(GroupCredit):
    """On-policy distillation: trains the policy on its own samples towards a teacher model (Agarwal et al.,
    arXiv:2306.13649; Lu et al., "On-Policy Distillation", 2025).

    Rewards are ignored. This credit gives all tokens the advantage 0, and makes `teacher` the trainer's
    reference model in place of the start model. The objective then adds the advantages: with ``kl_placement:
    'advantage'``, ``kl_estimator: 'k1'`` and ``kl_coef: 1``, a token's advantage becomes ``log p_teacher -
    log p_old``, so that the expected gradient is that of the reverse KL to the teacher at each token.
    ``train/kl`` is then the distance to the teacher.

    With ``kl_placement: 'reward'``, a token's advantage is the sum of these differences from the token to the
    end of its answer. The expected gradient is then that of the reverse KL of whole answers (MiniLLM, Gu et
    al., arXiv:2306.08543): a token also counts for what it leads to, and the gradient is noisier.
    """

    teacher: ModelSource
    """The teacher. It must have the start model's tokenizer."""

    gives = (Advantages(before_training=True),)

    @property
    @override
    def trainer_scores(self) -> TrainerScores:
        return TrainerScores(reference_model=self.teacher)

    @override
    def advantages(self, rewards: Sequence[float]) -> Sequence[float]:
        return [0.0] * len(rewards)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        # The KL penalty in rewards or in advantages. The trainer subtracts either from the advantages. It
        # is None if there is no KL, or if the KL is a term of the loss.
        penalty = experiment.trainer.objective.kl_penalty
        if penalty is None or penalty.estimator != "k1":
            difference = "has no KL penalty there"
            if penalty is not None:
                difference = f"has the kl_estimator {penalty.estimator!r} there"
            yield Finding(
                "distillation needs an objective that adds the teacher's log-probs minus the policy's to"
                f" advantages or rewards, and this one {difference}",
                "$.trainer.objective.kl_placement",
                "set kl_coef to 1, kl_placement to 'advantage' and kl_estimator to 'k1'"
                " (methods/on_policy_distillation)",
            )
        if experiment.trainer.lora is not None:
            yield Finding(
                "with adapters the reference model is the policy without them, but distillation's is its"
                " teacher",
                "$.trainer.lora",
                "train all weights",
            )
        if getattr(experiment.trainer, "skip_without_advantage", False):
            yield Finding(
                "all advantages of distillation's credit are 0, and skip_without_advantage skips such steps",
                "$.trainer.skip_without_advantage",
                "set it to false",
            )
