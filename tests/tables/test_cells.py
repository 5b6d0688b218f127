"""Cells of a reproduction's table.

These tests promise:

* A difference is called one only where its interval excludes 0, with seeds paired.
* Each cell, curve and panel shows the number of its source, in every form of the table.
* Costs are counted, launch lines name all that a run needs, and mistakes in a table are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.tables import fabricated
from tests.tables.plans import ACCOUNT, ROWS, config, finish, plan_of
from tests.view.report.page import Page
from treetune.tables.columns import Area, MeasuredColumn, Panel, Reach, Speedup
from treetune.tables.curves import curves_json, make_column_curves, make_panel_curves, panel_notes
from treetune.tables.figures import draw_curves, draw_panels, draw_table
from treetune.tables.launch import Launcher, launch_lines, slurm_script
from treetune.tables.measure import measure_cells
from treetune.tables.runs import TableRuns, _measurements_of, inspect_again
from treetune.tables.settings import CellSource, MethodRow, TableExperiment
from treetune.tables.text import as_latex, as_markdown
from treetune.tables.write import as_html, as_json

LAUNCHER = Launcher(ranks=2, threads=3)
LONGEST = "num_tokens_in_the_longest_thread"


def test_a_difference_is_called_only_where_its_interval_excludes_zero(tmp_path: Path) -> None:
    plan = finish(plan_of(tmp_path), {"ppo": 0.525, "vine": 0.8})
    for seed, share in {1: 0.6, 2: 0.5}.items():  # once above PPO, once below
        fabricated.write_run(config(tmp_path, seed, "sft"), share)
    results = measure_cells(inspect_again(plan))
    sft, vine = results.cells["SFT", "test"], results.cells["Vine_PPO", "test"]
    assert (sft.difference.mean, sft.significant_direction) == (pytest.approx(-0.0125), None)
    assert (vine.difference.mean, vine.significant_direction) == (pytest.approx(0.275), "better")

    markdown, page = as_markdown(results, ACCOUNT), as_html(results, [], ACCOUNT)
    assert "▲" in markdown and "▲" in page and "| Vine_PPO | 83.8 [" in markdown
    assert "| SFT | test | 2 | −1.2 |" in markdown and "| not significant |" in markdown
    line = next(line for line in as_latex(results).splitlines() if line.startswith(r"Vine\_PPO"))
    assert r"$\blacktriangle$" in line and r"& 53.0 & 0, 0 of 2 \\" in line
    cells = {cell["row"]: cell for cell in as_json(results, ACCOUNT)["cells"]}
    called = {row: cell["called"] for row, cell in cells.items()}
    assert called == {"SFT": None, "PPO": None, "Vine_PPO": "better"}
    # A cell names its source.
    first_seed, second_seed = cells["PPO"]["seeds"]
    assert (first_seed["seed"], second_seed["seed"]) == (1, 2) and len(first_seed["config_hash"]) == 32
    assert first_seed["directory"] == str(tmp_path / "seed-1" / "ppo")
    assert (first_seed["value"], first_seed["problems"], first_seed["samples"]) == (
        pytest.approx(0.55),
        40,
        4,
    )


def test_where_lower_is_better_a_higher_value_is_called_worse(tmp_path: Path) -> None:
    columns = (MeasuredColumn(name="test", evaluation="test", better="lower"),)
    results = measure_cells(finish(plan_of(tmp_path, columns=columns), {"ppo": 0.5, "vine": 0.8}))
    assert results.cells["Vine_PPO", "test"].significant_direction == "worse"


def test_seeds_are_paired_so_that_different_starts_make_no_difference(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, seeds=(1, 2, 3))
    for run in plan.runs:
        share = {1: 0.2, 2: 0.5, 3: 0.7}[run.seed] + (0.1 if run.name == "vine" else 0)
        fabricated.write_run(run.config, share)
    cell = measure_cells(inspect_again(plan)).cells["Vine_PPO", "test"]
    assert cell.estimate.mean - cell.estimate.low > 0.2
    assert cell.difference.mean - cell.difference.low < 0.1
    assert cell.significant_direction == "better"


def test_sampled_tokens_steps_and_seconds_are_counted(tmp_path: Path) -> None:
    results = measure_cells(finish(plan_of(tmp_path), {"sft": 0.4, "ppo": 0.5}))
    (cost, _) = results.costs["ppo"]
    # Four iterations of 512 answers of 32 tokens and 4,096 tokens for values; 8 s each without evaluation.
    assert (cost.answers, cost.sampled_tokens) == (4 * 512, 4 * (512 * 32 + 4096))
    assert (cost.gradient_steps, cost.seconds) == (12, 32)
    assert results.costs["sft"][0].answers == 0


def write_validation_curve(plan: TableRuns, name: str, shares: Mapping[int, float]) -> None:
    for run in plan.runs:
        if run.name == name:
            for iteration, share in shares.items():
                folder = run.directory.evaluation_folder(iteration, "validation")
                fabricated.write_answers(
                    folder, share + 0.025 * run.seed, split="validation", iteration=iteration
                )


def test_curves_begin_at_the_start_weights_and_have_mean_and_range(tmp_path: Path) -> None:
    plan = finish(plan_of(tmp_path), {"sft": 0.4, "ppo": 0.6})
    write_validation_curve(plan, "ppo", {2: 0.5})
    by_row = {curve.row.name: curve for curve in make_column_curves(plan)}
    assert [point.iteration for point in by_row["SFT"].points] == [4]
    start, middle, end = by_row["PPO"].points
    assert (start.costs["tokens"], start.mean) == (0, pytest.approx(0.4375))
    assert middle.costs == {"tokens": 2 * (512 * 32 + 4096), "seconds": 16.0, "steps": 6.0}
    assert (middle.low, middle.mean, middle.high) == pytest.approx((0.525, 0.5375, 0.55))
    assert end.iteration == 4


def test_a_speedup_is_taken_where_the_best_value_of_the_other_row_is_reached(tmp_path: Path) -> None:
    speedup = Speedup(of="PPO", over="steps")
    columns = (MeasuredColumn(name="less", speedup=speedup, curve="validation", unit="×"),)
    plan = finish(plan_of(tmp_path, rows=ROWS, columns=columns), {"sft": 0.2, "ppo": 0.6, "vine": 0.8})
    write_validation_curve(plan, "vine", {1: 0.65, 2: 0.7})
    write_validation_curve(plan, "ppo", {2: 0.5})
    results = measure_cells(plan)
    assert results.cells["Vine_PPO", "less"].estimate.mean == pytest.approx(4.0)
    assert "| Vine_PPO | 4× [4×, 4×]" in as_markdown(results, ACCOUNT)
    assert "never as good" in results.cells["SFT", "less"].absent[1]


def test_a_number_of_an_analysis_is_read_with_its_interval(tmp_path: Path) -> None:
    columns = (
        MeasuredColumn(name="error", analysis="values", value="numbers.error", percent=False, better="lower"),
    )
    plan = finish(plan_of(tmp_path, seeds=(1,), rows=ROWS, columns=columns), {"ppo": 0.5, "vine": 0.5})
    result_file = plan.run("ppo", 1).directory.path / "analyses" / "values" / "result.json"
    result_file.parent.mkdir(parents=True)
    result_file.write_text(json.dumps({"numbers": {"error": {"value": 0.11, "low": 0.1, "high": 0.125}}}))
    results = measure_cells(plan)
    assert "| PPO | 0.11 [0.1, 0.125] |" in as_markdown(results, ACCOUNT)
    assert "not analysed" in results.cells["Vine_PPO", "error"].absent[1]
    result_file.write_text(json.dumps({"numbers": {"errors": 1}}))
    assert (
        "no 'numbers.error': instead of 'error' it has errors"
        in measure_cells(plan).cells["PPO", "error"].absent[1]
    )


def test_the_page_is_complete_escapes_names_and_draws_figures_although_cells_are_missing(
    tmp_path: Path,
) -> None:
    rows = (MethodRow(name="a <b> & c", experiment="ppo"), MethodRow(name="d", experiment="vine"))
    plan = finish(plan_of(tmp_path, rows=rows, baseline="d"), {"sft": 0.4, "ppo": 0.5})
    results, all_curves = measure_cells(plan), make_column_curves(plan)
    page = as_html(results, all_curves, ACCOUNT)
    assert Page(page).open == [] and page.count("<figure>") == 4 and "a &lt;b&gt; &amp; c" in page
    assert not re.search(r"https?://|src=|<link|@import|url\(|<script", page), "the page needs no other file"
    draw_table(results, tmp_path / "table.png")
    draw_curves(results, all_curves, [tmp_path / "curves.png", tmp_path / "curves.svg"])
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_curves_are_named_after_the_evaluation_set_that_they_show(tmp_path: Path) -> None:
    """That is seldom the set that the column reports."""
    columns = (MeasuredColumn(name="test pass@1", evaluation="test", curve="validation"),)
    plan = finish(plan_of(tmp_path, columns=columns, rows=ROWS[1:2]), {"sft": 0.4, "ppo": 0.5})
    page = Page(as_html(measure_cells(plan), make_column_curves(plan), ACCOUNT))
    assert page.words.count("pass@1 on validation (%)") == 4 and "pass@1 on test" not in page.words
    figure = draw_curves(measure_cells(plan), make_column_curves(plan), [])
    assert [axes.get_title("left") for axes in figure.axes] == ["pass@1 on validation (%)"] * 4


PANELS = (
    Panel(name="accuracy", evaluation="validation"),
    Panel(name="entropy", metric="train/entropy"),
    Panel(name="length", metric="episodes/response_tokens"),
)


def test_panels_show_any_metric_and_evaluation_along_training(tmp_path: Path) -> None:
    plan = finish(plan_of(tmp_path, panels=PANELS), {"sft": 0.4, "ppo": 0.6})
    write_validation_curve(plan, "ppo", {2: 0.5})
    for run in plan.runs:
        if run.name == "ppo":  # seeds differ by a known factor
            rows = [fabricated.metrics_row(i) | {"train/entropy": run.seed * 0.5**i} for i in range(4)]
            run.directory.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve_by_row_and_panel = {(curve.row.name, curve.panel.name): curve for curve in make_panel_curves(plan)}
    # SFT trained the start weights: they are evaluated, and SFT's own metrics belong to another training.
    assert set(curve_by_row_and_panel) == {("SFT", "accuracy"), *(("PPO", panel.name) for panel in PANELS)}

    entropy, accuracy = curve_by_row_and_panel["PPO", "entropy"], curve_by_row_and_panel["PPO", "accuracy"]
    assert [(point.iteration, point.mean) for point in entropy.points] == [
        (1, 1.5), (2, 0.75), (3, 0.375), (4, 0.1875)
    ]  # fmt: skip
    assert (entropy.points[0].low, entropy.points[0].high) == (1.0, 2.0)
    assert entropy.points[1].by_seed == {1: 0.5, 2: 1.0}
    assert (entropy.xs("iterations"), entropy.xs("steps")) == ([1, 2, 3, 4], [3, 6, 9, 12])
    assert [point.iteration for point in accuracy.points] == [0, 2, 4], "from the start weights on"
    assert accuracy.points[0].mean == pytest.approx(0.4375)

    results, curves_found = measure_cells(plan), list(curve_by_row_and_panel.values())
    markdown = as_markdown(results, ACCOUNT, curves_found, "some_panels.png")
    assert "|  | accuracy (%) | entropy | length |" in markdown
    assert "| PPO | 43.8 → 63.7 [62.5, 65.0] | 1.5 → 0.188 [0.125, 0.25] | 32 → 32 [32, 32] |" in markdown
    assert "| Vine_PPO | – | – | – |" in markdown
    assert "![During training](some_panels.png)" in markdown
    page = as_html(results, [], ACCOUNT, curves_found)
    assert Page(page).open == [] and page.count("<figure>") == 3
    rows_json = curves_json(curves_found, metric="metric")
    entropy_json = next(curve for curve in rows_json if curve["row"] == "PPO" and curve["metric"])
    assert entropy_json["metric"] == "train/entropy" and entropy_json["points"][0]["by_seed"] == {
        "1": 1.0,
        "2": 2.0,
    }
    draw_panels(results, curves_found, [tmp_path / "panels.png", tmp_path / "panels.svg"])
    assert (tmp_path / "panels.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "panels.svg").read_text().count('id="axes_') == 3, "the fourth place is empty"


def test_a_panel_of_a_metric_that_no_run_recorded_has_a_note(tmp_path: Path) -> None:
    panels = (Panel(name="entropy", metric="train/entrpy"),)
    plan = plan_of(tmp_path, panels=panels)
    assert panel_notes(plan, make_panel_curves(plan)) == [], "nothing is finished yet"
    plan = finish(plan, {"ppo": 0.5})
    (note,) = panel_notes(plan, make_panel_curves(plan))
    assert "train/entrpy" in note and "did you mean 'train/entropy'" in note
    assert note in as_markdown(measure_cells(plan), ACCOUNT) and "entrpy" in as_html(
        measure_cells(plan), [], ACCOUNT
    )


def test_the_evaluation_of_a_panel_is_measured_at_every_checkpoint_of_a_row(tmp_path: Path) -> None:
    table = plan_of(tmp_path, panels=PANELS).table
    assert _measurements_of(table, "ppo") == (("test",), ("validation",), ())
    assert _measurements_of(plan_of(tmp_path).table, "ppo") == (("test",), (), ())


@pytest.mark.parametrize(
    "quantity",
    [
        {"speedup": Speedup(of="PPO", over="steps")},
        {"area": Area(over="steps", upto=12)},
        {"reach": Reach(accuracy=0.5, over="steps")},
    ],
)
def test_a_curve_of_which_a_number_is_computed_is_measured_at_every_checkpoint(
    quantity: dict[str, Any], tmp_path: Path
) -> None:
    columns = (MeasuredColumn(name="number", curve="validation", **quantity),)
    plan = plan_of(tmp_path, rows=ROWS, columns=columns)
    assert _measurements_of(plan.table, "ppo") == ((), ("validation",), ())


def test_launch_lines_are_in_order_and_have_the_environment_of_each_run(tmp_path: Path) -> None:
    plan = finish(plan_of(tmp_path), {})
    lines = launch_lines(plan, LAUNCHER)
    assert lines[0].startswith("# now") and lines[3].startswith("# when those above")
    assert len(lines) == 2 + 6
    assert f"APP_SEED=1 APP_DIRECTORY={tmp_path}/seed-1 OMP_NUM_THREADS=3 python -u" in lines[1]
    assert " run --ranks=2 " in lines[1] and lines[1].endswith("--configs sft run_iteration_loop")
    assert """--configs vine --override '{ it: '"'"'is'"'"' }' run_iteration_loop""" in lines[5]
    alone = launch_lines(plan, Launcher(ranks=1, threads=3))
    assert "OMP_NUM_THREADS=3 python -u" in alone[1] and " run " not in "".join(alone)


def test_a_slurm_script_has_the_command_of_each_missing_run_in_waves(tmp_path: Path) -> None:
    lines = slurm_script(plan_of(tmp_path / "runs"), LAUNCHER, tmp_path).splitlines()
    assert "    for wave in 0-1 2-5; do" in lines, "sft in two seeds, and then what starts from it"
    task = lines[lines.index("    3) # vine, seed 1") + 1]
    assert task.startswith("        APP_SEED=1 ") and " run --ranks=2 " in task
    assert task.endswith("run_iteration_loop ;;")
    assert "#SBATCH --gpus-per-node=2" in lines and "#SBATCH --cpus-per-task=6" in lines


CIRCLE = {
    "sft": TableExperiment(configs=("a",), needs=("ppo",)),
    "ppo": TableExperiment(configs=("a",), needs=("sft",)),
    "vine": TableExperiment(configs=("a",)),
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"baseline": "PPPO"}, "did you mean 'PPO'"),
        (
            {"rows": (MethodRow(name="a", experiment="pppo"),), "baseline": None},
            "'pppo' is not one of the table's",
        ),
        ({"rows": (MethodRow(name="a", cells={"tset": CellSource()}),), "baseline": None}, "column 'tset'"),
        ({"seeds": (1, 1)}, "two seeds"),
        ({"panels": (PANELS[0], PANELS[0])}, "two panels"),
        ({"name": "a/b"}, "plain file name"),
        ({"experiments": CIRCLE}, "in a circle"),
    ],
)
def test_mistakes_in_a_table_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(Path("nowhere"), **settings)


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        (MeasuredColumn, {}, "needs one of evaluation"),
        (MeasuredColumn, {"speedup": Speedup(of="a", over="steps")}, "set curve to the name"),
        (Panel, {"metric": "train/loss", "evaluation": "test"}, "needs one of metric"),
        (Panel, {"evaluation": "test", "value": "with_paralel"}, "did you mean 'with_parallel'"),
        (Panel, {"metric": "train/loss", "value": LONGEST}, "there is none"),
        (
            MeasuredColumn,
            {"evaluation": "test", "value": "num_tokens_in_longest_thread"},
            f"did you mean '{LONGEST}'",
        ),
        (MeasuredColumn, {"evaluation": "test", "value": "speed_up"}, "needs the row that it compares with"),
        (MeasuredColumn, {"evaluation": "test", "over": "sequential"}, "needs the row that it compares with"),
        (
            MeasuredColumn,
            {"evaluation": "test", "value": "unfinished", "curve": "test"},
            "draw unfinished in a",
        ),
    ],
)
def test_mistakes_in_a_column_or_panel_are_refused(part: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        part(name="x", **settings)
