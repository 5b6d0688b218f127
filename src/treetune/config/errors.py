"""Messages on a wrong configuration: every mistake with its key, the file that made it, a remedy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

MESSAGE_WIDTH = 110
"""Columns of a message; a terminal of 120 shows it unbroken."""

LEAST_SIMILARITY = 0.6
"""A candidate below this ratio of `difflib.SequenceMatcher` is not suggested for a misspelled name."""


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
        """Returns the lines of the message for a terminal."""
        lines = [wrap_text("", f"{self.key}: {self.what}" if self.key else self.what)]
        if self.excerpt:
            lines.append(self.excerpt)
        if self.source:
            lines.append(wrap_text("  where   ", self.source))
        if self.remedy:
            lines.append(wrap_text("  remedy  ", self.remedy))
        return "\n".join(lines)


def nearest(name: str, candidates: Iterable[str], count: int = 1) -> list[str]:
    """Returns the candidates that a misspelled `name` may mean, the best first; perhaps none."""
    typed = name.casefold()
    matcher = SequenceMatcher(b=typed)
    ranked: list[tuple[float, int, str]] = []
    for candidate in dict.fromkeys(candidates):
        folded = candidate.casefold()
        matcher.set_seq1(folded)
        similarity = matcher.ratio()
        if similarity >= LEAST_SIMILARITY:
            # To difflib, "gpro" is as similar to "gspo" as to "grpo". Only the edits tell them apart.
            ranked.append((-similarity, count_edits(typed, folded), candidate))
    return [candidate for _, _, candidate in sorted(ranked)[:count]]


def count_edits(text: str, other: str) -> int:
    """Returns the least number of edits that turn one text into another. An edit inserts, deletes or replaces
    a letter, or swaps two neighbouring letters.

    Example: 1 for ``gpro`` and ``grpo``, and 2 for ``gpro`` and ``gspo``.
    """
    # rows[i][j] is the number of edits between the first i letters of `text` and the first j of `other`.
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(text, start=1):
        row = [i]
        for j, other_letter in enumerate(other, start=1):
            replaced = rows[i - 1][j - 1] + (letter != other_letter)
            edits = min(rows[i - 1][j] + 1, row[j - 1] + 1, replaced)
            is_swap = i > 1 and j > 1 and text[i - 2 : i] == other[j - 2 : j][::-1]
            if is_swap:
                edits = min(edits, rows[i - 2][j - 2] + 1)
            row.append(edits)
        rows.append(row)
    return rows[-1][-1]


def did_you_mean(name: str, candidates: Sequence[str]) -> str:
    """Returns a remedy with the nearest candidate or, if none is near, with all of them."""
    match = nearest(name, candidates)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"known: {', '.join(sorted(candidates)) or 'none'}"


def dotted_key(path: Sequence[str]) -> str:
    return ".".join(path)


def wrap_text(label: str, text: str) -> str:
    """Returns a label and its text, wrapped to a terminal. Later lines are indented by the label's width."""
    indent = " " * max(len(label), 2)  # at least 2, so that a later line doesn't look like a new message
    lines = textwrap.wrap(label + text, MESSAGE_WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)
