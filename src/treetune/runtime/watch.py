"""Diagnostics at work in a run: the history that they read, what they say, and the stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treetune.runtime.base import PolicyIteration
from treetune.runtime.diagnostics import (
    REMEDIES,
    Finding,
    Sign,
    Watched,
    diagnose,
    good_weights,
    last_good,
    verdict,
)
from treetune.runtime.directory import METRICS_REMEDY, ExperimentDirectory, metrics_row
from treetune.runtime.due import is_last
from treetune.runtime.session import Session
from treetune.store.checksums import read_record
from treetune.vocabulary import Metrics


class Collapsed(RuntimeError):
    """The run was stopped by a sign of collapse, as its configuration says."""


@dataclass
class Watch:
    """A run's metrics so far, and what they showed last."""

    session: Session
    rows: list[dict[str, Any]]
    found: Mapping[Sign, Finding] = field(default_factory=dict)

    @staticmethod
    def of(session: Session, start: int) -> Watch:
        """With what the iterations before `start` left. Collective."""
        rows = session.ranks.from_first("the metrics so far", history(session.directory, start))
        return Watch(session, rows, _look(session.config, rows))

    def look(self, iteration: int, metrics: Metrics) -> Metrics:
        """What an iteration's metrics show: its own metrics, with a line in the log for each sign that
        counts from here on, or no more. Collective."""
        before = self.found
        # The numbers as they are kept, so that a continued run reads the same.
        self.rows.append(metrics_row(iteration, 0.0, metrics))
        self.found = self.session.ranks.from_first("diagnosis", _look(self.session.config, self.rows))
        for sign, now in self.found.items():
            was = before.get(sign, Finding(sign))
            if now.counts and not was.counts:
                assert now.since is not None
                self.session.console.say(
                    f"warning: {sign} in iterations {now.since + 1} to {iteration + 1}: {now.words};"
                    f" {REMEDIES[sign]}"
                )
            elif was.counts and not now.counts:
                self.session.console.say(f"{sign} is over in iteration {iteration + 1}")
        signs = {f"diagnostics/{sign}": float(one.counts) for sign, one in self.found.items()}
        may_stop = bool(self.session.config.diagnostics.stops)
        return signs | ({"diagnostics/stop": float(self.stopping)} if may_stop else {})

    @property
    def stopping(self) -> bool:
        """Whether the run ends here. (One that is finished has nothing to be stopped of.)"""
        config, done = self.session.config, _done(self.rows)
        over = is_last(config, self.session.directory, done)
        return not over and bool(verdict(config.diagnostics, self.found))

    @property
    def last_good(self) -> int | None:
        """See `diagnostics.last_good`."""
        return last_good(self.session.config.diagnostics, self.found, _done(self.rows) - 1)

    def stop_if_collapsed(self) -> None:
        """Raises Collapsed after the commit of an iteration in which a sign that may stop the run counts."""
        if self.stopping:
            raise Collapsed(_message(self.session.config, self.session.directory, self.rows, self.found))


def refuse_collapsed(config: PolicyIteration, directory: ExperimentDirectory) -> None:
    """Raises Collapsed, in the same words, where the run stopped for it or was killed before it could."""
    rows = history(directory, directory.resumable() or 0)
    found = _look(config, rows)
    if verdict(config.diagnostics, found):
        raise Collapsed(_message(config, directory, rows, found))


def kept_for_good(config: PolicyIteration, directory: ExperimentDirectory) -> int | None:
    """The last good checkpoint, after what the run has committed so far; None where none is kept for that."""
    rows = history(directory, directory.resumable() or 0)
    return last_good(config.diagnostics, _look(config, rows), _done(rows) - 1)


def history(directory: ExperimentDirectory, done: int) -> list[dict[str, Any]]:
    """The rows of the first `done` iterations, from the iterations' own files."""
    files = (directory.iteration(i) / "metrics.json" for i in range(done))
    return [read_record(file, METRICS_REMEDY) for file in files if file.is_file()]


def _done(rows: list[dict[str, Any]]) -> int:
    return int(rows[-1]["iteration"]) + 1 if rows else 0


def _look(config: PolicyIteration, rows: list[dict[str, Any]]) -> dict[Sign, Finding]:
    sampling = config.rollout.sampling
    watched = Watched(config.rollout.needs_engine, None if sampling is None else sampling.max_tokens)
    return diagnose(config.diagnostics, watched, rows)


def _message(
    config: PolicyIteration,
    directory: ExperimentDirectory,
    rows: list[dict[str, Any]],
    found: Mapping[Sign, Finding],
) -> str:
    done = _done(rows)
    told = [
        f"{one.sign} since iteration {(one.since or 0) + 1}: {one.words}"
        for one in verdict(config.diagnostics, found)
    ]
    good = last_good(config.diagnostics, found, done - 1)
    assert good is not None
    weights = good_weights(good, {n: directory.checkpoint(n) for n in directory.checkpoints()})
    return (
        f"{directory.path} is stopped after iteration {done} of {config.iterations}, as"
        f" diagnostics.on_collapse says: {'; '.join(told)}. {weights[0].upper()}{weights[1:]}. To go on"
        f" from iteration {done} all the same, set on_collapse to 'warn', or another threshold"
    )
