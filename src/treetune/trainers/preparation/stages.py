"""What has to be known of an iteration's tokens before the first step, stage by stage.

A stage says which of `IterationTensors` it needs and which it fills in. `preparation` is the one place that
chooses them; the trainer runs them, and so does every analysis of what the trainer would have done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from treetune.rollouts.credit.gae import Gae
from treetune.trainers.base import Trainer
from treetune.trainers.objectives.kl import KlEstimator, kl_estimate
from treetune.trainers.preparation.advantages import (
    critic_advantages,
    less_future_penalty,
    normalised,
    normalised_by_domain,
    rewards_to_come,
    token_rewards,
)
from treetune.trainers.preparation.tensors import IterationTensors
from treetune.trainers.scoring import Scored
from treetune.trainers.tokens import Sequences


class Models(Protocol):
    """What stages run. Each answers float32 for every trained token, shape [N], without gradient.
    Collective.
    """

    def old_logprobs(self, sequences: Sequences) -> Scored: ...

    def ref_logprobs(self, sequences: Sequences) -> Tensor: ...

    def values(self, sequences: Sequences) -> Tensor: ...


class Stage(Protocol):
    """One step of the preparation; `needs` and `fills` name fields of `IterationTensors`."""

    needs: ClassVar[tuple[str, ...]]
    fills: ClassVar[tuple[str, ...]]

    def run(self, tensors: IterationTensors, sequences: Sequences, models: Models) -> None: ...


class RefLogprobs(Stage):
    """The start model's."""

    needs = ()
    fills = ("ref_logprobs_N",)

    def run(self, tensors: IterationTensors, sequences: Sequences, models: Models) -> None:
        tensors.ref_logprobs_N = models.ref_logprobs(sequences)


class OldLogprobs(Stage):
    """The policy's, before this iteration's updates."""

    needs = ()
    fills = ("old_logprobs_N", "entropies_N", "log_mass_N")

    def run(self, tensors: IterationTensors, sequences: Sequences, models: Models) -> None:
        tensors.take(models.old_logprobs(sequences))


@dataclass(frozen=True)
class KlPenalty(Stage):
    """The KL penalty of each token's reward (`kl_placement` ``reward``)."""

    coef: float
    estimator: KlEstimator

    needs = ("old_logprobs_N", "ref_logprobs_N")
    fills = ("kl_penalties_N",)

    def run(self, tensors: IterationTensors, sequences: Sequences, models: Models) -> None:
        tensors.kl_penalties_N = self.coef * _kl(tensors, self.estimator)


class CriticValues(Stage):
    needs = ()
    fills = ("values_N",)

    def run(self, tensors: IterationTensors, sequences: Sequences, models: Models) -> None:
        tensors.values_N = models.values(sequences)


@dataclass(frozen=True)
class GaeAdvantages(Stage):
    """From the critic's values and the rewards, less penalties where there are any."""

    gamma: float
    lam: float

    needs = ("values_N",)
    fills = ("advantages_N", "returns_N")

    def run(self, tensors: IterationTensors, sequences: Sequences, models: Models) -> None:
        assert tensors.values_N is not None
        rewards_N = token_rewards(
            sequences.starts, sequences.rewards, tensors.kl_penalties_N, sequences.rewards_on_the_way
        )
        tensors.advantages_N, tensors.returns_N = critic_advantages(
            sequences.starts, rewards_N, tensors.values_N, self.gamma, self.lam
        )


class RewardsToCome(Stage):
    """What a critic learns whose values credit asks for: the rewards that continuations would earn, so
    without penalties."""

    needs = ()
    fills = ("returns_N",)

    def run(self, tensors: IterationTensors, sequences: Sequences, models: Models) -> None:
        rewards_N = token_rewards(sequences.starts, sequences.rewards, None, sequences.rewards_on_the_way)
        tensors.returns_N = rewards_to_come(sequences.starts, rewards_N)


class CreditAdvantages(Stage):
    """Those that came with the episodes, less the penalties still to come where there are any.

    Raises ValueError where none came.
    """

    needs = ()
    fills = ("advantages_N",)

    def run(self, tensors: IterationTensors, sequences: Sequences, models: Models) -> None:
        advantages_N = tensors.credit_advantages_N
        if advantages_N is None:
            raise ValueError(
                "the objective needs advantages and the configured credit gives none: choose a credit"
                " such as 'group', 'monte_carlo' or 'gae', or the objective 'mle'"
            )
        if tensors.kl_penalties_N is not None:
            advantages_N = less_future_penalty(sequences.starts, advantages_N, tensors.kl_penalties_N)
        tensors.advantages_N = advantages_N


@dataclass(frozen=True)
class Normalisation(Stage):
    """Over all trained tokens of the iteration, or of each domain; see `Trainer.advantage_normalisation`."""

    how: Literal["whiten", "scale"]
    by_domain: bool = False

    needs = ("advantages_N",)
    fills = ("advantages_N",)

    def run(self, tensors: IterationTensors, sequences: Sequences, models: Models) -> None:
        assert tensors.advantages_N is not None
        if self.by_domain:
            tensors.advantages_N = normalised_by_domain(
                tensors.advantages_N, self.how, sequences.starts, sequences.domains
            )
        else:
            tensors.advantages_N = normalised(tensors.advantages_N, self.how)


@dataclass(frozen=True)
class AdvantageKl(Stage):
    """Takes the KL penalty from each token's own advantage (`kl_placement` ``advantage``)."""

    coef: float
    estimator: KlEstimator

    needs = ("advantages_N", "old_logprobs_N", "ref_logprobs_N")
    fills = ("advantages_N",)

    def run(self, tensors: IterationTensors, sequences: Sequences, models: Models) -> None:
        assert tensors.advantages_N is not None
        tensors.advantages_N = tensors.advantages_N - self.coef * _kl(tensors, self.estimator)


def _kl(tensors: IterationTensors, estimator: KlEstimator) -> Tensor:
    assert tensors.old_logprobs_N is not None and tensors.ref_logprobs_N is not None
    return kl_estimate(tensors.old_logprobs_N, tensors.ref_logprobs_N, estimator)


def preparation(
    settings: Trainer, gae: Gae | None, *, several_steps: bool, critic: bool = False
) -> list[Stage]:
    """The stages that an objective with this credit needs, in their order. `critic` says whether one learns
    whose values the credit had before training.

    Where an iteration takes one step alone, that step's own log-probs are the old ones, and they are
    scored beforehand only for penalties.
    """
    objective = settings.objective
    in_reward, in_advantage = objective.reward_kl_coef > 0, objective.advantage_kl_coef > 0
    compared = objective.needs_advantages or (settings.keeps_reference and settings.measure_kl)
    stages: list[Stage] = []
    if settings.keeps_reference:
        stages.append(RefLogprobs())
    if in_reward or in_advantage or (several_steps and compared):
        stages.append(OldLogprobs())
    if not objective.needs_advantages:
        return stages
    if in_reward:
        stages.append(KlPenalty(objective.reward_kl_coef, objective.kl_estimator))
    if gae is not None:
        stages += [CriticValues(), GaeAdvantages(gae.gamma, gae.lam)]
    else:
        stages += [CriticValues(), RewardsToCome()] if critic else []
        stages.append(CreditAdvantages())
    if settings.advantage_normalisation != "none":
        stages.append(Normalisation(settings.advantage_normalisation, settings.normalise_by_domain))
    if in_advantage:
        stages.append(AdvantageKl(objective.advantage_kl_coef, objective.kl_estimator))
    return stages


def runs_models(stages: Iterable[Stage]) -> bool:
    """Whether any of them runs a model over all sequences."""
    return any({"ref_logprobs_N", "old_logprobs_N", "values_N"}.intersection(one.fills) for one in stages)


def prepare(
    stages: Sequence[Stage], tensors: IterationTensors, sequences: Sequences, models: Models
) -> IterationTensors:
    """Runs the stages, which fill in `tensors`. Collective."""
    for stage in stages:
        missing = [name for name in stage.needs if getattr(tensors, name) is None]
        assert not missing, f"{type(stage).__name__} comes before what fills in {', '.join(missing)}"
        stage.run(tensors, sequences, models)
    return tensors
