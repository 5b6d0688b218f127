"""VIMPO.

These tests promise that its loss, gradient and advantages are those of the formula, as is a step of the
trainer, and that the optimal policy has the loss 0.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
import torch

from tests.support import tabular_mdp as mdp
from tests.support.shipped import experiment_of
from tests.support.tiny_trainer import (
    assert_close,
    assert_is,
    episodes,
    plain_step,
    policy_trainer,
    row_logprobs,
    tiny_model,
)
from treetune.contracts import Advantages, CentredRewards, CreditForRewards
from treetune.credit.base import GroupCredit
from treetune.credit.gae import Gae
from treetune.credit.literature.weighted_by import WeightedBy
from treetune.credit.reinforce import Outcome
from treetune.credit.rloo import Rloo
from treetune.findings import collect_findings
from treetune.objectives.base import TokenBatch
from treetune.objectives.value_implicit import ValueImplicit, discounted_sums

LENGTHS = (4, 1, 7)
STARTS = [0, 4, 5, 12]
TEMPERATURE = 0.8


def plain_loss(o: ValueImplicit, batch: TokenBatch, logprobs: list[float]) -> float:
    total = 0.0
    for start, end in pairwise(STARTS):
        changes = [
            o.beta * (logprobs[i] - float(batch.ref_logprobs_N[i]) - float(batch.ref_kl_N[i]))
            for i in range(start, end)
        ]
        total += batch.sequence_weight * 0.5 * (sum(changes) - float(batch.advantages_N[start])) ** 2
    for i, logprob in enumerate(logprobs):
        ratio = math.exp(logprob - float(batch.old_logprobs_N[i]))
        clipped = min(max(ratio, 1 - o.clip_low), 1 + o.clip_high)
        advantage = float(batch.own_advantages_N[i])
        total -= o.actor_coef * float(batch.weights_N[i]) * min(ratio * advantage, clipped * advantage)
    return total


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("actor_coef", [0.0, 0.3])
def test_the_loss_and_its_gradient_are_those_of_a_plain_loop(seed: int, actor_coef: float) -> None:
    draw = torch.Generator().manual_seed(seed)

    def numbers(scale: float) -> torch.Tensor:
        return torch.randn(12, generator=draw, dtype=torch.float64) * scale

    logprobs_N = -numbers(1).abs() - 0.1
    targets = torch.randn(3, generator=draw, dtype=torch.float64)
    batch = TokenBatch(
        weights_N=torch.rand(12, generator=draw, dtype=torch.float64) / 6,
        lengths=LENGTHS,
        sequence_weight=0.25,
        advantages_N=targets.repeat_interleave(torch.tensor(LENGTHS)),
        old_logprobs_N=logprobs_N + numbers(0.5),
        ref_logprobs_N=logprobs_N + numbers(0.5),
        ref_kl_N=numbers(0.3).abs(),
        own_advantages_N=numbers(1),
    )
    objective = ValueImplicit(beta=0.4, actor_coef=actor_coef)
    logprobs_N.requires_grad_()
    loss, metrics = objective.loss(batch, logprobs_N)
    assert_is(lambda logprobs: plain_loss(objective, batch, logprobs), loss, logprobs_N)
    only_value = dataclasses.replace(objective, actor_coef=0.0)
    assert float(metrics["train/value_loss"]) == pytest.approx(
        plain_loss(only_value, batch, logprobs_N.tolist())
    )


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_the_actors_advantages_are_whitened_sums_of_later_changes(lam: float) -> None:
    draw = torch.Generator().manual_seed(1)
    old_N, ref_N, kl_N = (torch.randn(12, generator=draw, dtype=torch.float64) for _ in range(3))
    sums = []
    for start, end in pairwise(STARTS):
        changes = [0.4 * float(old_N[i] - ref_N[i] - kl_N[i]) for i in range(start, end)]
        sums += [
            sum(lam ** (k - t) * changes[k] for k in range(t, len(changes))) for t in range(len(changes))
        ]
    found_N = ValueImplicit(beta=0.4, lam=lam).precompute(old_N, ref_N, kl_N, STARTS)
    expected = [(value - fmean(sums)) / pstdev(sums) for value in sums]
    assert found_N.tolist() == pytest.approx(expected)
    assert discounted_sums(torch.tensor([1.0, 2.0, 4.0]), [0, 2, 3], 0.5).tolist() == [2.0, 2.0, 4.0]


def test_a_step_of_the_trainer_is_that_of_the_formula() -> None:
    rows = [
        dataclasses.replace(row, advantages=[row.reward - 0.5] * len(row.response_ids)) for row in episodes(8)
    ]
    objective = ValueImplicit(beta=0.3, actor_coef=0.2, lam=0.9)

    def make_reference():
        return tiny_model(seed=1)

    trainer = policy_trainer(objective, load_reference=make_reference, temperature=TEMPERATURE)
    trainer.train(0, rows)

    model, reference = tiny_model(), make_reference()
    value_loss = torch.zeros(())
    logprobs, sums = [], []
    for row in rows:
        trained = torch.from_numpy(row.trained)
        all_TV, own_T = row_logprobs(model, row, TEMPERATURE)
        with torch.no_grad():
            ref_TV, ref_T = row_logprobs(reference, row, TEMPERATURE)
            kl_T = (all_TV.exp() * (all_TV - ref_TV)).sum(-1)[trained]
        changes_T = 0.3 * (own_T[trained] - ref_T[trained] - kl_T)
        value_loss = value_loss + 0.5 * (changes_T.sum() - (row.reward - 0.5)) ** 2 / len(rows)
        fixed = changes_T.tolist()
        sums += [sum(0.9 ** (k - t) * fixed[k] for k in range(t, len(fixed))) for t in range(len(fixed))]
        logprobs.append(own_T[trained])
    advantages_N = torch.tensor([(value - fmean(sums)) / pstdev(sums) for value in sums])
    actor_loss = -(advantages_N * torch.cat(logprobs)).mean()
    plain_step(model, value_loss + 0.2 * actor_loss)
    assert_close(trainer, {f"{name}": tensor for name, tensor in model.named_parameters()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnMeans(GroupCredit):
    """A user's credit, which `check` accepts because of what it declares."""

    gives = (Advantages(before_training=True), CentredRewards(), CreditForRewards())

    def advantages(self, rewards):
        return [reward - fmean(rewards) for reward in rewards]


def errors(experiment) -> list[str]:
    return [finding.what for _, finding in collect_findings(experiment) if finding.level == "error"]


def test_check_accepts_the_preset_and_refuses_settings_that_change_the_scale_of_rewards() -> None:
    experiment = experiment_of("quickstart/grpo,presets/vimpo")
    assert errors(experiment) == []
    trainer, credit = experiment.trainer, experiment.credit
    whitened = dataclasses.replace(
        experiment, trainer=dataclasses.replace(trainer, advantage_normalisation="whiten")
    )
    assert any("advantage_normalisation is 'whiten'" in error for error in errors(whitened))
    for credit_part in (dataclasses.replace(credit, std=True), Gae(), Outcome(), WeightedBy(over=credit)):
        refusal = "needs advantages that are an answer's reward minus its group's mean"
        assert any(refusal in error for error in errors(dataclasses.replace(experiment, credit=credit_part)))
    for credit_part in (Rloo(), OwnMeans()):
        assert errors(dataclasses.replace(experiment, credit=credit_part)) == []
    shares_sequences = dataclasses.replace(
        experiment, trainer=dataclasses.replace(trainer, sequence_parallel_size=2)
    )
    assert any("ranks that share a sequence" in error for error in errors(shares_sequences))
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1: set it to 0"):
        ValueImplicit(kl_coef=0.1)


def test_the_best_policy_under_the_kl_has_the_loss_0_and_its_advantages() -> None:
    """In the tests' language: π* ∝ π_ref · exp(Q / β), where Q is the value after the token under π*."""
    beta = 0.7

    def best_policy(prefix: mdp.Ids) -> tuple[float, dict[int, float], float]:
        """The value of a state, the best policy there, and its KL to the reference."""
        if prefix and prefix[-1] == mdp.EOS:
            return mdp.reward(prefix), {}, 0.0
        reference = mdp.policy(prefix)
        values = {token: best_policy((*prefix, token))[0] for token in reference}
        tilted = {token: chance * math.exp(values[token] / beta) for token, chance in reference.items()}
        policy = {token: weight / sum(tilted.values()) for token, weight in tilted.items()}
        kl = sum(chance * math.log(chance / reference[token]) for token, chance in policy.items())
        return sum(chance * values[token] for token, chance in policy.items()), policy, kl

    objective = ValueImplicit(beta=beta, actor_coef=0.0)
    prompt_value = best_policy(())[0]
    for answer in mdp.answers():
        states = [answer[:t] for t in range(len(answer))]
        logprobs_N = torch.tensor(
            [math.log(best_policy(s)[1][t]) for s, t in zip(states, answer, strict=True)]
        )
        references = [math.log(mdp.policy(s)[t]) for s, t in zip(states, answer, strict=True)]
        batch = TokenBatch(
            weights_N=torch.ones(len(answer)),
            lengths=(len(answer),),
            sequence_weight=1.0,
            advantages_N=torch.full((len(answer),), mdp.reward(answer) - prompt_value),
            old_logprobs_N=logprobs_N,
            ref_logprobs_N=torch.tensor(references),
            ref_kl_N=torch.tensor([best_policy(s)[2] for s in states]),
            own_advantages_N=torch.zeros(len(answer)),
        )
        loss, _ = objective.loss(batch, logprobs_N)
        assert float(loss) == pytest.approx(0.0, abs=1e-10)
        # λ = 0: a token's advantage is the change of the value.
        changes = beta * (logprobs_N - batch.ref_logprobs_N - batch.ref_kl_N)
        values = [best_policy(state)[0] for state in (*states, answer)]
        assert changes.tolist() == pytest.approx([b - a for a, b in pairwise(values)], abs=1e-5)
