"""Messages on a wrong configuration: every mistake with its key, the file that made it, a remedy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

WIDTH = 110
"""Columns of a message; a terminal of 120 shows it unbroken."""

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class ConfigIssue:
    """A mistake in a configuration.

    Example: ``ConfigIssue("unknown key of trainer", "trainer.lr", "a.jsonnet:3", "did you mean
    'learning_rate'?")``. `key` may also be a file. `excerpt` is shown as it is.
    """

    what: str
    key: str | None = None
    source: str | None = None
    remedy: str | None = None
    excerpt: str | None = None

    def render(self) -> str:
        lines = [wrapped("", f"{self.key}: {self.what}" if self.key else self.what)]
        if self.excerpt:
            lines.append(self.excerpt)
        if self.source:
            lines.append(wrapped("  where   ", self.source))
        if self.remedy:
            lines.append(wrapped("  remedy  ", self.remedy))
        return "\n".join(lines)


def nearest(name: str, candidates: Iterable[str], count: int = 1) -> list[str]:
    """Returns the candidates that a misspelled `name` may mean, the best first; perhaps none."""
    by_fold = {candidate.casefold(): candidate for candidate in candidates}
    return [by_fold[match] for match in get_close_matches(name.casefold(), by_fold, n=count, cutoff=0.6)]


def did_you_mean(name: str, candidates: Sequence[str]) -> str:
    """Returns a remedy with the nearest candidate or, if none is near, with all of them."""
    match = nearest(name, candidates)
    return f"did you mean {match[0]!r}?" if match else f"known: {', '.join(sorted(candidates)) or 'none'}"


def dotted(path: Sequence[str]) -> str:
    return ".".join(path)


def wrapped(label: str, text: str) -> str:
    """Returns a text wrapped to a terminal, with its later lines indented by the width of `label`."""
    indent = " " * max(len(label), 2)
    return "\n".join(
        textwrap.wrap(
            label + text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=True
        )
    )
