"""What is known of an iteration's tokens before it is trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from treetune.trainers.objectives.kl import kl_estimate
from treetune.trainers.scoring import Scored
from treetune.trainers.tokens import flat_of_trained
from treetune.vocabulary import Episode, Metrics


@dataclass
class IterationTensors:
    """What is known of each of the iteration's N trained tokens before the first update: float32 on the CPU.

    The first two come with the episodes; the stages of preparation fill in what the method needs of the rest.
    """

    behaviour_logprobs_N: Tensor | None
    """The engine's, of the distribution that was sampled from."""
    credit_advantages_N: Tensor | None = None
    """As credit gave them, before penalties and normalisation; None where it leaves them to the critic."""
    ref_logprobs_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    """The policy's before the first update, of whole distributions."""
    entropies_N: Tensor | None = None
    """Of the same distributions."""
    log_mass_N: Tensor | None = None
    """Of what top-p and top-k leave of these, where they cut anything."""
    old_logprobs_mask_N: Tensor | None = None
    """Where `old_logprobs_N` are known, bool; None: everywhere."""
    kl_penalties_N: Tensor | None = None
    """What each token's reward is less by."""
    values_N: Tensor | None = None
    """The critic's, of the state before each token."""
    returns_N: Tensor | None = None
    """What the critic learns."""
    advantages_N: Tensor | None = None
    """As the objective gets them."""

    @staticmethod
    def of(episodes: Iterable[Episode]) -> IterationTensors:
        return IterationTensors(
            flat_of_trained(episodes, lambda e: e.behaviour_logprobs),
            flat_of_trained(episodes, lambda e: e.advantages),
        )

    def take(self, scored: Scored) -> None:
        """What the policy says before the first update."""
        self.old_logprobs_N, self.entropies_N, self.log_mass_N = scored

    def token_metrics(self) -> Metrics:
        """Of advantages and returns, where there are any."""
        metrics: Metrics = {}
        if self.advantages_N is not None:
            metrics["train/advantage_mean"] = float(self.advantages_N.mean())
            metrics["train/advantage_abs"] = float(self.advantages_N.abs().mean())
        if self.returns_N is not None:
            metrics["critic/return"] = float(self.returns_N.mean())
        return metrics

    def gap_N(self) -> Tensor | None:
        """The trainer's log-probs minus the engine's, of what it sampled from; None without the engine's.

        The engine's log-probs are of the distribution that it sampled from: at the temperature, cut by top-p
        and top-k, and made to sum to 1 again. The trainer's are of the whole distribution, so that they are
        cut alike before the two are compared.
        """
        assert self.old_logprobs_N is not None
        if self.behaviour_logprobs_N is None:
            return None
        gap_N = self.old_logprobs_N - self.behaviour_logprobs_N
        return gap_N if self.log_mass_N is None else gap_N - self.log_mass_N

    def gap_metrics(self) -> Metrics:
        """How far the trainer is from the engine that sampled (`gap_N`), and from the reference.

        ``engine/nucleus_log_mass`` is the mean of what the engine's distributions are cut by.
        """
        assert self.old_logprobs_N is not None
        metrics: Metrics = {}
        known = slice(None) if self.old_logprobs_mask_N is None else self.old_logprobs_mask_N
        gap_N = self.gap_N()
        if gap_N is not None:
            if self.log_mass_N is not None:
                metrics["engine/nucleus_log_mass"] = float(self.log_mass_N[known].mean())
            gap_N = gap_N[known].abs()
            metrics["engine/logprob_gap_mean"] = float(gap_N.mean())
            metrics["engine/logprob_gap_max"] = float(gap_N.max())
        if self.ref_logprobs_N is not None:
            kl_N = kl_estimate(self.old_logprobs_N, self.ref_logprobs_N, "k3")
            metrics["train/kl"] = float(kl_N[known].mean())
        return metrics
