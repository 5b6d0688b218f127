"""Negative log-likelihood: supervised fine-tuning, and RestEM's step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt
from typing_extensions import override

from treetune.contracts import Experiment, Finding, SampledAnswers, StaleAnswers, WholeBatch
from treetune.objectives.base import Aggregation, Objective, TokenBatch, check_aggregation

if TYPE_CHECKING:
    from torch import Tensor


@Objective.register("mle")
@dataclass(frozen=True, kw_only=True)
class MaximumLikelihood(Objective):
    """``L = -mean log p(token)`` over trained tokens, or over sequences of token means.

    Log-probs are at the rollout's temperature, as everywhere in training: for answers that the
    policy sampled (RestEM) they are those of the distribution that they came from, which below 1
    is sharper than the untempered one. Demonstrations have no rollout that samples: temperature 1.
    RestEM as in the VinePPO paper averages ``sequence`` by sequence.
    """

    aggregation: Aggregation = "token"
    """Weighs every token alike (``token``), every sequence alike (``sequence``), or divides each sequence's
    sum by `constant_length` (``constant``)."""
    constant_length: Annotated[int, Gt(0)] | None = None

    gives = (StaleAnswers(),)

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.constant_length)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if SampledAnswers() in experiment.rollout.gives and WholeBatch() in experiment.selection.gives:
            yield Finding(
                "the objective imitates every answer that it is given, and all that the policy samples are"
                " kept, wrong ones too",
                "$.selection.type",
                "choose the selection 'correct_only', or an objective that learns from advantages",
            )

    @override
    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -(batch.weights_N * logprobs_N).sum(), {}  # the trainer reports every loss
