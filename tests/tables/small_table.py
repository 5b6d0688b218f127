"""A small table of real configurations, which tests run with a stand-in for the launcher."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import treetune.parts  # noqa: F401  (registers them)
from tests.tables import fabricated
from treetune.config.jsonnet import load
from treetune.config.layers import Config, Layer
from treetune.tables.columns import MeasuredColumn
from treetune.tables.launch import Launcher
from treetune.tables.runs import TableRuns
from treetune.tables.settings import MethodRow, Reproduction, TableExperiment
from treetune.tables.write import write_runs_table

ROOT = Path(__file__).resolve().parents[2]
SHORT = "{ iterations: 2, trainer+: { schedule+: { may_outlast_training: true } } }"
FAKE = Launcher(ranks=1, threads=1, program=(sys.executable, str(Path(fabricated.__file__))))


def show(plan: TableRuns) -> None:
    write_runs_table(plan, "the command")


def evaluated(configs: Sequence[str], overrides: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Returns what `load` gives. Each configuration is evaluated once for all seeds and directories."""
    cache = Path(os.environ["APP_FAKE_CONFIGS"])
    texts = json.loads(cache.read_text()) if cache.is_file() else {}
    key = fabricated.recipe_key(",".join(configs), overrides)
    if key not in texts:
        stand_ins = {"APP_SEED": str(fabricated.SEED), "APP_DIRECTORY": fabricated.DIRECTORY}
        texts[key] = json.dumps(load(configs, overrides, {**environ, **stand_ins}).data)
        cache.write_text(json.dumps(texts))
    data = fabricated.filled_in(texts[key], environ["APP_SEED"], environ["APP_DIRECTORY"])
    return Config(data, (Layer("evaluated before", "{}"),))


def table(directory: Path, *, seeds: Sequence[int] = (1, 2), **changed: Any) -> Reproduction:
    """Returns a table of the quickstart's SFT, and of PPO and GRPO from it."""
    settings: dict[str, Any] = {
        "name": "small",
        "directory": str(directory),
        "seeds": tuple(seeds),
        "experiments": {
            "ppo": experiment("ppo", needs=("sft",), seconds_per_iteration=30.0),
            "sft": experiment("sft"),
            "grpo": experiment("grpo", needs=("sft",)),
        },
        "rows": tuple(MethodRow(name=name.upper(), experiment=name) for name in ("sft", "ppo", "grpo")),
        "columns": (MeasuredColumn(name="test", evaluation="test", curve="validation"),),
        "baseline": "SFT",
    }
    return Reproduction(**(settings | changed))


def experiment(name: str, **changed: Any) -> TableExperiment:
    return TableExperiment(configs=(f"configs/quickstart/{name}.jsonnet",), overrides=(SHORT,), **changed)


def calls(directory: Path) -> list[str]:
    """Returns the stand-in's calls since the last look, in order: `ppo:1`, `ppo:1 run_evaluation`…"""
    file = directory / "calls.txt"
    lines = file.read_text().splitlines() if file.is_file() else []
    file.unlink(missing_ok=True)
    return [call.removesuffix(" run_iteration_loop") for call in lines]


def cells(directory: Path) -> dict[str, dict[str, Any]]:
    """Returns the cells of the written table by row."""
    table_json = json.loads((directory / "small.json").read_text())
    return {cell["row"]: cell for cell in table_json["cells"]}
