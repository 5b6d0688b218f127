"""What the analyzers' figures share: size, colours, axes, and how they are saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def panels(titles: Sequence[str], *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with one titled panel for each title, `rows` rows of them."""
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
    """One legend for all panels, outside of them."""
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
