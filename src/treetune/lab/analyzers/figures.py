"""Bootstrap intervals, and the style of the analyzers' figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.seeds import derive_seed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

FIGURE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d", "#a6761d")
"""Six colours that are distinct for colour-blind readers, too (Okabe and Ito, "Color Universal Design",
2008), and two more."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
PANEL_INCHES = (4.6, 3.6)
PNG_DOTS_PER_INCH = 130

NumberWithInterval = Mapping[str, float | None]
"""A value with its interval: {"value": 0.48, "low": 0.44, "high": 0.53}; all None where it is not defined."""


def style_of(number: int) -> dict[str, Any]:
    """Returns the colour and the mark of the line with this number."""
    return {"color": FIGURE_COLOURS[number % len(FIGURE_COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def make_panels(titles: Sequence[str], *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Returns a figure that has a panel for each title, arranged in `rows` rows, and the list of its
    panels."""
    # pyplot would keep figures in global state, and may open a window.
    from matplotlib.figure import Figure

    columns = math.ceil(len(titles) / rows)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(len(titles))]
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, fontsize=10, loc="left")
        panel.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8, which="both")
    return figure, axes


def label_iteration_axis(axes: Axes, label: str = "finished iterations") -> None:
    """Labels the x axis, and sets its ticks to whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label, fontsize=8)


def draw_legend_below(figure: Figure, panels: Sequence[Axes], columns: int = 4) -> None:
    """Draws one legend outside of the panels, with every label of `panels` once."""
    handles_by_label: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles_by_label.setdefault(label, handle)
    if handles_by_label:
        figure.legend(
            handles_by_label.values(), handles_by_label.keys(), loc="outside lower center",
            ncols=min(columns, len(handles_by_label)), frameon=False, fontsize=8,
        )  # fmt: skip


def draw_points_with_bars(
    axes: Axes, xs: Sequence[float], numbers: Sequence[NumberWithInterval], **style: Any
) -> None:
    """Draws a point with its interval for each number that has a value. `style` is passed to matplotlib."""
    drawn_xs, values, below, above = [], [], [], []
    for x, number in zip(xs, numbers, strict=True):
        value, low, high = number["value"], number["low"], number["high"]
        if value is None:
            continue
        drawn_xs.append(x)
        values.append(value)
        # matplotlib wants the distances to the ends of the interval, and refuses negative ones.
        below.append(0.0 if low is None else max(0.0, value - low))
        above.append(0.0 if high is None else max(0.0, high - value))
    if not drawn_xs:
        return
    full_style = {"markersize": 4.5, "capsize": 2, "linewidth": 1.4, "elinewidth": 1.0} | style
    axes.errorbar(drawn_xs, values, yerr=[below, above], **full_style)


def save_figure(figure: Figure, folder: Path, name: str = "figure") -> None:
    """Writes the figure as ``name.png`` and ``name.svg``. The same figure always gives the same bytes."""
    import matplotlib

    figure.savefig(folder / f"{name}.png", dpi=PNG_DOTS_PER_INCH)
    with matplotlib.rc_context({"svg.hashsalt": "treetune", "svg.fonttype": "none"}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


NUMBER_OF_RESAMPLES = 1000
INTERVAL_SHARE = 0.95

Statistic = Callable[[Any], float]
"""A function of the indices of some rows (an integer array, in which an index may occur more than once) that
returns a number, or NaN where it is not defined for these rows."""


class Bootstrap:
    """Computes 95 % percentile intervals of statistics of rows, by resampling whole clusters (problems)."""

    def __init__(self, clusters: Sequence[Hashable], seed: int) -> None:
        import numpy as np

        rows_by_cluster: dict[Hashable, list[int]] = {}
        for row, cluster in enumerate(clusters):
            rows_by_cluster.setdefault(cluster, []).append(row)
        rows_of_clusters = [np.array(rows) for rows in rows_by_cluster.values()]
        generator = np.random.default_rng(derive_seed(seed, "bootstrap"))
        self._all_rows = np.arange(len(clusters))
        self._resamples = []
        if not rows_of_clusters:
            return
        for _ in range(NUMBER_OF_RESAMPLES):
            # Whole clusters are drawn with replacement, because the rows of a cluster are not independent.
            drawn_clusters = generator.integers(len(rows_of_clusters), size=len(rows_of_clusters))
            self._resamples.append(np.concatenate([rows_of_clusters[i] for i in drawn_clusters]))

    def __call__(self, statistic: Statistic) -> dict[str, float | None]:
        """Returns a statistic of all rows as "value", with its interval, "low" and "high".

        All three are None where the statistic is not defined."""
        import numpy as np

        if not len(self._all_rows):
            return {"value": None, "low": None, "high": None}
        value = statistic(self._all_rows)
        resampled = np.array([statistic(rows) for rows in self._resamples])
        resampled = resampled[np.isfinite(resampled)]
        if not math.isfinite(value) or not len(resampled):
            return {"value": None, "low": None, "high": None}
        tail_percent = 100 * (1 - INTERVAL_SHARE) / 2
        low = float(np.percentile(resampled, tail_percent))
        high = float(np.percentile(resampled, 100 - tail_percent))
        return {"value": float(value), "low": low, "high": high}


def mean_of(values: ArrayLike) -> Statistic:
    """Returns a function from the indices of some rows to the mean of these rows' finite values."""
    import numpy as np

    array = np.asarray(values, dtype=float)

    def statistic(rows: Any) -> float:
        values_of_rows = array[rows]
        defined = values_of_rows[np.isfinite(values_of_rows)]
        return float(defined.mean()) if len(defined) else math.nan

    return statistic


def correlation(x: Any, y: Any) -> float:
    """Returns Pearson's correlation, or NaN where `x` or `y` is constant or there are fewer than two
    numbers."""
    import numpy as np

    x, y = np.ravel(x), np.ravel(y)
    if len(x) < 2:
        return math.nan
    dx, dy = x - x.mean(), y - y.mean()
    scale = math.sqrt(float((dx * dx).sum()) * float((dy * dy).sum()))
    return float((dx * dy).sum()) / scale if scale > 0 else math.nan


def share_on_right_side(estimates: Any, truths: Any, threshold: float = 0.5) -> Any:
    """Returns 1 where estimate and true value are on the same side of the threshold, 0 where they are on
    different sides, and 1/2 where one of them equals it.
    """
    import numpy as np

    product = np.sign(np.asarray(estimates) - threshold) * np.sign(np.asarray(truths) - threshold)
    return (1 + product) / 2
