"""The commands that run an experiment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from treetune.credit.reward_models import reward_model_of
from treetune.exceptions import FolderRefused, SameOnAllRanks
from treetune.models.policy_files import resolve_policy
from treetune.processes import lifetime
from treetune.runtime.base import PolicyIteration, Runtime
from treetune.runtime.checkpoint_schedule import tidy_checkpoints
from treetune.runtime.claims import Claims
from treetune.runtime.console import Clock
from treetune.runtime.directory import ExperimentDirectory, is_over_after, iterations_of
from treetune.runtime.evaluation import find_unmeasured, measure_claimed, measure_until_end, problems_of_set
from treetune.runtime.fitting import (
    refuse_engines_on_exclusive_gpus,
    refuse_what_does_not_fit,
    write_prediction,
)
from treetune.runtime.generation import generate
from treetune.runtime.loop import run_iterations
from treetune.runtime.manifest import refuse_changed_settings, refuse_other_configuration
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.record import read_last_good, refuse_collapsed
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.runtime.training import open_trainer


def run(command: str, root: Runtime, plain_config: Mapping[str, Any], options: Any = None) -> int:
    """Runs a command on a checked experiment. Returns the exit code.

    Args:
        options: The options of the command line. No command here reads them.
    """
    assert isinstance(root, PolicyIteration)
    lifetime.exit_on_signals()
    lifetime.end_with_launcher()
    COMMANDS[command](root, plain_config)
    return 0


def preflight(config: PolicyIteration) -> None:
    """Raises ValueError if something is missing that the model, engines, graders or problems need.

    It runs before anything slow is imported. Some of these mistakes, such as an evaluation set with too few
    problems, would otherwise end a run only after days of training.
    """
    import treetune.parts  # noqa: F401  (a program may have built the configuration without importing them)

    config.model.check_at_start()
    reference = config.credit.trainer_scores.reference_model
    if reference is not None:
        reference.check_at_start()
    reward_model = reward_model_of(config.credit)
    if reward_model is not None and reward_model.start is not None:
        reward_model.start.check_at_start()
    if config.engines.judge is not None:
        resolve_policy(config.engines.judge.model)  # raises if the model is missing
    for finding in config.missing_devices():
        raise SameOnAllRanks(f"{finding.key}: {finding.what}: {finding.remedy}")
    if missing := config.missing_for_grades():
        raise ValueError("grading answers needs what is missing here: " + "; ".join(missing))
    for evaluation_set in config.evaluation.sets:
        problems_of_set(config, evaluation_set)  # raises if they are missing or too few


def check_shaping(config: PolicyIteration) -> None:
    """Raises ValueError if shaping, which adds bonuses to scores, can't be used for the training problems."""
    if config.shaping:
        problems = config.task.problems("train")
        for part in config.shaping:
            part.check_at_start(problems)


def run_iteration_loop(config: PolicyIteration, plain: Mapping[str, Any]) -> None:
    """Trains the experiment to its end; resumes it if it was interrupted."""
    preflight(config)
    directory = ExperimentDirectory.of(config)
    finished_iterations = directory.newest_resumable() or 0
    if finished_iterations and is_over_after(config, directory, finished_iterations):
        # Nothing is left to do, but a configuration that a run would refuse is refused all the same.
        check_shaping(config)
        refuse_changed_settings(directory.path, plain, config)
        _say_once(f"{directory.path} is finished: all {finished_iterations} iterations are done")
        return
    refuse_what_does_not_fit(config)
    refuse_engines_on_exclusive_gpus(config)
    check_shaping(config)
    # A resumed run is checked here, before the ranks join. If another process runs the experiment, its files
    # still change, so they are not read: `Session.open` refuses this start anyway.
    refuse_other_configuration(directory, config, plain)
    if finished_iterations and not directory.is_running():
        refuse_collapsed(config, directory)
    with (
        Session.open(config, plain) as session,
        PolicyServer.start(session, needs_engine=config.needs_engine, trains=True) as server,
        RunResources.open(session, server) as resources,
        open_trainer(resources) as trainer,
    ):
        write_prediction(session)
        run_iterations(session, server, resources, trainer)


def run_evaluation(config: PolicyIteration, plain: Mapping[str, Any]) -> None:
    """Measures all sets on every checkpoint, also on those that a running experiment still writes.

    If it is started several times, also on several machines, the processes share the work.
    """
    preflight(config)
    directory = ExperimentDirectory.of(config)
    if not directory.checkpoints() and not directory.is_running():
        raise FolderRefused(
            f"{directory.path} has no checkpoint to evaluate: train the experiment with `treetune run` first"
        )
    _require_sets(config)
    if not directory.is_running() and not find_unmeasured(directory, config.evaluation.sets):
        _say_once(f"{directory.path}: all sets are evaluated on all of its checkpoints")
        return
    with open_evaluation(config, plain) as resources:
        # A process claims a measurement before it begins, so that no other process makes it as well.
        measure_until_end(resources, Claims())


def run_evaluation_on_baseline(config: PolicyIteration, plain: Mapping[str, Any]) -> None:
    """Measures all sets on the start weights, as checkpoint 0."""
    preflight(config)
    _require_sets(config)
    with open_evaluation(config, plain) as resources:
        claims = Claims()
        for evaluation_set in config.evaluation.sets:
            # A process claims a measurement before it begins, so that no other process makes it as well.
            verdict = measure_claimed(resources, 0, evaluation_set, claims)
            if verdict == "another's":  # another process has claimed it
                resources.session.console.say(
                    f"{evaluation_set.label} is skipped: another process is evaluating it"
                )


@contextmanager
def open_evaluation(config: PolicyIteration, plain: Mapping[str, Any]) -> Iterator[RunResources]:
    """Opens the experiment with an engine and without a trainer. Other processes may use the experiment at
    the same time."""
    with (
        Session.open(config, plain, purpose="evaluation") as session,
        PolicyServer.start(session) as server,
        RunResources.open(session, server) as resources,
    ):
        yield resources


def only_generate_episodes(config: PolicyIteration, plain: Mapping[str, Any]) -> None:
    """Samples and credits the next iteration's episodes, and leaves them for the run to train on."""
    preflight(config)
    check_shaping(config)
    with (
        Session.open(config, plain) as session,
        PolicyServer.start(session, needs_engine=config.rollout.needs_engine) as server,
        RunResources.open(session, server) as resources,
        ExitStack() as stack,
    ):
        directory, say = session.directory, session.console.say
        iteration = session.ranks.from_first("newest checkpoint", directory.newest_resumable()) or 0
        if is_over_after(config, directory, iteration):
            say(f"{directory.path} is finished: there is no next iteration")
            return
        if server.engine is not None:
            server.load_checkpoint(iteration)
        # Some credit needs the trainer: its critic, its reference model or its next-token distributions.
        if config.credit.asks_trainer:
            # Before the first checkpoint, the trainer has the start model.
            state_folder = directory.checkpoint_folder(iteration) / "trainer" if iteration else None
            stack.enter_context(open_trainer(resources, state_folder=state_folder, trains=False))
        episodes, metrics = generate(resources, iteration, Clock())
        say(
            f"{len(episodes)} episodes of iteration {iteration + 1}, reward"
            f" {metrics['episodes/reward']:.3f}: {directory.iteration_folder(iteration) / 'episodes.arrow'}"
        )


def clean_up_checkpoints(config: PolicyIteration, plain: Mapping[str, Any]) -> None:
    """Deletes the checkpoints that `checkpoints` in the configuration doesn't keep."""
    directory = ExperimentDirectory.of(config)
    with directory.locked():
        last_good = read_last_good(config, directory)
        deleted = tidy_checkpoints(directory, config.checkpoints.keep_every, last_good)
    kept_checkpoints = directory.checkpoints()
    print(f"{directory.path}: deleted {len(deleted)} checkpoints, kept {kept_checkpoints or 'none'}")


def check_finished(config: PolicyIteration, plain: Mapping[str, Any]) -> None:
    """Raises FolderRefused if the run is not finished. Scripts need it, since DeepSpeed's command returns 0
    even if its node launcher was killed."""
    directory = ExperimentDirectory.of(config)
    finished_iterations = max(directory.checkpoints(), default=0)
    if not finished_iterations or not is_over_after(config, directory, finished_iterations):
        all_iterations = iterations_of(config, directory, finished_iterations)
        raise FolderRefused(
            f"{directory.path} is not finished: {finished_iterations} of {all_iterations} iterations are"
            f" done, and {directory.run_log} says how it ended; `treetune run` continues it"
        )


COMMANDS = {
    command.__name__: command
    for command in (
        run_iteration_loop,
        run_evaluation,
        run_evaluation_on_baseline,
        only_generate_episodes,
        clean_up_checkpoints,
        check_finished,
    )
}


def _say_once(message: str) -> None:
    """Prints a line on the first rank only, before the ranks are connected."""
    if os.environ.get("RANK", "0") == "0":
        print(message)


def _require_sets(config: PolicyIteration) -> None:
    """Raises ValueError if the experiment has no evaluation sets."""
    if not config.evaluation.sets:
        raise ValueError(
            "the experiment has no evaluation sets: add e.g."
            " evaluation+: {sets: [{split: 'test', samples: 4}]}"
        )
