"""Numbers with intervals, and what the analyzers' figures share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.seeds import derive_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d", "#a6761d")
"""Told apart by most eyes (M. Okabe and K. Ito, "Color Universal Design", 2008, and two more)."""
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
PANEL_INCHES = (4.6, 3.6)
PNG_DOTS_PER_INCH = 130

Number = Mapping[str, float | None]
"""``value``, ``low``, ``high``."""


def style_of(number: int) -> dict[str, Any]:
    """Returns the colour and the mark of the line with this number."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKS[number % len(MARKS)]}


def panels(titles: Sequence[str], *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Returns a figure with a panel for each title in so many `rows`, and the panels."""
    # Not pyplot: nothing global, no window, whatever the machine has.
    from matplotlib.figure import Figure

    columns = -(-len(titles) // rows)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(len(titles))]
    for one, title in zip(axes, titles, strict=True):
        one.set_title(title, fontsize=10, loc="left")
        one.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=8, which="both")
    return figure, axes


def iteration_axis(axes: Axes, words: str = "finished iterations") -> None:
    """Iterations are whole numbers, and so are the ticks."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(words, fontsize=8)


def legend_below(figure: Figure, axes: Axes, columns: int = 4) -> None:
    """Draws one legend for all panels, outside of them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(columns, len(handles)),
            frameon=False, fontsize=8,
        )  # fmt: skip


def points_with_bars(axes: Axes, xs: Sequence[float], numbers: Sequence[Number], **style: Any) -> None:
    """Points with their intervals; what has no value is left out."""
    known = [(x, n["value"], n["low"], n["high"]) for x, n in zip(xs, numbers, strict=True)]
    drawn = [(x, v, low, high) for x, v, low, high in known if v is not None]
    if not drawn:
        return
    below = [max(0.0, v - (v if low is None else low)) for _, v, low, _ in drawn]
    above = [max(0.0, (v if high is None else high) - v) for _, v, _, high in drawn]
    given = {"markersize": 4.5, "capsize": 2, "linewidth": 1.4, "elinewidth": 1.0} | style
    axes.errorbar([x for x, *_ in drawn], [v for _, v, *_ in drawn], yerr=[below, above], **given)


def save(figure: Figure, folder: Path, name: str = "figure") -> None:
    """``name.png`` and ``name.svg``, the same bytes for the same numbers."""
    import matplotlib

    figure.savefig(folder / f"{name}.png", dpi=PNG_DOTS_PER_INCH)
    with matplotlib.rc_context({"svg.hashsalt": "treetune", "svg.fonttype": "none"}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


RESAMPLES = 1000
INTERVAL = 0.95

Statistic = Callable[[Any], float]
"""A function from the indices of some rows (an integer array, an index may come twice) to one number; NaN
where they don't have it."""


class Bootstrap:
    """Percentile intervals at 95 % of statistics of rows that belong to clusters (problems)."""

    def __init__(self, clusters: Sequence[Hashable], seed: int) -> None:
        import numpy as np

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
        import numpy as np

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
    import numpy as np

    array = np.asarray(values, dtype=float)

    def statistic(rows: Any) -> float:
        chosen = array[rows]
        chosen = chosen[np.isfinite(chosen)]
        return float(chosen.mean()) if len(chosen) else math.nan

    return statistic


def correlation(x: Any, y: Any) -> float:
    """Returns Pearson's correlation; NaN where one of both doesn't vary."""
    import numpy as np

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
    import numpy as np

    product = np.sign(np.asarray(estimates) - threshold) * np.sign(np.asarray(truths) - threshold)
    return (1 + product) / 2
