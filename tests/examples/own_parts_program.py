"""Test the parts of the template in examples/own_parts.

`test_own_parts.py` runs this file in a process of its own, with the template's package on the
path. It promises that rows, credit, rollout, objective, task and reward do what their docstrings say, and
that a run goes through with all of them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from my_package.largest import Largest
from my_package.rank import Rank
from my_package.rewards import close
from my_package.second_try import SecondTry
from my_package.weighted import WeightedClippedPolicyGradient

from tests.support import tabular_mdp as mdp
from tests.support.small_run import TASK, small, train
from treetune.config import folders
from treetune.domains.graders.function import FunctionGrader
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime.base import Evaluation, EvaluationSet
from treetune.tasks.rows import Gsm8k
from treetune.trainer.base import Trainer


def test_rows_of_ones_own_are_read_and_a_bad_one_is_told_with_its_place(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "1 + 1?", "solution": "2"}\n{"text": "2 + 2?", "answer": "4"}\n')
    task = Gsm8k(
        train=("questions.jsonl",), problem_field="text", gold_field="solution", keep=("level",),
        prompt="Question: {problem}\nAnswer:", validation_size=1,
    )  # fmt: skip
    assert len(task.problems("train")) == 3 and len(task.problems("validation")) == 1
    first = task.problems("train")[0]
    assert first.prompt.startswith("Question: Anna") and first.data["level"] == 1
    with pytest.raises(ValueError, match=r"bad\.jsonl:2.*no 'solution' \(it has 'answer', 'text'\)"):
        replace(task, train=(str(bad),), keep=(), validation_size=None).problems("train")


def test_the_credit_compares_by_rank() -> None:
    assert Rank().advantages([0.0, 1.0, 1.0]) == [-1.0, 0.5, 0.5]
    assert Rank().advantages([0.5, 0.5]) == [0.0, 0.0]
    assert Rank(only_winners=True).advantages([0.0, 2.0]) == [0.0, 1.0]
    context = mdp.context()
    trees, _ = SingleTurn(samples=4, max_tokens=mdp.LONGEST).run(context, mdp.problems(3))
    episodes, _ = Rank().assign(context, trees)
    assert len(episodes) == 12
    assert abs(sum(float(episode.advantages[0]) for episode in episodes)) < 1e-9


def test_the_rollout_asks_unsolved_problems_again() -> None:
    trees, _ = SecondTry(samples=2, max_tokens=mdp.LONGEST).run(mdp.context(), mdp.problems(12))
    answers = [answer for tree in trees for answer in tree.leaves]
    groups: dict[str, list] = {}
    for answer in answers:
        groups.setdefault(answer.problem.id, []).append(answer)
    assert {len(group) for group in groups.values()} == {2, 4}
    for group in groups.values():
        assert [answer.sample for answer in group] == list(range(len(group)))
        solved_at_first = any(answer.score > 0 for answer in group[:2])
        assert solved_at_first == (len(group) == 2)
    assert len({answer.id for answer in answers}) == len(answers)


def test_the_objective_weighs_by_the_sign_of_the_advantage() -> None:
    batch = SimpleNamespace(advantages_N=torch.tensor([2.0, -1.0]))
    logprobs, ratio = torch.zeros(2), torch.zeros(2)
    weighted = WeightedClippedPolicyGradient(positive_weight=0.5, negative_weight=3)
    weighted_surrogate, _ = weighted.surrogate(batch, logprobs, ratio)
    plain_surrogate, _ = ClippedPolicyGradient().surrogate(batch, logprobs, ratio)
    assert weighted_surrogate.tolist() == [plain_surrogate[0].item() * 0.5, plain_surrogate[1].item() * 3]


def test_the_task_is_graded_and_demonstrated() -> None:
    task = Largest(count=3, train_size=5)
    problem = task.problems("train")[0]
    assert task.problems("train") == task.problems("train")
    demonstration = task.demonstration(problem, 1)
    assert (
        task.grader.grade(demonstration, problem).reward == 1
        and task.grader.grade("#-1", problem).reward == 0
    )
    assert set(problem.prompt + demonstration) <= set(task.alphabet())
    steps = task.step_boundaries(demonstration)
    assert steps[0] == 0 and steps[-1] == len(demonstration) and len(steps) == 4


def test_the_reward_is_a_number_between_0_and_1() -> None:
    responses = ("so #100", "#95", "#50", "95", "#x")
    assert [close(response, "100") for response in responses] == [1, 0.5, 0, None, None]


def test_a_run_goes_through_with_all_of_its_parts(tmp_path: Path) -> None:
    """The whole loop but for the server: rollout, credit, objective and reward are the template's."""
    folders.set_search_folders(["."], ["my_package"])
    directory = train(
        small(
            tmp_path,
            task=replace(TASK, grader=FunctionGrader(path="my_package.rewards:close")),
            rollout=SecondTry(samples=2, max_tokens=12, unfinished_reward=None),
            credit=Rank(),
            trainer=Trainer(objective=WeightedClippedPolicyGradient(), learning_rate=1e-3),
            evaluation=Evaluation(sets=(EvaluationSet(split="test", samples=2),)),
        )
    )
    assert directory.newest_resumable() == 2
    answers = (directory.evaluation_folder(2, "test") / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 2 * TASK.test_size, "evaluation asks nobody a second time"
    assert "my_package.rank" in json.loads((directory.path / "manifest.json").read_text())["own_modules"]
