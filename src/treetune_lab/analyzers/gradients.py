"""Gradients of the experiment's own loss on minibatches of stored episodes, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treetune.rollouts.base import Credit
from treetune.rollouts.credit.gae import Gae
from treetune.rollouts.storage import read_episodes
from treetune.seeds import derived_random
from treetune.trainers.base import Trainer
from treetune.trainers.batching import Unit
from treetune.trainers.minibatch import Minibatch, micro_batch_loss
from treetune.trainers.preparation.stages import preparation, prepare
from treetune.trainers.preparation.tensors import IterationTensors
from treetune.trainers.tokens import Sequences, units_of
from treetune.vocabulary import Episode
from treetune_lab.analyzers.gradient_noise import GradientSums
from treetune_lab.analyzers.scoring import StoredModels

if TYPE_CHECKING:
    from treetune.runtime.session import Session


def gradient_sums(
    session: Session,
    point: int,
    minibatch_size: int,
    minibatches: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[GradientSums, list[dict[str, Any]]]:
    """Sums over minibatches of the episodes of iteration `point`, and one row for each minibatch.

    Raises ValueError where the episodes were not sampled by the weights after `point` iterations.
    """
    settings = session.config.trainer
    path = session.directory.iteration(point) / "episodes.arrow"
    episodes = read_episodes(path)
    versions = {episode.policy_version for episode in episodes}
    if versions != {point}:
        raise ValueError(
            f"{path} holds episodes of the policy versions {sorted(versions)}, and not of the weights after"
            f" {point} iterations alone: their gradient at these weights would be another"
        )
    sequences = Sequences.of(episodes)
    models = StoredModels(session, point, session.temperature)
    loss = Loss(models, settings, session.config.credit, episodes, sequences)
    order = units_of(episodes, in_pairs=settings.objective.needs_pairs)
    derived_random(seed, point, "gradients").shuffle(order)
    chosen = [
        order[start : start + minibatch_size]
        for start in range(0, len(order) - minibatch_size + 1, minibatch_size)
    ][:minibatches]
    sums, rows = GradientSums(minibatch_size), []
    for number, minibatch in enumerate(chosen):
        models.policy.zero_grad(set_to_none=True)
        value = loss.backward(minibatch)
        gradients = [p.grad for p in models.policy.parameters() if p.grad is not None]
        sums.add(gradients)
        rows.append(
            {
                "checkpoint": point,
                "episodes": [episodes[i].trajectory for unit in minibatch for i in unit],
                "loss": value,
                "gradient_norm": sum(float(g.double().square().sum()) for g in gradients) ** 0.5,
            }
        )
        progress(number + 1, len(chosen))
    return sums, rows


class Loss:
    """The experiment's objective on some of an iteration's episodes, as its first minibatch would
    meet it: with advantages normalised over the whole iteration, and the policy its own old policy.
    """

    def __init__(
        self,
        models: StoredModels,
        settings: Trainer,
        credit: Credit,
        episodes: Sequence[Episode],
        sequences: Sequences,
    ) -> None:
        self.models, self.settings, self.sequences = models, settings, sequences
        gae = credit if isinstance(credit, Gae) else None
        stages = preparation(replace(settings, measure_kl=False), gae, several_steps=False)
        self.tensors = prepare(stages, IterationTensors.of(episodes), sequences, models)
        self.tensors.old_logprobs_N = None  # the ratio is 1, and not 1 up to rounding

    def backward(self, members: Sequence[Unit]) -> float:
        """Adds the gradient of the mean loss over these sequences to the policy's; the loss."""
        objective, scorer = self.settings.objective, self.models.scorer
        minibatch = Minibatch.of(self.sequences, members, objective)
        total = 0.0
        if not minibatch.units:
            return total
        for batch in scorer.micro_batches(self.sequences, minibatch.units, keep_units=minibatch.keep_units):
            part = micro_batch_loss(
                self.models.policy,
                objective,
                minibatch,
                batch,
                self.tensors,
                temperature=scorer.temperature,
                entropy_coef=objective.entropy_coef,
                device=scorer.ranks.device,
            )
            part.loss.backward()
            total += float(part.loss.detach())
        return total
