"""A matplotlib figure as a small SVG with the colours and the font of its page, and tooltips."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_COLOURS = 12
"""Of experiments on a page and of rows in a table."""

NAMES = (
    *(f"c{i}" for i in range(N_COLOURS)), "own", "soft", "line", "paper",
    "generation", "credit", "training", "choice", "sync", "evaluation", "commit", "other",
)  # fmt: skip
"""The colours of the style sheet, which has each in a variable of that name, for light and for dark."""

PAGE: Mapping[str, str] = {name: f"#00{number:02x}ff" for number, name in enumerate(NAMES)}
"""What a figure for the page is drawn with: each stands for its variable."""

_VARIABLES = {colour: f"var(--{name})" for name, colour in PAGE.items()}
_LEFT_OUT = ("font-family", "font-size", "stroke-linecap", "stroke-linejoin")


@dataclass(frozen=True)
class Marks:
    """The points of a curve: their radius, and what each one says when the pointer rests on it."""

    radius: float
    titles: Sequence[str]


Titles = Mapping[str, str | Marks]
"""By the `gid` of what was drawn: one text for all of it, or one for each point."""


def svg_of(figure: Figure, label: str, titles: Titles) -> str:
    """The figure without a background, sized by the page; `label` is for those who can't see it."""
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "treetune"}):
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    root = ElementTree.fromstring(buffer.getvalue())
    inner = "".join(_written(child, titles) for child in root)
    label = escape(label, quote=True)
    return f'<svg viewBox="{root.get("viewBox")}" role="img" aria-label="{label}">{inner}</svg>'


def _written(element: ElementTree.Element, titles: Titles) -> str:
    """Groups go, unless they have a title; definitions go with what they define."""
    tag = element.tag.rpartition("}")[2]
    style = _style(element.get("style") or "")
    if tag == "path":
        return "" if "none" in style and "stroke:" not in style else f'<path d="{_path(element)}"{style}/>'
    if tag == "text":
        x, y = (_rounded(element.get(key) or "0") for key in "xy")
        return f'<text x="{x}" y="{y}"{style}>{escape(element.text or "")}</text>'
    if tag != "g":
        return ""
    title = titles.get(element.get("id") or "")
    if isinstance(title, Marks):
        return _marks(element, title)
    inner = "".join(_written(child, titles) for child in element)
    return f"<g><title>{escape(title)}</title>{inner}</g>" if title and inner else inner


def _marks(element: ElementTree.Element, marks: Marks) -> str:
    places = [one for one in element.iter() if one.tag.rpartition("}")[2] == "use"]
    assert len(places) == len(marks.titles), "a mark lies outside of the figure"
    circles = (
        f'<circle cx="{_rounded(place.get("x") or "")}" cy="{_rounded(place.get("y") or "")}"'
        f' r="{marks.radius:g}"><title>{escape(title)}</title></circle>'
        for place, title in zip(places, marks.titles)
    )
    return f"<g{_style(places[0].get('style') or '')}>{''.join(circles)}</g>" if places else ""


def _style(text: str) -> str:
    pairs = (part.partition(":")[::2] for part in text.split(";") if part.strip())
    kept = [(key.strip(), value.strip()) for key, value in pairs if key.strip() not in _LEFT_OUT]
    kept = [(key, value) for key, value in kept if (key, value) != ("stroke-dashoffset", "0")]
    joined = ";".join(f"{key}:{_VARIABLES.get(value, value)}" for key, value in kept)
    return f' style="{joined}"' if joined else ""


def _path(element: ElementTree.Element) -> str:
    return re.sub(r"\s*\n\s*|(?<=[MLCQ]) |\s+(?=[MLCQz])|\s+$", "", _rounded(element.get("d") or ""))


def _rounded(text: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), text)
