"""A column or a panel that would stay empty is told before anything runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.tables.small_table import ROOT, experiment, table
from treetune.exceptions import ConfigError
from treetune.tables.check import METRICS
from treetune.tables.columns import MeasuredColumn, Panel
from treetune.tables.launch import reproduce
from treetune.tables.settings import MethodRow


def mistakes(**more: Any) -> dict[str | None, str]:
    with pytest.raises(ConfigError) as caught:
        table(Path("experiments"), **more).check_experiments()
    return {issue.key: issue.what for issue in caught.value.issues}


def test_what_some_row_will_write_is_fine() -> None:
    table(
        Path("experiments"),
        panels=(
            Panel(name="entropy", metric="train/entropy"),
            Panel(name="critic", metric="critic/mse"),  # of PPO's row alone
            Panel(name="accuracy", metric="evaluation/test/pass_at_1"),
            Panel(name="pass@4", evaluation="test", value="pass_at_4"),
        ),
    ).check_experiments()


def test_all_that_no_row_will_write_is_told_at_once() -> None:
    found = mistakes(
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
    assert list(found) == [
        "columns.1.value", "columns.2.curve", "panels.0.metric", "panels.1.metric", "panels.2.value",
        "panels.3.value",
    ]  # fmt: skip
    assert "did you mean 'validation'" in found["columns.2.curve"]
    assert "did you mean 'train/entropy'" in found["panels.0.metric"]
    assert "its selection makes no pairs" in found["panels.1.metric"]


def test_a_metric_of_the_start_weights_training_alone_is_not_drawn() -> None:
    """SFT came before, so that its metrics are not beside the others'; alone they are."""
    rows = (MethodRow(name="SFT", experiment="sft"),)
    panels = (Panel(name="loss", metric="train/loss"),)
    alone = {"sft": experiment("sft")}
    table(Path("experiments"), rows=rows, panels=panels, experiments=alone, baseline=None).check_experiments()


def test_nothing_is_run_for_a_table_that_would_stay_empty(tmp_path: Path) -> None:
    empty = table(tmp_path, panels=(Panel(name="x", metric="train/entrpy"),))
    with pytest.raises(ConfigError, match="train/entrpy"):
        reproduce(empty, lambda plan: None)
    assert not (tmp_path / "logs").exists()


def test_every_metric_that_the_code_records_is_known() -> None:
    name = re.compile(rf'"({"|".join(METRICS)})/([a-z][a-z0-9_]*)"')
    files = {*(ROOT / "src").rglob("*.py")} - {ROOT / "src/treetune/tables/check.py"}
    found = {match.groups() for path in files for match in name.finditer(path.read_text())}
    assert len(found) > 80
    assert not {f"{group}/{short}" for group, short in found if short not in METRICS[group]}
