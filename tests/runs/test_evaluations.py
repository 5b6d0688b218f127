"""What evaluation measures, with whose grader, and who measures it; its numbers and their definitions."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runs.standing_program import SETS, start_standing
from tests.support.small_run import (
    TASK,
    FakeSettings,
    directory_of,
    evaluated,
    sampled_requests,
    small,
    train,
    trained,
)
from treetune.engine.settings import InProcessSettings
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime import commands, evaluation
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.runtime.console import Console
from treetune.runtime.evaluation import pass_at_k, problems_of_set, summarise, summarise_domains
from treetune.runtime.intervals import bootstrap_interval, interval_of_mean
from treetune.tasks.arithmetic import AdditionChain
from treetune.tasks.graders.base import Grader
from treetune.vocabulary import Grade, Problem, Segment, Trajectory

REQUESTS = 2 * (4 + 3)
"""Two checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Generous(Grader):
    """Everything is right."""

    isolation = "inline"

    def grade(self, response: str, problem: Problem) -> Grade:
        return Grade(reward=1.0, outcome="ok", extracted=response)


@pytest.fixture
def finished(tmp_path: Path) -> PolicyIteration:
    """A run of two iterations with sets that were not measured."""
    train(small(tmp_path))
    return small(tmp_path, evaluation=SETS)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(Console, "say", lambda self, message: told.append(message))
    return told


def test_every_set_is_measured_on_every_checkpoint_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained(small(tmp_path, InProcessSettings()))
    config = replace(config, evaluation=SETS)
    commands.run_evaluation(config, {})
    for one in SETS.sets:
        texts = []
        for number in (1, 2):
            summary, rows = evaluated(config, number, one.label)
            expected = {"split": one.split, "iteration": number, "n_problems": one.problems, "samples": 2}
            assert expected.items() <= summary.items()
            assert len(rows) == one.problems * 2
            assert all(row["problem"].startswith(f"{one.split}/") for row in rows)
            cut = sum(row["finish_reason"] == "length" for row in rows)
            assert summary["unfinished"] == cut / len(rows)
            texts.append([row["text"] for row in rows])
        assert texts[0] != texts[1], "both checkpoints answer alike: were the weights exchanged?"
    before = capsys.readouterr().out
    commands.run_evaluation(config, {})
    assert "all sets are evaluated" not in before and "all sets are evaluated" in capsys.readouterr().out


def test_an_evaluation_goes_on_where_it_was_interrupted(finished: PolicyIteration, tmp_path: Path) -> None:
    failing = small(tmp_path, FakeSettings(fail_after=9), evaluation=SETS)
    with pytest.raises(RuntimeError, match="told to fail"):
        commands.run_evaluation(failing, {})
    commands.run_evaluation(finished, {})
    assert sampled_requests(failing) + sampled_requests(finished) == REQUESTS


def test_the_start_weights_are_measured_as_checkpoint_0(finished: PolicyIteration) -> None:
    commands.run_evaluation_on_baseline(finished, {})
    assert evaluated(finished, 0, "test")[0]["n_problems"] == 3
    (engine,) = finished.engines.policy.engines  # type: ignore[attr-defined]
    assert engine.loaded == []


def test_evaluations_while_training_are_in_the_metrics(tmp_path: Path) -> None:
    often = EvaluationSet(split="validation", problems=4, while_training=True)
    rare = EvaluationSet(split="test", problems=4)
    directory = train(small(tmp_path, evaluation=Evaluation(sets=(often, rare), every=1)))
    measured = [
        {key.split("/")[1] for key in row if key.startswith("evaluation/")}
        for row in directory.read_metrics()
    ]
    assert measured == [{"validation"}, {"validation", "test"}]


def test_a_set_may_be_of_another_task_and_has_its_grader(tmp_path: Path) -> None:
    easy = AdditionChain(count=2, digits=2, train_size=6, validation_size=4, test_size=5, grader=Generous())
    sets = (
        EvaluationSet(split="test", name="own", samples=2, temperature=0.5),
        EvaluationSet(split="test", name="other", samples=2, task=easy),
    )
    rollout = SingleTurn(samples=2, max_tokens=12)
    config = small(tmp_path, iterations=1, rollout=rollout, evaluation=Evaluation(sets=sets))
    train(replace(config, on_empty_selection="skip"))
    (own, _), (other, rows) = (evaluated(config, 1, name) for name in ("own", "other"))
    assert (own["n_problems"], other["n_problems"], own["pass_at_1"]) == (10, 5, 0.0)
    assert {row["prompt"].count("+") for row in rows} == {1}
    assert {(row["finish_reason"], row["reward"]) for row in rows} == {("stop", 1.0), ("length", 0.0)}


def test_a_random_choice_of_problems_is_the_evaluations_seeds_and_not_the_runs() -> None:
    def ids(choose: Literal["first", "random"], seed: int = 0, run: int = 1) -> list[str]:
        one = EvaluationSet(split="train", problems=20, choose=choose)
        config = small(Path("nowhere"), evaluation=Evaluation(sets=(one,), seed=seed), seed=run)
        return [problem.id for problem in problems_of_set(config, one)]

    everything = [problem.id for problem in TASK.problems("train")]
    assert ids("first") == everything[:20]
    chosen = ids("random")
    assert chosen == ids("random", run=2)
    assert len({tuple(chosen), tuple(ids("first")), tuple(ids("random", seed=1))}) == 3
    assert len(set(chosen)) == 20
    assert chosen == [id_ for id_ in everything if id_ in chosen], "in the order of the split"


TOO_MANY = Evaluation(sets=(EvaluationSet(split="test", problems=11),))


@pytest.mark.parametrize(
    ("command", "sets", "message"),
    [
        ("run_iteration_loop", TOO_MANY, "asks for 11 problems of the test split, which has 10"),
        ("run_evaluation", TOO_MANY, "asks for 11 problems of the test split, which has 10"),
        ("run_evaluation", SETS, "no checkpoint to evaluate: train the experiment with `treetune run` first"),
        ("run_evaluation_on_baseline", Evaluation(), r"no evaluation sets: add e\.g\. evaluation\+"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_is_started(
    command: str, sets: Evaluation, message: str, tmp_path: Path
) -> None:
    config = small(tmp_path, evaluation=sets)
    with pytest.raises(ValueError, match=message):
        commands.COMMANDS[command](config, {})
    assert not directory_of(config).path.exists()


def test_an_evaluation_without_sets_says_how_to_add_one(finished: PolicyIteration) -> None:
    with pytest.raises(ValueError, match=r"no evaluation sets: add e\.g\. evaluation\+"):
        commands.run_evaluation(replace(finished, evaluation=Evaluation()), {})


def test_an_evaluator_goes_around_what_another_measures_and_takes_over_when_it_is_killed(
    finished: PolicyIteration, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is sampled twice: only what the dead one had not answered is asked for."""
    output = tmp_path / "output of the other"
    other = start_standing(Path(finished.directory), 2, "run_evaluation", output).process
    directory = directory_of(finished)
    measured_before_the_kill: list[bool] = []

    def kill_instead_of_waiting(seconds: float) -> None:
        measured_before_the_kill.extend(
            (directory.evaluation_folder(number, label) / "summary.json").is_file()
            for number in (1, 2)
            for label in ("validation", "test")
        )
        other.kill()
        other.wait()

    monkeypatch.setattr(evaluation, "time", SimpleNamespace(sleep=kill_instead_of_waiting))
    try:
        commands.run_evaluation(finished, {})
    finally:
        other.kill()
    assert measured_before_the_kill == [False, True, True, True]
    assert any(f"waiting for process {other.pid} on" in message for message in said)
    assert sampled_requests(finished) == REQUESTS - 3
    summary, answers = evaluated(finished, 1, "validation")
    assert (summary["n_problems"], len(answers)) == (4, 8)
    journals = sorted(directory.evaluation_folder(1, "validation").glob("journal/*.jsonl"))
    keys = [json.loads(line)["row"][0] for journal in journals for line in journal.read_text().splitlines()]
    assert [journal.name for journal in journals] == ["0-0.jsonl", "1-0.jsonl"]
    assert len(keys) == len(set(keys)) == 4


def test_what_was_taken_over_while_a_process_stood_still_is_left_to_its_successor(
    finished: PolicyIteration, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Path] = []

    class TakenOver(evaluation.Claims):
        def take(self, folder: Path):
            claim = super().take(folder)
            if claim is not None and not lost:
                lost.append(folder)
                (folder / "0001").write_text(json.dumps({"machine": "another", "released": True}))
            return claim

    monkeypatch.setattr(commands, "Claims", TakenOver)
    commands.run_evaluation(finished, {})
    assert any("another process has taken over while this one was suspended" in message for message in said)
    assert sampled_requests(finished) == REQUESTS, "its journal served the successor"
    assert sorted(p.name for p in lost[0].iterdir()) == ["0000", "0001", "0002"]


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_passed_over(
    finished: PolicyIteration, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = directory_of(finished)
    unmeasured = evaluation.find_unmeasured
    first = unmeasured(directory, SETS.sets)[0]

    def deleting(*arguments: Any) -> list[int]:
        numbers = unmeasured(*arguments)
        (directory.checkpoint_folder(first) / "state.json").unlink(missing_ok=True)
        (directory.checkpoint_folder(first) / "policy" / "config.json").unlink(missing_ok=True)
        return numbers

    monkeypatch.setattr(evaluation, "find_unmeasured", deleting)
    commands.run_evaluation(finished, {})
    assert any("was deleted meanwhile, before validation was measured on it" in message for message in said)
    assert (directory.evaluation_folder(2, "test") / "summary.json").is_file()


# Numbers: pass@1 with its interval, pass@k and the majority vote

Answer = tuple[str | None, bool, int]
"""What was extracted, whether it was cut off, its number of tokens."""

RIGHT = "right"


def trajectories(problems: Sequence[Sequence[Answer]]) -> list[Trajectory]:
    return [
        Trajectory(
            problem=Problem(id=f"test/{p}", prompt="?", gold=RIGHT),
            sample=sample,
            prompt_ids=(1,),
            segments=(Segment(token_ids=(2,) * tokens),),
            finish_reason="length" if cut else "stop",
            text=extracted or "",
            grade=Grade(float(extracted == RIGHT), "ok" if extracted else "no_answer", extracted),
            step_ends=(tokens,),
        )
        for p, answers in enumerate(problems)
        for sample, (extracted, cut, tokens) in enumerate(answers)
    ]


@st.composite
def evaluations(draw: st.DrawFn) -> list[list[Answer]]:
    samples = draw(st.integers(1, 6))
    answer = st.tuples(st.sampled_from([RIGHT, "wrong", "other", None]), st.booleans(), st.integers(1, 5))
    return draw(st.lists(st.lists(answer, min_size=samples, max_size=samples), min_size=1, max_size=5))


@given(evaluations())
@settings(max_examples=40)
def test_a_summary_is_what_its_definitions_say(problems: list[list[Answer]]) -> None:
    summary = summarise(trajectories(problems), seed=0)
    answers = list(itertools.chain.from_iterable(problems))
    rights = [[extracted == RIGHT for extracted, _, _ in group] for group in problems]
    n = len(problems[0])
    assert summary["n_problems"] == len(problems)
    assert summary["samples"] == n
    assert summary["pass_at_1"] == pytest.approx(mean(mean(right) for right in rights))
    assert summary["ci_low"] <= summary["pass_at_1"] + 1e-12
    assert summary["ci_high"] >= summary["pass_at_1"] - 1e-12
    assert summary["unfinished"] == pytest.approx(mean(cut for _, cut, _ in answers))
    assert summary["mean_tokens"] == pytest.approx(mean(tokens for _, _, tokens in answers))
    assert list(summary["pass_at_k"]) == [str(k) for k in (1, 2, 4) if k <= n]
    for k, value in summary["pass_at_k"].items():
        subsets = [mean(any(s) for s in itertools.combinations(right, int(k))) for right in rights]
        assert value == pytest.approx(mean(subsets))
    votes = 0
    for group in problems:
        counts = Counter(extracted for extracted, _, _ in group if extracted is not None)
        most = max(counts.values(), default=0)
        first = next((e for e, _, _ in group if e is not None and counts[e] == most), None)
        votes += first == RIGHT
    assert summary["majority_vote"] == pytest.approx(votes / len(problems))


def test_answers_whose_grader_extracts_nothing_have_no_majority() -> None:
    """A reward function says that an answer is right, and not what it says: that is no vote against it."""
    voting = trajectories([[(RIGHT, False, 1), (RIGHT, False, 1)], [("wrong", False, 1), (RIGHT, False, 1)]])
    silent = [
        replace(
            one,
            problem=replace(one.problem, id=f"silent/{one.problem.id}", domain="silent"),
            grade=replace(one.grade, extracted=None),
        )
        for one in voting
    ]
    assert summarise(voting, 0)["majority_vote"] == 0.5
    assert summarise(silent, 0)["majority_vote"] is None
    assert summarise([*voting, *silent], 0)["majority_vote"] == 0.5


def test_scores_of_a_recipe_change_no_share_of_right_answers() -> None:
    """Some give a little for a wrong answer, and more than 1 for a right one."""
    plain = trajectories([[(RIGHT, False, 1), ("wrong", False, 1)], [(None, True, 2), ("wrong", False, 1)]])
    scored = [
        replace(one, grade=replace(one.grade, reward=1.01 if one.grade.correct else 0.02)) for one in plain
    ]
    assert summarise(scored, seed=0) == summarise(plain, seed=0)
    assert summarise(scored, seed=0)["pass_at_1"] == 0.25


@given(st.integers(1, 8), st.data())
@settings(max_examples=40)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, data: st.DataObject) -> None:
    right = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n))
    brute = mean(any(subset) for subset in itertools.combinations(right, k))
    assert pass_at_k(n, sum(right), k) == pytest.approx(brute)


@pytest.mark.parametrize(("truth", "problems"), [(0.6, 60), (0.1, 30), (0.02, 30)])
def test_the_interval_of_a_share_covers_the_truth_as_often_as_it_says(truth: float, problems: int) -> None:
    draw, trials = random.Random(7), 2000
    covered = 0
    for trial in range(trials):
        low, high = interval_of_mean([float(draw.random() < truth) for _ in range(problems)], seed=trial)
        covered += low <= truth <= high
    assert 0.93 <= covered / trials <= 0.99


def test_the_interval_of_means_of_several_samples_covers_the_truth_about_as_often_as_it_says() -> None:
    draw, trials = random.Random(7), 100
    covered = 0
    for trial in range(trials):
        values = [sum(draw.random() < 0.6 for _ in range(4)) / 4 for _ in range(60)]
        low, high = interval_of_mean(values, seed=trial)
        covered += low <= 0.6 <= high
    assert 88 <= covered <= 100


def test_the_interval_is_as_wide_as_the_normal_one_and_leaves_room_where_problems_went_alike() -> None:
    values = [float(i < 300) for i in range(500)]
    half = 1.96 * (0.6 * 0.4 / 500) ** 0.5
    for interval in (interval_of_mean(values, seed=3), bootstrap_interval(values, seed=3)):
        assert interval == pytest.approx((0.6 - half, 0.6 + half), abs=0.01)
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert interval_of_mean([1.0] * 20, seed=0) == pytest.approx((0.839, 1.0), abs=5e-4)
    assert interval_of_mean([0.0] * 20, seed=0) == pytest.approx((0.0, 0.161), abs=5e-4)


def test_a_summary_by_domain_is_that_of_each_domain_alone_and_needs_several() -> None:
    answers = trajectories([[(RIGHT, False, 2), ("wrong", True, 3)], [("wrong", False, 1)] * 2])
    named = [replace(t, problem=replace(t.problem, domain="ab"[int(t.problem.id[-1])])) for t in answers]
    assert summarise_domains(named, 0) == {
        "domains": {"a": summarise(answers[:2], 0), "b": summarise(answers[2:], 0)},
    }
    lost = [replace(t, grade=Grade(0.0, "unavailable")) if t.problem.domain == "b" else t for t in named]
    assert list(summarise_domains(lost, 0)["domains"]) == ["a"], "of the other one nothing is known"
    assert summarise_domains(named[:2], 0) == summarise_domains(answers, 0) == {}
