"""Threads and trees as the report draws them, for pages on which no element may have a style of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treetune.reports.sections.base import Sampled
from treetune.reports.sections.threads import ThreadsDrawing
from treetune.reports.sections.tree import tree_html
from treetune.viewer.store.tokens import Tokens, own_episode
from treetune.viewer.store.whole_answers import Answer
from treetune.viewer.text import visible
from treetune.vocabulary import Episode

if TYPE_CHECKING:
    from markupsafe import Markup

NOTE = ThreadsDrawing.note

_STYLE = re.compile(r' style="(?:--s:([\d.]+)|width:([\d.]+)%)"')
"""All that drawings say by style. What a model wrote has its quotes escaped and can't look so."""


def threads(answer: Answer, tokens: Tokens, scale: float) -> Markup:
    """An answer with threads, as what was written side by side, with its critical path."""
    episode, trajectory = own_episode(answer), answer.trajectory
    row: dict[str, Any] = {
        "tokens": list(tokens.texts or ()),
        "trained": tokens.sampled.tolist(),
        "advantages": None if episode is None or episode.advantages is None else episode.advantages.tolist(),
        "step_ends": episode.step_ends if episode is not None else (),
        "step_values": episode.step_values if episode is not None else None,
        "stretches": _stretches(answer),
    }
    sampled = Sampled(trajectory.segments, trajectory.numbers) if trajectory is not None else None
    return _plain(ThreadsDrawing().html(row, sampled, scale))


def tree(iteration: int, group: Sequence[Episode], texts: Sequence[str]) -> Markup:
    """Where answers to one problem part, and what their states are worth."""
    return _plain(tree_html(iteration, group, texts))


def _stretches(answer: Answer) -> list[dict[str, Any]]:
    episode, trajectory = own_episode(answer), answer.trajectory
    if episode is not None and episode.stretches:
        return [{"end": one.end, "branch": one.branch} for one in episode.stretches]
    end, found = 0, []
    for segment in trajectory.segments if trajectory is not None else ():
        end += len(segment.token_ids)
        found.append({"end": end, "branch": segment.branch})
    return found


def _plain(html: str) -> Markup:
    """With data in place of styles, which the browser's side reads; and nothing that can't be seen."""
    from markupsafe import Markup

    def named(match: re.Match[str]) -> str:
        return f' data-strength="{match[1]}"' if match[1] is not None else f' data-width="{match[2]}"'

    return Markup(visible(_STYLE.sub(named, html)))
