"""The loop: sample, credit, train, sync; with ``overlap: 'one_step'`` the next iteration is sampled beside
training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING

from treetune.runtime.console import Clock
from treetune.runtime.directory import is_generated, samples_in, version_that_samples
from treetune.runtime.evaluation import evaluate_due
from treetune.runtime.generation import generate
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.record import Record, resume
from treetune.runtime.sampler import Sampler
from treetune.runtime.session import Session
from treetune.runtime.training import train
from treetune.vocabulary import Episode, Metrics

if TYPE_CHECKING:
    from treetune.trainer.core import PolicyTrainer

END_S = 30.0
"""How long a run that ends waits for the thread that samples beside training."""

Generated = tuple[Collection[Episode], Metrics, Clock]
"""An iteration's episodes, the metrics of making them, and where the seconds of that went."""


def run_iterations(session: Session, server: PolicyServer, sampler: Sampler, trainer: PolicyTrainer) -> None:
    """Carries out every iteration that the experiment still lacks. Collective."""
    start = resume(session, server, trainer)
    with Record.open(session, server, trainer, start) as record, Lookahead.open(sampler) as lookahead:
        for iteration in session.remaining_iterations(start):
            clock = Clock(session.console.timeline, iteration)
            with record.before_training(iteration):
                episodes, metrics = lookahead.generated(iteration, clock)
            with lookahead.generating(iteration + 1, clock):
                metrics |= train(sampler, trainer, iteration, episodes, clock)
            metrics |= server.update(trainer, iteration + 1, clock)
            metrics |= evaluate_due(sampler, iteration + 1, clock)
            record.commit(iteration, metrics, clock)


class Lookahead:
    """Gives the loop its episodes. With ``overlap: 'one_step'`` it makes those of the next iteration in a
    thread, from the weights with which the present one's training begins.

    Which weights sample what follows from the iterations' numbers (`directory.version_that_samples`) and from
    nothing that depends on time: an iteration's answers are whole before the one before is recorded, so that
    a checkpoint never lacks what older weights should have sampled. There is one thread for the whole run,
    because processes that a thread starts end with it."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._overlaps = sampler.session.config.overlap == "one_step"
        self._for_thread = sampler.for_thread() if self._overlaps else sampler
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_thread, name="lookahead", daemon=True)
        self._in_flight: dict[int, Future[Generated]] = {}

    @staticmethod
    @contextmanager
    def open(sampler: Sampler) -> Iterator[Lookahead]:
        """Ends the engine with the run, should it still be at work for the next iteration. Collective."""
        lookahead = Lookahead(sampler)
        if lookahead._overlaps:
            lookahead._thread.start()
        try:
            yield lookahead
        finally:
            lookahead._end()

    def generated(self, iteration: int, clock: Clock) -> tuple[Collection[Episode], Metrics]:
        """Returns the iteration's episodes and metrics. Collective."""
        session = self._sampler.session
        if not self._overlaps:
            return generate(self._sampler, iteration, clock)
        if (in_flight := self._in_flight.pop(iteration, None)) is not None:
            episodes, metrics, own = in_flight.result()
        else:
            known = is_generated(session.directory, iteration)
            if not known and version_that_samples(session.config, iteration) != iteration:
                session.console.say(
                    f"iteration {iteration + 1} was not sampled while the one before it was trained (the run"
                    " was to end there, or its episodes were deleted): it is sampled from the weights that"
                    " it begins with"
                )
            # What was made beside training took none of this iteration's seconds.
            own = self._clock(iteration) if known and iteration > 0 else clock
            episodes, metrics = generate(self._sampler, iteration, own)
        for phase in ("generation", "credit"):
            metrics[f"overlap/{phase}_seconds"] = own.seconds[phase]
        if episodes:
            versions = [episode.policy_version for episode in episodes]
            metrics["overlap/staleness"] = iteration - sum(versions) / len(versions)
        return episodes, metrics

    @contextmanager
    def generating(self, iteration: int, clock: Clock) -> Iterator[None]:
        """Makes the iteration's episodes while the block runs, from the weights that are there now, and waits
        for them at its end. Does nothing where iterations don't overlap. Collective."""
        session, server = self._sampler.session, self._sampler.server
        if not (self._overlaps and samples_in(session.config, session.directory, iteration)):
            yield
            return
        with clock.phase("sync"):
            server.ready()
        in_flight = self._in_flight[iteration] = Future()

        def make() -> None:
            try:
                own = self._clock(iteration)
                in_flight.set_result((*generate(self._for_thread, iteration, own), own))
            except BaseException as error:  # raised where the result is asked for
                in_flight.set_exception(error)

        self._work.put(make)
        yield
        with clock.phase("generation"):
            in_flight.result()

    def _clock(self, iteration: int) -> Clock:
        return Clock(self._sampler.session.console.timeline, iteration, "phases beside training")

    def _run_thread(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _end(self) -> None:
        if not self._thread.is_alive():
            return
        self._work.put(None)
        engine = self._sampler.server.engine
        if engine is not None and any(not one.done() for one in self._in_flight.values()):
            engine.close()  # the run is over before its time: whoever waits for the engine gets an error
        self._thread.join(END_S)
