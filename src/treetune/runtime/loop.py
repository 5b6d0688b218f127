"""Runs the loop: sample, credit, train, sync; with ``overlap: 'one_step'`` an iteration is sampled while the
one before it is trained.

An iteration, and what is on disk after each phase. R is a rank, and i counts from 0::

    weights i
        │
    generation   iterations/i/journal/rollout-R.jsonl    each request, as soon as it is answered
        │        iterations/i/rollout.json               metrics of the phase
        │        iterations/i/trajectories.arrow         graded answers; the phase is finished
    credit       iterations/i/journal/credit-R.jsonl     each continuation, as soon as it is answered
        │        iterations/i/credit.json                metrics of both phases
        │        iterations/i/episodes.arrow             training rows; both phases are finished
    training     iterations/i/token_signals.arrow        for people and the viewer: a restart doesn't read it
        │
    sync         the engine gets weights i + 1, which a few sampled answers verify (a canary)
    evaluation   evaluations/i+1/SET/summary.json        where a set is due
        │
    commit       iterations/i/metrics.json
                 checkpoints/i+1/                        where one is due
                 metrics.jsonl                           one line more: iterations/i/metrics.json

The run may be killed at any time, since each file appears whole or not at all. The next start takes the
newest checkpoint, reads finished phases of later iterations from disk, and continues an unfinished phase with
the requests that are not in its journal. Only training is repeated, on the same episodes and with
bit-identical results.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

from treetune.runtime.console import Clock
from treetune.runtime.directory import is_generated, needs_sampling, sampling_version
from treetune.runtime.evaluation import evaluate_due
from treetune.runtime.generation import generate
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.record import Record, resume
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.runtime.training import train
from treetune.vocabulary import Episode, Metrics

if TYPE_CHECKING:
    from treetune.trainer.core import PolicyTrainer

THREAD_END_TIMEOUT_S = 30.0
"""The longest that a run which ends waits for its second thread."""

Generated = tuple[Collection[Episode], Metrics, Clock]
"""An iteration's episodes, the metrics of making them, and the clock with the seconds that it took."""


def run_iterations(
    session: Session, server: PolicyServer, resources: RunResources, trainer: PolicyTrainer
) -> None:
    """Runs every iteration that the experiment still needs. Collective."""
    start = resume(session, server, trainer)
    with Record.open(session, server, trainer, start) as record, Lookahead.open(resources) as lookahead:
        for iteration in session.remaining_iterations(start):
            clock = Clock(session.console.timeline, iteration)
            with record.before_training(iteration):  # a signal may end the run in this block
                episodes, metrics = lookahead.take_episodes(iteration, clock)
            with lookahead.generate_meanwhile(iteration + 1, clock):
                metrics |= train(resources, trainer, iteration, episodes, clock)
            metrics |= server.update(trainer, iteration + 1, clock)
            metrics |= evaluate_due(resources, iteration + 1, clock)
            record.commit(iteration, metrics, clock)


class Lookahead:
    """Gives the loop its episodes. With ``overlap: 'one_step'`` a second thread makes those of the next
    iteration while the present one is trained, from the weights that this training begins with.

    Both threads of each rank, during iteration i::

        main thread (the loop)                         thread "lookahead"
        ─────────────────────────────────────────      ──────────────────────────────────────
        take_episodes(i)                               waits in work.get()
        generate_meanwhile(i + 1):
          server.wait_until_ready(): the engine has weights i
          work.put(make)  ──────────────────────────►  generate(i + 1), from weights i
          train(i)                                       │
          future.result(): waits  ◄──────────────────  future.set_result or set_exception
        server.update: weights i + 1                   waits in work.get()
        …
        at the end of the run:
          work.put(None)  ──────────────────────────►  returns, once it has finished what it does
          engine.close() if a future isn't done  ───►  the request that it waits for raises
          thread.join(THREAD_END_TIMEOUT_S)

    The threads never use the engine at the same time: the main thread samples (evaluation) and loads weights
    only while the other one waits. The second threads of all ranks communicate in a separate process group,
    so that their collective calls don't mix with those of training.

    The weights that sample an iteration follow from its number (`directory.sampling_version`), and not from
    the speed of the threads. An iteration that was not sampled ahead is the only exception (`_generate_now`).
    The episodes of iteration i + 1 are on disk before iteration i is committed. So a run that resumes from
    checkpoint i + 1 needs no samples from weights i, which it may no longer have.
    """

    def __init__(self, resources: RunResources) -> None:
        self._resources = resources
        self._overlaps = resources.session.config.overlap == "one_step"
        self._resources_of_thread = resources.for_thread() if self._overlaps else resources
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """The functions that the thread calls one after another; None ends it."""
        # One thread for the whole run: child processes that a thread starts die with it (PDEATHSIG).
        self._thread = threading.Thread(target=self._run_thread, name="lookahead", daemon=True)
        self._in_flight: dict[int, Future[Generated]] = {}
        """The iterations that the thread has begun and the loop hasn't taken."""

    @staticmethod
    @contextmanager
    def open(resources: RunResources) -> Iterator[Lookahead]:
        """Starts the second thread, and ends it with the block. Collective.

        If the second thread still samples at the end of the block, the engine is closed.
        """
        lookahead = Lookahead(resources)
        if lookahead._overlaps:
            lookahead._thread.start()
        try:
            yield lookahead
        finally:
            lookahead._end()

    def take_episodes(self, iteration: int, clock: Clock) -> tuple[Collection[Episode], Metrics]:
        """Returns the iteration's episodes and metrics. Makes them now if the second thread has not begun to
        make them. Collective."""
        if not self._overlaps:
            return generate(self._resources, iteration, clock)
        in_flight = self._in_flight.pop(iteration, None)
        if in_flight is not None:
            episodes, metrics, generation_clock = in_flight.result()
        else:
            episodes, metrics, generation_clock = self._generate_now(iteration, clock)
        for phase in ("generation", "credit"):
            metrics[f"overlap/{phase}_seconds"] = generation_clock.seconds[phase]
        if episodes:
            versions = [episode.policy_version for episode in episodes]
            metrics["overlap/staleness"] = iteration - sum(versions) / len(versions)
        return episodes, metrics

    def _generate_now(self, iteration: int, clock: Clock) -> Generated:
        """Generates an iteration that the second thread hasn't begun, in the main thread.

        Such an iteration is the first one of this process, or one whose episodes are on disk.
        """
        session = self._resources.session
        is_on_disk = is_generated(session.directory, iteration)
        # Whether this iteration was to be sampled while the previous iteration was trained.
        was_to_overlap = sampling_version(session.config, iteration) != iteration
        if not is_on_disk and was_to_overlap:
            session.console.say(
                f"iteration {iteration + 1} was not sampled while the one before it was trained (the run"
                " was to end there, or its episodes were deleted): it is sampled from the weights that"
                " it begins with"
            )
        # Most episodes on disk were made while the previous iteration was trained. Their seconds then count
        # for no iteration, so they go to a clock of the second thread.
        generation_clock = self._clock_of_thread(iteration) if is_on_disk else clock
        episodes, metrics = generate(self._resources, iteration, generation_clock)
        # But an earlier process may have made them within this iteration, from the weights that it begins
        # with. Then their seconds count for this iteration.
        made_in_iteration = iteration == 0 or any(episode.policy_version == iteration for episode in episodes)
        if is_on_disk and made_in_iteration:
            for phase in ("generation", "credit"):
                clock.add_earlier(phase, generation_clock.seconds[phase])
        return episodes, metrics, generation_clock

    @contextmanager
    def generate_meanwhile(self, iteration: int, clock: Clock) -> Iterator[None]:
        """Makes the iteration's episodes from the present weights while the block runs. Collective.

        Waits for the episodes at the end of the block. Does nothing without an overlap, or if the iteration
        needs no sampling.
        """
        session, server = self._resources.session, self._resources.server
        if not (self._overlaps and needs_sampling(session.config, session.directory, iteration)):
            yield
            return
        # The engine must have the weights that training begins with. It gets them here, before training
        # changes the trainer's weights.
        with clock.phase("sync"):
            server.wait_until_ready()
        in_flight = self._in_flight[iteration] = Future()

        def make() -> None:
            try:
                generation_clock = self._clock_of_thread(iteration)
                episodes, metrics = generate(self._resources_of_thread, iteration, generation_clock)
                in_flight.set_result((episodes, metrics, generation_clock))
            except BaseException as error:  # the main thread raises it, from `in_flight.result()`
                in_flight.set_exception(error)

        self._work.put(make)
        yield
        # Reached only if training raised nothing: otherwise the run ends, and `_end` stops the thread.
        with clock.phase("generation"):
            in_flight.result()

    def _clock_of_thread(self, iteration: int) -> Clock:
        """Returns a clock of the second thread. Its seconds run during the training of another iteration, so
        they count for no iteration."""
        return Clock(self._resources.session.console.timeline, iteration, "phases during training")

    def _run_thread(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _end(self) -> None:
        """Ends the second thread. Does nothing if it wasn't started or has ended."""
        if not self._thread.is_alive():
            return
        self._work.put(None)  # ends the thread's loop, once it has finished what it does now
        engine = self._resources.server.engine
        is_sampling = any(not in_flight.done() for in_flight in self._in_flight.values())
        if engine is not None and is_sampling:
            # The run ends early. If the thread waits for the engine, its call then raises, and the thread
            # ends.
            engine.close()
        self._thread.join(THREAD_END_TIMEOUT_S)
