"""Losses over pairs of answers to one problem: DPO, IPO, DPO-positive, KTO, SimPO and ORPO.

They use the log-probs of whole answers, which are sums over the answers' trained tokens, at the rollout's
temperature.
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
    """The log-probs of both answers of P pairs. Each field has the shape [P]."""

    chosen_P: Tensor
    """The policy's log-prob of the better answer, summed over its trained tokens."""
    rejected_P: Tensor
    """The same for the worse answer."""
    reference_chosen_P: Tensor
    """The reference's log-prob of the better answer, without gradient; 0 for a loss without a reference."""
    reference_rejected_P: Tensor
    """The same for the worse answer."""
    chosen_tokens_P: Tensor
    """The number of trained tokens of the better answer."""
    rejected_tokens_P: Tensor
    """The same for the worse answer."""

    @property
    def chosen_mean_P(self) -> Tensor:
        """The policy's mean log-prob of a token of the better answer."""
        return self.chosen_P / self.chosen_tokens_P

    @property
    def rejected_mean_P(self) -> Tensor:
        return self.rejected_P / self.rejected_tokens_P

    @property
    def chosen_ratio_P(self) -> Tensor:
        """The better answer's log-prob under the policy minus that under the reference."""
        return self.chosen_P - self.reference_chosen_P

    @property
    def rejected_ratio_P(self) -> Tensor:
        """The same for the worse answer."""
        return self.rejected_P - self.reference_rejected_P

    @property
    def margin_P(self) -> Tensor:
        """The margin over the reference, in nats: how much more the policy prefers the better answer than the
        reference does."""
        return self.chosen_ratio_P - self.rejected_ratio_P


@dataclass(frozen=True, kw_only=True)
class Preference(Objective):
    """A base class of losses that are the mean of `pair_loss` over pairs. It also computes their metrics:

    =============================  =================================================================
    preference/accuracy            the share of pairs whose margin over the reference is above 0;
                                   0 before the first update
    preference/ranking             the share of pairs whose better answer is more likely under the policy
    preference/reference_ranking   the same under the reference
    preference/chosen_reward       the implicit reward ``beta·(log p - log p_ref)`` of the better answer
    preference/rejected_reward     the same of the worse answer
    preference/margin              the difference of these rewards
    =============================  =================================================================

    For a loss without a reference, the implicit reward is ``beta`` times the mean log-prob of the answer's
    tokens, the accuracy is the share of pairs whose difference of these rewards is above 0, and
    ``preference/reference_ranking`` is missing.
    """

    beta: Annotated[float, Gt(0)] = 0.1
    """The factor of the log ratio to the reference in the implicit reward."""

    aggregation = "sequence"
    needs_reference = True
    needs_whole_sequences = True

    gives = (UseOfPairs(), StaleAnswers())

    @property
    @override
    def needs(self) -> tuple[Need, ...]:
        return (Need(Pairs(), "it compares answers in pairs"),)

    def pair_loss(self, pairs: PairLogprobs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of each pair, and further metrics of each pair by name, all of shape [P]."""
        raise NotImplementedError

    @override
    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        assert len(batch.lengths) % 2 == 0, "the trainer cuts no pair in two"
        # _S: one entry for each sequence. Each sequence is summed by itself, in the order of its tokens, so
        # that rounding doesn't depend on how the minibatch was cut.
        policy_S = torch.stack([logprobs_T.sum() for logprobs_T in batch.by_sequence(logprobs_N)])
        if self.needs_reference:
            assert batch.ref_logprobs_N is not None, "the trainer scores the reference when asked"
            reference_sequences = batch.by_sequence(batch.ref_logprobs_N)
            reference_S = torch.stack([logprobs_T.sum() for logprobs_T in reference_sequences])
        else:
            reference_S = torch.zeros_like(policy_S)  # fills `PairLogprobs`; not read without a reference
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
        metrics = self._pair_metrics(pairs) | more_metrics
        # `pair_weight` is 1 / the number of the minibatch's pairs.
        means = {name: batch.pair_weight * value_P.detach().sum() for name, value_P in metrics.items()}
        return batch.pair_weight * loss_P.sum(), means

    def _pair_metrics(self, pairs: PairLogprobs) -> dict[str, Tensor]:
        """Returns the metrics of each pair that the class's docstring lists, all of shape [P]."""
        ranking_P = (pairs.chosen_P > pairs.rejected_P).float()
        if not self.needs_reference:
            margin_P = pairs.chosen_mean_P - pairs.rejected_mean_P
            return {
                "preference/accuracy": (margin_P > 0).float(),
                "preference/ranking": ranking_P,
                "preference/chosen_reward": self.beta * pairs.chosen_mean_P,
                "preference/rejected_reward": self.beta * pairs.rejected_mean_P,
                "preference/margin": self.beta * margin_P,
            }
        return {
            "preference/accuracy": (pairs.margin_P > 0).float(),
            "preference/ranking": ranking_P,
            "preference/reference_ranking": (pairs.reference_chosen_P > pairs.reference_rejected_P).float(),
            "preference/chosen_reward": self.beta * pairs.chosen_ratio_P,
            "preference/rejected_reward": self.beta * pairs.rejected_ratio_P,
            "preference/margin": self.beta * pairs.margin_P,
        }


@Objective.register("dpo")
@dataclass(frozen=True, kw_only=True)
class DirectPreference(Preference):
    """DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). Below, z is the margin over the reference.

    With the `form` ``sigmoid``, ``L = -(1-s)·log σ(beta·z) - s·log σ(-beta·z)``, where s is
    `label_smoothing`.

    With ``ipo``, ``L = (z - 1/(2·beta))²`` (Azar et al. 2023, arXiv:2310.12036, eq. 17; its τ is `beta`
    here). In this form, z is computed from the mean log ratio of each answer's tokens. The paper has sums in
    place of means, but TRL reports that the authors' results come from means, and uses means too.
    """

    form: Literal["sigmoid", "ipo"] = "sigmoid"
    """The formula of the loss: DPO's (``sigmoid``) or IPO's (``ipo``), see above."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """s: the assumed probability that a pair is labelled the wrong way round, and its worse answer is the
    better one (cDPO)."""

    def __post_init__(self) -> None:
        if self.form == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing belongs to the form 'sigmoid'; 'ipo' has none")

    @override
    def pair_loss(self, pairs: PairLogprobs) -> tuple[Tensor, dict[str, Tensor]]:
        if self.form == "ipo":
            # IPO compares the mean log ratios of tokens, so the length of an answer doesn't count.
            mean_chosen_ratio_P = pairs.chosen_ratio_P / pairs.chosen_tokens_P
            mean_rejected_ratio_P = pairs.rejected_ratio_P / pairs.rejected_tokens_P
            z_P = mean_chosen_ratio_P - mean_rejected_ratio_P
            return (z_P - 1 / (2 * self.beta)).square(), {}
        return log_sigmoid_loss(self.beta * pairs.margin_P, self.label_smoothing), {}


@Objective.register("dpo_positive")
@dataclass(frozen=True, kw_only=True)
class DpoPositive(Preference):
    """DPO-positive (Pal et al. 2024, "Smaug", arXiv:2402.13228, eq. 3): DPO with a penalty if the better
    answer becomes less likely than under the reference.

    The loss is that of `dpo` with the `form` ``sigmoid``, but the penalty is subtracted from the margin z::

        z = (log p(a) - log p(r)) - (log ref(a) - log ref(r)) - λ·h(log ref(a) - log p(a))

    Here a is the better answer, r the worse one, p the policy, ref the reference, λ `positive_penalty`, and
    ``h(x) = max(0, x)`` in the paper.

    Before the first update, the argument of h is 0 for every pair, and the paper's h has a kink at 0. On one
    side of the kink, the penalty's gradient is λ times (50 times in the VinePPO paper) as large as the rest
    of the gradient; on the other side it is 0. Rounding errors, which depend on how a batch was split, would
    choose the side. So h is smooth here: ``h(x) = (x + band)²/(4·band)`` between -band and +band, where band
    is `penalty_band`, in nats. Its slope at 0 is 1/2, which is also the gradient that the paper's published
    code gets from PyTorch's maximum of two equal numbers. This h is larger than ``max(0, x)`` by at most
    ``band/4``. With a band of 0, h is ``max(0, x)``, with a slope of 1/2 at exactly 0.
    """

    beta: Annotated[float, Gt(0)] = 0.1
    """The factor of the margin in the sigmoid."""
    positive_penalty: Annotated[float, Ge(0)] = 50.0
    """λ, the factor of the penalty."""
    penalty_band: Annotated[float, Ge(0)] = 0.01
    """The half-width of the interval around 0 in which h is smoothed, in nats."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """The assumed probability that a pair is labelled the wrong way round, and its worse answer is the better
    one (cDPO)."""

    @override
    def pair_loss(self, pairs: PairLogprobs) -> tuple[Tensor, dict[str, Tensor]]:
        shortfall_P = hinge(pairs.reference_chosen_P - pairs.chosen_P, self.penalty_band)
        z_P = pairs.margin_P - self.positive_penalty * shortfall_P
        loss_P = log_sigmoid_loss(self.beta * z_P, self.label_smoothing)
        return loss_P, {"preference/shortfall": shortfall_P}


@Objective.register("kto")
@dataclass(frozen=True, kw_only=True)
class KahnemanTversky(Preference):
    """KTO (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8): each answer is compared with a reference point,
    and not with the other answer of its pair.

    With r = log p - log p_ref of an answer and z the `reference_point`, the loss is the mean over answers of
    ``w·(1 - σ(beta·(r - z)))`` for a better answer, and of ``w·(1 - σ(beta·(z - r)))`` for a worse one. The
    gradient of an answer vanishes once its r is far from z in the right direction, even if that of the other
    answer of its pair is not.

    In the paper z is the KL of policy and reference, estimated in each minibatch from answers to other
    problems. This trainer does not score such answers, so z is a constant here. With z = 0, its value before
    the first update, the loss is APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266). It is also KTOZero
    in the code of KTO's authors, who advise against it.
    """

    desirable_weight: Annotated[float, Gt(0)] = 1.0
    """w of the better answers. There are as many better answers as worse ones, since they come in pairs."""
    undesirable_weight: Annotated[float, Gt(0)] = 1.0
    """w of the worse answers."""
    reference_point: Annotated[float, Ge(0)] = 0.0
    """z, in nats."""

    @override
    def pair_loss(self, pairs: PairLogprobs) -> tuple[Tensor, dict[str, Tensor]]:
        chosen_value_P = (self.beta * (pairs.chosen_ratio_P - self.reference_point)).sigmoid()
        rejected_value_P = (self.beta * (self.reference_point - pairs.rejected_ratio_P)).sigmoid()
        chosen_loss_P = self.desirable_weight * (1 - chosen_value_P)
        rejected_loss_P = self.undesirable_weight * (1 - rejected_value_P)
        return (chosen_loss_P + rejected_loss_P) / 2, {}


@Objective.register("simpo")
@dataclass(frozen=True, kw_only=True)
class SimplePreference(Preference):
    """SimPO (Meng et al. 2024, arXiv:2405.14734, eq. 6): ``-log σ(beta·(m_a - m_r) - gamma)``, where m is the
    mean log-prob of an answer's tokens, a the better answer and r the worse one. It needs no reference.

    A longer answer has a smaller sum of log-probs, so its length would count against it. With means it
    doesn't.
    """

    beta: Annotated[float, Gt(0)] = 2.0
    """The factor of ``m_a - m_r``. Means are smaller than the sums of DPO, so this is larger than DPO's
    `beta`."""
    gamma: Annotated[float, Ge(0)] = 1.0
    """The margin that ``beta·(m_a - m_r)`` should have; the paper recommends about half of `beta`."""

    needs_reference = False

    @override
    def pair_loss(self, pairs: PairLogprobs) -> tuple[Tensor, dict[str, Tensor]]:
        margin_P = self.beta * (pairs.chosen_mean_P - pairs.rejected_mean_P)
        return log_sigmoid_loss(margin_P - self.gamma, label_smoothing=0.0), {}


@Objective.register("orpo")
@dataclass(frozen=True, kw_only=True)
class OddsRatio(Preference):
    """ORPO (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7): ``-m_a - beta·log σ(log odds_a - log odds_r)``,
    which is the negative log-likelihood of the better answer plus a loss of the ratio of the two answers'
    odds. It needs no reference.

    m is the mean log-prob of an answer's tokens, a the better answer and r the worse one, and
    ``odds = e^m / (1 - e^m)``.
    """

    beta: Annotated[float, Gt(0)] = 0.1
    """The weight of the loss of the odds ratio; λ in the paper."""

    needs_reference = False

    @override
    def pair_loss(self, pairs: PairLogprobs) -> tuple[Tensor, dict[str, Tensor]]:
        log_odds_ratio_P = log_odds(pairs.chosen_mean_P) - log_odds(pairs.rejected_mean_P)
        odds_loss_P = log_sigmoid_loss(log_odds_ratio_P, label_smoothing=0.0)
        loss_P = -pairs.chosen_mean_P + self.beta * odds_loss_P
        return loss_P, {"preference/log_odds_ratio": log_odds_ratio_P}


LARGEST_LOG_PROBABILITY = -1e-6
"""The largest log-prob of which odds are computed, since a probability of 1 has infinite odds."""


def log_odds(logprob_P: Tensor) -> Tensor:
    """Returns ``log(p / (1 - p))``, given ``log p``. Probabilities above e^(-1e-6) count as e^(-1e-6)."""
    bounded_P = logprob_P.clamp(max=LARGEST_LOG_PROBABILITY)
    # 1 - e^x is exact as -expm1(x), also near x = 0.
    return bounded_P - (-bounded_P.expm1()).log()


def log_sigmoid_loss(scaled_P: Tensor, label_smoothing: float) -> Tensor:
    """Returns ``-(1-s)·log σ(x) - s·log σ(-x)``, element by element."""
    from torch.nn.functional import logsigmoid

    return -(1 - label_smoothing) * logsigmoid(scaled_P) - label_smoothing * logsigmoid(-scaled_P)


def hinge(x_P: Tensor, band: float) -> Tensor:
    """Returns ``max(0, x)``, smoothed so that its slope rises linearly from 0 at -band to 1 at +band."""
    if band == 0:
        # PyTorch's `maximum` gives each of two equal arguments half of the gradient, so the slope at 0 is 1/2
        # here, too.
        return x_P.maximum(x_P.new_zeros(()))
    smoothed_P = (x_P + band).square() / (4 * band)
    return smoothed_P.where(x_P.abs() < band, x_P.clamp(min=0))
