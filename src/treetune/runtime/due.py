"""What an experiment still lacks, by what lies in its directory."""

from __future__ import annotations

from treetune.runtime.base import EvaluationSet, PolicyIteration
from treetune.runtime.directory import ExperimentDirectory
from treetune.runtime.stop_after import expected_iterations

EPISODES = "episodes.arrow"
"""In an iteration's folder: what is trained on, written when all else of sampling and credit is."""


def is_last(config: PolicyIteration, directory: ExperimentDirectory, done: int) -> bool:
    """Whether the run is over after `done` iterations: it has all of them, or its budget is spent.

    The last of them may be generated and not yet trained on."""
    return done >= iterations_of(config, directory, done)


def iterations_of(config: PolicyIteration, directory: ExperimentDirectory, done: int) -> int:
    """How many the run has; where a budget ends it, as far as the first `done` of them let expect."""
    return expected_iterations(config.iterations, config.stop_after, directory, done)


def is_generated(directory: ExperimentDirectory, iteration: int) -> bool:
    """Whether the iteration's episodes lie on disk, whole."""
    return (directory.iteration(iteration) / EPISODES).is_file()


def is_measured(directory: ExperimentDirectory, done: int, chosen: EvaluationSet) -> bool:
    """Whether the summary of the set after `done` iterations is there."""
    return (directory.evaluation(done, chosen.label) / "summary.json").is_file()


def due_sets(config: PolicyIteration, directory: ExperimentDirectory, done: int) -> list[EvaluationSet]:
    """The evaluation sets that are due after `done` iterations and not yet measured."""
    evaluation = config.evaluation
    last = is_last(config, directory, done)
    while_training = bool(evaluation.every) and done % (evaluation.every or 1) == 0
    due = [s for s in evaluation.sets if last or (while_training and s.while_training)]
    return [s for s in due if not is_measured(directory, done, s)]


def samples_in(config: PolicyIteration, directory: ExperimentDirectory, iteration: int) -> bool:
    """Whether the iteration's rollout samples, which it need not where an interrupted run left episodes."""
    return (
        config.rollout.needs_engine
        and not is_last(config, directory, iteration)
        and not is_generated(directory, iteration)
    )


def sampled_by(config: PolicyIteration, iteration: int) -> int:
    """The policy version that an iteration's answers and continuations are sampled from: that which it begins
    with, or the one before where iterations overlap."""
    return max(0, iteration - 1) if config.overlap == "one_step" else iteration


def samples_after(config: PolicyIteration, directory: ExperimentDirectory, done: int) -> bool:
    """Whether a rollout that is still to come or an evaluation samples from the weights after `done` (one or
    more) iterations."""
    following = done + (config.overlap == "one_step")
    rollout = not is_last(config, directory, done) and samples_in(config, directory, following)
    return rollout or bool(due_sets(config, directory, done))
