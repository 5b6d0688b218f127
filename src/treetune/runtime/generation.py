"""Makes an iteration's episodes from its problems; each phase is kept as soon as it is done."""

from __future__ import annotations

import platform
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from treetune.engine.base import ANSWERS, CONTINUATIONS, Completion, Request, SamplingParams
from treetune.engine.journal import JournaledEngine
from treetune.engine.pipelined import Call, PipelinedEngine
from treetune.rollouts import unavailable
from treetune.rollouts.answers import contiguous_share
from treetune.rollouts.context import CarryOver, FurtherProblems, RolloutContext, ShapingMemory
from treetune.rollouts.metrics import domain_advantages
from treetune.rollouts.shaping import shaped
from treetune.rollouts.storage import (
    SIGNALS,
    TOKENS,
    StoredEpisodes,
    episodes_from_bytes,
    episodes_to_bytes,
    read_episodes,
    read_trajectories,
    refuse_another_iterations,
    trajectories_from_bytes,
    trajectories_to_bytes,
    write_episodes,
    write_tokens,
    write_trajectories,
)
from treetune.rollouts.values import EarlyContinuations
from treetune.runtime.base import PolicyIteration
from treetune.runtime.console import Clock
from treetune.runtime.directory import (
    EPISODES,
    SAMPLED_TOKENS,
    is_generated,
    refuse_misplaced,
    samples_in,
)
from treetune.runtime.machine import memory_in_use
from treetune.runtime.sampler import Sampler
from treetune.runtime.session import Session
from treetune.store.checksums import read_record, seal_of, write_record
from treetune.tasks.drawing import Drawing
from treetune.trainer.ranks import Ranks
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Episode, Metrics, Trajectory

PASS_RATES = "pass_rates.json"
"""In an iteration's folder: the share of right answers to each of its problems, where draws ask for it."""

MEMORY = "memory.json"
"""In an iteration's folder: the memory of parts of shaping, of that iteration and all before it."""

CARRIED = "carried.arrow"
"""In an iteration's folder: the answers that a rollout carries over to the next one."""

BEGIN_AGAIN = "put it back, or begin again under another experiment_name"

FILE_POLL_S = 0.2
"""Seconds between two looks for a file that another machine has written."""


def generate(sampler: Sampler, iteration: int, clock: Clock) -> tuple[Collection[Episode], Metrics]:
    """Returns all ranks' episodes of the iteration: sampled now, or stored by an interrupted run. One rank
    alone has them in memory; several read them where the first one has written them.

    A finished phase is read back, an unfinished one goes on from the requests that were answered. Collective.
    """
    session = sampler.session
    config, ranks = session.config, session.ranks
    folder = session.directory.iteration(iteration)
    if samples_in(config, session.directory, iteration):
        with clock.stopped():  # an engine that is still starting is no matter of this iteration
            sampler.ready()
    path = folder / EPISODES
    episodes: Collection[Episode]
    if is_generated(session.directory, iteration):
        refuse_another_iterations(path, iteration)
        metrics = _read_phase(folder / "rollout.json", clock, "generation")
        metrics |= _read_phase(folder / "credit.json", clock, "credit")
        episodes = read_episodes(path) if ranks.world_size == 1 else StoredEpisodes(path)
    else:
        trees, metrics, early = _roll_out(sampler, iteration, clock)
        if ranks.device.type == "cuda":
            metrics["memory/generation"] = memory_in_use()
        memory = remembered(session, iteration)
        selected, credit_metrics = _give_credit(sampler, iteration, trees, clock, memory, early)
        metrics |= credit_metrics
        if ranks.is_first:
            _write_phase(folder / "credit.json", metrics, clock, "credit")
            if _remembers(config):
                write_record(folder / MEMORY, memory)
            tokens, model = session.directory.path / TOKENS, session.model
            if not tokens.is_file():  # readers of episodes look the text of tokens up there
                write_tokens(tokens, model.codec, 1 + max(model.tokenizer.get_vocab().values()))
            (folder / SIGNALS).unlink(missing_ok=True)  # of episodes that somebody has deleted
            # Last: from here on, both phases are done.
            write_episodes(path, selected, model.codec, iteration)
        episodes = selected if ranks.world_size == 1 else stored_for_all(ranks, path)
    if config.rollout.needs_engine:
        seconds = sum(clock.seconds[phase] for phase, count in clock.tokens.items() if count)
        metrics["engine/tokens_per_second"] = sum(clock.tokens.values()) / seconds if seconds else 0.0
    return episodes, metrics


def _roll_out(
    sampler: Sampler, iteration: int, clock: Clock
) -> tuple[list[Tree], Metrics, EarlyContinuations | None]:
    """Returns this rank's trees, all ranks' metrics, and the continuations that credit has begun
    meanwhile."""
    session = sampler.session
    config, ranks, folder = session.config, session.ranks, session.directory.iteration(iteration)
    if (folder / "trajectories.arrow").is_file():
        refuse_another_iterations(folder / "trajectories.arrow", iteration)
        metrics = _read_phase(folder / "rollout.json", clock, "generation", "credit")
        return own_trees(ranks, read_trajectories(folder / "trajectories.arrow")), metrics, None
    everything = session.train_problems
    earlier_metrics = cache(lambda i: _read_earlier(session, i, "rollout.json", HOW_PROBLEMS_WENT)["metrics"])
    pass_rates = cache(lambda i: _read_earlier(session, i, PASS_RATES, HOW_PROBLEMS_WENT))
    drawing = Drawing(config.seed, iteration, config.problem_sampling, earlier_metrics, pass_rates)
    problems = config.task.draw(everything, config.problems_per_iteration or len(everything), drawing)
    services: list[object] = [
        FurtherProblems(lambda: config.task.draw_further(everything, problems, drawing))
    ]
    with (
        _count_tokens(sampler, "generation", clock),
        sampler.phase(f"iteration {iteration + 1}: sampling", "answers") as show,
    ):
        if config.rollout.carries:
            services.append(_carry_over(session, iteration))
        context = sampler.context(
            config.rollout,
            seed=config.seed,
            iteration=iteration,
            journal=_journal(sampler, folder, "rollout"),
            continuations=_journal(sampler, folder, "credit"),
            progress=show,
            observe=partial(_check_answered, sampler),
            services=services,
        )
        early = config.credit.early_continuations(context) if config.rollout.needs_engine else None
        trees, metrics = config.rollout.run(context if early is None else early.attached(context), problems)
        metrics |= config.task.drawing_metrics(everything, drawing)
        metrics |= sampler.service_metrics(context.grader)
        if config.rollout.needs_engine:
            # Before anything is written: where nothing was graded, the next try asks for grades again.
            unavailable.report(context, f"iteration {iteration + 1}", answers_of(trees))
    if early is not None:
        metrics |= _move_to_credit(ranks, clock, early.engine)
    answers: list[Trajectory] = []
    if config.rollout.needs_engine:  # demonstrations cost less to make again than to keep
        sampled = sum(tree.sampled_tokens for tree in trees)
        metrics[SAMPLED_TOKENS] = float(sum(ranks.exchange("tokens of answers", sampled)))
        answers = trajectories_on_first(ranks, "trajectories", answers_of(trees))
    if ranks.is_first:
        if config.task.remembers_pass_rates:
            right: dict[str, list[bool]] = {}
            for answer in answers:
                if answer.grade.is_known:
                    right.setdefault(answer.problem.id, []).append(answer.grade.correct)
            write_record(folder / PASS_RATES, {id: sum(each) / len(each) for id, each in right.items()})
        # The seconds of early continuations stay credit's, should this process not come to its end.
        _write_phase(folder / "rollout.json", metrics, clock, "generation", "credit")
        if config.rollout.needs_engine:
            write_trajectories(folder / "trajectories.arrow", answers, iteration)
    ranks.barrier("trajectories written")
    return trees, metrics, early


def _give_credit(
    sampler: Sampler,
    iteration: int,
    trees: list[Tree],
    clock: Clock,
    memory: ShapingMemory,
    early: EarlyContinuations | None,
) -> tuple[list[Episode], Metrics]:
    """Returns what `credited` does, and brings `memory` up to this iteration; `early` was begun by the
    process that rolled out."""
    session, config = sampler.session, sampler.session.config
    folder = session.directory.iteration(iteration)
    with (
        _count_tokens(sampler, "credit", clock),
        sampler.phase(f"iteration {iteration + 1}: credit", "continuations") as show,
    ):
        context = sampler.context(
            config.rollout,
            seed=config.seed,
            iteration=iteration,
            journal=_journal(sampler, folder, "credit") if config.credit.needs_engine else None,
            # What environments said to continuations among answers lies with what they said to these.
            earlier=_journal(sampler, folder, "rollout"),
            progress=show,
            services=[memory],
        )
        early = early or config.credit.early_continuations(context)
        if early is not None:
            context = context.with_services(early)
        try:
            selected, metrics = credited(session.ranks, config, context, trees)
        except unavailable.NothingGraded:
            if session.ranks.is_first:  # the next try asks for the grades of answers again
                (folder / "trajectories.arrow").unlink(missing_ok=True)
            raise
        if config.credit.needs_engine:
            metrics |= sampler.service_metrics(context.grader, "values_")
    return selected, metrics


def credited(
    ranks: Ranks, config: PolicyIteration, context: RolloutContext, trees: Sequence[Tree]
) -> tuple[list[Episode], Metrics]:
    """Returns the episodes that shaping, credit and selection make of all ranks' `trees`, on the first rank
    and none on the others, and the metrics, on every rank.

    Raises NothingGraded where no problem is left of which enough answers could be graded. Collective.
    """
    metrics: Metrics = {}
    if config.rollout.needs_engine:  # what a teacher wrote is learnt from whatever it is worth
        trees, metrics = unavailable.graded(context, trees, config.credit)
    trees, shaping_metrics = shaped(context, config.shaping, trees)
    episodes, credit_metrics = config.credit.assign(context, trees)
    for episode in episodes:
        if episode.advantages is not None and not np.isfinite(episode.advantages).all():
            raise ValueError(
                f"iteration {context.iteration + 1}: the credit {type(config.credit).__name__} gave the"
                f" answer {episode.trajectory!r} advantages that are no numbers (NaN or infinite), and"
                " nothing was trained on them: look for a division by zero in it"
            )
    count = sum(ranks.exchange("number of episodes", len(episodes)))
    if not count and (metrics or "credit/unvalued" in credit_metrics):
        raise unavailable.NothingGraded(
            f"iteration {context.iteration + 1}: so few answers and continuations could be graded that no"
            " problem is left to learn from. The same command asks for grades again, and samples none again"
        )
    of_all_ranks = episodes_on_first(ranks, "episodes", episodes)
    selected: list[Episode] = []
    selection_metrics: Metrics = {}
    if ranks.is_first:
        domain_metrics = domain_advantages(of_all_ranks)
        selected, selection_metrics = config.selection.select(context, of_all_ranks)
        selection_metrics = domain_metrics | selection_metrics
    selection_metrics = ranks.from_first("selection", selection_metrics)
    return selected, metrics | shaping_metrics | credit_metrics | selection_metrics


@contextmanager
def _count_tokens(sampler: Sampler, phase: str, clock: Clock) -> Iterator[None]:
    """Keeps the clock of a phase, and counts the tokens that are sampled in it, without those of a journal.
    Collective."""
    engine = sampler.server.engine
    before = 0 if engine is None else engine.tokens
    with clock.phase(phase):
        yield
        sampled = 0 if engine is None else engine.tokens - before
        clock.tokens[phase] += sum(sampler.session.ranks.exchange("sampled tokens", sampled))


def _check_answered(sampler: Sampler, request: Request, completions: Sequence[Completion]) -> None:
    """Raises ValueError for answers whose log-probs the trainer would compute under another distribution than
    the one that they were sampled from; has the reference score the others."""
    expected = sampler.session.config.rollout.sampling or SamplingParams(max_tokens=1)
    for key in ("temperature", "top_p", "top_k"):
        own, runs = getattr(request.sampling, key), getattr(expected, key)
        if request.priority == ANSWERS and own != runs:
            raise ValueError(
                f"the rollout asked for answers with {key} = {own}, and its property sampling says {runs}, by"
                " which they would be trained: let it ask with its own `sampling`, or, for samples that"
                " aren't trained, with the priority CONTINUATIONS"
            )
    if sampler.reference is not None:
        sampler.reference.on_result(request, completions)


def _move_to_credit(ranks: Ranks, clock: Clock, engine: PipelinedEngine) -> Metrics:
    """Moves to the phase of credit, from that of generation, the tokens of early continuations and the
    seconds in which no rank sampled answers any more.

    ``credit/value_overlap_seconds``: how long continuations were sampled beside answers, the longest of all
    ranks; these seconds stay generation's. Collective."""
    assert isinstance(engine.engine, JournaledEngine), "a run's answers are kept"
    own = engine.engine.sampled[CONTINUATIONS], engine.calls
    of_ranks = ranks.exchange("continuations among answers", own)
    made = time.time() - engine.now()
    stretches = [
        (made + max(one.own_end for one in calls), made + max(one.end for one in calls))
        for calls in zip_longest(*(calls for _, calls in of_ranks), fillvalue=Call(0.0, 0.0, 0.0))
    ]
    clock.move("generation", "credit", stretches, sum(tokens for tokens, _ in of_ranks))
    for call in engine.calls:
        if call.overlap:
            clock.beside("credit", "generation", made + call.own_end - call.overlap, made + call.own_end)
    overlap = max(sum(call.overlap for call in calls) for _, calls in of_ranks)
    return {"credit/value_overlap_seconds": overlap}


# Files of an iteration


def _journal(sampler: Sampler, folder: Path, phase: str) -> Path | None:
    if sampler.server.engine is None:
        return None
    return folder / "journal" / f"{phase}-{sampler.session.ranks.rank}.jsonl"


def _write_phase(path: Path, metrics: Metrics, clock: Clock, phase: str, *begun: str) -> None:
    """Writes a finished phase's metrics, seconds and tokens, with those of phases that have `begun`."""
    counts = {one: {"seconds": clock.seconds[one], "tokens": clock.tokens[one]} for one in (phase, *begun)}
    about = {"iteration": int(path.parent.name), "metrics": metrics}
    write_record(path, counts.pop(phase) | about | counts)


def _read_phase(path: Path, clock: Clock, phase: str, begun: str | None = None) -> Metrics:
    """Returns a finished phase's metrics, and adds its seconds and tokens to the clock, with those of the
    phase that had `begun`."""
    record = read_record(path, f"delete {path.parent} but for its journal/, and give the command again")
    refuse_misplaced(record, path, int(path.parent.name))
    # Runs of earlier versions didn't count tokens, nor what of a phase was done in another.
    counts = {phase: record} | ({begun: record.get(begun, {})} if begun else {})
    for name, counted in counts.items():
        clock.add_earlier(name, counted.get("seconds", 0.0))
        clock.tokens[name] += counted.get("tokens", 0)
    return record["metrics"]


HOW_PROBLEMS_WENT = "which says how the policy did on problems then"


def _read_earlier(session: Session, iteration: int, name: str, about: str) -> dict[str, Any]:
    """Returns a record of an earlier iteration. It is always read from disk, so that a run that goes on knows
    what an undisturbed one knows. Raises ValueError where it is gone. Collective."""
    path = session.directory.iteration(iteration) / name
    there = session.ranks.is_first and path.is_file()
    record = session.ranks.from_first(f"earlier {name}", read_record(path, BEGIN_AGAIN) if there else None)
    if record is None:
        raise ValueError(f"{path} is gone, {about}: {BEGIN_AGAIN}")
    return record


def _remembers(config: PolicyIteration) -> bool:
    return any(part.remembers for part in config.shaping)


def remembered(session: Session, iteration: int) -> ShapingMemory:
    """Returns the memory of shaping as it was when the iteration before had its credit. Collective."""
    if iteration == 0 or not _remembers(session.config):
        return ShapingMemory()
    about = "where shaping had kept what it knows of earlier answers"
    return ShapingMemory(_read_earlier(session, iteration - 1, MEMORY, about))


def _carry_over(session: Session, iteration: int) -> CarryOver:
    """Returns the answers of all ranks that the iteration before left, and the function that keeps this
    one's. Raises ValueError where they are gone."""
    answers: list[Trajectory] = []
    if iteration > 0:
        path = session.directory.iteration(iteration - 1) / CARRIED
        if not path.is_file():
            raise ValueError(
                f"{path} is gone, which held the answers that iteration {iteration + 1} goes on with: put it"
                " back, or begin again under another experiment_name"
            )
        answers = read_trajectories(path)

    def keep(left: Sequence[Trajectory]) -> None:
        of_all_ranks = trajectories_on_first(session.ranks, "answers that go on", left)
        if session.ranks.is_first:
            write_trajectories(session.directory.iteration(iteration) / CARRIED, of_all_ranks)

    return CarryOver(answers, keep)


# Answers and episodes of several ranks: sent as columns, of which no number becomes an object


def own_trees(ranks: Ranks, trajectories: list[Trajectory]) -> list[Tree]:
    """Returns this rank's share of stored answers, however many ranks had sampled them.

    The answers name the problems themselves: a rollout may have asked more than the iteration began with.
    """
    problems = list(dict.fromkeys(trajectory.problem.id for trajectory in trajectories))
    own = set(contiguous_share(problems, ranks.rank, ranks.world_size))
    return trees_of(one for one in trajectories if one.problem.id in own)


def trajectories_on_first(ranks: Ranks, name: str, own: Sequence[Trajectory]) -> list[Trajectory]:
    """Returns all ranks' answers, rank after rank, on the first; none on the others. Collective."""
    if ranks.world_size == 1:
        return list(own)
    parts = ranks.to_first(name, trajectories_to_bytes(own))
    return [one for part in parts for one in trajectories_from_bytes(part)]


def episodes_on_first(ranks: Ranks, name: str, own: Sequence[Episode]) -> list[Episode]:
    """Returns all ranks' rows, rank after rank, on the first; none on the others. Collective."""
    if ranks.world_size == 1:
        return list(own)
    return [one for part in ranks.to_first(name, episodes_to_bytes(own)) for one in episodes_from_bytes(part)]


def episodes_of_first(ranks: Ranks, name: str, own: Sequence[Episode]) -> list[Episode]:
    """Returns the first rank's rows, on every rank. Collective."""
    if ranks.world_size == 1:
        return list(own)
    return episodes_from_bytes(ranks.from_first(name, episodes_to_bytes(own) if ranks.is_first else b""))


def episodes_everywhere(ranks: Ranks, name: str, own: Sequence[Episode]) -> list[Episode]:
    """Returns all ranks' rows, rank after rank, on every rank. Collective."""
    if ranks.world_size == 1:
        return list(own)
    return [one for part in ranks.exchange(name, episodes_to_bytes(own)) for one in episodes_from_bytes(part)]


def stored_for_all(ranks: Ranks, path: Path) -> StoredEpisodes:
    """Returns the episodes that the first rank has at `path`, as soon as this rank's machine shows them: a
    file system that machines share may be late. Raises RuntimeError where it doesn't in time. Collective."""
    seal = ranks.from_first("episodes are stored", seal_of(path) if ranks.is_first else None)
    deadline = time.monotonic() + ranks.deadline_s
    while seal_of(path) != seal:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{platform.node()} doesn't see {path} as the first rank has written it, after"
                f" {ranks.deadline_s:.0f} s: it must be a file of one file system that all machines have"
            )
        time.sleep(FILE_POLL_S)
    return StoredEpisodes(path)
