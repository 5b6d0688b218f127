"""Preparation of an iteration before the first step.

These tests promise that an objective gets exactly the tensors that it needs, that no model runs for anything
else, and that penalties and normalisation are applied in their order.
"""

from __future__ import annotations

import itertools
import math
from statistics import mean, variance

import pytest
import torch

import treetune.parts  # noqa: F401  (registers them)
from tests.support.tiny_trainer import critic_of
from treetune.credit.gae import Gae
from treetune.objectives.base import Objective
from treetune.objectives.mle import MaximumLikelihood
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.objectives.preference import DirectPreference
from treetune.trainer.base import Trainer
from treetune.trainer.preparation import IterationTensors, prepare
from treetune.trainer.scoring import PolicyScores
from treetune.trainer.tokens import Sequences
from treetune.vocabulary import Episode

PENALISED = [
    ClippedPolicyGradient(kl_coef=0.1, kl_estimator="k1", kl_placement=placement)
    for placement in ("loss", "reward", "advantage")
]
OBJECTIVES = [part() for part in Objective.parts_by_name().values()] + PENALISED
PENALTY = 0.1 * 0.5
"""The penalty of each token, by the models below."""


class RecordingModels:
    """Gives every token the same numbers, and records which models were run."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def old_logprobs(self, sequences: Sequences) -> PolicyScores:
        self.ran.append("policy")
        size = sequences.n_tokens
        return PolicyScores(torch.full((size,), -1.0), torch.zeros(size), None)

    def ref_logprobs(self, sequences: Sequences) -> torch.Tensor:
        self.ran.append("reference")
        return torch.full((sequences.n_tokens,), -1.5)

    def reference_kl(self, sequences: Sequences) -> torch.Tensor:
        self.ran.append("policy and reference")
        return torch.full((sequences.n_tokens,), 0.25)

    def values(self, sequences: Sequences) -> torch.Tensor:
        self.ran.append("critic")
        return torch.full((sequences.n_tokens,), 0.25)


def prepare_iteration(
    objective: Objective, several: bool = False, gae: Gae | None = None, **settings: object
) -> tuple[IterationTensors, list[str]]:
    trainer = Trainer(objective=objective, learning_rate=1e-3, **settings)
    models = RecordingModels()
    tensors = prepare(
        trainer,
        EPISODES,
        Sequences.of(EPISODES),
        models,
        scores_old=trainer.scores_old_logprobs(several_steps=several),
        critic=gae is not None,
        from_values=critic_of(gae).get("from_values"),
    )
    return tensors, models.ran


@pytest.mark.parametrize(
    "objective",
    OBJECTIVES,
    ids=lambda objective: f"{type(objective).__name__}-{getattr(objective, 'kl_placement', 'loss')}",
)
def test_every_objective_gets_the_tensors_that_it_needs(objective):
    for gae, several, normalisation, measures_kl in itertools.product(
        (None, Gae()), (False, True), ("none", "whiten"), (False, True)
    ):
        tensors, _ = prepare_iteration(
            objective, several, gae, advantage_normalisation=normalisation, measure_kl=measures_kl
        )
        assert (tensors.advantages_N is not None) == objective.needs_advantages
        assert not objective.needs_reference or tensors.ref_logprobs_N is not None
        assert not (objective.needs_advantages and several) or tensors.old_logprobs_N is not None
        assert (tensors.returns_N is not None) == (objective.needs_advantages and gae is not None)


@pytest.mark.parametrize(
    ("objective", "settings", "several", "models"),
    [
        (MaximumLikelihood(), {}, True, []),
        (DirectPreference(), {"measure_kl": False}, True, ["reference"]),
        (DirectPreference(), {}, True, ["reference", "policy"]),
        (ClippedPolicyGradient(), {"measure_kl": False}, False, []),
        (ClippedPolicyGradient(), {"measure_kl": False}, True, ["policy"]),
        (ClippedPolicyGradient(), {}, False, ["reference"]),
        (PENALISED[1], {"measure_kl": False}, False, ["reference", "policy"]),
    ],
)
def test_no_model_runs_without_need(objective, settings, several, models):
    assert prepare_iteration(objective, several, **settings)[1] == models


def test_penalties_are_taken_from_rewards_before_and_from_advantages_after_normalisation():
    plain, _ = prepare_iteration(PENALISED[0])
    assert torch.equal(plain.advantages_N, plain.credit_advantages_N)
    in_reward, _ = prepare_iteration(PENALISED[1])
    to_come = [2, 1, 3, 2, 1, 1, 1, 1]
    torch.testing.assert_close(
        in_reward.advantages_N, plain.advantages_N - PENALTY * torch.tensor(to_come).float()
    )
    whitened, _ = prepare_iteration(PENALISED[0], advantage_normalisation="whiten")
    in_advantage, _ = prepare_iteration(PENALISED[2], advantage_normalisation="whiten")
    torch.testing.assert_close(in_advantage.advantages_N, whitened.advantages_N - PENALTY)


def test_credit_turns_values_and_rewards_minus_penalties_into_advantages_and_returns():
    tensors, ran = prepare_iteration(PENALISED[1], gae=Gae(lam=0.0))
    assert ran == ["reference", "policy", "critic"]
    begin, end = 0.25 - PENALTY - 0.25, -PENALTY - 0.25
    expected = torch.tensor([begin, end, begin, begin, end, end, end, end])
    torch.testing.assert_close(tensors.advantages_N, expected)
    torch.testing.assert_close(tensors.returns_N, expected + 0.25)


def test_a_critic_that_credit_has_used_learns_rewards_without_penalties():
    models, objective = RecordingModels(), PENALISED[1]
    trainer = Trainer(objective=objective, learning_rate=1e-3)
    sequences = Sequences.of(EPISODES)
    tensors = prepare(trainer, EPISODES, sequences, models, scores_old=True, critic=True)
    assert models.ran == ["reference", "policy", "critic"]
    assert torch.equal(tensors.returns_N, torch.zeros(sequences.n_tokens))


def make_episode(domain: str, advantages: tuple[float, ...]) -> Episode:
    """Returns an episode whose first token is injected."""
    response = (5,) * (len(advantages) + 1)
    return Episode(
        prompt_ids=(1,),
        response_ids=response,
        trained=(False,) + (True,) * len(advantages),
        reward=0.0,
        group=domain,
        trajectory=domain,
        policy_version=0,
        advantages=(99.0, *advantages),
        domain=domain,
    )


EPISODES = [
    make_episode("sums", (1.0, 3.0)),
    make_episode("code", (0.2, 0.2, 0.5)),
    make_episode("sums", (-2.0,)),
    make_episode("code", (-0.1,)),
    make_episode("alone", (7.0,)),
]


@pytest.mark.parametrize("normalisation", ["whiten", "scale"])
def test_normalising_by_domain_normalises_each_domain_by_itself(normalisation):
    """The expected values are from the formula, over each domain's trained tokens."""
    tensors, _ = prepare_iteration(
        ClippedPolicyGradient(), advantage_normalisation=normalisation, normalise_by_domain=True
    )
    expected = {}
    for domain, domain_advantages in {"sums": [1.0, 3.0, -2.0], "code": [0.2, 0.2, 0.5, -0.1]}.items():
        centre, scale = mean(domain_advantages), math.sqrt(variance(domain_advantages) + 1e-8)
        expected[domain] = iter(
            [(a - centre * (normalisation == "whiten")) / scale for a in domain_advantages]
        )
    expected["alone"] = iter([7.0])  # one token has no spread
    plain = [next(expected[row.domain]) for row in EPISODES for _ in range(int(row.trained.sum()))]
    assert tensors.advantages_N.tolist() == pytest.approx(plain, rel=1e-6, abs=1e-6)
    assert tensors.credit_advantages_N.tolist() == pytest.approx([1.0, 3.0, 0.2, 0.2, 0.5, -2.0, -0.1, 7.0])


def test_normalising_by_domain_needs_a_normalisation():
    with pytest.raises(ValueError, match="normalise_by_domain is true, and advantage_normalisation"):
        prepare_iteration(ClippedPolicyGradient(), normalise_by_domain=True)
