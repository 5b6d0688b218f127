"""Columns and panels of any number of an evaluation.

These tests promise:

* A column shows the number, its interval and its published value in every form of the table.
* A speed-up compares a row with another one seed by seed.
* A missing number is named in its cell, and mistakes in a column are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tables import fabricated
from tests.tables.plans import ACCOUNT, finish, plan_of
from treetune.tables.columns import MeasuredColumn, Panel
from treetune.tables.curves import curves_json, make_panel_curves, panel_notes
from treetune.tables.figures import draw_panels, draw_table
from treetune.tables.measure import measure_cells
from treetune.tables.runs import TableRuns, _measurements_of, inspect_again
from treetune.tables.settings import CellSource, MethodRow
from treetune.tables.text import as_latex, as_markdown
from treetune.tables.write import as_html, as_json

LONGEST = "num_tokens_in_the_longest_thread"
COLUMNS = (
    MeasuredColumn(name="accuracy", evaluation="test"),
    MeasuredColumn(name="longest thread", evaluation="test", value=LONGEST),
    MeasuredColumn(name="with threads", evaluation="test", value="with_parallel"),
    MeasuredColumn(name="length", evaluation="test", value="mean_tokens", digits=2),
    MeasuredColumn(
        name="speed-up", evaluation="test", value="speed_up", over="sequential", unit="×", digits=2
    ),
)
ROWS = (
    MethodRow(name="sequential", experiment="sft"),
    MethodRow(
        name="parallel",
        experiment="ppo",
        cells={"longest thread": CellSource(published=2632, source="a paper")},
    ),
)
SHARES = {"sft": 0.5, "ppo": 0.5}


def threaded_plan(tmp_path: Path, **changed: Any) -> TableRuns:
    settings: dict[str, Any] = {"rows": ROWS, "columns": COLUMNS, "baseline": "sequential"}
    return finish(plan_of(tmp_path, **(settings | changed)), SHARES)


def count_threads(folder: Path, total: float, longest: float, *, spread: float = 0.0) -> None:
    """Adds numbers of threads to an evaluation; those of problems differ by `spread` times their number."""
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    for row in rows:
        deviation = spread * (int(row["problem"].split("/")[1]) - (fabricated.PROBLEMS - 1) / 2)
        row["threads"] = {
            "total_num_tokens": total + deviation,
            LONGEST: longest + deviation,
            "with_parallel": float(longest < total),
        }
        row["tokens"] = total + deviation
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = rows[0]["threads"]
    threads = {name: sum(row["threads"][name] for row in rows) / len(rows) for name in names}
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"threads": threads, "mean_tokens": threads["total_num_tokens"]}
    (folder / "summary.json").write_text(json.dumps(summary))


def count_threads_of_runs(
    plan: TableRuns, tokens: Mapping[tuple[str, int], tuple[float, float]], spread: float = 0.0
) -> TableRuns:
    for (name, seed), (total, longest) in tokens.items():
        run = plan.run(name, seed)
        count_threads(run.directory.evaluation_folder(run.iterations, "test"), total, longest, spread=spread)
    return inspect_again(plan)


TOKENS = {
    ("sft", 1): (3000, 3000),
    ("sft", 2): (3200, 3200),
    ("ppo", 1): (3300, 2500),
    ("ppo", 2): (3100, 2000),
}


def test_a_speed_up_is_the_tokens_of_the_other_row_over_the_longest_thread_seed_by_seed(
    tmp_path: Path,
) -> None:
    cells = measure_cells(count_threads_of_runs(threaded_plan(tmp_path), TOKENS)).cells
    parallel, sequential = cells["parallel", "speed-up"], cells["sequential", "speed-up"]
    assert [seed.value for seed in parallel.seeds] == [3000 / 2500, 3200 / 2000]
    assert parallel.estimate.mean == pytest.approx(1.4) and parallel.estimate.low < 1.2, (
        "two seeds know little"
    )
    assert [seed.value for seed in sequential.seeds] == [1.0, 1.0]


def test_every_form_shows_the_numbers_with_their_digits_units_and_marks(tmp_path: Path) -> None:
    results = measure_cells(count_threads_of_runs(threaded_plan(tmp_path), TOKENS))
    markdown = as_markdown(results, ACCOUNT)
    line = next(line for line in markdown.splitlines() if line.startswith("| parallel |"))
    assert "| 2,250 [" in line and "| 2,632 |" in line and "| 3,200.00 [" in line and "| 1.40× [" in line
    assert "| 100.0 [91.2, 100.0] △ |" in line, "with threads: more, which is neither better nor worse"
    assert "△ higher and ▽ lower" in markdown
    assert "speed-up: tokens of an answer of sequential divided by" in markdown
    latex = next(line for line in as_latex(results).splitlines() if line.startswith("parallel"))
    assert r"1.40$\times$" in latex and r"\,$\triangle$" in latex and "& 2,632 &" in latex
    page = as_html(results, [], ACCOUNT)
    assert "<b>1.40×</b>" in page and "<b>2,250</b>" in page and "2,632" in page
    speed_ups = [cell for cell in as_json(results, ACCOUNT)["cells"] if cell["column"] == "speed-up"]
    sequential = next(cell for cell in speed_ups if cell["called"] is None)
    assert (sequential["row"], sequential["measured"]["mean"]) == ("sequential", 1.0)
    draw_table(results, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_intervals_of_tokens_are_over_seeds_and_problems_like_those_of_accuracy(tmp_path: Path) -> None:
    plan = threaded_plan(tmp_path, seeds=(1,))
    tokens = {key: value for key, value in TOKENS.items() if key[1] == 1}
    cell = measure_cells(count_threads_of_runs(plan, tokens, spread=10.0)).cells["parallel", "longest thread"]
    assert len(cell.seeds[0].by_problem) == fabricated.PROBLEMS
    assert cell.estimate.mean == pytest.approx(2500)
    # 40 problems from −195 to 195: a standard error of 18.
    assert cell.estimate.low == pytest.approx(2500 - 1.96 * 18.25, abs=4)
    # Paired by problem, both rows are 10 tokens longer on every next problem, so that nothing varies.
    assert (cell.difference.low, cell.difference.high) == pytest.approx((-500, -500))
    assert cell.significant_direction == "better", "shorter"


def test_without_the_number_of_one_answer_the_interval_is_over_seeds_alone(tmp_path: Path) -> None:
    plan = count_threads_of_runs(threaded_plan(tmp_path), TOKENS)
    path = plan.run("ppo", 1).directory.evaluation_folder(4, "test") / "answers.jsonl"
    first, *other_lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | {"threads": {LONGEST: None}}), *other_lines]))
    cell = measure_cells(plan).cells["parallel", "longest thread"]
    assert cell.seeds[0].value == 2500 and cell.seeds[0].by_problem is None
    assert cell.estimate.mean == 2250


def test_a_summary_without_threads_is_named_in_the_cell(tmp_path: Path) -> None:
    plan = threaded_plan(tmp_path)
    results = measure_cells(plan)
    cell = results.cells["parallel", "longest thread"]
    assert "no threads counted" in cell.absent[1] and "summary.json" in cell.absent[1]
    assert "| no threads counted |" in as_markdown(results, ACCOUNT)
    plan = count_threads_of_runs(plan, {key: value for key, value in TOKENS.items() if key[0] == "ppo"})
    results = measure_cells(plan)
    assert "no threads counted" in results.cells["parallel", "speed-up"].absent[2], "the other row's"
    summary = plan.run("ppo", 1).directory.evaluation_folder(4, "test") / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"threads": {}}))
    assert (
        measure_cells(plan).cells["parallel", "longest thread"].absent[1].startswith(f"no {LONGEST}: not in")
    )


def test_pass_at_k_is_shown_where_there_are_enough_samples(tmp_path: Path) -> None:
    columns = tuple(MeasuredColumn(name=f"pass@{k}", evaluation="test", value=f"pass_at_{k}") for k in (4, 8))
    rows = tuple(MethodRow(name=row.name, experiment=row.experiment) for row in ROWS)
    plan = threaded_plan(tmp_path, columns=columns, rows=rows)
    for run in plan.runs:
        path = run.directory.evaluation_folder(4, "test") / "summary.json"
        if path.is_file():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"pass_at_k": {"1": 0.5, "4": 0.75}}))
    results = measure_cells(plan)
    assert "| parallel | 75.0 [75.0, 75.0] | no pass_at_8 |" in as_markdown(results, ACCOUNT)


def test_a_panel_draws_any_number_of_an_evaluation_along_training(tmp_path: Path) -> None:
    panels = (
        Panel(name="longest", evaluation="test", value=LONGEST),
        Panel(name="ratio", evaluation="test", value="acceleration_ratio"),
    )
    plan = count_threads_of_runs(threaded_plan(tmp_path, panels=panels), TOKENS)
    assert _measurements_of(plan.table, "ppo") == (("test",), ("test",), ())
    all_curves = make_panel_curves(plan)
    (_, longest) = all_curves
    assert longest.row.name == "parallel" and [point.mean for point in longest.points] == [3100, 2250], (
        "from the start"
    )
    (_, note) = panel_notes(plan, all_curves)
    assert "acceleration_ratio" in note
    assert {curve["value"] for curve in curves_json(all_curves, value="value")} == {LONGEST}
    assert "| parallel | 3,100 → 2,250 [2,000, 2,500] | – |" in as_markdown(
        measure_cells(plan), ACCOUNT, all_curves
    )
    draw_panels(measure_cells(plan), all_curves, [tmp_path / "panels.png"])


def test_mistakes_about_values_are_refused(tmp_path: Path) -> None:
    unknown_row = MeasuredColumn(name="x", evaluation="test", value="speed_up", over="sequentiel")
    column = MeasuredColumn(name="x", evaluation="test", value="speed_up", over="sequential")
    published = MethodRow(name="sequential", cells={"x": CellSource(published=1.0)})
    wrong = MethodRow(name="sequential", experiment="sft", cells={"accuracy": CellSource(value="x")})
    for settings, message in (
        ({"columns": (unknown_row,)}, "did you mean 'sequential'"),
        ({"rows": (published, replace(ROWS[1], cells={})), "columns": (column,)}, "which has no experiment"),
        ({"rows": (wrong,)}, "key path in an analysis"),
    ):
        with pytest.raises(ValueError, match=message):
            threaded_plan(tmp_path, **settings)
