"""A run as pandas data frames: what `treetune.open` returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.rollouts.storage import StoredEpisodes, answer_row, read_trajectories
from treetune.runtime.directory import ANSWERS, EPISODES, ExperimentDirectory, verify_answers
from treetune.vocabulary import CORRECT_SCORE, Episode

if TYPE_CHECKING:
    import pandas as pd

SAMPLED = "sampled"
"""The `set` of answers that were sampled to train on."""


@dataclass(frozen=True)
class RunFrames:
    """A run that has ended or goes on. Each frame is read from disk when it is first asked for; open the run
    again to see what came since. Damaged files raise ValueError and say what to do.

    `iteration` counts from 0 for what an iteration sampled and trained on. An evaluation's is the number of
    iterations that the measured policy was trained for.
    """

    path: Path

    def __post_init__(self) -> None:
        if not (self.path / "config.json").is_file():
            raise ValueError(
                f"{self.path} is no run (it has no config.json): give one, such as experiments/quickstart/sft"
            )

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row for each finished iteration: ``train/loss``, ``episodes/reward``, ``seconds/total``, …"""
        return _frame(ExperimentDirectory(self.path).read_metrics())

    @cached_property
    def answers(self) -> pd.DataFrame:
        """A row for each graded answer. `set` is ``sampled``, or the name of the evaluation set.

        `correct` is True for full reward, and `reward` is None where nobody could grade.
        """
        return _frame(self._answers())

    @cached_property
    def episodes(self) -> pd.DataFrame:
        """A row for each training row. `token_ids`, `trained`, `advantages` and `logprobs` (the engine's) are
        arrays with one entry for each response token; the last two may be None."""
        rows = (
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
            for iteration, episode in self._episodes()
        )
        return _frame(rows)

    @cached_property
    def values(self) -> pd.DataFrame:
        """A row for each step of each training row whose credit knows steps.

        The step covers response tokens from `start` up to and without `end`. `value` is that of the state
        before it (NaN where credit has no values), `error` the value's standard error (infinite for a step
        that shares the credit of the one before it), `advantage` the mean over the step's trained tokens.
        """
        return _frame(row for iteration, episode in self._episodes() for row in _steps(iteration, episode))

    def _episodes(self) -> Iterator[tuple[int, Episode]]:
        for path in sorted(self.path.glob(f"iterations/*/{EPISODES}")):
            for episode in StoredEpisodes(path):
                yield int(path.parent.name), episode

    def _answers(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.path.glob("iterations/*/trajectories.arrow")):
            for answer in read_trajectories(path):
                where = {"set": SAMPLED, "iteration": int(path.parent.name), "answer": answer.id}
                yield where | answer_row(answer) | {"correct": answer.grade.correct}
        for path in sorted(self.path.glob(f"evaluations/*/*/{ANSWERS}")):
            verify_answers(path)
            done, name = int(path.parent.parent.name), path.parent.name
            for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
                where = {"set": name, "iteration": done, "answer": f"{row['problem']}#{row['sample']}"}
                yield where | row | {"correct": (row["reward"] or 0.0) >= CORRECT_SCORE}


def _steps(iteration: int, episode: Episode) -> Iterator[dict[str, Any]]:
    ends = episode.step_ends
    for number, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        trained = episode.trained[start:end]
        advantages = None if episode.advantages is None else episode.advantages[start:end][trained]
        yield {
            "iteration": iteration,
            "problem": episode.group,
            "answer": episode.trajectory,
            "step": number,
            "start": start,
            "end": end,
            "value": episode.step_values[number] if episode.step_values else np.nan,
            "error": episode.step_errors[number] if episode.step_errors else np.nan,
            "advantage": np.nan if advantages is None or not len(advantages) else advantages.mean(),
            "reward": episode.reward,
        }


def _frame(rows: Any) -> pd.DataFrame:
    import pandas

    return pandas.DataFrame(list(rows))
