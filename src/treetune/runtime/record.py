"""Commits an iteration: its metrics, signs of collapse and, where one is due, a checkpoint. A restart
continues from the newest checkpoint."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.exceptions import Collapsed, Damaged, Stopped
from treetune.processes.lifetime import GracefulStop, stopping_gracefully
from treetune.rollouts.metrics import name_in
from treetune.rollouts.numbers import in_words
from treetune.runtime.base import PolicyIteration
from treetune.runtime.checkpoint_schedule import CheckpointSchedule, tidy_checkpoints
from treetune.runtime.console import Clock, duration
from treetune.runtime.diagnostics import (
    REMEDIES,
    CollapseSign,
    Sign,
    Watched,
    diagnose,
    good_weights,
    last_good,
    verdict,
)
from treetune.runtime.directory import (
    METRICS_REMEDY,
    ExperimentDirectory,
    is_generated,
    is_last,
    iterations_of,
    metrics_row,
    refuse_misplaced,
)
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.session import Session
from treetune.runtime.sinks import Mirrors
from treetune.store.checksums import (
    SUMS,
    config_hash,
    damage_of,
    digest_of,
    read_record,
    seal_folder,
    sealed,
    write_record,
)
from treetune.store.files import replace_folder, why_not_written, write_text
from treetune.vocabulary import Metrics

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from treetune.trainer.core import PolicyTrainer


SHOWN_SECONDS = 0.05
"""Phases that took fewer seconds are left out of the line of an iteration."""

MOST_DOMAINS = 8
"""With more domains, the line has none: the report has all."""


def resume(session: Session, server: PolicyServer, trainer: PolicyTrainer) -> int:
    """Puts the trainer where the newest resumable checkpoint was; returns the next iteration's number.

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
    again = done_again(directory, start) if session.ranks.is_first else ""
    if start or again:
        session.console.say(f"continuing after iteration {start} of {config.iterations}{again}")
    session.done = session.kept = start
    if session.ranks.is_first:
        lines = [json.dumps(sealed(row)) + "\n" for row in history(directory, start)]
        write_text(directory.metrics, "".join(lines))
    return start


def done_again(directory: ExperimentDirectory, start: int) -> str:
    """Returns what of the work after `start` iterations a run that goes on from there does again; empty where
    it is nothing."""
    rows: list[dict[str, Any]] = []
    while (path := directory.iteration(start + len(rows)) / "metrics.json").is_file():
        rows.append(read_record(path, METRICS_REMEDY))
    if not rows:
        return ""
    which = numbered(start + 1, start + len(rows))
    are = "is" if len(rows) == 1 else "are"
    begin = f", the last checkpoint: {which} had been finished after it and {are}"
    if all(is_generated(directory, start + number) for number in range(len(rows))):
        seconds = sum(row.get("seconds/training", 0.0) for row in rows)
        return f"{begin} trained again (about {duration(seconds)}); what was sampled is kept"
    seconds = sum(row.get("seconds/total", 0.0) for row in rows)
    return f"{begin} done again (about {duration(seconds)})"


def numbered(first: int, last: int) -> str:
    """Returns ``iteration 3``, or ``iterations 3 to 5``."""
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def _whole(session: Session) -> int:
    """Returns the newest checkpoint whose trainer's state is as it was written; 0 where there is none. Raises
    Damaged where only damaged ones are left."""
    directory, damaged = session.directory, list[str]()
    for number in reversed(directory.resumables()):
        directory.refuse_misplaced_checkpoint(number)
        damage = damage_of(directory.checkpoint(number) / "trainer")
        if damage is None:
            for message in damaged:
                session.console.say(f"{message}: going on from the checkpoint before it, {number}")
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
    """The record of a run: lines of metrics and their mirrors, checkpoints, signs of collapse."""

    def __init__(
        self,
        session: Session,
        server: PolicyServer,
        trainer: PolicyTrainer,
        watch: CollapseWatch,
        mirrors: Mirrors,
        stop: GracefulStop,
    ) -> None:
        self._session, self._server, self._trainer = session, server, trainer
        self._watch, self._mirrors, self._stop = watch, mirrors, stop
        self._schedule = CheckpointSchedule(session.config.checkpoints)
        self._iteration_s: float | None = None
        """Seconds of the last iteration of this process."""

    @staticmethod
    @contextmanager
    def open(session: Session, server: PolicyServer, trainer: PolicyTrainer, start: int) -> Iterator[Record]:
        """Opens the record of a run that goes on after `start` iterations. While it is open, signals ask for
        an end at the next boundary. Collective."""
        watch = CollapseWatch.of(session, start)
        config = session.config
        sinks = config.sinks if session.ranks.is_first else ()
        directory, name = session.directory.path, config.experiment_name
        mirrors = Mirrors(sinks, directory, name, session.plain_config, done=start)

        def say(message: str) -> None:
            # Called by a signal's handler, in the midst of whatever this process was writing.
            if session.ranks.is_first:
                os.write(sys.stderr.fileno(), f"{message}\n".encode())

        stop = GracefulStop(config.checkpoints.grace, say)
        with contextlib.closing(mirrors), stopping_gracefully(stop):
            yield Record(session, server, trainer, watch, mirrors, stop)

    @contextmanager
    def before_training(self, iteration: int) -> Iterator[None]:
        """Makes a boundary of the time before an iteration's training, since the weights are still those that
        the iteration began with: where a signal asks for the end, they are written, and Stopped is raised.

        A single rank without overlap stops within the block, all others at its end, where they agree.
        Collective.
        """
        session, stop = self._session, self._stop
        self._expect_boundary(
            f"the end of iteration {iteration + 1}", finished=session.done, expected_s=self._iteration_s
        )
        alone = session.ranks.world_size == 1 and session.config.overlap == "none"
        try:
            with stop.interruptible() if alone else contextlib.nullcontext():
                yield
        except Stopped:
            if alone:
                self._keep_unkept()
            raise
        if (number := self._agree_to_stop()) is not None:
            self._keep_unkept()
            raise Stopped(128 + number)

    def _expect_boundary(self, boundary: str, *, finished: int, expected_s: float | None) -> None:
        """Tells the graceful stop how far the next boundary is, and what an end before it loses of the
        iterations that are `finished`."""
        kept = self._session.kept
        would_lose = None
        if finished > kept:
            would_lose = f"the next start does {numbered(kept + 1, finished)} again"
        self._stop.begin(boundary, would_lose, expected_s)

    def _agree_to_stop(self) -> int | None:
        """Returns the signal that asked one of the ranks for the end; None where none did. Collective."""
        asked = self._session.ranks.exchange("signals", self._stop.asked_by)
        signals = [number for number in asked if number is not None]
        if not signals:
            return None
        self._stop.reach_boundary()
        return signals[0]

    def _keep_unkept(self) -> None:
        """Writes a checkpoint of the present weights, unless there is one. Collective."""
        session = self._session
        if session.done == session.kept:
            return
        try:
            self._timed_checkpoint(session.done, regular=False)
        except (OSError, RuntimeError, ValueError) as error:
            session.console.say(f"no checkpoint could be written on the way out: {error}")

    def commit(self, iteration: int, metrics: Metrics, clock: Clock) -> None:
        """Writes the metrics of a finished iteration and, where one is due, a checkpoint. Collective.

        A checkpoint is due where `checkpoints` says so, after the last iteration, and where the run stops.
        The line is kept before the checkpoint, which makes the iteration count as done, and once more
        after it, when the seconds of the commit are known. Raises Collapsed where the run is to stop, and
        Stopped where a signal asked for it.
        """
        session, watch = self._session, self._watch
        config, done = session.config, iteration + 1
        # From here on the iteration is finished work: a signal that comes now is heard below, or else before
        # the next iteration's training.
        self._expect_boundary(f"the end of iteration {done}", finished=done, expected_s=0.0)
        metrics = metrics | watch.look(iteration, metrics)
        with clock.phase("commit"):
            self._keep_line(iteration, metrics | clock.metrics())
            last = is_last(config, session.directory, done) or watch.stopping
            regular = last or self._schedule.is_due_by_iterations(done)
            iteration_s = clock.metrics()["seconds/total"]
            by_time = session.ranks.from_first(
                "a checkpoint is due", self._schedule.is_due_by_time(iteration_s)
            )
            stopped_by = self._agree_to_stop()
            session.done = done
            if regular or by_time or stopped_by is not None:
                self._timed_checkpoint(done, regular=regular)
        row = self._keep_line(iteration, metrics | clock.metrics())
        if session.ranks.is_first:
            session.directory.append_metrics(row)
        self._mirrors.log(iteration, row)
        session.last_row = row
        session.console.say(summary_line(row, iterations_of(config, session.directory, done)))
        self._iteration_s = iteration_s
        watch.stop_if_collapsed()
        if stopped_by is not None and not last:
            raise Stopped(128 + stopped_by)

    def _keep_line(self, iteration: int, metrics: Metrics) -> dict[str, Any]:
        row = metrics_row(iteration, time.time(), metrics)
        if self._session.ranks.is_first:
            write_record(self._session.directory.iteration(iteration) / "metrics.json", row)
        return row

    def _timed_checkpoint(self, done: int, *, regular: bool) -> None:
        """Writes the checkpoint after `done` iterations, and notes what it costs. Collective."""
        start = time.monotonic()
        with self._server.asleep(), self._session.console.phase(f"iteration {done}: checkpoint"):
            self._checkpoint(done, regular=regular)
        self._session.kept = done
        self._schedule.note_written(time.monotonic() - start)

    def _checkpoint(self, done: int, *, regular: bool) -> None:
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
                state = {
                    "iteration": done,
                    "config": config_hash(session.plain_config),
                    "regular": regular,
                    "parts": {
                        part.name: digest_of(part / SUMS) for part in beside.iterdir() if part.is_dir()
                    },
                }
                write_record(beside / "state.json", state)
                replace_folder(beside, place)
        if session.ranks.is_first:
            keep_every = session.config.checkpoints.keep_every
            tidy_checkpoints(session.directory, keep_every, self._watch.last_good)
        session.ranks.barrier("checkpoint written")


def generation_config(session: Session, trainer: PolicyTrainer) -> GenerationConfig | None:
    """Returns the model's own settings of sampling, with the tokens that end an answer here."""
    described = copy.deepcopy(trainer.model.generation_config)
    if described is not None:
        described.eos_token_id = list(session.model.codec.end_ids)
        described.pad_token_id = session.model.tokenizer.pad_token_id
    return described


@contextmanager
def _failure_explained(place: Path) -> Iterator[None]:
    """Says why a checkpoint can't be written: each library has its own words for a full disk, or none."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(
            f"the checkpoint {place} could not be written: {why_not_written(error, place)}. Earlier ones are"
            " untouched, and the same command goes on from the last"
        ) from error


# The line of an iteration, for people


def summary_line(row: Mapping[str, Any], iterations: int) -> str:
    """Returns one finished iteration for a person: what it earned, how it moved, where its time went."""
    parts = [f"iteration {row['iteration'] + 1}/{iterations}"]
    was_shaped = row.get("episodes/score") != row.get("episodes/reward")
    if was_shaped and "episodes/score" in row:
        parts.append(f"score {row['episodes/score']:.3f}")
    for name, key, form in (
        ("reward", "episodes/reward", "{:.3f}"),
        ("unfinished", "episodes/unfinished", "{:.1%}"),
        ("loss", "train/loss", "{:.4f}"),
        ("KL", "train/kl", "{:.4f}"),
        ("tokens/s", "engine/tokens_per_second", "{:.0f}"),
    ):
        if key in row:
            parts.append(f"{name} {form.format(row[key])}")
        if name == "reward":
            domains = {of[0]: row[key] for key in row if (of := name_in(key)) and of[1] == "reward"}
            if 0 < len(domains) <= MOST_DOMAINS:
                parts.append(f"({', '.join(f'{domain} {mean:.3f}' for domain, mean in domains.items())})")
    parts += in_words(row)
    named = [(key.split("/"), value) for key, value in row.items() if key.endswith("/pass_at_1")]
    scores = [f"{steps[1]} {value:.3f}" for steps, value in named if len(steps) == 3]  # of all domains
    phases = {key.removeprefix("seconds/"): row[key] for key in row if key.startswith("seconds/")}
    total = phases.pop("total")
    times = [f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= SHOWN_SECONDS]
    parts += [*scores, f"{total:.1f} s ({', '.join(times)})"]
    if left := (iterations - row["iteration"] - 1) * total:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


# Signs of collapse


@dataclass
class CollapseWatch:
    """Diagnostics at work in a run: its metrics so far, and the signs of collapse after the last of them."""

    session: Session
    rows: list[dict[str, Any]]
    signs: Mapping[Sign, CollapseSign] = field(default_factory=dict)

    @staticmethod
    def of(session: Session, start: int) -> CollapseWatch:
        """Reads the metrics of the iterations before `start`. Collective."""
        rows = session.ranks.from_first("the metrics so far", history(session.directory, start))
        return CollapseWatch(session, rows, _look(session.config, rows))

    def look(self, iteration: int, metrics: Metrics) -> Metrics:
        """Returns the metrics of the signs after an iteration, and logs each sign that counts from here on,
        or no more. Collective."""
        before = self.signs
        # The numbers as they are kept, so that a continued run reads the same.
        self.rows.append(metrics_row(iteration, 0.0, metrics))
        self.signs = self.session.ranks.from_first("diagnosis", _look(self.session.config, self.rows))
        for sign, now in self.signs.items():
            was = before.get(sign, CollapseSign(sign))
            if now.counts and not was.counts:
                assert now.since is not None
                self.session.console.say(
                    f"warning: {sign} in iterations {now.since + 1} to {iteration + 1}: {now.words};"
                    f" {REMEDIES[sign]}"
                )
            elif was.counts and not now.counts:
                self.session.console.say(f"{sign} is over in iteration {iteration + 1}")
        counting = {f"diagnostics/{sign}": float(one.counts) for sign, one in self.signs.items()}
        may_stop = bool(self.session.config.diagnostics.stops)
        return counting | ({"diagnostics/stop": float(self.stopping)} if may_stop else {})

    @property
    def stopping(self) -> bool:
        """Returns whether a sign ends the run here; a run that is finished anyway is not stopped."""
        config, done = self.session.config, _done(self.rows)
        over = is_last(config, self.session.directory, done)
        return not over and bool(verdict(config.diagnostics, self.signs))

    @property
    def last_good(self) -> int | None:
        """Returns the newest number of finished iterations before any sign: see `diagnostics.last_good`."""
        return last_good(self.session.config.diagnostics, self.signs, _done(self.rows) - 1)

    def stop_if_collapsed(self) -> None:
        """Raises Collapsed after the commit of an iteration in which a sign that may stop the run counts."""
        if self.stopping:
            raise Collapsed(_message(self.session.config, self.session.directory, self.rows, self.signs))


def refuse_collapsed(config: PolicyIteration, directory: ExperimentDirectory) -> None:
    """Raises Collapsed, in the same words, where the run stopped for it or was killed before it could."""
    rows = history(directory, directory.resumable() or 0)
    found = _look(config, rows)
    if verdict(config.diagnostics, found):
        raise Collapsed(_message(config, directory, rows, found))


def read_last_good(config: PolicyIteration, directory: ExperimentDirectory) -> int | None:
    """Returns `last_good` of the rows that an experiment's folder holds: the newest number of finished
    iterations before any sign of collapse, of which the weights are kept; None where no sign may stop it."""
    rows = history(directory, directory.resumable() or 0)
    return last_good(config.diagnostics, _look(config, rows), _done(rows) - 1)


def history(directory: ExperimentDirectory, done: int) -> list[dict[str, Any]]:
    """Returns the rows of the first `done` iterations, from the iterations' own files."""
    rows = []
    for i in range(done):
        path = directory.iteration(i) / "metrics.json"
        if path.is_file():
            row = read_record(path, METRICS_REMEDY)
            refuse_misplaced(row, path, i)
            rows.append(row)
    return rows


def _done(rows: list[dict[str, Any]]) -> int:
    return int(rows[-1]["iteration"]) + 1 if rows else 0


def _look(config: PolicyIteration, rows: list[dict[str, Any]]) -> dict[Sign, CollapseSign]:
    sampling = config.rollout.sampling
    watched = Watched(config.rollout.needs_engine, None if sampling is None else sampling.max_tokens)
    return diagnose(config.diagnostics, watched, rows)


def _message(
    config: PolicyIteration,
    directory: ExperimentDirectory,
    rows: list[dict[str, Any]],
    found: Mapping[Sign, CollapseSign],
) -> str:
    done = _done(rows)
    reasons = [
        f"{one.sign} since iteration {(one.since or 0) + 1}: {one.words}"
        for one in verdict(config.diagnostics, found)
    ]
    good = last_good(config.diagnostics, found, done - 1)
    assert good is not None
    weights = good_weights(good, {n: directory.checkpoint(n) for n in directory.checkpoints()})
    return (
        f"{directory.path} is stopped after iteration {done} of {config.iterations}, as"
        f" diagnostics.on_collapse says: {'; '.join(reasons)}. {weights[0].upper()}{weights[1:]}. To go on"
        f" from iteration {done} all the same, set on_collapse to 'warn', or another threshold"
    )
