"""Pages and their parts from templates, for reports and for the viewer; what is put into them is escaped."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treetune_view.report.charts import number
from treetune_view.report.directions import about
from treetune_view.report.svg import N_COLOURS
from treetune_view.report.text import visible
from treetune_view.report.tokens import shade

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
LOOK, DRAWINGS = FOLDER / "look.css", FOLDER / "drawings.css"
"""What the report and the viewer share: colours, type and tables; how answers are drawn."""

_COLOUR = re.compile(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)")


def colour_of(position: int) -> str:
    """The colour of an experiment on a page, or of a row in a table."""
    return f"c{position % N_COLOURS}"


@functools.cache
def palette(theme: Literal["light", "dark"] = "light") -> dict[str, str]:
    """The colours of the style sheet by name, as ``#rrggbb``."""
    found = _COLOUR.findall(LOOK.read_text())
    return {name: light if theme == "light" else dark for name, light, dark in found}


def render(template: str, **values: Any) -> str:
    """The template, filled in. What holds HTML already is said to be `safe` there."""
    return _environment().get_template(template).render(values)


def page(template: str, title: str, **values: Any) -> str:
    """A whole document with its style sheet: it needs nothing else to be read."""
    style = "".join(path.read_text() for path in (LOOK, DRAWINGS, FOLDER / "report.css"))
    return render(template, title=title, style=style, **values) + "\n"


def environment(*folders: Path) -> Environment:
    """Of templates in these folders, with those that the report and the viewer share (``parts.html``)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader([*folders, FOLDER / "templates"]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {
        "number": lambda value: "–" if value is None else number(value),
        "share": lambda value: f"{value:.3f}" if isinstance(value, int | float) else "–",
        "visible": visible,
        "colour": colour_of,
    }
    made.globals |= {"about": about, "shade": shade}
    return made


@functools.cache
def _environment() -> Environment:
    return environment()
