"""When a run writes a checkpoint, and which of them stay."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from treetune.runtime.base import Checkpoints
from treetune.runtime.directory import ExperimentDirectory

MOST_SHARE = 0.02
"""Share of a run's time that checkpoints by time may take."""

KEPT_WHOLE = 2
"""Newest checkpoints that are kept with the trainer's state: one may be damaged."""


class CheckpointSchedule:
    """Says at the end of each iteration whether a checkpoint is due, by iterations or by time.

    When one is written changes no number of a run: training goes on from it to the same bits.
    """

    def __init__(self, settings: Checkpoints, now: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._now = settings, now
        self._last_written = now()
        self._cost_s = 0.0

    def is_due_by_iterations(self, done: int) -> bool:
        return done % self._settings.every == 0

    def is_due_by_time(self, iteration_s: float) -> bool:
        """Returns whether another iteration as long as the last would put more than `at_risk_minutes` of work
        at risk. Checkpoints that are expensive come less often, so that they take a small share of the
        time."""
        if self._settings.at_risk_minutes is None:
            return False
        at_risk_s = self._now() - self._last_written
        if at_risk_s < self._cost_s / MOST_SHARE:
            return False
        return at_risk_s + iteration_s > 60 * self._settings.at_risk_minutes

    def note_written(self, seconds: float) -> None:
        """Notes that a checkpoint was written just now, and took so long."""
        self._last_written, self._cost_s = self._now(), seconds


def tidy_checkpoints(
    directory: ExperimentDirectory, keep_every: int | None, last_good: int | None = None
) -> list[int]:
    """Deletes checkpoints that nobody needs any more, and returns their numbers.

    The two newest are kept whole. Of older ones the weights alone are kept: of every `keep_every`-th, of the
    newest that is not beyond `last_good` (see `diagnostics`), and of the two newest that were due by
    iterations, so that checkpoints by time push out none that an evaluation waits for.
    """
    numbers = directory.checkpoints()
    regular = directory.regular_checkpoints()
    kept_weights = set(regular[-KEPT_WHOLE:])
    if keep_every is not None:
        kept_weights |= {number for number in regular if number % keep_every == 0}
    if last_good is not None:
        kept_weights |= {max((number for number in numbers if number <= last_good), default=0)}
    deleted = []
    for number in numbers[:-KEPT_WHOLE]:
        folder = directory.checkpoint(number)
        if number in kept_weights:
            shutil.rmtree(folder / "trainer", ignore_errors=True)
        else:
            shutil.rmtree(folder)
            deleted.append(number)
    return deleted
