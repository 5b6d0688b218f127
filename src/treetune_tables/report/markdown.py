"""A table for readers of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treetune_tables.report import grids
from treetune_tables.report.cells import Results
from treetune_tables.report.curves import Curve
from treetune_tables.report.panels import panel_notes
from treetune_tables.report.words import COST_WORDS, legend


def as_markdown(
    results: Results, account: Mapping[str, str], panels: Sequence[Curve] = (), figure: str | None = None
) -> str:
    """Table, panels, differences, costs, origins and the account of how it was made. `figure` is the
    panels' file beside it."""
    table = results.plan.table
    parts = [f"# {table.title or table.name}", grids.as_markdown(grids.main_grid(results))]
    parts.append("\n".join(legend(results)))
    if notes := panel_notes(results.plan, panels):
        parts.append("## Over training")
        if panels:
            parts.append(grids.as_markdown(grids.panel_grid(results, panels)))
        if figure is not None:
            parts.append(f"![Over training]({figure})")
        parts.append("\n".join(notes))
    if len(frame := grids.difference_grid(results)):
        parts += [f"## Differences to {table.baseline}", grids.as_markdown(frame)]
    if len(frame := grids.pair_grid(results)):
        parts += ["## Further differences", grids.as_markdown(frame)]
    if len(frame := grids.cost_grid(results)):
        parts += ["## What it took", grids.as_markdown(frame), COST_WORDS]
    if len(frame := grids.seeds_grid(results)):
        code = ("experiment", "configuration")
        parts += ["## Where the numbers are from", grids.as_markdown(frame, code)]
    facts = {**account, "command": f"`{account['command']}`"}
    parts += ["## How it was made", "\n".join(f"* {key}: {value}" for key, value in facts.items())]
    return "\n\n".join(parts) + "\n"
