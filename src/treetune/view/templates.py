"""Makes pages and their parts from templates, for the viewer, reports and tables.

Values that are put into a template are escaped.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treetune.runtime.console import format_duration
from treetune.view.charts import N_COLOURS, format_number, format_remark
from treetune.view.text import make_visible, render_markdown
from treetune.vocabulary import CORRECT_SCORE

if TYPE_CHECKING:
    from jinja2 import Environment

VIEW_FOLDER = Path(__file__).parent
ASSETS_FOLDER = VIEW_FOLDER / "assets"
LOOK_CSS, DRAWINGS_CSS = ASSETS_FOLDER / "look.css", ASSETS_FOLDER / "drawings.css"
"""Style sheets that the report and the viewer share: `LOOK_CSS` for colours, type and tables, and
`DRAWINGS_CSS` for drawn answers."""

STRONGEST_SHADE = 10
"""The number of the strongest shade in ``drawings.css``."""

_COLOUR_LINE = re.compile(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)")


def colour_of(position: int) -> str:
    """Returns the name of the colour, ``c0`` to ``c11``, of the experiment at this position on a page, or of
    a row of a table. After the last colour, they begin again."""
    return f"c{position % N_COLOURS}"


@functools.cache
def read_palette(theme: Literal["light", "dark"] = "light") -> dict[str, str]:
    """Returns the colours of the style sheet by name: {"c0": "#rrggbb", …}."""
    return {
        name: light if theme == "light" else dark
        for name, light, dark in _COLOUR_LINE.findall(LOOK_CSS.read_text())
    }


def render(template: str, **values: Any) -> str:
    """Returns a template filled in with values, as HTML.

    Values are escaped, except those that the template marks with `safe` because they are HTML already.
    """
    return jinja_environment().get_template(template).render(values)


def render_document(template: str, title: str, **values: Any) -> str:
    """Returns a whole HTML document that contains its style sheets, so it can be read without other files."""
    style = "".join(path.read_text() for path in (LOOK_CSS, DRAWINGS_CSS, ASSETS_FOLDER / "report.css"))
    return render(template, title=title, style=style, **values) + "\n"


@functools.cache
def jinja_environment() -> Environment:
    """Returns Jinja's environment, with the filters, tests and functions that templates use.

    If a template uses a value that it wasn't given, Jinja raises an error (`StrictUndefined`).
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    jinja = Environment(
        loader=FileSystemLoader(VIEW_FOLDER / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    filters: dict[str, Callable[..., Any]] = {
        "number": lambda value: "–" if value is None else format_number(value),
        "share": lambda value: f"{value:.3f}" if isinstance(value, int | float) else "–",
        "visible": make_visible,
        "colour": colour_of,
        "duration": lambda seconds: "–" if seconds is None else format_duration(seconds),
        "json": lambda value: json.dumps(value, separators=(",", ":")),
        "pretty": lambda value: json.dumps(value, ensure_ascii=False, indent=1, default=str),
        "when": lambda seconds: datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "in_seconds": in_seconds,
        "earned": earned_by_each,
        "rendered": render_markdown,
        "total": lambda amounts: math.fsum(amounts.values()),
    }
    jinja.filters |= filters
    jinja.tests["right"] = lambda score: score >= CORRECT_SCORE
    jinja.globals |= {"about": format_remark, "shade": shade_classes}
    return jinja


def earned_by_each(rewards: Iterable[float | None]) -> str:
    """Returns a text on the rewards of continuations: "6 earned 1, 3 earned 0"."""
    counts: Counter[str] = Counter()
    for reward in rewards:
        counts["an unknown reward" if reward is None else format_number(reward)] += 1
    return ", ".join(f"{count} earned {reward}" for reward, count in counts.most_common())


def in_seconds(seconds: float) -> str:
    """Formats a short time with three digits: ``5.11 s``, ``44 ms``, ``0.0026 ms``."""
    return f"{format_number(1000 * seconds)} ms" if seconds < 0.1 else f"{format_number(seconds)} s"


FULL_COLOUR_QUANTILE = 0.95
"""The quantile of a number's absolute values from which the colour of tokens is full. Larger values are not
darker, so a few large ones don't make all others pale."""


def shade_classes(value: float, scale: float) -> str:
    """Returns the CSS classes that colour a value by its sign and size, such as ``up s4`` or ``down s10``.

    The colour is full (``s10``) from the absolute value `scale` on.
    """
    strength = round(STRONGEST_SHADE * min(1.0, abs(value) / scale))
    return f"{'down' if value < 0 else 'up'} s{strength}"


def coloured_html(tokens: Sequence[str], advantages: Sequence[float], scale: float) -> str:
    """Returns tokens as HTML, coloured by advantage.

    Neighbours share a span if their advantages are equal to four digits after the point. `scale` is the
    absolute advantage from which the colour is full.
    """
    parts = []
    for advantage, pairs in groupby(zip(tokens, advantages), key=lambda pair: round(pair[1], 4)):
        text = escape_tokens(token for token, _ in pairs)
        classes = shade_classes(advantage, scale)
        parts.append(f'<span class="{classes}" title="advantage {advantage:+.3f}">{text}</span>')
    return "".join(parts)


def injected_html(tokens: Iterable[str]) -> str:
    """Returns text that was not sampled, as HTML."""
    return f'<span class="injected" title="injected">{escape_tokens(tokens)}</span>'


def escape_tokens(tokens: Iterable[str]) -> str:
    """Returns the text of tokens as escaped HTML, in which ends of lines and other invisible characters are
    made visible."""
    return escape(make_visible("".join(tokens))).replace("\n", "↵\n")
