"""From an iteration's problems to the episodes to train on, each phase kept as soon as it is done."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

from treetune.episode_generators.rollout.answers import contiguous_share
from treetune.episode_generators.shaping.applied import shaped
from treetune.episode_generators.storage import (
    read_episodes,
    read_trajectories,
    write_episodes,
    write_trajectories,
)
from treetune.files import write_json
from treetune.runtime.clock import Clock
from treetune.runtime.run import Run
from treetune.tasks.sampling import further_problems, sample_problems
from treetune.vocabulary import Episode, Metrics, Trajectory

MEMORY = "memory.json"
"""What parts of shaping remember, in an iteration's folder: of that iteration and all before it."""


def is_generated(run: Run, iteration: int) -> bool:
    """Whether the iteration's episodes lie on disk, whole."""
    return (run.directory.iteration(iteration) / "episodes.arrow").is_file()


def generate(run: Run, iteration: int, clock: Clock) -> tuple[list[Episode], Metrics]:
    """All ranks' episodes of the iteration: sampled now, or what an interrupted run has of them.

    A finished phase is read back, an unfinished one goes on from the requests that were answered.
    Collective.
    """
    folder = run.directory.iteration(iteration)
    if not is_generated(run, iteration):
        trajectories, rollout_metrics = _rollout(run, iteration, clock)
        memory = _remembered(run, iteration)
        episodes, metrics = _credit(run, iteration, trajectories, clock, memory)
        metrics = rollout_metrics | metrics
        if run.ranks.is_first:
            _record(folder / "credit.json", metrics, clock, "credit")
            if _remembers(run):
                write_json(folder / MEMORY, memory)
            # Last: from here on, both phases are done.
            write_episodes(folder / "episodes.arrow", episodes, run.codec)
        run.ranks.barrier("episodes written")
        return episodes, metrics
    metrics = _recorded(folder / "rollout.json", clock, "generation")
    metrics |= _recorded(folder / "credit.json", clock, "credit")
    return read_episodes(folder / "episodes.arrow"), metrics


def _rollout(run: Run, iteration: int, clock: Clock) -> tuple[list[Trajectory], Metrics]:
    """This rank's trajectories and all ranks' metrics."""
    config, folder = run.config, run.directory.iteration(iteration)
    if (folder / "trajectories.arrow").is_file():
        metrics = _recorded(folder / "rollout.json", clock, "generation")
        return _share(run, read_trajectories(folder / "trajectories.arrow")), metrics
    problems = sample_problems(
        run.train_problems,
        config.problems_per_iteration or len(run.train_problems),
        config.seed,
        iteration,
        config.problem_sampling,
    )
    with (
        clock.phase("generation"),
        run.console.phase(f"iteration {iteration + 1}: sampling", "answers", run.news) as show,
    ):
        context = run.context(
            config.rollout,
            seed=config.seed,
            iteration=iteration,
            journal=_journal(run, folder, "rollout"),
            progress=show,
            further=lambda: further_problems(run.train_problems, problems, config.seed, iteration),
        )
        trajectories, metrics = config.rollout.run(context, problems)
        everyone = run.ranks.exchange("trajectories", trajectories)
    if run.ranks.is_first:
        _record(folder / "rollout.json", metrics, clock, "generation")
        if config.rollout.needs_engine:  # demonstrations cost less to make again than to keep
            write_trajectories(folder / "trajectories.arrow", list(chain.from_iterable(everyone)))
    run.ranks.barrier("trajectories written")
    return trajectories, metrics


def _share(run: Run, trajectories: list[Trajectory]) -> list[Trajectory]:
    """The part of stored trajectories that is this rank's, however many ranks had sampled them.

    They tell the problems themselves: a rollout may have asked more than the iteration began with.
    """
    problems = list(dict.fromkeys(trajectory.problem.id for trajectory in trajectories))
    own = set(contiguous_share(problems, run.ranks.rank, run.ranks.world_size))
    return [trajectory for trajectory in trajectories if trajectory.problem.id in own]


def _credit(
    run: Run, iteration: int, trajectories: list[Trajectory], clock: Clock, memory: dict[str, Any]
) -> tuple[list[Episode], Metrics]:
    """`memory` is brought up to this iteration."""
    config, folder = run.config, run.directory.iteration(iteration)
    with (
        clock.phase("credit"),
        run.console.phase(f"iteration {iteration + 1}: credit", "continuations", run.news) as show,
    ):
        context = run.context(
            config.rollout,
            seed=config.seed,
            iteration=iteration,
            journal=_journal(run, folder, "credit") if config.credit.needs_engine else None,
            progress=show,
            memory=memory,
        )
        trajectories, shaping_metrics = shaped(context, config.shaping, trajectories)
        episodes, credit_metrics = config.credit.assign(context, trajectories)
        everyone = list(chain.from_iterable(run.ranks.exchange("episodes", episodes)))
        selected, selection_metrics = config.selection.select(context, everyone)
    return selected, shaping_metrics | credit_metrics | selection_metrics


def _remembers(run: Run) -> bool:
    return any(one.remembers for one in run.config.shaping)


def _remembered(run: Run, iteration: int) -> dict[str, Any]:
    """What was known when the iteration before had its credit; always read, so that a run that goes on
    knows what an undisturbed one knows. Collective.
    """
    if iteration == 0 or not _remembers(run):
        return {}
    path = run.directory.iteration(iteration - 1) / MEMORY
    there = run.ranks.is_first and path.is_file()
    memory = run.ranks.from_first("memory", json.loads(path.read_text()) if there else None)
    if memory is None:
        raise ValueError(
            f"{path} is gone, where shaping had kept what it knows of earlier answers: put it back, or begin"
            " again under another experiment_name"
        )
    return memory


def _journal(run: Run, folder: Path, phase: str) -> Path | None:
    return folder / "journal" / f"{phase}-{run.ranks.rank}.jsonl" if run.engine is not None else None


def _record(path: Path, metrics: Metrics, clock: Clock, phase: str) -> None:
    write_json(path, {"seconds": clock.seconds[phase], "metrics": metrics})


def _recorded(path: Path, clock: Clock, phase: str) -> Metrics:
    record = json.loads(path.read_text())
    clock.add_earlier(phase, record["seconds"])
    return record["metrics"]
