"""The loop: sample, credit, train, sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treetune.runtime.clock import Clock
from treetune.runtime.evaluation import evaluate_due
from treetune.runtime.lookahead import Lookahead
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.record import Record, resume
from treetune.runtime.sampler import Sampler
from treetune.runtime.session import Session
from treetune.runtime.training import train

if TYPE_CHECKING:
    from treetune.trainers.core import PolicyTrainer


def run_iterations(session: Session, server: PolicyServer, sampler: Sampler, trainer: PolicyTrainer) -> None:
    """Every iteration that the experiment still lacks. Collective."""
    start = resume(session, server, trainer)
    with Record.open(session, server, trainer, start) as record, Lookahead.open(sampler) as lookahead:
        for iteration in session.remaining_iterations(start):
            clock = Clock(session.console.timeline, iteration)
            episodes, metrics = lookahead.generated(iteration, clock)
            with lookahead.generating(iteration + 1, clock):
                metrics |= train(sampler, trainer, iteration, episodes, clock)
            metrics |= server.update(trainer, iteration + 1, clock)
            metrics |= evaluate_due(sampler, iteration + 1, clock)
            record.commit(iteration, metrics, clock)
