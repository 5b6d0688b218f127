"""The arena's page about single steps: which credit finds the step that decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from treetune.lab.analyzers.figures import NumberWithInterval
from treetune.lab.arena.gain import markdown_table
from treetune.lab.arena.steps import STEP_MEASURES

Scores = Mapping[str, Mapping[str, Any]]
"""The scores of each method on one language, as `scores.scores` returns them."""

STEPS_PREFACE = """\
Does a credit find the step of an answer that mattered? In the arena's toy languages the exact advantage of
every step is known, so the credits of an answer's steps can be compared with it. The credit of a step is the
mean advantage of its tokens.

* *Rank correlation with the truth*: Spearman's correlation, over the steps of an answer, of their credits
  with their true advantages; the mean over answers. It is 0 for a credit that is the same for all steps, such
  as GRPO's. Many true advantages are 0, and noise in the credit of these steps lowers the correlation.
* *With the log-probability*: the same with the log-probability of each step under the policy, to see whether
  the credit follows fluency. Compare it with the row *true advantages*, whose correlation need not be 0.
* *Finds the decisive step*: the share of answers in which the step with the largest credit (in size) also has
  the largest true advantage (in size). If several steps have the largest credit, one of them is drawn.
* *Against chance*: the same share for a step drawn at random, and whether the credit's share is above or
  below it; "at" if the interval contains it.

Intervals are 95 % bootstraps over problems; those of the means contain the sampling error alone. Two rows are
signals rather than credits: *log-probability*, whose largest step is the least likely one, and *hindsight
ratio, exact*: the probability of a step given that the answer is correct, over its probability under the
policy, minus 1."""


def write_steps_page(folder: Path, scores_by_language: Mapping[str, Scores], command: str) -> None:
    """Writes arena_steps.md: a table of means over the arena's toy languages, and a table for each language.

    `command` is the command that made the scores.
    """
    lines = ["# Arena: which credit finds the decisive step", "", f"    {command}", "", STEPS_PREFACE, ""]
    lines += ["## All languages (means)", "", *steps_table(mean_over_languages(scores_by_language)), ""]
    for language, scores in scores_by_language.items():
        lines += [f"## {language}", "", *steps_table(scores), ""]
    (folder / "arena_steps.md").write_text("\n".join(lines))


def steps_table(scores: Scores) -> list[str]:
    """Returns the lines of a table in Markdown, with a row for each method. The highest correlation with the
    truth comes first."""
    rows = []
    for name, score in sorted(scores.items(), key=lambda item: -(item[1]["truth"]["value"] or 0.0)):
        cells = [_with_interval(score[measure]) for measure in ("truth", "fluency", "decisive")]
        chance = score["chance"]["value"]
        chance_text = "–" if chance is None else f"{compare_with_chance(score)} {chance:.3f}"
        rows.append([name, *cells, chance_text])
    heads = [
        "method",
        "rank correlation with the truth ↑",
        "with the log-probability",
        "finds the decisive step ↑",
        "against chance",
    ]
    return markdown_table(heads, rows)


def compare_with_chance(score: Mapping[str, Any]) -> str:
    """Returns whether the interval of `decisive` is "above", "below" or "at" chance.

    Returns "–" if the measure is not defined, as no answer has a decisive step.
    """
    decisive, chance = score["decisive"], score["chance"]
    if decisive["value"] is None:
        return "–"
    if decisive["low"] > chance["value"]:
        return "above"
    return "below" if decisive["high"] < chance["value"] else "at"


def mean_over_languages(scores_by_language: Mapping[str, Scores]) -> dict[str, dict[str, NumberWithInterval]]:
    """Returns the measures of each method that was scored in every language, as means over the languages.

    The languages are the arena's toy languages, in which the true advantages are known. The interval is the
    sampling error of the mean. The languages' errors are independent, so the error of the mean is the root of
    the sum of their squares, divided by the number of languages. A measure that is not defined in a language
    is a mean over the other languages.
    """
    first, *others = scores_by_language.values()
    means_by_method = {}
    for name in first:
        if not all(name in scores for scores in others):
            continue
        means: dict[str, NumberWithInterval] = {}
        for measure in STEP_MEASURES:
            numbers = [scores[name][measure] for scores in scores_by_language.values()]
            means[measure] = _mean_of_numbers(numbers)
        means_by_method[name] = means
    return means_by_method


def _mean_of_numbers(numbers: Sequence[NumberWithInterval]) -> NumberWithInterval:
    """Returns the mean of numbers with independent errors; those without a value are left out."""
    values, errors_below, errors_above = [], [], []
    for number in numbers:
        value, low, high = number["value"], number["low"], number["high"]
        if value is not None and low is not None and high is not None:
            values.append(value)
            errors_below.append(value - low)
            errors_above.append(high - value)
    if not values:
        return {"value": None, "low": None, "high": None}
    mean = fmean(values)
    below, above = math.hypot(*errors_below), math.hypot(*errors_above)
    return {"value": mean, "low": mean - below / len(values), "high": mean + above / len(values)}


def _with_interval(number: NumberWithInterval) -> str:
    """Returns a number with its interval, ``0.81 [0.79, 0.83]``, or only the number if it is exact,
    ``0.125``."""
    if number["value"] is None:
        return "–"
    if number["low"] == number["high"]:
        return f"{number['value']:.3f}"  # exact
    return f"{number['value']:.2f} [{number['low']:.2f}, {number['high']:.2f}]"
