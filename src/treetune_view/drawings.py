"""Threads as the report draws them."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from treetune_view.report.sections.base import Sampled
from treetune_view.report.sections.threads import ThreadsDrawing
from treetune_view.store.tokens import Tokens, own_episode
from treetune_view.store.whole_answers import Answer

NOTE = ThreadsDrawing.note


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
    return Markup(ThreadsDrawing().html(row, sampled, scale))


def _stretches(answer: Answer) -> list[dict[str, Any]]:
    episode, trajectory = own_episode(answer), answer.trajectory
    if episode is not None and episode.stretches:
        return [{"end": one.end, "branch": one.branch} for one in episode.stretches]
    end, found = 0, []
    for segment in trajectory.segments if trajectory is not None else ():
        end += len(segment.token_ids)
        found.append({"end": end, "branch": segment.branch})
    return found
