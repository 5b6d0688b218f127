"""Sections that show answers of the newest iteration: credit microscope, a problem's tree, episodes with
their steps. Answers are read as the viewer reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from typing_extensions import override

from treetune.runtime.analysis import read_result
from treetune.view.charts import number
from treetune.view.drawings import NOTE, ThreadedAnswer, threads_html, tree_html
from treetune.view.experiment import StoredExperiment
from treetune.view.report.sections import ReportSection
from treetune.view.store.answers import AnswerStore, StoredAnswer
from treetune.view.store.folders import Run
from treetune.view.store.index import AnswerFile, sources
from treetune.view.store.tokens import (
    OF_CREDIT,
    MethodCredit,
    all_texts,
    made_of_credit,
    method_of,
    texts_of,
    tokens_of,
)
from treetune.view.templates import coloured, injected, plain, render, shade
from treetune.vocabulary import CORRECT_SCORE

SHOWN = 8
"""Episodes of a report."""

COLOURED_FULLY = 0.95
"""The quantile of |advantage| among the shown tokens that has the full colour; larger ones are not darker."""

ANALYZER = "credit_microscope"


def newest(experiment: StoredExperiment) -> tuple[AnswerStore, AnswerFile] | None:
    """Returns the answers of the newest iteration that has episodes which can be read; None where there are
    none. What can't be read is `missing`. It is read once for all sections."""
    path = experiment.path
    if "newest" not in experiment.kept and all_texts(path) is not None:
        folder, run = TemporaryDirectory(), Run(path.name, path)
        there = [one for one in reversed(sources(run)) if one.episodes is not None]
        # What was trained is there also where the file of the whole answers is damaged.
        tried = [one for each in there for one in (each, replace(each, path=each.episodes or each.path))]
        for source in tried:
            answers = AnswerStore(run, Path(folder.name))
            try:
                answers.read_now(source)
            except (ValueError, OSError, KeyError) as error:  # of a file without a column that is needed
                words = f"{source.title} can't be read: {error}"
                experiment.missing.extend({words}.difference(experiment.missing))
                continue
            if answers.sql("SELECT 1 FROM answers WHERE tokens > 0 LIMIT 1"):
                # With the folder of the index, which goes with what is kept.
                experiment.kept["newest"] = (answers, source, folder)
                break
    found = experiment.kept.setdefault("newest", None)
    return found and found[:2]


# Credit microscope


class MicroscopeSection(ReportSection):
    """Shows what each credit method gives the steps of a few answers, as the analyzer `credit_microscope`
    found. The run's own values stand with its episodes."""

    title = "Credit microscope"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        return "".join(render("microscope.html", **look) for look in _looks(experiment))


def _looks(experiment: StoredExperiment) -> Iterator[dict[str, Any]]:
    """Yields what the analyzer left, an iteration after the other."""
    for path in sorted(experiment.path.glob("analyses/*/result.json")):
        try:
            result = read_result(path.parent)
            if result["analyzer"] != ANALYZER:
                continue
            numbers = result["numbers"]
            for point, own in numbers["by_iteration"].items():
                yield {
                    "iteration": int(point) + 1,
                    "truth": numbers["truth"],
                    "answers": [_looked_at(one, own["costs"]) for one in own["answers"]],
                }
        except (OSError, ValueError, KeyError, TypeError) as error:
            experiment.missing.append(f"{path.relative_to(experiment.path)} can't be read: {error!r}")


def _looked_at(row: Mapping[str, Any], costs: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Returns what the template shows of an answer: its steps' texts as HTML, coloured by the first
    method."""
    methods: list[MethodCredit] = [
        method_of(name, credit, costs.get(name)) for name, credit in row["credit"].items()
    ]
    first, steps = methods[0], []
    for step, (_, advantage) in zip(row["steps"], first.cells, strict=True):
        # A step that begins with the end of the line before stays one line; the end token has no text.
        begins = step.startswith("\n") and len(step) > 1
        text = "↵ " * begins + plain([step[1:] if begins else step]) if step else "(end)"
        steps.append((text, shade(advantage.value, first.scale) if advantage else ""))
    return {
        **{name: row[name] for name in ("answer", "prompt", "correct", "unfinished")},
        "earned": f"reward {number(row['reward'])}",
        "steps": steps,
        "methods": methods,
    }


# The tree of a problem, and episodes


class TreeSection(ReportSection):
    title = "A problem's tree"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """The answers to the problem whose rewards differ most, and whose credit is largest among these."""
        if (found := newest(experiment)) is None:
            return ""
        answers, source = found
        chosen = answers.sql(
            "SELECT problem FROM answers WHERE first_value IS NOT NULL GROUP BY problem"
            " HAVING count(DISTINCT answer) > 1"
            " ORDER BY max(reward) - min(reward) DESC, max(advantage_size) DESC, problem LIMIT 1"
        )
        for row in chosen:
            group = [one for one in answers.group(source.name, row["problem"]) if one.step_values]
            return tree_html(group, all_texts(experiment.path) or (), 0)
        return ""


class EpisodesSection(ReportSection):
    title = "Episodes"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """Right and wrong answers in equal parts where there are both, no two to one problem while there are
        others: first those with values of their steps, then those with the largest advantages."""
        if (found := newest(experiment)) is None:
            experiment.missing.append("no episodes are there to show")
            return ""
        answers, source = found
        trained = "" if source.path == source.episodes else " AND episode_place IS NOT NULL"
        rows = answers.sql(
            "SELECT *, score >= ? AS is_right,"
            " row_number() OVER (PARTITION BY is_right, problem ORDER BY advantage_size DESC, row) AS nth"
            f" FROM answers WHERE tokens > 0{trained}"
            " ORDER BY first_value IS NULL, advantage_size IS NULL, nth > 1, advantage_size DESC, row",
            [CORRECT_SCORE],
        )
        right = [row for row in rows if row["is_right"]]
        wrong = [row for row in rows if not row["is_right"]]
        n_right = min(len(right), max(SHOWN // 2, SHOWN - len(wrong)))
        chosen = [answers.whole(row) for row in (*right[:n_right], *wrong[: SHOWN - n_right])]
        chosen = [one for one in chosen if one.episodes]
        credit = [one.episodes[0].advantages for one in chosen]
        sizes = np.concatenate([np.abs(one) for one in credit if one is not None] or [np.empty(0)])
        scale = float(np.quantile(sizes, COLOURED_FULLY)) or 1.0 if len(sizes) else None
        cards = [_card(experiment, one, scale or 1.0) for one in chosen]
        return render(
            "episodes.html",
            iteration=source.number,
            scale=scale,
            made=made_of_credit(experiment.config),
            valued=any(one.episodes[0].step_values for one in chosen),
            any_injected=any(card["injected"] for card in cards),
            any_earned=any(one.episodes[0].step_rewards for one in chosen),
            notes=[NOTE] if any(card["drawing"] for card in cards) else [],
            episodes=cards,
        )


def _card(experiment: StoredExperiment, answer: StoredAnswer, scale: float) -> dict[str, Any]:
    """Returns what the template shows of an episode."""
    # Of an answer that was cut into several rows, the first.
    own = answer if answer.episode is not None else replace(answer, trajectory=None)
    one, tokens = own.episode, tokens_of(experiment.path, own, experiment.config)
    assert one is not None and tokens is not None and tokens.texts is not None
    drawing, steps = "", []
    if any(stretch.branch for stretch in one.stretches):
        drawing = threads_html(ThreadedAnswer(tokens.texts, one, answer.trajectory, scale))
    else:
        given = tokens.numbers.get(OF_CREDIT, tokens.numbers.get("advantage", np.zeros(tokens.count)))
        advantages = np.nan_to_num(given).tolist()
        for step in tokens.steps:
            text = ""
            for is_sampled, run in groupby(range(step.start, step.end), key=tokens.sampled.__getitem__):
                places = list(run)
                part = slice(places[0], places[-1] + 1)
                words = tokens.texts[part]
                text += coloured(words, advantages[part], scale) if is_sampled else injected(words)
            steps.append((step, text))
    earned = f"reward {number(one.reward)}"
    if one.score != one.reward:  # it was shaped
        earned = f"score {number(one.score)}, {earned}"
    return {
        "correct": one.score >= CORRECT_SCORE,
        "earned": earned,
        "unfinished": one.finish_reason == "length",
        "answer": one.trajectory,
        "prompt": answer.trajectory.problem.prompt
        if answer.trajectory is not None
        else "".join(texts_of(experiment.path, one.prompt_ids) or ()),
        "drawing": drawing,
        "steps": steps,
        "injected": not drawing and not tokens.sampled.all(),
    }
