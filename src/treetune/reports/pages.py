"""Pages and their parts from the templates of this room; what is put into them is escaped."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.reports.charts import number
from treetune.reports.svg import N_COLOURS

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
STYLES = ("report.css", "drawings.css")


def colour_of(position: int) -> str:
    """The colour of an experiment on a page, or of a row in a table."""
    return f"c{position % N_COLOURS}"


def render(template: str, **values: Any) -> str:
    """The template, filled in. What holds HTML already is said to be `safe` there."""
    return _environment().get_template(template).render(values)


def page(template: str, title: str, **values: Any) -> str:
    """A whole document with its style sheet: it needs nothing else to be read."""
    style = "".join((FOLDER / name).read_text() for name in STYLES)
    return render(template, title=title, style=style, **values) + "\n"


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["number"] = number
    environment.filters["share"] = _share
    return environment


def _share(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "–"
