"""Sections that show answers of the newest iteration: credit microscope, a problem's tree, episodes with
their steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from treetune.rollouts.storage import REMEDY, TOKENS, read_tokens
from treetune.runtime.analysis import read_result
from treetune.store.checksums import verify_once
from treetune.vocabulary import CORRECT_SCORE, Episode, Trajectory
from treetune_view.charts import number
from treetune_view.drawings import ThreadedAnswer, tree_html
from treetune_view.experiment import Experiment
from treetune_view.report.sections import ReportSection, drawing_of
from treetune_view.store.folders import stat_of
from treetune_view.store.tokens import Method, Step, made_of_credit, method_of, steps_of, text_of_each
from treetune_view.templates import coloured, injected, plain, render, shade

SHOWN = 8
"""Episodes of a report."""

COLOURED_FULLY = 0.95
"""The quantile of |advantage| among the shown tokens that has the full colour; larger ones are not darker."""

ANALYZER = "credit_microscope"
# The newest episodes


@dataclass(frozen=True)
class StoredEpisode:
    """A row of ``episodes.arrow``: the text of its prompt, and of its tokens where the row itself has these,
    as in a file of an older run."""

    episode: Episode
    prompt: str
    tokens: Sequence[str] | None

    @property
    def spread(self) -> float:
        """The range of credit within the answer."""
        values = self.episode.step_values or self.episode.advantages
        return float(np.ptp(values)) if values is not None and len(values) else 0.0


@dataclass(frozen=True)
class NewestEpisodes:
    """The rows of the newest iteration (counted from 0) that can be read; `texts` are of all tokens."""

    iteration: int
    file: Path
    rows: Sequence[StoredEpisode]
    texts: Sequence[str]

    def texts_of(self, row: StoredEpisode) -> Sequence[str]:
        return row.tokens if row.tokens is not None else text_of_each(self.texts, row.episode.response_ids)


def newest_episodes(experiment: Path, missing: list[str]) -> NewestEpisodes | None:
    """Reads the newest iteration that can be read; None if there is none, and a message in `missing` for each
    file that can't be."""
    for path in sorted(experiment.glob("iterations/*/episodes.arrow"), reverse=True):
        try:
            rows = _read_rows(path, stat_of(path))
            texts = [] if rows and rows[0].tokens is not None else read_tokens(experiment / TOKENS)
        except (
            OSError,
            ValueError,
            TypeError,
        ) as error:  # the last of a file without a column that is needed
            missing.append(f"{path.relative_to(experiment)} can't be read: {error}")
            continue
        if rows:
            return NewestEpisodes(int(path.parent.name), path, rows, texts)
    return None


@functools.lru_cache(maxsize=1)
def _read_rows(path: Path, stat: object) -> list[StoredEpisode]:
    """Reads the rows that have an answer; sections about one experiment ask one after the other."""
    import pyarrow as pa

    from treetune.rollouts.rows import episodes_of

    verify_once(path, REMEDY)
    rows = []
    with path.open("rb") as file:
        try:
            for batch in pa.ipc.open_stream(file):
                batch.validate(full=True)  # of an earlier version, without a checksum
                names = batch.schema.names
                prompts, tokens = (
                    batch[name].to_pylist() if name in names else [None] * batch.num_rows
                    for name in ("prompt", "tokens")
                )
                read = zip(episodes_of(batch), prompts, tokens, strict=True)
                rows += [StoredEpisode(one, prompt or "", own) for one, prompt, own in read]
        except pa.ArrowInvalid as error:
            raise ValueError(str(error)) from error
    return [row for row in rows if len(row.episode.response_ids)]


def _right_and_wrong(rows: Sequence[StoredEpisode], most: int) -> list[StoredEpisode]:
    """Returns right and wrong answers in equal parts where there are both, in their order, and no two of one
    problem while there are others."""

    def different_problems(own: list[StoredEpisode]) -> list[StoredEpisode]:
        first: dict[str, StoredEpisode] = {}
        for row in own:
            first.setdefault(row.episode.group or row.prompt, row)
        chosen = list(first.values())
        return chosen + [row for row in own if not any(row is other for other in chosen)]

    right = different_problems([row for row in rows if row.episode.score >= CORRECT_SCORE])
    wrong = different_problems([row for row in rows if row.episode.score < CORRECT_SCORE])
    n_right = min(len(right), max(most // 2, most - len(wrong)))
    return right[:n_right] + wrong[: most - n_right]


# Credit microscope


class MicroscopeSection(ReportSection):
    """Shows what each credit method gives the steps of a few answers, as the analyzer `credit_microscope`
    found. The run's own values stand with its episodes."""

    title = "Credit microscope"

    def html(self, experiment: Experiment) -> str:
        return "".join(render("microscope.html", **look) for look in _looks(experiment))


def _looks(experiment: Experiment) -> Iterator[dict[str, Any]]:
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
    methods: list[Method] = [
        method_of(name, credit, costs.get(name)) for name, credit in row["credit"].items()
    ]
    first, steps = methods[0], []
    for step, (_, advantage) in zip(row["steps"], first.cells, strict=True):
        # A step that begins with the end of the line before stays one line; the end token has no text.
        begins = step.startswith("\n") and len(step) > 1
        text = "↵ " * begins + plain([step[1:] if begins else step]) if step else "(end)"
        steps.append((text, shade(advantage.value, first.scale) if advantage else ""))
    return {
        "answer": row["answer"],
        "prompt": row["prompt"],
        "correct": row["correct"],
        "earned": f"reward {number(row['reward'])}",
        "unfinished": row["unfinished"],
        "steps": steps,
        "methods": methods,
    }


# The tree of a problem


class TreeSection(ReportSection):
    title = "A problem's tree"

    def html(self, experiment: Experiment) -> str:
        """The answers to the problem whose rewards differ most, and whose values move most among these."""
        newest = newest_episodes(experiment.path, [])  # another section says what can't be read
        if newest is None:
            return ""
        groups: dict[str, list[Episode]] = {}
        for row in newest.rows:
            if row.episode.step_values is not None:
                groups.setdefault(row.episode.group, []).append(row.episode)

        def spread(group: list[Episode]) -> tuple[float, float]:
            rewards = [one.reward for one in group]
            values = [value for one in group for value in one.step_values or ()]
            return max(rewards) - min(rewards), max(values) - min(values)

        several = [group for group in groups.values() if len({one.trajectory for one in group}) > 1]
        group = max(several, key=spread, default=[])
        if not group:
            return ""
        return tree_html(group, newest.texts, 0)


# Episodes


class EpisodesSection(ReportSection):
    title = "Episodes"

    def html(self, experiment: Experiment) -> str:
        """Episodes with values of their steps go first, then those with advantages; those first that are
        drawn in a way of their own, and then those whose values move most."""
        newest = newest_episodes(experiment.path, experiment.missing)
        if newest is None:
            experiment.missing.append("no episodes are there to show")
            return ""
        credited = [row for row in newest.rows if row.episode.advantages is not None]
        valued = [row for row in credited if row.episode.step_values]
        ordered = sorted(
            valued or credited or newest.rows,
            key=lambda row: (drawing_of(row.episode) is None, -row.spread, row.episode.trajectory),
        )
        chosen = _right_and_wrong(ordered, SHOWN)
        drawn = [row.episode.trajectory for row in chosen if drawing_of(row.episode)]
        trajectories: Mapping[str, Trajectory] = {}
        if drawn:
            file = newest.file.with_name("trajectories.arrow")
            trajectories = _trajectories(file, drawn, experiment.missing)
        sizes = sorted(
            abs(a)
            for row in chosen
            if row.episode.advantages is not None
            for a in row.episode.advantages.tolist()
        )
        scale = (sizes[min(len(sizes) - 1, int(COLOURED_FULLY * len(sizes)))] if sizes else 0.0) or 1.0
        listed = [row.episode for row in chosen if drawing_of(row.episode) is None]
        drawings = filter(None, (drawing_of(row.episode) for row in chosen))
        return render(
            "episodes.html",
            iteration=newest.iteration + 1,
            scale=scale if sizes else None,
            made=made_of_credit(experiment.config),
            valued=any(row.episode.step_values for row in chosen),
            any_injected=any(not one.trained.all() for one in listed),
            any_earned=any(one.step_rewards for one in listed),
            notes=dict.fromkeys(drawing.note for drawing in drawings),
            episodes=[_card(newest, row, trajectories, scale) for row in chosen],
        )


def _trajectories(path: Path, names: Sequence[str], missing: list[str]) -> dict[str, Trajectory]:
    """Reads some trajectories by their ids; none where there is no file."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from treetune.rollouts.rows import trajectories_of

    if not path.is_file():
        return {}
    trajectories: dict[str, Trajectory] = {}
    try:
        verify_once(path, REMEDY)
        with path.open("rb") as file, pa.ipc.open_stream(file) as batches:
            for batch in batches:
                batch.validate(full=True)
                samples = pc.cast(batch["sample"], pa.string())
                ids = pc.binary_join_element_wise(pc.struct_field(batch["problem"], "id"), samples, "#")
                chosen = pc.indices_nonzero(pc.is_in(ids, pa.array(names, pa.string())))
                if len(chosen):  # in buffers of their own: whoever reads columns may ignore a slice
                    trajectories |= {one.id: one for one in trajectories_of(batch.take(chosen))}
    except (ValueError, OSError) as error:  # pyarrow's own are of these
        missing.append(f"{path.name} of iteration {int(path.parent.name) + 1} can't be read: {error}")
    return trajectories


def _card(
    newest: NewestEpisodes, row: StoredEpisode, trajectories: Mapping[str, Trajectory], scale: float
) -> dict[str, Any]:
    """Returns what the template shows of an episode."""
    one, tokens = row.episode, newest.texts_of(row)
    earned = f"reward {number(one.reward)}"
    if one.score != one.reward:  # it was shaped
        earned = f"score {number(one.score)}, {earned}"
    drawing, steps = drawing_of(one), list[tuple[Step, str]]()
    if drawing is None:
        advantages = one.advantages.tolist() if one.advantages is not None else [0.0] * len(tokens)
        ends = [end for end in one.step_ends if end < len(tokens)]
        for step in steps_of(len(tokens), ends, one, earned=one.step_rewards):
            text = ""
            for is_sampled, run in groupby(range(step.start, step.end), key=one.trained.__getitem__):
                places = list(run)
                begin, end = places[0], places[-1] + 1
                if is_sampled:
                    text += coloured(tokens[begin:end], advantages[begin:end], scale)
                else:
                    text += injected(tokens[begin:end])
            steps.append((step, text))
    return {
        "correct": one.score >= CORRECT_SCORE,
        "earned": earned,
        "unfinished": one.finish_reason == "length",
        "answer": one.trajectory,
        "prompt": row.prompt,
        "drawing": ""
        if drawing is None
        else drawing.html(ThreadedAnswer(tokens, one, trajectories.get(one.trajectory), scale)),
        "steps": steps,
    }
