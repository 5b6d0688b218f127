"""Contexts for rollouts and credit without a run around them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from treetune.rollouts.context import AnswerSettings, Log, RolloutContext, ShapingMemory

SETTINGS = [field.name for field in fields(AnswerSettings)]
LOG = [field.name for field in fields(Log)]


def context_of(task: Any, engine: Any, grader: Any, codec: Any, **given: Any) -> RolloutContext:
    """A context whose settings and log are given by the names of their fields."""
    settings = {name: given.pop(name) for name in SETTINGS if name in given}
    log = {name: given.pop(name) for name in LOG if name in given}
    return RolloutContext(
        task=task,
        engine=engine,
        grader=grader,
        codec=codec,
        settings=AnswerSettings(**{"context_length": 64, **settings}),
        log=Log(**log),
        **{"seed": 1, "iteration": 0, "shaping_memory": ShapingMemory(), **given},
    )
