"""Values per token that have to be known before an iteration's first step.

The trainer makes them, and so does every analysis of what the trainer would have done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from treetune.objectives.base import kl_estimate
from treetune.rollouts.storage import TokenSignals
from treetune.trainer.base import Trainer
from treetune.trainer.scoring import PolicyScores
from treetune.trainer.tokens import Sequences, flat_of_trained
from treetune.vocabulary import Episode, Metrics

FromValues = Callable[[Sequence[float], Sequence[float]], tuple[Sequence[float], Sequence[float]]]
"""From the rewards and the critic's values along an answer to its advantages and returns; see
`Credit.from_values`."""


@dataclass
class IterationTensors:
    """Values of each of the iteration's N trained tokens before the first update: float32 on the CPU.

    The first two come with the episodes; `prepare` fills in what the method needs of the rest.
    """

    behaviour_logprobs_N: Tensor | None
    """The engine's, of the distribution that was sampled from."""
    credit_advantages_N: Tensor | None = None
    """Advantages as credit gave them, before penalties and normalisation; None where it leaves them to the
    critic."""
    ref_logprobs_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    """The policy's before the first update, of whole distributions."""
    entropies_N: Tensor | None = None
    """Entropies of the same distributions."""
    log_mass_N: Tensor | None = None
    """Log mass that top-p and top-k leave of these, where they cut anything."""
    old_logprobs_mask_N: Tensor | None = None
    """Mask of the tokens whose `old_logprobs_N` are known, bool; None: all."""
    last_logprobs_N: Tensor | None = None
    """The policy's where a token trained last, before that step's update; NaN where it hasn't."""
    values_N: Tensor | None = None
    """The critic's, of the state before each token."""
    returns_N: Tensor | None = None
    """The critic's targets."""
    advantages_N: Tensor | None = None
    """The objective's, after penalties and normalisation."""

    @staticmethod
    def of(episodes: Iterable[Episode]) -> IterationTensors:
        return IterationTensors(
            flat_of_trained(episodes, lambda e: e.behaviour_logprobs),
            flat_of_trained(episodes, lambda e: e.advantages),
        )

    def take(self, scored: PolicyScores) -> None:
        """Fills in the policy's scores before the first update."""
        self.old_logprobs_N, self.entropies_N, self.log_mass_N = scored

    def metrics(self) -> Metrics:
        """Means of advantages and returns, where there are any."""
        metrics: Metrics = {}
        if self.advantages_N is not None:
            metrics["train/advantage_mean"] = float(self.advantages_N.mean())
            metrics["train/advantage_abs"] = float(self.advantages_N.abs().mean())
        if self.returns_N is not None:
            metrics["critic/return"] = float(self.returns_N.mean())
        return metrics

    def gap_N(self) -> Tensor | None:
        """The trainer's log-probs minus the engine's, of what it sampled from; None without the engine's.

        The engine's log-probs are of the distribution that it sampled from: at the temperature, cut by top-p
        and top-k, and made to sum to 1 again. The trainer's are of the whole distribution, so that they are
        cut alike before the two are compared.
        """
        assert self.old_logprobs_N is not None
        if self.behaviour_logprobs_N is None:
            return None
        gap_N = self.old_logprobs_N - self.behaviour_logprobs_N
        return gap_N if self.log_mass_N is None else gap_N - self.log_mass_N

    def gap_metrics(self) -> Metrics:
        """Distances of the trainer from the engine that sampled (`gap_N`), and from the reference.

        ``engine/nucleus_log_mass`` is the mean of what the engine's distributions are cut by.
        """
        assert self.old_logprobs_N is not None
        metrics: Metrics = {}
        known = slice(None) if self.old_logprobs_mask_N is None else self.old_logprobs_mask_N
        gap_N = self.gap_N()
        if gap_N is not None:
            if self.log_mass_N is not None:
                metrics["engine/nucleus_log_mass"] = float(self.log_mass_N[known].mean())
            gap_N = gap_N[known].abs()
            metrics["engine/logprob_gap_mean"] = float(gap_N.mean())
            metrics["engine/logprob_gap_max"] = float(gap_N.max())
        if self.ref_logprobs_N is not None:
            kl_N = kl_estimate(self.old_logprobs_N, self.ref_logprobs_N, "k3")
            metrics["train/kl"] = float(kl_N[known].mean())
        return metrics

    def signals(self, episodes: Iterable[Episode], sequences: Sequences) -> list[TokenSignals]:
        """The policy's scores, one row for each episode."""
        assert self.old_logprobs_N is not None and self.entropies_N is not None
        columns = {"logprobs": self.old_logprobs_N, "entropies": self.entropies_N, "gaps": self.gap_N()}
        if self.last_logprobs_N is not None:
            columns["log_ratios"] = self.last_logprobs_N - self.old_logprobs_N
        told = {name: one_N for name, one_N in columns.items() if one_N is not None}
        if (known_N := self.old_logprobs_mask_N) is not None:
            told = {name: one_N.masked_fill(~known_N, math.nan) for name, one_N in told.items()}
        return [
            TokenSignals(episode.trajectory, **{name: one_N[a:b].numpy() for name, one_N in told.items()})
            for episode, (a, b) in zip(episodes, pairwise(sequences.starts), strict=True)
        ]


class Models(Protocol):
    """The models that the preparation runs. Each answers float32 for every trained token, shape [N], without
    gradient. Collective.
    """

    def old_logprobs(self, sequences: Sequences) -> PolicyScores: ...

    def ref_logprobs(self, sequences: Sequences) -> Tensor: ...

    def values(self, sequences: Sequences) -> Tensor: ...


def scores_old_logprobs(settings: Trainer, *, several_steps: bool) -> bool:
    """Returns whether the policy is scored before the first step. Where an iteration takes one step alone,
    that step's own log-probs are the old ones, and they are scored beforehand only for penalties."""
    objective = settings.objective
    compared = objective.needs_advantages or (settings.keeps_reference and settings.measure_kl)
    penalised = objective.kl_coef > 0 and objective.kl_placement != "loss"
    return penalised or (several_steps and compared)


def prepare(
    settings: Trainer,
    episodes: Collection[Episode],
    sequences: Sequences,
    models: Models,
    *,
    scores_old: bool,
    critic: bool = False,
    from_values: FromValues | None = None,
) -> IterationTensors:
    """Runs models over the iteration and makes advantages, as far as the objective needs them. `critic` says
    whether one is trained; its values make the advantages with `from_values`, and without it advantages come
    with the episodes. Raises ValueError where none came. Collective.
    """
    objective, starts = settings.objective, sequences.starts
    tensors = IterationTensors.of(episodes)
    threaded = [episode.trajectory for episode in episodes if episode.stretches] if critic else []
    if threaded:
        raise ValueError(
            f"episode {threaded[0]} has threads, and what a critic learns goes back along an answer token by"
            " token, which threads don't follow in one order: choose a credit such as 'group'"
        )
    if settings.keeps_reference:
        tensors.ref_logprobs_N = models.ref_logprobs(sequences)
    if scores_old:
        tensors.take(models.old_logprobs(sequences))
    if not objective.needs_advantages:
        return tensors

    if objective.kl_coef > 0 and objective.kl_placement != "loss":
        old_N, ref_N = tensors.old_logprobs_N, tensors.ref_logprobs_N
        penalties_N = objective.kl_coef * kl_estimate(old_N, ref_N, objective.kl_estimator)
    in_reward = objective.kl_coef > 0 and objective.kl_placement == "reward"
    rewards_N = token_rewards(starts, sequences.rewards, sequences.early_rewards)
    if critic:
        tensors.values_N = models.values(sequences)
    if from_values is not None:
        assert tensors.values_N is not None, "credit from values comes with a critic"
        if in_reward:
            rewards_N = rewards_N - penalties_N
        pairs = [
            from_values(rewards_N[a:b].tolist(), tensors.values_N[a:b].tolist()) for a, b in pairwise(starts)
        ]
        tensors.advantages_N, tensors.returns_N = (
            torch.cat([torch.tensor(of_answer, dtype=torch.float32) for of_answer in column])
            for column in zip(*pairs, strict=True)
        )
    else:
        if critic:
            # Credit has asked this critic for values: it learns what continuations would earn, so no
            # penalties.
            tensors.returns_N = rewards_to_come(starts, rewards_N)
        if (advantages_N := tensors.credit_advantages_N) is None:
            raise ValueError(
                "the objective needs advantages and the configured credit gives none: choose a credit"
                " such as 'group', 'monte_carlo' or 'gae', or the objective 'mle'"
            )
        if in_reward:
            # With the penalty in the reward, the policy gradient weighs a token by everything that follows
            # it, its own penalty included; what came before it can't be its doing.
            advantages_N = advantages_N - rewards_to_come(starts, penalties_N)
        tensors.advantages_N = advantages_N
    how, domains = settings.advantage_normalisation, sequences.domains
    domains = domains if settings.normalise_by_domain else [""] * len(domains)
    tensors.advantages_N = normalised_by_domain(tensors.advantages_N, how, starts, domains)
    if objective.kl_coef > 0 and objective.kl_placement == "advantage":
        tensors.advantages_N = tensors.advantages_N - penalties_N
    return tensors


def token_rewards(
    starts: Sequence[int], rewards: Sequence[float], early: Sequence[Sequence[tuple[int, float]]] = ()
) -> Tensor:
    """Each trained token's reward, shape [N]: the sequence's at its last one, without what is earned `early`,
    by the number of the token within its sequence."""
    rewards_N = torch.zeros(starts[-1])
    rewards_N[torch.tensor(starts[1:]) - 1] = torch.tensor(rewards, dtype=torch.float32)
    for (start, end), of_sequence in zip(pairwise(starts), early):
        for token, reward in of_sequence:
            rewards_N[start + token] += reward
            rewards_N[end - 1] -= reward
    return rewards_N


def rewards_to_come(starts: Sequence[int], rewards_N: Tensor) -> Tensor:
    """The sum of each sequence's rewards from each of its trained tokens on."""
    return torch.cat([rewards_N[a:b].flip(0).cumsum(0).flip(0) for a, b in pairwise(starts)])


def normalised(advantages_N: Tensor, how: str) -> Tensor:
    """``whiten``: ``(A - mean) / sqrt(var + 1e-8)``; ``scale``: without the mean. Over all N tokens."""
    if how == "none" or len(advantages_N) < 2:
        return advantages_N
    # In float64, where the order of the sum over a million tokens doesn't show.
    wide = advantages_N.double()
    deviation = (wide.var() + 1e-8).sqrt()
    centred = wide - wide.mean() if how == "whiten" else wide
    return (centred / deviation).float()


def normalised_by_domain(
    advantages_N: Tensor, how: str, starts: Sequence[int], domains: Sequence[str]
) -> Tensor:
    """Advantages `normalised` over the tokens of each domain's sequences."""
    result_N = advantages_N.clone()
    for domain in dict.fromkeys(domains):
        spans = [span for span, of in zip(pairwise(starts), domains, strict=True) if of == domain]
        index = torch.cat([torch.arange(a, b) for a, b in spans])
        result_N[index] = normalised(advantages_N[index], how)
    return result_N
