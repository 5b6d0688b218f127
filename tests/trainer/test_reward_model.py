"""The trained reward model of PRIME.

These tests promise that it learns the outcomes of answers as a plain model with a plain loss does, that its
rewards become the advantages of the paper's formula, and that its training resumes with the same bits.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch

from tests.support.tiny_trainer import (
    assert_close,
    episodes,
    plain_step,
    policy_trainer,
    row_logprobs,
    tiny_model,
)
from treetune.credit.literature.prime import Prime
from treetune.credit.reward_models import RewardModelSettings
from treetune.trainer.preparation import prepare
from treetune.trainer.tokens import Sequences

BETA = 0.3
PRIME = Prime(
    reward_model=RewardModelSettings(beta=BETA, learning_rate=1e-3), gamma=0.9, weight=2.0, outcome_weight=0.5
)
ROWS = [replace(row, advantages=None) for row in episodes(16)]


def reward_model():
    return tiny_model(seed=2)


def prime_trainer(credit: Prime = PRIME, **settings):
    return policy_trainer(credit=credit, load_reward_model=reward_model, **settings)


def advantages_of(trainer) -> torch.Tensor:
    """The advantages of the first iteration, after the reward model's training."""
    return prepare(
        trainer.settings,
        ROWS,
        Sequences.of(ROWS),
        trainer,
        scores_old=trainer.settings.objective.kl_coef > 0,
        learned_rewards=partial(trainer.learned_rewards, 0),
        from_implicit_rewards=PRIME.from_implicit_rewards,
    ).advantages_N


def summed_rewards(model, reference) -> list[torch.Tensor]:
    """β Σ_t log(π_φ/π_ref) over the trained tokens of each row."""
    sums = []
    for row in ROWS:
        is_trained = torch.from_numpy(row.trained)
        with torch.no_grad():
            of_reference = row_logprobs(reference, row)[1]
        sums.append(BETA * (row_logprobs(model, row)[1] - of_reference)[is_trained].sum())
    return sums


def cross_entropy(total: torch.Tensor, outcome: float) -> torch.Tensor:
    chance = 1 / (1 + torch.exp(-total))
    return -(outcome * chance.log() + (1 - outcome) * (1 - chance).log())


@pytest.mark.parametrize(
    "settings",
    [
        {"layout": "padded", "sequences_per_micro_batch": 3},
        {"layout": "packed", "tokens_per_micro_batch": 60},
        {"layout": "tree", "tokens_per_micro_batch": 60},
    ],
    ids=lambda settings: settings["layout"],
)
def test_a_step_is_that_of_the_cross_entropy_of_the_outcomes(settings) -> None:
    trainer = prime_trainer(**settings)
    sequences = Sequences.of(ROWS)
    trainer.learned_rewards(0, sequences, trainer.ref_logprobs(sequences))
    model = reward_model()
    sums = summed_rewards(model, tiny_model())
    losses = [cross_entropy(total, row.reward) for total, row in zip(sums, ROWS, strict=True)]
    loss = torch.stack(losses).mean()
    norm = plain_step(model, loss)
    metrics = trainer.reward_model.metrics
    assert metrics["reward_model/loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert metrics["reward_model/grad_norm"] == pytest.approx(norm, rel=1e-4)
    hits = [float((total > 0) == (row.reward > 0.5)) for total, row in zip(sums, ROWS, strict=True)]
    assert metrics["reward_model/accuracy"] == pytest.approx(fmean(hits))
    assert_close(trainer.reward_model_weights(), model)
    with torch.no_grad():
        returns = [float(total) for total in summed_rewards(model, tiny_model())]
    assert metrics["reward_model/return"] == pytest.approx(fmean(returns), abs=1e-4)


def test_each_minibatch_of_each_epoch_is_a_step() -> None:
    trainer = prime_trainer(
        replace(PRIME, reward_model=replace(PRIME.reward_model, epochs=2)), minibatch_size=6
    )
    minibatches = trainer.reward_model._minibatches(0, 16)
    assert [len(minibatch) for minibatch in minibatches] == [6, 6, 4, 6, 6, 4]
    assert sorted(itertools.chain(*minibatches[:3])) == list(range(16))
    assert minibatches[:3] != minibatches[3:]


@pytest.mark.parametrize("scores", ["after_update", "before_update"])
def test_advantages_are_those_of_the_rewards_that_the_model_gives(scores) -> None:
    trainer = prime_trainer(replace(PRIME, reward_model=replace(PRIME.reward_model, scores=scores)))
    advantages_N = advantages_of(trainer)
    model, reference = reward_model(), tiny_model()
    losses = [
        cross_entropy(total, row.reward)
        for total, row in zip(summed_rewards(model, reference), ROWS, strict=True)
    ]
    if scores == "after_update":
        plain_step(model, torch.stack(losses).mean())
    rewards = []
    for row in ROWS:
        trained = torch.from_numpy(row.trained)
        with torch.no_grad():
            ratios_T = row_logprobs(model, row)[1] - row_logprobs(reference, row)[1]
        rewards.append((BETA * ratios_T[trained]).tolist())
    expected = []
    for number, row in enumerate(ROWS):
        other_numbers = [
            other for other in range(len(ROWS)) if ROWS[other].group == row.group and other != number
        ]
        process_baseline = fmean(fmean(rewards[other]) for other in other_numbers)
        outcome = row.reward - fmean(ROWS[other].reward for other in other_numbers)
        for t in range(len(rewards[number])):
            later = enumerate(rewards[number][t:])
            process = sum(0.9**steps * (reward - process_baseline) for steps, reward in later)
            expected.append(2.0 * process + 0.5 * outcome)
    assert advantages_N.tolist() == pytest.approx(expected, abs=1e-4)


def test_a_penalty_in_the_reward_is_subtracted_from_the_advantages() -> None:
    from treetune.objectives.policy_gradient import ClippedPolicyGradient

    objective = ClippedPolicyGradient(kl_coef=0.5, kl_placement="reward", kl_estimator="k1")
    reference = partial(tiny_model, seed=1)  # not the policy, so that there are penalties
    without_N = advantages_of(prime_trainer(load_reference=reference))
    with_penalties_N = advantages_of(prime_trainer(objective=objective, load_reference=reference))
    penalties_to_come = []
    for row in ROWS:
        trained = torch.from_numpy(row.trained)
        with torch.no_grad():
            ratios_T = row_logprobs(tiny_model(), row)[1] - row_logprobs(reference(), row)[1]
        penalties = (0.5 * ratios_T[trained]).tolist()
        penalties_to_come += [sum(penalties[t:]) for t in range(len(penalties))]
    assert max(map(abs, penalties_to_come)) > 0.01
    assert (without_N - with_penalties_N).tolist() == pytest.approx(penalties_to_come, abs=1e-4)


def test_a_stored_reward_model_learns_on_with_the_same_bits(tmp_path: Path) -> None:
    uninterrupted = prime_trainer(minibatch_size=8)
    uninterrupted.train(0, ROWS)
    uninterrupted.save(tmp_path)
    resumed = prime_trainer(minibatch_size=8)
    resumed.load(tmp_path)
    metrics = [trainer.train(1, ROWS) for trainer in (uninterrupted, resumed)]
    assert metrics[0] == metrics[1]
    assert metrics[0]["reward_model/loss"] < math.log(2)
    for name in ("weights", "reward_model_weights"):
        first, second = (getattr(trainer, name)() for trainer in (uninterrupted, resumed))
        assert all(torch.equal(weight, second[key]) for key, weight in first.items())


def test_rewards_outside_of_0_to_1_are_refused() -> None:
    rows = [replace(row, reward=-0.5) for row in ROWS]
    with pytest.raises(
        ValueError, match=r"the rewards of this iteration go from -0\.5 to -0\.5: give answers"
    ):
        prime_trainer().train(0, rows)
