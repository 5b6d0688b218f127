"""How many problems an iteration has, and which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.runtime.in_process import TASK, directory_of, small, train


def test_an_iteration_without_a_number_of_problems_takes_the_whole_split(tmp_path: Path) -> None:
    config = small(
        tmp_path,
        task=replace(TASK, train_size=6),
        problems_per_iteration=None,
        problem_sampling="epochs",
    )
    train(config)
    rows = directory_of(config).read_metrics()
    assert [row["episodes/count"] for row in rows] == [12, 12], "6 problems, 2 answers each"
