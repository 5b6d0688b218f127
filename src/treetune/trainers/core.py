"""The trainer at work: from an iteration's episodes to new weights, the same for every method."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treetune.episode_generators.credit.gae import Gae
from treetune.seeds import derived_random
from treetune.trainers.base import DeepSpeedTrainer, FullModelCritic
from treetune.trainers.batching import Unit
from treetune.trainers.credit import (
    check_unthreaded,
    critic_advantages,
    less_future_penalty,
    normalised,
    token_rewards,
    value_loss,
)
from treetune.trainers.entropy import EntropyCoefficient
from treetune.trainers.iteration_tensors import IterationTensors
from treetune.trainers.micro_batches import MicroBatch, micro_batches
from treetune.trainers.minibatch import Minibatch, loss_share
from treetune.trainers.models import Models, Reference
from treetune.trainers.objectives.kl import kl_estimate
from treetune.trainers.optimisation import Optimised
from treetune.trainers.ranks import Ranks
from treetune.trainers.tokens import Sequences, flat_of_trained, units_of
from treetune.vocabulary import Episode, Metrics, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Forward = Callable[[MicroBatch], Tensor]

COMPUTED = "train/computed_tokens"
"""Tokens that the policy ran over for the iteration's updates, on all ranks; padding is not counted."""


class PolicyTrainer:
    """Trains a policy, and a critic where the credit is `gae`.

    `load_model` gives a fresh copy of the start model. `temperature` is the rollout's: log-probs
    are those of the distribution that was sampled. The schedule spans `iterations`, or, where
    training `restarts` in every one of them, one.
    """

    def __init__(
        self,
        settings: DeepSpeedTrainer,
        load_model: Callable[[], nn.Module],
        *,
        ranks: Ranks,
        seed: int,
        temperature: float,
        iterations: int,
        gae: Gae | None,
        restarts: bool = False,
    ) -> None:
        self.settings, self.ranks, self.seed = settings, ranks, seed
        self.restarts = restarts
        self.temperature, self.iterations, self.gae = temperature, iterations, gae
        objective = settings.objective
        self.models = Models(settings, load_model, ranks, seed)
        self.policy = self.models.policy()
        self.reference: Reference | None = None
        if objective.needs_reference or (settings.measure_kl and objective.measures_kl):
            self.reference = self.models.reference(lambda: self.policy)
        self.entropy = EntropyCoefficient(objective.entropy_coef, settings.entropy_target)
        self.critic: Optimised | None = None
        if gae is not None:
            assert isinstance(settings.critic, FullModelCritic)
            self.critic = self.models.critic()

    @property
    def model(self) -> PreTrainedModel:
        """The model that is trained; under ZeRO-3 its weights are shards."""
        return self.policy.module.model

    def restart(self, episodes: Sequence[Episode] = ()) -> Metrics:
        """The policy and its optimiser as at the very beginning.

        With `measure_kl`, says how far the policy that is given up had gone from there, measured on
        these episodes of its own. Collective.
        """
        assert self.critic is None, "a critic is trained on from iteration to iteration"
        measured = None
        if episodes and self.settings.measure_kl:
            sequences = Sequences.of(episodes)
            measured = IterationTensors(flat_of_trained(episodes, lambda e: e.behaviour_logprobs))
            measured.old_N = self._sweep(sequences, lambda b: self._logprobs(self.policy, b))
        self.policy.close()
        del self.policy  # two optimisers at once might not fit
        gc.collect()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        self.policy = self.models.policy()
        self.entropy.reset()
        if measured is None:
            return {}
        measured.reference_N = self._sweep(sequences, lambda b: self._logprobs(self.policy, b))
        return measured.gap_metrics()

    # One iteration

    def train(
        self, iteration: int, episodes: Sequence[Episode], progress: Callable[[int, int], None] | None = None
    ) -> Metrics:
        """All epochs over these episodes; every rank is given the same ones. Collective."""
        metrics: Metrics = {}
        for metrics in self.epochs(iteration, episodes, progress):  # noqa: B007
            pass
        return metrics

    def epochs(
        self, iteration: int, episodes: Sequence[Episode], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[Metrics]:
        """Trains one epoch whenever it is asked for the next element: the metrics of those so far.

        Collective.
        """
        if self.gae is not None:
            check_unthreaded(episodes)
        sequences = Sequences.of(episodes)
        units = units_of(episodes, in_pairs=self.settings.objective.needs_pairs)
        steps = self.settings.epochs * len(list(self._minibatches(iteration, 0, units)))
        tensors = self._before(sequences, episodes, several_steps=steps > 1)
        constant = tensors.token_metrics()
        sums: dict[str, float] = defaultdict(float)
        number = skipped = 0
        for epoch in range(self.settings.epochs):
            for members in self._minibatches(iteration, epoch, units):
                place = (0 if self.restarts else iteration) + number / steps
                minibatch = Minibatch.of(sequences, members, self.settings.objective)
                if not minibatch.units or self._without_advantage(minibatch, tensors):
                    skipped += 1
                else:
                    for name, value in self._step(sequences, minibatch, tensors, place, steps).items():
                        sums[name] += value
                number += 1
                if progress is not None:
                    progress(number, steps)
            taken = number - skipped
            metrics = constant | {name: value / taken for name, value in sums.items()}
            if tensors.old_N is not None:  # filled by the first step where it is the only one
                metrics |= tensors.gap_metrics()
            metrics |= {"train/steps": float(taken), "train/tokens": float(sequences.n_tokens)}
            metrics[COMPUTED] = sums[COMPUTED]
            yield metrics | ({"train/skipped_steps": float(skipped)} if skipped else {})

    def _minibatches(self, iteration: int, epoch: int, units: Sequence[Unit]) -> Iterator[list[Unit]]:
        size = self.settings.minibatch_size or len(units)
        order = list(units)
        derived_random(self.seed, iteration, "minibatches", epoch).shuffle(order)
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def _without_advantage(self, minibatch: Minibatch, tensors: IterationTensors) -> bool:
        """Whether a step would move the weights by old momentum, KL and weight decay alone."""
        if not self.settings.skip_without_advantage or tensors.worth_N is None:
            return False
        return not bool(tensors.worth_N[minibatch.weights_N != 0].any())

    def _before(
        self, sequences: Sequences, episodes: Sequence[Episode], several_steps: bool
    ) -> IterationTensors:
        """Reference and old log-probs, values and advantages: once per iteration."""
        settings, objective = self.settings, self.settings.objective
        tensors = IterationTensors(flat_of_trained(episodes, lambda e: e.behaviour_logprobs))
        if self.reference is not None:
            with self.reference() as reference:
                tensors.reference_N = self._sweep(sequences, lambda b: self._logprobs(reference, b))
        if not objective.needs_advantages:
            if self.reference is not None and settings.measure_kl and several_steps:
                tensors.old_N = self._sweep(sequences, lambda b: self._logprobs(self.policy, b))
            return tensors
        if several_steps or objective.reward_kl_coef > 0 or objective.advantage_kl_coef > 0:
            tensors.old_N = self._sweep(sequences, lambda b: self._logprobs(self.policy, b))
        penalties_N = None
        if objective.reward_kl_coef > 0:
            assert tensors.old_N is not None and tensors.reference_N is not None
            penalties_N = objective.reward_kl_coef * kl_estimate(
                tensors.old_N, tensors.reference_N, objective.kl_estimator
            )
        if self.critic is not None and self.gae is not None:
            tensors.values_N = self._sweep(sequences, self._values)
            rewards_N = token_rewards(sequences.starts, sequences.rewards, penalties_N)
            advantages_N, tensors.returns_N = critic_advantages(
                sequences.starts, rewards_N, tensors.values_N, self.gae.gamma, self.gae.lam
            )
        else:
            given_N = flat_of_trained(episodes, lambda e: e.advantages)
            if given_N is None:
                raise ValueError(
                    "the objective needs advantages and the configured credit gives none: choose a credit"
                    " such as 'group', 'monte_carlo' or 'gae', or the objective 'mle'"
                )
            tensors.worth_N = given_N != 0
            advantages_N = given_N
            if penalties_N is not None:
                advantages_N = less_future_penalty(sequences.starts, given_N, penalties_N)
        tensors.advantages_N = normalised(advantages_N, settings.advantage_normalisation)
        if objective.advantage_kl_coef > 0:
            assert tensors.old_N is not None and tensors.reference_N is not None
            tensors.advantages_N -= objective.advantage_kl_coef * kl_estimate(
                tensors.old_N, tensors.reference_N, objective.kl_estimator
            )
        return tensors

    def _step(
        self,
        sequences: Sequences,
        minibatch: Minibatch,
        tensors: IterationTensors,
        place: float,
        steps_in_iteration: int,
    ) -> Metrics:
        """One optimiser step of the policy, and of the critic."""
        settings, objective = self.settings, self.settings.objective
        fill_old = tensors.old_N is None and steps_in_iteration == 1 and tensors.behaviour_N is not None
        scored_N = torch.zeros(sequences.n_tokens) if fill_old else None
        entropy_coef = self.entropy.value
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.ranks.device))
        for batch in self._batches(sequences, minibatch.units, minibatch.whole):
            share = loss_share(
                self.policy,
                objective,
                minibatch,
                batch,
                tensors,
                temperature=self.temperature,
                entropy_coef=entropy_coef,
                device=self.ranks.device,
            )
            self.policy.backward(share.loss)
            for name, value in share.metrics.items():
                sums[name] += value
            sums[COMPUTED] += batch.computed_tokens * batch.share
            if scored_N is not None and self._writes(batch):
                scored_N[batch.flat_N] = share.logprobs_N.detach().cpu()
            if self.critic is not None:
                self._critic_backward(batch, tensors, share.tokens.weights_N / minibatch.weight_sum, sums)
        rate = settings.learning_rate * self._rate_factor(place, steps_in_iteration)
        result = {"train/learning_rate": rate, "train/grad_norm": self.policy.step(rate)}
        if self.critic is not None:
            assert isinstance(settings.critic, FullModelCritic)
            critic_rate = rate * (settings.critic.learning_rate or settings.learning_rate)
            critic_rate /= settings.learning_rate
            result["critic/grad_norm"] = self.critic.step(critic_rate)
        if scored_N is not None:
            tensors.old_N, tensors.known_N = self.ranks.sum(scored_N), minibatch.weights_N != 0
        names = sorted(sums)
        totals = self.ranks.sum(torch.stack([sums[name] for name in names]).cpu())
        result |= dict(zip(names, totals.tolist(), strict=True))
        if settings.entropy_target is not None:
            result["train/entropy_coef"] = entropy_coef
        self.entropy.observe(result["train/entropy"])
        return result

    def _critic_backward(
        self, batch: MicroBatch, tensors: IterationTensors, weights_N: Tensor, sums: dict[str, Tensor]
    ) -> None:
        assert self.critic is not None and isinstance(self.settings.critic, FullModelCritic)
        values_N = batch.value(self.critic)
        old_N = self._maybe_at(tensors.values_N, batch.flat_N)
        returns_N = self._maybe_at(tensors.returns_N, batch.flat_N)
        assert old_N is not None and returns_N is not None
        clip = self.settings.critic.value_clip
        loss, clipped = value_loss(values_N, old_N, returns_N, weights_N, clip)
        self.critic.backward(loss)
        sums["critic/loss"] += loss.detach()
        sums["critic/clip_fraction"] += clipped
        sums["critic/value"] += (weights_N * values_N.detach()).sum()
        sums["critic/mse"] += (weights_N * (values_N.detach() - returns_N).square()).sum()

    def _rate_factor(self, place: float, steps_in_iteration: int) -> float:
        """The schedule runs over the iterations' steps as if every iteration had as many as this one.

        Exact where nothing is left out by selection; where it is, warm-up and decay still end where
        they should instead of drifting with the number of episodes that were kept.
        """
        step = round(place * steps_in_iteration)
        iterations = 1 if self.restarts else self.iterations
        return self.settings.schedule.factor(step, iterations * steps_in_iteration)

    # Running models over sequences

    def _batches(
        self, sequences: Sequences, units: Sequence[Unit], whole: bool = False, scale: int = 1
    ) -> Iterator[MicroBatch]:
        ranks = self.ranks
        return micro_batches(
            sequences,
            units,
            self.settings,
            ranks.device,
            rank=ranks.rank,
            ranks=ranks.world_size,
            whole=whole,
            scale=scale,
        )

    def _writes(self, batch: MicroBatch) -> bool:
        """Whether its results are this rank's to tell: of ranks that ran it together, one does."""
        return batch.real and self.ranks.rank % self.settings.ranks_together == 0

    def _sweep(self, sequences: Sequences, forward: Forward) -> Tensor:
        """A number for every trained token, shape [N], computed by all ranks and known to all.

        Rows that are alike (an answer in several pairs) are run once.
        """
        result_N = torch.zeros(sequences.n_tokens)
        with torch.no_grad():
            # Without a graph to keep, twice the tokens fit.
            for batch in self._batches(sequences, sequences.once(), scale=2):
                values_N = forward(batch)
                if self._writes(batch):
                    result_N[batch.flat_N] = values_N.float().cpu()
        return self.ranks.sum(result_N)[sequences.flat_index(sequences.first_alike())]

    def _logprobs(self, model: Callable, batch: MicroBatch) -> Tensor:
        return batch.score(model, self.temperature)[0]

    def _values(self, batch: MicroBatch) -> Tensor:
        assert self.critic is not None
        return batch.value(self.critic)

    def _maybe_at(self, tensor_N: Tensor | None, flat_N: Tensor) -> Tensor | None:
        return None if tensor_N is None else tensor_N[flat_N].to(self.ranks.device)

    # What the run asks for between iterations

    def score(self, pairs: Sequence[tuple[TokenIds, TokenIds]], temperature: float) -> list[list[float]]:
        """Log-probs of the response tokens after their prompts, under the present policy.

        Local to this rank, except where it doesn't hold the model alone (ZeRO-3, ranks that run it
        together): then every rank calls it, with what it has.
        """
        collective = self.settings.zero_stage == 3 or self.settings.ranks_together > 1
        gathered = self.ranks.exchange("score", list(pairs)) if collective else [pairs]
        results = []
        for rank, share in enumerate(gathered):
            for prompt, response in share:
                ids_1T = torch.tensor([prompt + response], device=self.ranks.device)
                positions_N = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
                with torch.no_grad():
                    logprobs_N, *_ = self.policy(
                        ids_1T,
                        None,
                        positions_N.to(self.ranks.device),
                        torch.tensor(response, device=self.ranks.device),
                        temperature,
                        False,
                        False,
                        len(response),
                    )
                if len(gathered) == 1 or rank == self.ranks.rank:
                    results.append(logprobs_N.tolist())
        return results

    def weights(self) -> dict[str, Tensor]:
        """The policy's weights under their Hugging Face names, whole on the first rank; adapters are
        merged into them. Collective.
        """
        weights = self._by_name()
        return weights if self.settings.lora is None else self.settings.lora.merged(weights)

    def adapters(self) -> dict[str, Tensor]:
        """The adapters' weights under peft's names, on the first rank; empty where there are none.
        Collective.
        """
        return {} if self.settings.lora is None else self.settings.lora.adapters(self._by_name())

    def _by_name(self) -> dict[str, Tensor]:
        return {name.removeprefix("model."): t for name, t in self.policy.state_dict().items()}

    def critic_weights(self) -> dict[str, Tensor]:
        """The critic's weights by name, whole on the first rank; empty where there is none. Collective."""
        return {} if self.critic is None else self.critic.state_dict()

    def save(self, directory: Path) -> None:
        """All that is needed to go on bit for bit. Collective."""
        self.policy.save(directory / "policy")
        if self.ranks.is_first:
            self.entropy.save(directory)
        if self.critic is not None:
            self.critic.save(directory / "critic")

    def load(self, directory: Path) -> None:
        """Collective."""
        self.policy.load(directory / "policy")
        self.entropy.load(directory)
        if self.critic is not None:
            self.critic.load(directory / "critic")
