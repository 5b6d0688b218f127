"""What a run tells of threads, and what it remembers of answers from one iteration to the next."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.fake_engine import FakeEngine
from tests.runtime.in_process import TASK, FakeSettings, small, train
from treetune.episode_generators.rollout.parallel_threads import ParallelThreads
from treetune.inference.base import Engine
from treetune.models.sources import TinyModel
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.runtime.evaluated_threads import threads_metrics
from treetune.tasks.threads.tags import TAGS
from treetune.trainers.ranks import Ranks

MODEL = TinyModel(
    layers=1, hidden_size=64, heads=2, intermediate_size=96, context_length=64, added_tokens=TAGS
)


@dataclass(frozen=True, kw_only=True)
class TaggedSettings(FakeSettings):
    """Its engine likes to open and close blocks."""

    def start(self, model_directory: Path, log_directory: Path, **rest: Any) -> Engine:
        tokenizer = MODEL.load_tokenizer(TASK.alphabet)
        liked = [
            tokenizer.convert_tokens_to_ids(tag)
            for tag in ("<Parallel>", "</Parallel>", "<Thread>", "</Thread>")
        ]
        weights = [4.0 if token in liked else 1.0 for token in range(len(tokenizer))]
        probabilities = [weight / sum(weights) for weight in weights]
        engine = FakeEngine(
            lambda ids, version: probabilities, tokenizer.eos_token_id, fail_after=self.fail_after
        )
        self.engines.append(engine)
        return engine


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed remembers a process group that was left: several runs in one process share one."""
    monkeypatch.setattr(Ranks, "leave", lambda self: None)


def threaded(base: Path, **changes: Any) -> PolicyIteration:
    given = {
        "model": MODEL,
        "engine": TaggedSettings(),
        "rollout": ParallelThreads(samples=2, max_tokens=30, unfinished_reward=1.0, parallel=False),
        **changes,
    }
    return small(base, **given)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_an_evaluation_tells_of_each_answer_and_of_all(tmp_path: Path) -> None:
    sets = (EvaluationSet(split="test", samples=3, while_training=True),)
    config = threaded(tmp_path, iterations=1, evaluation=Evaluation(every=1, sets=sets))
    directory = train(config)
    folder = directory.evaluation(1, "test")
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 30
    for row in rows:
        own = row["threads"]
        assert own["total_num_tokens"] == row["tokens"]
        assert own["with_parallel"] == float("<Parallel>" in row["text"])
        assert own["num_tokens_in_the_longest_thread"] <= row["tokens"]
    assert len({row["threads"]["acceleration_ratio"] for row in rows}) > 2
    summary, (metrics,) = read(folder / "summary.json"), directory.read_metrics()
    right = [row for row in rows if row["reward"] == 1.0]
    assert 0 < len(right) < len(rows)
    for name in ("acceleration_ratio", "num_tokens_in_the_longest_thread", "with_parallel"):
        for ending, kept in (("", rows), ("_right", right)):
            expected = mean(row["threads"][name] for row in kept)
            assert summary["threads"][name + ending] == pytest.approx(expected)
            assert metrics[f"evaluation/test/threads/{name}{ending}"] == pytest.approx(expected)


def test_an_evaluation_of_a_model_without_tags_tells_nothing_of_threads(tmp_path: Path) -> None:
    config = small(tmp_path, iterations=1, evaluation=Evaluation(sets=(EvaluationSet(split="test"),)))
    directory = train(config)
    folder = directory.evaluation(1, "test")
    assert "threads" not in read(folder / "summary.json")
    assert "threads" not in (folder / "answers.jsonl").read_text()
    assert not [name for name in directory.read_metrics()[0] if "threads" in name]
    assert threads_metrics("test", {"pass_at_1": 1.0}) == {}
