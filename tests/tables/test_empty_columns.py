"""Columns and panels that would stay empty.

These tests promise that a table is refused before anything runs if no row will write one of its numbers, with
every such number named.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.tables.small_table import ROOT, experiment, table
from treetune.exceptions import ConfigError
from treetune.tables.check import METRICS_OF_GROUPS
from treetune.tables.columns import MeasuredColumn, Panel
from treetune.tables.launch import reproduce
from treetune.tables.settings import MethodRow


def issues_of(**changed: Any) -> dict[str | None, str]:
    with pytest.raises(ConfigError) as caught:
        table(Path("experiments"), **changed).check_experiments()
    return {issue.key: issue.what for issue in caught.value.issues}


def test_numbers_that_some_row_will_write_are_accepted() -> None:
    table(
        Path("experiments"),
        panels=(
            Panel(name="entropy", metric="train/entropy"),
            Panel(name="critic", metric="critic/mse"),  # of PPO's row alone
            Panel(name="accuracy", metric="evaluation/test/pass_at_1"),
            Panel(name="pass@4", evaluation="test", value="pass_at_4"),
        ),
    ).check_experiments()


def test_all_numbers_that_no_row_will_write_are_named_at_once() -> None:
    issues = issues_of(
        columns=(
            MeasuredColumn(name="test", evaluation="test"),
            MeasuredColumn(name="pass@64", evaluation="test", value="pass_at_64"),
            MeasuredColumn(name="curve", evaluation="test", curve="validtion"),
        ),
        panels=(
            Panel(name="misspelled", metric="train/entrpy"),
            Panel(name="pairs", metric="preference/accuracy"),
            Panel(name="samples", evaluation="test", value="pass_at_64"),
            Panel(name="no power of two", evaluation="test", value="pass_at_3"),
        ),
    )
    assert list(issues) == [
        "columns.1.value", "columns.2.curve", "panels.0.metric", "panels.1.metric", "panels.2.value",
        "panels.3.value",
    ]  # fmt: skip
    assert "did you mean 'validation'" in issues["columns.2.curve"]
    assert "did you mean 'train/entropy'" in issues["panels.0.metric"]
    assert "its selection makes no pairs" in issues["panels.1.metric"]


def test_a_metric_of_training_the_start_weights_is_accepted_if_that_is_the_only_row() -> None:
    """Beside other rows, the metrics of SFT would belong to another training."""
    rows = (MethodRow(name="SFT", experiment="sft"),)
    panels = (Panel(name="loss", metric="train/loss"),)
    alone = {"sft": experiment("sft")}
    table(Path("experiments"), rows=rows, panels=panels, experiments=alone, baseline=None).check_experiments()


def test_nothing_is_run_for_a_table_that_would_stay_empty(tmp_path: Path) -> None:
    empty = table(tmp_path, panels=(Panel(name="x", metric="train/entrpy"),))
    with pytest.raises(ConfigError, match="train/entrpy"):
        reproduce(empty, lambda plan: None)
    assert not (tmp_path / "logs").exists()


def test_every_metric_that_the_code_records_is_in_the_list() -> None:
    name = re.compile(rf'"({"|".join(METRICS_OF_GROUPS)})/([a-z][a-z0-9_]*)"')
    files = {*(ROOT / "src").rglob("*.py")} - {ROOT / "src/treetune/tables/check.py"}
    recorded = {match.groups() for path in files for match in name.finditer(path.read_text())}
    assert len(recorded) > 80
    assert not {f"{group}/{short}" for group, short in recorded if short not in METRICS_OF_GROUPS[group]}
