"""Statistics of tables: intervals, tests of differences, Holm's correction, and numbers of curves.

These tests promise:

* Intervals of seeds, problems and shares cover the true value as often as stated.
* A difference is found by chance as seldom as its level says, also among many comparisons.
* Areas and costs of curves are those of their definitions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.tables import fabricated
from tests.tables.plans import ACCOUNT, ROWS, config, plan_of
from treetune.exceptions import NotReached
from treetune.lab.paired import compare_pairs
from treetune.tables import measure as measure_module
from treetune.tables.columns import Area, MeasuredColumn, Reach
from treetune.tables.curves import area_under, cost_to_reach
from treetune.tables.measure import CellResult, Comparison, measure_cells
from treetune.tables.runs import TableRuns, inspect_again
from treetune.tables.settings import MethodRow, Pair, TableExperiment
from treetune.tables.statistics import (
    holm,
    interval_of_shares,
    interval_over_seeds,
    interval_over_seeds_and_problems,
    widening_factor,
)
from treetune.tables.text import as_markdown
from treetune.tables.write import as_json


def by_problem(matrix_SP: np.ndarray) -> list[dict[str, float]]:
    return [{str(number): float(value) for number, value in enumerate(row)} for row in matrix_SP]


def test_the_interval_of_a_single_seed_is_that_of_its_problems() -> None:
    estimate = interval_over_seeds_and_problems(by_problem(np.arange(400).reshape(1, 400) % 2))
    # The mean of 400 coins has a standard deviation of 0.5 / 20.
    half = 1.96 * 0.025
    assert estimate.mean == 0.5
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.004)


def test_problems_that_all_seeds_share_do_not_average_out_over_seeds() -> None:
    problems = np.tile([0.1, 0.9], 50)
    of_one_seed, of_five_seeds = (
        interval_over_seeds_and_problems(by_problem(np.tile(problems, (seeds, 1)))) for seeds in (1, 5)
    )
    assert of_five_seeds.mean - of_five_seeds.low == pytest.approx(
        of_one_seed.mean - of_one_seed.low, rel=0.05
    )


def test_many_seeds_have_the_normal_interval_of_their_mean() -> None:
    generator = random.Random(1)
    effects = [generator.gauss(0, 0.1) for _ in range(60)]
    estimate = interval_over_seeds(effects)
    error = float(np.std(effects, ddof=1)) / 60**0.5
    expected = (estimate.mean - 1.96 * error, estimate.mean + 1.96 * error)
    assert (estimate.low, estimate.high) == pytest.approx(expected, abs=0.1 * error)


@pytest.mark.parametrize(("kind", "least", "most"), [("student", 0.92, 1.0), ("bootstrap", 0.72, 0.90)])
def test_student_intervals_of_three_seeds_cover_the_true_value_more_often_than_bootstrap_ones(
    kind: str, least: float, most: float
) -> None:
    generator, hits = random.Random(7), 0
    for _ in range(400):
        estimate = interval_over_seeds([generator.gauss(0, 1) for _ in range(3)], kind)  # type: ignore[arg-type]
        hits += estimate.low <= 0 <= estimate.high
    assert least < hits / 400 < most


def test_the_interval_of_a_share_ends_at_0_and_1() -> None:
    estimate = interval_over_seeds([0.9, 0.99, 0.8], "student")
    inside = estimate.within(0.0, 1.0)
    assert estimate.high > 1
    assert (inside.mean, inside.low, inside.high) == (estimate.mean, estimate.low, 1.0)


def test_without_seeds_or_problems_to_vary_there_is_no_interval() -> None:
    estimate = interval_over_seeds([0.25])
    assert (estimate.mean, estimate.low, estimate.high) == (0.25, None, None)
    assert not estimate.excludes_zero
    with pytest.raises(ValueError, match="different problems"):
        interval_over_seeds_and_problems([{"a": 1.0}, {"b": 1.0}])


@pytest.mark.parametrize(("seeds", "quantile"), [(2, 12.706), (3, 4.303), (21, 2.086), (10**6, 1.960)])
def test_few_seeds_are_stretched_by_quantiles_of_students_t(seeds: int, quantile: float) -> None:
    """97.5 % quantiles, from any printed table."""
    factor = widening_factor(seeds, "student") / widening_factor(seeds, "bootstrap")
    assert factor * 1.959964 == pytest.approx(quantile, abs=6e-4)


def test_the_interval_of_a_share_of_0_reaches_above_0() -> None:
    estimate = interval_of_shares(by_problem(np.zeros((3, 30))), "student")
    assert (estimate.mean, estimate.low, estimate.high) == (0.0, 0.0, pytest.approx(0.1135, abs=1e-4))


def test_the_interval_of_one_seeds_share_of_thirty_problems_covers_the_true_share() -> None:
    generator, covered = random.Random(3), 0
    for _ in range(400):
        estimate = interval_of_shares(
            [{str(number): float(generator.random() < 0.05) for number in range(30)}]
        )
        covered += estimate.low <= 0.05 <= estimate.high
    assert covered / 400 > 0.93


def test_shares_of_several_seeds_that_vary_have_the_interval_of_seeds_and_problems() -> None:
    generator = random.Random(1)
    values = [{str(number): float(generator.random() < 0.5) for number in range(40)} for _ in range(3)]
    assert interval_of_shares(values, "student") == interval_over_seeds_and_problems(values, "student")


def holm_step_by_step(p_values: Sequence[float], level: float) -> list[bool]:
    """Carries out Holm's procedure step by step, until a p-value is not below its bound."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def test_holms_correction_is_that_of_a_worked_example_and_of_his_procedure() -> None:
    # The products are 0.01 · 4, 0.015 · 3, 0.03 · 2 and 0.04 · 1. The last is raised to the one before.
    assert holm([0.03, 0.01, 0.04, 0.015]) == pytest.approx([0.06, 0.04, 0.06, 0.045])
    assert (holm([0.9, 0.6]), holm([])) == ([1.0, 1.0], [])
    generator = np.random.default_rng(1)
    for count in (1, 2, 5, 12):
        for _ in range(50):
            p_values = list(generator.uniform(0, 1, count) ** 4)
            for level in (0.01, 0.05, 0.2):
                assert [p <= level for p in holm(p_values)] == holm_step_by_step(p_values, level)


@pytest.mark.parametrize("shape", [(1, 40), (8, 1)], ids=["one seed", "a number a seed"])
def test_if_only_seeds_or_only_problems_vary_the_test_is_students(shape: tuple[int, int]) -> None:
    values = np.random.default_rng(2).normal(0.1, 0.3, shape)
    assert compare_pairs(by_problem(values))[2] == pytest.approx(stats.ttest_1samp(values.ravel(), 0).pvalue)


def test_if_both_vary_the_test_is_the_quasi_f_of_two_crossed_random_effects() -> None:
    """Against sums written out for three seeds and four problems."""
    values = np.array([[0.1, 0.4, 0.0, 0.3], [0.2, 0.9, 0.1, 0.2], [0.5, 0.6, 0.4, 0.9]])
    mean = values.mean()
    seeds = 4 * sum((row.mean() - mean) ** 2 for row in values) / 2
    problems = 3 * sum((column.mean() - mean) ** 2 for column in values.T) / 3
    residuals = [
        values[s, p] - values[s].mean() - values[:, p].mean() + mean for s in range(3) for p in range(4)
    ]
    residual_mean_square = sum(residual**2 for residual in residuals) / 6
    spread = seeds + problems - residual_mean_square
    degrees = spread**2 / (seeds**2 / 2 + problems**2 / 3 + residual_mean_square**2 / 6)
    t = mean / math.sqrt(spread / 12)
    assert spread > max(seeds, problems)
    assert compare_pairs(by_problem(values))[2] == pytest.approx(2 * stats.t.sf(t, degrees))


def test_without_a_difference_one_is_found_as_seldom_as_the_level_says() -> None:
    """Eight seeds and sixty problems vary, and there is no difference."""
    generator, tries, significant = np.random.default_rng(4), 600, 0
    for _ in range(tries):
        values = generator.normal(0, 0.05, (8, 1)) + generator.normal(0, 0.15, (1, 60))
        significant += compare_pairs(by_problem(values + generator.normal(0, 0.4, (8, 60))))[2] < 0.05
    assert 0.02 < significant / tries < 0.075  # of 600: 0.05 ± 2.9 standard errors


def test_values_that_do_not_vary_are_no_difference_or_a_certain_one() -> None:
    p_values = [
        compare_pairs(by_problem(values))[2]
        for values in (np.zeros((3, 5)), np.ones((3, 5)), np.ones((1, 1)))
    ]
    assert p_values == [1.0, 0.0, None]


def plan_of_many_methods(base: Path, rows: int) -> TableRuns:
    """Returns a plan of PPO and of methods that are all better by the same amounts, on five seeds."""
    names = [f"m{number}" for number in range(rows)]
    plan = plan_of(
        base,
        seeds=(1, 2, 3, 4, 5),
        experiments={name: TableExperiment(configs=(name,)) for name in ("ppo", *names)},
        rows=tuple(MethodRow(name=name.upper(), experiment=name) for name in ("ppo", *names)),
        pairs=(Pair(row="M1", to="M0"),),
    )
    for run in plan.runs:
        lead = {1: 0.14, 2: 0.01, 3: 0.1, 4: 0.03, 5: 0.12}[run.seed] if run.name != "ppo" else 0.0
        fabricated.write_run(config(base, run.seed, run.name), 0.5 + lead)
    return inspect_again(plan)


def test_a_difference_between_two_methods_is_none_among_twenty_and_declared_pairs_are_counted(
    tmp_path: Path,
) -> None:
    few, several = (
        measure_cells(plan_of_many_methods(tmp_path / "few", 2)),
        measure_cells(plan_of_many_methods(tmp_path / "several", 20)),
    )
    among_two, among_twenty = (
        results.cells["M1", "test"].comparison_to_baseline for results in (few, several)
    )
    assert among_two.p == among_twenty.p < 0.05 < among_twenty.adjusted
    assert among_two.difference.excludes_zero and among_twenty.difference.excludes_zero
    assert (few.comparisons, several.comparisons) == (3, 21)
    assert (among_two.significant_direction, among_twenty.significant_direction) == (
        None if 2 * among_two.p >= 0.05 else "better",
        None,
    )
    text = as_markdown(several, ACCOUNT)
    assert "Holm's correction for 21 comparisons" in text
    assert "▲ better" in text and "better ▲ |" not in text
    (pair,) = few.pairs
    assert (pair.row, pair.to, pair.seeds, pair.difference.mean, pair.significant_direction) == (
        "M1",
        "M0",
        5,
        0.0,
        None,
    )
    assert "## Further differences" in as_markdown(few, ACCOUNT)
    assert as_json(few, ACCOUNT)["pairs"][0]["p_holm"] == 1.0


def test_holms_correction_counts_only_comparisons_with_a_p_value_and_keeps_every_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = measure_module._compare

    def compare_some(table: Any, cell: CellResult, other_cell: CellResult) -> Comparison | None:
        if cell.row.name == "M1":
            raise ValueError(f"other problems than {other_cell.row.name}")
        comparison = compare(table, cell, other_cell)
        return replace(comparison, p=None) if cell.row.name == "M0" else comparison

    plan = plan_of_many_methods(tmp_path, 4)
    monkeypatch.setattr(measure_module, "_compare", compare_some)
    results = measure_cells(plan)
    p_values = {
        name: cell.comparison_to_baseline.p
        for (name, _), cell in results.cells.items()
        if cell.comparison_to_baseline is not None
    }
    assert [name for name, p in p_values.items() if p is None] == ["M0"]
    assert results.comparisons == 2
    assert results.cells["M1", "test"].notes == ("other problems than PPO", "other problems than M0")


CURVE = [(0.0, 0.2), (100.0, 0.4), (300.0, 0.6)]


@pytest.mark.parametrize(
    ("upto", "area"),
    [
        (300.0, (100 * 0.3 + 200 * 0.5) / 300),
        (100.0, 0.3),
        (200.0, (100 * 0.3 + 100 * 0.45) / 200),
        (400.0, (100 * 0.3 + 200 * 0.5 + 100 * 0.6) / 400),
    ],
)
def test_the_area_is_the_mean_accuracy_with_the_last_one_held(upto: float, area: float) -> None:
    assert area_under(CURVE, upto) == pytest.approx(area)
    assert area_under([(0.0, 0.3)], upto) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="start model"):
        area_under(CURVE[1:], upto)


@pytest.mark.parametrize(
    ("accuracy", "cost"), [(0.2, 0.0), (0.1, 0.0), (0.3, 50.0), (0.4, 100.0), (0.5, 200.0)]
)
def test_the_cost_of_an_accuracy_is_that_at_which_the_curve_first_reaches_it(
    accuracy: float, cost: float
) -> None:
    assert cost_to_reach(CURVE, accuracy) == pytest.approx(cost)
    falling = [*CURVE, (400.0, 0.1), (500.0, 0.9)]
    assert cost_to_reach(falling, accuracy) == pytest.approx(cost)
    with pytest.raises(NotReached, match=r"0\.600 at best"):
        cost_to_reach(CURVE, 0.61)


def test_areas_and_costs_of_curves_fill_cells(tmp_path: Path) -> None:
    """Four iterations of 20,480 tokens, from 0.4 to 0.6 and a little by seed."""
    columns = (
        MeasuredColumn(name="area", area=Area(over="tokens", upto=81_920), curve="validation"),
        MeasuredColumn(name="to 50 %", reach=Reach(accuracy=0.5, over="tokens"), curve="validation"),
        MeasuredColumn(name="to 62 %", reach=Reach(accuracy=0.64, over="tokens"), curve="validation"),
    )
    plan = plan_of(tmp_path, columns=columns, rows=ROWS)
    for run in plan.runs:
        share = {"sft": 0.4, "ppo": 0.6, "vine": 0.7}[run.name]
        fabricated.write_run(config(tmp_path, run.seed, run.name), share + 0.025 * run.seed)
    results = measure_cells(inspect_again(plan))
    areas, reached = (
        [seed.value for seed in results.cells["PPO", column].seeds] for column in ("area", "to 50 %")
    )
    assert areas == pytest.approx([0.525, 0.55])
    assert reached == pytest.approx([81_920 * 0.075 / 0.2, 81_920 * 0.05 / 0.2])
    assert results.cells["Vine_PPO", "area"].difference.mean == pytest.approx(0.05)
    not_reached = results.cells["PPO", "to 62 %"]
    assert not_reached.estimate is None and not_reached.difference is None
    text = as_markdown(results, ACCOUNT)
    assert "reached by 1 of 2 seeds" in text and "| SFT | 43.8 [" in text
    assert "| not reached |" in text.split("\n## ")[0], "SFT"
