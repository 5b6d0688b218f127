"""Self-distillation on distributions.

These tests promise:

* Divergences, their gradients and a step of the trainer are those of plain loops, with each teacher.
* The sampled-token form has the gradient of the whole distribution in expectation.
* A moving average resumes with the same bits, and `check` refuses settings that make no sense.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tabular_mdp as mdp
from tests.support.shipped import experiment_of
from tests.support.tiny_trainer import (
    are_same,
    assert_close,
    episodes,
    plain_step,
    policy_trainer,
    row_logprobs,
    threaded_episodes,
    tiny_model,
    trained,
    with_teacher_prompts,
)
from treetune.credit.distillation import Distillation
from treetune.credit.grpo import Group
from treetune.credit.no_credit import NoCredit
from treetune.credit.teacher_prompts import PrivilegedPrompt
from treetune.credit.teacher_prompts import with_teacher_prompts as add_teacher_prompts
from treetune.findings import collect_findings
from treetune.models import logprobs as models_logprobs
from treetune.models.lora import Lora
from treetune.models.sources import TinyModel
from treetune.objectives.base import TokenBatch
from treetune.objectives.distribution_distillation import DistributionDistillation
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.objectives.teacher import Teacher
from treetune.trainer.base import Trainer
from treetune.trainer.batches import sequences_of_rank
from treetune.trainer.ranks import Ranks
from treetune.trainer.tokens import Sequences, units_of
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Grade

TEMPERATURE = 0.8
AVERAGE = Teacher(weights="average", decay=0.7)


# The divergence of two distributions


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit) for logit in logits]
    return [power / sum(powers) for power in powers]


def plain_divergence(o: DistributionDistillation, logits: list[float], of_teacher: list[float]) -> float:
    p, q = softmax(logits), softmax(of_teacher)
    if o.top_k is not None:
        ranked = p if o.top_k_of == "policy" else q
        kept = sorted(range(len(p)), key=lambda v: -ranked[v])[: o.top_k]
        p, q = [p[v] for v in kept], [q[v] for v in kept]
        if o.tail == "outcome":
            p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
        else:
            p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    total = 0.0
    for x, y in zip(p, q, strict=True):
        mixture = o.jsd_beta * y + (1 - o.jsd_beta) * x
        term = {
            "forward_kl": y * math.log(y / x),
            "reverse_kl": x * math.log(x / y),
            "jsd": o.jsd_beta * y * math.log(y / mixture) + (1 - o.jsd_beta) * x * math.log(x / mixture),
        }[o.divergence]
        total += term if o.entry_clip is None else min(term, o.entry_clip)
    return total


def slopes(function: Callable[[list[float]], float], values: list[float], step: float = 1e-6) -> list[float]:
    result = []
    for i, value in enumerate(values):
        up, down = values.copy(), values.copy()
        up[i], down[i] = value + step, value - step
        result.append((function(up) - function(down)) / (2 * step))
    return result


def random_logits(count: int = 5, vocabulary: int = 7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    of_policy, of_teacher = torch.randn(2, count, vocabulary, generator=draw, dtype=torch.float64) * 1.5
    return of_policy.requires_grad_(), of_teacher


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"entry_clip": 0.05},
        {"top_k": 3},
        {"top_k": 3, "tail": "dropped"},
        {"top_k": 2, "top_k_of": "teacher", "entry_clip": 0.1},
    ],
)
def test_divergence_and_gradient_are_those_of_a_plain_loop(divergence: Any, settings: dict[str, Any]) -> None:
    objective = DistributionDistillation(divergence=divergence, jsd_beta=0.3, **settings)
    logits_CV, teacher_CV = random_logits()
    divergence_C, teacher_kl_C = objective.compare(logits_CV, teacher_CV)
    divergence_C.sum().backward()
    forward_kl = DistributionDistillation()
    for row, of_teacher, divergence_of_row, teacher_kl, gradient in zip(
        logits_CV.tolist(), teacher_CV.tolist(), divergence_C.tolist(), teacher_kl_C.tolist(), logits_CV.grad
    ):
        assert divergence_of_row == pytest.approx(plain_divergence(objective, row, of_teacher))
        assert teacher_kl == pytest.approx(plain_divergence(forward_kl, row, of_teacher))
        expected = slopes(partial(plain_divergence, objective, of_teacher=of_teacher), row)
        assert gradient.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_example_of_the_documents_is_right() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.8, 0.1, 0.1]]).log()
    assert float(DistributionDistillation().compare(p, q)[0]) == pytest.approx(0.23, abs=0.005)
    assert float(DistributionDistillation(top_k=1).compare(p, q)[0]) == pytest.approx(0.22, abs=0.005)


def test_the_sampled_token_form_has_the_gradient_of_the_reverse_kl_in_expectation() -> None:
    """By enumeration: each token counts with its probability. `self_distillation` gives it credit, and the
    policy gradient trains it."""
    logits_CV, teacher_CV = random_logits()
    DistributionDistillation(divergence="reverse_kl").compare(logits_CV, teacher_CV)[0].sum().backward()
    expected_gradient = logits_CV.grad.clone()
    logits_CV.grad = None
    logp_CV = logits_CV.log_softmax(-1)
    differences_CV = (teacher_CV.log_softmax(-1) - logp_CV).detach()
    chances_CV = logp_CV.detach().exp()
    for token in range(logits_CV.shape[-1]):
        batch = TokenBatch(weights_N=chances_CV[:, token], advantages_N=differences_CV[:, token])
        loss, _ = ClippedPolicyGradient().loss(batch, logp_CV[:, token])
        loss.backward(retain_graph=True)
    assert torch.allclose(logits_CV.grad, expected_gradient, atol=1e-12)
    assert expected_gradient.abs().max() > 0.05


def test_the_tail_of_one_token_and_the_ends_of_the_jensen_shannon_divergence() -> None:
    logits_CV, teacher_CV = random_logits()

    def divergences(**settings: Any) -> list[float]:
        return DistributionDistillation(**settings).compare(logits_CV, teacher_CV)[0].tolist()

    vocabulary = logits_CV.shape[-1]
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        uncut = divergences(divergence=divergence)
        assert divergences(divergence=divergence, top_k=vocabulary - 1) == pytest.approx(uncut)
        assert divergences(divergence=divergence, top_k=vocabulary + 5) == pytest.approx(uncut)
        fewer = divergences(
            divergence=divergence, top_k=2
        )  # outcomes that are put together are less different
        assert all(
            0 <= fewer_outcomes <= all_outcomes
            for fewer_outcomes, all_outcomes in zip(fewer, uncut, strict=True)
        )
    small = 1e-4
    assert divergences(divergence="jsd", jsd_beta=small) == pytest.approx(
        [small * kl for kl in divergences(divergence="forward_kl")], rel=0.01
    )
    assert divergences(divergence="jsd", jsd_beta=1 - small) == pytest.approx(
        [small * kl for kl in divergences(divergence="reverse_kl")], rel=0.01
    )


def test_a_tail_that_rounds_to_nothing_has_a_finite_gradient() -> None:
    logits_CV = torch.tensor([[50.0, 0.0, -1.0]], requires_grad=True)
    teacher_CV = torch.tensor([[-50.0, 40.0, 0.0]])
    for divergence in ("forward_kl", "reverse_kl", "jsd"):
        objective = DistributionDistillation(divergence=divergence, top_k=1)
        divergence_C, _ = objective.compare(logits_CV, teacher_CV)
        divergence_C.sum().backward()
        assert divergence_C.isfinite().all() and logits_CV.grad.isfinite().all()


# The loss of a batch


def test_the_loss_leaves_out_answers_without_a_teacher_and_weighs_tokens_by_importance() -> None:
    batch = TokenBatch(
        weights_N=torch.tensor([0.25, 0.25, 0.25, 0.25]),
        behaviour_logprobs_N=torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        log_mass_N=torch.tensor([0.0, 0.0, 0.0, -0.5]),
        has_teacher_N=torch.tensor([True, True, False, True]),
        terms=(torch.tensor([0.4, 0.8, 5.0, 1.2]), torch.tensor([0.1, 0.2, 9.0, 0.3])),
        advantages_N=torch.tensor([1.0, -1.0, 1.0, 0.0]),
    )
    logprobs_N = torch.tensor([-1.0, 0.0, -1.0, -1.5])
    loss, metrics = DistributionDistillation(divergence_weight=2.0, importance_cap=2.0).loss(
        batch, logprobs_N
    )
    # p / p_engine is 1, e (2 at most), 1 and 1.
    assert float(loss) == pytest.approx(2 * (0.4 + 2 * 0.8 + 1.2) / 4)
    assert float(metrics["train/divergence"]) == pytest.approx((0.4 + 0.8 + 1.2) / 4)
    assert float(metrics["train/teacher_kl"]) == pytest.approx((0.1 + 0.2 + 0.3) / 4)
    assert float(metrics["train/with_teacher"]) == 0.75
    with_policy_gradient = DistributionDistillation(advantage_weight=0.5)
    with_both, _ = with_policy_gradient.loss(batch, logprobs_N)
    policy_loss, _ = ClippedPolicyGradient().loss(batch, logprobs_N)
    assert float(with_both) == pytest.approx((0.4 + 0.8 + 1.2) / 4 + 0.5 * float(policy_loss))


def test_the_mean_of_sdpos_code_is_ours_over_the_share_of_tokens_with_a_teacher() -> None:
    divergences, has_teacher = [0.4, 0.8, 5.0, 1.2, 2.0], [True, True, False, True, False]
    batch = TokenBatch(
        weights_N=torch.full([5], 1 / 5),
        has_teacher_N=torch.tensor(has_teacher),
        terms=(torch.tensor(divergences), torch.zeros(5)),
    )
    loss, metrics = DistributionDistillation().loss(batch, torch.zeros(5))
    with_teacher = [divergence for divergence, has in zip(divergences, has_teacher, strict=True) if has]
    of_sdpo = sum(with_teacher) / len(with_teacher)
    assert float(loss) / float(metrics["train/with_teacher"]) == pytest.approx(of_sdpo)


# A step of the trainer


def divergences_of_rows(
    objective: DistributionDistillation, model: Any, teacher: Any, rows: list[Episode]
) -> torch.Tensor:
    """Returns the divergence at each trained token, from one plain forward pass for each row and model."""
    divergences = []
    for row in rows:
        all_TV, _ = row_logprobs(model, row, TEMPERATURE)
        divergence_T = torch.zeros(len(row.response_ids))
        if row.teacher_prompt_ids is not None:
            with torch.no_grad():
                privileged = dataclasses.replace(row, prompt_ids=row.teacher_prompt_ids)
                teacher_TV, _ = row_logprobs(teacher, privileged, TEMPERATURE)
            divergence_T, _ = objective.compare(all_TV, teacher_TV)
        divergences.append(divergence_T[torch.from_numpy(row.trained)])
    return torch.cat(divergences)


@pytest.mark.parametrize("teacher", [Teacher(), Teacher(weights="policy"), AVERAGE])
def test_steps_of_the_trainer_are_those_of_the_formula(teacher: Teacher) -> None:
    rows = with_teacher_prompts(episodes(6))
    objective = DistributionDistillation(divergence="jsd", top_k=4, teacher=teacher)

    def make_reference() -> Any:
        return tiny_model(seed=1)

    trainer = policy_trainer(objective, load_reference=make_reference, temperature=TEMPERATURE, epochs=3)
    trainer.train(0, rows)

    model = tiny_model()
    average = tiny_model()
    model_of_teacher = {"reference": make_reference(), "policy": model, "average": average}[teacher.weights]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0)
    for _ in range(3):
        loss = divergences_of_rows(objective, model, model_of_teacher, rows).mean()
        plain_step(model, loss, optimiser)
        with torch.no_grad():
            for averaged, weight in zip(average.parameters(), model.parameters(), strict=True):
                averaged.copy_(0.7 * averaged + 0.3 * weight)
    assert_close(trainer, model, atol=2e-6)
    if trainer.average is not None:
        assert_close(trainer.average.module.model, average, atol=2e-6)


@pytest.mark.parametrize(
    "cut",
    [
        {"layout": "packed", "tokens_per_micro_batch": 60},
        {"layout": "tree", "tokens_per_micro_batch": 60},
        {"sequences_per_micro_batch": 1, "gradient_checkpointing": True},
    ],
)
def test_the_update_depends_neither_on_the_cut_nor_on_chunks(
    cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = with_teacher_prompts(episodes(12))
    objective = DistributionDistillation(teacher=AVERAGE)
    padded, padded_metrics = trained(objective, rows, minibatch_size=6)
    monkeypatch.setattr(models_logprobs, "LOGITS_PER_CHUNK", 3 * 24)
    cut_trainer, metrics = trained(objective, rows, minibatch_size=6, **cut)
    assert_close(padded, cut_trainer, atol=1e-5)
    assert metrics["train/divergence"] == pytest.approx(padded_metrics["train/divergence"], abs=1e-7)
    assert padded_metrics["train/divergence"] > 1e-5
    assert padded_metrics["train/teacher_kl"] == pytest.approx(padded_metrics["train/divergence"])


def test_threads_have_a_teacher_at_each_of_their_rows() -> None:
    rows = with_teacher_prompts([row for row, _ in threaded_episodes(4)])
    sequences = Sequences.of(rows)
    assert sequences.of_teacher is not None
    assert len(sequences.of_teacher.rows) == len(sequences.rows) > len(rows)
    for row, of_teacher in zip(sequences.rows, sequences.of_teacher.rows, strict=True):
        assert (row.start, row.end, row.sequence) == (of_teacher.start, of_teacher.end, of_teacher.sequence)
        labels = row.token_ids[row.predicting + 1]
        assert labels.tolist() == of_teacher.token_ids[of_teacher.predicting + 1].tolist()


def test_a_rank_has_the_teachers_tokens_of_the_rows_that_it_computes() -> None:
    rows = with_teacher_prompts(episodes(32))
    settings = Trainer(objective=DistributionDistillation(), learning_rate=1e-3, tokens_per_micro_batch=64)
    units = units_of(rows, in_pairs=False)
    for rank in range(2):
        ranks = Ranks(rank, 2, torch.device("cpu"), 60.0)
        sequences = sequences_of_rank(rows, settings, ranks, [units], scores_all=False)
        assert sequences.of_teacher is not None
        has_tokens = [row.token_ids is not None for row in sequences.rows]
        assert has_tokens == [row.token_ids is not None for row in sequences.of_teacher.rows]
        assert 0 < sum(has_tokens) < len(rows)


def test_with_adapters_the_reference_teaches_without_them_and_the_average_has_its_own() -> None:
    rows = with_teacher_prompts(episodes(6))
    lora = Lora(rank=2)
    trainer, _ = trained(DistributionDistillation(), rows, lora=lora)
    trainer.train(1, rows)
    # The adapters have moved, and the metric is the divergence from the start model.
    metrics = trainer.train(2, rows)
    merged = tiny_model()
    before = policy_trainer(DistributionDistillation(), lora=lora)
    before.train(0, rows)
    before.train(1, rows)
    merged.load_state_dict(before.weights(), strict=False)
    expected = divergences_of_rows(DistributionDistillation(), merged, tiny_model(), rows).mean()
    assert metrics["train/divergence"] == pytest.approx(float(expected.detach()), rel=1e-3)
    averaging, _ = trained(DistributionDistillation(teacher=AVERAGE), rows, lora=lora)
    assert averaging.average is not None
    of_policy = dict(averaging.policy.module.named_parameters())
    start = dict(averaging.factory.frozen_policy().named_parameters())
    moved = 0
    for name, averaged in averaging.average.module.named_parameters():
        assert torch.allclose(averaged, 0.7 * start[name] + 0.3 * of_policy[name], atol=1e-7)
        moved += not torch.equal(averaged, start[name])
    assert moved == sum("lora_B" in name for name in of_policy)


def test_nothing_is_learned_from_a_minibatch_without_a_teacher() -> None:
    rows = episodes(8)
    trainer, metrics = trained(DistributionDistillation(), rows)
    assert are_same(trainer, tiny_model())
    assert (metrics["train/steps"], metrics["train/skipped_steps"]) == (0, 1)
    # With PPO's loss there is something to learn.
    trainer, metrics = trained(DistributionDistillation(advantage_weight=1.0), rows)
    plain, _ = trained(ClippedPolicyGradient(), rows)
    assert_close(trainer, plain)
    assert metrics["train/with_teacher"] == 0


# The moving average


def test_a_moving_teacher_resumes_with_the_same_bits(tmp_path: Path) -> None:
    rows = with_teacher_prompts(episodes(8))
    objective = DistributionDistillation(teacher=AVERAGE)
    uninterrupted = policy_trainer(objective, iterations=2)
    uninterrupted.train(0, rows)
    uninterrupted.save(tmp_path)
    uninterrupted.train(1, rows)
    resumed = policy_trainer(objective, iterations=2)
    resumed.load(tmp_path)
    resumed.train(1, rows)
    assert uninterrupted.average is not None and resumed.average is not None
    assert are_same(uninterrupted, resumed)
    assert are_same(uninterrupted.average.module, resumed.average.module)
    assert not are_same(uninterrupted.average.module, uninterrupted.policy.module)


def test_a_state_without_a_moving_average_is_refused(tmp_path: Path) -> None:
    rows = with_teacher_prompts(episodes(4))
    trainer, _ = trained(DistributionDistillation(), rows)
    trainer.save(tmp_path)
    averaging_trainer = policy_trainer(DistributionDistillation(teacher=AVERAGE))
    with pytest.raises(RuntimeError, match="without a moving average of the weights"):
        averaging_trainer.load(tmp_path)


def test_in_half_precision_the_average_is_kept_in_float32(tmp_path: Path) -> None:
    rows = with_teacher_prompts(episodes(4))
    teacher = Teacher(weights="average", decay=0.999)
    settings: dict[str, Any] = {"precision": "bfloat16", "zero_stage": 1}
    trainer = policy_trainer(DistributionDistillation(teacher=teacher), **settings)
    average = trainer.average
    assert average is not None
    expected = {name: weight.float() for name, weight in average.module.named_parameters()}
    for iteration in range(3):
        trainer.train(iteration, rows)
        for name, weight in trainer.policy.module.named_parameters():
            expected[name] = 0.999 * expected[name] + 0.001 * weight.detach().float()
    average.move_to(torch.device("cpu"))
    trainer.save(tmp_path)
    resumed = policy_trainer(DistributionDistillation(teacher=teacher), **settings)
    resumed.load(tmp_path)
    assert resumed.average is not None
    for name, weight in expected.items():
        assert torch.allclose(average._in_float32[name], weight, atol=1e-7)
        assert torch.equal(average._in_float32[name], resumed.average._in_float32[name])
    assert are_same(average.module, resumed.average.module)


# Prompts


def test_rows_get_the_prompts_of_their_privileged_texts() -> None:
    answer_ids = list(mdp.answers())[:3]
    problem = dataclasses.replace(mdp.trajectory(answer_ids[0]).problem, prompt="0", gold="a")
    grades = [Grade(1.0, "ok"), Grade(0.0, "no_answer", message="b"), Grade(1.0, "ok")]
    answers = [
        dataclasses.replace(mdp.trajectory(ids, problem, sample=i), grade=grade)
        for i, (ids, grade) in enumerate(zip(answer_ids, grades, strict=True))
    ]
    context, trees = mdp.context(), trees_of(answers)
    rows, _ = NoCredit().assign(context, trees)

    def prompts(text: Any, template: str = "{prompt};{context}") -> tuple[list[str | None], float]:
        prompt = PrivilegedPrompt(context=text, template=template)
        with_prompts, metrics = add_teacher_prompts(context, prompt, trees, rows)
        texts = [
            None if row.teacher_prompt_ids is None else mdp.decode(row.teacher_prompt_ids.tolist())
            for row in with_prompts
        ]
        return texts, metrics["credit/without_context"]

    first, _, third = (answer.text for answer in answers)
    assert prompts("gold") == (["0;a"] * 3, 0.0)
    assert prompts("right_answer") == ([f"0;{third}", f"0;{first}", f"0;{first}"], 0.0)
    assert prompts("feedback") == ([None, "0;b", None], pytest.approx(2 / 3))
    too_long = "{prompt}" + ";" * context.settings.context_length + "{context}"
    assert prompts("gold", too_long) == ([None] * 3, 1.0)
    with pytest.raises(ValueError, match=r"template doesn't contain \{context\}"):
        Teacher(template="{prompt}")


# `check`


def errors(experiment: Any) -> list[str]:
    return [finding.what for _, finding in collect_findings(experiment) if finding.level == "error"]


@pytest.mark.parametrize("preset", ["methods/opsd", "methods/sdpo"])
def test_check_accepts_the_presets(preset: str) -> None:
    experiment = experiment_of(f"quickstart/grpo,{preset}")
    assert errors(experiment) == []
    assert experiment.credit == NoCredit()
    objective = experiment.trainer.objective
    assert not objective.needs_advantages
    without_metric = dataclasses.replace(experiment.trainer, measure_kl=False)
    assert without_metric.keeps_reference is (objective.teacher.weights == "reference")


def test_check_refuses_settings_that_make_no_sense() -> None:
    experiment = experiment_of("quickstart/grpo,methods/opsd")
    trainer = experiment.trainer

    def errors_with(objective: DistributionDistillation, **changes: Any) -> list[str]:
        changed = dataclasses.replace(trainer, objective=objective)
        return errors(dataclasses.replace(experiment, trainer=changed, **changes))

    assert errors_with(DistributionDistillation(advantage_weight=1.0), credit=Group()) == []
    (message,) = errors_with(DistributionDistillation(advantage_weight=1.0))
    assert "needs advantages" in message
    one_answer = dataclasses.replace(experiment.rollout, samples=1)
    of_answers = DistributionDistillation(teacher=Teacher(context="right_answer"))
    (message,) = errors_with(of_answers, rollout=one_answer)
    assert "it shows the teacher another answer" in message
    another_teacher = Distillation(teacher=TinyModel())
    messages = errors_with(DistributionDistillation(), credit=another_teacher)
    assert any("puts another model in its place" in message for message in messages)
    other_messages = errors_with(DistributionDistillation(), restart="every_iteration")
    messages = errors_with(DistributionDistillation(teacher=AVERAGE), restart="every_iteration")
    assert len(messages) == len(other_messages) + 1
    assert any("the moving average over all iterations" in message for message in messages)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_stage": 3}, "zero_stage 3 shards the weights"),
        ({"sequence_parallel_size": 2}, "can't compare its distributions with a teacher's"),
        ({"offload_reference": True}, "the objective's teacher is the reference"),
    ],
)
def test_a_trainer_that_cannot_run_the_teacher_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(objective=DistributionDistillation(), learning_rate=1e-3, **settings)


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="a moving average needs both"):
        Teacher(weights="average")
    with pytest.raises(ValueError, match="a moving average needs both"):
        Teacher(decay=0.9)
    with pytest.raises(ValueError, match="kl_coef belongs to PPO's loss"):
        DistributionDistillation(kl_coef=0.1)
    assert DistributionDistillation(kl_coef=0.1, advantage_weight=1.0).needs_reference
