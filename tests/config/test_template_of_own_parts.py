"""The template checks from anywhere, and its parts do what their docstrings say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "examples" / "own_parts"
MAIN = ROOT / "src" / "treetune" / "main.py"
CONFIGURATIONS = sorted(path.name for path in TEMPLATE.glob("*.jsonnet"))


def treetune(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MAIN), *words], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def in_template(program: str) -> None:
    """Runs a program that finds the template's package; registered parts stay in its process."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=TEMPLATE, capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{TEMPLATE}"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_each_of_its_configurations_is_right_from_any_folder(name: str, tmp_path: Path) -> None:
    done = treetune(
        "--configs",
        str(TEMPLATE / name),
        "check_config",
        cwd=ROOT if name == "own_rows.jsonnet" else tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_its_parts_are_checked_like_ours(tmp_path: Path) -> None:
    for name, override, words in (
        ("rank.jsonnet", "{credit+: {only_winner: true}}", "did you mean 'only_winners'"),
        ("rank.jsonnet", "{rollout+: {samples: 1}}", "answers to each problem"),
        ("weighted.jsonnet", "{trainer+: {objective+: {positive_weight: -1}}}", "at least 0"),
        ("close.jsonnet", "{task+: {grader+: {path: 'my_package.rewards:clos'}}}", "did you mean 'close'"),
    ):
        done = treetune(
            "--configs", str(TEMPLATE / name), "--override", override, "check_config", cwd=tmp_path
        )
        assert done.returncode == 2
        assert words in " ".join(done.stderr.split()), done.stderr


def test_rows_of_ones_own_are_read_and_a_bad_one_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(
        '{"text": "1 + 1?", "solution": "2"}\n{"text": "2 + 2?", "answer": "4"}\n'
    )
    program = """
from treetune.tasks.rows import Gsm8k
task = Gsm8k(train=("questions.jsonl",), problem_field="text", gold_field="solution", keep=("level",),
             prompt="Question: {problem}\\nAnswer:", validation_size=1)
assert len(task.problems("train")) == 3 and len(task.problems("validation")) == 1
first = task.problems("train")[0]
assert first.prompt.startswith("Question: Anna") and first.data["level"] == 1
try:
    Gsm8k(train=(%r,), problem_field="text", gold_field="solution", validation_size=None).problems("train")
except ValueError as error:
    message = str(error)
assert "bad.jsonl:2" in message and "no 'solution' (it has 'answer', 'text')" in message, message
""" % str(tmp_path / "bad.jsonl")  # noqa: UP031 (the program is full of braces)
    in_template(program)


def test_the_credit_compares_by_rank() -> None:
    in_template("""
from my_package.rank import Rank
from tests.rollouts import tabular_mdp as mdp
from treetune.rollouts.single_turn import SingleTurn
assert Rank().advantages([0.0, 1.0, 1.0]) == [-1.0, 0.5, 0.5]
assert Rank().advantages([0.5, 0.5]) == [0.0, 0.0]
assert Rank(only_winners=True).advantages([0.0, 2.0]) == [0.0, 1.0]
context = mdp.context()
trees, _ = SingleTurn(samples=4, max_tokens=mdp.LONGEST).run(context, mdp.problems(3))
episodes, metrics = Rank().assign(context, trees)
assert len(episodes) == 12 and abs(sum(float(one.advantages[0]) for one in episodes)) < 1e-9
""")


def test_the_rollout_asks_unsolved_problems_again() -> None:
    in_template("""
from my_package.second_try import SecondTry
from tests.rollouts import tabular_mdp as mdp
trees, _ = SecondTry(samples=2, max_tokens=mdp.LONGEST).run(mdp.context(), mdp.problems(12))
answers = [one for tree in trees for one in tree.leaves]
groups = {}
for one in answers:
    groups.setdefault(one.problem.id, []).append(one)
assert {len(group) for group in groups.values()} == {2, 4}
for group in groups.values():
    assert [one.sample for one in group] == list(range(len(group)))
    assert any(one.score > 0 for one in group[:2]) == (len(group) == 2)
assert len({one.id for one in answers}) == len(answers)
""")


def test_the_objective_weighs_by_the_sign_of_the_advantage() -> None:
    in_template("""
import torch
from types import SimpleNamespace
from my_package.weighted import WeightedClippedPolicyGradient
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient
batch = SimpleNamespace(advantages_N=torch.tensor([2.0, -1.0]))
logprobs, ratio = torch.zeros(2), torch.zeros(2)
weighted = WeightedClippedPolicyGradient(positive_weight=0.5, negative_weight=3)
own, _ = weighted.surrogate(batch, logprobs, ratio)
plain, _ = ClippedPolicyGradient().surrogate(batch, logprobs, ratio)
assert own.tolist() == [plain[0].item() * 0.5, plain[1].item() * 3]
""")


def test_the_task_is_graded_and_demonstrated() -> None:
    in_template("""
from my_package.largest import Largest
task = Largest(count=3, train_size=5)
problem = task.problems("train")[0]
assert task.problems("train") == task.problems("train")
taught = task.demonstration(problem, 1)
assert task.grader.grade(taught, problem).reward == 1 and task.grader.grade("#-1", problem).reward == 0
assert set(problem.prompt + taught) <= set(task.alphabet())
steps = task.step_boundaries(taught)
assert steps[0] == 0 and steps[-1] == len(taught) and len(steps) == 4
""")


def test_the_reward_is_a_number_between_0_and_1() -> None:
    in_template("""
from my_package.rewards import close
assert close("so #100", "100") == 1 and close("#95", "100") == 0.5 and close("#50", "100") == 0
assert close("95", "100") is None and close("#x", "100") is None
""")


def test_the_readme_lists_every_file() -> None:
    text = (TEMPLATE / "README.md").read_text()
    files = [path.relative_to(TEMPLATE) for path in TEMPLATE.rglob("*.*") if "__pycache__" not in path.parts]
    assert [str(name) for name in files if str(name) != "README.md" and f"`{name}`" not in text] == []
    assert json.loads((TEMPLATE / "questions.jsonl").read_text().splitlines()[0])["level"] == 1


def test_a_run_goes_through_with_all_of_its_parts(tmp_path: Path) -> None:
    """The whole loop but for the server: rollout, credit, objective and reward are the template's."""
    in_template(f"""
import json
from dataclasses import replace
from pathlib import Path
from my_package.rank import Rank
from my_package.second_try import SecondTry
from my_package.weighted import WeightedClippedPolicyGradient
from tests.runtime.in_process import TASK, small, train
from treetune.config import folders
from treetune.runtime.base import Evaluation, EvaluationSet
from treetune.tasks.graders.function import FunctionGrader
from treetune.trainers.base import Trainer
folders.search_in(["."], ["my_package"])
directory = train(small(
    Path({str(tmp_path)!r}),
    task=replace(TASK, grader=FunctionGrader(path="my_package.rewards:close")),
    rollout=SecondTry(samples=2, max_tokens=12, unfinished_reward=None),
    credit=Rank(),
    trainer=Trainer(objective=WeightedClippedPolicyGradient(), learning_rate=1e-3),
    evaluation=Evaluation(sets=(EvaluationSet(split="test", samples=2),)),
))
assert directory.resumable() == 2
answers = (directory.evaluation(2, "test") / "answers.jsonl").read_text().splitlines()
assert len(answers) == 2 * TASK.test_size  # evaluation asks nobody a second time
assert "my_package.rank" in json.loads((directory.path / "manifest.json").read_text())["own_modules"]
""")


def test_a_run_with_its_parts_is_replayed_from_any_folder_with_another_of_them(tmp_path: Path) -> None:
    tiny = """{ directory: 'runs', experiment_name: 'own', iterations: 1, problems_per_iteration: 4,
      model: { type: 'tiny', layers: 1, hidden_size: 64, heads: 2, intermediate_size: 96,
               context_length: 128 },
      rollout+: { samples: 4, max_tokens: 12, unfinished_reward: 1.0 }, evaluation+: { sets: [] },
      trainer+: { schedule+: { may_outlast_training: true } } }"""
    files = f"{TEMPLATE / 'rank.jsonnet'},engines/in_process.jsonnet"
    done = treetune("--configs", files, "--override", tiny, "run_iteration_loop", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "elsewhere").mkdir()
    other = "{ imports+: ['my_package.weighted'], trainer+: { objective: { type: 'weighted_ppo' } } }"
    done = treetune(
        "--override", other, "replay", "../runs/own", "--iteration", "1", cwd=tmp_path / "elsewhere"
    )
    assert done.returncode == 0, done.stderr
    assert "the weights after it are the run's own, to the bit" in done.stdout
    assert "cosine of the gradients" in done.stdout
