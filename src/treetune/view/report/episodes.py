"""Report sections about single answers: the credit microscope, the tree of a problem, and episodes.

The tree and the episodes are from the newest iteration.
"""

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
from treetune.runtime.directory import RESULT
from treetune.view.charts import format_number
from treetune.view.drawings import DRAWING_NOTE, ThreadedAnswer, threads_html, tree_html
from treetune.view.experiment import StoredExperiment
from treetune.view.report.sections import ReportSection
from treetune.view.store.answers import AnswerStore, StoredAnswer
from treetune.view.store.folders import Run
from treetune.view.store.index import AnswerFile, find_sources
from treetune.view.store.tokens import (
    ADVANTAGE_OF_CREDIT,
    CreditedStep,
    MethodCredit,
    Tokens,
    all_texts,
    describe_credit_change,
    method_of,
    texts_of,
    tokens_of,
)
from treetune.view.templates import (
    FULL_COLOUR_QUANTILE,
    coloured_html,
    escape_tokens,
    injected_html,
    render,
    shade_classes,
)
from treetune.vocabulary import CORRECT_SCORE, Episode

MOST_EPISODES = 8
"""The most episodes in a report."""

SHOWN_ANALYZER = "credit_microscope"
"""The analyzer whose results the section "Credit microscope" shows."""


def open_newest_answers(experiment: StoredExperiment) -> tuple[AnswerStore, AnswerFile] | None:
    """Returns (store, file) for the answers of the newest iteration whose episodes can be read.

    Returns None if there is no such iteration. Messages on files that can't be read are added to the
    experiment's `missing`. The result is kept in the experiment's cache for further sections.
    """
    path = experiment.path
    # Without the texts of tokens, no episode can be drawn.
    if "newest" not in experiment.cache and all_texts(path) is not None:
        folder, run = TemporaryDirectory(), Run(path.name, path)
        candidates: list[AnswerFile] = []
        for source in reversed(find_sources(run)):
            if source.episodes is not None:
                # If the file of answers is damaged, the file of episodes is read in its place.
                candidates += [source, replace(source, path=source.episodes)]
        for source in candidates:
            answers = AnswerStore(run, Path(folder.name))
            try:
                answers.read_now(source)
            except (ValueError, OSError, KeyError) as error:  # KeyError: a column is missing in the file
                message = f"{source.title} can't be read: {error}"
                if message not in experiment.missing:
                    experiment.missing.append(message)
                continue
            if answers.sql("SELECT 1 FROM answers WHERE tokens > 0 LIMIT 1"):
                # The temporary folder with the index would be deleted with its object, so the object is kept
                # in the cache, too.
                experiment.cache["newest"] = (answers, source, folder)
                break
    newest = experiment.cache.setdefault("newest", None)  # None: there is no such iteration
    if newest is None:
        return None
    answers, source, _ = newest
    return answers, source


# Credit microscope


class MicroscopeSection(ReportSection):
    """Shows the credit of several methods for the steps of a few answers, from the analyzer
    `credit_microscope`.

    The run's own credit is in the section of episodes.
    """

    title = "Credit microscope"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        return "".join(render("microscope.html", **look) for look in _microscope_values(experiment))


def _microscope_values(experiment: StoredExperiment) -> Iterator[dict[str, Any]]:
    """Yields the values for ``microscope.html``, for each iteration that the analyzer `credit_microscope`
    examined."""
    for label in experiment.directory.analyses():
        folder = experiment.directory.analysis_folder(label)
        try:
            result = read_result(folder)
            if result["analyzer"] != SHOWN_ANALYZER:
                continue
            numbers = result["numbers"]
            for iteration, result_of_iteration in numbers["by_iteration"].items():
                costs = result_of_iteration["costs"]
                yield {
                    "iteration": int(iteration) + 1,
                    "truth": numbers["truth"],
                    "answers": [_microscope_card(row, costs) for row in result_of_iteration["answers"]],
                }
        except (OSError, ValueError, KeyError, TypeError) as error:
            name = (folder / RESULT).relative_to(experiment.path)
            experiment.missing.append(f"{name} can't be read: {error!r}")


def _microscope_card(row: Mapping[str, Any], costs: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Returns what the template shows of an answer, whose steps are coloured by the first method's
    advantages.

    `row` is the analyzer's result for the answer, and `costs` has the cost of each method, by its name.
    """
    methods: list[MethodCredit] = [
        method_of(name, credit, costs.get(name)) for name, credit in row["credit"].items()
    ]
    first_method, steps = methods[0], []
    # A method's cell is a pair for each step: the value before the step, and the step's advantage.
    for step, (_, advantage) in zip(row["steps"], first_method.cells, strict=True):
        if not step:  # the end token has no text
            text = "(end)"
        elif step.startswith("\n") and len(step) > 1:
            # Shows "\nSo x = 2" as "↵ So x = 2", without an empty line before it.
            text = "↵ " + escape_tokens([step[1:]])
        else:
            text = escape_tokens([step])
        steps.append((text, shade_classes(advantage.value, first_method.scale) if advantage else ""))
    return {
        **{name: row[name] for name in ("answer", "prompt", "correct", "unfinished")},
        "earned": f"reward {format_number(row['reward'])}",
        "steps": steps,
        "methods": methods,
    }


# The tree of a problem, and episodes


class TreeSection(ReportSection):
    title = "A problem's tree"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """Shows the answers to one problem: the problem whose answers differ most in reward.

        Among equal problems, the one with the largest advantage is shown. Only answers whose steps have
        values count, and only problems with several such answers.
        """
        answers_and_source = open_newest_answers(experiment)
        if answers_and_source is None:
            return ""
        answers, source = answers_and_source
        chosen_problems = answers.sql(
            "SELECT problem FROM answers WHERE first_value IS NOT NULL GROUP BY problem"
            " HAVING count(DISTINCT answer) > 1"
            " ORDER BY max(reward) - min(reward) DESC, max(advantage_size) DESC, problem LIMIT 1"
        )
        if not chosen_problems:
            return ""
        problem = chosen_problems[0]["problem"]
        group = [episode for episode in answers.group(source.name, problem) if episode.step_values]
        # The table below the tree has the steps of the group's first answer (0).
        return tree_html(group, all_texts(experiment.path) or (), 0)


class EpisodesSection(ReportSection):
    title = "Episodes"

    @override
    def html(self, experiment: StoredExperiment) -> str:
        """Shows a few answers: as many correct as wrong ones, and to different problems, if there are enough.

        Answers with values of their steps are taken first, then those with the largest advantages.
        """
        answers_and_source = open_newest_answers(experiment)
        if answers_and_source is None:
            experiment.missing.append("there are no episodes to show")
            return ""
        answers, source = answers_and_source
        # This condition leaves out answers without a training row. It isn't needed if the answers are read
        # from the file of episodes (demonstrations, or a damaged file of answers): each is then a training
        # row.
        if_trained = "" if source.path == source.episodes else " AND episode_place IS NOT NULL"
        # `nth` is the number of an answer among the right, or the wrong, answers to its problem: a second one
        # comes only after the first ones to all problems.
        rows = answers.sql(
            "SELECT *, score >= ? AS is_right,"
            " row_number() OVER (PARTITION BY is_right, problem ORDER BY advantage_size DESC, row) AS nth"
            f" FROM answers WHERE tokens > 0{if_trained}"
            " ORDER BY first_value IS NULL, advantage_size IS NULL, nth > 1, advantage_size DESC, row",
            [CORRECT_SCORE],
        )
        right = [row for row in rows if row["is_right"]]
        wrong = [row for row in rows if not row["is_right"]]
        # Half of the shown answers are right, or more of them if there are too few wrong ones.
        n_right = min(len(right), max(MOST_EPISODES // 2, MOST_EPISODES - len(wrong)))
        chosen_answers = [
            answers.read_whole_answer(row) for row in (*right[:n_right], *wrong[: MOST_EPISODES - n_right])
        ]
        chosen_answers = [answer for answer in chosen_answers if answer.episodes]
        episodes = [answer.episodes[0] for answer in chosen_answers]
        sizes = [np.abs(episode.advantages) for episode in episodes if episode.advantages is not None]
        scale = None
        if sizes and sum(map(len, sizes)):
            scale = float(np.quantile(np.concatenate(sizes), FULL_COLOUR_QUANTILE)) or 1.0
        cards = [_make_card(experiment, answer, scale or 1.0) for answer in chosen_answers]
        return render(
            "episodes.html",
            iteration=source.number,
            scale=scale,
            made=describe_credit_change(experiment.config),
            valued=any(episode.step_values for episode in episodes),
            any_injected=any(card["injected"] for card in cards),
            any_earned=any(episode.step_rewards for episode in episodes),
            notes=[DRAWING_NOTE] if any(card["drawing"] for card in cards) else [],
            episodes=cards,
        )


def _make_card(experiment: StoredExperiment, answer: StoredAnswer, scale: float) -> dict[str, Any]:
    """Returns what the template shows of an answer and its episode.

    `scale` is the |advantage| from which the colour is full.
    """
    shown_answer = answer
    if answer.episode is None:
        # The answer was cut into several training rows, and none of them has all of its tokens. So the first
        # row is shown: without a trajectory, `episode` is the first row.
        shown_answer = replace(answer, trajectory=None)
    episode, tokens = shown_answer.episode, tokens_of(experiment.path, shown_answer, experiment.config)
    assert episode is not None and tokens is not None and tokens.texts is not None
    drawing, steps = "", list[tuple[CreditedStep, str]]()
    # A stretch is tokens that were sampled or injected together, and its branch says the thread that they are
    # in. An answer with threads is shown as a drawing, and not as a list of steps.
    if any(stretch.branch for stretch in episode.stretches):
        drawing = threads_html(ThreadedAnswer(tokens.texts, episode, answer.trajectory, scale))
    else:
        steps = _coloured_steps(tokens, scale, ends_by_itself=episode.finish_reason == "stop")
    earned = f"reward {format_number(episode.reward)}"
    if episode.score != episode.reward:  # the reward was shaped
        earned = f"score {format_number(episode.score)}, {earned}"
    earlier_messages, prompt = _prompt_of(experiment, answer, episode)
    return {
        "correct": episode.score >= CORRECT_SCORE,
        "earned": earned,
        "unfinished": episode.finish_reason == "length",
        "answer": episode.trajectory,  # the answer's name
        "earlier": earlier_messages,
        "prompt": prompt,
        "drawing": drawing,
        "steps": steps,
        "injected": not drawing and not tokens.sampled.all(),
    }


def _coloured_steps(tokens: Tokens, scale: float, *, ends_by_itself: bool) -> list[tuple[CreditedStep, str]]:
    """Returns (step, HTML of its text) for each step of an answer without threads.

    Sampled tokens are coloured by the advantages of credit, and injected tokens are marked as such.

    Args:
        tokens: The tokens of the answer, with their texts.
        scale: The |advantage| from which the colour is full.
        ends_by_itself: Whether the answer ends with an end token, which has no text.
    """
    assert tokens.texts is not None
    # If training changed the advantages, for example by normalising them, "advantage" has the changed numbers
    # and `ADVANTAGE_OF_CREDIT` those of credit. If it didn't, "advantage" has those of credit.
    name = ADVANTAGE_OF_CREDIT if ADVANTAGE_OF_CREDIT in tokens.numbers else "advantage"
    of_credit = tokens.numbers.get(name, np.zeros(tokens.count))  # zeros without credit: nothing is coloured
    advantages = np.nan_to_num(of_credit).tolist()
    steps = []
    for step in tokens.steps:
        html = ""
        positions = range(step.start, step.end)
        for is_sampled, group in groupby(positions, key=tokens.sampled.__getitem__):
            consecutive = list(group)
            part = slice(consecutive[0], consecutive[-1] + 1)
            texts = tokens.texts[part]
            html += coloured_html(texts, advantages[part], scale) if is_sampled else injected_html(texts)
        has_no_text = not any(tokens.texts[step.start : step.end])
        if has_no_text and step.end == tokens.count and ends_by_itself:
            html = "⟨end⟩"  # the step is only the end token
        steps.append((step, html))
    return steps


def _prompt_of(experiment: StoredExperiment, answer: StoredAnswer, episode: Episode) -> tuple[str, str]:
    """Returns the text of the earlier messages of a conversation, and the prompt.

    In a conversation, the prompt is the last message. The earlier messages are shown apart from it, because
    they are often solved examples that all prompts have. Their text is empty if there are none.
    """
    if answer.trajectory is None:  # only the ids of the prompt's tokens are stored
        return "", "".join(texts_of(experiment.path, episode.prompt_ids) or ())
    problem = answer.trajectory.problem
    if len(problem.messages) <= 1:
        return "", problem.prompt
    *earlier_messages, last_message = problem.messages
    earlier = "\n\n".join(f"{message.role}: {message.content}" for message in earlier_messages)
    return earlier, last_message.content
