"""What is known of an iteration's tokens before it is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from treetune.trainers.objectives.kl import kl_estimate
from treetune.vocabulary import Metrics


@dataclass
class IterationTensors:
    """What is known of each of the iteration's N trained tokens before the first update."""

    behaviour_N: Tensor | None
    advantages_N: Tensor | None = None
    worth_N: Tensor | None = None
    """Whether the credit gave an advantage other than 0, before penalties and normalisation; None of a
    critic's."""
    old_N: Tensor | None = None
    reference_N: Tensor | None = None
    values_N: Tensor | None = None
    returns_N: Tensor | None = None
    known_N: Tensor | None = None
    """Where `old_N` is known; None: everywhere."""

    def token_metrics(self) -> Metrics:
        """Of advantages and returns, where there are any."""
        metrics: Metrics = {}
        if self.advantages_N is not None:
            metrics["train/advantage_mean"] = float(self.advantages_N.mean())
            metrics["train/advantage_abs"] = float(self.advantages_N.abs().mean())
        if self.returns_N is not None:
            metrics["critic/return"] = float(self.returns_N.mean())
        return metrics

    def gap_metrics(self) -> Metrics:
        """How far the trainer is from the engine that sampled, and from the reference."""
        assert self.old_N is not None
        metrics: Metrics = {}
        known = slice(None) if self.known_N is None else self.known_N
        if self.behaviour_N is not None:
            gap_N = (self.old_N - self.behaviour_N).abs()[known]
            metrics["engine/logprob_gap_mean"] = float(gap_N.mean())
            metrics["engine/logprob_gap_max"] = float(gap_N.max())
        if self.reference_N is not None:
            metrics["train/kl"] = float(kl_estimate(self.old_N, self.reference_N, "k3")[known].mean())
        return metrics
