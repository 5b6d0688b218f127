"""Stored answers again, with another credit, selection or objective."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.lab.analyzers.gradients import Loss
from treetune.lab.analyzers.stored import credit_critic_at, policy_at
from treetune.rollouts.answers import contiguous_share
from treetune.rollouts.storage import read_episodes, read_trajectories
from treetune.runtime.analysis import write_result
from treetune.runtime.base import PolicyIteration
from treetune.runtime.directory import METRICS_REMEDY, ExperimentDirectory, metrics_row, sampling_version
from treetune.runtime.generation import credited, episodes_of_first, remembered
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.sampler import Sampler
from treetune.runtime.session import Session
from treetune.runtime.training import make_trainer
from treetune.store.checksums import config_hash, read_record
from treetune.store.files import replace_folder
from treetune.trainer.tokens import units_of
from treetune.tree import Tree, trees_of
from treetune.vocabulary import Episode, Metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ReplayedStep:
    """The step of one variant: its episodes, the gradient of its whole loss, and what training changed.

    `gradient` and `change` are flat, float64 and float32; `metrics` are those of credit and of training.
    `same_as_run` says whether the weights are the run's own after the iteration, to the bit; None where
    nobody can tell. `parted` says where they first aren't, and how far they went (`first_difference`).
    `unlike_record` are the numbers of training, the gradient's norm among them, that are others than the run
    recorded, to the digits that it did; None where it recorded none.
    """

    episodes: Sequence[Episode]
    gradient: Tensor
    change: Tensor
    metrics: Metrics
    same_as_run: bool | None
    parted: Mapping[str, Any] | None
    unlike_record: Sequence[str] | None
    sampled_tokens: int


def compare_steps(steps: Mapping[str, ReplayedStep]) -> dict[str, Any]:
    """Returns the norms of gradients and of changes of weights for each step ("own" as the run took it, and
    "other" as changed), the cosines between both, and the correlation of their advantages."""
    own, other = steps["own"], steps.get("other")
    result: dict[str, Any] = {}
    for name, step in steps.items():
        metrics = {key: value for key, value in step.metrics.items() if key.startswith(("train/", "credit/"))}
        result[name] = {
            "episodes": len(step.episodes),
            "gradient_norm": float(step.gradient.norm()),
            "change_norm": float(step.change.norm()),
            "same_as_run": step.same_as_run,
            "parted": step.parted,
            "unlike_record": step.unlike_record,
            "sampled_tokens": step.sampled_tokens,
            "metrics": metrics,
        }
    if other is not None:
        result["cosine_of_gradients"] = _cosine(own.gradient, other.gradient)
        result["cosine_of_changes"] = _cosine(own.change.double(), other.change.double())
        result["correlation_of_advantages"] = _correlation(own.episodes, other.episodes)
    return result


def _cosine(one: Tensor, other: Tensor) -> float | None:
    length = float(one.norm()) * float(other.norm())
    return float(one @ other) / length if length else None


def _correlation(one: Sequence[Episode], other: Sequence[Episode]) -> float | None:
    """Returns the correlation of the advantages of tokens that both train."""
    import numpy as np

    from treetune.lab.analyzers.figures import correlation

    theirs = {episode.trajectory: episode.advantages for episode in other}
    pairs = [
        (episode.advantages[episode.trained], advantages[episode.trained])
        for episode in one
        if episode.advantages is not None and (advantages := theirs.get(episode.trajectory)) is not None
    ]
    if not pairs:
        return None
    found = correlation(*(np.concatenate(side) for side in zip(*pairs, strict=True)))
    return None if math.isnan(found) else found


def side_by_side(steps: Mapping[str, ReplayedStep]) -> Iterator[dict[str, Any]]:
    """A row for each answer that any variant trains: what each gives the steps of the first that has it."""
    of_variants = {name: {e.trajectory: e for e in step.episodes} for name, step in steps.items()}
    for trajectory in dict.fromkeys(key for episodes in of_variants.values() for key in episodes):
        having = {name: found[trajectory] for name, found in of_variants.items() if trajectory in found}
        first = next(iter(having.values()))
        starts = (0, *first.step_ends[:-1])
        yield {
            "answer": trajectory,
            "reward": first.reward,
            "text": first.text,
            "step_ends": list(first.step_ends),
            "advantages": {
                name: None
                if episode.advantages is None
                else [float(episode.advantages[start]) for start in starts]
                for name, episode in having.items()
            },
            "values": {
                name: None if episode.step_values is None else [float(value) for value in episode.step_values]
                for name, episode in having.items()
            },
        }


SAME = {
    True: "the weights after it are the run's own, to the bit",
    False: "the weights after it are others than the run's",
    None: "whether the weights after it are the run's own can't be told, for want of a state or a checkpoint",
}


def in_words(result: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines that the command prints."""
    for name in ("own", "other"):
        if name in result:
            one = result[name]
            yield (
                f"{name:5}  {one['episodes']} episodes  gradient {one['gradient_norm']:.6g}  change of the"
                f" weights {one['change_norm']:.6g}  {one['sampled_tokens']} tokens sampled"
            )
    yield f"own    {_recorded(result['own']['unlike_record'])}; {SAME[result['own']['same_as_run']]}"
    if "other" in result:
        for key, words in (
            ("cosine_of_gradients", "cosine of the gradients"),
            ("cosine_of_changes", "cosine of the changes"),
            ("correlation_of_advantages", "correlation of the advantages"),
        ):
            value = result[key]
            yield f"{words}: {'none to be told' if value is None else f'{value:.4f}'}"
    yield f"answer by answer: {result['folder']}/advantages.jsonl"


def _recorded(unlike: Sequence[str] | None) -> str:
    if unlike is None:
        return "the run recorded no numbers of this training"
    if unlike:
        return f"others than the run recorded are {', '.join(unlike)}"
    return "the gradient's norm and all numbers of training are those that the run recorded"


REPLACEABLE = ("credit", "selection", "shaping", "trainer")
"""The keys that a replay may have otherwise: what comes after the answers."""

JOURNAL, STATE = "journal", "state"
"""The files in the folder of a replay with what was sampled for it, by rank, and, while it goes on, the
trainer's state."""


def replay(
    path: Path,
    iteration: int,
    own: PolicyIteration,
    plain: Mapping[str, Any],
    other: PolicyIteration | None,
    exact: bool = False,
) -> dict[str, Any]:
    """Trains iteration `iteration` (from 1) of the run in `path` again, as it was and as `other` has it.

    Nothing that the run stored is sampled again; what the other credit asks for beyond that is sampled from
    the weights of then, and kept in the result's folder, ``analyses/replay-…``. The optimiser's state is the
    stored one; where it is gone, that of a fresh optimiser, or, if `exact`, made again from the episodes of
    the iterations before. Collective: as many ranks as the run had give its bits. Raises ValueError where the
    run lacks the answers or the weights."""
    directory = ExperimentDirectory(path)
    point = iteration - 1
    _require(directory, point)
    if other is not None and other.credit.asks_critic and not own.credit.needs_critic:
        raise ValueError(
            f"the run in {path} trained no critic, which the other credit asks: replay it with a credit"
            " without one"
        )
    config = replace(own, directory=str(path.parent), experiment_name=path.name)
    variants = {"own": config} | ({} if other is None else {"other": other})
    label = f"replay-{iteration:04d}"
    if other is not None:
        label += f"-{config_hash({key: repr(getattr(other, key)) for key in REPLACEABLE})[:8]}"
    place = directory.analysis(label)
    work = place.with_name(f".{place.name}.unfinished")
    samples = other is not None and other.credit.needs_engine and not _same_credit(own, other)
    steps: dict[str, ReplayedStep] = {}
    with (
        Session.open(config, plain, "analysis") as session,
        PolicyServer.start(session, needed=samples) as server,
        Sampler.open(session, server) as sampler,
    ):
        state = _state_before(session, point, work / STATE if exact else None)
        for name, variant in variants.items():
            steps[name] = _step(sampler, variant, point, state, work, place)
        result = compare_steps(steps)
        if session.ranks.is_first:
            work.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work / STATE, ignore_errors=True)
            whole = {"iteration": iteration, **result}
            write_result(work, whole, side_by_side(steps), "advantages.jsonl")
            replace_folder(work, place)
        session.ranks.barrier("the replay is written")
    return result | {"folder": str(place)}


def _same_credit(one: PolicyIteration, other: PolicyIteration) -> bool:
    """Returns whether both make the same episodes of the same answers."""
    return all(getattr(one, key) == getattr(other, key) for key in ("credit", "selection", "shaping"))


def _require(directory: ExperimentDirectory, point: int) -> None:
    folder = directory.iteration(point)
    for name in ("trajectories.arrow", "episodes.arrow"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder / name} isn't there: a replay is of an iteration, from 1, that sampled and trained"
            )
    if point and not (directory.checkpoint(point) / "policy").is_dir():
        kept = ", ".join(str(number + 1) for number in [0, *directory.checkpoints()])
        raise ValueError(
            f"{directory.checkpoint(point)} isn't there, whose weights sampled the iteration: these can be"
            f" replayed: {kept}. checkpoints: {{keep_every: 1}} keeps all"
        )


def _state_before(session: Session, point: int, made: Path | None) -> Path | None:
    """Returns the folder of the trainer's state before the iteration: the stored one, or, in `made` if that
    is given, one made from stored episodes. None for neither, and where training begins afresh. Collective.
    """
    directory, config = session.directory, session.config
    stored = directory.checkpoint(point) / "trainer"
    if not point or config.restart == "every_iteration":
        return None
    if stored.is_dir():
        return stored
    if made is None:
        session.console.say(
            f"the trainer's state after iteration {point} is gone (the two newest are kept): the step is that"
            " of a fresh optimiser; --exact makes the state again from the episodes before"
        )
        return None
    if config.choose_checkpoint is not None:
        raise ValueError(
            "an experiment that chooses among epochs can't be made again from its episodes alone: replay it"
            " without --exact"
        )
    trainer = make_trainer(session)
    for earlier in range(point):
        path = directory.iteration(earlier) / "episodes.arrow"
        if not path.is_file():
            raise ValueError(f"{path} isn't there, from which the state is to be made: leave --exact out")
        if episodes := read_episodes(path):
            trainer.train(earlier, episodes)
            session.console.say(f"iteration {earlier + 1} of {point} trained again")
    trainer.save(made)
    trainer.policy.close()
    session.ranks.barrier("the state is written")
    return made


def _step(
    sampler: Sampler, config: PolicyIteration, point: int, state: Path | None, work: Path, earlier: Path
) -> ReplayedStep:
    """Gives credit, and trains from `state`, or from the weights of then. `earlier` is where the same replay
    may lie."""
    session, own = sampler.session, sampler.session.config
    folder = session.directory.iteration(point)
    metrics: Metrics = {}
    tokens = 0
    if _same_credit(own, config):
        episodes = read_episodes(folder / "episodes.arrow")
    else:
        everyones = trees_of(read_trajectories(folder / "trajectories.arrow"))
        trees = contiguous_share(everyones, session.ranks.rank, session.ranks.world_size)
        journal = f"{JOURNAL}-{session.ranks.rank}.jsonl"
        known = sorted(earlier.glob(f"{JOURNAL}-*.jsonl"))
        episodes, metrics, tokens = credited_again(
            sampler, config, point, trees, "other credit", work / journal, known
        )
    if not episodes:
        raise ValueError(
            f"the selection ({type(config.selection).__name__}) keeps no episode of this iteration"
        )
    session.config = config  # the session has another trainer and credit meanwhile
    try:
        return _trained(session, point, state, episodes, metrics, tokens)
    finally:
        session.config = own


def credited_again(
    sampler: Sampler,
    config: PolicyIteration,
    point: int,
    trees: Sequence[Tree],
    what: str,
    journal: Path,
    journals: Sequence[Path] = (),
) -> tuple[list[Episode], Metrics, int]:
    """The episodes that `config` makes of stored answers of iteration `point` (from 0), the metrics, and how
    many tokens were sampled for it. `what` names it on the console.

    Continuations are the run's own, seeds and all: those that it stored are read, and those that it would
    have sampled besides are sampled from the weights of then and kept in `journal`.
    """
    session, own = sampler.session, sampler.session.config
    engine = sampler.server.engine if config.credit.needs_engine else None
    if engine is not None:
        sampler.server.load_checkpoint(sampling_version(own, point))
    before = 0 if engine is None else engine.tokens
    stored = sorted((session.directory.iteration(point) / "journal").glob("*.jsonl"))
    with sampler.phase(f"iteration {point + 1}: {what}", "continuations") as show:
        context = sampler.context(
            own.rollout,
            seed=own.seed,
            iteration=point,
            journal=journal if engine is not None else None,
            journals=[*stored, *journals],
            progress=show,
            services=[remembered(session, point)],
        )
        critic = credit_critic_at(sampler, point)
        if critic is not None:
            context = context.with_services(critic)
        selected, metrics = credited(session.ranks, config, context, trees)
        episodes = episodes_of_first(session.ranks, "selected episodes", selected)
    return episodes, metrics, 0 if engine is None else engine.tokens - before


def _trained(
    session: Session,
    point: int,
    state: Path | None,
    episodes: Sequence[Episode],
    metrics: Metrics,
    tokens: int,
) -> ReplayedStep:
    import torch

    directory = session.directory
    trainer = make_trainer(session)
    restarts = session.config.restart == "every_iteration"
    if state is not None:
        trainer.load(state)
    elif point and restarts:
        metrics = metrics | trainer.restart(episodes)
    elif point:
        with torch.no_grad():
            for parameter, stored in zip(
                trainer.model.parameters(), policy_at(session, point).parameters(), strict=True
            ):
                parameter.copy_(stored)
    before = trainer.weights()
    before = {name: tensor.clone() for name, tensor in before.items()}
    loss = Loss(session, point, episodes)
    _, parts = loss.gradients(units_of(episodes, in_pairs=loss.settings.objective.needs_pairs))
    gradient = torch.cat([part.detach().flatten().double().cpu() for part in parts])
    metrics = metrics | trainer.train(point, episodes)
    after = trainer.weights()
    names = sorted(after)
    change = torch.cat([(after[name] - before[name]).flatten().float() for name in names])
    kept_policy = directory.checkpoint(point + 1) / "policy"
    same, parted = None, None
    if kept_policy.is_dir() and (not point or restarts or state is not None):
        from treetune.models.policy_files import read_policy

        kept, _ = read_policy(kept_policy)
        parted = first_difference(kept, after, float(change.norm()))
        same = parted is None
    trainer.policy.close()
    unlike = _unlike_record(directory.iteration(point) / "metrics.json", metrics)
    return ReplayedStep(episodes, gradient, change, metrics, same, parted, unlike, tokens)


def first_difference(
    kept: Mapping[str, Tensor], after: Mapping[str, Tensor], change: float
) -> dict[str, Any] | None:
    """Returns the first tensor that differs from the checkpoint's by even one bit; None if none does.

    Args:
        kept: The checkpoint's weights.
        after: The weights after the step that was done again, in the model's order.
        change: The norm of that step.

    Returns:
        ``tensor``, the tensor's name; ``numbers``, how many of its ``of`` values differ; ``largest``, the
        largest difference; ``share``, the norm of the difference over all tensors, divided by `change`.
    """
    differences: dict[str, Tensor] = {}
    for name, weight in after.items():
        if name in kept:
            # The checkpoint may be in a shorter type than the weights that are trained.
            as_kept = weight.to(kept[name].dtype)
            differences[name] = (as_kept.double() - kept[name].double()).abs()
    norm = math.sqrt(sum(float((difference**2).sum()) for difference in differences.values()))
    for name, difference in differences.items():
        numbers = int((difference != 0).sum())
        if numbers:
            return {
                "tensor": name,
                "numbers": numbers,
                "of": difference.numel(),
                "largest": float(difference.max()),
                "share": norm / change if change else math.inf,
            }
    return None


def _unlike_record(path: Path, metrics: Metrics) -> list[str] | None:
    """Returns the names of training metrics that the run recorded otherwise; None if it recorded none."""
    if not path.is_file():
        return None
    recorded = {
        name: value for name, value in read_record(path, METRICS_REMEDY).items() if name.startswith("train/")
    }
    if not recorded:
        return None
    # `metrics_row` rounds as the run's record does.
    row = metrics_row(0, 0.0, {name: metrics[name] for name in recorded if name in metrics})
    return sorted(name for name in recorded if row.get(name) != recorded[name])
