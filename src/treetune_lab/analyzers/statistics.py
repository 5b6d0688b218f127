"""Numbers with intervals. States and answers of one problem resemble each other, so the bootstrap
draws problems, whole, and not states."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from treetune.seeds import derive_seed

RESAMPLES = 1000
INTERVAL = 0.95

Statistic = Callable[[Any], float]
"""From the places of some rows (an integer array, a place may come twice) to one number; NaN where
they don't have it."""


class Bootstrap:
    """Percentile intervals at 95 % of statistics of rows that belong to clusters (problems)."""

    def __init__(self, clusters: Sequence[Hashable], seed: int) -> None:
        numbers: dict[Hashable, list[int]] = {}
        for row, cluster in enumerate(clusters):
            numbers.setdefault(cluster, []).append(row)
        members = [np.array(rows) for rows in numbers.values()]
        generator = np.random.default_rng(derive_seed(seed, "bootstrap"))
        self._all = np.arange(len(clusters))
        self._resamples = (
            [
                np.concatenate([members[i] for i in generator.integers(len(members), size=len(members))])
                for _ in range(RESAMPLES)
            ]
            if members
            else []
        )

    def __call__(self, statistic: Statistic) -> dict[str, float | None]:
        """``value``, ``low`` and ``high``; None where there is nothing to take it from."""
        if not len(self._all):
            return {"value": None, "low": None, "high": None}
        value = statistic(self._all)
        drawn = np.array([statistic(rows) for rows in self._resamples])
        drawn = drawn[np.isfinite(drawn)]
        if not math.isfinite(value) or not len(drawn):
            return {"value": None, "low": None, "high": None}
        tail = 100 * (1 - INTERVAL) / 2
        low, high = (float(np.percentile(drawn, share)) for share in (tail, 100 - tail))
        return {"value": float(value), "low": low, "high": high}


def mean_of(values: Sequence[float] | Any) -> Statistic:
    """The mean of the rows' values, leaving out those that are NaN."""
    array = np.asarray(values, dtype=float)

    def statistic(rows: Any) -> float:
        chosen = array[rows]
        chosen = chosen[np.isfinite(chosen)]
        return float(chosen.mean()) if len(chosen) else math.nan

    return statistic


def correlation(x: Any, y: Any) -> float:
    """Pearson's; NaN where one of both doesn't vary."""
    x, y = np.ravel(x), np.ravel(y)
    if len(x) < 2:
        return math.nan
    dx, dy = x - x.mean(), y - y.mean()
    scale = math.sqrt(float((dx * dx).sum()) * float((dy * dy).sum()))
    return float((dx * dy).sum()) / scale if scale > 0 else math.nan


def right_side(estimates: Any, truths: Any, threshold: float = 0.5) -> Any:
    """1 where an estimate lies on the truth's side of the threshold, 0 where on the other, 1/2 where
    one of both lies on it.
    """
    product = np.sign(np.asarray(estimates) - threshold) * np.sign(np.asarray(truths) - threshold)
    return (1 + product) / 2
