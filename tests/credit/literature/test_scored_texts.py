"""Credits that score a text.

These tests promise:

* Each credit gives the advantages that a plain reference of its formula gives.
* Each text is scored once, and its tokens count as cost.
* Several ranks agree, and `check` refuses what cannot score.
* The bias of each expected gradient is as stated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest

from tests.credit.expectations import REWARD_MODEL, expectation, half_informed_logprob
from tests.credit.literature.test_published_methods import GROUP, make_group
from tests.support import tabular_mdp as mdp
from tests.support.columns import plain
from tests.support.shipped import experiment_of
from treetune.credit.base import Credit
from treetune.credit.grpo import Group
from treetune.credit.literature.implicit_reward import ImplicitReward
from treetune.credit.literature.rredcot import GoldLikelihood
from treetune.credit.literature.self_distillation import SelfDistillation
from treetune.credit.literature.trace import Trace, td_credits
from treetune.credit.vineppo import MonteCarlo
from treetune.engine.requests import ScoreRequest
from treetune.engine.settings import EngineSettings
from treetune.findings import collect_findings
from treetune.models.lora import Lora
from treetune.models.sources import TinyModel
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.objectives.value_implicit import ValueImplicit
from treetune.rollouts.model_scores import ModelScores, ReferenceScores, ScoredText
from treetune.tree import trees_of
from treetune.vocabulary import (
    Column,
    Episode,
    Message,
    Metrics,
    Problem,
    Segment,
    TextCodec,
    Trajectory,
)

RREDCOT = MonteCarlo(values=GoldLikelihood())
OF_REFERENCE = MonteCarlo(values=GoldLikelihood(scorer="reference"))
ONLY_STEPS = Trace(td_steps=1, outcome_weight=0.0, step_weight=1.0, terminal_weight=0.0)

CONTEXT_BEFORE_PROMPT = "{context}{prompt}"
"""A template whose prompts begin with the reference answer ``a``. The policy of the tests' language takes
this for the knowledge that the answer will earn 1."""
OPSD = SelfDistillation(template=CONTEXT_BEFORE_PROMPT)
BY_THE_REFERENCE = [OF_REFERENCE, Trace(scorer="reference"), replace(OPSD, scorer="reference")]
CPO = SelfDistillation(
    template=CONTEXT_BEFORE_PROMPT, outcome_weight=1.0, weight=0.5, clip=0.3, keeps_sign=True, std=False
)


def assign_credit(
    credit: Credit, answers: Sequence[Trajectory] = GROUP, **context: Any
) -> tuple[list[Episode], Metrics]:
    return credit.assign(mdp.context(**context), trees_of(answers))


def logprob(text: str, prefix: mdp.Ids) -> float:
    """Returns the policy's log-prob of a text after a prefix of an answer."""
    ids = mdp.encode(text)
    chances = [mdp.policy((*prefix, *ids[:t])).get(token, 0.0) for t, token in enumerate(ids)]
    return sum(math.log(chance) if chance else -100.0 for chance in chances)


def states_of(answer: Trajectory) -> list[mdp.Ids]:
    ids = plain(answer.response_ids)
    return [ids[:start] for start in (0, *answer.step_ends[:-1])]


def steps_of(answer: Trajectory, row: Episode) -> list[float]:
    """Returns the advantage of each step, which all its tokens share."""
    parts = [row.advantages[start:end] for start, end in pairwise((0, *answer.step_ends))]
    assert all(len(set(part.tolist())) == 1 for part in parts)
    return [float(part[0]) for part in parts]


@pytest.mark.parametrize("lead_in", ["", "b;"])
def test_rredcots_values_are_the_probabilities_of_the_reference_answer(lead_in: str) -> None:
    credit = MonteCarlo(values=GoldLikelihood(lead_in=lead_in))
    rows, _ = assign_credit(credit)
    lead_in_ids = mdp.encode(lead_in)
    for answer, row in zip(GROUP, rows, strict=True):
        values = [math.exp(logprob("a", (*state, *lead_in_ids))) for state in states_of(answer)]
        expected = [after - before for before, after in pairwise([*values, answer.reward])]
        assert steps_of(answer, row) == pytest.approx(expected)
        assert row.step_values == pytest.approx(values)


def test_a_text_is_scored_once_for_each_state_and_its_tokens_are_the_cost() -> None:
    engine = mdp.TabularEngine()
    _, metrics = assign_credit(RREDCOT, engine=engine)
    states = {state for answer in GROUP for state in states_of(answer)}
    assert all(isinstance(request, ScoreRequest) for request in engine.requests)
    assert len(engine.requests) == len(states)
    assert metrics["credit/scored_texts"] == metrics["credit/value_tokens"] == len(states)
    prompt_tokens = len(GROUP[0].prompt_ids)
    assert metrics["credit/scored_prompt_tokens"] == sum(prompt_tokens + len(state) for state in states)
    assert RREDCOT.needs_engine and RREDCOT.continuations(8, 10.0, 20) == (0, 0)


def test_a_state_after_which_the_reference_answer_does_not_fit_has_no_value() -> None:
    longest = max(len(state) for answer in GROUP for state in states_of(answer))
    fits = len(GROUP[0].prompt_ids) + longest  # and one token of text, where vLLM needs another
    rows, _ = assign_credit(RREDCOT, context_length=fits + 1)
    for answer, row in zip(GROUP, rows, strict=True):
        values = [math.exp(logprob("a", state)) for state in states_of(answer) if len(state) < longest]
        changes = [after - before for before, after in pairwise([*values, answer.reward])]
        missing = len(states_of(answer)) - len(values)
        assert steps_of(answer, row) == pytest.approx([*changes, *changes[-1:] * missing])
    rows, _ = assign_credit(Trace(), context_length=fits + 1)
    assert len(rows) == len(GROUP)


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("value", ["log_gap", "log_probability"])
@pytest.mark.parametrize("td_steps", [1, 2, 5])
def test_trace_adds_the_changes_of_the_gap_to_the_groups_advantage(
    value: str, td_steps: int, std: bool
) -> None:
    """Algorithm 1, written out for each step."""
    credit = Trace(value=value, td_steps=td_steps, std=std, step_weight=0.3)  # type: ignore[arg-type]
    rewards = [answer.reward for answer in GROUP]
    rows, _ = assign_credit(credit)
    for answer, row in zip(GROUP, rows, strict=True):
        outcome = (answer.reward - fmean(rewards)) / (pstdev(rewards) if std else 1.0)
        scores = [logprob("a", state) for state in states_of(answer)]
        values = scores
        if value == "log_gap":
            values = [math.log((0.1 - scores[0]) / (0.1 - score)) for score in scores]
        last = len(values) - 1
        expected = []
        for t in range(last):
            reached = min(t + td_steps, last)
            total = sum(0.8 ** (k - t) * (values[k + 1] - values[k]) for k in range(t, reached))
            turn = total / sum(0.8 ** (k - t) for k in range(t, reached))
            if reached == last:
                turn += 2.0 * 0.8 ** (last - t) * outcome
            expected.append(outcome + 0.3 * turn)
        assert steps_of(answer, row) == pytest.approx([*expected, outcome])


def test_the_gap_is_that_of_the_mean_log_prob_of_the_reference_answers_tokens() -> None:
    answers = [replace(answer, problem=replace(answer.problem, gold="a;a")) for answer in GROUP]
    rows, _ = assign_credit(ONLY_STEPS, answers)
    for answer, row in zip(answers, rows, strict=True):
        gaps = [0.1 - logprob("a;a", state) / 3 for state in states_of(answer)]
        assert steps_of(answer, row)[:-1] == pytest.approx([math.log(b / a) for b, a in pairwise(gaps)])


def test_answers_of_one_step_and_equal_rewards_have_no_step_credit() -> None:
    assert td_credits([0.0], 3, 0.8, 2.0) == [] == td_credits([], 3, 0.8, 2.0)
    same = [replace(GROUP[0], sample=i) for i in range(2)]
    rows, _ = assign_credit(Trace(step_weight=1e-9), same)
    assert max(abs(row.advantages).max() for row in rows) < 1e-8


class ConstantModel:
    """A reference model that gives every token the same log-prob, and keeps the texts that it scored."""

    def __init__(self) -> None:
        self.texts: list[ScoredText] = []

    def logprobs(self, texts: Sequence[ScoredText]) -> list[Column]:
        self.texts += texts
        return [np.full(len(text.text_ids), -0.25) for text in texts]


@pytest.mark.parametrize("credit", BY_THE_REFERENCE)
def test_the_reference_scores_in_place_of_the_engine_if_so_configured(credit: Credit) -> None:
    assert credit.trainer_scores.reference and not credit.needs_engine
    model = ConstantModel()
    scores = ModelScores(reference=ReferenceScores(model.logprobs))
    rows, metrics = assign_credit(credit, engine=None, model_scores=scores)
    assert metrics["credit/value_tokens"] == sum(len(text.text_ids) for text in model.texts) > 0
    if isinstance(credit, MonteCarlo):
        assert rows[0].step_values == pytest.approx([math.exp(-0.25)] * len(rows[0].step_values))


def test_a_problem_without_a_reference_answer_is_named() -> None:
    answers = [replace(one, problem=replace(one.problem, gold="")) for one in GROUP]
    with pytest.raises(
        ValueError, match="problem 'train/0' has no reference answer, which the credit scores"
    ):
        assign_credit(Trace(), answers)


@pytest.mark.parametrize("credit", [RREDCOT, Trace(), OPSD])
def test_two_ranks_share_the_work_and_agree(credit: Credit) -> None:
    groups = [GROUP, make_group("a;a;b b;a a", 1)]

    def assign_on_rank(context: Any) -> tuple[list[Any], Metrics]:
        answers: list[Trajectory] = []
        for number, group in enumerate(groups):
            if number * context.ranks.world_size // len(groups) == context.ranks.rank:
                answers += group
        rows, metrics = credit.assign(context, trees_of(answers))
        return [row.advantages.tolist() for row in rows], metrics

    mdp.assert_ranks_agree(2, assign_on_rank)


# Self-distillation


def differences(answer: Trajectory) -> list[float]:
    """Returns the teacher's log-prob minus the policy's for each token.

    By Bayes' rule, the difference of a teacher who knows that the answer is right is log V(s') / V(s).
    """
    ids = plain(answer.response_ids)
    values = [mdp.value(ids[:t]) for t in range(len(ids) + 1)]
    result = []
    for t, (before, after) in enumerate(pairwise(values)):
        if after:
            result.append(math.log(after / before))
        elif before:
            # The teacher rules the token out; a log-prob of -100 stands for that of probability 0.
            result.append(-100.0 - math.log(mdp.policy(ids[:t])[ids[t]]))
        else:
            result.append(0.0)
    return result


def test_a_token_gets_the_teachers_log_prob_minus_the_policys() -> None:
    rows, metrics = assign_credit(OPSD)
    for answer, row in zip(GROUP, rows, strict=True):
        assert row.advantages == pytest.approx(differences(answer), abs=1e-6)
    assert metrics["credit/value_tokens"] == sum(len(answer.response_ids) for answer in GROUP)
    assert metrics["credit/without_context"] == 0.0


def test_the_kl_to_the_teacher_is_the_mean_log_prob_gap_without_a_bound() -> None:
    gaps = [-delta for answer in GROUP for delta in differences(answer)]
    for credit in (OPSD, CPO):
        _, metrics = assign_credit(credit)
        assert metrics["credit/teacher_kl"] == pytest.approx(fmean(gaps), abs=1e-6)


def test_without_a_weight_the_teacher_is_only_measured() -> None:
    rows, metrics = assign_credit(
        SelfDistillation(template=CONTEXT_BEFORE_PROMPT, weight=0.0, outcome_weight=1.0)
    )
    rows_of_grpo, _ = assign_credit(Group())
    for row, row_of_grpo in zip(rows, rows_of_grpo, strict=True):
        assert row.advantages.tolist() == row_of_grpo.advantages.tolist()
    assert metrics["credit/teacher_kl"] == assign_credit(OPSD)[1]["credit/teacher_kl"]


def test_cpo_shapes_the_groups_advantage_and_keeps_its_sign() -> None:
    rows, _ = assign_credit(CPO)
    mean_reward = fmean(answer.reward for answer in GROUP)
    was_cut = False
    for answer, row in zip(GROUP, rows, strict=True):
        outcome = answer.reward - mean_reward
        shaped = [outcome + 0.5 * min(max(delta, -0.3), 0.3) for delta in differences(answer)]
        expected = [advantage if advantage * outcome > 0 else 0.0 for advantage in shaped]
        was_cut = was_cut or expected != shaped
        assert row.advantages == pytest.approx(expected, abs=1e-6)
    rows, _ = assign_credit(replace(CPO, weight=2.0), GROUP)
    assert any(0.0 in row.advantages for row in rows)


def test_equal_rewards_leave_cpo_the_teachers_part() -> None:
    right = [one for one in make_group("a;a;b a;a") if one.reward == 1.0]
    assert len(right) == 2
    for answer, row in zip(right, assign_credit(CPO, right)[0], strict=True):
        expected = [0.5 * min(max(delta, -0.3), 0.3) for delta in differences(answer)]
        assert row.advantages == pytest.approx(expected, abs=1e-6)


def privileged_prompts(credit: SelfDistillation, answers: Sequence[Trajectory], **context: Any) -> list[str]:
    """Returns the texts of the privileged prompts, in the order of the answers."""
    engine = mdp.TabularEngine()
    assign_credit(credit, answers, engine=engine, **context)
    return [mdp.decode(request.prompt_ids) for request in engine.requests]


def test_the_privileged_text_is_another_right_answer_of_the_group() -> None:
    answers = make_group("a;a;b b;b a;a")
    credit = SelfDistillation(context="right_answer", template=CONTEXT_BEFORE_PROMPT)
    assert privileged_prompts(credit, answers) == ["a;a0?", "a;a;b0?", "a;a;b0?"]
    rows, metrics = assign_credit(credit, make_group("a;a;b b;b"))
    assert metrics["credit/without_context"] == 0.5
    assert set(rows[0].advantages) == {0.0} != set(rows[1].advantages)


def test_the_privileged_text_may_be_the_graders_message() -> None:
    told = replace(GROUP[0], grade=replace(GROUP[0].grade, message="b1"))
    credit = SelfDistillation(context="feedback", template="{prompt}{context}")
    assert privileged_prompts(credit, [told, GROUP[1]]) == ["0?b1"]


def test_the_privileged_text_goes_into_a_conversations_last_message_and_braces_are_only_text() -> None:
    def show(messages: Sequence[Message]) -> str:
        return "".join(message.content for message in messages)

    codec = TextCodec(encode=mdp.encode, decode=mdp.decode, eos_id=mdp.EOS, conversation=show)
    messages = (Message("system", "1"), Message("user", "2?"))
    answer = replace(GROUP[0], problem=replace(GROUP[0].problem, messages=messages, gold="ab"))
    assert privileged_prompts(SelfDistillation(template="{context}{prompt}3"), [answer], codec=codec) == [
        "1ab2?3"
    ]


def test_a_tools_tokens_are_not_compared() -> None:
    first, tool, last = GROUP[0].response_ids[:2], GROUP[0].response_ids[2:4], GROUP[0].response_ids[4:]
    segments = (
        Segment(first, logprobs=(-0.5,) * len(first), policy_version=3),
        Segment(tool, "injected"),
        Segment(last, logprobs=(-0.5,) * len(last), policy_version=3),
    )
    ((row,), _) = assign_credit(OPSD, [replace(GROUP[0], segments=segments)])
    assert row.trained.tolist() == [True] * 2 + [False] * 2 + [True] * len(last)
    assert row.advantages[2:4].tolist() == [0.0, 0.0] and row.advantages[0] != 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "{prompt}"}, r"template doesn't contain \{context\}: put"),
        ({"template": "no place"}, r"template doesn't contain \{prompt\} and \{context\}"),
        ({"weight": 0.0}, "weight and outcome_weight are both 0, so nothing is learned"),
        ({"keeps_sign": True}, "keeps_sign compares with the group's advantage, and outcome_weight is 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelfDistillation(**settings)


# Findings of `check`


@dataclass(frozen=True, kw_only=True)
class EngineWithoutScores(EngineSettings):
    """A user's engine that can't score."""

    canary_tolerance: float | None = None


@dataclass(frozen=True, kw_only=True)
class TaskWithoutReferenceAnswers(mdp.LetterTask):
    def examples(self, count: int) -> Sequence[Problem]:
        return [replace(problem, gold="") for problem in mdp.problems(count)]


@pytest.mark.parametrize("credit", ["trace", "rredcot", "self_distillation"])
def test_an_engine_that_cannot_score_and_a_task_without_reference_answers_are_reported(credit: str) -> None:
    experiment = experiment_of(f"quickstart/grpo,credit/{credit}")
    assert not [finding for _, finding in collect_findings(experiment) if finding.level == "error"]
    cannot_score = replace(experiment, engines=replace(experiment.engines, policy=EngineWithoutScores()))
    (message,) = [finding.what for _, finding in collect_findings(cannot_score) if finding.level == "error"]
    assert "needs an engine that scores given texts" in message
    without_answers = replace(experiment, task=TaskWithoutReferenceAnswers())
    messages = [finding.what for _, finding in collect_findings(without_answers)]
    (message,) = [message for message in messages if "reference answers" in message]
    assert "the first problems of the task have none" in message


@pytest.mark.parametrize(
    ("credit", "answers", "bias", "cosine"),
    [
        (ONLY_STEPS, 3, 0.9034, 0.7953),
        (replace(ONLY_STEPS, value="log_probability"), 3, 0.8919, 0.6902),
        (Trace(std=False, value="log_probability", td_steps=1), 3, 0.2173, 0.9768),
    ],
)
def test_the_expected_gradient_is_as_far_off_as_stated(
    credit: Credit, answers: int, bias: float, cosine: float
) -> None:
    measured = expectation(credit, answers, None)
    assert measured.bias_and_cosine == pytest.approx((bias, cosine), abs=5e-5)


# Implicit rewards

PRIME = ImplicitReward(reward_model=TinyModel(), beta=0.3)


def implicit_rewards(answer: Trajectory, beta: float) -> list[float]:
    ids = plain(answer.response_ids)
    logprobs = mdp.policy_logprobs(ids)
    return [beta * (half_informed_logprob(ids[:t], ids[t]) - logprobs[t]) for t in range(len(ids))]


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize(("weight", "outcome_weight"), [(1.0, 1.0), (2.0, 0.0)])
def test_the_advantage_of_prime_is_that_of_equation_5(
    gamma: float, weight: float, outcome_weight: float
) -> None:
    credit = replace(PRIME, gamma=gamma, weight=weight, outcome_weight=outcome_weight)
    rewards = [implicit_rewards(answer, 0.3) for answer in GROUP]
    rows, metrics = assign_credit(credit, engine=None, model_scores=REWARD_MODEL)
    for i, row in enumerate(rows):
        other_numbers = [j for j in range(len(GROUP)) if j != i]
        process_baseline = fmean(fmean(rewards[j]) for j in other_numbers)
        outcome = GROUP[i].reward - fmean(GROUP[j].reward for j in other_numbers)
        for t, advantage in enumerate(row.advantages):
            later = range(t, len(rewards[i]))
            process = sum(gamma ** (s - t) * (rewards[i][s] - process_baseline) for s in later)
            assert advantage == pytest.approx(weight * process + outcome_weight * outcome, abs=1e-6)
    assert metrics["credit/value_tokens"] == sum(len(answer.response_ids) for answer in GROUP)
    asked = PRIME.trainer_scores
    assert asked.reference and asked.reference_model is PRIME.reward_model


def test_a_tools_tokens_have_no_implicit_reward() -> None:
    first, tool, last = GROUP[0].response_ids[:2], GROUP[0].response_ids[2:4], GROUP[0].response_ids[4:]
    segments = (
        Segment(first, logprobs=(-0.5,) * len(first), policy_version=3),
        Segment(tool, "injected"),
        Segment(last, logprobs=(-0.5,) * len(last), policy_version=3),
    )
    answers = [replace(GROUP[0], segments=segments), GROUP[1]]
    scores = ModelScores(reference=ReferenceScores(ConstantModel().logprobs))
    (row, other), _ = assign_credit(PRIME, answers, model_scores=scores)
    assert row.advantages[2:4].tolist() == [0.0, 0.0]
    mean_of_other = fmean(0.3 * (-0.25 - logprob) for logprob in other.behaviour_logprobs)
    sampled = len(first) + len(last)
    outcome = GROUP[0].reward - GROUP[1].reward
    assert row.advantages[0] == pytest.approx(sampled * (0.3 * 0.25 - mean_of_other) + outcome)


def test_check_refuses_a_reward_model_that_is_not_the_trainers_only_reference() -> None:
    experiment = replace(experiment_of("quickstart/grpo"), credit=PRIME)
    trainer = replace(experiment.trainer, objective=ClippedPolicyGradient(), measure_kl=True)

    def errors(**changes: Any) -> list[str]:
        changed = replace(experiment, trainer=trainer)
        changed = replace(changed, **changes)
        return [finding.what for _, finding in collect_findings(changed) if finding.level == "error"]

    assert errors() == []
    (message,) = errors(trainer=replace(trainer, measure_kl=False))
    assert message.startswith("the reward model is the trainer's reference model, and the trainer keeps no")
    (message,) = errors(trainer=replace(trainer, objective=ClippedPolicyGradient(kl_coef=0.1)))
    assert "the objective's KL would keep the policy close to the reward model" in message
    (message,) = errors(trainer=replace(trainer, lora=Lora(rank=2)))
    assert "with adapters the reference model is the policy without them" in message
    errors_with_vimpo = errors(trainer=replace(trainer, objective=ValueImplicit()))
    assert any(
        "the objective 'vimpo' compares the policy with the reference" in error for error in errors_with_vimpo
    )
    assert not any("the objective's KL" in error for error in errors_with_vimpo)
    (message,) = errors(rollout=replace(experiment.rollout, top_p=0.9))
    assert "answers are sampled with top_p 0.9" in message


def test_check_warns_of_a_reward_model_that_scores_at_another_temperature_than_1() -> None:
    experiment = replace(experiment_of("quickstart/grpo"), credit=PRIME)

    def warnings(temperature: float) -> list[str]:
        rollout = replace(experiment.rollout, temperature=temperature)
        changed = replace(experiment, rollout=rollout)
        return [finding.what for _, finding in collect_findings(changed) if finding.level == "warning"]

    assert not any("temperature" in warning for warning in warnings(1.0))
    assert any("at the rollout's temperature of 0.6" in warning for warning in warnings(0.6))
