"""Runs whose answers a language model judges: what it does is counted, and nothing is asked twice."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.in_process import TASK, FakeSettings, directory_of, small, train
from tests.support.stand_in_judge import StandIn, stand_in_judge
from treetune.inference.base import EngineError, EngineLaunch
from treetune.inference.client import Address
from treetune.inference.server import start_servers
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.rollouts.single_turn import SingleTurn
from treetune.rollouts.unavailable import NothingGraded
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.tasks.graders.final_answer import FinalAnswer
from treetune_domains.endpoints.settings import EndpointSettings
from treetune_domains.graders.judge import JudgeGrader, JudgeModel

SETS = Evaluation(every=2, sets=(EvaluationSet(split="test", problems=3, samples=2, while_training=True),))


@pytest.fixture
def judge() -> Iterator[StandIn]:
    with stand_in_judge() as running:
        yield running


def judged(base: Path, judge: StandIn, **changes: Any) -> PolicyIteration:
    endpoint = EndpointSettings(
        base_url=judge.base_url, model="m", retries=0, backoff=0.05, timeout=30.0, temperature=0.0
    )
    return small(
        base,
        task=replace(TASK, grader=JudgeGrader(endpoint=endpoint, rule=FinalAnswer())),
        rollout=SingleTurn(samples=2, max_tokens=12, unfinished_reward=None),
        credit=MonteCarlo(samples=2),
        evaluation=SETS,
        **changes,
    )


def test_what_the_judge_did_is_in_the_metrics_and_in_the_summary(judge: StandIn, tmp_path: Path) -> None:
    config = judged(tmp_path, judge)
    directory = train(config)
    first, second = directory.read_metrics()
    summary = json.loads((directory.evaluation(2, "test") / "summary.json").read_text())
    counted = [row[f"judge/{kind}asked"] for row in (first, second) for kind in ("", "values_")]
    assert all(counted)
    assert sum(counted) + summary["judge"]["asked"] == len(judge.asked)
    assert first["judge/agreement"] > 0
    assert len({json.dumps(body) for body in judge.asked}) == len(judge.asked), "nothing was asked twice"
    log = (directory.logs / "run.log").read_text()
    assert "could not be graded" not in log


def test_a_run_that_goes_on_asks_nothing_again(judge: StandIn, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="told to fail"):
        train(judged(tmp_path, judge, engine=FakeSettings(fail_after=7)))
    assert judge.asked
    directory = train(judged(tmp_path, judge, engine=FakeSettings()))
    assert len({json.dumps(body) for body in judge.asked}) == len(judge.asked)
    assert len(directory.read_metrics()) == 2


def test_a_judge_that_falls_silent_ends_the_run_and_the_same_command_goes_on(
    judge: StandIn, tmp_path: Path
) -> None:
    judge.mood = "down"
    config = judged(tmp_path, judge, engine=FakeSettings())
    with pytest.raises(NothingGraded, match="he same command"):
        train(config)
    assert "HTTP 503" in (directory_of(config).logs / "run.log").read_text()
    judge.mood = "well"
    train(judged(tmp_path, judge, engine=FakeSettings()))
    first, second = directory_of(config).read_metrics()
    assert first["episodes/unavailable"] == second["episodes/unavailable"] == 0.0


@dataclass(frozen=True, kw_only=True)
class Serving(FakeSettings):
    """Serves the stand-in."""

    judge: StandIn
    closed: list[bool] = field(default_factory=list)

    def serve(self) -> Any:
        address = Address(self.judge.base_url.removesuffix("/v1"), 1, "its key")
        server = SimpleNamespace(
            now=lambda: address,
            failed=lambda address, reason: None,
            succeeded=lambda: None,
            begin_to_close=lambda: None,
            close=lambda: self.closed.append(True),
        )
        return [server]


@start_servers.register
def serve_stand_in(settings: Serving, run: EngineLaunch, log: Path) -> Any:
    return settings.serve()


def serving_a_judge(base: Path, judge: StandIn, **changes: Any) -> PolicyIteration:
    model = base / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = judged(base, judge, **changes)
    serving = Serving(judge=judge)
    return replace(
        config,
        task=replace(TASK, grader=JudgeGrader()),
        engines=replace(config.engines, judge=JudgeModel(model=str(model), server=serving)),
    )


@pytest.mark.parametrize("status", ["400", "500"])
def test_a_served_judge_that_cannot_be_asked_ends_the_run_before_anything_is_sampled(
    judge: StandIn, tmp_path: Path, status: str
) -> None:
    judge.mood = status  # no chat template; a tokenizer without tokens for the prompt
    engine = FakeSettings()
    with pytest.raises(ValueError, match=rf"the judge, .* can't be asked.*HTTP {status}.*chat template"):
        train(serving_a_judge(tmp_path, judge, engine=engine))
    assert len(judge.asked) == 1
    assert not any(one.asked for one in engine.engines)


def test_a_served_judge_that_is_away_when_it_is_asked_first_is_waited_for(
    judge: StandIn, tmp_path: Path
) -> None:
    judge.mood = "down"  # as while its killed server starts anew

    def comes_back() -> None:
        while not judge.asked:
            time.sleep(0.01)
        judge.mood = "well"

    back = threading.Thread(target=comes_back)
    back.start()
    directory = train(serving_a_judge(tmp_path, judge))
    back.join()
    assert [row["episodes/unavailable"] for row in directory.read_metrics()] == [0.0, 0.0]


def test_the_run_serves_the_judge_and_ends_it(judge: StandIn, tmp_path: Path) -> None:
    config = serving_a_judge(tmp_path, judge)
    train(config)
    assert config.engines.judge is not None
    serving: Any = config.engines.judge.server
    assert (serving.closed, set(judge.keys)) == ([True], {"its key"})
    assert judge.asked[0]["temperature"] == 0.0
    assert "Answer to be compared:\n\n" in json.dumps(judge.asked[0]).replace("\\n", "\n"), "asked once first"
