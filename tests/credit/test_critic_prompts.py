"""Privileged critics, which see the reference answer in their prompt.

These tests promise:

* The prompt has the reference answer where there is one and both fit into the context.
* The critic values and learns the same tokens as without it, however work is cut.
* Its values are an unbiased baseline, and their variance is as stated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.credit.expectations import bias_and_cosine
from tests.support import tabular_mdp as mdp
from tests.support.tiny_trainer import are_same, assert_close, episodes, policy_trainer, trained
from treetune.credit.base import CriticSettings
from treetune.credit.critic_prompts import CriticPrompts, with_critic_prompts
from treetune.credit.episodes import make_episode
from treetune.credit.gae import Gae
from treetune.engine.requests import SamplingParams
from treetune.models.logprobs import ModelInputs
from treetune.objectives.mle import MaximumLikelihood
from treetune.rollouts.storage import StoredEpisodes, write_episodes
from treetune.trainer.base import Trainer
from treetune.trainer.batches import sequences_of_rank
from treetune.trainer.ranks import Ranks
from treetune.trainer.tokens import EpisodesOfCritic, Sequences, units_of
from treetune.tree import trees_of
from treetune.vocabulary import Episode, Problem, concatenate

TEMPLATE = "{prompt}b{gold};"


def privileged_episodes(count: int = 16) -> list[Episode]:
    """Returns rows of which every third has no prompt for the critic."""
    rows = []
    for number, row in enumerate(episodes(count)):
        critic_prompt = (7, number % 5, *row.prompt_ids.tolist(), 3)
        rows.append(row if number % 3 == 2 else replace(row, critic_prompt_ids=critic_prompt))
    return rows


def test_the_critics_prompt_has_the_reference_answer() -> None:
    problem = Problem(id="train/0", prompt="0", gold="a")
    answer = mdp.trajectory(next(iter(mdp.answers())), problem)
    episode = make_episode(mdp.context(), answer, [0.0] * len(answer.step_ends))

    def prompt_for(
        asked_problem: Problem, context_length: int = 100, template: str | None = TEMPLATE
    ) -> str | None:
        prompts = CriticPrompts(mdp.CODEC, template, context_length)
        ids = prompts.add_to(episode, asked_problem).critic_prompt_ids
        return None if ids is None else mdp.decode(ids.tolist())

    assert prompt_for(problem) == "0ba;"
    assert prompt_for(problem, template=None) is None
    assert prompt_for(replace(problem, gold="")) is None
    assert prompt_for(problem, context_length=4 + len(answer.response_ids)) == "0ba;"
    assert prompt_for(problem, context_length=3 + len(answer.response_ids)) is None


def test_the_share_of_answers_without_a_reference_answer_is_counted() -> None:
    problems = [Problem(id="train/0", prompt="0", gold="a"), Problem(id="train/1", prompt="1", gold="")]
    answer_ids = list(mdp.answers())[:3]
    answers = [mdp.trajectory(answer_ids[0], problems[0])]
    answers += [mdp.trajectory(ids, problems[1], sample=i) for i, ids in enumerate(answer_ids)]
    context, trees = mdp.context(), trees_of(answers)
    rows = Gae().assign(context, trees)[0]
    with_prompts, metrics = with_critic_prompts(context, TEMPLATE, trees, rows)
    assert metrics == {"critic/without_own_prompt": 0.75}
    assert [row.critic_prompt_ids is None for row in with_prompts] == [False, True, True, True]


@pytest.mark.parametrize("template", ["{prompt}", "{gold}", "no placeholder"])
def test_a_template_without_both_texts_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="template doesn't contain"):
        CriticSettings(template=template)


def test_check_reports_a_task_without_reference_answers_and_a_context_that_is_too_short() -> None:
    def findings_of(template: str, gold: str = "a", context_length: int = 100) -> list[str]:
        problems = [Problem(id="train/0", prompt="0", gold=gold)]
        experiment: Any = SimpleNamespace(
            task=SimpleNamespace(examples=lambda count: problems),
            model=SimpleNamespace(prompt_tokens=lambda texts: [len(text) for text in texts]),
            rollout=SimpleNamespace(sampling=SamplingParams(max_tokens=6)),
            context_length=context_length,
        )
        findings = CriticSettings(template=template).check(experiment)
        return [f"{finding.level}: {finding.what}" for finding in findings]

    assert findings_of(TEMPLATE) == []
    assert findings_of(TEMPLATE, context_length=10) == []
    (warning,) = findings_of(TEMPLATE, context_length=9)
    assert "warning" in warning and "has 4 tokens" in warning and "context_length is 10 or more" in warning
    (error,) = findings_of(TEMPLATE, gold="")
    assert "error" in error and "the first problems of the task have none" in error


def test_rows_keep_the_critics_prompts_in_their_file(tmp_path: Path) -> None:
    rows = privileged_episodes()
    write_episodes(tmp_path / "episodes.arrow", rows)
    assert list(StoredEpisodes(tmp_path / "episodes.arrow")) == rows
    of_critic = list(EpisodesOfCritic(rows))
    assert of_critic[0].prompt_ids.tolist() == rows[0].critic_prompt_ids.tolist()
    assert of_critic[2] == rows[2]


def test_values_are_those_before_the_same_tokens_after_the_critics_prompt() -> None:
    rows = privileged_episodes(6)
    trainer = policy_trainer(credit=Gae())
    values_N = trainer.values(Sequences.of(rows))
    critic = trainer.critic.model.module
    expected = []
    for row in rows:
        prompt_ids = row.prompt_ids if row.critic_prompt_ids is None else row.critic_prompt_ids
        ids_T = torch.from_numpy(concatenate([prompt_ids, row.response_ids]).astype(np.int64))
        positions = len(prompt_ids) - 1 + np.flatnonzero(row.trained)
        with torch.no_grad():
            expected += critic(ModelInputs(ids_T[None], torch.from_numpy(positions))).tolist()
    assert values_N.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("cut", [{"layout": "packed"}, {"layout": "tree"}, {"sequences_per_micro_batch": 1}])
def test_the_update_with_the_critics_prompts_does_not_depend_on_the_cut(cut: dict[str, object]) -> None:
    settings = {"credit": Gae(lam=0.5), "rows": privileged_episodes(), "minibatch_size": 8}
    padded, padded_metrics = trained(**settings)
    cut_trainer, metrics = trained(**settings, **cut)
    assert_close(padded.critic_weights(), cut_trainer.critic_weights(), atol=1e-5)
    assert_close(padded, cut_trainer, atol=1e-5)
    assert metrics["critic/loss"] == pytest.approx(padded_metrics["critic/loss"], abs=1e-6)


def test_with_the_prompts_of_the_policy_the_critic_learns_as_without_a_template() -> None:
    rows = episodes(16)
    same_prompts = [replace(row, critic_prompt_ids=row.prompt_ids) for row in rows]
    plain, _ = trained(credit=Gae(), rows=rows, minibatch_size=8)
    privileged, _ = trained(credit=Gae(), rows=same_prompts, minibatch_size=8)
    assert are_same(plain.critic_weights(), privileged.critic_weights())
    assert are_same(plain, privileged)


def test_a_rank_has_the_critics_tokens_of_the_rows_that_it_computes() -> None:
    rows = privileged_episodes(32)
    settings = Trainer(objective=MaximumLikelihood(), learning_rate=1e-3, tokens_per_micro_batch=64)
    units = units_of(rows, in_pairs=False)
    all_rows = Sequences.of(rows).of_critic
    computed: set[int] = set()
    for rank in range(2):
        ranks = Ranks(rank, 2, torch.device("cpu"), 60.0)
        rows_of_rank = sequences_of_rank(rows, settings, ranks, [units], scores_all=True).of_critic
        assert rows_of_rank is not None and all_rows is not None
        assert [row.length for row in rows_of_rank.rows] == [row.length for row in all_rows.rows]
        computed_by_rank = {
            number for number, row in enumerate(rows_of_rank.rows) if row.token_ids is not None
        }
        assert computed_by_rank
        assert all(
            torch.equal(rows_of_rank.rows[i].token_ids, all_rows.rows[i].token_ids) for i in computed_by_rank
        )
        computed |= computed_by_rank
    assert computed == set(range(len(rows)))


# A language in which the reference answer decides which answers are right, and the prompt doesn't show it

CHANCE_OF_GOLD = {"a": 0.8, "b": 0.2}

RewardRule = Callable[[mdp.Ids], float]


def reward_rule(gold: str) -> RewardRule:
    """Returns the reward of an answer: 1 if its last letter is the reference answer."""

    def reward(answer: mdp.Ids) -> float:
        text = mdp.decode([token for token in answer if token < mdp.EOS])
        return float(text.rstrip(";")[-1:] == gold)

    return reward


def privileged_value(prefix: mdp.Ids, gold: str) -> float:
    return sum(p * reward_rule(gold)(answer) for answer, p in mdp.answers(prefix).items())


def expected_gradient(baseline: Callable[[mdp.Ids, str], float], lam: float) -> tuple[mdp.Gradient, float]:
    """Returns the expected gradient over reference answers and answers, and its mean squared length."""
    gradient: mdp.Gradient = {}
    square = 0.0
    for gold, chance_of_gold in CHANCE_OF_GOLD.items():
        for answer, chance_of_answer in mdp.answers().items():
            chance = chance_of_gold * chance_of_answer
            values = [baseline(answer[:length], gold) for length in range(len(answer))]
            rewards = [0.0] * (len(answer) - 1) + [reward_rule(gold)(answer)]
            advantages, _ = Gae(lam=lam).from_values(rewards, values)
            of_answer = mdp.score_gradient(answer, advantages)
            mdp.add(gradient, of_answer, chance)
            square += chance * math.fsum(slope**2 for slope in of_answer.values())
    return gradient, square


def true_gradient() -> mdp.Gradient:
    gradient: mdp.Gradient = {}
    for gold, chance in CHANCE_OF_GOLD.items():
        mdp.add(gradient, mdp.exact_gradient(earns=reward_rule(gold)), chance)
    return gradient


def biased_value(prefix: mdp.Ids, gold: str) -> float:
    """Returns the value of a critic that trusts the reference answer too much."""
    return privileged_value(prefix, gold) + (0.4 if gold == "a" else -0.3) / (1 + len(prefix))


@pytest.mark.parametrize(
    ("baseline", "lam"), [(privileged_value, 0.0), (privileged_value, 1.0), (biased_value, 1.0)]
)
def test_a_value_that_knows_the_reference_answer_is_unbiased(
    baseline: Callable[[mdp.Ids, str], float], lam: float
) -> None:
    gradient, _ = expected_gradient(baseline, lam)
    assert bias_and_cosine(gradient, true_gradient()) == pytest.approx((0.0, 1.0), abs=1e-9)


@pytest.mark.parametrize(("lam", "ratio"), [(1.0, 0.8974), (0.0, 1.3019)])
def test_the_reference_answer_changes_the_variance_by_the_stated_ratio(lam: float, ratio: float) -> None:
    def blind(prefix: mdp.Ids, gold: str) -> float:
        return sum(
            chance * privileged_value(prefix, other_gold) for other_gold, chance in CHANCE_OF_GOLD.items()
        )

    squared_length = math.fsum(slope**2 for slope in true_gradient().values())
    variances = [
        expected_gradient(baseline, lam)[1] - squared_length for baseline in (privileged_value, blind)
    ]
    assert variances[0] / variances[1] == pytest.approx(ratio, abs=5e-5)
