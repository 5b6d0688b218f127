"""Sampled text in HTML, coloured token by token by its advantage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby


def coloured(tokens: Sequence[str], advantages: Sequence[float], scale: float) -> str:
    """Neighbouring tokens of one advantage share a span; its strength is a CSS variable from 0 to 1."""
    parts = []
    for advantage, pairs in groupby(zip(tokens, advantages), key=lambda pair: round(pair[1], 4)):
        text = plain(token for token, _ in pairs)
        strength = min(1.0, abs(advantage) / scale)
        direction = " down" if advantage < 0 else ""
        parts.append(
            f'<span class="token{direction}" style="--s:{strength:.2f}" title="advantage {advantage:+.3f}">'
            f"{text}</span>"
        )
    return "".join(parts)


def plain(tokens: Iterable[str]) -> str:
    """Escaped, and ends of lines visible."""
    return escape("".join(tokens)).replace("\n", '<span class="newline">↵</span>\n')
