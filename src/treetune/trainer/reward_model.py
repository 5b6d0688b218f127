"""Trains an implicit reward model on the outcomes of an iteration's answers (PRIME, arXiv:2502.01456), before
the policy's first step.

An iteration::

    for each minibatch of answers:   π_φ forward ──► log-ratios to the reference ──► sum of each answer
                                     ──► cross-entropy of the outcome ──► backward, step
    then (or before, see `scores`):  π_φ forward over all answers ──► rewards of tokens ──► advantages
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
        settings: The reward model's settings.
        scorer: Has the trainer's settings, the ranks and the rollout's temperature, at which log-probs of the
            reward model and of the reference are compared.
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
        """Learns the outcomes of an iteration's answers, which are their rewards. Returns the implicit reward
        of every trained token, float32 [N], after this or before it (`RewardModelSettings.scores`).
        Collective.

        Args:
            sequences: The answers, with all of their tokens on every rank.
            ref_logprobs_N: The reference's log-probs of their trained tokens.
            schedule: Returns the factor of the learning rate from the number of steps that are done in this
                iteration, and the number of its steps.
        """
        if self.settings.scores == "before_update":
            rewards_N = self.rewards(sequences, ref_logprobs_N)
            metrics = self.train(iteration, sequences, ref_logprobs_N, schedule)
        else:
            metrics = self.train(iteration, sequences, ref_logprobs_N, schedule)
            rewards_N = self.rewards(sequences, ref_logprobs_N)
        self.metrics = metrics | {"reward_model/return": float(rewards_N.sum()) / len(sequences)}
        return rewards_N

    def train(
        self,
        iteration: int,
        sequences: Sequences,
        ref_logprobs_N: Tensor,
        schedule: Callable[[int, int], float],
    ) -> Metrics:
        """Learns the outcomes; see `learn_and_score`. Returns metrics, which are means over the steps.
        Collective."""
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

    def _minibatches(self, iteration: int, answers: int) -> list[list[int]]:
        """Returns the answers of each step: every epoch shuffles them and cuts them into minibatches of the
        trainer's size."""
        size = self.scorer.settings.minibatch_size or answers
        minibatches = []
        for epoch in range(self.settings.epochs):
            draw: random.Random = derived_random(self.seed, iteration, "reward model's minibatches", epoch)
            order = list(range(answers))
            draw.shuffle(order)
            minibatches += [order[start : start + size] for start in range(0, answers, size)]
        return minibatches

    def _step(
        self, sequences: Sequences, minibatch: list[int], ref_logprobs_N: Tensor, rate: float
    ) -> Metrics:
        """Takes one optimiser step on the mean loss of a minibatch's answers. Returns its metrics, which are
        those before the update. Collective."""
        ranks = self.scorer.ranks
        units = [sequences.rows_of((number,)) for number in minibatch]
        totals_2 = torch.zeros(2, device=ranks.device)
        # Whole answers, since a loss is of the sum over an answer's tokens.
        for batch in micro_batches(sequences, units, self.scorer.settings, ranks, keep_units=True):
            returns_M = self._returns(batch, ref_logprobs_N)
            outcomes_M = _outcomes(sequences, batch).to(ranks.device)
            # The losses of all micro-batches of all ranks add up to the minibatch's mean: `loss_scale` is 0
            # for a dummy, and 1 / (number of ranks) for a micro-batch that ranks compute together.
            weight = batch.loss_scale / len(minibatch)
            loss = weight * outcome_losses(returns_M, outcomes_M).sum()
            self.model.backward(loss)
            predicts_correct_M = returns_M.detach() > 0
            hits = weight * (predicts_correct_M == (outcomes_M > 0.5)).sum()
            totals_2 += torch.stack([loss.detach(), hits])
        loss_of_step, accuracy = ranks.sum(totals_2.cpu()).tolist()
        return {
            "reward_model/loss": loss_of_step,
            "reward_model/accuracy": accuracy,
            "reward_model/grad_norm": self.model.step(rate),
        }

    def _returns(self, batch: MicroBatch, ref_logprobs_N: Tensor) -> Tensor:
        """Returns the sum of the implicit rewards of each answer of a micro-batch, [M], with gradient."""
        logprobs_N, *_ = self.model(batch.inputs, self.scorer.temperature)
        ratios_N = logprobs_N - ref_logprobs_N[batch.flat_index_N].to(logprobs_N.device)
        sums = [ratios_T.sum() for ratios_T in ratios_N.split(batch.trained_tokens)]
        return self.settings.beta * torch.stack(sums)


def _outcomes(sequences: Sequences, batch: MicroBatch) -> Tensor:
    """Returns the outcome of each answer of a micro-batch, [M]."""
    starts = torch.tensor(sequences.starts)
    # The first token of each answer in the micro-batch, and then the answer that has it.
    first_M = torch.tensor([0, *batch.trained_tokens[:-1]]).cumsum(0)
    number_M = torch.searchsorted(starts, batch.flat_index_N[first_M], right=True) - 1
    return torch.tensor(sequences.rewards)[number_M]
