"""Decides when a run writes a checkpoint, and deletes old ones."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from treetune.runtime.base import Checkpoints
from treetune.runtime.directory import ExperimentDirectory

MOST_SHARE_OF_TIME = 0.02
"""The largest share of a run's time that checkpoints by time may take."""

MOST_WHOLE_CHECKPOINTS = 2
"""The number of checkpoints that keep the trainer's state, the newest ones, since one may be damaged."""


class CheckpointSchedule:
    """Decides at the end of each iteration whether a checkpoint is due, by iterations or by time.

    The choice doesn't change the results of a run: training resumes from any checkpoint with bit-identical
    results.
    """

    def __init__(self, settings: Checkpoints, now: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._now = settings, now
        self._last_written = now()
        self._cost_s = 0.0
        """The seconds that the last checkpoint took."""

    def is_due_by_iterations(self, finished_iterations: int) -> bool:
        return finished_iterations % self._settings.every == 0

    def is_due_by_time(self, iteration_s: float) -> bool:
        """Returns whether another iteration of this length would put more than `at_risk_minutes` of work at
        risk. Checkpoints that take long are written less often, so that they take at most
        `MOST_SHARE_OF_TIME` of the time."""
        if self._settings.at_risk_minutes is None:
            return False
        at_risk_s = self._now() - self._last_written
        shortest_interval_s = self._cost_s / MOST_SHARE_OF_TIME
        if at_risk_s < shortest_interval_s:
            return False
        return at_risk_s + iteration_s > 60 * self._settings.at_risk_minutes

    def note_written(self, seconds: float) -> None:
        """Records that a checkpoint was written just now, and took this many seconds."""
        self._last_written, self._cost_s = self._now(), seconds


def tidy_checkpoints(
    directory: ExperimentDirectory, keep_every: int | None, last_good: int | None = None
) -> list[int]:
    """Deletes checkpoints that are no longer needed, and returns their numbers.

    The two newest checkpoints are kept whole. Some older checkpoints keep their weights and lose the
    trainer's state:

    * those due by iterations whose number is a multiple of `keep_every`;
    * the two newest of those due by iterations, since an evaluation may still wait for them;
    * the newest checkpoint up to `last_good`, the number of iterations after which the weights last showed no
      sign of a collapse (`diagnostics.find_last_good`).

    All others are deleted.
    """
    numbers = directory.checkpoints()
    due_by_iterations = directory.regular_checkpoints()  # not those written by time or after a signal
    kept_weights = set(due_by_iterations[-2:])
    if keep_every is not None:
        kept_weights |= {number for number in due_by_iterations if number % keep_every == 0}
    if last_good is not None:
        good_numbers = [number for number in numbers if number <= last_good]
        if good_numbers:
            kept_weights.add(max(good_numbers))
    deleted = []
    for number in numbers[:-MOST_WHOLE_CHECKPOINTS]:
        folder = directory.checkpoint_folder(number)
        if number in kept_weights:
            # An earlier call may have deleted it already, which is no error.
            shutil.rmtree(folder / "trainer", ignore_errors=True)
        else:
            shutil.rmtree(folder)
            deleted.append(number)
    return deleted
