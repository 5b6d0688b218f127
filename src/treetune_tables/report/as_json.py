"""A table for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treetune_tables.intervals import Estimate
from treetune_tables.report.cells import CellResult, Comparison, Results
from treetune_tables.report.costs import Cost
from treetune_tables.until import verdicts


def as_json(results: Results, account: Mapping[str, str]) -> dict[str, Any]:
    table = results.plan.table
    return {
        "name": table.name,
        "title": table.title,
        "seeds": list(table.seeds),
        "baseline": table.baseline,
        "interval": table.interval,
        "cells": [_cell_json(cell) for cell in results.cells.values()],
        "pairs": [_comparison_json(one) for one in results.pairs],
        "comparisons": results.comparisons,
        "until": [vars(verdict) for verdict in verdicts(results.plan)],
        "costs": {name: [_cost_json(one) for one in costs] for name, costs in results.costs.items()},
        "account": dict(account),
    }


def _estimate_json(estimate: Estimate | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {"mean": estimate.mean, "ci_low": estimate.low, "ci_high": estimate.high}


def _cell_json(cell: CellResult) -> dict[str, Any]:
    return {
        "row": cell.row.name,
        "column": cell.column.name,
        "measured": _estimate_json(cell.estimate),
        "difference": _estimate_json(cell.difference),
        "p": None if cell.against is None else cell.against.p,
        "p_holm": None if cell.against is None else cell.against.adjusted,
        "called": cell.called,
        "published": cell.published,
        "source": cell.source,
        "experiment": cell.experiment,
        "seeds": [
            {
                "seed": one.seed,
                "value": one.value,
                "directory": one.directory,
                "config_hash": one.config_hash,
                "iteration": one.iteration,
                "problems": None if one.by_problem is None else len(one.by_problem),
                "samples": one.samples,
            }
            for one in cell.seeds
        ],
        "absent": {str(seed): why for seed, why in cell.absent.items()},
        "notes": list(cell.notes),
    }


def _comparison_json(one: Comparison) -> dict[str, Any]:
    return {
        "row": one.row,
        "to": one.to,
        "column": one.column.name,
        "seeds": one.seeds,
        "difference": _estimate_json(one.difference),
        "p": one.p,
        "p_holm": one.adjusted,
        "called": one.called,
    }


def _cost_json(cost: Cost) -> dict[str, float]:
    return dict(vars(cost))
