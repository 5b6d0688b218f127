"""Computes the losses of a micro-batch, for the policy and the critic, and keeps the log-probs that its
forward pass gave.

An optimiser step accumulates the gradients of its micro-batches::

    for each micro-batch:   policy forward  ──►  loss  ──►  backward
                                 └──►  log-probs and entropies, which `StepRecorder` keeps
                            critic forward  ──►  value loss  ──►  backward     (`CriticTraining`)
    policy.step(), critic.step()
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetune.credit.base import CriticSettings
from treetune.credit.critic_losses import CriticLoss, SquaredError
from treetune.models.logprobs import Nucleus
from treetune.objectives.base import Objective, TokenBatch
from treetune.objectives.further_inputs import DistributionObjective, TeacherObjective
from treetune.trainer.base import EntropyTarget
from treetune.trainer.batches import MicroBatch, Minibatch
from treetune.trainer.deepspeed_model import DeepSpeedModel
from treetune.trainer.preparation import IterationTensors
from treetune.trainer.ranks import Ranks
from treetune.trainer.scoring import PolicyScores
from treetune.trainer.teacher import TeacherModel


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
    teacher: TeacherModel | None = None,
) -> tuple[Tensor, dict[str, Tensor], PolicyScores]:
    """Runs the policy on a micro-batch, and computes the loss.

    Args:
        policy: The policy's `PolicyModule`, or an engine that is called like it.
        tensors: The tensors of the iteration, which have the values of the micro-batch's tokens.
        entropy_coef: The factor of the entropy bonus: the tokens' entropies, weighted by
            `Minibatch.weights_N`, are summed, and the sum is subtracted from the loss.
        nucleus: The cut by top-p and top-k whose mass is computed, too; None for none.
        teacher: The objective's teacher, which runs over the same rows; None for none.

    Returns:
        The micro-batch's part of the minibatch's loss, its part of the metrics, and the policy's scores of
        its N trained tokens.
    """
    # The teacher's pass comes first, and keeps only its last hidden states.
    teacher_states = None
    if teacher is not None:
        assert isinstance(objective, TeacherObjective), "the teacher is the objective's"
        teacher_states = teacher.states(batch, objective.compare)
    logprobs_N, entropies_N, *terms = policy(
        batch.inputs,
        temperature,
        entropy_gradient=entropy_coef != 0,
        with_terms=isinstance(objective, DistributionObjective),
        nucleus=nucleus,
        teacher=teacher_states,
    )
    # The terms are what the objective's loss needs besides: numbers that depend on the whole distributions.
    # With a nucleus (a cut of the distribution by top-p and top-k), the last item is the log mass: the log of
    # the summed probability of the tokens that the cut leaves.
    log_mass_N = None if nucleus is None else terms.pop()

    def of_batch(values_N: Tensor | None) -> Tensor | None:
        """Selects the values of the micro-batch's tokens from those of all tokens of the iteration."""
        return None if values_N is None else values_N[batch.flat_index_N].to(device)

    # `loss_scale` is 0 for a dummy micro-batch, which only keeps ranks in step; else it is
    # 1 / (number of ranks that share this micro-batch).
    tokens = TokenBatch(
        weights_N=minibatch.weights_N[batch.flat_index_N].to(device) * batch.loss_scale,
        # Without `keep_units`, rows of a sequence may be in other micro-batches, and its length isn't known.
        lengths=batch.trained_tokens if minibatch.keep_units else (),
        weight_sum=minibatch.weight_sum,
        sequence_weight=minibatch.sequence_weight * batch.loss_scale,
        pair_weight=minibatch.pair_weight * batch.loss_scale,
        advantages_N=of_batch(tensors.advantages_N),
        old_logprobs_N=of_batch(tensors.old_logprobs_N),
        ref_logprobs_N=of_batch(tensors.ref_logprobs_N),
        ref_kl_N=of_batch(tensors.ref_kl_N),
        own_advantages_N=of_batch(tensors.own_advantages_N),
        has_teacher_N=of_batch(tensors.has_teacher_N),
        behaviour_logprobs_N=of_batch(tensors.behaviour_logprobs_N),
        # If this pass computes no log mass, that of the scores before the first step is used.
        log_mass_N=of_batch(tensors.log_mass_N) if log_mass_N is None else log_mass_N,
        marked_N=of_batch(minibatch.marked_N),
        terms=tuple(terms),
    )
    loss, metrics = objective.loss(tokens, logprobs_N)
    # The entropy has a gradient only if the coefficient isn't 0, since the gradient costs memory; see
    # `PolicyModule.forward`.
    if entropy_coef:
        loss = loss - entropy_coef * (tokens.weights_N * entropies_N).sum()
    metrics = {"train/loss": loss.detach(), "train/entropy": tokens.mean(entropies_N), **metrics}
    return loss, metrics, PolicyScores(logprobs_N, entropies_N, log_mass_N)


class StepRecorder:
    """Keeps the scores that a step's forward passes give, which are those of the weights before its update.

    In an iteration with a single step, the recorded log-probs are the old ones, so no other pass has to
    compute these. In an iteration with several steps, they show how far each token's probability has moved
    from the old one.
    """

    def __init__(self, n_tokens: int, with_mass: bool) -> None:
        # With `with_mass`, the scores include the log mass: the log of the probability that remains after a
        # cut by top-p and top-k.
        self._n_tokens, self._with_mass = n_tokens, with_mass
        self._recorded: list[tuple[Tensor, list[Tensor]]] = []
        """For each micro-batch, the indices of its tokens in the flat tensors, and its scores. Scores stay on
        their device until the end of the step, since each copy to the CPU would make the next micro-batch
        wait."""

    def add(self, batch: MicroBatch, scored: PolicyScores) -> None:
        columns = [column_N.detach() for column_N in scored if column_N is not None]
        self._recorded.append((batch.flat_index_N, columns))

    def all_scores(self, ranks: Ranks) -> PolicyScores:
        """Returns the scores of all tokens of the iteration, on every rank; 0 for tokens that no micro-batch
        had. Collective."""
        # The columns are the log-probs, the entropies and, with a nucleus (a cut by top-p or top-k), the log
        # masses: the log of the summed probability of the tokens that the cut leaves.
        n_columns = 3 if self._with_mass else 2
        all_columns = [torch.zeros(self._n_tokens) for _ in range(n_columns)]
        for index_N, columns in self._recorded:
            for all_N, column_N in zip(all_columns, columns, strict=True):
                all_N[index_N] = column_N.cpu()
        # A token's scores come from one rank, and are 0 on the other ranks.
        logprobs_N, entropies_N, *mass = (ranks.sum(column_N) for column_N in all_columns)
        return PolicyScores(logprobs_N, entropies_N, mass[0] if mass else None)


class CriticTraining:
    """Trains the critic on the iteration's returns, in the same steps as the policy. The micro-batches are
    the policy's, too, unless the critic has prompts of its own."""

    def __init__(self, model: DeepSpeedModel, settings: CriticSettings) -> None:
        self.model, self.settings = model, settings

    def backward(
        self, minibatch: Minibatch, batch: MicroBatch, tensors: IterationTensors
    ) -> dict[str, Tensor]:
        """Accumulates the gradient of a micro-batch's part of the loss, and returns the micro-batch's part of
        the metrics. The loss is a mean over the minibatch's tokens."""
        assert tensors.values_N is not None and tensors.returns_N is not None
        # The K outputs of the critic's head for each token. The loss says how to read values from them.
        outputs_NK = self.model(batch.inputs, with_outputs=True)
        index_N, device = batch.flat_index_N, outputs_NK.device
        old_values_N = tensors.values_N[index_N].to(device)
        returns_N = tensors.returns_N[index_N].to(device)
        # Over all micro-batches of all ranks, these weights add up to 1: `loss_scale` is 0 for a dummy, and
        # 1 / (number of ranks) for a micro-batch that ranks compute together. Loss and metrics are both
        # summed over micro-batches and ranks, and become means over the minibatch's tokens.
        weights_N = minibatch.weights_N[index_N].to(device)
        weights_N = weights_N * batch.loss_scale / minibatch.weight_sum
        loss, clipped = self.settings.loss.loss(
            outputs_NK, returns_N, weights_N, old_values_N, self.settings.value_clip
        )
        self.model.backward(loss)
        values_N = self.settings.loss.values(outputs_NK.detach())
        return {
            "critic/loss": loss.detach(),
            "critic/clip_fraction": clipped,
            "critic/value": (weights_N * values_N).sum(),
            "critic/mse": (weights_N * (values_N - returns_N).square()).sum(),
        }

    def step(self, policy_rate: float, configured_policy_rate: float) -> float:
        """Makes one update, and returns the norm of the gradient.

        The critic's own learning rate follows the policy's schedule: it is multiplied by
        ``policy_rate / configured_policy_rate``.

        Args:
            policy_rate: The policy's learning rate for this step.
            configured_policy_rate: The policy's learning rate before the schedule. The critic has the same
                rate if its settings give none.
        """
        critic_rate = self.settings.learning_rate or configured_policy_rate
        return self.model.step(policy_rate * critic_rate / configured_policy_rate)


CRITIC_LOSS_FILE = "critic_loss.json"
"""The file in the folder of a trainer's state that has the settings of the critic's loss. If the file is
missing, the loss is the squared error."""


def write_critic_loss(directory: Path, loss: CriticLoss) -> None:
    """Writes the settings of the critic's loss, which say what the outputs of the critic's head mean. Writes
    no file for the squared error."""
    if loss != SquaredError():
        (directory / CRITIC_LOSS_FILE).write_text(json.dumps(_settings_of(loss)))


def refuse_other_critic_loss(directory: Path, loss: CriticLoss) -> None:
    """Raises ValueError if the stored state is that of a critic with another loss.

    Its head then has another number of outputs, or was trained for other targets.
    """
    file = directory / CRITIC_LOSS_FILE  # not written for the squared error
    stored = json.loads(file.read_text()) if file.is_file() else _settings_of(SquaredError())
    configured = _settings_of(loss)
    if stored != configured:
        raise ValueError(
            f"{directory} holds a critic with the loss {json.dumps(stored)}, and the configured loss is"
            f" {json.dumps(configured)}. The stored head was trained for the first: set the critic's loss to"
            " the stored one, or train from the beginning, in another directory"
        )


def _settings_of(loss: CriticLoss) -> dict[str, Any]:
    """Returns the loss as a configuration writes it, with all keys."""
    assert dataclasses.is_dataclass(loss), "parts are dataclasses"
    return {"type": loss.registered_name(), **dataclasses.asdict(loss)}


class EntropyCoefficient:
    """The coefficient (`value`) of the entropy in the next step's loss. Without a target it is constant."""

    FILE = "entropy.json"

    def __init__(self, start: float, target: EntropyTarget | None) -> None:
        self.start, self.target, self.value = start, target, start

    def observe(self, entropy: float) -> None:
        """Adjusts the coefficient to the mean entropy of the last step's minibatch, which is the same on
        every rank."""
        if self.target is None:
            return
        settings = self.target
        wanted_entropy = settings.target
        new_value = self.value + settings.rate * (wanted_entropy - entropy)
        self.value = min(max(new_value, settings.lowest), settings.highest)

    def save(self, directory: Path) -> None:
        if self.target is not None:
            (directory / self.FILE).write_text(json.dumps({"value": self.value}))

    def load(self, directory: Path) -> None:
        """Takes over the coefficient that `save` has written. Without a target, none was written.

        Raises RuntimeError if the directory has no coefficient.
        """
        if self.target is None:
            return
        try:
            self.value = json.loads((directory / self.FILE).read_text())["value"]
        except FileNotFoundError as error:
            raise RuntimeError(
                f"{directory} was written without entropy_target: its coefficient is unknown; train from the"
                " beginning, in another directory"
            ) from error
