"""PRIME with a reward model that learns.

These tests promise:

* The bias of the expected gradient is as stated, and the reward model learns to tell correct answers.
* `check`, analyses and the library refuse PRIME where nothing trains its reward model.
* A run records the model from which the reward model starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.credit.expectations import expectation
from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from tests.support.shipped import experiment_of
from treetune.credit import CreditAssigner
from treetune.credit.literature.prime import Prime
from treetune.credit.reward_models import RewardModelSettings, outcome_losses
from treetune.findings import collect_findings
from treetune.lab.analyzers.credit_bench import find_missing_models
from treetune.lab.analyzers.gradients import Loss
from treetune.models.lora import Lora
from treetune.models.sources import TinyModel
from treetune.rollouts.context import RolloutContext
from treetune.runtime.manifest import describe_changed_inputs, inputs_of
from treetune.tree import Tree
from treetune.vocabulary import Episode, Metrics

BETA = 0.3


def learned_log_ratios(steps: int) -> Mapping[mdp.Ids, float]:
    """Returns log π_φ(y_t)/π_ref(y_t) by the answer so far and the token, where π_φ has a logit for each.

    π_φ begins as π_ref, which is the policy. It takes steps of size 10 down the exact expected cross-entropy.
    """
    states = {answer[:t] for answer in mdp.answers() for t in range(len(answer))}
    tokens = {state: list(mdp.policy(state)) for state in states}
    reference = {state: torch.tensor(list(mdp.policy(state).values())).double().log() for state in states}
    logits = {state: reference[state].clone().requires_grad_() for state in states}

    def log_ratio(state: mdp.Ids, token: int) -> torch.Tensor:
        index = tokens[state].index(token)
        return logits[state].log_softmax(-1)[index] - reference[state][index]

    for _ in range(steps):
        totals, outcomes, chances = [], [], []
        for answer, chance in mdp.answers().items():
            totals.append(BETA * sum(log_ratio(answer[:t], token) for t, token in enumerate(answer)))
            outcomes.append(mdp.reward(answer))
            chances.append(chance)
        losses = outcome_losses(torch.stack(totals), torch.tensor(outcomes).double())
        (torch.tensor(chances).double() * losses).sum().backward()
        with torch.no_grad():
            for weights in logits.values():
                assert weights.grad is not None
                weights -= 10 * weights.grad
                weights.grad = None
    log_ratios = {}
    with torch.no_grad():
        for state in states:
            for token in tokens[state]:
                log_ratios[*state, token] = float(log_ratio(state, token))
    return log_ratios


@dataclass(frozen=True, kw_only=True)
class WithRewards(Prime):
    """Takes PRIME's advantages from these log-ratios, in place of the trainer."""

    log_ratios: Mapping[mdp.Ids, float]

    def assign(self, context: RolloutContext, trees: Sequence[Tree]) -> tuple[list[Episode], Metrics]:
        episodes, metrics = super().assign(context, trees)
        rewards = []
        for episode in episodes:
            ids = plain(episode.response_ids)
            rewards.append(np.array([BETA * self.log_ratios[ids[: t + 1]] for t in range(len(ids))]))
        advantages = self.from_implicit_rewards(rewards, [episode.reward for episode in episodes])
        rows = zip(episodes, advantages, strict=True)
        return [replace(episode, advantages=advantages_T) for episode, advantages_T in rows], metrics


@pytest.mark.parametrize(
    ("steps", "bias", "cosine"), [(0, 0.0, 1.0), (10, 3.7820, 0.9486), (100, 8.0350, 0.8940)]
)
def test_the_expected_gradient_is_as_far_off_as_stated(steps: int, bias: float, cosine: float) -> None:
    credit = WithRewards(log_ratios=learned_log_ratios(steps))
    measured = expectation(credit, 2)
    assert measured.bias_and_cosine == pytest.approx((bias, cosine), abs=5e-5)


def test_the_reward_model_learns_to_tell_correct_answers() -> None:
    log_ratios = learned_log_ratios(10)
    predicted = 0.0
    for answer, chance in mdp.answers().items():
        total = sum(log_ratios[answer[: t + 1]] for t in range(len(answer)))
        predicted += chance * ((total > 0) == (mdp.reward(answer) == 1.0))
    assert predicted > 0.98


def test_a_lone_answer_has_no_advantage() -> None:
    (advantages,) = Prime().from_implicit_rewards([np.array([0.5, -0.25])], [1.0])
    assert advantages.tolist() == [0.0, 0.0]


def test_check_accepts_the_preset_and_refuses_settings_that_make_no_sense() -> None:
    experiment = experiment_of("quickstart/grpo,methods/prime_online")

    def errors(**changes: Any) -> list[str]:
        all_findings = collect_findings(replace(experiment, **changes))
        return [finding.what for _, finding in all_findings if finding.level == "error"]

    assert errors() == []
    assert errors(trainer=replace(experiment.trainer, lora=Lora(rank=2))) == []
    plain_credit = experiment_of("quickstart/grpo").credit
    assert errors(overlap="one_step") == errors(overlap="one_step", credit=plain_credit)
    (message,) = errors(trainer=replace(experiment.trainer, measure_kl=False))
    assert message.startswith("the reward model is compared with the trainer's reference model")
    assert any(
        "the reward model has to keep learning" in error for error in errors(restart="every_iteration")
    )
    one_answer = replace(experiment.rollout, samples=1)
    assert any("compares each answer with the others" in error for error in errors(rollout=one_answer))


def test_analyses_and_the_library_refuse_a_reward_model_that_learns() -> None:
    session: Any = SimpleNamespace(config=SimpleNamespace(trainer=None, credit=Prime()))
    with pytest.raises(ValueError, match="trains its reward model in the run"):
        Loss(session, 0, [])
    (finding,) = find_missing_models("methods", {"prime": Prime()}, experiment_of("quickstart/grpo"))
    assert finding.what == "'prime' needs a reward model that learns, and analyses don't train one"
    with pytest.raises(ValueError, match="leaves advantages to the trainer of a run"):
        CreditAssigner("prime")


@dataclass(frozen=True, kw_only=True)
class Stored(TinyModel):
    """A model of which a run records a digest."""

    def identity(self) -> Mapping[str, str]:
        return {"path": "models/judge", "digest": "0123456789abcdef"}


def test_a_run_records_the_model_from_which_the_reward_model_starts() -> None:
    credit = Prime(reward_model=RewardModelSettings(start=Stored()))
    experiment = replace(experiment_of("quickstart/grpo"), model=TinyModel(), credit=credit)
    inputs = inputs_of(experiment)
    assert inputs["reward_model"] == Stored().identity()
    earlier = inputs | {"reward_model": {"path": "models/judge", "digest": "fedcba9876543210"}}
    (message,) = describe_changed_inputs(earlier, inputs, {}, experiment)
    assert message == (
        "the start of the reward model was models/judge (digest fedcba987654)"
        " and is models/judge (digest 0123456789ab)"
    )
    assert "reward_model" not in inputs_of(replace(experiment, credit=Prime()))


def test_the_defaults_are_the_authors_settings() -> None:
    settings = RewardModelSettings()
    assert (settings.beta, settings.learning_rate, settings.epochs) == (0.05, 1e-6, 1)
