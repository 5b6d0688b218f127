"""Some episodes of an iteration as HTML: each step's text coloured by its advantage, with its value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from treetune.vocabulary import CORRECT_SCORE
from treetune_view.report.answer_steps import Step, made_of_credit, steps_of
from treetune_view.report.charts import number
from treetune_view.report.episode_sample import EpisodeSample, sample_episodes, score_of
from treetune_view.report.experiment import Experiment
from treetune_view.report.pages import render
from treetune_view.report.sections.base import ReportSection, drawing_of
from treetune_view.report.tokens import coloured, injected

COLOURED_FULLY = 0.95
"""The quantile of |advantage| among the shown tokens that has the full colour; larger ones are not darker."""


class EpisodesSection(ReportSection):
    title = "Episodes"

    def applies(self, experiment: Experiment) -> bool:
        return True

    def html(self, experiment: Experiment) -> str:
        sample = sample_episodes(experiment.path, experiment.missing)
        return episodes_html(sample, made_of_credit(experiment.config)) if sample is not None else ""


def episodes_html(sample: EpisodeSample, made: str) -> str:
    """The sample as a section's inner HTML; `made` says what training makes of its advantages."""
    sizes = sorted(abs(a) for row in sample.rows for a in row.get("advantages") or ())
    scale = (sizes[min(len(sizes) - 1, int(COLOURED_FULLY * len(sizes)))] if sizes else 0.0) or 1.0
    drawings = [drawing_of(row) for row in sample.rows]
    listed = [row for row, drawing in zip(sample.rows, drawings, strict=True) if drawing is None]
    return render(
        "episodes.html",
        iteration=sample.iteration + 1,
        scale=scale if sizes else None,
        made=made,
        valued=any(row.get("step_values") for row in sample.rows),
        any_injected=any(not all(row.get("trained") or ()) for row in listed),
        any_earned=any(row.get("step_rewards") for row in listed),
        notes=dict.fromkeys(drawing.note for drawing in drawings if drawing),
        episodes=[
            _episode(
                row, drawing.html(row, sample.sampled.get(row["trajectory"]), scale) if drawing else "", scale
            )
            for row, drawing in zip(sample.rows, drawings, strict=True)
        ],
    )


def _episode(row: dict[str, Any], drawing: str, scale: float) -> dict[str, Any]:
    earned = f"reward {number(row['reward'])}"
    if score_of(row) != row["reward"]:  # it was shaped
        earned = f"score {number(score_of(row))}, {earned}"
    return {
        "correct": score_of(row) >= CORRECT_SCORE,
        "earned": earned,
        "unfinished": row.get("finish_reason") == "length",
        "answer": row.get("trajectory") or "",
        "prompt": row["prompt"],
        "drawing": drawing,
        "steps": [] if drawing else list(_steps(row, scale)),
    }


def _steps(row: dict[str, Any], scale: float) -> Iterator[tuple[Step, str]]:
    """Each step with its text as HTML, in which what was injected is told from what was sampled."""
    tokens, advantages = row["tokens"], row.get("advantages")
    trained = row.get("trained") or [True] * len(tokens)
    own_ends = row.get("step_ends") or ()
    for step in steps_of(
        len(tokens),
        [end for end in own_ends if end < len(tokens)],
        earned=row.get("step_rewards") or (),
        advantages=advantages,
        reward=row["reward"],
        own_ends=own_ends,
        values=row.get("step_values"),
        errors=row.get("step_errors"),
    ):
        yield step, "".join(_text(tokens, advantages, scale, trained, step))


def _text(
    tokens: Sequence[str],
    advantages: Sequence[float] | None,
    scale: float,
    trained: Sequence[bool],
    step: Step,
) -> Iterator[str]:
    for is_sampled, places in groupby(range(step.start, step.end), key=lambda place: trained[place]):
        run = list(places)
        texts = [tokens[place] for place in run]
        if is_sampled:
            yield coloured(texts, [advantages[place] if advantages else 0.0 for place in run], scale)
        else:
            yield injected(texts)
