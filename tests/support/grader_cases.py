"""Labelled cases of every registered grader, from `grader_cases.json`: whoever registers one adds it there.

A gold, and answers that are right, wrong, nearly right, silent, or made to hang; `[×5000` in angle brackets
(⟨⟩) is a character so many times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import treetune.parts  # noqa: F401  (registers them)
from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.conformance import Case
from treetune.vocabulary import Problem


@dataclass(frozen=True)
class Labelled:
    """`skip`: hostile answers that a preset accepts, since the code that it repeats does."""

    grader: Grader
    cases: Sequence[Case]
    skip: Sequence[str] = ()


def problem(gold: str, prompt: str = "?", data: dict[str, object] | None = None) -> Problem:
    return Problem(id=f"test/{gold[:20]}", prompt=prompt, gold=gold, data=data or {})


def is_gold(response: str, gold: str) -> float | None:
    """A user's function."""
    words = response.split()
    return float(words[-1] == gold) if words else None


ELSEWHERE = {
    "judge": "tests/domains/graders/test_judge.py",
    "weighted": "tests/domains/graders/test_foreign_rewards.py",
}
"""Those that need something to be started or others to ask, and the file of tests that compares them with
their cases."""


def _read() -> dict[str, Labelled]:
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    found: dict[str, Labelled] = {}
    for row in json.loads(re.sub(r"⟨(.)×(\d+)⟩", lambda match: match[1] * int(match[2]), text)):
        name, settings = row.pop("grader"), row.pop("settings", {})
        asked = {key: row.pop(key) for key in ("gold", "prompt", "data") if key in row}
        cases = found[name].cases if name in found else ()
        grader = Grader.parts_by_name()[name](**settings)
        found[name] = Labelled(grader, [*cases, Case(problem(**asked), **row)])
    return found


LABELLED = _read()
