"""Sends a run's metrics to its sinks, and to a sink that is opened late those of earlier iterations.

`metrics.jsonl` is the source, and a run continues if a sink fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.sinks import Sink
from treetune.vocabulary import Metrics

logger = logging.getLogger(__name__)


class Mirrors:
    """The sinks of one run. A sink that is opened gets the points that it lacks, of the first `done`
    iterations (of all iterations if `done` is None)."""

    def __init__(
        self,
        sinks: tuple[Sink, ...],
        directory: Path,
        name: str,
        config: Mapping[str, Any],
        done: int | None = None,
    ) -> None:
        self._open: list[tuple[Sink, Any]] = []
        rows = _rows_of(directory, done) if sinks else {}  # by iteration
        for sink in sinks:
            try:
                handle = sink.open(directory, name, config)
                # The first iteration that the sink lacks; None if the sink gets no earlier rows.
                first_missing = sink.first_missing(handle)
                if first_missing is not None:
                    for iteration, row in rows.items():
                        if iteration >= first_missing:
                            sink.log(handle, iteration, row)
                self._open.append((sink, handle))
            except Exception as error:  # a sink must not end a run, and its library may raise anything
                logger.warning("%s is off for this run: %s", type(sink).__name__, error)

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Sends an iteration's metrics to all sinks. A sink that fails is switched off for the rest of the
        run."""
        for sink, handle in list(self._open):
            try:
                sink.log(handle, iteration, metrics)
            except Exception as error:  # as in `__init__`
                logger.warning("%s is off from here on: %s", type(sink).__name__, error)
                self._open.remove((sink, handle))

    def close(self) -> None:
        """Closes all sinks, also after one has failed. Safe to call twice."""
        for sink, handle in self._open:
            try:
                sink.close(handle)
            except Exception as error:  # as in `__init__`
                logger.warning("%s did not close: %s", type(sink).__name__, error)
        self._open = []


def _rows_of(directory: Path, done: int | None) -> dict[int, Metrics]:
    """Returns the rows of `metrics.jsonl` by iteration, in order, of the first `done` iterations (None: all).

    If an iteration was done twice, the last row counts. Damaged lines are left out: the run reports them, so
    their messages go into a list that nobody reads.
    """
    rows = {int(row["iteration"]): row for row in ExperimentDirectory(directory).read_metrics([])}
    return {iteration: rows[iteration] for iteration in sorted(rows) if done is None or iteration < done}
