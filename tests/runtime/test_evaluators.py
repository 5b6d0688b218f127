"""What evaluation measures, with whose grader, and who measures it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from tests.runtime.in_process import TASK, directory_of, sampled_requests, small, train
from treetune.config.build import checked
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime import commands, evaluation
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.runtime.console import Console
from treetune.runtime.evaluation import set_problems
from treetune.tasks.arithmetic import AdditionChain
from treetune.tasks.base import Split
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem

ROOT = Path(__file__).parents[2]

SETS = Evaluation(
    sets=(
        EvaluationSet(split="validation", problems=4, samples=2),
        EvaluationSet(split="test", problems=3, samples=2),
    )
)
REQUESTS = 2 * (4 + 3)
"""Two checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Generous(Grader):
    """Everything is right."""

    isolation = "inline"

    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(reward=1.0, outcome="ok", extracted=response)


@dataclass(frozen=True, kw_only=True)
class Uneven(AdditionChain):
    """Every fifth prompt is long."""

    def problems(self, split: Split) -> Sequence[Problem]:
        return [
            replace(p, prompt=p.prompt * (9 if i % 5 == 0 else 1))
            for i, p in enumerate(super().problems(split))
        ]


UNEVEN = Uneven(count=3, digits=2, train_size=60, validation_size=10, test_size=10)
EASY = AdditionChain(count=2, digits=2, train_size=6, validation_size=4, test_size=5, grader=Generous())


def summary(config: PolicyIteration, number: int, label: str) -> dict[str, Any]:
    return json.loads((directory_of(config).evaluation(number, label) / "summary.json").read_text())


def answers(config: PolicyIteration, number: int, label: str) -> list[dict[str, Any]]:
    lines = (directory_of(config).evaluation(number, label) / "answers.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_set_may_be_of_another_task_and_has_its_grader(tmp_path: Path) -> None:
    sets = (
        EvaluationSet(split="test", name="own", samples=2),
        EvaluationSet(split="test", name="other", samples=2, task=EASY),
    )
    rollout = SingleTurn(samples=2, max_tokens=12)
    config = small(
        tmp_path, iterations=1, rollout=rollout, evaluation=Evaluation(sets=sets), on_empty_selection="skip"
    )
    train(config)
    assert (summary(config, 1, "own")["n_problems"], summary(config, 1, "other")["n_problems"]) == (10, 5)
    assert summary(config, 1, "own")["pass_at_1"] == 0.0
    rows = answers(config, 1, "other")
    assert {row["prompt"].count("+") for row in rows} == {1}
    assert {(row["finish_reason"], row["reward"]) for row in rows} == {("stop", 1.0), ("length", 0.0)}


def test_a_random_choice_of_problems_is_the_evaluations_seeds_and_not_the_runs() -> None:
    def ids(choose: Literal["first", "random"], seed: int = 0, run: int = 1) -> list[str]:
        one = EvaluationSet(split="train", problems=20, choose=choose)
        config = small(Path("nowhere"), evaluation=Evaluation(sets=(one,), seed=seed), seed=run)
        return [problem.id for problem in set_problems(config, one)]

    everything = [problem.id for problem in TASK.problems("train")]
    assert ids("first") == everything[:20]
    chosen = ids("random")
    assert chosen == ids("random", run=2)
    assert len({tuple(chosen), tuple(ids("first")), tuple(ids("random", seed=1))}) == 3
    assert len(set(chosen)) == 20
    assert chosen == [id_ for id_ in everything if id_ in chosen], "in the order of the split"


def test_sets_that_cannot_be_made_are_told_before_anything_is_started(tmp_path: Path) -> None:
    config = small(tmp_path, evaluation=Evaluation(sets=(EvaluationSet(split="test", problems=11),)))
    with pytest.raises(ValueError, match="asks for 11 problems of the test split, which has 10"):
        commands.run("run_iteration_loop", config, {})
    assert not directory_of(config).path.exists()


def test_training_leaves_long_prompts_out_and_says_how_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = SingleTurn(samples=2, max_tokens=12, unfinished_reward=1.0, max_prompt_tokens=20)
    config = small(tmp_path, iterations=1, task=UNEVEN, rollout=rollout, problems_per_iteration=48)
    train(config)
    said = capsys.readouterr().err
    assert (
        "12 of 60 training problems are left out: their prompts are longer than max_prompt_tokens = 20"
        in said
    )
    assert "48 training problems" in said
    with pytest.raises(ValueError, match="all 60 training problems have prompts of more than"):
        train(replace(config, rollout=replace(rollout, max_prompt_tokens=2), experiment_name="none"))


def test_prompts_that_fill_the_context_are_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_prompt_tokens = 64 leaves nothing of the context_length of 64"):
        checked(small(tmp_path, rollout=SingleTurn(max_tokens=12, max_prompt_tokens=64)))


def test_evaluation_leaves_no_problem_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(
        tmp_path,
        iterations=1,
        rollout=SingleTurn(samples=2, max_tokens=60, unfinished_reward=1.0, max_prompt_tokens=20),
        evaluation=Evaluation(sets=(EvaluationSet(split="test", samples=2, task=UNEVEN),)),
    )
    train(config)
    found, rows = summary(config, 1, "test"), answers(config, 1, "test")
    assert (found["n_problems"], found["samples"], found["too_long"]) == (10, 2, 2)
    assert "on 10 problems, 2 of them too long to be asked" in capsys.readouterr().err
    unanswered = [row for row in rows if row["tokens"] == 0]
    assert {row["problem"] for row in unanswered} == {"test/0", "test/5"}
    assert len(rows) == 20 and len(unanswered) == 4
    assert all(row["reward"] == 0.0 and row["outcome"] == "no_answer" for row in unanswered)
    assert all(row["tokens"] <= 64 - len(row["prompt"]) for row in rows if row["tokens"])


def test_an_evaluator_goes_around_what_another_measures_and_takes_over_when_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sampled twice: only what the dead one had not answered is asked for."""
    train(small(tmp_path))
    paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    other = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/runtime/evaluator_program.py"), str(tmp_path), "2"],
        env=os.environ | paths,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    config = small(tmp_path, evaluation=SETS)
    measured_before_the_kill: list[bool] = []

    def kill_instead_of_waiting(seconds: float) -> None:
        measured_before_the_kill.extend(
            (directory_of(config).evaluation(number, label) / "summary.json").is_file()
            for number in (1, 2)
            for label in ("validation", "test")
        )
        other.kill()
        other.wait()

    said: list[str] = []
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(sleep=kill_instead_of_waiting))
    monkeypatch.setattr(Console, "say", lambda self, message: said.append(message))
    try:
        assert other.stdout is not None
        assert "standing still\n" in iter(other.stdout.readline, "")
        commands.run_evaluation(config, {})
    finally:
        other.kill()
        other.wait()
    assert measured_before_the_kill == [False, True, True, True]
    assert any(f"waiting for process {other.pid} on" in message for message in said)
    assert sampled_requests(config) == REQUESTS - 3
    assert summary(config, 1, "validation")["n_problems"] == 4
    assert len(answers(config, 1, "validation")) == 8
    journals = list(directory_of(config).evaluation(1, "validation").glob("journal/*.jsonl"))
    keys = [json.loads(line)["row"][0] for journal in journals for line in journal.read_text().splitlines()]
    assert sorted(journal.name for journal in journals) == ["0-0.jsonl", "1-0.jsonl"]
    assert len(keys) == len(set(keys)) == 4


def test_what_was_taken_over_while_a_process_stood_still_is_left_to_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, evaluation=SETS)
    train(small(tmp_path))
    lost: list[Path] = []

    class TakenOver(evaluation.Claims):
        def take(self, folder: Path):
            claim = super().take(folder)
            if claim is not None and not lost:
                lost.append(folder)
                (folder / "0001").write_text(json.dumps({"machine": "another", "released": True}))
            return claim

    said: list[str] = []
    monkeypatch.setattr(Console, "say", lambda self, message: said.append(message))
    monkeypatch.setattr(commands, "Claims", TakenOver)
    commands.run_evaluation(config, {})
    assert any("taken over by another process while this one stood still" in message for message in said)
    assert sampled_requests(config) == REQUESTS, "its journal served the successor"
    assert sorted(p.name for p in lost[0].iterdir()) == ["0000", "0001", "0002"]


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path, evaluation=SETS)
    directory = train(small(tmp_path))
    first = evaluation.unmeasured(directory, SETS.sets)[0]

    def deleting(*arguments: Any) -> list[int]:
        numbers = unmeasured(*arguments)
        (directory.checkpoint(first) / "state.json").unlink(missing_ok=True)
        (directory.checkpoint(first) / "policy" / "config.json").unlink(missing_ok=True)
        return numbers

    unmeasured = evaluation.unmeasured
    monkeypatch.setattr(evaluation, "unmeasured", deleting)
    said: list[str] = []
    monkeypatch.setattr(Console, "say", lambda self, message: said.append(message))
    commands.run_evaluation(config, {})
    assert any("was deleted meanwhile, before validation was measured on it" in message for message in said)
    assert (directory.evaluation(2, "test") / "summary.json").is_file()
