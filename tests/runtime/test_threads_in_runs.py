"""What a run tells of threads, and what it remembers of answers from one iteration to the next."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.fake_engine import FakeEngine
from tests.runtime.even_answers import EvenAnswers
from tests.runtime.in_process import TASK, FakeSettings, directory_of, raises_after, small, train
from treetune.inference.base import Engine, EngineLaunch
from treetune.models.sources import TinyModel
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.runtime import commands, generation
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.store.checksums import read_record
from treetune_threads.format import TAGS
from treetune_threads.parallel_threads import ParallelThreads
from treetune_threads.shaping import Acceleration, Measured, Running, Total

MODEL = TinyModel(
    layers=1, hidden_size=64, heads=2, intermediate_size=96, context_length=64, added_tokens=TAGS
)


@dataclass(frozen=True, kw_only=True)
class TaggedSettings(FakeSettings):
    """Its engine likes to open and close threads."""

    def start(self, launch: EngineLaunch) -> Engine:
        tokenizer = MODEL.load_tokenizer(TASK.alphabet)
        weights = [1.0] * len(tokenizer)
        for token, weight in (("<Parallel>", 2.0), ("<Thread>", 4.0), ("</Thread>", 4.0)):
            weights[tokenizer.convert_tokens_to_ids(token)] = weight
        probabilities = [weight / sum(weights) for weight in weights]
        engine = FakeEngine(
            lambda ids, version: probabilities, tokenizer.eos_token_id, fail_after=self.fail_after
        )
        self.engines.append(engine)
        return engine


def threaded(base: Path, **changes: Any) -> PolicyIteration:
    """It is asked the same few problems again and again, and is often right."""
    given = {
        "task": replace(TASK, train_size=6, grader=EvenAnswers()),
        "model": MODEL,
        "engine": TaggedSettings(),
        "rollout": ParallelThreads(samples=6, max_tokens=30, unfinished_reward=None, parallel=False),
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


ACCELERATION = Acceleration(
    weight=0.5, clip=0.5, form="saved", reference=Running(decay=0.5), floor=-0.5, threads="written"
)


def remembering(base: Path, **changes: Any) -> PolicyIteration:
    return threaded(base, shaping=(ACCELERATION,), iterations=3, **changes)


def memories(config: PolicyIteration) -> list[Any]:
    directory = directory_of(config)
    return [read_record(directory.iteration(i) / "memory.json", "") for i in range(config.iterations)]


def test_what_shaping_remembers_is_kept_with_each_iteration(tmp_path: Path) -> None:
    config = remembering(tmp_path)
    directory = train(config)
    lengths: dict[str, float] = {}
    moved = 0
    for iteration, memory in enumerate(memories(config)):
        plain: dict[str, list[int]] = {}
        for one in read_trajectories(directory.iteration(iteration) / "trajectories.arrow"):
            if one.grade.correct and "<Parallel>" not in one.text:
                plain.setdefault(one.problem.id, []).append(len(one.response_ids))
        for problem, found in plain.items():
            moved += problem in lengths and lengths[problem] != mean(found)
            lengths[problem] = (lengths.get(problem, mean(found)) + mean(found)) / 2
        assert memory == {"acceleration": lengths}
    assert moved, "a mean that never moved would show nothing"
    for row in directory.read_metrics():
        assert "shaping/acceleration" in row
        assert 0 <= row["acceleration/without_reference"] < 1


@pytest.mark.parametrize("place", ["write_trajectories", "write_record", "write_episodes"])
def test_a_run_that_was_killed_goes_on_with_the_memory_of_an_undisturbed_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = remembering(tmp_path / "undisturbed")
    train(undisturbed)
    struck = remembering(tmp_path / "struck")
    # In the second iteration; what is written as JSON there is rollout, credit and memory.
    calls = 5 if place == "write_record" else 1
    with monkeypatch.context() as patch:
        stop = raises_after(getattr(generation, place), calls, RuntimeError("struck here"))
        patch.setattr(generation, place, stop)
        with pytest.raises(RuntimeError, match="struck here"):
            train(struck)
    train(remembering(tmp_path / "struck", engine=TaggedSettings()))
    assert memories(struck) == memories(undisturbed)
    assert len({json.dumps(memory) for memory in memories(struck)}) == 3
    for iteration in range(3):
        ours, theirs = (
            read_episodes(directory_of(config).iteration(iteration) / "episodes.arrow")
            for config in (struck, undisturbed)
        )
        assert [episode.reward for episode in ours] == [episode.reward for episode in theirs]


def test_a_memory_that_is_gone_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = remembering(tmp_path)
    with monkeypatch.context() as patch:
        stop = raises_after(generation.write_episodes, 1, RuntimeError("struck here"))
        patch.setattr(generation, "write_episodes", stop)
        with pytest.raises(RuntimeError, match="struck here"):
            train(config)
    (directory_of(config).iteration(0) / "memory.json").unlink()
    with pytest.raises(ValueError, match=r"memory.json is gone, .*another experiment_name"):
        train(remembering(tmp_path))


def test_shaping_that_remembers_nothing_writes_no_memory(tmp_path: Path) -> None:
    directory = train(threaded(tmp_path, iterations=1, shaping=(replace(ACCELERATION, reference=Total()),)))
    assert not (directory.iteration(0) / "memory.json").exists()


def test_a_reference_that_is_not_there_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    nowhere = replace(ACCELERATION, reference=Measured(answers=str(tmp_path / "answers.jsonl")))
    config = threaded(tmp_path, shaping=(nowhere,))
    with pytest.raises(ValueError, match="run the evaluation of the sequential experiment first"):
        commands.run("run_iteration_loop", config, {})
    assert not directory_of(config).path.exists()
