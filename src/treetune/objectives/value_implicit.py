"""VIMPO trains the policy so that its log-ratios to the reference define a value function, from which
advantages are computed (Kang et al. 2026, arXiv:2606.20008).

For the best policy under a KL penalty of weight β, if the only reward r comes at the end of an answer,

    ρ_t − κ_t = V(s_{t+1}) − V(s_t),   ρ_t = β log π(y_t)/π_ref(y_t),   κ_t = β KL(π(·|s_t) ‖ π_ref(·|s_t))

where V after the last token is r. So the sum of ρ − κ over an answer should be r − V(prompt). The value loss
draws this sum towards the reward minus the group's mean, which estimates r − V(prompt). The actor loss is
PPO's. In it, the advantage of a token is the discounted sum of ρ − κ over this token and all later ones.

The formulas are those of the authors' repository and of TRL's trainer. Example, with β = 0.1: an answer of
two tokens has log-ratios of 0.5 and 1.5, KLs of 0 and 0.5, and the advantage 0.25 from credit. Its sum of
ρ − κ is 0.05 + 0.15 − 0.05 = 0.15, and its value loss ½ · (0.15 − 0.25)² = 0.005.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from treetune.contracts import CentredRewards, Experiment, Finding, Need
from treetune.objectives.base import Objective, TokenBatch
from treetune.objectives.further_inputs import ReferenceKlObjective
from treetune.objectives.policy_gradient import ClippedPolicyGradient, advantages_of

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-8
"""Added to a standard deviation, as in TRL."""


@Objective.register("vimpo")
@dataclass(frozen=True, kw_only=True)
class ValueImplicit(ReferenceKlObjective, ClippedPolicyGradient):
    """VIMPO (Kang et al. 2026, arXiv:2606.20008): the loss ``L_V + actor_coef·L_A``.

    The value loss is ``L_V = mean over answers of ½·(Σ_t (ρ_t - κ_t) - A)²``. A is the answer's advantage
    from credit. At token t, ρ_t = β·(log p - log p_ref), and κ_t = β·KL(π_old ‖ π_ref) over the whole
    vocabulary.

    The actor loss ``L_A`` is PPO's loss with Â_t in place of the advantages. Â_t is
    Σ_{k≥t} λ^(k-t)·(ρ_k - κ_k) under the policy before the iteration's first step, whitened over the
    iteration's tokens.

    Rewards enter the loss only through A in L_V. The credit must give all tokens of an answer the same
    advantage, an estimate of r − V(prompt): `group` with ``std: false``, `rloo`, or another credit that gives
    `CentredRewards`. The authors' code computes κ and Â anew in each step. Here they are those of the policy
    before the iteration's first step. With one optimizer step per iteration, this makes no difference.
    """

    beta: Annotated[float, Gt(0)] = 5e-4
    """β, the weight of the KL penalty under which the policy becomes optimal."""
    actor_coef: Annotated[float, Ge(0)] = 5e-3
    """The weight of the actor loss L_A."""
    lam: Annotated[float, Ge(0), Le(1)] = 1.0
    """λ, the discount in the sums Â_t of ρ − κ."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_coef:
            raise ValueError(
                f"vimpo's value loss already contains the KL to the reference, and kl_coef is"
                f" {self.kl_coef:g}: set it to 0"
            )

    @property
    @override
    def needs_whole_sequences(self) -> bool:  # type: ignore[override]
        return True

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        because = "it compares the sum of an answer's log-ratios with them"
        return (*super().needs, Need(CentredRewards(), because))

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        yield from super().check(experiment)
        trainer = experiment.trainer
        if trainer.advantage_normalisation != "none":
            yield Finding(
                "vimpo compares sums of log-ratios with the advantages, and advantage_normalisation is"
                f" {trainer.advantage_normalisation!r}",
                "$.trainer.advantage_normalisation",
                "set it to 'none'",
            )
        if trainer.sequence_parallel_size > 1:
            yield Finding(
                "vimpo compares whole distributions with the reference's, and ranks that share a sequence"
                " don't exchange them",
                "$.trainer.sequence_parallel_size",
                "set it to 1",
            )

    @override
    def precompute(
        self, old_logprobs_N: Tensor, ref_logprobs_N: Tensor, ref_kl_N: Tensor, starts: Sequence[int]
    ) -> Tensor:
        # ρ − κ: β times the log-ratio of a token to the reference (ρ), minus β times the KL to the reference
        # (κ). For the best policy, this is how much the token changes the value.
        changes_N = self.beta * (old_logprobs_N - ref_logprobs_N - ref_kl_N)
        advantages_N = discounted_sums(changes_N, starts, self.lam)
        centred_N = advantages_N - advantages_N.mean()
        return centred_N / (centred_N.square().mean().sqrt() + EPS)

    @override
    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.ref_logprobs_N is not None and batch.ref_kl_N is not None, "the trainer compares them"
        # How much each token changes the value of the answer so far, according to the policy: β times the
        # log-ratio to the reference, minus β times the KL to the reference.
        log_ratios_N = logprobs_N - batch.ref_logprobs_N
        changes_N = self.beta * (log_ratios_N - batch.ref_kl_N)
        # The changes of an answer should add up to its advantage from credit, which is the reward minus an
        # estimate of the prompt's value.
        targets_N = advantages_of(batch)
        value_loss = logprobs_N.new_zeros(())
        for changes_T, targets_T in zip(
            batch.by_sequence(changes_N), batch.by_sequence(targets_N), strict=True
        ):
            target = targets_T.mean()  # all tokens of an answer have the same advantage
            value_loss = value_loss + 0.5 * (changes_T.sum() - target).square()
        value_loss = batch.sequence_weight * value_loss
        # PPO's loss, with the advantages that `precompute` returned.
        actor_loss, metrics = super().loss(replace(batch, advantages_N=batch.own_advantages_N), logprobs_N)
        loss = value_loss + self.actor_coef * actor_loss
        return loss, {**metrics, "train/value_loss": value_loss.detach()}


def discounted_sums(values_N: Tensor, starts: Sequence[int], discount: float) -> Tensor:
    """Returns Σ_{k≥t} discount^(k−t) · value_k for each token t, over the tokens k of its sequence from t on,
    shape [N].

    Example: ``discounted_sums(tensor([1.0, 2.0, 4.0]), [0, 2, 3], 0.5)`` is ``[2.0, 2.0, 4.0]``.

    Args:
        values_N: The value of each token.
        starts: The index of each sequence's first token, and N at the end.
        discount: The discount per token.
    """
    import torch

    sums: list[float] = []
    for start, end in pairwise(starts):
        later_sum = 0.0  # the sum from the next token on
        sums_from_last: list[float] = []
        for value in reversed(values_N[start:end].tolist()):
            later_sum = value + discount * later_sum
            sums_from_last.append(later_sum)
        sums += reversed(sums_from_last)
    return torch.tensor(sums, dtype=values_N.dtype)
