"""What is made before the first step: with which models, and from which of their scores."""

from __future__ import annotations

import itertools
import math
from statistics import mean, variance

import pytest
import torch

import treetune.parts  # noqa: F401  (registers them)
from tests.trainer.helpers import critic_of
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
OBJECTIVES = [part() for part in Objective.registered().values()] + PENALISED
PENALTY = 0.1 * 0.5
"""Of each token, by the models below."""


class Models:
    """Says the same of every token, and which models were run."""

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


def prepared(
    objective: Objective, several: bool = False, gae: Gae | None = None, **settings: object
) -> tuple[IterationTensors, list[str]]:
    trainer = Trainer(objective=objective, learning_rate=1e-3, **settings)
    models = Models()
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


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda one: f"{type(one).__name__}-{one.kl_placement}")
def test_every_objective_is_given_what_it_needs_and_nothing_else(objective):
    for gae, several, how, measure in itertools.product(
        (None, Gae()), (False, True), ("none", "whiten"), (False, True)
    ):
        tensors, _ = prepared(objective, several, gae, advantage_normalisation=how, measure_kl=measure)
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
def test_no_model_is_run_for_what_nobody_needs(objective, settings, several, models):
    assert prepared(objective, several, **settings)[1] == models


def test_penalties_are_taken_from_rewards_before_and_from_advantages_after_normalisation():
    plain, _ = prepared(PENALISED[0])
    assert torch.equal(plain.advantages_N, plain.credit_advantages_N)
    in_reward, _ = prepared(PENALISED[1])
    to_come = [2, 1, 3, 2, 1, 1, 1, 1]
    torch.testing.assert_close(
        in_reward.advantages_N, plain.advantages_N - PENALTY * torch.tensor(to_come).float()
    )
    whitened, _ = prepared(PENALISED[0], advantage_normalisation="whiten")
    in_advantage, _ = prepared(PENALISED[2], advantage_normalisation="whiten")
    torch.testing.assert_close(in_advantage.advantages_N, whitened.advantages_N - PENALTY)


def test_credit_makes_advantages_and_returns_of_values_and_rewards_less_penalties():
    tensors, ran = prepared(PENALISED[1], gae=Gae(lam=0.0))
    assert ran == ["reference", "policy", "critic"]
    begin, end = 0.25 - PENALTY - 0.25, -PENALTY - 0.25
    expected = torch.tensor([begin, end, begin, begin, end, end, end, end])
    torch.testing.assert_close(tensors.advantages_N, expected)
    torch.testing.assert_close(tensors.returns_N, expected + 0.25)


def test_a_critic_that_credit_has_asked_learns_rewards_without_penalties():
    models, objective = Models(), PENALISED[1]
    trainer = Trainer(objective=objective, learning_rate=1e-3)
    sequences = Sequences.of(EPISODES)
    tensors = prepare(trainer, EPISODES, sequences, models, scores_old=True, critic=True)
    assert models.ran == ["reference", "policy", "critic"]
    assert torch.equal(tensors.returns_N, torch.zeros(sequences.n_tokens))


def episode(domain: str, advantages: tuple[float, ...]) -> Episode:
    """Its first token is injected."""
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
    episode("sums", (1.0, 3.0)),
    episode("code", (0.2, 0.2, 0.5)),
    episode("sums", (-2.0,)),
    episode("code", (-0.1,)),
    episode("alone", (7.0,)),
]


@pytest.mark.parametrize("how", ["whiten", "scale"])
def test_normalising_by_domain_is_normalising_each_by_itself(how):
    """Against the formula written out, over each domain's trained tokens."""
    tensors, _ = prepared(ClippedPolicyGradient(), advantage_normalisation=how, normalise_by_domain=True)
    expected = {}
    for domain, own in {"sums": [1.0, 3.0, -2.0], "code": [0.2, 0.2, 0.5, -0.1]}.items():
        centre, scale = mean(own), math.sqrt(variance(own) + 1e-8)
        expected[domain] = iter([(a - centre * (how == "whiten")) / scale for a in own])
    expected["alone"] = iter([7.0])  # one token has no spread
    plain = [next(expected[e.domain]) for e in EPISODES for _ in range(int(e.trained.sum()))]
    assert tensors.advantages_N.tolist() == pytest.approx(plain, rel=1e-6, abs=1e-6)
    assert tensors.credit_advantages_N.tolist() == pytest.approx([1.0, 3.0, 0.2, 0.2, 0.5, -2.0, -0.1, 7.0])


def test_normalising_by_domain_needs_a_normalisation():
    with pytest.raises(ValueError, match="normalise_by_domain is true, and advantage_normalisation"):
        prepared(ClippedPolicyGradient(), normalise_by_domain=True)
