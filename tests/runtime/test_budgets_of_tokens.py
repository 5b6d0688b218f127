"""A run that ends at a budget of sampled tokens ends at the same iteration, interrupted or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime import in_process
from treetune.inference.base import EngineError
from treetune.rollouts.monte_carlo import MonteCarlo
from treetune.runtime.base import Checkpoints, Evaluation, EvaluationSet, PolicyIteration, StopAfter
from treetune.runtime.directory import ExperimentDirectory, iterations_of, tokens_sampled
from treetune.store.checksums import read_record, write_record

MANY = 50


def budgeted(base: Path, tokens: int, fail_after: int | None = None) -> PolicyIteration:
    return in_process.small(
        base,
        in_process.FakeSettings(fail_after=fail_after),
        iterations=MANY,
        stop_after=StopAfter(sampled_tokens=tokens),
        credit=MonteCarlo(samples=2),
        evaluation=Evaluation(sets=(EvaluationSet(split="test", problems=2),), every=None),
        checkpoints=Checkpoints(every=2),
    )


def weights(directory: ExperimentDirectory) -> bytes:
    newest = directory.checkpoints()[-1]
    return (directory.checkpoint(newest) / "policy" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("of_iterations", "further"),
    [
        ([], None),
        ([40], 2),
        ([40, 40], 1),
        ([40, 40, 19], 0),
        ([40, 40, 40], 0),
        ([60, 41], 0),
        ([60], 1),
        ([67], 0),
    ],
)
def test_the_run_ends_with_the_iteration_that_comes_nearest_to_the_budget(
    of_iterations: list[int], further: int | None
) -> None:
    assert StopAfter(sampled_tokens=100).further_iterations(of_iterations) == further


def test_a_run_ends_near_its_budget_and_is_evaluated_there(tmp_path: Path) -> None:
    directory = in_process.train(budgeted(tmp_path, 1500))
    rows = directory.read_metrics()
    sampled = tokens_sampled(directory, len(rows))
    assert 1 < len(rows) < MANY
    assert abs(sum(sampled) - 1500) <= max(sampled) / 2
    assert sampled == [round(row["rollout/sampled_tokens"] + row["credit/value_tokens"]) for row in rows]
    answers = rows[0]["episodes/count"] * rows[0]["episodes/response_tokens"]
    assert rows[0]["rollout/sampled_tokens"] == pytest.approx(answers)
    assert rows[0]["credit/value_tokens"] > 0
    assert directory.checkpoints()[-1] == len(rows)
    assert (directory.evaluation(len(rows), "test") / "summary.json").is_file()


def test_a_run_that_is_interrupted_counts_what_was_sampled_before(tmp_path: Path) -> None:
    undisturbed = in_process.train(budgeted(tmp_path / "undisturbed", 1500))
    for _ in range(200):
        try:
            struck = in_process.train(budgeted(tmp_path / "struck", 1500, fail_after=17))
            break
        except EngineError:
            continue
    assert [row["iteration"] for row in struck.read_metrics()] == [
        row["iteration"] for row in undisturbed.read_metrics()
    ]
    assert weights(struck) == weights(undisturbed)


def test_a_finished_run_stays_as_it_is_and_a_larger_budget_goes_on(tmp_path: Path) -> None:
    config = budgeted(tmp_path, 600)
    directory = in_process.train(config)
    done = len(directory.read_metrics())
    asked = in_process.sampled_requests(config)
    in_process.train(config)
    assert in_process.sampled_requests(config) == asked
    larger = replace(config, stop_after=StopAfter(sampled_tokens=1500))
    in_process.train(larger, stop_after={"sampled_tokens": 1500})
    assert len(directory.read_metrics()) > done
    assert iterations_of(larger, directory, len(directory.read_metrics())) == len(directory.read_metrics())


def test_a_run_whose_tokens_nobody_counted_is_refused(tmp_path: Path) -> None:
    config = budgeted(tmp_path, 600)
    directory = in_process.train(config)
    path = directory.iteration(0) / "rollout.json"
    record = read_record(path, "")
    del record["metrics"]["rollout/sampled_tokens"]
    write_record(path, record)
    with pytest.raises(ValueError, match="did not count its tokens"):
        in_process.train(config)
