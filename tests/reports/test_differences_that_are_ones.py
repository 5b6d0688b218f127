"""A difference that isn't one is not called one: paired tests, and Holm's correction for their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tests.reports import fabricated
from tests.reports.plans import ACCOUNT, config, plan_of
from treetune_tables.columns import Area, Column, Reach
from treetune_tables.curves import NotReached, area_under, cost_to_reach
from treetune_tables.measure import measure
from treetune_tables.runs import Plan, refreshed
from treetune_tables.settings import MethodRow, Pair, TableExperiment
from treetune_tables.statistics import holm, paired_test
from treetune_tables.text import as_markdown
from treetune_tables.write import as_json


def by_problem(matrix_SP: np.ndarray) -> list[dict[str, float]]:
    return [{str(place): float(value) for place, value in enumerate(row)} for row in matrix_SP]


def plain_holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Holm's procedure as he gives it: step by step, until one is not below its bound."""
    rejected = [False] * len(p_values)
    for rank, place in enumerate(np.argsort(p_values, kind="stable")):
        if p_values[place] > level / (len(p_values) - rank):
            break
        rejected[place] = True
    return rejected


def test_holms_correction_is_that_of_a_worked_example() -> None:
    # 0.01 · 4, 0.015 · 3, then 0.03 · 2, and 0.04 · 1, which is not below the one before.
    assert holm([0.03, 0.01, 0.04, 0.015]) == pytest.approx([0.06, 0.04, 0.06, 0.045])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_holms_correction_rejects_what_his_procedure_rejects() -> None:
    generator = np.random.default_rng(1)
    for count in (1, 2, 5, 12):
        for _ in range(50):
            p_values = list(generator.uniform(0, 1, count) ** 4)
            for level in (0.01, 0.05, 0.2):
                assert [p <= level for p in holm(p_values)] == plain_holm(p_values, level)


def test_with_one_seed_it_is_students_test_over_problems() -> None:
    values = np.random.default_rng(2).normal(0.1, 0.3, (1, 40))
    assert paired_test(by_problem(values)) == pytest.approx(stats.ttest_1samp(values[0], 0).pvalue)


def test_with_a_number_a_seed_it_is_students_test_over_seeds() -> None:
    values = np.random.default_rng(3).normal(0.1, 0.1, (8, 1))
    assert paired_test(by_problem(values)) == pytest.approx(stats.ttest_1samp(values[:, 0], 0).pvalue)


def test_with_both_it_is_the_quasi_f_of_two_crossed_random_effects() -> None:
    """Against sums written out for three seeds and four problems."""
    values = np.array([[0.1, 0.4, 0.0, 0.3], [0.2, 0.9, 0.1, 0.2], [0.5, 0.6, 0.4, 0.9]])
    mean = values.mean()
    seeds = 4 * sum((row.mean() - mean) ** 2 for row in values) / 2
    problems = 3 * sum((column.mean() - mean) ** 2 for column in values.T) / 3
    left = [values[s, p] - values[s].mean() - values[:, p].mean() + mean for s in range(3) for p in range(4)]
    rest = sum(one**2 for one in left) / 6
    spread = seeds + problems - rest
    degrees = spread**2 / (seeds**2 / 2 + problems**2 / 3 + rest**2 / 6)
    t = mean / math.sqrt(spread / 12)
    assert spread > max(seeds, problems)
    assert paired_test(by_problem(values)) == pytest.approx(2 * stats.t.sf(t, degrees))


def test_where_there_is_no_difference_one_is_found_as_seldom_as_the_level_says() -> None:
    """Seeds and problems that matter, eight and sixty of them, and no difference."""
    generator = np.random.default_rng(4)
    tries, found = 600, 0
    for _ in range(tries):
        values = generator.normal(0, 0.05, (8, 1)) + generator.normal(0, 0.15, (1, 60))
        p = paired_test(by_problem(values + generator.normal(0, 0.4, (8, 60))))
        assert p is not None
        found += p < 0.05
    assert 0.02 < found / tries < 0.075  # of 600: 0.05 ± 2.9 standard errors


def test_nothing_that_varies_is_no_difference_or_certain() -> None:
    assert paired_test(by_problem(np.zeros((3, 5)))) == 1.0
    assert paired_test(by_problem(np.ones((3, 5)))) == 0.0
    assert paired_test(by_problem(np.ones((1, 1)))) is None


def many(base: Path, rows: int) -> Plan:
    """PPO, and so many methods that are as much better as the one before, on five seeds that vary."""
    names = [f"m{number}" for number in range(rows)]
    plan = plan_of(
        base,
        seeds=(1, 2, 3, 4, 5),
        experiments={name: TableExperiment(configs=(name,)) for name in ("ppo", *names)},
        rows=tuple(MethodRow(name=name.upper(), experiment=name) for name in ("ppo", *names)),
        pairs=(Pair(row="M1", to="M0"),),
    )
    for run in plan.runs:
        better = {1: 0.14, 2: 0.01, 3: 0.1, 4: 0.03, 5: 0.12}[run.seed] if run.name != "ppo" else 0.0
        fabricated.write_run(config(base, run.seed, run.name), 0.5 + better)
    return refreshed(plan)


def test_what_is_a_difference_among_two_is_none_among_twenty(tmp_path: Path) -> None:
    few, several = measure(many(tmp_path / "few", 2)), measure(many(tmp_path / "several", 20))
    (one, other) = (results.cells["M1", "test"].against for results in (few, several))
    assert one is not None and other is not None
    assert one.p == other.p and one.p is not None and one.p < 0.05
    assert one.difference.excludes_zero and other.difference.excludes_zero
    assert (few.comparisons, several.comparisons) == (3, 21)
    assert (one.called, other.called) == (None if 2 * one.p >= 0.05 else "better", None)
    assert other.adjusted is not None and other.adjusted > 0.05
    text = as_markdown(several, ACCOUNT)
    assert "Holm's correction for 21 comparisons" in text
    assert "▲ better" in text and "better ▲ |" not in text


def test_two_rows_beside_the_baseline_are_compared_and_counted(tmp_path: Path) -> None:
    results = measure(many(tmp_path, 2))
    (pair,) = results.pairs
    assert (pair.row, pair.to, pair.seeds, pair.difference.mean, pair.called) == ("M1", "M0", 5, 0.0, None)
    assert "## Further differences" in as_markdown(results, ACCOUNT)
    assert as_json(results, ACCOUNT)["pairs"][0]["p_holm"] == 1.0


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
def test_the_area_is_the_mean_accuracy_and_stays_what_it_was_at_the_end(upto: float, area: float) -> None:
    assert area_under(CURVE, upto) == pytest.approx(area)


def test_a_model_that_is_measured_once_has_its_accuracy_as_area() -> None:
    assert area_under([(0.0, 0.3)], 500.0) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="start model"):
        area_under(CURVE[1:], 500.0)


@pytest.mark.parametrize(
    ("accuracy", "cost"), [(0.2, 0.0), (0.1, 0.0), (0.3, 50.0), (0.4, 100.0), (0.5, 200.0)]
)
def test_an_accuracy_costs_what_was_spent_when_the_curve_first_came_to_it(
    accuracy: float, cost: float
) -> None:
    assert cost_to_reach(CURVE, accuracy) == pytest.approx(cost)
    falling = [*CURVE, (400.0, 0.1), (500.0, 0.9)]
    assert cost_to_reach(falling, accuracy) == pytest.approx(cost)


def test_an_accuracy_above_all_is_not_reached() -> None:
    with pytest.raises(NotReached, match=r"0\.600 at best"):
        cost_to_reach(CURVE, 0.61)


def test_curves_become_cells(tmp_path: Path) -> None:
    """Four iterations of 20,480 tokens, from 0.4 to 0.6 and a little by seed."""
    columns = (
        Column(name="area", area=Area(over="tokens", upto=81_920), curve="validation"),
        Column(name="to 50 %", reach=Reach(accuracy=0.5, over="tokens"), curve="validation"),
        Column(name="to 62 %", reach=Reach(accuracy=0.64, over="tokens"), curve="validation"),
    )
    names = {"SFT": "sft", "PPO": "ppo", "Vine_PPO": "vine"}
    rows = tuple(MethodRow(name=row, experiment=name) for row, name in names.items())
    plan = plan_of(tmp_path, columns=columns, rows=rows)
    for run in plan.runs:
        share = {"sft": 0.4, "ppo": 0.6, "vine": 0.7}[run.name]
        fabricated.write_run(config(tmp_path, run.seed, run.name), share + 0.025 * run.seed)
    results = measure(refreshed(plan))
    ppo, vine = (results.cells[row, "area"] for row in ("PPO", "Vine_PPO"))
    assert [one.value for one in ppo.seeds] == pytest.approx([0.525, 0.55])
    assert vine.difference is not None and vine.difference.mean == pytest.approx(0.05)
    reached = results.cells["PPO", "to 50 %"]
    assert [one.value for one in reached.seeds] == pytest.approx([81_920 * 0.075 / 0.2, 81_920 * 0.05 / 0.2])
    never = results.cells["PPO", "to 62 %"]
    assert never.estimate is None and never.difference is None
    text = as_markdown(results, ACCOUNT)
    assert "reached by 1 of 2 seeds" in text
    assert "| SFT | 43.8 [" in text
    assert "| not reached |" in text.split("\n## ")[0], "SFT"
