"""Gradients of the experiment's own loss on minibatches of stored episodes, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from treetune.analyzers.gradient_noise import GradientSums
from treetune.analyzers.scoring import batches, logprobs_of, sweep, values_of
from treetune.analyzers.sources import critic_at, policy_at
from treetune.episode_generators.credit.gae import Gae
from treetune.episode_generators.storage import read_episodes
from treetune.models.logprobs import PolicyModule
from treetune.seeds import derived_random
from treetune.trainers.base import DeepSpeedTrainer
from treetune.trainers.batching import Unit
from treetune.trainers.credit import critic_advantages, less_future_penalty, normalised, token_rewards
from treetune.trainers.iteration_tensors import IterationTensors
from treetune.trainers.minibatch import Minibatch, loss_share
from treetune.trainers.objectives.kl import kl_estimate
from treetune.trainers.tokens import Sequences, flat_of_trained, units_of
from treetune.vocabulary import Episode

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
    assert isinstance(settings, DeepSpeedTrainer)
    path = session.directory.iteration(point) / "episodes.arrow"
    episodes = read_episodes(path)
    versions = {episode.policy_version for episode in episodes}
    if versions != {point}:
        raise ValueError(
            f"{path} holds episodes of the policy versions {sorted(versions)}, and not of the weights after"
            f" {point} iterations alone: their gradient at these weights would be another"
        )
    sequences = Sequences.of(episodes)
    objective = settings.objective
    terms = objective.terms if objective.has_terms else None
    policy = PolicyModule(policy_at(session, point), terms=terms)
    loss = Loss(session, point, policy, episodes, sequences)
    order = units_of(episodes, in_pairs=settings.objective.needs_pairs)
    derived_random(seed, point, "gradients").shuffle(order)
    whole = [
        order[start : start + minibatch_size]
        for start in range(0, len(order) - minibatch_size + 1, minibatch_size)
    ][:minibatches]
    sums, rows = GradientSums(minibatch_size), []
    for number, minibatch in enumerate(whole):
        policy.zero_grad(set_to_none=True)
        value = loss.backward(minibatch)
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        sums.add(gradients)
        rows.append(
            {
                "checkpoint": point,
                "episodes": [episodes[i].trajectory for unit in minibatch for i in unit],
                "loss": value,
                "gradient_norm": sum(float(g.double().square().sum()) for g in gradients) ** 0.5,
            }
        )
        progress(number + 1, len(whole))
    return sums, rows


class Loss:
    """The experiment's objective on some of an iteration's episodes, as its first minibatch would
    meet it: with advantages normalised over the whole iteration, and the policy its own old policy.
    """

    def __init__(
        self,
        session: Session,
        point: int,
        policy: PolicyModule,
        episodes: Sequence[Episode],
        sequences: Sequences,
    ) -> None:
        assert isinstance(session.config.trainer, DeepSpeedTrainer)
        self.settings, self.device = session.config.trainer, session.ranks.device
        self.policy, self.sequences = policy, sequences
        self.temperature = session.temperature
        self.tensors = IterationTensors(flat_of_trained(episodes, lambda e: e.behaviour_logprobs))
        objective = self.settings.objective
        if objective.needs_reference:
            self.tensors.reference_N = self._score(PolicyModule(policy_at(session, 0)))
        if objective.needs_advantages:
            advantages_N = normalised(
                self._advantages(session, point, episodes), self.settings.advantage_normalisation
            )
            if objective.advantage_kl_coef > 0:
                advantages_N -= objective.advantage_kl_coef * self._kl()
            self.tensors.advantages_N = advantages_N

    def _kl(self) -> Tensor:
        """The estimate of the KL to the start model at each token."""
        assert self.tensors.reference_N is not None
        estimator = self.settings.objective.kl_estimator
        return kl_estimate(self._score(self.policy), self.tensors.reference_N, estimator)

    def _score(self, policy: PolicyModule) -> Tensor:
        return sweep(
            self.sequences, lambda b: logprobs_of(policy, b, self.temperature)[0], self.settings, self.device
        )

    def _advantages(self, session: Session, point: int, episodes: Sequence[Episode]) -> Tensor:
        objective, starts = self.settings.objective, self.sequences.starts
        penalties_N = None
        if objective.reward_kl_coef > 0:
            penalties_N = objective.reward_kl_coef * self._kl()
        credit = session.config.credit
        if isinstance(credit, Gae):
            critic = critic_at(session, point)
            values_N = sweep(self.sequences, lambda b: values_of(critic, b), self.settings, self.device)
            rewards_N = token_rewards(starts, self.sequences.rewards, penalties_N)
            return critic_advantages(starts, rewards_N, values_N, credit.gamma, credit.lam)[0]
        given_N = flat_of_trained(episodes, lambda e: e.advantages)
        if given_N is None:
            raise ValueError("the objective needs advantages and the stored episodes hold none")
        return given_N if penalties_N is None else less_future_penalty(starts, given_N, penalties_N)

    def backward(self, minibatch: Sequence[Unit]) -> float:
        """Adds the gradient of the mean loss over these sequences to the policy's; the loss."""
        objective = self.settings.objective
        weighted = Minibatch.of(self.sequences, minibatch, objective)
        total = 0.0
        for batch in (
            batches(self.sequences, weighted.units, self.settings, self.device, weighted.whole)
            if weighted.units
            else ()
        ):
            share = loss_share(
                self.policy,
                objective,
                weighted,
                batch,
                self.tensors,
                temperature=self.temperature,
                entropy_coef=objective.entropy_coef,
                device=self.device,
            )
            share.loss.backward()
            total += float(share.loss.detach())
        return total
