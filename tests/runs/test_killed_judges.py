"""Judges in processes of their own that are killed while a run asks them: the run goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_run import TASK, directory_of, log_of, small, train, trained, weights_of
from treetune.domains.endpoints.settings import EndpointSettings
from treetune.domains.graders.judge import JudgeGrader
from treetune.rollouts.single_turn import SingleTurn
from treetune.runtime.base import PolicyIteration
from treetune.tasks.graders.final_answer import FinalAnswer

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
ANSWERS = 24
"""Of an iteration."""


class Struck:
    """A stand-in judge in a process, and what happens to it once it was asked so often."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.mood, self.record = folder / "mood", folder / "asked.jsonl"
        self.mood.write_text("well")
        self.record.touch()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        words = ["--port", self.port, "--mood", self.mood, "--record", self.record, "--delay", 0.1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.stand_in_judge", *map(str, words)],
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        )
        end = time.monotonic() + PATIENCE
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < end, "the stand-in didn't come up"
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    @contextmanager
    def happening(self, after: int, what: Callable[[], None]) -> Iterator[None]:
        def strike() -> None:
            end = time.monotonic() + PATIENCE
            while self.record.read_bytes().count(b"\n") < after:
                assert time.monotonic() < end, "nobody asks"
                time.sleep(0.01)
            what()

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            yield
        finally:
            thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Struck]:
    running = Struck(tmp_path / "judge")
    yield running
    running.kill()


def judged(base: Path, judge: Struck, **endpoint: Any) -> PolicyIteration:
    asked = EndpointSettings(
        base_url=f"http://127.0.0.1:{judge.port}/v1", model="m", concurrency=4, timeout=30.0, **endpoint
    )
    return small(
        base,
        task=replace(TASK, grader=JudgeGrader(endpoint=asked, rule=FinalAnswer())),
        rollout=SingleTurn(samples=4, max_tokens=12, unfinished_reward=None),
        problems_per_iteration=6,
        iterations=2,
    )


def lost(config: PolicyIteration) -> list[int]:
    """Of each iteration."""
    rows = directory_of(config).read_metrics()
    return [round(row["episodes/unavailable"] * row["episodes/count"]) for row in rows]


def test_a_judge_that_is_killed_and_comes_back_in_time_costs_nothing(judge: Struck, tmp_path: Path) -> None:
    def strike() -> None:
        judge.kill()
        time.sleep(2.0)
        judge.start()

    undisturbed = trained(judged(tmp_path / "undisturbed", judge))
    questions = len(judge.asked)
    config = judged(tmp_path / "struck", judge, retries=6, backoff=0.5)
    with judge.happening(questions + 8, strike):
        train(config)
    assert lost(config) == [0, 0]
    assert "the judge gives no answer" in log_of(config)
    assert "the judge answers, after" in log_of(config)
    assert weights_of(config) == weights_of(undisturbed)


@pytest.mark.parametrize("how", ["killed", "nonsense", "down"])
def test_what_a_judge_that_fails_for_a_while_did_not_judge_is_left_out_and_told(
    judge: Struck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("treetune.domains.graders.judge.PROBE_S", 0.2)

    def strike() -> None:
        judge.kill() if how == "killed" else judge.mood.write_text(how)
        time.sleep(1.0)
        judge.start() if how == "killed" else judge.mood.write_text("well")

    config = judged(tmp_path / "struck", judge, retries=0, backoff=0.2, give_up_after=2)
    config = replace(config, iterations=1)
    with judge.happening(14, strike):
        train(config)
    (first,) = lost(config)
    assert 0 < first < ANSWERS
    assert f"iteration 1: {first} of {ANSWERS} answers could not be graded and are left out: " in log_of(
        config
    )
    verdicts = Counter(json.dumps(body["messages"]) for body in judge.asked if body["mood"] == "well")
    assert max(verdicts.values()) <= 2, "asked again is what the kill cut off, and nothing else"
