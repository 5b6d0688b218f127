"""A table that asks for a narrow interval gets seeds until it has it, interrupted or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reports import fabricated
from tests.sweeps.small_table import FAKE, calls, cells, experiment, show, table
from treetune.config.build import checked
from treetune.config.errors import ConfigError
from treetune_tables.launch import reproduce
from treetune_tables.runs import Plan, make_plan
from treetune_tables.settings import Reproduction, Seeds, TableExperiment, Until
from treetune_tables.statistics import confidence_sequence, over_seeds
from treetune_tables.until import Verdict, grown, verdicts

NOISE = (0.0, 0.2, 0.05, 0.15, 0.1, 0.12, 0.08, 0.11)
"""By which PPO's share differs from GRPO's, seed by seed."""


def growing(directory: Path, difference: float, at_most: int | None = None, **more: Any) -> Reproduction:
    until = Until(difference=difference, bound=0.25, rows=("PPO",), seeds=Seeds(at_least=3, at_most=at_most))
    settings: dict[str, Any] = {"seeds": tuple(range(1, 9)), "baseline": "GRPO", "until": until}
    return checked(table(directory, **(settings | more)))


def fill(plan: Plan) -> Plan:
    """Finishes every run that the plan has."""
    for run in plan.runs:
        if plan.statuses[run.key].state == "missing":
            share = 0.4 + (NOISE[run.seed - 1] if run.name == "ppo" else 0.0)
            assert run.config is not None
            fabricated.write_run(run.config, share)
    return grown(make_plan(plan.table))


def filled(of: Reproduction) -> Plan:
    plan = grown(make_plan(of))
    while len((more := fill(plan)).runs) > len(plan.runs):
        plan = more
    return more


def seeds(plan: Plan) -> Mapping[str, list[int]]:
    return {name: [run.seed for run in plan.of(name)] for name in ("sft", "ppo", "grpo")}


def test_seeds_are_added_for_the_rows_concerned_until_the_interval_is_that_narrow(tmp_path: Path) -> None:
    plan = filled(growing(tmp_path, 0.15))
    (verdict,) = verdicts(plan)
    assert verdict.reason == "narrow"
    assert 3 < verdict.seeds < 8
    assert verdict.half_width is not None and verdict.half_width <= 0.15
    # One seed fewer would not have done.
    before = Plan(plan.table, [run for run in plan.runs if run.seed < verdict.seeds], plan.statuses)
    (earlier,) = verdicts(before)
    assert earlier.next_seed == verdict.seeds
    assert earlier.half_width is not None and earlier.half_width > 0.15
    count = list(range(1, verdict.seeds + 1))
    assert seeds(plan) == {"sft": count, "ppo": count, "grpo": count}


def test_rows_that_are_not_concerned_have_the_seeds_that_all_have(tmp_path: Path) -> None:
    plan = filled(growing(tmp_path, 0.15, baseline="SFT"))
    assert len(plan.of("ppo")) > 3
    assert seeds(plan)["grpo"] == [1, 2, 3]


def test_the_bound_ends_it(tmp_path: Path) -> None:
    plan = filled(growing(tmp_path, 0.16, at_most=5))
    (verdict,) = verdicts(plan)
    assert (verdict.reason, verdict.seeds) == ("at_most", 5)
    assert verdict.half_width is not None and verdict.half_width > 0.16


def test_seeds_beyond_those_that_suffice_change_nothing(tmp_path: Path) -> None:
    """As where a narrower interval was asked for before."""
    filled(growing(tmp_path, 0.13))
    later = grown(make_plan(growing(tmp_path, 0.15)))
    fresh = filled(growing(tmp_path / "fresh", 0.15))
    assert verdicts(later) == verdicts(fresh)
    assert seeds(later) == seeds(fresh)


def test_a_run_without_result_ends_it_and_says_so(tmp_path: Path) -> None:
    of = growing(tmp_path, 0.15)
    fill(grown(make_plan(of)))
    (stored,) = tmp_path.glob("seed-2/quickstart/ppo/config.json")
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"iterations": 7, "context_length": 1}))
    (verdict,) = verdicts(grown(make_plan(of)))
    assert verdict == Verdict("PPO", 2, "lacking")


def test_one_command_runs_them_all_and_a_second_one_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APP_FAKE_SHARES", json.dumps({"ppo": 0.6}))
    of = growing(tmp_path, 0.15)
    assert reproduce(of, show, FAKE, at_once=2) == 0
    ran = sorted(calls(tmp_path))
    (verdict,) = verdicts(grown(make_plan(of)))
    assert verdict.reason == "narrow"
    expected = [f"{name}:{seed}" for name in ("grpo", "ppo", "sft") for seed in range(1, verdict.seeds + 1)]
    assert ran == expected
    assert reproduce(of, show, FAKE, at_once=2) == 0
    assert calls(tmp_path) == []


def test_the_interval_that_ends_the_search_holds_where_runs_collapse_now_and_then() -> None:
    """Runs whose difference is 0.1, but -0.35 in one of ten: 0.055 on average."""
    generator = np.random.default_rng(21)
    held, held_by_student, searches = 0, 0, 100
    for _ in range(searches):
        noise = generator.normal(0, 0.02, 64)
        found = np.where(generator.random(64) < 0.1, -0.35, 0.1) + noise
        for count in range(8, 65, 4):
            known = confidence_sequence(found[:count].tolist(), bound=0.5)
            assert known.low is not None and known.high is not None
            if known.high - known.low <= 2 * 0.12:
                break
        held += known.low <= 0.055 <= known.high
        of_eight = over_seeds(found[:8].tolist(), "student")
        assert of_eight.low is not None and of_eight.high is not None
        held_by_student += of_eight.low <= 0.055 <= of_eight.high
    assert held >= 0.95 * searches
    assert held_by_student < 0.7 * searches


@pytest.mark.parametrize("chance", [0.02, 0.3])
def test_the_confidence_sequence_holds_at_all_looks_at_once(chance: float) -> None:
    generator = np.random.default_rng(3)
    missed = 0
    for _ in range(60):
        found = generator.choice([-1.0, 1.0], p=[chance, 1 - chance], size=40)
        looks = [confidence_sequence(found[:count].tolist(), bound=1.0) for count in range(4, 41, 6)]
        missed += any(not one.low <= 1 - 2 * chance <= one.high for one in looks)  # type: ignore[operator]
    assert missed <= 3


def test_a_difference_beyond_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.6 is outside of ±0\.5: set `bound`"):
        confidence_sequence([0.1, 0.6], bound=0.5)


@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0])
def test_the_confidence_sequence_of_equal_numbers_has_them_within(value: float) -> None:
    known = confidence_sequence([value] * 30, bound=1.0)
    assert known.low is not None and known.high is not None
    assert -1 <= known.low <= known.mean == value <= known.high <= 1
    assert known.high - known.low < 0.4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": None}, "the table has none"),
        ({"baseline": "PPO"}, "the baseline is one of its rows"),
        ({"seeds": (1, 2)}, "asks for 3 to"),
        (
            {"until": Until(difference=0.1, rows=("PPO",), seeds=Seeds(at_least=3))},
            "difference to 0.47",
        ),
        ({"baseline": "SFT", "until": Until(difference=1, rows=("POP",), seeds=Seeds(at_least=2))}, "no row"),
        (
            {"until": Until(difference=1, rows=("PPO",), seeds=Seeds(at_least=2), column="tset")},
            "did you mean",
        ),
    ],
)
def test_what_can_not_be_known_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        growing(tmp_path, 0.1, **changes)


def shared_start(directory: Path, **more: Any) -> Reproduction:
    start = experiment("sft", shared=True)
    one = table(directory).experiments | {"sft": start}
    return table(directory, seeds=(3, 4), experiments=one, **more)


def test_a_shared_start_is_made_once_and_needed_by_every_seed(tmp_path: Path) -> None:
    assert reproduce(shared_start(tmp_path), show, FAKE) == 0
    assert calls(tmp_path) == ["sft:1", "ppo:3", "grpo:3", "ppo:4", "grpo:4"]
    assert (tmp_path / "shared/quickstart/sft/metrics.jsonl").is_file()
    found = cells(tmp_path)
    assert [one["seed"] for one in found["SFT"]["seeds"]] == [1]
    # Each seed is compared with the start that all share: 0.5 + 0.02 seed, less 0.52.
    assert found["PPO"]["difference"]["mean"] == pytest.approx(0.05, abs=0.005)


def test_what_all_seeds_share_needs_nothing_that_each_has_for_itself(tmp_path: Path) -> None:
    experiments: Mapping[str, TableExperiment] = table(tmp_path).experiments | {
        "ppo": experiment("ppo", needs=("sft",), shared=True)
    }
    with pytest.raises(ConfigError, match="every seed has its own 'sft'"):
        checked(table(tmp_path, experiments=experiments))


def test_a_run_waits_for_what_it_needs_however_many_are_at_work(tmp_path: Path) -> None:
    assert reproduce(shared_start(tmp_path), show, FAKE, at_once=4) == 0
    first, *others = calls(tmp_path)
    assert (first, sorted(others)) == ("sft:1", ["grpo:3", "grpo:4", "ppo:3", "ppo:4"])
