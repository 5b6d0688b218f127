"""Trains an iteration again from its stored answers, as it was or with another credit or objective."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.lab.analyzers.gradients import Loss
from treetune.lab.analyzers.stored import credit_critic_at, distributions_at, policy_at
from treetune.rollouts.answers import contiguous_share
from treetune.rollouts.model_scores import ModelScores
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.runtime.analysis import ADVANTAGES, write_result
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import (
    EPISODES,
    ITERATION_METRICS,
    METRICS_REMEDY,
    TRAJECTORIES,
    ExperimentDirectory,
    metrics_row,
    sampling_version,
)
from treetune.runtime.generation import assign_credit, read_shaping_memory, send_episodes_of_first
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.runtime.training import make_trainer
from treetune.store.checksums import config_hash, read_record
from treetune.store.files import replace_folder
from treetune.trainer.tokens import units_of
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Column, Episode, Metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ReplayedStep:
    """The result of training an iteration again, either as the run did ("own") or with changes ("other")."""

    episodes: Sequence[Episode]
    gradient: Tensor
    """The gradient of the loss over all episodes, flat and in float64."""
    change: Tensor
    """The change of the weights, flat and in float32."""
    metrics: Metrics
    """The metrics of credit and of training."""
    same_as_run: bool | None
    """Whether the weights are bit-identical to the run's own after the iteration; None where the run's
    weights or the trainer's state are not stored."""
    different_tensor: Mapping[str, Any] | None
    """The first tensor that differs from the run's, as `first_different_tensor` returns it; None where no
    tensor differs, and where `same_as_run` is None."""
    unlike_record: Sequence[str] | None
    """The names of training metrics that differ from those that the run recorded, compared in the digits that
    it recorded; None where it recorded none."""
    sampled_tokens: int
    """The number of tokens that credit sampled for this training."""


def compare_steps(steps: Mapping[str, ReplayedStep]) -> dict[str, Any]:
    """Returns numbers about each step, and the similarity of the two steps if there are two.

    The steps are "own", as the run took it, and "other", as it was changed. For each step, the result has the
    norms of its gradient and of its change of the weights. ``same_as_run`` says whether the resulting weights
    equal the run's, and ``parted`` describes the first tensor that differs. ``unlike_record`` has the names
    of training metrics that differ from the run's. For two steps, the result also has the cosines of their
    gradients and of their changes, and the correlation of their advantages.
    """
    own, other = steps["own"], steps.get("other")
    result: dict[str, Any] = {}
    for name, step in steps.items():
        metrics = {key: value for key, value in step.metrics.items() if key.startswith(("train/", "credit/"))}
        result[name] = {
            "episodes": len(step.episodes),
            "gradient_norm": float(step.gradient.norm()),
            "change_norm": float(step.change.norm()),
            "same_as_run": step.same_as_run,
            "parted": step.different_tensor,
            "unlike_record": step.unlike_record,
            "sampled_tokens": step.sampled_tokens,
            "metrics": metrics,
        }
    if other is not None:
        result["cosine_of_gradients"] = _cosine(own.gradient, other.gradient)
        # The gradients are in float64. The changes are in float32, which would round sums over all weights.
        result["cosine_of_changes"] = _cosine(own.change.double(), other.change.double())
        result["correlation_of_advantages"] = _correlation_of_advantages(own.episodes, other.episodes)
    return result


def _cosine(first: Tensor, second: Tensor) -> float | None:
    lengths = float(first.norm()) * float(second.norm())
    return float(first @ second) / lengths if lengths else None


def _correlation_of_advantages(first: Sequence[Episode], second: Sequence[Episode]) -> float | None:
    """Returns the correlation of the two trainings' advantages, over the tokens that both train.

    Returns None where the correlation is not defined."""
    import numpy as np

    from treetune.lab.analyzers.figures import correlation

    episode_of_second = {episode.trajectory: episode for episode in second}
    first_advantages: list[Column] = []
    second_advantages: list[Column] = []
    for episode in first:
        other = episode_of_second.get(episode.trajectory)
        if other is None or episode.advantages is None or other.advantages is None:
            continue
        # A credit may leave tokens out of training, such as those whose entropy is low.
        trained_by_both = episode.trained & other.trained
        first_advantages.append(episode.advantages[trained_by_both])
        second_advantages.append(other.advantages[trained_by_both])
    if not first_advantages:
        return None
    coefficient = correlation(np.concatenate(first_advantages), np.concatenate(second_advantages))
    return None if math.isnan(coefficient) else coefficient


def rows_of_answers(steps: Mapping[str, ReplayedStep]) -> Iterator[dict[str, Any]]:
    """Yields a row for each trained answer, with the credit that its steps got in each training.

    `steps` has one or two trainings on the iteration's answers: "own", as the run did it, and "other", with a
    changed configuration. A selection may leave an answer out of one of them. ``step_ends`` are those of the
    first training that has the answer. The advantage of a step is the advantage of its first token.
    """
    # The keys are an answer's id and the name of a training.
    episodes_by_answer: dict[str, dict[str, Episode]] = {}
    for name, step in steps.items():
        for episode in step.episodes:
            episodes_by_answer.setdefault(episode.trajectory, {})[name] = episode
    for answer, episode_by_training in episodes_by_answer.items():
        first = next(iter(episode_by_training.values()))
        starts = (0, *first.step_ends[:-1])
        advantages: dict[str, list[float] | None] = {}
        values: dict[str, list[float] | None] = {}
        for name, episode in episode_by_training.items():
            advantages[name] = values[name] = None
            if episode.advantages is not None:
                advantages[name] = [float(episode.advantages[start]) for start in starts]
            if episode.step_values is not None:
                values[name] = [float(value) for value in episode.step_values]
        yield {
            "answer": answer,
            "reward": first.reward,
            "text": first.text,
            "step_ends": list(first.step_ends),
            "advantages": advantages,
            "values": values,
        }


TEXT_BY_SAMENESS = {
    True: "the resulting weights are bit-identical to the run's",
    False: "the resulting weights differ from the run's",
    None: "the resulting weights can't be compared with the run's: a checkpoint or the trainer's state is not"
    " stored",
}


def describe_result(result: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines that the command prints.

    `result` has the numbers of the training "own", as the run did it, and perhaps those of "other", with
    another credit or objective.
    """
    for name in ("own", "other"):
        if name in result:
            step = result[name]
            yield (
                f"{name:5}  {step['episodes']} episodes  gradient {step['gradient_norm']:.6g}  change of the"
                f" weights {step['change_norm']:.6g}  {step['sampled_tokens']} tokens sampled"
            )
    own = result["own"]
    metrics_text = _compare_with_recorded_metrics(differing_metrics=own["unlike_record"])
    yield f"own    {metrics_text}; {TEXT_BY_SAMENESS[own['same_as_run']]}"
    if "other" in result:
        for key, title in (
            ("cosine_of_gradients", "cosine of the gradients"),
            ("cosine_of_changes", "cosine of the changes"),
            ("correlation_of_advantages", "correlation of the advantages"),
        ):
            value = result[key]
            yield f"{title}: {'not defined' if value is None else f'{value:.4f}'}"
    yield f"single answers: {result['folder']}/{ADVANTAGES}"


def _compare_with_recorded_metrics(differing_metrics: Sequence[str] | None) -> str:
    if differing_metrics is None:
        return "the run recorded no metrics of this training"
    if differing_metrics:
        return f"metrics that differ from those that the run recorded: {', '.join(differing_metrics)}"
    return "all training metrics, the gradient norm included, equal those that the run recorded"


REPLACEABLE_KEYS = ("credit", "selection", "shaping", "trainer")
"""The keys that a replay may change: those that take effect after the answers are sampled."""

JOURNAL_PREFIX, STATE_FOLDER = "journal", "state"
"""Names in the folder of a replay. JOURNAL_PREFIX begins the names of the journals of its samples, one for
each rank. STATE_FOLDER is the folder of the trainer's state, which is deleted at the end."""


def replay(
    path: Path,
    iteration: int,
    run_config: PolicyIteration,
    plain: Mapping[str, Any],
    changed_config: PolicyIteration | None,
    exact: bool = False,
) -> dict[str, Any]:
    """Trains an iteration of a run again as the run did, and also by `changed_config`, if there is one.

    Nothing that the run stored is sampled again. Further continuations that the other credit needs are
    sampled with the weights of that iteration, and kept in the result's folder ``analyses/replay-…``. Results
    are bit-identical with as many ranks as the run had.

    Collective: every rank must call it.

    Args:
        path: the run's directory.
        iteration: the number of the iteration, counted from 1.
        run_config: the run's experiment.
        plain: the configuration from which `run_config` was built, as a dictionary.
        changed_config: the changed experiment, if there is one.
        exact: what to do where the optimiser's state before that iteration is not stored any more. If true,
            it is computed by training the earlier iterations again from their episodes. If false, the
            optimiser starts without a state.

    Raises ValueError where the run's answers or weights of the iteration are not stored.
    """
    directory = ExperimentDirectory(path)
    point = iteration - 1
    _require_files(directory, point)
    # With the run's credit, selection and shaping, the stored episodes are trained. With others, credit is
    # assigned again.
    assigns_credit = changed_config is not None and not _have_same_episodes(run_config, changed_config)
    # The run's folder may have another name or place than when it was trained.
    config = replace(run_config, directory=str(path.parent), experiment_name=path.name)
    variants = {"own": config}
    label = f"replay-{iteration:04d}"
    needs_engine = False
    if changed_config is not None:
        if changed_config.credit.asks_critic and not run_config.credit.needs_critic:
            raise ValueError(
                f"the run in {path} trained no critic, which the other credit needs: replay it with a credit"
                " that needs none"
            )
        if assigns_credit and changed_config.credit.trainer_scores.reference:
            raise ValueError(
                "the other credit needs the trainer's reference model, which a replay of credit doesn't have:"
                " set its scorer to 'policy'"
            )
        variants["other"] = changed_config
        # Each change has its own folder, in which a later replay of the same change finds the samples.
        replaceable_values = {key: repr(getattr(changed_config, key)) for key in REPLACEABLE_KEYS}
        label += f"-{config_hash(replaceable_values)[:8]}"
        needs_engine = assigns_credit and changed_config.credit.needs_engine
    folder = directory.analysis_folder(label)
    work = folder.with_name(f".{folder.name}.unfinished")
    steps: dict[str, ReplayedStep] = {}
    with (
        Session.open(config, plain, "analysis") as session,
        PolicyServer.start(session, needs_engine=needs_engine) as server,
        RunResources.open(session, server) as resources,
    ):
        state = _state_before(session, point, work / STATE_FOLDER if exact else None)
        for name, variant in variants.items():
            steps[name] = _replay_step(resources, variant, point, state, work, folder)
        result = compare_steps(steps)
        if session.ranks.is_first:
            work.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work / STATE_FOLDER, ignore_errors=True)  # large, and no part of the result
            write_result(work, {"iteration": iteration, **result}, rows_of_answers(steps), ADVANTAGES)
            replace_folder(work, folder)
        session.ranks.barrier("the replay is written")
    return result | {"folder": str(folder)}


def _have_same_episodes(first: PolicyIteration, second: PolicyIteration) -> bool:
    """Returns whether both experiments make the same episodes of the same answers."""
    return all(getattr(first, key) == getattr(second, key) for key in ("credit", "selection", "shaping"))


def _require_files(directory: ExperimentDirectory, point: int) -> None:
    """Raises ValueError where the files that a replay of iteration `point` (from 0) needs are missing."""
    folder = directory.iteration_folder(point)
    for name in (TRAJECTORIES, EPISODES):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder / name} is missing: a replay needs an iteration (counted from 1) that sampled and"
                " trained"
            )
    if point and not (directory.checkpoint_folder(point) / "policy").is_dir():
        iterations = ", ".join(str(number + 1) for number in [0, *directory.checkpoints()])
        raise ValueError(
            f"{directory.checkpoint_folder(point)} is missing, whose weights sampled the iteration. These"
            f" iterations can be replayed: {iterations}. checkpoints: {{keep_every: 1}} keeps all"
        )


def _state_before(session: Session, point: int, rebuilt_folder: Path | None) -> Path | None:
    """Returns the folder of the trainer's state before an iteration, or None if training begins without it.

    The state is read where it is stored. Where the state was deleted, it is computed from stored episodes and
    saved in `rebuilt_folder`; if `rebuilt_folder` is None, the state isn't computed. Nor is it computed if
    each iteration restarts, since training then begins with the start model. All ranks call this function
    together.
    """
    directory, config = session.directory, session.config
    stored = directory.checkpoint_folder(point) / "trainer"
    if not point:
        return None
    if stored.is_dir():
        return stored
    if config.restart == "every_iteration":
        return None
    deleted_text = f"the trainer's state after iteration {point} was deleted (only the two newest are kept)"
    if rebuilt_folder is None and config.trainer.lora is not None:
        raise ValueError(
            f"{deleted_text}, and the adapters are merged into the stored weights: --exact computes the state"
            " from the earlier episodes"
        )
    if rebuilt_folder is None:
        session.console.say(
            f"{deleted_text}: the step is that of a new optimiser; --exact computes the state from the"
            " earlier episodes"
        )
        return None
    if config.choose_checkpoint is not None:
        # The run kept the weights of a chosen epoch. `trainer.train` below would keep those of the last.
        raise ValueError(
            "the trainer's state can't be computed from the episodes of an experiment that chooses among"
            " epochs: replay it without --exact"
        )
    trainer = make_trainer(session)
    for earlier_point in range(point):
        path = directory.iteration_folder(earlier_point) / EPISODES
        if not path.is_file():
            raise ValueError(f"{path} is missing, which --exact needs: replay without it")
        episodes = read_episodes(path)
        if episodes:
            trainer.train(earlier_point, episodes)
            session.console.say(f"iteration {earlier_point + 1} of {point} trained again")
    trainer.save(rebuilt_folder)
    trainer.policy.close()
    session.ranks.barrier("the state is written")
    return rebuilt_folder


def _replay_step(
    resources: RunResources,
    config: PolicyIteration,
    point: int,
    state: Path | None,
    work: Path,
    earlier_folder: Path,
) -> ReplayedStep:
    """Assigns credit to the iteration's answers, and trains on the episodes.

    Training starts from the trainer's `state`, or else from the stored weights. `earlier_folder` is the
    folder of an earlier replay with the same settings, whose samples are used again if it exists.
    """
    session, run_config = resources.session, resources.session.config
    folder = session.directory.iteration_folder(point)
    metrics: Metrics = {}
    tokens = 0
    if _have_same_episodes(run_config, config):  # credit, selection and shaping are the run's
        episodes = read_episodes(folder / EPISODES)
    else:
        all_trees = trees_of(read_trajectories(folder / TRAJECTORIES))
        trees = contiguous_share(all_trees, session.ranks.rank, session.ranks.world_size)
        journal = work / f"{JOURNAL_PREFIX}-{session.ranks.rank}.jsonl"
        earlier_journals = sorted(earlier_folder.glob(f"{JOURNAL_PREFIX}-*.jsonl"))
        episodes, metrics, tokens = assign_credit_again(
            resources, config, point, trees, "other credit", journal, earlier_journals
        )
    if not episodes:
        raise ValueError(
            f"the selection ({type(config.selection).__name__}) keeps no episode of this iteration"
        )
    session.config = config  # `make_trainer` and others take the trainer and the credit from the session
    try:
        return _train_and_compare(session, point, state, episodes, metrics, tokens)
    finally:
        session.config = run_config


def assign_credit_again(
    resources: RunResources,
    config: PolicyIteration,
    point: int,
    trees: Sequence[Tree],
    phase_name: str,
    journal: Path,
    further_journals: Sequence[Path] = (),
) -> tuple[list[Episode], Metrics, int]:
    """Assigns `config`'s credit to stored answers of an iteration.

    Continuations have the seeds that they would have had in the run. Those that the run stored are read, and
    others are sampled with the weights of the iteration and kept in `journal`.

    Args:
        point: the iteration, counted from 0.
        trees: this rank's share of the answers.
        phase_name: a name for the console.
        further_journals: further journals to read.

    Returns:
        The episodes, the metrics of credit, and the number of tokens that were sampled.
    """
    session, run_config = resources.session, resources.session.config
    engine = resources.server.engine if config.credit.needs_engine else None
    if engine is not None:
        resources.server.load_checkpoint(sampling_version(run_config, point))
    tokens_before = 0 if engine is None else engine.tokens
    stored = sorted(session.directory.journal_folder(point).glob("*.jsonl"))
    with resources.phase(f"iteration {point + 1}: {phase_name}", "continuations") as show:
        # The rollout and seed are the run's own (`run_config`), so that continuations have the run's seeds.
        context = resources.context(
            run_config.rollout,
            seed=run_config.seed,
            iteration=point,
            journal=journal if engine is not None else None,
            journals=[*stored, *further_journals],
            progress=show,
        )
        scores = ModelScores(critic=credit_critic_at(resources, point))
        if config.credit.trainer_scores.distributions:
            scores = replace(scores, distributions=distributions_at(session, point))
        # Reward shaping may depend on what it remembers of earlier iterations.
        context = replace(context, shaping_memory=read_shaping_memory(session, point), model_scores=scores)
        selected, metrics = assign_credit(session.ranks, config, context, trees)
        # Only the first rank has the selected episodes.
        episodes = send_episodes_of_first(session.ranks, "selected episodes", selected)
    sampled_tokens = 0 if engine is None else engine.tokens - tokens_before
    return episodes, metrics, sampled_tokens


def _train_and_compare(
    session: Session,
    point: int,
    state: Path | None,
    episodes: Sequence[Episode],
    metrics: Metrics,
    tokens: int,
) -> ReplayedStep:
    """Trains on the episodes from the state before the iteration, and compares the result with the run's.

    Args:
        point: the iteration, counted from 0.
        state: the folder of the trainer's state; None: the trainer gets the stored weights and a new
            optimiser.
        metrics: the metrics of credit, to which those of training are added.
        tokens: the number of tokens that credit sampled.
    """
    import torch

    # Bring the trainer into the state before the iteration. `make_trainer` has the start weights and a new
    # optimiser, which is right for the first iteration (0).
    trainer = make_trainer(session)
    # Adapters can't be read from stored weights, into which they are merged.
    can_read_weights = session.config.trainer.lora is None
    if state is not None:
        trainer.load(state)
    elif point and can_read_weights:
        # The trainer's state was deleted, but not the weights. The optimiser is a new one.
        stored_policy = policy_at(session, point)
        with torch.no_grad():
            for parameter, stored in zip(trainer.model.parameters(), stored_policy.parameters(), strict=True):
                parameter.copy_(stored)
    resets_each_iteration = session.config.restart == "every_iteration"
    metrics_of_abandoned: Metrics = {}
    if point and resets_each_iteration:
        # The run, too, reset policy and optimiser to the start model before this iteration. `restart` doesn't
        # train the episodes: before the reset, it scores them with the policy that sampled them, for metrics.
        has_sampling_policy = state is not None or can_read_weights
        if not has_sampling_policy:
            session.console.say(
                "the policy that sampled these answers can't be read, since its adapters were deleted with"
                " the trainer's state: train/kl and engine/logprob_gap_* are those of the start model"
            )
        metrics_of_abandoned = trainer.restart(episodes if has_sampling_policy else ())

    # Train.
    weights_before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    loss = Loss(session, point, episodes)
    # `gradient_parts` has the gradient of each parameter. A unit is an episode, or a pair that the objective
    # compares.
    _, gradient_parts = loss.gradients(units_of(episodes, in_pairs=loss.settings.objective.needs_pairs))
    gradient = torch.cat([part.detach().flatten().double().cpu() for part in gradient_parts])
    # As in the run, metrics of the abandoned policy replace those of the start model.
    metrics = metrics | trainer.train(point, episodes) | metrics_of_abandoned
    weights_after = trainer.weights()
    names = sorted(weights_after)
    change = torch.cat([(weights_after[name] - weights_before[name]).flatten().float() for name in names])

    # Compare the result with the run's.
    next_policy = session.directory.checkpoint_folder(point + 1) / "policy"
    # False only where a new optimiser took the place of a deleted state: its step is another than the run's.
    begins_like_run = not point or resets_each_iteration or state is not None
    is_same, different_tensor = None, None
    if next_policy.is_dir() and begins_like_run:
        from treetune.models.policy_files import read_policy

        stored_weights, _ = read_policy(next_policy)
        different_tensor = first_different_tensor(stored_weights, weights_after, float(change.norm()))
        is_same = different_tensor is None
    trainer.policy.close()
    recorded_metrics = session.directory.iteration_folder(point) / ITERATION_METRICS
    return ReplayedStep(
        episodes,
        gradient,
        change,
        metrics,
        same_as_run=is_same,
        different_tensor=different_tensor,
        unlike_record=_differing_metrics(recorded_metrics, metrics),
        sampled_tokens=tokens,
    )


def first_different_tensor(
    stored: Mapping[str, Tensor], after: Mapping[str, Tensor], norm_of_change: float
) -> dict[str, Any] | None:
    """Returns the first tensor that differs from the checkpoint's by even one bit, or None if none differs.

    Args:
        stored: the checkpoint's weights.
        after: the weights after the step that was done again, in the model's order.
        norm_of_change: the norm of that step's change of the weights.

    Returns:
        ``tensor``, the tensor's name; ``numbers``, how many of its ``of`` values differ; ``largest``, the
        largest difference; ``share``, the norm of the difference over all tensors, divided by
        `norm_of_change`.
    """
    differences: dict[str, Tensor] = {}
    for name, weight in after.items():
        if name in stored:  # a checkpoint leaves out a head that is tied to the embeddings
            # The checkpoint may have a shorter type than the weights that are trained.
            as_stored = weight.to(stored[name].dtype)
            differences[name] = (as_stored.double() - stored[name].double()).abs()
    norm = math.sqrt(sum(float((difference**2).sum()) for difference in differences.values()))
    for name, difference in differences.items():
        numbers = int((difference != 0).sum())
        if numbers:
            return {
                "tensor": name,
                "numbers": numbers,
                "of": difference.numel(),
                "largest": float(difference.max()),
                "share": norm / norm_of_change if norm_of_change else math.inf,
            }
    return None


def _differing_metrics(path: Path, metrics: Metrics) -> list[str] | None:
    """Returns the names of training metrics that differ from those that the run recorded in the file `path`.

    Returns None if the run recorded none."""
    if not path.is_file():
        return None
    record = read_record(path, METRICS_REMEDY)
    recorded = {name: value for name, value in record.items() if name.startswith("train/")}
    if not recorded:
        return None
    # `metrics_row` rounds as the run's record does. Its iteration and time are not compared.
    comparable = {name: metrics[name] for name in recorded if name in metrics}
    row = metrics_row(iteration=0, wall_time=0.0, metrics=comparable)
    return sorted(name for name in recorded if row.get(name) != recorded[name])
