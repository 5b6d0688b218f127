"""LiveBench's tasks on reasoning, language and tables (White et al., 2024, arXiv:2406.19314)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated

from annotated_types import MinLen

from treetune.tasks.graders.base import Grader
from treetune.tasks.graders.extraction import (
    THINK_END,
    after_thought,
    fenced_blocks,
    last_between,
    last_box,
)
from treetune.vocabulary import Grade, Problem
from treetune_domains.graders import livebench_scores as scores
from treetune_domains.graders.livebench_tables import same_table

LONGEST = 50_000
"""Characters of an answer that are compared."""

_BOLD = re.compile(r"\*\*+([^*\n]+)\*\*+")

SCORES: dict[str, Callable[[str, str], float]] = {
    "web_of_lies_v2": scores.truths,
    "web_of_lies_v3": scores.truths,
    "house_traversal": scores.names_in_order,
    "spatial": scores.one_answer,
    "zebra_puzzle": scores.several_answers,
    "connections": scores.groups_of_four,
    "typos": scores.corrected_text,
    "plot_unscrambling": scores.order_of_sentences,
    "cta": scores.label,
    "tablejoin": scores.mapping,
    "tablereformat": same_table,
}
"""What an answer to a question of each task earns, given the answer and the gold."""

_WHOLE = ("typos", "plot_unscrambling", "cta", "tablejoin", "tablereformat")
"""Tasks whose answer may be all that is said."""

_FENCED = ("tablejoin", "tablereformat")


@Grader.register("livebench")
@dataclass(frozen=True, kw_only=True)
class LiveBench(Grader):
    r"""An answer earns what LiveBench gives for it, by the row's `task`: 1 for a correct one, and in
    ``connections``, ``zebra_puzzle``, ``tablejoin`` and ``plot_unscrambling`` a part of it for a part.

    The answer stands behind the last `think_end`: in the last ``<solution>…</solution>``, else in the last
    ``\boxed{…}``, else (tables) in the last fenced block, else in bold on the last line that has any, else
    on the last line, or, where a whole text or table is asked for, is all of it. Only this one counts, where
    the published scorers take the best or any of several, and a part of another word is no answer.
    """

    task_field: Annotated[str, MinLen(1)] = "task"
    """The field of the row that names its task."""
    think_end: Annotated[str, MinLen(1)] = THINK_END

    def extract(self, response: str, problem: Problem) -> str | None:
        said, task = after_thought(response, self.think_end), self._task(problem)
        if task == "plot_unscrambling" and "<PLOT_SUMMARY>" in said:
            _, _, said = said.rpartition("<PLOT_SUMMARY>")
            return said.partition("</PLOT_SUMMARY>")[0].strip() or None
        found = last_between(said, "<solution>", "</solution>") or last_box(said)
        if task in _FENCED:
            found = next(reversed(fenced_blocks(found or said)), found)
        elif found is None and task not in ("typos", "plot_unscrambling"):
            found = _bold(said)
        if found is None:
            found = said if task in _WHOLE else said.strip().rpartition("\n")[2]
        # A tab at the end is an empty cell.
        return found.strip(" \r\n") if found.strip() else None

    def verdict(self, extracted: str, problem: Problem) -> Grade:
        score = SCORES[self._task(problem)](extracted[:LONGEST], problem.gold)
        return Grade(reward=score, outcome="ok")

    def _task(self, problem: Problem) -> str:
        task = str(problem.data.get(self.task_field, ""))
        if task in SCORES:
            return task
        near = get_close_matches(task, SCORES, n=1)
        raise ValueError(
            f"problem {problem.id} says {task!r} under {self.task_field!r}, and the tasks of LiveBench that"
            f" are known here are {', '.join(SCORES)}" + (f"; did you mean {near[0]!r}?" if near else "")
        )


def _bold(text: str) -> str | None:
    """What stands in bold on the last line that has any, with commas between its parts."""
    for line in reversed(text.split("\n")):
        if parts := [part.strip(" .,:") for part in _BOLD.findall(line)]:
            return ", ".join(part for part in parts if part)
    return None
