"""Words that both pages of the terminal use. All text that comes from files goes through here."""

from __future__ import annotations

from rich.text import Text

from treetune_view.report.text import one_line
from treetune_view.store.standing import Accuracy, Standing

STATES = {
    "running": ("▶", "green"),
    "waiting": ("…", "yellow"),
    "stopped": ("✗", "red"),
    "finished": ("✓", "cyan"),
}
"""A sign and a colour; the word stands beside them, so that neither is needed."""

LONGEST = 400
"""Characters of a text on one line."""


def shown(text: object, style: str = "") -> Text:
    """Text of files on one line: what would move the cursor or hide is named, and nothing is markup."""
    return Text(one_line(str(text), LONGEST), style=style)


def state(one: Standing) -> Text:
    sign, colour = STATES[one.state]
    return Text(f"{sign} {one.state}", style=colour)


def progress(one: Standing) -> str:
    return f"{one.done}/{one.planned if one.planned is not None else '?'}"


def accuracy(one: Accuracy, *, bounds: bool = True) -> str:
    if not bounds or one.low is None or one.high is None:
        return f"{one.value:.3f}"
    return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"
