"""Sampled text in HTML, coloured token by token by its advantage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from treetune_view.report.text import visible

FULL = 10
"""The strongest of the shades that drawings.css has."""


def shade(value: float, scale: float) -> str:
    """The classes that colour what has this value: its direction, and its strength, full from `scale` on."""
    strength = round(FULL * min(1.0, abs(value) / scale))
    return f"{'down' if value < 0 else 'up'} s{strength}"


def coloured(tokens: Sequence[str], advantages: Sequence[float], scale: float) -> str:
    """Neighbouring tokens of one advantage share a span."""
    parts = []
    for advantage, pairs in groupby(zip(tokens, advantages), key=lambda pair: round(pair[1], 4)):
        text = plain(token for token, _ in pairs)
        parts.append(
            f'<span class="{shade(advantage, scale)}" title="advantage {advantage:+.3f}">{text}</span>'
        )
    return "".join(parts)


def injected(tokens: Iterable[str]) -> str:
    """Text that was not sampled."""
    return f'<span class="injected" title="injected">{plain(tokens)}</span>'


def plain(tokens: Iterable[str]) -> str:
    """Escaped; ends of lines, and what else can't be seen, are visible."""
    return escape(visible("".join(tokens))).replace("\n", "↵\n")
