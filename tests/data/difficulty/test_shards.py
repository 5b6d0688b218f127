"""Promises of `estimate_difficulty` where a shard starts an engine itself:

* a lost job loses only the answers that were under way, and a line that was cut short is asked again;
* a prompt bounds the tokens of its answer, and a prompt that fills the context is not asked;
* the number of requests that are sent at once changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import treetune.parts  # noqa: F401  (registers them)
from tests.data.command import write_lines
from tests.data.oracle import sums
from tests.support.fake_engine import FakeEngine
from treetune.config.build import build
from treetune.data.difficulty import answering as policies
from treetune.data.difficulty.shard import shard_folder, work_on_shard
from treetune.data.pipelines import DataPipeline, EstimateDifficulty
from treetune.domains.domain_rows import domain_row
from treetune.engine.base import EngineLaunch
from treetune.engine.settings import VllmSettings
from treetune.exceptions import EngineError
from treetune.store.journal import read_journal

CONTEXT, SAMPLES = 16, 3
CHARACTERS = "0123456789+=?#"
END = 1


def pipeline() -> EstimateDifficulty:
    settings = build(
        DataPipeline,
        {
            "type": "estimate_difficulty",
            "task": {"type": "rows", "routes": {"": {"type": "final_answer", "marker": "#"}}},
            "policy": {
                "type": "served",
                "model": {"type": "tiny", "alphabet": CHARACTERS, "context_length": CONTEXT},
                "engine": {"type": "vllm"},
                "context_length": CONTEXT,
            },
            "answers": {"samples": SAMPLES, "max_tokens": 12, "top_k": -1, "top_p": 1.0},
        },
    )
    assert isinstance(settings, EstimateDifficulty)
    return settings


class Engines:
    """Start fake engines in place of servers. The next engine fails after `fail_after` answers."""

    def __init__(self) -> None:
        self.started: list[FakeEngine] = []
        self.fail_after: int | None = None

    def start(self, settings: VllmSettings, launch: EngineLaunch) -> FakeEngine:
        def probabilities(ids: Sequence[int], version: int) -> list[float]:
            # No padding, an end in one of five tokens, and all characters alike.
            return [0.0, 0.2, *([0.8 / len(CHARACTERS)] * len(CHARACTERS))]

        engine = FakeEngine(probabilities, END, context_length=CONTEXT, fail_after=self.fail_after)
        self.started.append(engine)
        return engine


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    engines = Engines()
    monkeypatch.setattr("treetune.engine.engine.start_engine", engines.start)
    return engines


def grades(output: Path) -> list[dict[str, Any]]:
    return sorted(
        read_journal(shard_folder(output, 0) / "grades.jsonl"), key=lambda row: (row["row"], row["sample"])
    )


def test_a_lost_job_loses_what_was_under_way_and_nothing_else(tmp_path: Path, engines: Engines) -> None:
    source = write_lines(tmp_path / "rows.jsonl", sums(8))
    assert work_on_shard(pipeline(), source, tmp_path / "whole", 0) == 0
    engines.fail_after = 10
    with pytest.raises(EngineError):
        work_on_shard(pipeline(), source, tmp_path / "lost", 0)
    engines.fail_after = None
    assert work_on_shard(pipeline(), source, tmp_path / "lost", 0) == 0
    assert grades(tmp_path / "lost") == grades(tmp_path / "whole")
    requests = [len(engine.asked) for engine in engines.started]
    assert requests == [8 * SAMPLES, 10, 8 * SAMPLES - 10]
    assert all(engine.closed for engine in engines.started)


def test_a_line_that_was_cut_short_is_asked_again(tmp_path: Path, engines: Engines) -> None:
    source = write_lines(tmp_path / "rows.jsonl", sums(2))
    assert work_on_shard(pipeline(), source, tmp_path / "out", 0) == 0
    before = grades(tmp_path / "out")
    for name in ("answers.jsonl", "grades.jsonl"):
        path = shard_folder(tmp_path / "out", 0) / name
        path.write_bytes(path.read_bytes()[:-9])
    assert work_on_shard(pipeline(), source, tmp_path / "out", 0) == 0
    assert grades(tmp_path / "out") == before and len(engines.started[1].asked) == 1


def test_a_prompt_bounds_its_answer_and_one_that_fills_the_context_is_not_asked(
    tmp_path: Path, engines: Engines
) -> None:
    rows = [domain_row("math__x", "1" * length, "1") for length in (2, 10, CONTEXT, CONTEXT + 5)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    assert work_on_shard(pipeline(), source, tmp_path / "out", 0) == 0
    budgets = {len(request.prompt_ids): request.sampling.max_tokens for request in engines.started[0].asked}
    assert budgets == {2: 12, 10: 6}
    grades_of_rows = grades(tmp_path / "out")
    assert [row["outcome"] for row in grades_of_rows if row["row"] >= 2] == ["not asked"] * 2 * SAMPLES
    done = json.loads((shard_folder(tmp_path / "out", 0) / "done.json").read_text())
    assert done == {"answers": 4 * SAMPLES, "graded": 4 * SAMPLES, "unavailable": 0}


def test_the_size_of_the_waves_in_which_requests_are_sent_changes_nothing(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "rows.jsonl", sums(8))
    assert work_on_shard(pipeline(), source, tmp_path / "one", 0) == 0
    monkeypatch.setattr(policies, "QUESTIONS_OF_A_WAVE", 5)
    assert work_on_shard(pipeline(), source, tmp_path / "many", 0) == 0
    assert grades(tmp_path / "many") == grades(tmp_path / "one")
