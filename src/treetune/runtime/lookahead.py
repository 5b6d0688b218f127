"""An iteration's answers, sampled when they are asked for or while the iteration before is trained."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

from treetune.runtime.clock import Clock
from treetune.runtime.due import is_generated, sampled_by, samples_in
from treetune.runtime.generation import generate
from treetune.runtime.sampler import Sampler
from treetune.vocabulary import Episode, Metrics

END_S = 30.0
"""How long a run that ends waits for what it samples on the side."""


class Generated(NamedTuple):
    """An iteration's episodes, the metrics of making them, and where the seconds of that went."""

    episodes: Collection[Episode]
    metrics: Metrics
    clock: Clock


class Lookahead:
    """Gives the loop its episodes. With ``overlap: 'one_step'`` it makes those of the next iteration in a
    thread, from the weights with which the present one's training begins.

    Which weights sample what is a matter of the iterations' numbers (`due.sampled_by`) and of nothing that
    depends on time: an iteration's answers are whole before the one before is recorded, so that a checkpoint
    never lacks what older weights should have sampled. The thread is one for the run: processes that it
    starts end with it.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._overlaps = sampler.session.config.overlap == "one_step"
        self._aside = sampler.aside() if self._overlaps else sampler
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry_out, name="lookahead", daemon=True)
        self._begun: dict[int, Future[Generated]] = {}

    @staticmethod
    @contextmanager
    def open(sampler: Sampler) -> Iterator[Lookahead]:
        """Whatever ends the run ends the engine too, should it still be at work for the next iteration.
        Collective."""
        lookahead = Lookahead(sampler)
        if lookahead._overlaps:
            lookahead._thread.start()
        try:
            yield lookahead
        finally:
            lookahead._end()

    def generated(self, iteration: int, clock: Clock) -> tuple[Collection[Episode], Metrics]:
        """The iteration's episodes and metrics. Collective."""
        session = self._sampler.session
        if not self._overlaps:
            return generate(self._sampler, iteration, clock)
        if (begun := self._begun.pop(iteration, None)) is not None:
            made = begun.result()
        else:
            known = is_generated(session.directory, iteration)
            if not known and sampled_by(session.config, iteration) != iteration:
                session.console.say(
                    f"iteration {iteration + 1} was not sampled while the one before it was trained (the run"
                    " was to end there, or its episodes were deleted): it is sampled from the weights that"
                    " it begins with"
                )
            # What was made beside training took none of this iteration's seconds.
            own = self._clock(iteration) if known and iteration > 0 else clock
            made = Generated(*generate(self._sampler, iteration, own), own)
        return made.episodes, made.metrics | _of_overlap(iteration, made)

    @contextmanager
    def generating(self, iteration: int, clock: Clock) -> Iterator[None]:
        """Makes the iteration's episodes while what is inside is done, from the weights that are there now,
        and waits for them at the end. Nothing, where iterations don't overlap. Collective.
        """
        session, server = self._sampler.session, self._sampler.server
        if not (self._overlaps and samples_in(session.config, session.directory, iteration)):
            yield
            return
        with clock.phase("sync"):
            server.ready()
        assert server.engine is not None
        begun = self._begin(iteration)
        yield
        with clock.phase("generation"):
            begun.result()

    def _begin(self, iteration: int) -> Future[Generated]:
        begun: Future[Generated] = Future()

        def make() -> None:
            try:
                clock = self._clock(iteration)
                begun.set_result(Generated(*generate(self._aside, iteration, clock), clock))
            except BaseException as error:  # raised where the result is asked for
                begun.set_exception(error)

        self._begun[iteration] = begun
        self._work.put(make)
        return begun

    def _clock(self, iteration: int) -> Clock:
        """Of what is made beside training."""
        return Clock(self._sampler.session.console.timeline, iteration, "phases beside training")

    def _carry_out(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _end(self) -> None:
        if not self._thread.is_alive():
            return
        self._work.put(None)
        engine = self._sampler.server.engine
        if engine is not None and any(not one.done() for one in self._begun.values()):
            engine.close()  # the run is over before its time: whoever waits for the engine is told so
        self._thread.join(END_S)


def _of_overlap(iteration: int, made: Generated) -> Metrics:
    """How many versions old the answers are, and what it took to make them, beside training or not."""
    metrics = {f"overlap/{phase}_seconds": made.clock.seconds[phase] for phase in ("generation", "credit")}
    if made.episodes:
        versions = [one.policy_version for one in made.episodes]
        metrics["overlap/staleness"] = iteration - sum(versions) / len(versions)
    return metrics
