"""Trains an implicit reward model π_φ on the outcomes of an iteration's answers (PRIME, arXiv:2502.01456),
before the policy's first step.

An iteration::

    for each minibatch of answers:   π_φ forward ──► log-ratios to the reference ──► sum of each answer
                                     ──► cross-entropy of the outcome ──► backward, step
    then (or before, see `scores`):  π_φ forward over all answers ──► rewards of tokens ──► advantages

An outcome is the reward that the grader gave to a whole answer. In the names of tensors, N stands for the
trained tokens (of the iteration, or of a micro-batch), and M for the answers of a micro-batch.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from treetune.credit.reward_models import RewardModelSettings, outcome_losses, refuse_outcomes
from treetune.seeds import derived_random
from treetune.trainer.batches import MicroBatch, micro_batches
from treetune.trainer.deepspeed_model import DeepSpeedModel
from treetune.trainer.scoring import Scorer
from treetune.trainer.tokens import Sequences
from treetune.vocabulary import Metrics


class RewardModelTraining:
    """The implicit reward model of a run, and its training.

    Args:
        model: The reward model with its optimiser. It is changed in place.
        settings: The reward model's settings.
        scorer: Runs models without gradient. Its settings (the trainer's), ranks and temperature (the
            rollout's) are also those of training: the reference's log-probs were computed with them.
        seed: The run's seed, for the order of answers.
    """

    def __init__(
        self, model: DeepSpeedModel, settings: RewardModelSettings, scorer: Scorer, seed: int
    ) -> None:
        self.model, self.settings, self.scorer, self.seed = model, settings, scorer, seed
        self.metrics: Metrics = {}
        """The metrics of the last iteration."""

    def learn_and_score(
        self,
        iteration: int,
        sequences: Sequences,
        ref_logprobs_N: Tensor,
        schedule: Callable[[int, int], float],
    ) -> Tensor:
        """Learns the outcomes of an iteration's answers. Sets `metrics`. Collective.

        Returns the implicit reward of every trained token, float32 [N]: β times the log-ratio of the reward
        model to the reference. `RewardModelSettings.scores` says whether the model before or after this
        learning computes the rewards.

        Args:
            sequences: The answers, with all of their tokens on every rank.
            ref_logprobs_N: The reference's log-probs of the answers' trained tokens.
            schedule: Returns the factor of the learning rate. Its arguments are the number of the iteration's
                steps that are done, and the number of all steps of the iteration.
        """
        if self.settings.scores == "before_update":
            rewards_N = self.rewards(sequences, ref_logprobs_N)
            metrics = self.train(iteration, sequences, ref_logprobs_N, schedule)
        else:
            metrics = self.train(iteration, sequences, ref_logprobs_N, schedule)
            rewards_N = self.rewards(sequences, ref_logprobs_N)
        mean_return = float(rewards_N.sum()) / len(sequences)  # the mean sum of an answer's rewards
        self.metrics = metrics | {"reward_model/return": mean_return}
        return rewards_N

    def train(
        self,
        iteration: int,
        sequences: Sequences,
        ref_logprobs_N: Tensor,
        schedule: Callable[[int, int], float],
    ) -> Metrics:
        """Trains the reward model to predict the outcomes of the answers. Returns the means of the steps'
        metrics. Collective.

        The arguments are those of `learn_and_score`.
        """
        refuse_outcomes(sequences.rewards)
        minibatches = self._minibatches(iteration, len(sequences))
        sums: dict[str, float] = defaultdict(float)
        for number, minibatch in enumerate(minibatches):
            rate = self.settings.learning_rate * schedule(number, len(minibatches))
            for name, value in self._step(sequences, minibatch, ref_logprobs_N, rate).items():
                sums[name] += value
        return {name: value / len(minibatches) for name, value in sums.items()}

    def rewards(self, sequences: Sequences, ref_logprobs_N: Tensor) -> Tensor:
        """Returns the implicit reward of every trained token, float32 [N]. Collective."""
        logprobs_N = self.scorer.logprobs(self.model, sequences)
        return self.settings.beta * (logprobs_N - ref_logprobs_N)

    def _minibatches(self, iteration: int, n_answers: int) -> list[list[int]]:
        """Returns the numbers of the answers of each step.

        Every epoch shuffles all answers and cuts them into minibatches of the trainer's size. The order
        differs from that of the policy's training.
        """
        minibatch_size = self.scorer.settings.minibatch_size or n_answers
        minibatches = []
        for epoch in range(self.settings.epochs):
            draw: random.Random = derived_random(self.seed, iteration, "reward model's minibatches", epoch)
            shuffled_answers = list(range(n_answers))
            draw.shuffle(shuffled_answers)
            for start in range(0, n_answers, minibatch_size):
                minibatches.append(shuffled_answers[start : start + minibatch_size])
        return minibatches

    def _step(
        self, sequences: Sequences, minibatch: list[int], ref_logprobs_N: Tensor, rate: float
    ) -> Metrics:
        """Takes one optimiser step on the mean loss of a minibatch's answers. Returns its metrics, which are
        those before the update. Collective.

        Args:
            minibatch: The numbers of the answers.
            rate: The learning rate.
        """
        ranks = self.scorer.ranks
        units = [sequences.rows_of((number,)) for number in minibatch]
        totals_2 = torch.zeros(2, device=ranks.device)  # this rank's parts of the loss and of the accuracy
        # Answers are not divided, since a loss needs the sum over all tokens of its answer.
        for batch in micro_batches(sequences, units, self.scorer.settings, ranks, keep_units=True):
            returns_M = self._returns(batch, ref_logprobs_N)
            outcomes_M = _outcomes(sequences, batch).to(ranks.device)
            # The losses of all micro-batches of all ranks add up to the minibatch's mean: `loss_scale` is 0
            # for a dummy, and 1 / (number of ranks) for a micro-batch that ranks compute together.
            weight = batch.loss_scale / len(minibatch)
            loss = weight * outcome_losses(returns_M, outcomes_M).sum()
            self.model.backward(loss)
            predicts_correct_M = returns_M.detach() > 0  # with a probability above 0.5
            is_correct_M = outcomes_M > 0.5
            share_of_hits = weight * (predicts_correct_M == is_correct_M).sum()
            totals_2 += torch.stack([loss.detach(), share_of_hits])
        loss_of_step, accuracy = ranks.sum(totals_2).tolist()
        return {
            "reward_model/loss": loss_of_step,
            "reward_model/accuracy": accuracy,
            "reward_model/grad_norm": self.model.step(rate),
        }

    def _returns(self, batch: MicroBatch, ref_logprobs_N: Tensor) -> Tensor:
        """Returns the sum of the implicit rewards of each answer of a micro-batch, [M], with gradient."""
        logprobs_N, *_ = self.model(batch.inputs, self.scorer.temperature)
        log_ratios_N = logprobs_N - ref_logprobs_N[batch.flat_index_N].to(logprobs_N.device)
        # The tokens of an answer are neighbours. `trained_tokens` has their number for each answer.
        sums = [log_ratios_T.sum() for log_ratios_T in log_ratios_N.split(batch.trained_tokens)]
        return self.settings.beta * torch.stack(sums)


def _outcomes(sequences: Sequences, batch: MicroBatch) -> Tensor:
    """Returns the outcome of each answer of a micro-batch, [M].

    A micro-batch only knows the indices of its tokens among those of the iteration. Example: of answers that
    start at 0, 4 and 6, a micro-batch has the third one and then the first. Its ``flat_index_N`` is
    ``[6, 7, 0, 1, 2, 3]``, and its ``trained_tokens`` are ``(2, 4)``. So its answers begin at 6 and 0, and
    their numbers are 2 and 0.
    """
    starts = torch.tensor(sequences.starts)
    first_in_batch_M = torch.tensor([0, *batch.trained_tokens[:-1]]).cumsum(0)
    first_of_answer_M = batch.flat_index_N[first_in_batch_M]
    number_M = torch.searchsorted(starts, first_of_answer_M, right=True) - 1  # the last start up to it
    return torch.tensor(sequences.rewards)[number_M]
