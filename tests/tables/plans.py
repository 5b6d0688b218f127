"""Plans of a small table, and runs that fill it, without training or evaluating anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import treetune.parts  # noqa: F401  (registers numbers of answers)
from tests.tables import fabricated
from treetune.config.build import check_root
from treetune.tables.columns import MeasuredColumn
from treetune.tables.runs import PlannedRun, TableRuns, inspect_again
from treetune.tables.settings import CellSource, MethodRow, Reproduction, TableExperiment

EXPERIMENT_BY_ROW = {"SFT": "sft", "PPO": "ppo", "Vine_PPO": "vine"}
ROWS = tuple(MethodRow(name=name, experiment=experiment) for name, experiment in EXPERIMENT_BY_ROW.items())
"""Rows without published numbers."""
ACCOUNT = {"command": "the command"}


def config(base: Path, seed: int, name: str) -> dict[str, Any]:
    """Returns as much of an experiment's configuration as a table reads."""
    directory = str(base / f"seed-{seed}")
    start = f"{directory}/sft/checkpoints/last/policy"
    return {
        "experiment_name": name,
        "directory": directory,
        "seed": seed,
        "iterations": 4,
        "rollout": {"type": "demonstrations" if name == "sft" else "single_turn"},
        "model": {"name_or_path": start} if name != "sft" else {},
    }


def plan_of(base: Path, *, seeds: tuple[int, ...] = (1, 2), **changed: Any) -> TableRuns:
    """Returns a plan with the configurations above, none of which is evaluated."""
    settings: dict[str, Any] = {
        "name": "some",
        "directory": str(base),
        "seeds": seeds,
        "experiments": {
            "sft": TableExperiment(configs=("sft",)),
            "ppo": TableExperiment(configs=("ppo", "other"), needs=("sft",)),
            "vine": TableExperiment(configs=("vine",), overrides=("{ it: 'is' }",), needs=("sft",)),
        },
        "rows": (
            MethodRow(name="SFT", experiment="sft"),
            MethodRow(name="PPO", experiment="ppo"),
            MethodRow(
                name="Vine_PPO",
                experiment="vine",
                cells={"test": CellSource(published=0.53, source="Table 1")},
            ),
        ),
        "columns": (MeasuredColumn(name="test", evaluation="test", curve="validation"),),
        "baseline": "PPO",
    }
    table = check_root(Reproduction(**(settings | changed)))
    runs = [
        PlannedRun(name, seed, table.experiments[name], base, config(base, seed, name), sets_at_end=("test",))
        for seed in seeds
        for name in table.order()
    ]
    return inspect_again(TableRuns(table, runs))


def finish(plan: TableRuns, shares: Mapping[str, float]) -> TableRuns:
    for run in plan.runs:
        assert run.config is not None
        if run.name in shares:
            fabricated.write_run(run.config, shares[run.name] + 0.025 * run.seed)
    return inspect_again(plan)
