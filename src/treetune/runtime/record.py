"""What a run writes down of itself: the end of an iteration, from which on a crash costs nothing of it."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.config.hashing import config_hash
from treetune.runtime.clock import Clock
from treetune.runtime.directory import METRICS_REMEDY, ExperimentDirectory, metrics_row
from treetune.runtime.due import is_last, iterations_of
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.session import Session
from treetune.runtime.sinks import Mirrors
from treetune.runtime.summary import summary_line
from treetune.runtime.watch import Watch
from treetune.store.checksums import Damaged, damage_of, read_record, seal_folder, sealed, write_record
from treetune.store.files import replace_folder, why_not_written, write_text
from treetune.vocabulary import Metrics

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from treetune.trainers.core import PolicyTrainer


def resume(session: Session, server: PolicyServer, trainer: PolicyTrainer) -> int:
    """Puts the trainer where the newest resumable checkpoint was; the next iteration's number.

    Metrics lines are made again from the iterations' own files, so that a line that a crash kept
    from being written, or one that will be written again, is neither lost nor doubled. Collective.
    """
    config, directory = session.config, session.directory
    # Problems are made here, before the clock of the first iteration starts.
    session.console.say(f"{len(session.train_problems)} training problems, {config.iterations} iterations")
    start = session.ranks.from_first("newest checkpoint", _whole(session) if session.ranks.is_first else 0)
    if start:
        with server.asleep():
            trainer.load(directory.checkpoint(start) / "trainer")
        server.offer(trainer, start)
        session.console.say(f"continuing after iteration {start} of {config.iterations}")
    if session.ranks.is_first:
        rows = [directory.iteration(i) / "metrics.json" for i in range(start)]
        lines = [json.dumps(sealed(read_record(row, METRICS_REMEDY))) + "\n" for row in rows if row.is_file()]
        write_text(directory.metrics, "".join(lines))
    return start


def _whole(session: Session) -> int:
    """The newest checkpoint whose trainer's state is as it was written; 0 where there is none at all. Raises
    Damaged where only damaged ones are left."""
    directory, damaged = session.directory, list[str]()
    for number in reversed(directory.resumables()):
        damage = damage_of(directory.checkpoint(number) / "trainer")
        if damage is None:
            for words in damaged:
                session.console.say(f"{words}: going on from the checkpoint before it, {number}")
            return number
        damaged.append(damage)
    if damaged:
        raise Damaged(
            f"{damaged[-1]}, and no older checkpoint holds a trainer's state: delete"
            f" {directory.path / 'checkpoints'}, and the same command trains again from the beginning, on the"
            " episodes that are stored"
        )
    return 0


class Record:
    """Lines of metrics and their mirrors, checkpoints, and what the metrics show so far."""

    def __init__(
        self, session: Session, server: PolicyServer, trainer: PolicyTrainer, watch: Watch, mirrors: Mirrors
    ) -> None:
        self._session, self._server, self._trainer = session, server, trainer
        self._watch, self._mirrors = watch, mirrors

    @staticmethod
    @contextmanager
    def open(session: Session, server: PolicyServer, trainer: PolicyTrainer, start: int) -> Iterator[Record]:
        """The record of a run that goes on after `start` iterations. Collective."""
        watch = Watch.of(session, start)
        with contextlib.closing(Mirrors.of(session)) as mirrors:
            yield Record(session, server, trainer, watch, mirrors)

    def commit(self, iteration: int, metrics: Metrics, clock: Clock) -> None:
        """Checkpoint (where one is due) and metrics of a finished iteration. Collective.

        A checkpoint is due where `checkpoints` says so, after the last iteration, and where the run stops.
        The line is kept before the checkpoint, which makes the iteration count as done, and once more
        after it, when the seconds of the commit are known. Raises Collapsed where the run is to stop.
        """
        session, watch = self._session, self._watch
        config, done = session.config, iteration + 1
        metrics = metrics | watch.look(iteration, metrics)
        with clock.phase("commit"):
            self._keep_line(iteration, metrics | clock.metrics())
            last = is_last(config, session.directory, done) or watch.stopping
            if last or done % config.checkpoints.every == 0:
                with self._server.asleep(), session.console.phase(f"iteration {done}: checkpoint"):
                    self._checkpoint(done)
        row = self._keep_line(iteration, metrics | clock.metrics())
        if session.ranks.is_first:
            session.directory.append_metrics(row)
        self._mirrors.log(iteration, row)
        session.last_row = row
        session.console.say(summary_line(row, iterations_of(config, session.directory, done)))
        watch.stop_if_collapsed()

    def _keep_line(self, iteration: int, metrics: Metrics) -> dict[str, Any]:
        row = metrics_row(iteration, time.time(), metrics)
        if self._session.ranks.is_first:
            write_record(self._session.directory.iteration(iteration) / "metrics.json", row)
        return row

    def _checkpoint(self, done: int) -> None:
        from treetune.models.policy_files import write_critic, write_policy

        session, trainer = self._session, self._trainer
        place = session.directory.checkpoint(done)
        beside = place.with_name(f".{place.name}.partial")
        if session.ranks.is_first:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        session.ranks.barrier("room for the checkpoint")
        with _failure_explained(place):
            trainer.save(beside / "trainer")
            weights = trainer.weights()
            critic = trainer.critic_weights()
            adapters = trainer.adapters()
            if session.ranks.is_first:
                architecture = trainer.model.config
                described = generation_config(session, trainer)
                write_policy(weights, architecture, session.model.tokenizer, beside / "policy", described)
                if trainer.settings.lora is not None:
                    base = str(getattr(architecture, "_name_or_path", ""))
                    trainer.settings.lora.write(adapters, base, beside / "adapter")
                if critic:
                    write_critic(critic, architecture, beside / "critic")
                for part in beside.iterdir():
                    seal_folder(part)
                state = {"iteration": done, "config": config_hash(session.plain_config)}
                write_record(beside / "state.json", state)
                replace_folder(beside, place)
        if session.ranks.is_first:
            keep_every = session.config.checkpoints.keep_every
            tidy_checkpoints(session.directory, keep_every, self._watch.last_good)
        session.ranks.barrier("checkpoint written")


def generation_config(session: Session, trainer: PolicyTrainer) -> GenerationConfig | None:
    """How the model says that it is sampled from, with the tokens that end an answer here."""
    described = copy.deepcopy(trainer.model.generation_config)
    if described is not None:
        described.eos_token_id = list(session.model.codec.end_ids)
        described.pad_token_id = session.model.tokenizer.pad_token_id
    return described


@contextmanager
def _failure_explained(place: Path) -> Iterator[None]:
    """Each library has its own words for a full disk, and some are none."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(
            f"the checkpoint {place} could not be written: {why_not_written(error, place)}. Earlier ones are"
            " untouched, and the same command goes on from the last"
        ) from error


def tidy_checkpoints(
    directory: ExperimentDirectory, keep_every: int | None, last_good: int | None = None
) -> list[int]:
    """Keeps the two newest checkpoints whole, in case one is damaged, and the weights alone of those that are
    to be kept: every `keep_every`-th, and the newest that is not beyond `last_good` (see `diagnostics`).

    Returns the numbers of those that were deleted.
    """
    deleted = []
    numbers = directory.checkpoints()
    good = max((number for number in numbers if last_good is not None and number <= last_good), default=None)
    for number in numbers[:-2]:
        place = directory.checkpoint(number)
        if number == good or (keep_every and number % keep_every == 0):
            shutil.rmtree(place / "trainer", ignore_errors=True)
        else:
            shutil.rmtree(place)
            deleted.append(number)
    return deleted
