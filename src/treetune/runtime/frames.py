"""Reads a run as pandas data frames. `treetune.open` returns a `RunFrames`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.rollouts.storage import StoredEpisodes, answer_row, read_trajectories
from treetune.runtime.directory import ANSWERS, EPISODES, TRAJECTORIES, ExperimentDirectory, verify_answers
from treetune.vocabulary import CORRECT_SCORE, Episode

if TYPE_CHECKING:
    import pandas as pd

SAMPLED_SET = "sampled"
"""The `set` of answers that were sampled to train on."""


@dataclass(frozen=True)
class RunFrames:
    """The data frames of a run, which may still be running.

    Each frame is read from disk when it is first used; open the run again to see newer rows. Damaged files
    raise ValueError with a remedy.

    The column `iteration` counts from 0 for answers and episodes of an iteration. For answers of an
    evaluation it is the number of iterations after which the policy was measured.
    """

    path: Path

    def __post_init__(self) -> None:
        if not self._directory.config_file.is_file():
            raise ValueError(
                f"{self.path} is not a run, since it has no config.json: give the folder of a run, such as"
                " experiments/quickstart/sft"
            )

    @property
    def _directory(self) -> ExperimentDirectory:
        return ExperimentDirectory(self.path)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row for each finished iteration: ``train/loss``, ``episodes/reward``, ``seconds/total``, …"""
        return _make_frame(self._directory.read_metrics())

    @cached_property
    def answers(self) -> pd.DataFrame:
        """A row for each graded answer. `set` is ``sampled``, or the name of the evaluation set.

        `correct` is True if the reward is at least 1 (`CORRECT_SCORE`). `reward` is None if the answer could
        not be graded; `correct` is then False.
        """
        return _make_frame(self._answers())

    @cached_property
    def episodes(self) -> pd.DataFrame:
        """A row for each training row. `token_ids`, `trained`, `advantages` and `logprobs` (the engine's) are
        arrays with one entry for each response token; the last two may be None."""
        rows = []
        for iteration, episode in self._episodes():
            rows.append(
                {
                    "iteration": iteration,
                    "problem": episode.group,
                    "answer": episode.trajectory,
                    "domain": episode.domain,
                    "reward": episode.reward,
                    "score": episode.score,
                    "text": episode.text,
                    "token_ids": episode.response_ids,
                    "trained": episode.trained,
                    "advantages": episode.advantages,
                    "logprobs": episode.behaviour_logprobs,
                }
            )
        return _make_frame(rows)

    @cached_property
    def values(self) -> pd.DataFrame:
        """A row for each step of each training row, for credits that divide answers into steps.

        A step covers the response tokens from `start` up to and without `end`. `value` is the value of the
        state before the step (NaN if the credit has no values). `error` is the standard error of this value.
        The error is infinite if the value was not estimated from samples of this state. For example, a step
        that is credited together with the step before it repeats the value of that step. `advantage` is the
        mean over the step's trained tokens (NaN if there are none).
        """
        rows: list[dict[str, Any]] = []
        for iteration, episode in self._episodes():
            rows += _rows_of_steps(iteration, episode)
        return _make_frame(rows)

    def _episodes(self) -> Iterator[tuple[int, Episode]]:
        for iteration in self._directory.iterations_with(EPISODES):
            for episode in StoredEpisodes(self._directory.iteration_folder(iteration) / EPISODES):
                yield iteration, episode

    def _answers(self) -> Iterator[dict[str, Any]]:
        """Yields the rows of `answers`: first those that were sampled to train on, then those of
        evaluations."""
        for iteration in self._directory.iterations_with(TRAJECTORIES):
            for answer in read_trajectories(self._directory.iteration_folder(iteration) / TRAJECTORIES):
                origin = {"set": SAMPLED_SET, "iteration": iteration, "answer": answer.id}
                yield origin | answer_row(answer) | {"correct": answer.grade.correct}
        for number, name in self._directory.evaluations():
            path = self._directory.evaluation_folder(number, name) / ANSWERS
            if not path.is_file():
                continue
            verify_answers(path)
            for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
                origin = {"set": name, "iteration": number, "answer": f"{row['problem']}#{row['sample']}"}
                reward = row["reward"]  # None if the answer could not be graded
                is_correct = reward is not None and reward >= CORRECT_SCORE
                yield origin | row | {"correct": is_correct}


def _rows_of_steps(iteration: int, episode: Episode) -> Iterator[dict[str, Any]]:
    """Yields the rows of `values` for an episode."""
    # Each step begins where the step before it ends: the ends (4, 6) give the steps (0, 4) and (4, 6).
    steps = itertools.pairwise((0, *episode.step_ends))
    for number, (start, end) in enumerate(steps):
        trained = episode.trained[start:end]
        advantage = np.nan
        if episode.advantages is not None and trained.any():
            advantage = episode.advantages[start:end][trained].mean()
        yield {
            "iteration": iteration,
            "problem": episode.group,
            "answer": episode.trajectory,
            "step": number,
            "start": start,
            "end": end,
            "value": episode.step_values[number] if episode.step_values else np.nan,
            "error": episode.step_errors[number] if episode.step_errors else np.nan,
            "advantage": advantage,
            "reward": episode.reward,
        }


def _make_frame(rows: Any) -> pd.DataFrame:
    """Returns a data frame of rows, which are dictionaries."""
    import pandas

    return pandas.DataFrame(list(rows))
