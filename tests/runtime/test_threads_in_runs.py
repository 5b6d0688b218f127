"""What a run tells of threads, and what it remembers of answers from one iteration to the next.
(test_struck_runs has the memory of a run that was killed.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.runtime.even_answers import EvenAnswers
from tests.runtime.in_process import (
    MODEL,
    TASK,
    FakeSettings,
    answers_of,
    computed,
    directory_of,
    evaluated,
    raises_after,
    small,
    train,
    trained,
)
from treetune.runtime import commands, generation
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune_threads.format import TAGS
from treetune_threads.parallel_threads import ParallelThreads
from treetune_threads.shaping import Acceleration, Measured, Running, Total

TAGGED = replace(MODEL, added_tokens=TAGS)
ACCELERATION = Acceleration(
    weight=0.5, clip=0.5, form="saved", reference=Running(decay=0.5), floor=-0.5, threads="written"
)


def threaded(base: Path, **changes: Any) -> PolicyIteration:
    """It is asked the same few problems again and again, is often right, and likes to open and close
    threads."""
    given = {
        "task": replace(TASK, train_size=6, grader=EvenAnswers()),
        "model": TAGGED,
        "engine": FakeSettings(model=TAGGED, odds={"<Parallel>": 2.0, "<Thread>": 4.0, "</Thread>": 4.0}),
        "rollout": ParallelThreads(samples=6, max_tokens=30, unfinished_reward=None, parallel=False),
        **changes,
    }
    return small(base, **given)


def test_an_evaluation_tells_of_each_answer_and_of_all(tmp_path: Path) -> None:
    sets = (EvaluationSet(split="test", samples=3, while_training=True),)
    config = trained(threaded(tmp_path, iterations=1, evaluation=Evaluation(every=1, sets=sets)))
    summary, rows = evaluated(config, 1, "test")
    assert len(rows) == 30
    for row in rows:
        own = row["threads"]
        assert own["total_num_tokens"] == row["tokens"]
        assert own["with_parallel"] == float("<Parallel>" in row["text"])
        assert own["num_tokens_in_the_longest_thread"] <= row["tokens"]
    assert len({row["threads"]["acceleration_ratio"] for row in rows}) > 2
    (metrics,) = directory_of(config).read_metrics()
    right = [row for row in rows if row["reward"] == 1.0]
    assert 0 < len(right) < len(rows)
    for name in ("acceleration_ratio", "num_tokens_in_the_longest_thread", "with_parallel"):
        for ending, kept in (("", rows), ("_right", right)):
            expected = mean(row["threads"][name] for row in kept)
            assert summary["threads"][name + ending] == pytest.approx(expected)
            assert metrics[f"evaluation/test/threads/{name}{ending}"] == pytest.approx(expected)


def test_an_evaluation_of_a_model_without_tags_tells_nothing_of_threads(tmp_path: Path) -> None:
    sets = Evaluation(sets=(EvaluationSet(split="test"),))
    config = trained(small(tmp_path, iterations=1, evaluation=sets))
    summary, rows = evaluated(config, 1, "test")
    named = [*summary, *(name for row in rows for name in row), *directory_of(config).read_metrics()[0]]
    assert not [name for name in named if "threads" in name]


def test_what_shaping_remembers_is_kept_with_each_iteration_and_missed_where_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = trained(threaded(tmp_path, shaping=(ACCELERATION,), iterations=3))
    lengths: dict[str, float] = {}
    moved = 0
    for iteration, memory in enumerate(computed(config)["remembered"]):
        plain: dict[str, list[int]] = {}
        for one in answers_of(config, iteration):
            if one.grade.correct and "<Parallel>" not in one.text:
                plain.setdefault(one.problem.id, []).append(len(one.response_ids))
        for problem, found in plain.items():
            moved += problem in lengths and lengths[problem] != mean(found)
            lengths[problem] = (lengths.get(problem, mean(found)) + mean(found)) / 2
        assert memory == {"acceleration": lengths}
    assert moved, "a mean that never moved would show nothing"
    for row in directory_of(config).read_metrics():
        assert "shaping/acceleration" in row
        assert 0 <= row["acceleration/without_reference"] < 1

    struck = threaded(tmp_path / "struck", shaping=(ACCELERATION,))
    with monkeypatch.context() as patch:
        stop = raises_after(generation.write_episodes, 1, RuntimeError("struck here"))
        patch.setattr(generation, "write_episodes", stop)
        with pytest.raises(RuntimeError, match="struck here"):
            train(struck)
    (directory_of(struck).iteration(0) / "memory.json").unlink()
    with pytest.raises(ValueError, match=r"memory.json is gone, .*another experiment_name"):
        train(threaded(tmp_path / "struck", shaping=(ACCELERATION,)))


def test_shaping_that_remembers_nothing_writes_no_memory(tmp_path: Path) -> None:
    directory = train(threaded(tmp_path, iterations=1, shaping=(replace(ACCELERATION, reference=Total()),)))
    assert not (directory.iteration(0) / "memory.json").exists()


def test_a_reference_that_is_not_there_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    nowhere = replace(ACCELERATION, reference=Measured(answers=str(tmp_path / "answers.jsonl")))
    config = threaded(tmp_path, shaping=(nowhere,))
    with pytest.raises(ValueError, match="run the evaluation of the sequential experiment first"):
        commands.run("run_iteration_loop", config, {})
    assert not directory_of(config).path.exists()
