"""Losses that compare two answers to one problem: DPO, IPO and DPO-positive.

They see log-probs of whole answers: sums over their trained tokens, at the rollout's temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt
from typing_extensions import override

from treetune.contracts import Need, Pairs, StaleAnswers, UseOfPairs
from treetune.objectives.base import Objective, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PairLogprobs:
    """The log-probs of both answers of P pairs, each of shape [P].

    They are sums over the answers' trained tokens, whose numbers are `chosen_tokens_P` and
    `rejected_tokens_P`. The reference's have no gradient.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    reference_chosen_P: Tensor
    reference_rejected_P: Tensor
    chosen_tokens_P: Tensor
    rejected_tokens_P: Tensor

    @property
    def chosen_ratio_P(self) -> Tensor:
        return self.chosen_P - self.reference_chosen_P

    @property
    def rejected_ratio_P(self) -> Tensor:
        return self.rejected_P - self.reference_rejected_P

    @property
    def margin_P(self) -> Tensor:
        """The policy's preference for the better answer beyond the reference's, in nats."""
        return self.chosen_ratio_P - self.rejected_ratio_P


@dataclass(frozen=True, kw_only=True)
class Preference(Objective):
    """The mean over pairs of `pair_loss`, and what all such losses report.

    ``preference/accuracy`` is the share of pairs whose margin over the reference is above 0 (none
    is before the first update), ``preference/ranking`` the share in which the policy finds the
    better answer more likely, ``preference/reference_ranking`` the same of the reference;
    ``preference/chosen_reward`` and ``preference/rejected_reward`` are the implicit rewards
    ``beta·(log p - log p_ref)``, ``preference/margin`` is their difference.
    """

    beta: Annotated[float, Gt(0)] = 0.1

    aggregation = "sequence"
    needs_reference = True
    needs_whole_sequences = True

    gives = (UseOfPairs(), StaleAnswers())

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (*super().needs, Need(Pairs(), "it compares answers in pairs"))

    def pair_loss(self, pairs: PairLogprobs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of each pair and the loss's own metrics, all of shape [P]."""
        raise NotImplementedError

    @override
    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        assert len(batch.lengths) % 2 == 0, "the trainer cuts no pair in two"
        assert batch.ref_logprobs_N is not None, "the trainer scores the reference when asked"
        # Each sequence is summed by itself, in the order of its tokens, so that the sums don't depend on how
        # the minibatch was cut.
        policy_S = torch.stack([part_N.sum() for part_N in batch.by_sequence(logprobs_N)])
        reference_S = torch.stack([part_N.sum() for part_N in batch.by_sequence(batch.ref_logprobs_N)])
        tokens_S = policy_S.new_tensor(batch.lengths)
        # The two answers of a pair are neighbours, the better one first.
        chosen, rejected = slice(0, None, 2), slice(1, None, 2)
        pairs = PairLogprobs(
            chosen_P=policy_S[chosen],
            rejected_P=policy_S[rejected],
            reference_chosen_P=reference_S[chosen],
            reference_rejected_P=reference_S[rejected],
            chosen_tokens_P=tokens_S[chosen],
            rejected_tokens_P=tokens_S[rejected],
        )
        loss_P, more_metrics = self.pair_loss(pairs)
        metrics = {
            "preference/accuracy": (pairs.margin_P > 0).float(),
            "preference/ranking": (pairs.chosen_P > pairs.rejected_P).float(),
            "preference/reference_ranking": (pairs.reference_chosen_P > pairs.reference_rejected_P).float(),
            "preference/chosen_reward": self.beta * pairs.chosen_ratio_P,
            "preference/rejected_reward": self.beta * pairs.rejected_ratio_P,
            "preference/margin": self.beta * pairs.margin_P,
            **more_metrics,
        }
        means = {name: batch.pair_weight * value_P.detach().sum() for name, value_P in metrics.items()}
        return batch.pair_weight * loss_P.sum(), means


@Objective.register("dpo")
@dataclass(frozen=True, kw_only=True)
class DirectPreference(Preference):
    """Rafailov et al. 2023 (arXiv:2305.18290), eq. 7, with ``z`` the margin over the reference.

    `form` ``sigmoid``: ``L = -(1-s)·log σ(beta·z) - s·log σ(-beta·z)``, s being `label_smoothing`:
    the probability that a pair is the wrong way round (cDPO).
    ``ipo``: ``L = (z - 1/(2·beta))²`` (Azar et al. 2023, arXiv:2310.12036, eq. 17; its τ is our
    `beta`), where z is made of each answer's mean over its tokens. The paper writes sums; TRL reports
    its authors to have said that their results are of means, and does so too.
    """

    form: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0

    def __post_init__(self) -> None:
        if self.form == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing belongs to the form 'sigmoid'; 'ipo' has none")

    @override
    def pair_loss(self, pairs: PairLogprobs) -> tuple[Tensor, dict[str, Tensor]]:
        if self.form == "ipo":
            z_P = (
                pairs.chosen_ratio_P / pairs.chosen_tokens_P
                - pairs.rejected_ratio_P / pairs.rejected_tokens_P
            )
            return (z_P - 1 / (2 * self.beta)).square(), {}
        return log_sigmoid_loss(self.beta * pairs.margin_P, self.label_smoothing), {}


@Objective.register("dpo_positive")
@dataclass(frozen=True, kw_only=True)
class DpoPositive(Preference):
    """DPO-positive (Pal et al. 2024, "Smaug", arXiv:2402.13228, eq. 3): DPO which keeps the better
    answer at least as likely as the reference finds it.

    ``z = (π_a - π_r) - (ref_a - ref_r) - λ·h(ref_a - π_a)``, ``h(x) = max(0, x)``, with λ the
    `positive_penalty`, inside of beta; the loss is DPO's ``sigmoid`` of it.

    At ``x = 0`` the maximum has a kink, and training begins right there, in every pair, with λ (50
    in the VinePPO paper) times the rest of the gradient on one of its sides. Rounding alone, which
    depends on how the work was cut, would choose the side. So the kink is rounded off over
    `penalty_band` nats on both sides, ``h(x) = (x + band)²/(4·band)`` there: half of the penalty's
    slope at a tie, which is what the published code's maximum of two equal tensors passes on, and
    no jump. `h` exceeds the maximum by at most ``band/4``. A band of 0 is the maximum itself, with
    half of the slope at an exact tie.
    """

    beta: Annotated[float, Gt(0)] = 0.1
    """Scale of the margin within the sigmoid."""
    positive_penalty: Annotated[float, Ge(0)] = 50.0
    penalty_band: Annotated[float, Ge(0)] = 0.01
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Probability that a pair is the wrong way round."""

    @override
    def pair_loss(self, pairs: PairLogprobs) -> tuple[Tensor, dict[str, Tensor]]:
        shortfall_P = hinge(pairs.reference_chosen_P - pairs.chosen_P, self.penalty_band)
        z_P = pairs.margin_P - self.positive_penalty * shortfall_P
        loss_P = log_sigmoid_loss(self.beta * z_P, self.label_smoothing)
        return loss_P, {"preference/shortfall": shortfall_P}


def log_sigmoid_loss(scaled_P: Tensor, label_smoothing: float) -> Tensor:
    """Returns ``-(1-s)·log σ(x) - s·log σ(-x)``, element by element."""
    from torch.nn.functional import logsigmoid

    return -(1 - label_smoothing) * logsigmoid(scaled_P) - label_smoothing * logsigmoid(-scaled_P)


def hinge(x_P: Tensor, band: float) -> Tensor:
    """Returns ``max(0, x)``, smoothed so that its slope rises linearly from 0 at -band to 1 at +band."""
    if band == 0:
        # `maximum` gives each of two equal arguments half of the gradient, so the slope at 0 is 1/2 here too.
        return x_P.maximum(x_P.new_zeros(()))
    smoothed_P = (x_P + band).square() / (4 * band)
    return smoothed_P.where(x_P.abs() < band, x_P.clamp(min=0))
