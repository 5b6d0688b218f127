"""The negative log-likelihood, for supervised fine-tuning and RestEM."""

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
    """The negative log-likelihood ``L = -mean log p(token)``, averaged as `aggregation` says.

    As everywhere in training, log-probs are computed at the rollout's temperature. So answers that the policy
    sampled (RestEM) are trained under the distribution from which they were sampled. Demonstrations come from
    a rollout that doesn't sample, and are trained at temperature 1.

    RestEM in the VinePPO paper has the aggregation ``sequence``.
    """

    aggregation: Aggregation = "token"
    """Weighs every token alike (``token``), every sequence alike (``sequence``), or divides each sequence's
    sum by `constant_length` (``constant``)."""
    constant_length: Annotated[int, Gt(0)] | None = None
    """The divisor of each sequence's sum, with the aggregation ``constant``; null for the others."""

    gives = (StaleAnswers(),)

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.constant_length)

    @override
    def check(self, experiment: Experiment) -> Iterable[Finding]:
        if SampledAnswers() in experiment.rollout.gives and WholeBatch() in experiment.selection.gives:
            yield Finding(
                "the objective imitates every answer that it gets, and this selection keeps all sampled"
                " answers, wrong ones too",
                "$.selection.type",
                "choose the selection 'correct_only', or an objective that learns from advantages",
            )

    @override
    def loss(self, batch: TokenBatch, logprobs_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -(batch.weights_N * logprobs_N).sum(), {}  # the trainer reports every loss
