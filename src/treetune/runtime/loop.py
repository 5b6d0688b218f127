"""The loop: sample, credit, train, sync."""

from __future__ import annotations

import contextlib
from typing import Any

from treetune.episode_generators.numbers import in_words
from treetune.runtime.clock import Clock
from treetune.runtime.commit import commit, resume
from treetune.runtime.evaluation import due_sets, evaluate
from treetune.runtime.generation import generate, is_generated
from treetune.runtime.run import Run
from treetune.runtime.sinks import Mirrors
from treetune.runtime.training import train
from treetune.runtime.watch import Watch
from treetune.vocabulary import Metrics

SHOWN_SECONDS = 0.05
"""Phases shorter than this are left out of the line that a person reads."""


def run_iterations(run: Run) -> None:
    """Every iteration that the experiment still lacks. Collective."""
    config = run.config
    # Problems are made here, before the clock of the first iteration starts.
    run.console.say(f"{len(run.train_problems)} training problems, {config.iterations} iterations")
    start = resume(run)
    if start and _engine_needed(run, start, evaluated=True):
        run.wait_for_engine()
        run.sync(start)
    watch = Watch.of(run, start)
    mirrors = _mirrors(run)
    with contextlib.closing(mirrors):
        for iteration in range(start, config.iterations):
            if config.rollout.needs_engine and not is_generated(run, iteration):
                run.wait_for_engine()
            clock = Clock()
            episodes, metrics = generate(run, iteration, clock)
            if episodes:
                metrics |= train(run, iteration, episodes, clock)
            else:
                _nothing_selected(run, iteration)
            done = iteration + 1
            if _engine_needed(run, done):
                with clock.phase("waiting"):
                    run.wait_for_engine()
                with clock.phase("sync"):
                    metrics |= run.sync(done)
            with clock.phase("evaluation"):
                metrics |= evaluate(run, done, due_sets(run, done))
            if config.rollout.needs_engine:
                metrics |= _throughput(metrics, clock)
            metrics |= watch.look(iteration, metrics)
            row = commit(run, iteration, metrics, clock, watch)
            mirrors.log(iteration, row)
            run.last_row = row
            run.console.say(summary_line(row, config.iterations))
            watch.stop_if_collapsed()


def _engine_needed(run: Run, done: int, evaluated: bool = False) -> bool:
    """Whether somebody samples from the weights after `done` iterations: the next rollout, unless
    an interrupted run left its episodes behind, or an evaluation.
    """
    next_rollout = (
        run.config.rollout.needs_engine and done < run.config.iterations and not is_generated(run, done)
    )
    return next_rollout or (not evaluated and bool(due_sets(run, done)))


def _nothing_selected(run: Run, iteration: int) -> None:
    name = type(run.config.selection).__name__
    message = f"iteration {iteration + 1}: the selection ({name}) kept no episode to train on"
    if run.config.on_empty_selection == "stop":
        raise RuntimeError(
            f"{message}; the weights are unchanged. Choose another selection or a larger"
            " problems_per_iteration, or set on_empty_selection to 'skip'"
        )
    run.console.say(message + "; skipped")


def _mirrors(run: Run) -> Mirrors:
    sinks = run.config.sinks if run.ranks.is_first else ()
    return Mirrors(sinks, run.directory.path, run.config.experiment_name, run.plain_config)


def _throughput(metrics: Metrics, clock: Clock) -> Metrics:
    """Tokens that the engine sampled for rollout and credit, per second of these two phases."""
    tokens = metrics["episodes/response_tokens"] * metrics["episodes/count"]
    tokens += metrics.get("credit/value_tokens", 0.0)
    seconds = clock.seconds["generation"]
    if "credit/value_tokens" in metrics:
        seconds += clock.seconds["credit"]
    return {"engine/tokens_per_second": tokens / seconds if seconds else 0.0}


def summary_line(row: dict[str, Any], iterations: int) -> str:
    """One finished iteration for a person: what it earned, how it moved, where its time went."""
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
    parts += in_words(row)
    scores = [f"{key.split('/')[1]} {value:.3f}" for key, value in row.items() if key.endswith("/pass_at_1")]
    phases = {key.removeprefix("seconds/"): row[key] for key in row if key.startswith("seconds/")}
    total = phases.pop("total")
    times = [f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= SHOWN_SECONDS]
    left = (iterations - row["iteration"] - 1) * total
    parts += [*scores, f"{total:.1f} s ({', '.join(times)})", f"{left / 60:.0f} min left"]
    return "  ".join(parts)
