"""The critic at work: a model that learns what states are worth, beside the policy."""

from __future__ import annotations

from torch import Tensor

from treetune.rollouts.critic import CriticSettings
from treetune.trainers.deepspeed_model import DeepSpeedModel
from treetune.trainers.micro_batches import MicroBatch
from treetune.trainers.preparation.tensors import IterationTensors


class Critic:
    """Learns the iteration's returns, in the same micro-batches and steps as the policy."""

    def __init__(self, model: DeepSpeedModel, settings: CriticSettings) -> None:
        self.model, self.settings = model, settings

    def backward(self, batch: MicroBatch, tensors: IterationTensors, weights_N: Tensor) -> dict[str, Tensor]:
        """Accumulates the gradient of a micro-batch's part of the loss; its part of the metrics.

        `weights_N` sum to 1 over the minibatch.
        """
        assert tensors.values_N is not None and tensors.returns_N is not None
        values_N = self.model(batch.inputs)
        old_values_N = tensors.values_N[batch.flat_index_N].to(values_N.device)
        returns_N = tensors.returns_N[batch.flat_index_N].to(values_N.device)
        loss, clipped = value_loss(values_N, old_values_N, returns_N, weights_N, self.settings.value_clip)
        self.model.backward(loss)
        values_N = values_N.detach()
        return {
            "critic/loss": loss.detach(),
            "critic/clip_fraction": clipped,
            "critic/value": (weights_N * values_N).sum(),
            "critic/mse": (weights_N * (values_N - returns_N).square()).sum(),
        }

    def step(self, policy_rate: float, configured_rate: float) -> float:
        """One update at its own rate, which follows the policy's schedule; the gradient's norm."""
        return self.model.step(
            policy_rate * (self.settings.learning_rate or configured_rate) / configured_rate
        )


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, weights_N: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """``½ Σ w·max((V-R)², (clip(V, V_old ± c) - R)²)`` and the share of clipped tokens."""
    squared_N = (values_N - returns_N).square()
    if clip is None:
        return 0.5 * (weights_N * squared_N).sum(), values_N.new_zeros(())
    near_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
    clipped_N = (near_N - returns_N).square()
    fraction = (weights_N * (clipped_N > squared_N)).sum()
    return 0.5 * (weights_N * squared_N.maximum(clipped_N)).sum(), fraction.detach()
