"""Runs whose grader raises, is away, or is a language model: what it could not grade is left out, counted and
told, and nothing is asked twice."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs.even_answers import OutOfOrder
from tests.support.small_run import (
    TASK,
    FakeSettings,
    answers_of,
    directory_of,
    engines_of,
    episodes_of,
    evaluated,
    log_of,
    sampled_requests,
    small,
    train,
    trained,
    weights_of,
)
from tests.support.stand_in_judge import StandIn, stand_in_judge
from treetune.config import folders
from treetune.credit.rloo import Rloo
from treetune.credit.vineppo import MonteCarlo
from treetune.domains.endpoints.settings import EndpointSettings
from treetune.domains.graders.function import FunctionGrader
from treetune.domains.graders.judge import JudgeGrader, JudgeModel
from treetune.engine.base import EngineLaunch
from treetune.engine.client import Address
from treetune.engine.server import start_servers
from treetune.engine.settings import EngineSettings, VllmSettings
from treetune.exceptions import EngineError, NothingGraded
from treetune.main import main
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime import judge_server
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration, find_keys_without_sandbox
from treetune.tasks.graders.final_answer import FinalAnswer

# Reward functions that fail

REWARDS = """
import os

def raises(response, gold):
    return 1 / (len(gold) - len(gold))

async def awaits(response, gold):
    raise ConnectionError("nobody listens")

def text(response, gold):
    return "good"

def dictionary(response, gold):
    return {"accuracy": 1.0}

def dies(response, gold):
    os._exit(3)

def forgets(response, gold):
    response == gold

def sometimes(response, problem):
    if problem.id.endswith(("0", "1", "2", "3", "4")):
        raise KeyError(problem.id)
    return 1.0

def on_tests(response, problem):
    if not problem.id.startswith("train"):
        raise KeyError(problem.id)
    return 1.0
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "broken_rewards.py").write_text(REWARDS)
    monkeypatch.setattr(folders, "_OWN_FOLDERS", folders.OwnFolders())
    finders = list(sys.meta_path)
    folders.set_search_folders([tmp_path])
    yield
    sys.meta_path[:] = finders
    sys.modules.pop("broken_rewards", None)


def graded_by(base: Path, name: str, **changes: Any) -> PolicyIteration:
    return small(base, task=replace(TASK, grader=FunctionGrader(path=f"broken_rewards:{name}")), **changes)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "ZeroDivisionError: division by zero"),
        ("awaits", "ConnectionError: nobody listens"),
        ("text", "returned 'good': return a finite number, .* a dict with a 'score' key"),
        ("dictionary", r"returned {'accuracy': 1.0}: return a finite number"),
        ("dies", "process"),
    ],
)
def test_a_function_that_fails_on_all_answers_ends_the_run(
    rewards: None, tmp_path: Path, name: str, why: str
) -> None:
    config = graded_by(tmp_path, name)
    words = rf"1: grading failed on 8 of 8 answers, .* the first, to the problem 'train/\d+': .*{why}"
    with pytest.raises(NothingGraded, match=words):
        train(config)
    assert not (directory_of(config).iteration_folder(0) / "trajectories.arrow").exists()


def test_a_function_that_returns_none_for_all_answers_ends_the_first_iteration(
    rewards: None, tmp_path: Path
) -> None:
    config = graded_by(tmp_path, "forgets")
    with pytest.raises(
        NothingGraded, match=r"reward function returned None for all [4-8] answers.* Return a number"
    ):
        train(config)
    assert not (directory_of(config).iteration_folder(0) / "trajectories.arrow").exists()


def test_a_function_that_fails_on_some_answers_is_told_with_the_first(rewards: None, tmp_path: Path) -> None:
    config = graded_by(tmp_path, "sometimes")
    assert train(config).newest_resumable() == 2
    log = log_of(config)
    assert "grading failed on " in log and "which earn nothing; the first, to the problem 'train/" in log


def test_a_function_that_fails_in_evaluation_alone_measures_nothing(rewards: None, tmp_path: Path) -> None:
    sets = Evaluation(sets=(EvaluationSet(split="test", samples=2),))
    config = graded_by(tmp_path, "on_tests", evaluation=sets)
    with pytest.raises(NothingGraded, match="evaluating test after iteration 2: grading failed on 20 of 20"):
        train(config)
    assert not (directory_of(config).evaluation_folder(2, "test") / "summary.json").exists()


# A grader that is not always there


def disturbed(base: Path, switch: str = "") -> PolicyIteration:
    """Every third answer stays without a verdict."""
    sets = (EvaluationSet(split="test", samples=4, while_training=True),)
    return small(
        base,
        task=replace(TASK, grader=OutOfOrder(switch)),
        rollout=SingleTurn(samples=3, max_tokens=12, unfinished_reward=None),
        credit=Rloo(),
        evaluation=Evaluation(every=1, sets=sets),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> PolicyIteration:
    return trained(disturbed(tmp_path_factory.mktemp("disturbed")))


def test_answers_without_a_verdict_are_stored_told_and_not_trained_on(finished: PolicyIteration) -> None:
    for row in directory_of(finished).read_metrics():
        answers = answers_of(finished, row["iteration"])
        known = [one for one in answers if one.grade.is_known]
        assert 0 < len(known) < len(answers) == 12
        assert row["episodes/unavailable"] == pytest.approx(1 - len(known) / len(answers))
        assert row["episodes/score"] == pytest.approx(sum(one.score for one in known) / len(known))
        trained_on = episodes_of(finished, row["iteration"])
        assert {e.trajectory for e in trained_on} <= {one.id for one in known}
        assert len({e.group for e in trained_on}) == 4 - row.get("episodes/groups_ungraded", 0.0)
        assert all(sum(other.group == e.group for other in trained_on) > 1 for e in trained_on)
    log = log_of(finished)
    assert "iteration 1: " in log and "iteration 2: " in log
    assert log.count("answers could not be graded and are left out: the judge is down (") == 4


def test_accuracies_are_those_of_graded_answers_and_the_summary_counts_the_others(
    finished: PolicyIteration,
) -> None:
    summary, rows = evaluated(finished, 2, "test")
    known = [row for row in rows if row["outcome"] != "unavailable"]
    assert summary["unavailable"] == len(rows) - len(known) > 0
    groups: dict[str, list[bool]] = {}
    for row in known:
        groups.setdefault(row["problem"], []).append(row["reward"] == 1.0)
    shares = [sum(group) / len(group) for group in groups.values()]
    assert summary["pass_at_1"] == pytest.approx(sum(shares) / len(shares))
    metrics = directory_of(finished).read_metrics()[-1]
    assert metrics["evaluation/test/unavailable"] == summary["unavailable"]


def test_where_nothing_can_be_graded_the_run_ends_and_goes_on_later_without_sampling_again(
    finished: PolicyIteration, tmp_path: Path
) -> None:
    switch = tmp_path / "down"
    switch.touch()
    down, up = (disturbed(tmp_path, str(switch)) for _ in range(2))
    with pytest.raises(NothingGraded, match=r"12 of 12 answers could not be graded .* the judge is down"):
        train(down)
    assert not (directory_of(down).iteration_folder(0) / "trajectories.arrow").exists()
    switch.unlink()
    train(up)
    assert sampled_requests(down) + sampled_requests(up) == sampled_requests(finished)
    assert weights_of(up) == weights_of(finished)


# A language model that judges


@pytest.fixture
def judge() -> Iterator[StandIn]:
    with stand_in_judge() as running:
        yield running


def judged(base: Path, judge: StandIn, **changes: Any) -> PolicyIteration:
    endpoint = EndpointSettings(
        base_url=judge.base_url, model="m", retries=0, backoff=0.05, timeout=30.0, temperature=0.0
    )
    sets = (EvaluationSet(split="test", problems=3, samples=2, while_training=True),)
    return small(
        base,
        task=replace(TASK, grader=JudgeGrader(endpoint=endpoint, rule=FinalAnswer())),
        rollout=SingleTurn(samples=2, max_tokens=12, unfinished_reward=None),
        credit=MonteCarlo(samples=2),
        evaluation=Evaluation(every=2, sets=sets),
        **changes,
    )


def asked_once(judge: StandIn) -> bool:
    return len({json.dumps(body) for body in judge.asked}) == len(judge.asked) > 0


def test_what_the_judge_did_is_in_the_metrics_and_in_the_summary(judge: StandIn, tmp_path: Path) -> None:
    config = trained(judged(tmp_path, judge))
    first, second = directory_of(config).read_metrics()
    counted = [row[f"judge/{kind}asked"] for row in (first, second) for kind in ("", "values_")]
    assert all(counted)
    assert sum(counted) + evaluated(config, 2, "test")[0]["judge"]["asked"] == len(judge.asked)
    assert first["judge/agreement"] > 0
    assert asked_once(judge)
    assert "could not be graded" not in log_of(config)


def test_a_run_that_goes_on_asks_nothing_again(judge: StandIn, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="told to fail"):
        train(judged(tmp_path, judge, engine=FakeSettings(fail_after=7)))
    assert judge.asked
    assert len(train(judged(tmp_path, judge)).read_metrics()) == 2
    assert asked_once(judge)


def test_a_judge_that_falls_silent_ends_the_run_and_the_same_command_goes_on(
    judge: StandIn, tmp_path: Path
) -> None:
    judge.mood = "down"
    config = judged(tmp_path, judge)
    with pytest.raises(NothingGraded, match="he same command"):
        train(config)
    assert "HTTP 503" in log_of(config)
    judge.mood = "well"
    rows = train(judged(tmp_path, judge)).read_metrics()
    assert [row["episodes/unavailable"] for row in rows] == [0.0, 0.0]


@dataclass(frozen=True, kw_only=True)
class Serving(FakeSettings):
    """Serves the stand-in."""

    judge: StandIn
    closed: list[bool] = field(default_factory=list)


@pytest.fixture(autouse=True)
def _serve_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_server, "start_servers", serve_stand_in)


def serve_stand_in(settings: EngineSettings, run: EngineLaunch, log: Path) -> Any:
    if not isinstance(settings, Serving):
        return start_servers(settings, run, log)
    address = Address(settings.judge.base_url.removesuffix("/v1"), 1, "its key")
    server = SimpleNamespace(
        current_address=lambda: address,
        report_failure=lambda address, reason: None,
        report_success=lambda: None,
        begin_to_close=lambda: None,
        close=lambda: settings.closed.append(True),
    )
    return [server]


def serving_a_judge(base: Path, judge: StandIn) -> PolicyIteration:
    model = base / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = judged(base, judge)
    served = JudgeModel(model=str(model), server=Serving(judge=judge))
    return replace(
        config, task=replace(TASK, grader=JudgeGrader()), engines=replace(config.engines, judge=served)
    )


@pytest.mark.parametrize("status", ["400", "500"])
def test_a_served_judge_that_cannot_be_asked_ends_the_run_before_anything_is_sampled(
    judge: StandIn, tmp_path: Path, status: str
) -> None:
    judge.mood = status  # no chat template; a tokenizer without tokens for the prompt
    config = serving_a_judge(tmp_path, judge)
    with pytest.raises(ValueError, match=rf"the judge, .* can't answer.*HTTP {status}.*chat template"):
        train(config)
    assert len(judge.asked) == 1
    assert not any(one.asked for one in engines_of(config))


def test_a_served_judge_is_waited_for_where_it_is_away_at_first_and_ended_with_the_run(
    judge: StandIn, tmp_path: Path
) -> None:
    judge.mood = "down"  # as while its killed server starts anew

    def comes_back() -> None:
        while not judge.asked:
            time.sleep(0.01)
        judge.mood = "well"

    back = threading.Thread(target=comes_back)
    back.start()
    config = serving_a_judge(tmp_path, judge)
    rows = train(config).read_metrics()
    back.join()
    assert [row["episodes/unavailable"] for row in rows] == [0.0, 0.0]
    assert config.engines.judge is not None
    serving: Any = config.engines.judge.server
    assert (serving.closed, set(judge.keys)) == ([True], {"its key"})
    assert judge.asked[0]["temperature"] == 0.0
    assert "Answer to be compared:\n\n" in json.dumps(judge.asked[0]).replace("\\n", "\n"), "asked once first"


class Served:
    """One of two servers that are alike, which is there when it is told to be."""

    def __init__(self, number: int) -> None:
        self.number, self.epoch = number, 0
        self.told: list[str] = []

    def come(self) -> None:
        self.epoch += 1

    def current_address(self) -> Address | None:
        found = Address(f"http://server-{self.number}", self.epoch, f"key {self.epoch}")
        return found if self.epoch else None

    def wait_until_ready(self) -> Address:
        raise AssertionError("nobody waits for one of them alone")

    def report_failure(self, address: Address, reason: str) -> None:
        self.told.append(reason)


def test_of_two_servers_of_a_judge_the_one_that_failed_is_told_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = [Served(0), Served(1)]
    judge = judge_server.make_judge(JudgeModel(model="a judge", server=VllmSettings(replicas=2)), servers)  # type: ignore[arg-type]
    monkeypatch.setattr(judge_server, "time", SimpleNamespace(sleep=lambda seconds: servers[1].come()))
    first = judge.choose_server()
    assert first.url == "http://server-1/v1", "who comes first is asked"
    servers[0].come()
    assert {judge.choose_server().url for _ in range(2)} == {"http://server-0/v1", "http://server-1/v1"}
    judge.report_failure(first, "it hangs")
    servers[1].come()
    judge.report_failure(first, "it hangs")
    assert [one.told for one in servers] == [[], ["it hangs"]], "who was started anew is another"


# Programs without a sandbox

UNSAFE = {"type": "unsafe_local"}


def test_who_lets_a_models_programs_run_without_a_sandbox_is_told_so_at_every_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "task.grader.sandbox is unsafe_local: programs that the model writes run with your rights"
    plain = {"task": {"grader": {"sandbox": UNSAFE}}}
    for iterations in (1, 2):
        directory = train(small(tmp_path, iterations=iterations), **plain)
        assert words in capsys.readouterr().err
    manifest = json.loads((directory.path / "manifest.json").read_text())
    assert manifest["without_sandbox"] == ["task.grader.sandbox"]
    grader = "{ type: 'cruxeval', sandbox: { type: 'unsafe_local' } }"
    task = f"{{ directory: '{tmp_path}', task: {{ type: 'short_programs', grader: {grader} }} }}"
    given = ["--configs", "configs/quickstart/grpo.jsonnet", "--override", task]
    assert main([*given, "check_config", "--config-only"]) == 0
    assert "unsafe_local" in capsys.readouterr().err
    assert find_keys_without_sandbox({"domains": [{"x": 1}, {"grader": {"sandbox": UNSAFE}}]}) == [
        "domains.1.grader.sandbox"
    ]
    assert find_keys_without_sandbox({"sandbox": {"type": "bubblewrap"}}) == []
