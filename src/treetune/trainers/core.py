"""The trainer at work: from an iteration's episodes to new weights, the same for every method."""

from __future__ import annotations

import dataclasses
import gc
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treetune.models.nucleus import Nucleus
from treetune.rollouts.credit.gae import Gae
from treetune.rollouts.critic import CriticSettings
from treetune.seeds import derived_random
from treetune.trainers.base import Trainer
from treetune.trainers.batching import Unit
from treetune.trainers.critic import Critic
from treetune.trainers.entropy import EntropyCoefficient
from treetune.trainers.minibatch import Minibatch, micro_batch_loss
from treetune.trainers.model_factory import ModelFactory, Reference
from treetune.trainers.objectives.base import SKIPPED_BY_RATIO, without_skipped
from treetune.trainers.preparation.advantages import check_unthreaded
from treetune.trainers.preparation.stages import preparation, prepare, runs_models
from treetune.trainers.preparation.tensors import IterationTensors
from treetune.trainers.ranks import Ranks
from treetune.trainers.reference_ahead import ReferenceAhead
from treetune.trainers.scoring import Scored, Scorer
from treetune.trainers.sequences_of_rank import Running, sequences_of_rank
from treetune.trainers.signals import Telling, TellSignals
from treetune.trainers.stretches import Stretch
from treetune.trainers.tokens import Sequences, units_of
from treetune.vocabulary import Episode, Metrics, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPUTED = "train/computed_tokens"
"""Tokens that the policy ran over for the iteration's updates, on all ranks; padding is not counted."""


class PolicyTrainer:
    """Trains a policy, and a critic where the credit is `gae` or `critic` says how.

    `load_model` gives a fresh copy of the start model. `temperature` is the rollout's: log-probs
    are those of the distribution that was sampled, before its `nucleus` was cut out of it. The schedule
    spans `iterations`, or, where training `restarts` in every one of them, one.
    """

    def __init__(
        self,
        settings: Trainer,
        load_model: Callable[[], nn.Module],
        *,
        ranks: Ranks,
        seed: int,
        temperature: float,
        iterations: int,
        gae: Gae | None,
        critic: CriticSettings | None = None,
        restarts: bool = False,
        nucleus: Nucleus | None = None,
    ) -> None:
        self.settings, self.ranks, self.seed = settings, ranks, seed
        self.restarts, self.nucleus = restarts, nucleus
        self.temperature, self.iterations, self.gae = temperature, iterations, gae
        self.scorer = Scorer(settings, ranks, temperature)
        objective = settings.objective
        self.factory = ModelFactory(settings, load_model, ranks, seed)
        self.policy = self.factory.policy()
        self.reference: Reference | None = None
        if settings.keeps_reference:
            self.reference = self.factory.reference(lambda: self.policy)
        self.ahead: ReferenceAhead | None = None
        """Scores under the reference what is heard while others are sampled, where it is set to."""
        if self.reference is not None and settings.reference_scores == "while_sampling":
            self.ahead = ReferenceAhead(self.reference, self.scorer)
        self.entropy = EntropyCoefficient(objective.entropy_coef, settings.entropy_target)
        learns = critic if gae is None else gae.critic
        self.critic = None if learns is None else Critic(self.factory.critic(), learns)

    @property
    def model(self) -> PreTrainedModel:
        """The model that is trained; under ZeRO-3 its weights are shards."""
        return self.policy.module.model

    def restart(self, episodes: Collection[Episode] = (), tell: TellSignals | None = None) -> Metrics:
        """The policy and its optimiser as at the very beginning.

        With `measure_kl`, says how far the policy that is given up had gone from there, measured on
        these episodes of its own. `tell` is called with what it says of their tokens. Collective.
        """
        assert self.critic is None, "a critic is trained on from iteration to iteration"
        measured = None
        if episodes and (self.settings.measure_kl or self.settings.token_signals == "all"):
            sequences = sequences_of_rank(
                episodes, self.settings, self.ranks, lambda known: [(known.once(), False, False)]
            )
            measured = IterationTensors.of(episodes)
            measured.take(self.old_logprobs(sequences))
            self._telling(tell, episodes, sequences).say(measured)
        self.policy.close()
        del self.policy  # two optimisers at once might not fit
        gc.collect()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        self.policy = self.factory.policy()
        self.entropy.reset()
        if measured is None or not self.settings.measure_kl:
            return {}
        measured.ref_logprobs_N = self.policy_logprobs(sequences)
        return measured.gap_metrics()

    def close(self) -> None:
        """Ends what goes on beside sampling."""
        if self.ahead is not None:
            self.ahead.close()

    # Memory that an engine needs in turn

    def step_aside(self) -> None:
        """All that only training needs leaves the accelerator: optimiser, master weights, gradients, the
        critic, and what was freed and kept. The policy can still be scored and exported."""
        self.policy.step_aside()
        if self.critic is not None:
            self.critic.model.step_aside(weights=True)
        gc.collect()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Everything where training needs it."""
        self.policy.come_back()
        if self.critic is not None:
            self.critic.model.come_back()

    # One iteration

    def train(
        self,
        iteration: int,
        episodes: Collection[Episode],
        progress: Callable[[int, int], None] | None = None,
    ) -> Metrics:
        """All epochs over these episodes; every rank is given the same ones, and keeps the tokens of those
        that it runs. Collective."""
        metrics: Metrics = {}
        for _, metrics in self.stretches(iteration, episodes, progress=progress):  # noqa: B007
            pass
        return metrics

    def stretches(
        self,
        iteration: int,
        episodes: Collection[Episode],
        every: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        tell: TellSignals | None = None,
    ) -> Iterator[tuple[Stretch, Metrics]]:
        """Trains on whenever it is asked for the next element, up to the end of an epoch, or for `every`
        steps and at last to the end: how far that came, and the metrics so far. `tell` is called once, with
        what the policy said of the tokens before its first update, as far as that is known. Collective.
        """
        if self.critic is not None:
            check_unthreaded(episodes)
        units = units_of(episodes, in_pairs=self.settings.objective.needs_pairs)
        steps = self.settings.epochs * len(list(self._minibatches(iteration, 0, units)))
        stages = preparation(self.settings, self.gae, several_steps=steps > 1, critic=self.critic is not None)

        def run(known: Sequences) -> Iterator[Running]:
            if runs_models(stages) or self.settings.token_signals == "all":
                yield known.once(), False, False
            for epoch in range(self.settings.epochs):
                for members in self._minibatches(iteration, epoch, units):
                    minibatch = Minibatch.of(known, members, self.settings.objective)
                    if minibatch.units:
                        yield minibatch.units, minibatch.keep_units, True

        sequences = sequences_of_rank(episodes, self.settings, self.ranks, run)
        tensors = prepare(stages, IterationTensors.of(episodes), sequences, self)
        telling = self._telling(tell, episodes, sequences)
        self._tell_beforehand(telling, tensors)
        constant = tensors.token_metrics() | ({} if self.ahead is None else self.ahead.metrics)
        sums: dict[str, float] = defaultdict(float)
        number = skipped = 0
        for epoch in range(self.settings.epochs):
            for members in self._minibatches(iteration, epoch, units):
                iterations_done = (0 if self.restarts else iteration) + number / steps
                minibatch = Minibatch.of(sequences, members, self.settings.objective)
                if not minibatch.units or self._without_advantage(minibatch, tensors):
                    skipped += 1
                else:
                    step = self._step(sequences, minibatch, tensors, iterations_done, steps)
                    telling.say(tensors)
                    for name, value in step.items():
                        sums[name] += value
                number += 1
                if progress is not None:
                    progress(number, steps)
                end_of_epoch = number * self.settings.epochs == (epoch + 1) * steps
                if not (end_of_epoch if every is None else number % every == 0 or number == steps):
                    continue
                taken = number - skipped
                metrics = constant | {name: value / taken for name, value in sums.items()}
                if tensors.old_logprobs_N is not None:  # filled by the first step where it is the only one
                    metrics |= tensors.gap_metrics()
                metrics |= {"train/steps": float(taken), "train/tokens": float(sequences.n_tokens)}
                metrics[COMPUTED] = sums[COMPUTED]
                metrics |= {"train/skipped_steps": float(skipped)} if skipped else {}
                yield Stretch(epoch + end_of_epoch, number, number == steps), metrics

    def _minibatches(self, iteration: int, epoch: int, units: Sequence[Unit]) -> Iterator[list[Unit]]:
        size = self.settings.minibatch_size or len(units)
        order = list(units)
        derived_random(self.seed, iteration, "minibatches", epoch).shuffle(order)
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def _without_advantage(self, minibatch: Minibatch, tensors: IterationTensors) -> bool:
        """Whether a step would move the weights by old momentum, KL and weight decay alone."""
        if not self.settings.skip_without_advantage or tensors.credit_advantages_N is None:
            return False
        return not bool(tensors.credit_advantages_N[minibatch.weights_N != 0].any())

    # What is known of single tokens

    def _telling(
        self, tell: TellSignals | None, episodes: Collection[Episode], sequences: Sequences
    ) -> Telling:
        return Telling(None if self.settings.token_signals == "none" else tell, episodes, sequences)

    def _tell_beforehand(self, telling: Telling, tensors: IterationTensors) -> None:
        """What the preparation knows; with ``token_signals: 'all'`` what a forward pass for them alone says,
        where it knows nothing. The tensors that training reads stay as they are. Collective."""
        if tensors.old_logprobs_N is None and self.settings.token_signals == "all":
            tensors = dataclasses.replace(tensors)
            tensors.take(self.old_logprobs(telling.sequences))
        telling.say(tensors)

    # What the stages of the preparation run

    def policy_logprobs(self, sequences: Sequences) -> Tensor:
        return self.scorer.logprobs(self.policy, sequences)

    def old_logprobs(self, sequences: Sequences) -> Scored:
        return self.scorer.scored(self.policy, sequences, self.nucleus)

    def ref_logprobs(self, sequences: Sequences) -> Tensor:
        if self.ahead is not None:
            return self.ahead.logprobs(sequences)
        assert self.reference is not None
        with self.reference() as reference:
            return self.scorer.logprobs(reference, sequences)

    def values(self, sequences: Sequences) -> Tensor:
        assert self.critic is not None
        return self.scorer.values(self.critic.model, sequences)

    def _step(
        self,
        sequences: Sequences,
        minibatch: Minibatch,
        tensors: IterationTensors,
        iterations_done: float,
        steps_in_iteration: int,
    ) -> Metrics:
        """One optimiser step of the policy, and of the critic."""
        settings, objective = self.settings, self.settings.objective
        fill_old = (
            tensors.old_logprobs_N is None
            and steps_in_iteration == 1
            and tensors.behaviour_logprobs_N is not None
        )
        scored_N = torch.zeros(sequences.n_tokens) if fill_old else None
        entropies_N = torch.zeros(sequences.n_tokens if fill_old else 0)
        nucleus = self.nucleus if fill_old else None
        log_mass_N = None if nucleus is None else torch.zeros(sequences.n_tokens)
        entropy_coef = self.entropy.value
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.ranks.device))
        for batch in self.scorer.micro_batches(sequences, minibatch.units, keep_units=minibatch.keep_units):
            part = micro_batch_loss(
                self.policy,
                objective,
                minibatch,
                batch,
                tensors,
                temperature=self.temperature,
                entropy_coef=entropy_coef,
                device=self.ranks.device,
                nucleus=nucleus,
            )
            self.policy.backward(part.loss)
            for name, value in part.metrics.items():
                sums[name] += value
            sums[COMPUTED] += batch.computed_tokens * batch.loss_scale
            if scored_N is not None and self.scorer.reports(batch):
                scored_N[batch.flat_index_N] = part.logprobs_N.detach().cpu()
                entropies_N[batch.flat_index_N] = part.entropies_N.detach().cpu()
                if log_mass_N is not None and part.log_mass_N is not None:
                    log_mass_N[batch.flat_index_N] = part.log_mass_N.cpu()
            if self.critic is not None:
                weights_N = part.tokens.weights_N / minibatch.weight_sum
                for name, value in self.critic.backward(batch, tensors, weights_N).items():
                    sums[name] += value
        names = sorted(sums)
        totals = self.ranks.sum(torch.stack([sums[name] for name in names]).cpu())
        result = without_skipped(objective, dict(zip(names, totals.tolist(), strict=True)))
        rate = settings.learning_rate * self._rate_factor(iterations_done, steps_in_iteration)
        without_loss = bool(result.get(SKIPPED_BY_RATIO))
        result |= {"train/learning_rate": rate, "train/grad_norm": self.policy.step(rate, without_loss)}
        if self.critic is not None:
            result["critic/grad_norm"] = self.critic.step(rate, settings.learning_rate)
        if scored_N is not None:
            mass_N = None if log_mass_N is None else self.ranks.sum(log_mass_N)
            tensors.take(Scored(self.ranks.sum(scored_N), self.ranks.sum(entropies_N), mass_N))
            tensors.old_logprobs_mask_N = minibatch.weights_N != 0
        if settings.entropy_target is not None:
            result["train/entropy_coef"] = entropy_coef
        self.entropy.observe(result["train/entropy"])
        return result

    def _rate_factor(self, iterations_done: float, steps_in_iteration: int) -> float:
        """The schedule runs over the iterations' steps as if every iteration had as many as this one.

        Exact where selection leaves nothing out; elsewhere warm-up and decay still end where they should.
        """
        step = round(iterations_done * steps_in_iteration)
        iterations = 1 if self.restarts else self.iterations
        return self.settings.schedule.factor(step, iterations * steps_in_iteration)

    # What the run asks for between iterations

    def score(self, pairs: Sequence[tuple[TokenIds, TokenIds]], temperature: float) -> list[list[float]]:
        """Log-probs of some answers under the present policy; see `Scorer.answer_logprobs`."""
        return self.scorer.answer_logprobs(self.policy, pairs, temperature)

    def weights(self) -> dict[str, Tensor]:
        """The policy's weights under their Hugging Face names, whole on the first rank; adapters are
        merged into them. Collective.
        """
        weights = self._by_name()
        return weights if self.settings.lora is None else self.settings.lora.merged(weights)

    def weights_in_turn(self) -> Iterator[tuple[str, Tensor]]:
        """The same weights one after the other, on every rank and wherever they are; each is there until the
        next is asked for, so that nobody ever has them all. Collective, to the end.
        """
        lora = self.settings.lora
        for part in self.policy.parts():
            named = {name.removeprefix("model."): weight for name, weight in part.items()}
            yield from (named if lora is None else lora.merged(named)).items()

    @property
    def weight_names(self) -> list[str]:
        """Those of `weights_in_turn`."""
        names = dict.fromkeys(n.removeprefix("model.") for n, _ in self.policy.module.named_parameters())
        return list(names if self.settings.lora is None else self.settings.lora.merged_names(names))

    def adapters(self) -> dict[str, Tensor]:
        """The adapters' weights under peft's names, on the first rank; empty where there are none.
        Collective.
        """
        return {} if self.settings.lora is None else self.settings.lora.adapters(self._by_name())

    def _by_name(self) -> dict[str, Tensor]:
        return {name.removeprefix("model."): t for name, t in self.policy.state_dict().items()}

    def critic_weights(self) -> dict[str, Tensor]:
        """The critic's weights by name, whole on the first rank; empty where there is none. Collective."""
        return {} if self.critic is None else self.critic.model.state_dict()

    def save(self, directory: Path) -> None:
        """All that is needed to go on bit for bit. Collective."""
        self.policy.save(directory / "policy")
        if self.ranks.is_first:
            self.entropy.save(directory)
        if self.critic is not None:
            self.critic.model.save(directory / "critic")

    def load(self, directory: Path) -> None:
        """Collective."""
        self.policy.load(directory / "policy")
        self.entropy.load(directory)
        if self.critic is not None:
            self.critic.model.load(directory / "critic")
