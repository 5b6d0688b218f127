"""The credit microscope: a few answers, and what each credit method gives their steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treetune.rollouts.storage import TOKENS, read_episodes, read_tokens
from treetune.runtime.analysis import read_result
from treetune.vocabulary import Episode
from treetune_lab.analyzers.step_credit import step_credit
from treetune_view.report.charts import number
from treetune_view.report.credit_table import method_of
from treetune_view.report.experiment import Experiment
from treetune_view.report.pages import render
from treetune_view.report.sections.base import ReportSection
from treetune_view.report.tokens import plain, shade

ANALYZER = "credit_microscope"
OWN = "the run's own"
ANSWERS = 4
"""Of the run's own values, where nobody looked through the microscope."""


class MicroscopeSection(ReportSection):
    """What the analyzer `credit_microscope` found, and else the run's own values, which need no sampling."""

    title = "Credit microscope"

    def applies(self, experiment: Experiment) -> bool:
        return bool(_results(experiment.path)) or (experiment.path / TOKENS).is_file()

    def html(self, experiment: Experiment) -> str:
        looks = [*_looks(experiment)] or [*_own(experiment)]
        return "".join(render("microscope.html", **look) for look in looks)


def _results(path: Path) -> list[Path]:
    return sorted(path.glob("analyses/*/result.json"))


def _looks(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """What the analyzer left, an iteration after the other."""
    for path in _results(experiment.path):
        try:
            result = read_result(path.parent)
            if result["analyzer"] != ANALYZER:
                continue
            numbers = result["numbers"]
            for point, found in numbers["by_iteration"].items():
                yield {
                    "iteration": int(point) + 1,
                    "truth": numbers["truth"],
                    "command": "",
                    "answers": [_answer(one, found["costs"]) for one in found["answers"]],
                }
        except (OSError, ValueError, KeyError, TypeError) as error:
            experiment.missing.append(f"{path.relative_to(experiment.path)} can't be read: {error!r}")


def _own(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """The newest iteration's own values."""
    for path in sorted(experiment.path.glob("iterations/*/episodes.arrow"), reverse=True):
        try:
            valued = [one for one in read_episodes(path) if one.step_values and one.advantages is not None]
            texts = read_tokens(experiment.path / TOKENS)
        except (OSError, ValueError):  # another section says so
            return
        valued = [one for one in valued if not one.stretches]  # threads have a drawing of their own
        if valued:
            rows = [_row(one, texts) for one in _telling(valued)]
            yield {
                "iteration": int(path.parent.name) + 1,
                "truth": 0,
                "command": "configs/analyzers/credit_microscope.jsonnet",
                "answers": [_answer(row, {}) for row in rows],
            }
        return


def _telling(episodes: Sequence[Episode]) -> list[Episode]:
    """Right and wrong answers in equal parts, those first whose values move most."""

    def spread(one: Episode) -> tuple[float, str]:
        values = one.step_values or (0.0,)
        return min(values) - max(values), one.trajectory

    first: dict[tuple[bool, str], Episode] = {}
    for one in sorted(episodes, key=spread):
        first.setdefault((one.correct, one.group), one)
    right = [one for one in first.values() if one.correct]
    wrong = [one for one in first.values() if not one.correct]
    of_right = min(len(right), max(ANSWERS // 2, ANSWERS - len(wrong)))
    return [*right[:of_right], *wrong[: ANSWERS - of_right]]


def _row(one: Episode, texts: Sequence[str]) -> dict[str, Any]:
    """As the analyzer writes them."""

    def text(ids: Any) -> str:
        return "".join(texts[token] if token < len(texts) else "" for token in ids.tolist())

    assert one.advantages is not None
    starts = (0, *one.step_ends[:-1])
    credit = step_credit(
        one.step_ends,
        one.reward,
        one.advantages.tolist(),
        one.step_ends,
        one.step_values,
        one.step_errors,
    )
    return {
        "answer": one.trajectory,
        "prompt": text(one.prompt_ids),
        "reward": one.reward,
        "correct": one.correct,
        "unfinished": one.finish_reason == "length",
        "steps": [
            text(one.response_ids[start:end]) for start, end in zip(starts, one.step_ends, strict=True)
        ],
        "credit": {OWN: credit.plain()},
    }


def _answer(row: Mapping[str, Any], costs: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """What the template shows of an answer: its steps' texts as HTML, coloured by the first method."""
    methods = [method_of(name, credit, costs.get(name)) for name, credit in row["credit"].items()]
    first = methods[0]
    shades = [shade(cell.advantage.value, first.scale) if cell.advantage else "" for cell in first.cells]
    return {
        "answer": row["answer"],
        "prompt": row["prompt"],
        "correct": row["correct"],
        "earned": f"reward {number(row['reward'])}",
        "unfinished": row["unfinished"],
        "steps": [*zip(map(_text, row["steps"]), shades, strict=True)],
        "methods": methods,
    }


def _text(step: str) -> str:
    """As HTML: where a step begins with the end of the line before, its own stays one line; the end token has
    no text."""
    begins = step.startswith("\n") and len(step) > 1
    return "↵ " * begins + plain([step[1:] if begins else step]) if step else "(end)"
