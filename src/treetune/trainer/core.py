"""Trains policy and critic on an iteration's episodes, in the same way for every method.

::

    episodes ──► Sequences        rows of token ids, and the index of each trained token
             ──► prepare          before the first step: reference, old log-probs, values, advantages
             ──► steps, each on a minibatch:
                   micro-batches  teacher, forward, objective.loss, backward; gradients add up
                   policy.step    one update, on all ranks
"""

from __future__ import annotations

import dataclasses
import gc
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from treetune.credit.base import CriticSettings
from treetune.credit.gae import FromValues
from treetune.credit.reward_models import RewardModelSettings
from treetune.models.logprobs import Nucleus
from treetune.models.saved_weights import saved_weights
from treetune.objectives.further_inputs import MarkingObjective, teacher_of
from treetune.objectives.policy_gradient import SKIPPED_BY_RATIO, without_skipped
from treetune.objectives.teacher import Teacher
from treetune.rollouts.storage import TokenSignals
from treetune.seeds import derived_random
from treetune.trainer.base import Trainer
from treetune.trainer.batches import Minibatch, micro_batches, sequences_of_rank
from treetune.trainer.deepspeed_model import DeepSpeedModel, ModelFactory, Reference
from treetune.trainer.preparation import FromImplicitRewards, IterationTensors, prepare
from treetune.trainer.probe import refuse_wrong_trainer_logprobs
from treetune.trainer.ranks import Ranks
from treetune.trainer.reward_model import RewardModelTraining
from treetune.trainer.scoring import PolicyScores, ReferencePrefetch, Scorer
from treetune.trainer.teacher import MovingAverage, TeacherModel
from treetune.trainer.tokens import Sequences, Unit, units_of
from treetune.trainer.update import (
    CriticTraining,
    EntropyCoefficient,
    StepRecorder,
    micro_batch_loss,
    refuse_other_critic_loss,
    write_critic_loss,
)
from treetune.vocabulary import Episode, Metrics, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPUTED_TOKENS_METRIC = "train/computed_tokens"
"""The metric of the tokens that the policy computed for the iteration's updates, on all ranks, without
padding."""

OnSignals = Callable[[Sequence[TokenSignals]], None]
"""A function that gets the policy's scores of each episode's tokens, once, after the iteration's last update,
if they are known."""


class PolicyTrainer:
    """Trains a policy, and the critic or the reward model if the credit needs one. Runs the teacher if the
    objective has one.

    Args:
        load_model: Loads a fresh copy of the start model.
        load_reference: Loads the reference model, if it is not the start model.
        temperature: The rollout's. Log-probs are those of the distribution that was sampled from, before
            top-p and top-k (`nucleus`) cut it.
        iterations: The iterations that the learning-rate schedule spans; one if training `restarts` from the
            start weights in each iteration.
        critic: The settings of the critic; None for no critic.
        from_values: Computes advantages from the critic's values.
        reward_model: The settings of an implicit reward model that is trained; None for none.
        load_reward_model: Loads the model that it starts from, if it is not the start model.
        from_implicit_rewards: Computes advantages from the reward model's rewards.
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
        reward_model: RewardModelSettings | None = None,
        load_reward_model: Callable[[], nn.Module] | None = None,
        from_implicit_rewards: FromImplicitRewards | None = None,
    ) -> None:
        self.settings, self.ranks, self.seed = settings, ranks, seed
        self.temperature, self.nucleus = temperature, nucleus
        self.iterations, self.restarts = iterations, restarts
        self.from_values, self.from_implicit_rewards = from_values, from_implicit_rewards
        self.scorer = Scorer(settings, ranks, temperature)
        self.factory = ModelFactory(settings, load_model, ranks, seed, load_reference)
        self.policy = self.factory.policy()
        refuse_wrong_trainer_logprobs(self.policy, settings, ranks)
        self.reference: Reference | None = None
        if settings.keeps_reference:
            # A function and not the model itself, since `restart` replaces `self.policy`.
            self.reference = self.factory.reference(lambda: self.policy)
        self.average: MovingAverage | None = None
        """The moving average of the policy's weights, if it is the teacher; then `_teacher` sets it."""
        self.teacher: TeacherModel | None = None
        """The objective's teacher, whose whole distributions the policy learns."""
        teacher = teacher_of(settings.objective)
        if teacher is not None:
            self.teacher = self._teacher(teacher)
        self.prefetch: ReferencePrefetch | None = None
        """Scores answers under the reference while others are sampled, with ``reference_scores:
        'while_sampling'``."""
        if self.reference is not None and settings.reference_scores == "while_sampling":
            self.prefetch = ReferencePrefetch(self.reference, self.scorer)
        self.entropy_coef = EntropyCoefficient(settings.objective.entropy_coef, settings.entropy_target)
        self.critic: CriticTraining | None = None
        if critic is not None:
            self.critic = CriticTraining(self.factory.critic(critic.loss), critic)
        self.reward_model: RewardModelTraining | None = None
        if reward_model is not None:
            model = self.factory.reward_model(load_reward_model)
            if load_reward_model is not None:  # else it is the policy's model, which is checked above
                refuse_wrong_trainer_logprobs(model, settings, ranks)
            self.reward_model = RewardModelTraining(model, reward_model, self.scorer, seed)

    def _teacher(self, settings: Teacher) -> TeacherModel:
        """Returns the teacher. If it is a moving average, loads another copy of the start model for it."""
        if settings.weights == "reference":
            assert self.reference is not None, "the objective needs the reference then"
            return TeacherModel(self.reference)
        if settings.weights == "policy":
            # A function and not the model itself, since `restart` replaces `self.policy`.
            return TeacherModel(lambda: nullcontext(self.policy))
        assert settings.decay is not None, "checked when the objective is built"
        self.average = average = MovingAverage(self.factory.frozen_policy(), settings.decay)
        return TeacherModel(lambda: nullcontext(average.module))

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
        progress: Callable[[int, int], None] | None = None,
        on_signals: OnSignals | None = None,
    ) -> Metrics:
        """Trains on these episodes, in all epochs, and returns the metrics. Collective.

        Every rank is given the same episodes, and keeps the tokens of only those rows that it computes.
        Without episodes, no step is taken, and the metrics count no steps and no tokens.
        """
        training = self.begin(iteration, episodes)
        for step in training.steps():
            if progress is not None:
                progress(step.number, step.total_steps)
        return training.finish(on_signals)

    def begin(self, iteration: int, episodes: Collection[Episode]) -> IterationTraining:
        """Returns the training on these episodes, for callers that may end it before all epochs are over.
        Nothing is computed before its first step."""
        return IterationTraining(self, iteration, episodes)

    # The stages of an iteration, which `IterationTraining` runs one after the other

    def plan_steps(self, iteration: int, units: Sequence[Unit]) -> list[list[Unit]]:
        """Returns the units of each step of the iteration. There must be at least one unit.

        A unit is a sequence, or the pair of sequences that a preference objective compares. Every epoch
        shuffles all units and cuts them into minibatches. The last minibatch of an epoch may be smaller.
        """
        minibatch_size = self.settings.minibatch_size or len(units)
        steps = []
        for epoch in range(self.settings.epochs):
            shuffled_units = list(units)
            derived_random(self.seed, iteration, "minibatches", epoch).shuffle(shuffled_units)
            for start in range(0, len(units), minibatch_size):
                steps.append(shuffled_units[start : start + minibatch_size])
        return steps

    def has_something_to_learn(self, minibatch: Minibatch, tensors: IterationTensors) -> bool:
        """Returns whether to take a step on the minibatch. No step is taken in three cases:

        * All sequences have weight 0.
        * The objective learns only from a teacher, and no answer has one.
        * `skip_without_advantage` is set, and all advantages are 0.

        Such a step would move the weights only by old momentum, the KL and weight decay.
        """
        if not minibatch.units:  # all sequences have weight 0
            return False
        is_trained_N = minibatch.weights_N != 0
        learns_from_teacher_alone = self.teacher is not None and not self.settings.objective.needs_advantages
        if learns_from_teacher_alone:
            assert tensors.has_teacher_N is not None, "`prepare` sets it for an objective with a teacher"
            return bool(tensors.has_teacher_N[is_trained_N].any())
        # The advantages before penalties and normalisation; None if credit gives none.
        if not self.settings.skip_without_advantage or tensors.credit_advantages_N is None:
            return True
        return bool(tensors.credit_advantages_N[is_trained_N].any())

    def learning_rate(self, iteration: int, steps_done: int, steps: int) -> float:
        """Returns the policy's learning rate for the next step of the iteration, from the schedule.

        The number of steps of later iterations is unknown, since selection may leave out any number of
        answers. So the schedule counts every iteration as if it had as many steps as this one. Warm-up and
        decay then end at the right iteration.
        """
        # If every iteration restarts from the start model, the schedule spans a single iteration.
        iterations_before = 0 if self.restarts else iteration
        iterations = 1 if self.restarts else self.iterations
        factor = self.settings.schedule.factor(iterations_before * steps + steps_done, iterations * steps)
        return self.settings.learning_rate * factor

    def take_step(
        self,
        sequences: Sequences,
        minibatch: Minibatch,
        tensors: IterationTensors,
        rate: float,
        is_only_step: bool,
    ) -> Metrics:
        """Takes one optimiser step of the policy, and of the critic. Collective.

        Args:
            rate: The learning rate of the policy.
            is_only_step: True if the iteration has no other step. The log-probs of this step's forward pass
                are then the old ones, and are recorded in `tensors`.
        """
        settings = self.settings
        # The recorder keeps the scores of the forward passes; None if nothing needs them. With a nucleus (the
        # run's top-p and top-k), it also keeps the mass that the nucleus leaves.
        recorder, nucleus = self._recorder_for(sequences, tensors, is_only_step=is_only_step)
        entropy_coef = self.entropy_coef.value
        metrics = self._accumulate_gradients(sequences, minibatch, tensors, entropy_coef, recorder, nucleus)
        # The objective's `ratio_threshold` drops the loss of a step whose mean ratio is too large. The mean
        # is known only now, after all micro-batches.
        is_skipped = bool(metrics.get(SKIPPED_BY_RATIO))
        metrics["train/learning_rate"] = rate
        metrics["train/grad_norm"] = self.policy.step(rate, without_gradient=is_skipped)
        if self.average is not None:
            self.average.follow(self.policy.module)
        if self.critic is not None:
            # The critic has a learning rate of its own, which is multiplied by rate / settings.learning_rate.
            metrics["critic/grad_norm"] = self.critic.step(rate, settings.learning_rate)
        if recorder is not None:
            # Sequences of weight 0 were not computed, so the scores of their tokens are unknown.
            is_known_N = minibatch.weights_N != 0
            _keep_scores(tensors, recorder.all_scores(self.ranks), is_known_N, are_old=is_only_step)
        if settings.entropy_target is not None:
            metrics["train/entropy_coef"] = entropy_coef
        self.entropy_coef.observe(metrics["train/entropy"])
        return metrics

    def _accumulate_gradients(
        self,
        sequences: Sequences,
        minibatch: Minibatch,
        tensors: IterationTensors,
        entropy_coef: float,
        recorder: StepRecorder | None,
        nucleus: Nucleus | None,
    ) -> Metrics:
        """Runs policy and critic forward and backward over the minibatch, micro-batch by micro-batch.
        Collective.

        Args:
            recorder: Gets the policy's scores; None if they aren't needed.
            nucleus: See `_recorder_for`.

        Returns:
            The metrics of the whole minibatch, the same on every rank.
        """
        objective = self.settings.objective
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.ranks.device))
        # `keep_units`: whether the objective needs all rows of a sequence or pair in one micro-batch.
        for batch in micro_batches(
            sequences,
            minibatch.units,
            self.settings,
            self.ranks,
            keep_units=minibatch.keep_units,
            with_teacher=self.teacher is not None,
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
                teacher=self.teacher,
            )
            # The losses of all micro-batches of all ranks add up to the minibatch's loss, so their gradients
            # are summed and not averaged.
            self.policy.backward(loss)
            # If several ranks compute a micro-batch together, only one of them reports its scores. No rank
            # reports those of a dummy.
            if recorder is not None and self.scorer.reports(batch):
                recorder.add(batch, scored)
            # The counts of all ranks are summed below, so they are scaled as losses are. `loss_scale` is 0
            # for a dummy (a repeated micro-batch that only keeps the ranks in step), and 1 / (number of
            # ranks) for a micro-batch that several ranks compute together.
            metrics[COMPUTED_TOKENS_METRIC] = batch.computed_tokens * batch.loss_scale
            # Without prompts of its own (`of_critic`), the critic computes the same micro-batches.
            if self.critic is not None and sequences.of_critic is None:
                metrics |= self.critic.backward(minibatch, batch, tensors)
            for name, value in metrics.items():
                sums[name] += value
        if self.critic is not None and sequences.of_critic is not None:
            # With prompts of its own, the critic has rows of other lengths than the policy's. They are
            # distributed to other micro-batches.
            for batch in micro_batches(
                sequences.of_critic,
                minibatch.units,
                self.settings,
                self.ranks,
                keep_units=minibatch.keep_units,
            ):
                for name, value in self.critic.backward(minibatch, batch, tensors).items():
                    sums[name] += value
        # All ranks sum their metrics in one tensor, so the names must be in the same order on each.
        names = sorted(sums)
        totals = self.ranks.sum(torch.stack([sums[name] for name in names]))
        metrics_of_minibatch = dict(zip(names, totals.tolist(), strict=True))
        # If the objective drops a step whose mean ratio is too large (`ratio_threshold`), the losses of such
        # a step are 0.
        return without_skipped(objective, metrics_of_minibatch)

    def _recorder_for(
        self, sequences: Sequences, tensors: IterationTensors, *, is_only_step: bool
    ) -> tuple[StepRecorder | None, Nucleus | None]:
        """Returns the recorder of the scores of a step's forward passes, and the nucleus (top-p or top-k)
        whose mass is recorded with them.

        The recorder is None if no scores are recorded. The nucleus is None if no mass is recorded.

        ====================  ==================  =================  =========================================
        steps of iteration    old log-probs       recorded           for
        ====================  ==================  =================  =========================================
        one                   not yet known       scores and mass,   the old log-probs: metrics of the gap to
                                                  if answers were    the engine, ``train/kl``, token signals
                                                  sampled
        one                   known: a penalty    nothing
                              needed them
        several               known               scores, if there   the token signal ``log_ratios``: how far
                                                  are token signals  each token has moved when last trained
        several               unknown: nothing    nothing
                              needs them
        ====================  ==================  =================  =========================================

        Old log-probs that are computed for token signals alone are not in `tensors`, but in a copy
        (`_tensors_of_signals`). So they don't count as known here.

        Args:
            is_only_step: True if the iteration has no other step; see `take_step`.
        """
        knows_old_logprobs = tensors.old_logprobs_N is not None
        if is_only_step:
            was_sampled = tensors.behaviour_logprobs_N is not None
            if was_sampled and not knows_old_logprobs:
                # The engine's log-probs are those of a distribution that top-p and top-k have cut. With the
                # mass that the cut leaves, the policy's log-probs are made comparable with them
                # (`IterationTensors.gap_N`).
                return StepRecorder(sequences.n_tokens, with_mass=self.nucleus is not None), self.nucleus
        elif knows_old_logprobs and self.settings.token_signals != "none":
            return StepRecorder(sequences.n_tokens, with_mass=False), None
        return None, None

    # The models that `prepare` needs (`preparation.Models`)

    def old_logprobs(self, sequences: Sequences) -> PolicyScores:
        """Returns the present policy's scores of every trained token. Collective."""
        return self.scorer.all_scores(self.policy, sequences, self.nucleus)

    def ref_logprobs(self, sequences: Sequences) -> Tensor:
        """Returns the reference's log-probs of every trained token, shape [N]. Collective."""
        if self.prefetch is not None:
            return self.prefetch.logprobs(sequences)
        assert self.reference is not None
        with self.reference() as reference:
            return self.scorer.logprobs(reference, sequences)

    def reference_kl(self, sequences: Sequences) -> Tensor:
        """Returns the exact KL of the policy to the reference at every trained token, shape [N].
        Collective."""
        assert self.reference is not None
        return self.scorer.reference_kl(self.policy, self.reference, sequences)

    def logprobs_of_reference(self, sequences: Sequences) -> Tensor:
        """Returns the reference's log-probs of texts that aren't answers of the iteration, for the credit.
        Collective."""
        assert self.reference is not None
        with self.reference() as reference:
            return self.scorer.logprobs(reference, sequences)

    def distributions(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns Σ_v π(v)² and the entropy of the present policy's distribution at every trained token, for
        the credit, shape [N] each. Collective."""
        return self.scorer.distributions(self.policy, sequences)

    def reference_distances(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Returns the distances of the policy's distributions from the reference's, and their entropies, for
        the credit; see `Scorer.reference_distances`. Collective."""
        assert self.reference is not None
        return self.scorer.reference_distances(self.policy, self.reference, sequences)

    def group_divergences(self, sequences: Sequences, positions_N: Tensor) -> Tensor:
        """Returns the divergences of the policy's distributions from their means over the answers to a
        problem, for the credit; see `Scorer.group_divergences`. Collective."""
        return self.scorer.group_divergences(self.policy, sequences, positions_N)

    def learned_rewards(self, iteration: int, sequences: Sequences, ref_logprobs_N: Tensor) -> Tensor:
        """Trains the reward model on the answers' outcomes, and returns its reward of every trained token,
        shape [N]. Collective."""
        assert self.reward_model is not None

        def schedule(steps_done: int, steps: int) -> float:
            """Returns the factor that the policy's schedule puts on a learning rate. The steps are those of
            the reward model, which may take more or fewer steps than the policy."""
            return self.learning_rate(iteration, steps_done, steps) / self.settings.learning_rate

        return self.reward_model.learn_and_score(iteration, sequences, ref_logprobs_N, schedule)

    def values(self, sequences: Sequences) -> Tensor:
        """Returns the critic's value of the state before every trained token, shape [N]. Collective."""
        assert self.critic is not None
        return self.scorer.values(self.critic.model, sequences.of_critic or sequences)

    # Between iterations

    def restart(self, episodes: Collection[Episode] = (), on_signals: OnSignals | None = None) -> Metrics:
        """Resets policy and optimiser to the start model. Collective.

        Args:
            episodes: The episodes that the old policy, the one before the reset, has sampled.
            on_signals: Gets the old policy's scores of the episodes' tokens, such as entropies, if they are
                computed.

        Returns:
            With `measure_kl`, the KL of the old policy to the start model on the episodes, and the gap
            between its log-probs and the engine's; else no metrics.
        """
        assert self.critic is None, "a critic is trained on from iteration to iteration"
        assert self.average is None, "a moving average is refused with `restart`"
        assert self.reward_model is None, "a reward model is trained on from iteration to iteration"
        settings = self.settings
        tensors: IterationTensors | None = None
        if episodes and (settings.measure_kl or settings.token_signals == "all"):
            # The episodes are only scored, and no step is taken on them.
            sequences = sequences_of_rank(episodes, settings, self.ranks, units_by_step=[], scores_all=True)
            tensors = IterationTensors.of(episodes)
            tensors.set_old_scores(self.old_logprobs(sequences))
            if on_signals is not None and settings.token_signals != "none":
                on_signals(tensors.signals(episodes, sequences))
        # The old policy is freed before the new one is loaded: two optimisers might not fit into memory.
        self.policy.close()
        del self.policy
        self._free_memory()
        self.policy = self.factory.policy()
        self.entropy_coef.value = self.entropy_coef.start
        if tensors is None or not settings.measure_kl:
            return {}
        # The new policy is the start model, which serves as the reference here.
        tensors.ref_logprobs_N = self.scorer.logprobs(self.policy, sequences)
        return tensors.gap_metrics() | tensors.reference_metrics()

    def offload(self) -> None:
        """Moves everything that only training needs off the accelerator: optimiser, master weights,
        gradients, the critic, the reward model, the teacher's moving average, and PyTorch's cache of freed
        memory. The policy can still be scored and exported."""
        self.policy.offload()
        for model in self._learned_models():
            model.offload(weights=True)
        if self.average is not None:
            self.average.move_to(torch.device("cpu"))
        self._free_memory()

    def reload(self) -> None:
        """Undoes `offload`."""
        self.policy.reload()
        for model in self._learned_models():
            model.reload()
        if self.average is not None:
            self.average.move_to(self.ranks.device)

    def _learned_models(self) -> Iterator[DeepSpeedModel]:
        """Yields the models that are trained in addition to the policy."""
        if self.critic is not None:
            yield self.critic.model
        if self.reward_model is not None:
            yield self.reward_model.model

    def _free_memory(self) -> None:
        gc.collect()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def score(self, pairs: Sequence[tuple[TokenIds, TokenIds]], temperature: float) -> list[list[float]]:
        """Returns the log-probs of answers under the present policy; see `Scorer.answer_logprobs`."""
        return self.scorer.answer_logprobs(self.policy, pairs, temperature)

    def weights(self) -> dict[str, Tensor]:
        """Returns the policy's parameters and persistent buffers by their names in the model, whole on the
        first rank. Adapters are merged into them. Collective.
        """
        weights = self._by_name(self.policy.state_dict())
        return weights if self.settings.lora is None else self.settings.lora.merged_weights(weights)

    def weights_in_turn(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the same weights as `weights` returns, one after the other, on every rank. They are not
        moved to another device.

        Each weight exists only until the next one is requested, so that no rank holds all of them at a time.
        Collective: every rank must take all of them.
        """
        lora = self.settings.lora
        for weights_of_layer in self.policy.layers():
            weights = self._by_name(weights_of_layer)
            if lora is not None:
                weights = lora.merged_weights(weights)
            yield from weights.items()

    @property
    def weight_names(self) -> list[str]:
        """The names of the weights that `weights_in_turn` yields."""
        names = self._by_name(saved_weights(self.policy.module))
        return list(names if self.settings.lora is None else self.settings.lora.merged_names(names))

    def adapters(self) -> dict[str, Tensor]:
        """Returns the adapters' weights by peft's names, on the first rank; empty without adapters.
        Collective.
        """
        lora = self.settings.lora
        return {} if lora is None else lora.adapters(self._by_name(self.policy.state_dict()))

    def _by_name(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the weights by their names in the model, without `PolicyModule`'s prefix."""
        return {name.removeprefix("model."): weight for name, weight in weights.items()}

    def critic_weights(self) -> dict[str, Tensor]:
        """Returns the critic's weights by name, whole on the first rank; empty without a critic.
        Collective."""
        return {} if self.critic is None else self.critic.model.state_dict()

    def reward_model_weights(self) -> dict[str, Tensor]:
        """Returns the reward model's weights by their names in the model, whole on the first rank; empty
        without a reward model. Collective."""
        return {} if self.reward_model is None else self._by_name(self.reward_model.model.state_dict())

    def save(self, directory: Path) -> None:
        """Writes the whole state of training, from which it resumes bit for bit. Collective."""
        self.policy.save(directory / "policy")
        if self.critic is not None:
            self.critic.model.save(directory / "critic")
        if self.reward_model is not None:
            self.reward_model.model.save(directory / "reward_model")
        # What follows is the same on all ranks.
        if self.ranks.is_first:
            self.entropy_coef.save(directory)
            if self.average is not None:
                self.average.save(directory)
            if self.critic is not None:
                write_critic_loss(directory, self.critic.settings.loss)

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote. Collective."""
        self.policy.load(directory / "policy")
        self.entropy_coef.load(directory)
        if self.average is not None:
            self.average.load(directory)
        if self.critic is not None:
            refuse_other_critic_loss(directory, self.critic.settings.loss)
            self.critic.model.load(directory / "critic")
        if self.reward_model is not None:
            self.reward_model.model.load(directory / "reward_model")

    def close(self) -> None:
        """Ends the thread that scores the reference."""
        if self.prefetch is not None:
            self.prefetch.close()


def _keep_scores(
    tensors: IterationTensors, scores: PolicyScores, is_known_N: Tensor, *, are_old: bool
) -> None:
    """Keeps a step's scores as the old ones, or else as the last ones.

    The old scores are those before the first step. The last ones are those at the last step that trained a
    token.

    Args:
        is_known_N: The tokens that the step computed. The others have no score.
        are_old: Whether these are the old scores.
    """
    if are_old:
        tensors.set_old_scores(scores)
        tensors.old_logprobs_mask_N = is_known_N
        return
    # Tokens that this step has not computed keep their earlier score, or NaN without one.
    earlier = torch.nan if tensors.last_logprobs_N is None else tensors.last_logprobs_N
    tensors.last_logprobs_N = scores.logprobs_N.where(is_known_N, earlier)


class FinishedStep(NamedTuple):
    """The progress of an iteration's training after one of its steps.

    Example: of four epochs of two steps each, three are over::

        FinishedStep(number=6, total_steps=8, epochs=3)
    """

    number: int
    """The number of this step, from 1."""
    total_steps: int
    """The number of steps of the iteration."""
    epochs: int | None
    """The number of epochs that are over, if one ends with this step; else None."""

    @property
    def is_last(self) -> bool:
        return self.number == self.total_steps


class IterationTraining:
    """The training of one iteration. Its caller asks `steps` for one step after the other, may stop before
    the last one, and then calls `finish`.

    The old log-probs, those of the policy before the first step, come from one of three passes:

    =============================  ===============================  =========================================
    case                           pass                             used by
    =============================  ===============================  =========================================
    several steps that need them,  before the first step, in        training, metrics and token signals
    or a KL penalty in rewards or  `prepare`
    advantages
    only step, of sampled answers  the forward pass of the step     metrics, and token signals if there is no
                                   itself, in `take_step`           pass for signals alone; training needs
                                                                    none, since its ratio is 1
    signals alone: not the first   before the first step, in        token signals, from the copy
    case, `token_signals` 'all'    `_score_tokens`                  `_tensors_of_signals`
    =============================  ===============================  =========================================

    Example: training that ends after the first epoch::

        training = trainer.begin(iteration, episodes)
        for step in training.steps():
            if step.epochs == 1:
                break
        metrics = training.finish()
    """

    def __init__(self, trainer: PolicyTrainer, iteration: int, episodes: Collection[Episode]) -> None:
        self._trainer, self._iteration, self._episodes = trainer, iteration, episodes
        self._sums: dict[str, float] = defaultdict(float)
        """Metrics, summed over the steps so far."""
        self._steps_done = self._steps_skipped = 0

    def steps(self) -> Iterator[FinishedStep]:
        """Scores the tokens, and then takes one step whenever the caller asks for the next one.
        Collective."""
        trainer = self._trainer
        settings, objective = trainer.settings, trainer.settings.objective
        units = units_of(self._episodes, in_pairs=objective.needs_pairs)
        if not units:
            return  # nothing is scored either: `finish` has counts of 0
        units_by_step = trainer.plan_steps(self._iteration, units)
        steps = len(units_by_step)
        steps_per_epoch = steps // settings.epochs  # every epoch has the same number
        self._score_tokens(units_by_step)
        sequences, tensors = self._sequences, self._tensors
        for number, units_of_step in enumerate(units_by_step, start=1):
            minibatch = Minibatch.of(sequences, units_of_step, objective)
            if isinstance(objective, MarkingObjective) and minibatch.units:
                minibatch = self._mark_tokens(minibatch, objective, number)
            if trainer.has_something_to_learn(minibatch, tensors):
                rate = trainer.learning_rate(self._iteration, number - 1, steps)
                step_metrics = trainer.take_step(sequences, minibatch, tensors, rate, is_only_step=steps == 1)
                for name, value in step_metrics.items():
                    self._sums[name] += value
            else:
                self._steps_skipped += 1
            self._steps_done = number
            ends_epoch = number % steps_per_epoch == 0
            epochs = number // steps_per_epoch if ends_epoch else None
            yield FinishedStep(number, steps, epochs)

    def _score_tokens(self, units_by_step: Sequence[Sequence[Unit]]) -> None:
        """Runs the models over all sequences whose scores the steps or the token signals need. Collective."""
        trainer, episodes, settings = self._trainer, self._episodes, self._trainer.settings
        scores_old = settings.scores_old_logprobs(several_steps=len(units_by_step) > 1)
        learned_rewards = None
        if trainer.reward_model is None:
            # Whether a model is run over all sequences before the first step.
            scores_all = (
                scores_old
                or settings.keeps_reference
                or trainer.critic is not None
                or settings.token_signals == "all"
            )
            sequences = sequences_of_rank(
                episodes, settings, trainer.ranks, units_by_step, scores_all=scores_all
            )
        else:
            # The sequences have the tokens of all rows, since the reward model has minibatches of its own. So
            # a rank computes other rows for the reward model than for the policy.
            sequences = Sequences.of(episodes)
            learned_rewards = partial(trainer.learned_rewards, self._iteration)
        tensors = prepare(
            settings,
            episodes,
            sequences,
            models=trainer,
            scores_old=scores_old,
            critic=trainer.critic is not None,
            from_values=trainer.from_values,
            learned_rewards=learned_rewards,
            from_implicit_rewards=trainer.from_implicit_rewards,
        )
        if trainer.critic is not None:
            assert tensors.returns_N is not None, "a critic has returns to learn"
            trainer.critic.settings.loss.refuse_returns(tensors.returns_N)
        self._sequences, self._tensors = sequences, tensors
        self._tensors_of_signals = tensors
        """The tensors from which token signals are made: the log-probs, entropies and the like of each token
        that are stored with the episodes. They are `_tensors` itself, or a copy with old log-probs."""
        if tensors.old_logprobs_N is None and settings.token_signals == "all":
            # The old log-probs are computed for token signals alone. They are put into a copy, so that the
            # bits of the update don't depend on `token_signals`: the step still takes its old log-probs from
            # its own forward pass.
            self._tensors_of_signals = dataclasses.replace(tensors)
            self._tensors_of_signals.set_old_scores(trainer.old_logprobs(sequences))
        self._constant_metrics = tensors.metrics()
        if trainer.prefetch is not None:
            self._constant_metrics |= trainer.prefetch.metrics
        if trainer.reward_model is not None:
            self._constant_metrics |= trainer.reward_model.metrics

    def _mark_tokens(self, minibatch: Minibatch, objective: MarkingObjective, step: int) -> Minibatch:
        """Returns the minibatch with the tokens that the loss treats differently.

        The objective chooses these tokens by the old log-probs. In an iteration of a single step, the old
        log-probs are computed in the step's own forward pass, which is too late here. The engine's log-probs
        then replace them.
        """
        trainer, tensors = self._trainer, self._tensors
        logprobs_N = tensors.old_logprobs_N
        if logprobs_N is None:
            logprobs_N = tensors.behaviour_logprobs_N
        assert logprobs_N is not None, "sampled tokens carry the engine's log-probs"
        assert tensors.advantages_N is not None, "a policy gradient has advantages"
        draw = derived_random(trainer.seed, self._iteration, "marked tokens", step)
        return minibatch.with_marked_tokens(objective, logprobs_N, tensors.advantages_N, draw)

    def finish(self, on_signals: OnSignals | None = None) -> Metrics:
        """Returns the metrics of the steps that were taken, and passes the token signals to `on_signals`.

        Metrics are means over the steps, except counts (steps, tokens), which are sums. Without episodes,
        there are only the counts, which are 0.
        """
        if not self._episodes:
            return {"train/steps": 0.0, "train/tokens": 0.0, COMPUTED_TOKENS_METRIC: 0.0}
        settings, tensors, sequences = self._trainer.settings, self._tensors, self._sequences
        # The tensors with the old log-probs that token signals need: `tensors`, or a copy of them.
        tensors_of_signals = self._tensors_of_signals
        has_signals = settings.token_signals != "none" and tensors_of_signals.old_logprobs_N is not None
        if on_signals is not None and has_signals:
            on_signals(tensors_of_signals.signals(self._episodes, sequences))
        steps_taken = self._steps_done - self._steps_skipped
        metrics = dict(self._constant_metrics)
        for name, value in self._sums.items():  # empty if no step was taken
            metrics[name] = value / steps_taken
        if tensors.old_logprobs_N is not None:
            metrics |= tensors.gap_metrics() | tensors.reference_metrics()
        metrics["train/steps"] = float(steps_taken)
        metrics["train/tokens"] = float(sequences.n_tokens)
        # This is a count, so the sum replaces the mean.
        metrics[COMPUTED_TOKENS_METRIC] = self._sums[COMPUTED_TOKENS_METRIC]
        if self._steps_skipped:
            metrics["train/skipped_steps"] = float(self._steps_skipped)
        return metrics
