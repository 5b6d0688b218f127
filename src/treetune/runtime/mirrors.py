"""Sends a run's metrics to its sinks, and to a sink that is opened late those of earlier iterations.

`metrics.jsonl` is the source, and a run continues if a sink fails, or if a sink doesn't return in time: the
service that a sink writes to may hang, or the network may be gone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.sinks import Sink
from treetune.vocabulary import Metrics

logger = logging.getLogger(__name__)

CALL_S = 180.0
"""The longest that a sink may take to open, and to take the metrics of an iteration. W&B gives up to open
after 90 s."""


class Mirrors:
    """The sinks of one run. A sink that is opened gets the points that it lacks, of the
    first `finished_iterations`, or of all iterations if it is None."""

    def __init__(
        self,
        sinks: tuple[Sink, ...],
        directory: Path,
        name: str,
        config: Mapping[str, Any],
        finished_iterations: int | None = None,
    ) -> None:
        """Opens the sinks, and sends to each the rows that it lacks of the first
        `finished_iterations`."""
        self._open: list[tuple[Sink, Any, _SinkThread]] = []
        row_by_iteration = _rows_of(directory, finished_iterations) if sinks else {}
        for sink in sinks:
            try:
                thread = _SinkThread(type(sink).__name__)
                handle = thread.call(CALL_S, sink.open, directory, name, config)
                # The first iteration that the sink lacks; None if the sink gets no earlier rows.
                first_missing = thread.call(CALL_S, sink.first_missing, handle)
                if first_missing is not None:
                    for iteration, row in row_by_iteration.items():
                        if iteration >= first_missing:
                            thread.call(CALL_S, sink.log, handle, iteration, row)
                self._open.append((sink, handle, thread))
            except Exception as error:  # a sink must not end a run, and its library may raise anything
                logger.warning("%s is off for this run: %s", type(sink).__name__, error)

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Sends an iteration's metrics to all sinks. A sink that fails is switched off for the rest of the
        run."""
        for mirror in list(self._open):
            sink, handle, thread = mirror
            try:
                thread.call(CALL_S, sink.log, handle, iteration, metrics)
            except Exception as error:  # a sink must not end a run, and its library may raise anything
                logger.warning("%s is off from here on: %s", type(sink).__name__, error)
                self._open.remove(mirror)

    def close(self) -> None:
        """Closes all sinks at the end of the run, also after one has failed. Safe to call twice."""
        self._close(lambda sink, handle: sink.close(handle))

    def close_failed(self, exit_code: int, *, is_preempted: bool) -> None:
        """Closes all sinks of a run that hasn't reached its end. The arguments are those of
        `Sink.close_failed`."""
        self._close(lambda sink, handle: sink.close_failed(handle, exit_code, is_preempted=is_preempted))

    def _close(self, close_sink: Callable[[Sink, Any], None]) -> None:
        for sink, handle, thread in self._open:
            try:
                thread.call(sink.closing_s, close_sink, sink, handle)
            except Exception as error:  # a sink must not end a run, and its library may raise anything
                logger.warning("%s did not close: %s", type(sink).__name__, error)
        self._open = []


class _SinkThread:
    """Makes the calls of one sink, one after the other, in a thread of their own.

    A call that takes too long is left behind with its thread, which ends with this process.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._make_calls, name=name, daemon=True).start()

    def call(self, within_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function and returns its result. Raises TimeoutError if it takes longer than
        `within_s`."""
        future: Future[Any] = Future()
        self._calls.put((partial(function, *arguments), future))
        try:
            return future.result(within_s)
        except TimeoutError:
            if future.done():  # the function itself has raised this error
                raise
            raise TimeoutError(f"no answer within {within_s:g} s") from None

    def _make_calls(self) -> None:
        while True:
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:  # `call` raises it
                future.set_exception(error)


def _rows_of(directory: Path, finished_iterations: int | None) -> dict[int, Metrics]:
    """Returns the rows of `metrics.jsonl` by iteration, in order, of the first `finished_iterations`, or of
    all iterations if it is None.

    If an iteration was done twice, the last row counts. Damaged lines are left out: the run reports them, so
    their messages go into a list that nobody reads.
    """
    rows = {int(row["iteration"]): row for row in ExperimentDirectory(directory).read_metrics([])}
    iterations = sorted(rows)
    if finished_iterations is not None:
        iterations = [iteration for iteration in iterations if iteration < finished_iterations]
    return {iteration: rows[iteration] for iteration in iterations}
