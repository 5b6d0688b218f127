"""Tables with `until`: seeds are added until an interval is narrow enough.

These tests promise:

* Rows get seeds until their difference has the requested interval, up to the bound, interrupted or not.
* The intervals hold at all looks at once.
* Declared comparisons are judged by their sequence alone, and a loser gets no further seeds.
* Forks and shared starts run once, before the runs that need them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tables import fabricated
from tests.tables.small_table import FAKE, calls, cells, experiment, show, table
from treetune.config.build import check_root
from treetune.exceptions import ConfigError
from treetune.runtime.directory import ExperimentDirectory
from treetune.tables.check import missing_start_models
from treetune.tables.columns import Area, MeasuredColumn
from treetune.tables.launch import Launcher, launch_lines, reproduce
from treetune.tables.measure import measure_cells
from treetune.tables.runs import TableRuns, make_plan
from treetune.tables.settings import MethodRow, Pair, Reproduction, Seeds, TableExperiment, Until
from treetune.tables.statistics import PRIOR_WEIGHT, confidence_sequence, interval_over_seeds, normal_sequence
from treetune.tables.text import main_grid, until_lines
from treetune.tables.until import DifferenceVerdict, add_needed_seeds, judge_differences

NOISE = (0.0, 0.2, 0.05, 0.15, 0.1, 0.12, 0.08, 0.11)
"""The difference of PPO's share from GRPO's, for each seed."""


def table_until_narrow(
    directory: Path, difference: float, at_most: int | None = None, **changed: Any
) -> Reproduction:
    until = Until(difference=difference, bound=0.25, rows=("PPO",), seeds=Seeds(at_least=3, at_most=at_most))
    settings: dict[str, Any] = {"seeds": tuple(range(1, 9)), "baseline": "GRPO", "until": until}
    return check_root(table(directory, **(settings | changed)))


def fill(plan: TableRuns) -> TableRuns:
    """Finishes every run of the plan, and adds the seeds that are needed then."""
    for run in plan.runs:
        if plan.statuses[run.key].state == "missing":
            share = 0.4 + (NOISE[run.seed - 1] if run.name == "ppo" else 0.0)
            assert run.config is not None
            fabricated.write_run(run.config, share)
    return add_needed_seeds(make_plan(plan.table))


def fill_until_done(table_until: Reproduction) -> TableRuns:
    plan = add_needed_seeds(make_plan(table_until))
    while len((next_plan := fill(plan)).runs) > len(plan.runs):
        plan = next_plan
    return next_plan


def seeds(plan: TableRuns) -> Mapping[str, list[int]]:
    return {name: [run.seed for run in plan.runs_of(name)] for name in ("sft", "ppo", "grpo")}


def test_seeds_are_added_until_the_interval_of_the_listed_rows_is_narrow(tmp_path: Path) -> None:
    plan = fill_until_done(table_until_narrow(tmp_path, 0.15))
    (verdict,) = judge_differences(plan)
    assert verdict.reason == "narrow"
    assert 3 < verdict.seeds < 8
    assert verdict.known is not None and (verdict.known.half_width or 1) <= 0.15
    # With one seed fewer, the interval was too wide.
    before = TableRuns(plan.table, [run for run in plan.runs if run.seed < verdict.seeds], plan.statuses)
    (earlier,) = judge_differences(before)
    assert earlier.next_seed == verdict.seeds
    assert earlier.known is not None and (earlier.known.half_width or 0) > 0.15
    all_seeds = list(range(1, verdict.seeds + 1))
    assert seeds(plan) == {"sft": all_seeds, "ppo": all_seeds, "grpo": all_seeds}


def test_other_rows_have_the_seeds_that_all_rows_have(tmp_path: Path) -> None:
    plan = fill_until_done(table_until_narrow(tmp_path, 0.15, baseline="SFT"))
    assert len(plan.runs_of("ppo")) > 3
    assert seeds(plan)["grpo"] == [1, 2, 3]


def test_at_most_bounds_the_number_of_seeds(tmp_path: Path) -> None:
    plan = fill_until_done(table_until_narrow(tmp_path, 0.16, at_most=5))
    (verdict,) = judge_differences(plan)
    assert (verdict.reason, verdict.seeds) == ("at_most", 5)
    assert verdict.known is not None and (verdict.known.half_width or 1) > 0.16


def test_further_finished_seeds_change_nothing(tmp_path: Path) -> None:
    """A narrower interval may have been requested before."""
    fill_until_done(table_until_narrow(tmp_path, 0.13))
    later = add_needed_seeds(make_plan(table_until_narrow(tmp_path, 0.15)))
    fresh = fill_until_done(table_until_narrow(tmp_path / "fresh", 0.15))
    assert judge_differences(later) == judge_differences(fresh)
    assert seeds(later) == seeds(fresh)


def test_the_result_of_a_run_that_runs_now_is_still_to_come(tmp_path: Path) -> None:
    table_until = table_until_narrow(tmp_path, 0.15)
    fill(add_needed_seeds(make_plan(table_until)))
    next(tmp_path.glob("seed-2/quickstart/ppo/evaluations")).rename(tmp_path / "not measured yet")
    with ExperimentDirectory(tmp_path / "seed-2" / "quickstart" / "ppo").locked("run"):
        (verdict,) = judge_differences(make_plan(table_until))
    assert verdict.reason == "more" and verdict.seeds == 1


def test_a_run_without_a_result_ends_the_search_and_is_named(tmp_path: Path) -> None:
    table_until = table_until_narrow(tmp_path, 0.15)
    fill(add_needed_seeds(make_plan(table_until)))
    (stored,) = tmp_path.glob("seed-2/quickstart/ppo/config.json")
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"iterations": 7, "context_length": 1}))
    (verdict,) = judge_differences(add_needed_seeds(make_plan(table_until)))
    assert verdict == DifferenceVerdict("PPO", "GRPO", 2, "lacking", verdict.known)


def test_one_command_runs_all_needed_seeds_and_a_second_one_runs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APP_FAKE_SHARES", json.dumps({"ppo": 0.6}))
    table_until = table_until_narrow(tmp_path, 0.15)
    assert reproduce(table_until, show, FAKE, at_once=2) == 0
    finished_calls = sorted(calls(tmp_path))
    (verdict,) = judge_differences(add_needed_seeds(make_plan(table_until)))
    assert verdict.reason == "narrow"
    expected = [f"{name}:{seed}" for name in ("grpo", "ppo", "sft") for seed in range(1, verdict.seeds + 1)]
    assert finished_calls == expected
    assert reproduce(table_until, show, FAKE, at_once=2) == 0
    assert calls(tmp_path) == []


def test_the_interval_that_ends_the_search_holds_although_some_runs_collapse() -> None:
    """The difference is 0.1, but −0.35 in one of ten runs: 0.055 on average."""
    generator = np.random.default_rng(21)
    covered, covered_by_student, searches = 0, 0, 100
    for _ in range(searches):
        noise = generator.normal(0, 0.02, 64)
        differences = np.where(generator.random(64) < 0.1, -0.35, 0.1) + noise
        for count in range(8, 65, 4):
            interval = confidence_sequence(differences[:count].tolist(), bound=0.5)
            assert interval.low is not None and interval.high is not None
            if interval.high - interval.low <= 2 * 0.12:
                break
        covered += interval.low <= 0.055 <= interval.high
        student_interval = interval_over_seeds(differences[:8].tolist(), "student")
        assert student_interval.low is not None and student_interval.high is not None
        covered_by_student += student_interval.low <= 0.055 <= student_interval.high
    assert covered >= 0.95 * searches
    assert covered_by_student < 0.7 * searches


@pytest.mark.parametrize("chance", [0.02, 0.3])
def test_the_confidence_sequence_holds_at_all_looks_at_once(chance: float) -> None:
    generator = np.random.default_rng(3)
    misses = 0
    for _ in range(60):
        values = generator.choice([-1.0, 1.0], p=[chance, 1 - chance], size=40)
        intervals = [confidence_sequence(values[:count].tolist(), bound=1.0) for count in range(4, 41, 6)]
        misses += any(not interval.low <= 1 - 2 * chance <= interval.high for interval in intervals)  # type: ignore[operator]
    assert misses <= 3


def test_the_normal_sequence_holds_at_all_looks_at_once_and_students_interval_does_not() -> None:
    from scipy.stats import t

    generator = np.random.default_rng(5)
    misses, misses_by_student, streams = 0, 0, 150
    for _ in range(streams):
        values = generator.normal(0.3, 2.0, 40).tolist()
        intervals = [normal_sequence(values[:count]) for count in range(2, 41)]
        misses += any(
            interval.low is not None and not interval.low <= 0.3 <= interval.high for interval in intervals
        )  # type: ignore[operator]
        student_intervals = [
            np.mean(values[:count])
            + np.array([-1, 1]) * t.ppf(0.975, count - 1) * np.std(values[:count], ddof=1) / count**0.5
            for count in range(2, 41)
        ]
        misses_by_student += any(not low <= 0.3 <= high for low, high in student_intervals)
    assert misses <= 0.05 * streams
    assert misses_by_student > 0.2 * streams


@pytest.mark.parametrize("count", [5, 8, 20])
@pytest.mark.parametrize("level", [0.95, 1 - 0.05 / 3])
def test_the_normal_sequence_ends_where_the_mixture_of_t_densities_has_the_critical_ratio(
    count: int, level: float
) -> None:
    from scipy.integrate import quad
    from scipy.stats import nct, norm, t

    values = np.random.default_rng(2).normal(0, 1, count)
    interval = normal_sequence(values.tolist(), level)
    assert interval.half_width is not None
    t_value = interval.half_width / (values.std(ddof=1) / count**0.5)
    prior = norm(0, PRIOR_WEIGHT**-0.5)
    mixture, _ = quad(lambda d: nct.pdf(t_value, count - 1, d * count**0.5) * prior.pdf(d), -8, 12, limit=200)
    assert mixture / t.pdf(t_value, count - 1) == pytest.approx(1 / (1 - level), rel=1e-3)


def test_numbers_without_a_measurable_spread_have_no_bounds() -> None:
    assert normal_sequence([0.4]).low is normal_sequence([0.4] * 9).low is normal_sequence([0, 1]).low is None


def test_a_difference_beyond_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.6 is outside of ±0\.5: set `bound`"):
        confidence_sequence([0.1, 0.6], bound=0.5)


@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0])
def test_the_confidence_sequence_of_equal_numbers_contains_them(value: float) -> None:
    interval = confidence_sequence([value] * 30, bound=1.0)
    assert interval.low is not None and interval.high is not None
    assert -1 <= interval.low <= interval.mean == value <= interval.high <= 1
    assert interval.high - interval.low < 0.4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": None}, "the table has none"),
        ({"comparisons": (Pair(row="PPO", to="GRPO"),)}, "there are both"),
        ({"comparisons": (Pair(row="PPO", to="GRPO"),), "until": None}, "the table has no `until`"),
        ({"experiments": {"ppo": experiment("ppo", fork="grpo")}, "rows": ()}, "is not in its needs"),
        ({"baseline": "PPO"}, "the baseline is one of its rows"),
        ({"seeds": (1, 2)}, "asks for 3 to"),
        (
            {"until": Until(difference=0.1, rows=("PPO",), seeds=Seeds(at_least=3))},
            "half-width of 0.47",
        ),
        ({"baseline": "SFT", "until": Until(difference=1, rows=("POP",), seeds=Seeds(at_least=2))}, "no row"),
        (
            {"until": Until(difference=1, rows=("PPO",), seeds=Seeds(at_least=2), column="tset")},
            "did you mean",
        ),
        (
            {"rows": (MethodRow(name="GRPO", experiment="grpo"), MethodRow(name="PPO"))},
            "the row 'PPO' in column 'test', where it has no experiment",
        ),
    ],
)
def test_an_impossible_search_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table_until_narrow(tmp_path, 0.1, **changes)


def table_with_declared_pair(
    directory: Path, difference: float, *, stop_losers: bool = False, **changed: Any
) -> Reproduction:
    """Returns a table that compares PPO with GRPO, and no other rows."""
    seeds = Seeds(at_least=4, at_most=8)
    until = Until(difference=difference, assume="normal", seeds=seeds, stop_losers=stop_losers)
    settings: dict[str, Any] = {"comparisons": (Pair(row="PPO", to="GRPO"),), "until": until}
    return check_root(
        table(directory, **({"seeds": tuple(range(1, 9)), "baseline": "SFT"} | settings | changed))
    )


def test_only_declared_comparisons_are_called_better_and_by_their_sequence(tmp_path: Path) -> None:
    plan = fill_until_done(table_with_declared_pair(tmp_path, 0.125))
    (verdict,) = judge_differences(plan)
    assert (verdict.row, verdict.to, verdict.reason) == ("PPO", "GRPO", "narrow")
    assert 4 <= verdict.seeds < 8
    results = measure_cells(plan)
    (pair,) = results.pairs
    assert (pair.declared, pair.significant_direction, pair.p, results.comparisons) == (True, None, None, 1)
    assert pair.difference == verdict.known
    wide = fill_until_done(table_with_declared_pair(tmp_path / "wide", 0.01))
    assert judge_differences(wide)[0].reason == "at_most"
    assert measure_cells(wide).pairs[0].significant_direction == "better"
    # This difference is larger than that of any two seeds, but the comparison was not declared.
    against_the_start = measure_cells(wide).cells["PPO", "test"].comparison_to_baseline
    assert against_the_start is not None and against_the_start.significant_direction is None


def test_while_seeds_run_the_table_reports_the_interval_and_the_cost_of_further_seeds(
    tmp_path: Path,
) -> None:
    table_until = table_with_declared_pair(tmp_path, 0.15)
    plan = fill(add_needed_seeds(make_plan(table_until)))
    for run in plan.runs:
        if run.name != "sft" and plan.statuses[run.key].state == "finished":
            run.record.parent.mkdir(parents=True, exist_ok=True)
            run.record.write_text(json.dumps({"attempts": [{"seconds": 1800.0, "exit_code": 0}]}))
        if run.name == "sft":
            run.record.parent.mkdir(parents=True, exist_ok=True)
            run.record.write_text(json.dumps({"attempts": [{"seconds": 600.0, "exit_code": 0}]}))
    (verdict,) = judge_differences(plan)
    assert verdict.reason == "more" and verdict.further is not None
    line = until_lines(plan)[-1]
    assert line.startswith("PPO − GRPO: difference +10.0 ± ") and "after 4 seeds" in line
    hours = verdict.further * 4200 / 3600
    assert f"{verdict.further} more seeds, about {hours:.1f} h" in line and "of runs, until ± 15.0." in line


def test_a_loser_gets_no_further_seeds(tmp_path: Path) -> None:
    def verdict(stop_losers: bool) -> DifferenceVerdict:
        pairs = (Pair(row="GRPO", to="PPO"),)
        seeds = (4, 5, 6, 7, 8, 3, 1, 2)
        table_until = table_with_declared_pair(
            tmp_path / str(stop_losers), 0.01, stop_losers=stop_losers, comparisons=pairs, seeds=seeds
        )
        return judge_differences(fill_until_done(table_until))[0]

    stopped = verdict(stop_losers=True)
    assert stopped.reason == "loses" and stopped.seeds < 8
    assert verdict(stop_losers=False).reason == "at_most"


def test_the_area_under_the_curve_can_be_compared(tmp_path: Path) -> None:
    columns = (
        MeasuredColumn(name="test", evaluation="test"),
        MeasuredColumn(name="area", area=Area(over="steps", upto=6), curve="validation"),
    )
    until = Until(difference=1, assume="normal", seeds=Seeds(at_least=3, at_most=8), column="area")
    table_until = table_with_declared_pair(tmp_path, 0.1, columns=columns, until=until)
    plan = add_needed_seeds(make_plan(table_until))
    fill(plan)
    for run in plan.runs:
        if run.name != "sft":
            fabricated.write_answers(
                run.directory.evaluation_folder(0, "validation"), 0.2, split="validation"
            )
    (verdict,) = judge_differences(add_needed_seeds(make_plan(table_until)))
    assert verdict.reason == "narrow" and verdict.known is not None
    # The shares of the test set differ by 0.083 on average. The area starts from equal shares: half of it.
    assert verdict.known.mean == pytest.approx(np.mean(NOISE[:3]) / 2, abs=0.005)


def test_failed_and_collapsed_runs_are_counted_in_a_column(tmp_path: Path) -> None:
    plan = fill_until_done(table_until_narrow(tmp_path, 0.15))
    first = plan.runs_of("ppo")[0]
    fabricated.write_answers(
        first.directory.evaluation_folder(1, "validation"), 0.99, split="validation", iteration=1
    )
    second = plan.runs_of("grpo")[1]
    (second.directory.checkpoint_folder(second.iterations) / "state.json").unlink()
    second.record.parent.mkdir(parents=True, exist_ok=True)
    second.record.write_text(json.dumps({"attempts": [{"command": "run_iteration_loop", "exit_code": 1}]}))
    results = measure_cells(make_plan(plan.table))
    grid = main_grid(results)
    cells = dict(zip(grid[""], grid["failed, collapsed"], strict=True))
    assert cells == {"SFT": "0, 0 of 3", "PPO": "0, 1 of 3", "GRPO": "1, 0 of 3"}


def table_with_fork(directory: Path) -> Reproduction:
    experiments = table(directory).experiments | {
        "ppo": experiment("ppo", needs=("grpo",), fork="grpo", seconds_per_iteration=30.0)
    }
    return check_root(table(directory, experiments=experiments))


def test_a_fork_starts_from_the_run_of_its_own_seed_and_goes_on(tmp_path: Path) -> None:
    lines = launch_lines(make_plan(table_with_fork(tmp_path)), FAKE)
    (line,) = [line for line in lines if "/seed-2" in line and " fork " in line]
    assert f" fork {tmp_path}/seed-2/quickstart/grpo && " in line and line.endswith("run_iteration_loop")
    assert reproduce(table_with_fork(tmp_path), show, FAKE) == 0
    assert [call for call in calls(tmp_path) if call.startswith("ppo")] == [
        "ppo:1 fork", "ppo:1", "ppo:2 fork", "ppo:2"
    ]  # fmt: skip


def table_with_shared_start(directory: Path, **changed: Any) -> Reproduction:
    start_model = directory / "shared/quickstart/sft/checkpoints/last/policy"
    from_shared_start = f"{{ model+: {{ name_or_path: '{start_model}' }} }}"
    experiments = {"sft": experiment("sft", shared=True)}
    for name, recipe in table(directory).experiments.items():
        if name != "sft":
            experiments[name] = replace(recipe, overrides=(*recipe.overrides, from_shared_start))
    return table(directory, seeds=(3, 4), experiments=experiments, **changed)


def test_a_shared_start_is_trained_once_and_used_by_every_seed(tmp_path: Path) -> None:
    assert reproduce(table_with_shared_start(tmp_path), show, FAKE) == 0
    assert calls(tmp_path) == ["sft:1", "ppo:3", "grpo:3", "ppo:4", "grpo:4"]
    assert (tmp_path / "shared/quickstart/sft/metrics.jsonl").is_file()
    cells_by_row = cells(tmp_path)
    assert [seed_cell["seed"] for seed_cell in cells_by_row["SFT"]["seeds"]] == [1]
    # Each seed is compared with the shared start: 0.5 + 0.02 seed, minus 0.52.
    assert cells_by_row["PPO"]["difference"]["mean"] == pytest.approx(0.05, abs=0.005)


def test_experiments_find_a_shared_start_under_the_folder_of_their_seed(tmp_path: Path) -> None:
    experiments = dict(table(tmp_path).experiments) | {"sft": experiment("sft", shared=True)}
    experiments["grpo"] = replace(experiments["grpo"], needs=())
    plan = make_plan(table(tmp_path, seeds=(3, 4), experiments=experiments))
    start_model = str(tmp_path / "shared/quickstart/sft/checkpoints/last/policy")
    for seed in (3, 4):
        config = plan.run("ppo", seed).config
        assert config is not None and config["model"]["name_or_path"] == start_model
    # The command line of the run has the same override.
    assert start_model in " ".join(Launcher(ranks=1, threads=1).command(plan.run("ppo", 4), "run"))
    [issue] = missing_start_models(plan)
    assert issue.key == "experiments.grpo"
    assert issue.remedy == "sft of this table trains it: write needs: ['sft']"


def test_a_shared_experiment_cannot_need_one_that_each_seed_has_for_itself(tmp_path: Path) -> None:
    experiments: Mapping[str, TableExperiment] = table(tmp_path).experiments | {
        "ppo": experiment("ppo", needs=("sft",), shared=True)
    }
    with pytest.raises(ConfigError, match="each seed has its own 'sft'"):
        check_root(table(tmp_path, experiments=experiments))


def test_a_run_waits_for_the_runs_that_it_needs_although_others_run_at_once(tmp_path: Path) -> None:
    assert reproduce(table_with_shared_start(tmp_path), show, FAKE, at_once=4) == 0
    first, *later_calls = calls(tmp_path)
    assert (first, sorted(later_calls)) == ("sft:1", ["grpo:3", "grpo:4", "ppo:3", "ppo:4"])
