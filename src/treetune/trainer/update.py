"""The parts of one optimiser step: a micro-batch's loss, the critic's, and what is kept of the forward
pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetune.models.logprobs import Nucleus
from treetune.objectives.base import Objective, TokenBatch
from treetune.rollouts.base import CriticSettings
from treetune.trainer.base import EntropyTarget
from treetune.trainer.batches import MicroBatch, Minibatch
from treetune.trainer.deepspeed_model import DeepSpeedModel
from treetune.trainer.preparation import IterationTensors
from treetune.trainer.ranks import Ranks
from treetune.trainer.scoring import PolicyScores


def micro_batch_loss(
    policy: Callable[..., Any],
    objective: Objective,
    minibatch: Minibatch,
    batch: MicroBatch,
    tensors: IterationTensors,
    *,
    temperature: float,
    entropy_coef: float,
    device: torch.device,
    nucleus: Nucleus | None = None,
) -> tuple[Tensor, dict[str, Tensor], PolicyScores]:
    """Runs the policy on a micro-batch. Returns its part of the minibatch's loss and of its metrics, and the
    policy's scores of its tokens. The entropy's part of the loss is the same for every objective.
    """
    logprobs_N, entropies_N, *terms = policy(
        batch.inputs,
        temperature,
        entropy_gradient=entropy_coef != 0,
        with_terms=objective.has_terms,
        nucleus=nucleus,
    )
    log_mass_N = None if nucleus is None else terms.pop()

    def at(values_N: Tensor | None) -> Tensor | None:
        """The values of the batch's tokens among the iteration's."""
        return None if values_N is None else values_N[batch.flat_index_N].to(device)

    # Of ranks that run the batch together each has its share of the loss, and a dummy has none.
    tokens = TokenBatch(
        weights_N=minibatch.weights_N[batch.flat_index_N].to(device) * batch.loss_scale,
        lengths=batch.trained_tokens if minibatch.keep_units else (),
        weight_sum=minibatch.weight_sum,
        sequence_weight=minibatch.sequence_weight * batch.loss_scale,
        pair_weight=minibatch.pair_weight * batch.loss_scale,
        advantages_N=at(tensors.advantages_N),
        old_logprobs_N=at(tensors.old_logprobs_N),
        ref_logprobs_N=at(tensors.ref_logprobs_N),
        behaviour_logprobs_N=at(tensors.behaviour_logprobs_N),
        log_mass_N=at(tensors.log_mass_N) if log_mass_N is None else log_mass_N,
        terms=tuple(terms),
    )
    loss, metrics = objective.loss(tokens, logprobs_N)
    # A coefficient of 0 leaves the entropy without a gradient, which costs memory: see
    # `PolicyModule.forward`.
    if entropy_coef:
        loss = loss - entropy_coef * (tokens.weights_N * entropies_N).sum()
    metrics = {"train/loss": loss.detach(), "train/entropy": tokens.mean(entropies_N), **metrics}
    return loss, metrics, PolicyScores(logprobs_N, entropies_N, log_mass_N)


class StepRecorder:
    """Keeps the scores that the forward passes of a step give, before its update. Where it is the iteration's
    only step, they save a pass beforehand; where there are several, ratios are made of them."""

    def __init__(self, n_tokens: int, with_mass: bool) -> None:
        self.columns = [torch.zeros(n_tokens) for _ in range(3 if with_mass else 2)]
        self.added: list[tuple[Tensor, list[Tensor]]] = []  # on their device: no micro-batch waits for them

    def add(self, batch: MicroBatch, scored: PolicyScores) -> None:
        self.added.append((batch.flat_index_N, [one_N.detach() for one_N in scored if one_N is not None]))

    def scored(self, ranks: Ranks) -> PolicyScores:
        """The scores of all ranks' tokens; 0 where no rank ran a token. Collective."""
        for index_N, scores in self.added:
            for column_N, values_N in zip(self.columns, scores, strict=False):
                column_N[index_N] = values_N.cpu()
        logprobs_N, entropies_N, *mass = (ranks.sum(column_N) for column_N in self.columns)
        return PolicyScores(logprobs_N, entropies_N, mass[0] if mass else None)


class CriticTraining:
    """Learns the iteration's returns, in the same micro-batches and steps as the policy."""

    def __init__(self, model: DeepSpeedModel, settings: CriticSettings) -> None:
        self.model, self.settings = model, settings

    def backward(
        self, minibatch: Minibatch, batch: MicroBatch, tensors: IterationTensors
    ) -> dict[str, Tensor]:
        """Accumulates the gradient of a micro-batch's part of the loss, a mean over the minibatch's tokens.
        Returns its part of the metrics."""
        assert tensors.values_N is not None and tensors.returns_N is not None
        values_N = self.model(batch.inputs)
        weights_N, old_values_N, returns_N = (
            each_N[batch.flat_index_N].to(values_N.device)
            for each_N in (minibatch.weights_N, tensors.values_N, tensors.returns_N)
        )
        weights_N = weights_N * batch.loss_scale / minibatch.weight_sum
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
        """Makes one update at its own rate, which follows the policy's schedule; the gradient's norm."""
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
    # Where a value has moved beyond the clip and its loss fell, the clipped loss is the larger, and constant:
    # there is no gradient any more.
    near_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
    clipped_N = (near_N - returns_N).square()
    fraction = (weights_N * (clipped_N > squared_N)).sum()
    return 0.5 * (weights_N * squared_N.maximum(clipped_N)).sum(), fraction.detach()


class EntropyCoefficient:
    """The entropy's coefficient in the next step's loss, `value`. Without a target it never changes."""

    FILE = "entropy.json"

    def __init__(self, start: float, target: EntropyTarget | None) -> None:
        self.start, self.target, self.value = start, target, start

    def observe(self, entropy: float) -> None:
        """Moves it by the entropy of the minibatch that a step was taken on, the same on every rank."""
        if self.target is not None:
            moved = self.value + self.target.rate * (self.target.target - entropy)
            self.value = min(max(moved, self.target.lowest), self.target.highest)

    def save(self, directory: Path) -> None:
        if self.target is not None:
            (directory / self.FILE).write_text(json.dumps({"value": self.value}))

    def load(self, directory: Path) -> None:
        """Raises RuntimeError where the state lacks it."""
        if self.target is None:
            return
        try:
            self.value = json.loads((directory / self.FILE).read_text())["value"]
        except FileNotFoundError as error:
            raise RuntimeError(
                f"{directory} was written without entropy_target: its coefficient is unknown; train from the"
                " beginning, in another directory"
            ) from error
