"""Tables of experiments.

These tests promise that each row shows the evaluation that its settings choose, and that missing or broken
evaluations are named, all at once.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.view.report.synthetic import summary, write_experiment, write_summary
from treetune.config.build import check_root
from treetune.tables.experiments_table import as_markdown, fill_rows
from treetune.tables.settings import ExperimentsTable, TableRow
from treetune.tables.write import make_table


def table(directory: Path, *rows: TableRow, **changed: Any) -> ExperimentsTable:
    return ExperimentsTable(directory=str(directory), rows=rows, **changed)


def test_a_table_shows_the_last_measured_checkpoint_of_each_experiment(tmp_path: Path, capsys) -> None:
    write_experiment(tmp_path / "quickstart/sft", passes={13: 0.57})
    write_experiment(tmp_path / "quickstart/vineppo", passes={5: 0.95, 25: 0.91})
    rows = [TableRow(name=name, experiment=f"quickstart/{name}") for name in ("sft", "vineppo")]
    assert make_table(table(tmp_path, *rows, output="quickstart/table.json"), "the command") == 0
    rows_json = json.loads((tmp_path / "quickstart/table.json").read_text())
    assert {name: (row["pass_at_1"], row["iteration"]) for name, row in rows_json.items()} == {
        "sft": (0.57, 13), "vineppo": (0.91, 25)
    }  # fmt: skip
    last = rows_json["vineppo"]
    assert (last["ci_low"], last["ci_high"], last["n_problems"]) == (
        pytest.approx(0.88),
        pytest.approx(0.94),
        512,
    )
    assert "91.0" in capsys.readouterr().out
    assert "| vineppo | 91.0 |" in (tmp_path / "quickstart/table.md").read_text()


def test_the_best_checkpoint_is_chosen_on_another_set(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run", passes={5: 0.6, 10: 0.7, 15: 0.95})
    for iteration, value in {5: 0.4, 10: 0.8, 15: 0.5}.items():
        write_summary(path, iteration, "validation", summary(value))

    (result,) = fill_rows(table(tmp_path, TableRow(name="run", experiment="run"), checkpoint="best"))

    assert (result.values["iteration"], result.values["pass_at_1"]) == (10, 0.7)


def test_choosing_on_the_reported_set_and_two_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="best_on"):
        check_root(table(tmp_path, TableRow(name="a", experiment="a"), checkpoint="best", best_on="test"))
    with pytest.raises(ValueError, match="two rows have the same name: a"):
        check_root(table(tmp_path, TableRow(name="a", experiment="x"), TableRow(name="a", experiment="y")))


def test_an_optional_row_is_left_out_until_it_is_measured(tmp_path: Path) -> None:
    write_experiment(tmp_path / "sft")
    rows = (TableRow(name="sft", experiment="sft"), TableRow(name="ppo", experiment="ppo", optional=True))
    assert [result.row.name for result in fill_rows(table(tmp_path, *rows))] == ["sft"]
    write_experiment(tmp_path / "ppo")
    assert [result.row.name for result in fill_rows(table(tmp_path, *rows))] == ["sft", "ppo"]


def test_all_missing_rows_are_named_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    write_experiment(tmp_path / "sft")
    write_experiment(tmp_path / "unmeasured", passes={})
    rows = [TableRow(name=name, experiment=name) for name in ("sft", "absent", "unmeasured")]
    with pytest.raises(ValueError) as caught:
        make_table(table(tmp_path, *rows), "the command")
    message = str(caught.value)
    assert (
        all(part in message for part in ("absent", "does not exist", "unmeasured")) and "sft:" not in message
    )
    assert not (tmp_path / "table.json").exists()


def test_a_broken_summary_is_named(tmp_path: Path) -> None:
    path = write_experiment(tmp_path / "run", passes={})
    write_summary(path, 3, "test", {"split": "test"})
    with pytest.raises(ValueError, match=r"0003/test/summary\.json"):
        fill_rows(table(tmp_path, TableRow(name="run", experiment="run")))


def test_published_numbers_are_shown_beside_the_measured_ones(tmp_path: Path) -> None:
    write_experiment(tmp_path / "run", passes={25: 0.9})
    chosen = table(tmp_path, TableRow(name="a|b", experiment="run", published=0.465, source="Table 1"))
    results = fill_rows(chosen)
    assert results[0].as_json()["published"] == 0.465
    assert "| a\\|b | 90.0 |" in as_markdown(chosen, results)
    assert "46.5 (Table 1) |" in as_markdown(chosen, results)
