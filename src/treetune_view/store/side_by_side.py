"""Several experiments beside each other: what they reached, what it cost, what differs in their settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treetune.config.explain import key_paths, value_at
from treetune.runtime.console import duration
from treetune.runtime.stop_after import ANSWERS, CONTINUATIONS
from treetune_view.report.charts import number
from treetune_view.report.experiment import Experiment
from treetune_view.store.standing import Standing

NAMES_ALONE = ("experiment_name", "directory")
"""What differs between any two experiments, and says nothing of them."""


@dataclass(frozen=True)
class Cell:
    """What is written, and a smaller remark behind it."""

    words: str
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One quantity or key, with a cell for each experiment; None where it has none. `better` is up, down or
    nothing, `kind` ``result``, ``cost`` or ``setting``."""

    name: str
    kind: str
    cells: Sequence[Cell | None]
    better: str = ""


def side_by_side(experiments: Mapping[str, Experiment], standings: Mapping[str, Standing]) -> list[Row]:
    """Results first, then costs, then the keys that differ. Rows that nobody has anything in are left out."""
    rows = [*_results(standings), *_costs(list(experiments.values())), *_settings(list(experiments.values()))]
    return [row for row in rows if any(row.cells)]


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Each key that holds no further keys, with its value as JSON."""
    values = {".".join(path): value_at(config, path) for path in key_paths(config)}
    leaves = {name: value for name, value in values.items() if not isinstance(value, dict) or not value}
    return {name: json.dumps(value, ensure_ascii=False) for name, value in leaves.items()}


def _results(standings: Mapping[str, Standing]) -> list[Row]:
    labels = sorted({one.label for own in standings.values() for one in own.accuracies})
    rows = []
    for label in labels:
        cells: list[Cell | None] = []
        for own in standings.values():
            found = next((one for one in own.accuracies if one.label == label), None)
            if found is None:
                cells.append(None)
                continue
            bounds = f"[{found.low:.3f}, {found.high:.3f}] " if found.low is not None else ""
            cells.append(Cell(f"{found.value:.3f}", f"{bounds}after {found.iteration} iterations"))
        rows.append(Row(f"pass@1 on {label}", "result", cells, "up"))
    return rows


def _costs(experiments: Sequence[Experiment]) -> list[Row]:
    def row(name: str, of: Callable[[Experiment], Cell | None], better: str = "") -> Row:
        return Row(name, "cost", [of(one) for one in experiments], better)

    return [
        row("finished iterations", lambda one: Cell(str(len(one.metrics)))),
        row("optimiser steps", lambda one: _whole(_sum(one, "train/steps"))),
        row("sampled tokens of answers", lambda one: _whole(_sum(one, ANSWERS))),
        row("sampled tokens of continuations", lambda one: _whole(_sum(one, CONTINUATIONS))),
        row("trained tokens", lambda one: _whole(_sum(one, "train/tokens"))),
        row("time in iterations", _time, "down"),
        row("tokens of an answer, newest", lambda one: _newest(one, "episodes/response_tokens")),
        row("reward, newest", lambda one: _newest(one, "episodes/reward"), "up"),
    ]


def _sum(one: Experiment, name: str) -> float | None:
    """Over all iterations; None where none has it."""
    values = [row[name] for row in one.metrics if name in row]
    return math.fsum(values) if values else None


def _whole(value: float | None) -> Cell | None:
    return None if value is None else Cell(f"{value:,.0f}")


def _time(one: Experiment) -> Cell | None:
    seconds = _sum(one, "seconds/total")
    if seconds is None:
        return None
    return Cell(duration(seconds), f"{number(seconds / len(one.metrics))} s an iteration")


def _newest(one: Experiment, name: str) -> Cell | None:
    values = [row[name] for row in one.metrics if name in row]
    return Cell(number(values[-1])) if values else None


def _settings(experiments: Sequence[Experiment]) -> list[Row]:
    """Keys whose values differ."""
    own = [flat(one.config) for one in experiments]
    names = [name for name in dict.fromkeys(key for one in own for key in one) if name not in NAMES_ALONE]
    return [
        Row(name, "setting", [Cell(one[name]) if name in one else None for one in own])
        for name in names
        if len({one.get(name) for one in own}) > 1
    ]
