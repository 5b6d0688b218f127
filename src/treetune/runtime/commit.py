"""The end of an iteration: from here on, a crash costs nothing of it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treetune.config.hashing import config_hash
from treetune.files import replace_folder, write_json, write_text
from treetune.runtime.clock import Clock
from treetune.runtime.directory import ExperimentDirectory, metrics_row
from treetune.runtime.handover import write_adapters
from treetune.runtime.run import Run
from treetune.runtime.watch import Watch
from treetune.vocabulary import Metrics


def resume(run: Run) -> int:
    """Puts the trainer where the newest resumable checkpoint was; the next iteration's number.

    Metrics lines are made again from the iterations' own files, so that a line that a crash kept
    from being written, or one that will be written again, is neither lost nor doubled. Collective.
    """
    start = run.ranks.from_first("newest checkpoint", run.directory.resumable()) or 0
    if start:
        assert run.trainer is not None
        run.trainer.load(run.directory.checkpoint(start) / "trainer")
        run.console.say(f"continuing after iteration {start} of {run.config.iterations}")
    if run.ranks.is_first:
        rows = [run.directory.iteration(i) / "metrics.json" for i in range(start)]
        lines = [json.dumps(json.loads(row.read_text())) + "\n" for row in rows if row.is_file()]
        write_text(run.directory.metrics, "".join(lines))
    return start


def commit(run: Run, iteration: int, metrics: Metrics, clock: Clock, watch: Watch) -> dict[str, Any]:
    """Checkpoint (where one is due) and metrics of a finished iteration; its line. Collective.

    A checkpoint is due where `checkpoints` says so, after the last iteration, and where the run stops.
    The line is kept before the checkpoint, which makes the iteration count as done, and once more
    after it, when the seconds of the commit are known.
    """
    done = iteration + 1
    with clock.phase("commit"):
        _keep_line(run, iteration, metrics | clock.metrics())
        last = done == run.config.iterations or watch.stopping
        if last or done % run.config.checkpoints.every == 0:
            _checkpoint(run, done, watch.last_good)
    row = _keep_line(run, iteration, metrics | clock.metrics())
    if run.ranks.is_first:
        run.directory.append_metrics(row)
    return row


def _keep_line(run: Run, iteration: int, metrics: Metrics) -> dict[str, Any]:
    row = metrics_row(iteration, time.time(), metrics)
    if run.ranks.is_first:
        write_json(run.directory.iteration(iteration) / "metrics.json", row)
    return row


def _checkpoint(run: Run, done: int, last_good: int | None) -> None:
    from treetune.models.export import write_critic, write_policy

    assert run.trainer is not None
    place = run.directory.checkpoint(done)
    beside = place.with_name(f".{place.name}.partial")
    if run.ranks.is_first:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    run.ranks.barrier("room for the checkpoint")
    with _failure_explained(place):
        run.trainer.save(beside / "trainer")
        weights = run.trainer.weights()
        critic = run.trainer.critic_weights()
        adapters = run.trainer.adapters()
        if run.ranks.is_first:
            write_policy(
                weights, run.policy_model.config, run.tokenizer, beside / "policy", run.generation_config
            )
            if adapters:
                write_adapters(run, adapters, beside / "adapter")
            if critic:
                write_critic(critic, run.policy_model.config, beside / "critic")
            write_json(beside / "state.json", {"iteration": done, "config": config_hash(run.plain_config)})
            replace_folder(beside, place)
    if run.ranks.is_first:
        tidy_checkpoints(run.directory, run.config.checkpoints.keep_every, last_good)
    run.ranks.barrier("checkpoint written")


@contextmanager
def _failure_explained(place: Path) -> Iterator[None]:
    """Each library has its own words for a full disk, and some are none."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(place.parent).free / 2**20
        raise OSError(
            f"the checkpoint {place} could not be written ({error}); {free:.0f} MiB are free there."
            " Earlier ones are untouched: make room, and the same command goes on from the last"
        ) from error


def tidy_checkpoints(
    directory: ExperimentDirectory, keep_every: int | None, last_good: int | None = None
) -> list[int]:
    """Keeps the newest checkpoint whole, and the weights alone of those that are to be kept: every
    `keep_every`-th, and the newest that is not beyond `last_good` (see `diagnostics`).

    Returns the numbers of those that were deleted.
    """
    deleted = []
    numbers = directory.checkpoints()
    good = max((number for number in numbers if last_good is not None and number <= last_good), default=None)
    for number in numbers[:-1]:
        place = directory.checkpoint(number)
        if number == good or (keep_every and number % keep_every == 0):
            shutil.rmtree(place / "trainer", ignore_errors=True)
        else:
            shutil.rmtree(place)
            deleted.append(number)
    return deleted
