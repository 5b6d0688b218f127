"""Computes what the first step of an iteration needs for each trained token: log-probs of policy and
reference, the critic's values, advantages.

The trainer uses it, and so do analyses that repeat the trainer's computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from treetune.credit.gae import FromValues
from treetune.objectives.base import kl_estimate
from treetune.objectives.further_inputs import ReferenceKlObjective, TeacherObjective
from treetune.rollouts.storage import TokenSignals
from treetune.trainer.base import Trainer
from treetune.trainer.scoring import PolicyScores
from treetune.trainer.tokens import EarlyReward, Sequences, flatten_trained
from treetune.vocabulary import Column, Episode, Metrics

FromImplicitRewards = Callable[[Sequence[Column], Sequence[float]], Sequence[Column]]
"""Computes the advantages of a problem's answers. Its arguments are, for each answer, the rewards that the
reward model gives to its tokens, and the answer's reward; see `RewardModelCredit.from_implicit_rewards`."""


@dataclass
class IterationTensors:
    """Tensors over the iteration's N trained tokens before the first update: shape [N], on the CPU, float32
    unless they are masks.

    The first two come with the episodes. `prepare` computes those of the others that the configured method
    needs, and leaves the rest None. The steps of training then record `last_logprobs_N`. If the iteration has
    a single step, this step records the old log-probs, entropies and masses instead.
    """

    behaviour_logprobs_N: Tensor | None
    """The engine's log-probs, under the distribution that it sampled from."""
    credit_advantages_N: Tensor | None = None
    """The advantages from credit, before penalties and normalisation; None if it gives none. `prepare` then
    makes advantages from the critic's values or the reward model's rewards."""
    ref_logprobs_N: Tensor | None = None
    """The reference's log-probs."""
    ref_kl_N: Tensor | None = None
    """The exact KL divergence of the policy before the first update from the reference, over the whole
    vocabulary."""
    own_advantages_N: Tensor | None = None
    """The advantages that a `ReferenceKlObjective` computes itself, in `precompute`."""
    has_teacher_N: Tensor | None = None
    """True for the tokens of answers with a privileged prompt; None if the objective has no teacher."""
    old_logprobs_N: Tensor | None = None
    """The policy's log-probs before the first update, of the whole distribution, without top-p and top-k."""
    entropies_N: Tensor | None = None
    """The entropies of the distributions of `old_logprobs_N`."""
    log_mass_N: Tensor | None = None
    """The log of the mass: the total probability of the tokens that top-p and top-k keep. None if they keep
    all."""
    old_logprobs_mask_N: Tensor | None = None
    """True for the tokens whose `old_logprobs_N` are known; None: all."""
    last_logprobs_N: Tensor | None = None
    """The policy's log-probs in the last step that trained a token, before its update; NaN if none did."""
    values_N: Tensor | None = None
    """The critic's value of the state before each token."""
    returns_N: Tensor | None = None
    """The targets of the critic."""
    advantages_N: Tensor | None = None
    """The advantages for the objective, after penalties and normalisation."""

    @staticmethod
    def of(episodes: Iterable[Episode]) -> IterationTensors:
        return IterationTensors(
            flatten_trained(episodes, lambda e: e.behaviour_logprobs),
            flatten_trained(episodes, lambda e: e.advantages),
        )

    def set_old_scores(self, scores: PolicyScores) -> None:
        """Sets the policy's scores before the first update."""
        self.old_logprobs_N, self.entropies_N, self.log_mass_N = scores

    def metrics(self) -> Metrics:
        """Returns the mean and the mean absolute value of the advantages if there are advantages, and the
        mean of the critic's targets if there is a critic."""
        metrics: Metrics = {}
        if self.advantages_N is not None:
            metrics["train/advantage_mean"] = float(self.advantages_N.mean())
            metrics["train/advantage_abs"] = float(self.advantages_N.abs().mean())
        if self.returns_N is not None:
            metrics["critic/return"] = float(self.returns_N.mean())
        return metrics

    def gap_N(self) -> Tensor | None:
        """Returns the trainer's log-probs minus the engine's; None without the engine's.

        The engine reports log-probs of the distribution that it sampled from: cut by top-p and top-k, and
        normalised again. The trainer's log-probs are of the whole distribution. So the trainer's probability
        is divided by the mass that the cut leaves: ``log p - log mass`` is comparable with the engine's.
        """
        assert self.old_logprobs_N is not None
        if self.behaviour_logprobs_N is None:
            return None
        gap_N = self.old_logprobs_N - self.behaviour_logprobs_N
        return gap_N if self.log_mass_N is None else gap_N - self.log_mass_N

    def gap_metrics(self) -> Metrics:
        """Returns the distance of the trainer's log-probs from the engine's: the mean and the maximum of
        |`gap_N`| over the tokens whose old log-probs are known. Empty without the engine's log-probs.

        ``engine/nucleus_log_mass`` is the mean log of the mass that top-p and top-k leave.
        """
        gap_N = self.gap_N()
        if gap_N is None:
            return {}
        metrics: Metrics = {}
        if self.log_mass_N is not None:
            metrics["engine/nucleus_log_mass"] = float(self.log_mass_N[self._is_known].mean())
        known_gap_N = gap_N[self._is_known].abs()
        metrics["engine/logprob_gap_mean"] = float(known_gap_N.mean())
        metrics["engine/logprob_gap_max"] = float(known_gap_N.max())
        return metrics

    def reference_metrics(self) -> Metrics:
        """Returns ``train/kl``, the KL divergence of the policy from the reference model, in nats a token.
        Empty without a reference.

        It is the mean of Schulman's estimator k3 over the sampled tokens whose old log-probs are known:
        ``r - 1 - log r`` with ``r = p_reference / p_old``. p_old is the policy before the iteration's first
        update, so a jump of this metric was caused by the previous iteration. No loss uses it; the KL penalty
        in the loss is ``train/kl_loss``.
        """
        assert self.old_logprobs_N is not None
        if self.ref_logprobs_N is None:
            return {}
        kl_N = kl_estimate(self.old_logprobs_N, self.ref_logprobs_N, "k3")
        return {"train/kl": float(kl_N[self._is_known].mean())}

    @property
    def _is_known(self) -> Tensor | slice:
        """The index of the tokens whose old log-probs are known."""
        return slice(None) if self.old_logprobs_mask_N is None else self.old_logprobs_mask_N

    def signals(self, episodes: Iterable[Episode], sequences: Sequences) -> list[TokenSignals]:
        """Returns the policy's scores of each episode's trained tokens; NaN where they are unknown."""
        assert self.old_logprobs_N is not None and self.entropies_N is not None
        columns = {"logprobs": self.old_logprobs_N, "entropies": self.entropies_N}
        if (gap_N := self.gap_N()) is not None:
            columns["gaps"] = gap_N  # the difference from the engine's log-probs
        if self.last_logprobs_N is not None:
            # How far each token's log-prob has moved until the last step that trained the token.
            columns["log_ratios"] = self.last_logprobs_N - self.old_logprobs_N
        if self.ref_logprobs_N is not None:
            columns["ref_logprobs"] = self.ref_logprobs_N
        is_known_N = self.old_logprobs_mask_N
        if is_known_N is not None:
            columns = {
                name: column_N.masked_fill(~is_known_N, math.nan) for name, column_N in columns.items()
            }
        signals = []
        for episode, (start, end) in zip(episodes, pairwise(sequences.starts), strict=True):
            columns_of_episode = {name: column_N[start:end].numpy() for name, column_N in columns.items()}
            signals.append(TokenSignals(episode.trajectory, **columns_of_episode))
        return signals


class Models(Protocol):
    """The models that `prepare` needs. Each method scores every trained token, and returns float32 tensors of
    shape [N] without gradient: `old_logprobs` returns several (`PolicyScores`), every other method returns
    one. Collective.
    """

    def old_logprobs(self, sequences: Sequences) -> PolicyScores: ...

    def ref_logprobs(self, sequences: Sequences) -> Tensor: ...

    def reference_kl(self, sequences: Sequences) -> Tensor: ...

    def values(self, sequences: Sequences) -> Tensor: ...


def prepare(
    settings: Trainer,
    episodes: Collection[Episode],
    sequences: Sequences,
    models: Models,
    *,
    scores_old: bool,
    critic: bool = False,
    from_values: FromValues | None = None,
    learned_rewards: Callable[[Sequences, Tensor], Tensor] | None = None,
    from_implicit_rewards: FromImplicitRewards | None = None,
) -> IterationTensors:
    """Runs the models that the method needs over all sequences, and computes the advantages. Collective.

    Args:
        scores_old: Whether to score the policy (`Trainer.scores_old_logprobs`).
        critic: Whether a critic is trained.
        from_values: Computes advantages from the critic's values; None if they come from the episodes or from
            `from_implicit_rewards`.
        learned_rewards: Trains the implicit reward model, and returns its reward of every trained token, from
            the sequences and the reference's log-probs; None if there is no such model.
        from_implicit_rewards: Computes advantages from the rewards that `learned_rewards` returns.

    Raises:
        ValueError: The objective needs advantages, and there are none; or a critic is trained, and an answer
            has threads.
    """
    objective, starts = settings.objective, sequences.starts
    tensors = IterationTensors.of(episodes)
    if critic:
        _refuse_threads(episodes)

    # Scores of the models, and what the objective needs besides advantages.
    if isinstance(objective, TeacherObjective):
        tensors.has_teacher_N = _has_teacher(episodes)
    if settings.keeps_reference:
        tensors.ref_logprobs_N = models.ref_logprobs(sequences)
    if scores_old:
        tensors.set_old_scores(models.old_logprobs(sequences))
    if isinstance(objective, ReferenceKlObjective):
        assert tensors.old_logprobs_N is not None and tensors.ref_logprobs_N is not None
        tensors.ref_kl_N = models.reference_kl(sequences)
        # Advantages that the objective computes itself, for its loss.
        tensors.own_advantages_N = objective.precompute(
            tensors.old_logprobs_N, tensors.ref_logprobs_N, tensors.ref_kl_N, starts
        )
    if not objective.needs_advantages:
        return tensors
    if critic:
        tensors.values_N = models.values(sequences)

    # The rewards, and the KL penalties that are subtracted from the rewards or from the advantages. A penalty
    # with the placement "loss" is not subtracted here: the objective's loss contains it.
    rewards_N = token_rewards(starts, sequences.rewards, sequences.early_rewards)
    penalty = objective.kl_penalty
    reward_penalties_N: Tensor | None = None
    advantage_penalties_N: Tensor | None = None
    if penalty is not None:
        kl_N = kl_estimate(tensors.old_logprobs_N, tensors.ref_logprobs_N, penalty.estimator)
        if penalty.placement == "reward":
            reward_penalties_N = penalty.coef * kl_N
        elif penalty.placement == "advantage":
            advantage_penalties_N = penalty.coef * kl_N

    # The advantages come from the critic's values, from the reward model, or from the credit.
    if from_values is not None:  # gae
        assert tensors.values_N is not None, "credit from values comes with a critic"
        if reward_penalties_N is not None:
            rewards_N = rewards_N - reward_penalties_N
        advantages_N, tensors.returns_N = _advantages_and_returns(
            from_values, starts, rewards_N, tensors.values_N
        )
    elif learned_rewards is not None:  # prime
        assert from_implicit_rewards is not None and tensors.ref_logprobs_N is not None
        implicit_rewards_N = learned_rewards(sequences, tensors.ref_logprobs_N)
        advantages_N = _advantages_from_implicit_rewards(from_implicit_rewards, sequences, implicit_rewards_N)
    else:
        advantages_N = _advantages_of_credit(tensors)
        if critic:
            # The credit has read the critic's values in place of the mean rewards of continuations. These
            # means contain no KL penalty, so the critic's targets contain none either.
            tensors.returns_N = rewards_to_come(starts, rewards_N)
    if reward_penalties_N is not None and from_values is None:
        # Only advantages from values contain these penalties already. A token influences its own penalty and
        # all later ones, so the sum of these penalties is subtracted from the token's advantage.
        advantages_N = advantages_N - rewards_to_come(starts, reward_penalties_N)

    # The normalisation.
    domains: Sequence[str] = [""] * len(sequences.domains)  # all sequences are normalised together
    if settings.normalise_by_domain:
        domains = sequences.domains
    advantages_N = normalise_by_domain(advantages_N, settings.advantage_normalisation, starts, domains)
    if advantage_penalties_N is not None:
        # The penalty is subtracted after the normalisation, which would otherwise change its size.
        advantages_N = advantages_N - advantage_penalties_N
    tensors.advantages_N = advantages_N
    return tensors


def _advantages_of_credit(tensors: IterationTensors) -> Tensor:
    """Returns the advantages that the episodes came with. Raises ValueError if they have none."""
    if tensors.credit_advantages_N is None:
        raise ValueError(
            "the objective needs advantages and the configured credit gives none: choose a credit"
            " such as 'group', 'monte_carlo' or 'gae', or the objective 'mle'"
        )
    return tensors.credit_advantages_N


def _has_teacher(episodes: Iterable[Episode]) -> Tensor:
    """Returns a mask of the trained tokens of answers with a privileged prompt, bool [N].

    A privileged prompt is one for the teacher that shows more than the policy's, such as a right answer.
    """
    masks = []
    for episode in episodes:
        n_trained = int(episode.trained.sum())
        has_teacher = episode.teacher_prompt_ids is not None
        masks.append(torch.full((n_trained,), has_teacher))
    return torch.cat(masks)


def _advantages_and_returns(
    from_values: FromValues, starts: Sequence[int], rewards_N: Tensor, values_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Applies `from_values` to each answer separately, and returns the advantages and the returns of all
    tokens, [N] each."""
    advantages, returns = [], []
    for start, end in pairwise(starts):
        advantages_of_answer, returns_of_answer = from_values(
            rewards_N[start:end].tolist(), values_N[start:end].tolist()
        )
        advantages.append(torch.tensor(advantages_of_answer, dtype=torch.float32))
        returns.append(torch.tensor(returns_of_answer, dtype=torch.float32))
    return torch.cat(advantages), torch.cat(returns)


def _advantages_from_implicit_rewards(
    from_implicit_rewards: FromImplicitRewards, sequences: Sequences, implicit_rewards_N: Tensor
) -> Tensor:
    """Applies `from_implicit_rewards` to the answers to each problem, and returns the advantages of all
    tokens, [N]. The answers to a problem may stand anywhere among the sequences."""
    tokens_of_answer = [slice(start, end) for start, end in pairwise(sequences.starts)]
    numbers_by_problem: dict[str, list[int]] = {}
    for number, problem in enumerate(sequences.groups):
        numbers_by_problem.setdefault(problem, []).append(number)
    advantages_N = torch.zeros_like(implicit_rewards_N)
    for numbers in numbers_by_problem.values():
        # The rewards are passed in float64, since credits sum over all later tokens.
        rewards = [implicit_rewards_N[tokens_of_answer[number]].double().numpy() for number in numbers]
        outcomes = [sequences.rewards[number] for number in numbers]
        advantages = from_implicit_rewards(rewards, outcomes)
        for number, advantages_T in zip(numbers, advantages, strict=True):
            advantages_N[tokens_of_answer[number]] = torch.from_numpy(advantages_T).float()
    return advantages_N


def _refuse_threads(episodes: Iterable[Episode]) -> None:
    """Raises ValueError for an answer with threads, since a critic's returns go back along a single line of
    tokens."""
    for episode in episodes:
        if episode.stretches:
            raise ValueError(
                f"episode {episode.trajectory} has threads, and a critic needs the tokens of an answer in one"
                " order, which threads don't have: choose a credit such as 'group'"
            )


def token_rewards(
    starts: Sequence[int], rewards: Sequence[float], early: Sequence[Sequence[EarlyReward]] = ()
) -> Tensor:
    """Returns the reward of each trained token, shape [N].

    A sequence earns its reward at its last trained token, except for the parts that it earns earlier.

    Args:
        starts: The offsets of the sequences, with the end of the last one.
        rewards: The reward of each sequence.
        early: The parts of each sequence's reward that are earned before its end. Empty: all rewards are
            earned at the end.

    Example: ``token_rewards([0, 3, 5], [1.0, 0.5], [[EarlyReward(token=0, reward=0.25)], []])`` is
    ``[0.25, 0, 0.75, 0, 0.5]``.
    """
    rewards_N = torch.zeros(starts[-1])
    last_tokens = torch.tensor(starts[1:]) - 1
    rewards_N[last_tokens] = torch.tensor(rewards, dtype=torch.float32)
    for (start, end), early_of_sequence in zip(pairwise(starts), early):  # no turn if `early` is empty
        for token, reward in early_of_sequence:
            # What is earned before the first trained token goes to no token, since none could change it.
            if token >= 0:
                rewards_N[start + token] += reward
            rewards_N[end - 1] -= reward
    return rewards_N


def rewards_to_come(starts: Sequence[int], rewards_N: Tensor) -> Tensor:
    """Returns for each trained token the sum of the rewards from it to the end of its sequence, shape [N].

    Example: ``rewards_to_come([0, 3], tensor([0.25, 0.0, 0.75]))`` is ``[1.0, 0.75, 0.75]``.
    """
    sums = []
    for start, end in pairwise(starts):
        # A cumulative sum from the end: flipped, summed up, and flipped back.
        sums.append(rewards_N[start:end].flip(0).cumsum(0).flip(0))
    return torch.cat(sums)


def normalise_advantages(advantages_N: Tensor, normalisation: str) -> Tensor:
    """Normalises advantages over all N tokens.

    ``whiten``: ``(A - mean) / sqrt(var + 1e-8)``; ``scale``: ``A / sqrt(var + 1e-8)``; ``none``: unchanged.
    """
    if normalisation == "none" or len(advantages_N) < 2:
        return advantages_N  # a single token has no standard deviation
    # The sums are computed in float64, so that the result in float32 doesn't depend on the order in which a
    # million tokens are summed.
    advantages = advantages_N.double()
    deviation = (advantages.var() + 1e-8).sqrt()
    centred = advantages - advantages.mean() if normalisation == "whiten" else advantages
    return (centred / deviation).float()


def normalise_by_domain(
    advantages_N: Tensor, normalisation: str, starts: Sequence[int], domains: Sequence[str]
) -> Tensor:
    """Normalises the advantages of each domain's sequences separately; see `normalise_advantages`."""
    result_N = advantages_N.clone()
    spans = list(pairwise(starts))
    for domain in dict.fromkeys(domains):
        spans_of_domain = [span for span, name in zip(spans, domains, strict=True) if name == domain]
        index = torch.cat([torch.arange(start, end) for start, end in spans_of_domain])
        result_N[index] = normalise_advantages(advantages_N[index], normalisation)
    return result_N
