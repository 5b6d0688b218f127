"""On-policy distillation: what a token is worth, and that a policy comes to be like its teacher, also with
the teacher as an implicit reward model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.small_run import MODEL, TRAINER, directory_of, small, train
from tests.support.tiny_trainer import (
    assert_close,
    episodes,
    plain_step,
    policy_trainer,
    row_logprobs,
    tiny_model,
)
from treetune.credit.distillation import Distillation
from treetune.credit.literature.implicit_reward import ImplicitReward
from treetune.engine.settings import InProcessSettings
from treetune.objectives.policy_gradient import ClippedPolicyGradient

FROM_THE_TEACHER = ClippedPolicyGradient(kl_coef=1.0, kl_placement="advantage", kl_estimator="k1")
OF_WHOLE_ANSWERS = ClippedPolicyGradient(kl_coef=1.0, kl_placement="reward", kl_estimator="k1")


@pytest.mark.parametrize("objective", [FROM_THE_TEACHER, OF_WHOLE_ANSWERS])
def test_a_step_is_that_of_the_teachers_log_probs_less_the_policys_own(
    objective: ClippedPolicyGradient,
) -> None:
    """With the penalty in the reward, a token's advantage has the differences of all later tokens, too."""
    rows = [replace(row, advantages=np.zeros(len(row.response_ids))) for row in episodes(8)]
    trainer = policy_trainer(
        objective,
        load_reference=lambda: tiny_model(1),
        layout="padded",
        advantage_normalisation="none",
    )
    trainer.train(0, rows)
    model, teacher = tiny_model(), tiny_model(1)
    terms = []
    for row in rows:
        logprobs_T, trained = row_logprobs(model, row)[1], torch.tensor(row.trained)
        advantages_T = (row_logprobs(teacher, row)[1] - logprobs_T).detach()[trained]
        if objective is OF_WHOLE_ANSWERS:
            advantages_T = advantages_T.flip(0).cumsum(0).flip(0)
        terms.append(-advantages_T * logprobs_T[trained])
    plain_step(model, torch.cat(terms).mean())
    assert_close(trainer, model)


def test_the_expected_gradient_is_that_of_the_reverse_kl_to_the_teacher() -> None:
    draw = torch.Generator().manual_seed(3)
    logits_V = torch.randn(7, generator=draw, dtype=torch.float64).requires_grad_()
    teacher_V = torch.randn(7, generator=draw, dtype=torch.float64).log_softmax(-1)
    logprobs_V = logits_V.log_softmax(-1)
    probs_V = logprobs_V.exp().detach()
    expected = -(probs_V * (teacher_V - logprobs_V).detach() * logprobs_V).sum()
    kl = (logprobs_V.exp() * (logprobs_V - teacher_V)).sum()
    ours, theirs = (torch.autograd.grad(loss, logits_V, retain_graph=True)[0] for loss in (expected, kl))
    torch.testing.assert_close(ours, theirs)


def test_with_the_penalty_in_the_reward_it_is_that_of_the_reverse_kl_of_whole_answers() -> None:
    """Exactly, over all answers of two tokens. The first dimension is the first token."""
    draw = torch.Generator().manual_seed(3)

    def draw_logits() -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.randn(5, 1, generator=draw, dtype=torch.float64)
        return first.requires_grad_(), torch.randn(5, 5, generator=draw, dtype=torch.float64).requires_grad_()

    logits, logits_of_teacher = draw_logits(), draw_logits()
    first, second = logits[0].log_softmax(0), logits[1].log_softmax(1)
    first_of_teacher = logits_of_teacher[0].log_softmax(0)
    second_of_teacher = logits_of_teacher[1].log_softmax(1)
    chances = (first + second).exp()
    advantage_of_second = (second_of_teacher - second).detach()
    advantage_of_first = (first_of_teacher - first).detach() + advantage_of_second
    loss = -(chances.detach() * (advantage_of_first * first + advantage_of_second * second)).sum()
    kl = (chances * (first + second - first_of_teacher - second_of_teacher)).sum()
    ours, theirs = (torch.autograd.grad(value, logits, retain_graph=True) for value in (loss, kl))
    torch.testing.assert_close(ours, theirs)


def test_a_policy_comes_to_be_like_a_teacher_whatever_its_answers_earn(tmp_path: Path) -> None:
    teacher = replace(MODEL, layers=2)
    config = small(
        tmp_path,
        InProcessSettings(),
        credit=Distillation(teacher=teacher),
        trainer=replace(
            TRAINER, objective=FROM_THE_TEACHER, advantage_normalisation="none", learning_rate=5e-3
        ),
        iterations=8,
        problems_per_iteration=16,
    )
    train(config)
    kl = [row["train/kl"] for row in directory_of(config).read_metrics()]
    assert kl[-1] < 0.5 * kl[0]


def test_implicit_rewards_alone_lead_the_policy_to_the_reward_model(tmp_path: Path) -> None:
    """The mean of a token's reward is −β KL(π ‖ π_φ). A small γ leaves out the noise of later tokens."""
    config = small(
        tmp_path,
        InProcessSettings(),
        credit=ImplicitReward(
            reward_model=replace(MODEL, layers=2), beta=1.0, gamma=0.01, outcome_weight=0.0
        ),
        trainer=replace(TRAINER, advantage_normalisation="none", learning_rate=5e-3),
        iterations=8,
        problems_per_iteration=16,
    )
    train(config)
    rows = directory_of(config).read_metrics()
    assert rows[-1]["train/kl"] < 0.7 * rows[0]["train/kl"]
    assert rows[0]["credit/value_tokens"] > 0


def test_an_objective_that_takes_no_difference_to_the_teacher_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path, credit=Distillation(teacher=MODEL))
    (found,) = config.credit.check(config)
    assert "has no KL penalty there" in found.what and found.key == "$.trainer.objective.kl_placement"
    for objective in (FROM_THE_TEACHER, OF_WHOLE_ANSWERS):
        assert not list(config.credit.check(replace(config, trainer=replace(TRAINER, objective=objective))))


def test_a_teacher_of_other_tokens_is_refused(tmp_path: Path) -> None:
    config = small(tmp_path, credit=Distillation(teacher=replace(MODEL, alphabet="ab")))
    with pytest.raises(ValueError, match="aren't the start model's"):
        train(replace(config, trainer=replace(TRAINER, objective=FROM_THE_TEACHER)))
