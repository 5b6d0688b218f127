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

from treetune.models.logprobs import Nucleus
from treetune.models.saved_weights import saved_weights
from treetune.objectives.base import SKIPPED_BY_RATIO, without_skipped
from treetune.rollouts.base import CriticSettings
from treetune.rollouts.storage import TokenSignals
from treetune.seeds import derived_random
from treetune.trainer.base import Trainer
from treetune.trainer.batches import Minibatch, micro_batches, sequences_of_rank
from treetune.trainer.deepspeed_model import ModelFactory, Reference
from treetune.trainer.preparation import FromValues, IterationTensors, prepare, scores_old_logprobs
from treetune.trainer.probe import refuse_unlike_model
from treetune.trainer.ranks import Ranks
from treetune.trainer.scoring import PolicyScores, ReferencePrefetch, Scorer
from treetune.trainer.tokens import Sequences, Unit, units_of
from treetune.trainer.update import CriticTraining, EntropyCoefficient, StepRecorder, micro_batch_loss
from treetune.vocabulary import Episode, Metrics, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPUTED = "train/computed_tokens"
"""Metric: the tokens that the policy ran over for the iteration's updates, on all ranks; padding is not
counted."""

OnSignals = Callable[[Sequence[TokenSignals]], None]
"""An observer of single tokens: it is called once, after the iteration's last update, with the policy's
scores of each episode's tokens, where these are known."""


class PolicyTrainer:
    """Trains a policy, and a critic where the credit needs one (`critic`); `from_values` makes advantages of
    its values.

    `load_model` gives a fresh copy of the start model, `load_reference` a reference that is another one.
    `temperature` is the rollout's: log-probs
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
        critic: CriticSettings | None = None,
        from_values: FromValues | None = None,
        restarts: bool = False,
        nucleus: Nucleus | None = None,
        load_reference: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.settings, self.ranks, self.seed = settings, ranks, seed
        self.temperature, self.nucleus = temperature, nucleus
        self.iterations, self.restarts = iterations, restarts
        self.from_values = from_values
        self.scorer = Scorer(settings, ranks, temperature)
        self.factory = ModelFactory(settings, load_model, ranks, seed, load_reference)
        self.policy = self.factory.policy()
        refuse_unlike_model(self.policy, settings, ranks)
        self.reference: Reference | None = None
        if settings.keeps_reference:
            self.reference = self.factory.reference(lambda: self.policy)
        self.prefetch: ReferencePrefetch | None = None
        """Scores answers under the reference while others are sampled, where it is set to."""
        if self.reference is not None and settings.reference_scores == "while_sampling":
            self.prefetch = ReferencePrefetch(self.reference, self.scorer)
        self.entropy = EntropyCoefficient(settings.objective.entropy_coef, settings.entropy_target)
        self.critic = None if critic is None else CriticTraining(self.factory.critic(), critic)

    @property
    def model(self) -> PreTrainedModel:
        """The model that is trained; under ZeRO-3 its weights are shards."""
        return self.policy.module.model

    # One iteration

    def train(
        self,
        iteration: int,
        episodes: Collection[Episode],
        *,
        every: int | None = None,
        after: Callable[[int, bool], bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
        on_signals: OnSignals | None = None,
    ) -> Metrics:
        """Trains on these episodes, all epochs; every rank is given the same ones, and keeps the tokens of
        those that it runs. Returns the metrics so far.

        `after` is called at the end of each epoch with the number of epochs, or every so many steps, and
        after the last one, with the number of steps; and with whether that is all. Training ends where it
        returns True. Collective.
        """
        settings, objective = self.settings, self.settings.objective
        units = units_of(episodes, in_pairs=objective.needs_pairs)
        schedule = self._schedule(iteration, units)
        steps = len(schedule)
        scores_old = scores_old_logprobs(settings, several_steps=steps > 1)
        scores_all = settings.token_signals == "all" or (
            scores_old or settings.keeps_reference or self.critic is not None
        )
        sequences = sequences_of_rank(episodes, settings, self.ranks, schedule, scores_all=scores_all)
        tensors = prepare(
            settings,
            episodes,
            sequences,
            self,
            scores_old=scores_old,
            critic=self.critic is not None,
            from_values=self.from_values,
        )
        scored = tensors
        if tensors.old_logprobs_N is None and settings.token_signals == "all":
            # In a copy: training goes on to take the log-probs of its own forward pass for the old ones.
            scored = dataclasses.replace(tensors)
            scored.take(self.old_logprobs(sequences))
        constant = tensors.metrics() | ({} if self.prefetch is None else self.prefetch.metrics)
        sums: dict[str, float] = defaultdict(float)
        skipped = number = 0
        for number, members in enumerate(schedule, start=1):
            minibatch = Minibatch.of(sequences, members, objective)
            if not minibatch.units or self._lacks_advantage(minibatch, tensors):
                skipped += 1
            else:
                rate = settings.learning_rate * self._rate_factor(iteration, number - 1, steps)
                for name, value in self._step(sequences, minibatch, tensors, rate, steps == 1).items():
                    sums[name] += value
            if progress is not None:
                progress(number, steps)
            epochs_done, within_epoch = divmod(number * settings.epochs, steps)
            pauses = within_epoch == 0 if every is None else number % every == 0 or number == steps
            done = epochs_done if every is None else number
            if pauses and after is not None and after(done, number == steps):
                break
        scored = tensors if scored.old_logprobs_N is None else scored  # which an only step has recorded
        if settings.token_signals != "none" and on_signals is not None and scored.old_logprobs_N is not None:
            on_signals(scored.signals(episodes, sequences))
        metrics = constant | {name: value / (number - skipped) for name, value in sums.items()}
        if tensors.old_logprobs_N is not None:
            metrics |= tensors.gap_metrics()
        metrics |= {"train/steps": float(number - skipped), "train/tokens": float(sequences.n_tokens)}
        metrics[COMPUTED] = sums[COMPUTED]
        return metrics | ({"train/skipped_steps": float(skipped)} if skipped else {})

    def _schedule(self, iteration: int, units: Sequence[Unit]) -> list[list[Unit]]:
        """The sequences of each of the iteration's steps: every epoch is shuffled and cut into
        minibatches."""
        size = self.settings.minibatch_size or len(units)
        steps = []
        for epoch in range(self.settings.epochs):
            order = list(units)
            derived_random(self.seed, iteration, "minibatches", epoch).shuffle(order)
            steps += [order[start : start + size] for start in range(0, len(order), size)]
        return steps

    def _lacks_advantage(self, minibatch: Minibatch, tensors: IterationTensors) -> bool:
        """Returns whether a step would move the weights by old momentum, KL and weight decay alone."""
        if not self.settings.skip_without_advantage or tensors.credit_advantages_N is None:
            return False
        return not bool(tensors.credit_advantages_N[minibatch.weights_N != 0].any())

    def _rate_factor(self, iteration: int, steps_done: int, steps: int) -> float:
        """The schedule runs over the iterations' steps as if every iteration had as many as this one.

        Exact where selection leaves nothing out; elsewhere warm-up and decay still end where they should.
        """
        iterations_done = (0 if self.restarts else iteration) + steps_done / steps
        iterations = 1 if self.restarts else self.iterations
        return self.settings.schedule.factor(round(iterations_done * steps), iterations * steps)

    def _step(
        self,
        sequences: Sequences,
        minibatch: Minibatch,
        tensors: IterationTensors,
        rate: float,
        is_only: bool,
    ) -> Metrics:
        """Takes one optimiser step of the policy, and of the critic."""
        settings, objective = self.settings, self.settings.objective
        recorder, nucleus = None, None
        # Without the engine's log-probs there is nothing to compare the policy's with.
        if is_only and tensors.old_logprobs_N is None and tensors.behaviour_logprobs_N is not None:
            nucleus = self.nucleus
            recorder = StepRecorder(sequences.n_tokens, with_mass=nucleus is not None)
        elif not is_only and tensors.old_logprobs_N is not None and settings.token_signals != "none":
            recorder = StepRecorder(sequences.n_tokens, with_mass=False)
        entropy_coef = self.entropy.value
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.ranks.device))
        for batch in micro_batches(
            sequences, minibatch.units, settings, self.ranks, keep_units=minibatch.keep_units
        ):
            loss, metrics, scored = micro_batch_loss(
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
            # Micro-batches of all ranks add up to the minibatch's loss: their gradients are summed, not
            # averaged.
            self.policy.backward(loss)
            if recorder is not None and self.scorer.reports(batch):
                recorder.add(batch, scored)
            metrics[COMPUTED] = batch.computed_tokens * batch.loss_scale
            if self.critic is not None:
                metrics |= self.critic.backward(minibatch, batch, tensors)
            for name, value in metrics.items():
                sums[name] += value
        # Sorted, so that all ranks add up the same names in one tensor.
        names = sorted(sums)
        totals = self.ranks.sum(torch.stack([sums[name] for name in names]).cpu())
        result = without_skipped(objective, dict(zip(names, totals.tolist(), strict=True)))
        grad_norm = self.policy.step(rate, without_gradient=bool(result.get(SKIPPED_BY_RATIO)))
        result |= {"train/learning_rate": rate, "train/grad_norm": grad_norm}
        if self.critic is not None:
            result["critic/grad_norm"] = self.critic.step(rate, settings.learning_rate)
        if recorder is not None:
            # Sequences of weight 0 were not run: nothing is known of their tokens.
            stepped, ran_N = recorder.scored(self.ranks), minibatch.weights_N != 0
            if is_only:
                tensors.take(stepped)
                tensors.old_logprobs_mask_N = ran_N
            else:
                before = torch.nan if tensors.last_logprobs_N is None else tensors.last_logprobs_N
                tensors.last_logprobs_N = stepped.logprobs_N.where(ran_N, before)
        if settings.entropy_target is not None:
            result["train/entropy_coef"] = entropy_coef
        self.entropy.observe(result["train/entropy"])
        return result

    # Models, run over all sequences: what the preparation asks for

    def old_logprobs(self, sequences: Sequences) -> PolicyScores:
        return self.scorer.scored(self.policy, sequences, self.nucleus)

    def ref_logprobs(self, sequences: Sequences) -> Tensor:
        if self.prefetch is not None:
            return self.prefetch.logprobs(sequences)
        assert self.reference is not None
        with self.reference() as reference:
            return self.scorer.logprobs(reference, sequences)

    def values(self, sequences: Sequences) -> Tensor:
        assert self.critic is not None
        return self.scorer.values(self.critic.model, sequences)

    # Between iterations

    def restart(self, episodes: Collection[Episode] = (), on_signals: OnSignals | None = None) -> Metrics:
        """Puts policy and optimiser back to the very beginning.

        With `measure_kl`, the metrics say how far the policy that is given up had gone from there, measured
        on these episodes of its own; `on_signals` is called with its scores of their tokens. Collective.
        """
        assert self.critic is None, "a critic is trained on from iteration to iteration"
        settings, measured = self.settings, None
        if episodes and (settings.measure_kl or settings.token_signals == "all"):
            sequences = sequences_of_rank(episodes, settings, self.ranks, [], scores_all=True)
            measured = IterationTensors.of(episodes)
            measured.take(self.old_logprobs(sequences))
            if on_signals is not None and settings.token_signals != "none":
                on_signals(measured.signals(episodes, sequences))
        self.policy.close()
        del self.policy  # two optimisers at once might not fit
        self._free_memory()
        self.policy = self.factory.policy()
        self.entropy.value = self.entropy.start
        if measured is None or not settings.measure_kl:
            return {}
        measured.ref_logprobs_N = self.scorer.logprobs(self.policy, sequences)
        return measured.gap_metrics()

    def offload(self) -> None:
        """Moves all that only training needs off the accelerator: optimiser, master weights, gradients, the
        critic, and what was freed and kept. The policy can still be scored and exported."""
        self.policy.offload()
        if self.critic is not None:
            self.critic.model.offload(weights=True)
        self._free_memory()

    def reload(self) -> None:
        """Undoes `offload`."""
        self.policy.reload()
        if self.critic is not None:
            self.critic.model.reload()

    def _free_memory(self) -> None:
        gc.collect()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def score(self, pairs: Sequence[tuple[TokenIds, TokenIds]], temperature: float) -> list[list[float]]:
        """Log-probs of some answers under the present policy; see `Scorer.answer_logprobs`."""
        return self.scorer.answer_logprobs(self.policy, pairs, temperature)

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters and persistent buffers by their names in the model, whole on the first
        rank; adapters are merged into them. Collective.
        """
        weights = self._by_name(self.policy.state_dict())
        return weights if self.settings.lora is None else self.settings.lora.merged(weights)

    def weights_in_turn(self) -> Iterator[tuple[str, Tensor]]:
        """The same weights one after the other, on every rank and wherever they are; each is there until the
        next is asked for, so that nobody ever has them all. Collective, to the end.
        """
        lora = self.settings.lora
        for part in self.policy.parts():
            weights = self._by_name(part)
            yield from (weights if lora is None else lora.merged(weights)).items()

    @property
    def weight_names(self) -> list[str]:
        """The names of `weights_in_turn`."""
        names = self._by_name(saved_weights(self.policy.module))
        return list(names if self.settings.lora is None else self.settings.lora.merged_names(names))

    def adapters(self) -> dict[str, Tensor]:
        """The adapters' weights under peft's names, on the first rank; empty where there are none.
        Collective.
        """
        lora = self.settings.lora
        return {} if lora is None else lora.adapters(self._by_name(self.policy.state_dict()))

    def _by_name(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights by their names in the model, which `PolicyModule` holds."""
        return {name.removeprefix("model."): weight for name, weight in weights.items()}

    def critic_weights(self) -> dict[str, Tensor]:
        """The critic's weights by name, whole on the first rank; empty where there is none. Collective."""
        return {} if self.critic is None else self.critic.model.state_dict()

    def save(self, directory: Path) -> None:
        """Writes all that is needed to go on bit for bit. Collective."""
        self.policy.save(directory / "policy")
        if self.ranks.is_first:
            self.entropy.save(directory)
        if self.critic is not None:
            self.critic.model.save(directory / "critic")

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote. Collective."""
        self.policy.load(directory / "policy")
        self.entropy.load(directory)
        if self.critic is not None:
            self.critic.model.load(directory / "critic")

    def close(self) -> None:
        """Ends the scoring beside sampling."""
        if self.prefetch is not None:
            self.prefetch.close()
