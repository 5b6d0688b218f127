"""From an iteration's problems to the episodes to train on, each phase kept as soon as it is done."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from treetune.inference.base import ANSWERS, Completion, Request, SamplingParams
from treetune.rollouts import unavailable
from treetune.rollouts.answers import contiguous_share
from treetune.rollouts.context import CarryOver, FurtherProblems, ShapingMemory
from treetune.rollouts.storage import (
    SIGNALS,
    TOKENS,
    StoredEpisodes,
    read_episodes,
    read_trajectories,
    write_episodes,
    write_tokens,
    write_trajectories,
)
from treetune.rollouts.values import EarlyContinuations
from treetune.runtime import stop_after
from treetune.runtime.carried import carried_over, carry_over
from treetune.runtime.clock import Clock
from treetune.runtime.columns_of_ranks import stored_for_all, trajectories_on_first
from treetune.runtime.crediting import credited
from treetune.runtime.due import EPISODES, is_generated, samples_in
from treetune.runtime.overlap import give_to_credit
from treetune.runtime.sampler import Sampler
from treetune.runtime.session import Session
from treetune.store.checksums import read_record, write_record
from treetune.tasks.sampling import Drawing
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Episode, Metrics, Trajectory

PASS_RATES = "pass_rates.json"
"""In an iteration's folder: the share of right answers to each of its problems, where draws ask for it."""

MEMORY = "memory.json"
"""What parts of shaping remember, in an iteration's folder: of that iteration and all before it."""

BEGIN_AGAIN = "put it back, or begin again under another experiment_name"


def generate(sampler: Sampler, iteration: int, clock: Clock) -> tuple[Collection[Episode], Metrics]:
    """All ranks' episodes of the iteration: sampled now, or what an interrupted run has of them. One rank
    alone has them in memory; several read them where the first one has written them.

    A finished phase is read back, an unfinished one goes on from the requests that were answered.
    Collective.
    """
    session = sampler.session
    folder = session.directory.iteration(iteration)
    if samples_in(session.config, session.directory, iteration):
        with clock.stopped():  # an engine that is still starting is no matter of this iteration
            sampler.ready()
    path = folder / EPISODES
    episodes: Collection[Episode]
    if is_generated(session.directory, iteration):
        metrics = _recorded(folder / "rollout.json", clock, "generation")
        metrics |= _recorded(folder / "credit.json", clock, "credit")
        episodes = read_episodes(path) if session.ranks.world_size == 1 else StoredEpisodes(path)
    else:
        trees, rollout_metrics, early = _rollout(sampler, iteration, clock)
        memory = remembered(session, iteration)
        selected, metrics = _credit(sampler, iteration, trees, clock, memory, early)
        metrics = rollout_metrics | metrics
        if session.ranks.is_first:
            _record(folder / "credit.json", metrics, clock, "credit")
            if _remembers(session):
                write_record(folder / MEMORY, memory)
            _write_tokens(session)
            (folder / SIGNALS).unlink(missing_ok=True)  # of episodes that somebody has deleted
            # Last: from here on, both phases are done.
            write_episodes(path, selected, session.model.codec)
        episodes = selected if session.ranks.world_size == 1 else stored_for_all(session.ranks, path)
    return episodes, metrics | _throughput(session, clock)


def _throughput(session: Session, clock: Clock) -> Metrics:
    """Tokens that the engine sampled for rollout and credit, per second of these two phases."""
    if not session.config.rollout.needs_engine:
        return {}
    seconds = sum(clock.seconds[phase] for phase, tokens in clock.tokens.items() if tokens)
    return {"engine/tokens_per_second": sum(clock.tokens.values()) / seconds if seconds else 0.0}


@contextmanager
def _counted(sampler: Sampler, phase: str, clock: Clock) -> Iterator[None]:
    """Keeps the clock of a phase, and counts what is sampled in it: not what a journal has. Collective."""
    engine = sampler.server.engine
    before = 0 if engine is None else engine.tokens
    with clock.phase(phase):
        yield
        own = 0 if engine is None else engine.tokens - before
        clock.tokens[phase] += sum(sampler.session.ranks.exchange("sampled tokens", own))


def _rollout(
    sampler: Sampler, iteration: int, clock: Clock
) -> tuple[list[Tree], Metrics, EarlyContinuations | None]:
    """This rank's trees, all ranks' metrics, and what credit has asked for meanwhile."""
    session, config = sampler.session, sampler.session.config
    folder = session.directory.iteration(iteration)
    if (folder / "trajectories.arrow").is_file():
        metrics = _recorded(folder / "rollout.json", clock, "generation", "credit")
        return _share(session, read_trajectories(folder / "trajectories.arrow")), metrics, None
    everything = session.train_problems
    recorded, pass_rates = cache(partial(_rollout_metrics, session)), cache(partial(_pass_rates, session))
    drawing = Drawing(config.seed, iteration, config.problem_sampling, recorded, pass_rates)
    problems = config.task.draw(everything, config.problems_per_iteration or len(everything), drawing)
    with (
        _counted(sampler, "generation", clock),
        sampler.phase(f"iteration {iteration + 1}: sampling", "answers") as show,
    ):
        services: list[object] = [
            FurtherProblems(lambda: config.task.draw_further(everything, problems, drawing))
        ]
        if config.rollout.carries:
            carried = carried_over(session, iteration)
            services.append(CarryOver(carried, partial(carry_over, session, iteration)))
        context = sampler.context(
            config.rollout,
            seed=config.seed,
            iteration=iteration,
            journal=_journal(sampler, folder, "rollout"),
            continuations=_journal(sampler, folder, "credit"),
            progress=show,
            hear=partial(_heard, sampler),
            services=services,
        )
        early = config.credit.early_continuations(context) if config.rollout.needs_engine else None
        trees, metrics = config.rollout.run(context if early is None else early.attached(context), problems)
        metrics |= config.task.drawing_metrics(everything, drawing)
        metrics |= sampler.service_metrics(context.grader)
        if config.rollout.needs_engine:
            # Before anything is written: where nothing was graded, the next try asks for grades again.
            unavailable.tell(context, f"iteration {iteration + 1}", answers_of(trees))
    if early is not None:
        metrics |= give_to_credit(session.ranks, clock, early.engine)
    everyones: list[Trajectory] = []
    if config.rollout.needs_engine:  # demonstrations cost less to make again than to keep
        own = sum(tree.sampled_tokens for tree in trees)
        metrics[stop_after.ANSWERS] = float(sum(session.ranks.exchange("tokens of answers", own)))
        everyones = trajectories_on_first(session.ranks, "trajectories", answers_of(trees))
    if session.ranks.is_first:
        if config.task.remembers_pass_rates:
            write_record(folder / PASS_RATES, _shares_of_right(everyones))
        # What credit has asked for meanwhile stays its own, should this process not come to its end.
        _record(folder / "rollout.json", metrics, clock, "generation", "credit")
        if config.rollout.needs_engine:
            write_trajectories(folder / "trajectories.arrow", everyones)
    session.ranks.barrier("trajectories written")
    return trees, metrics, early


def _heard(sampler: Sampler, request: Request, completions: Sequence[Completion]) -> None:
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


def _rollout_metrics(session: Session, iteration: int) -> Metrics:
    return _left_by(session, iteration, "rollout.json")["metrics"]


def _pass_rates(session: Session, iteration: int) -> dict[str, float]:
    return _left_by(session, iteration, PASS_RATES)


def _left_by(session: Session, iteration: int, name: str) -> dict[str, Any]:
    """What the rollout of an earlier iteration left: always read, so that a run that goes on knows what an
    undisturbed one knows. Collective."""
    path = session.directory.iteration(iteration) / name
    there = session.ranks.is_first and path.is_file()
    found = session.ranks.from_first(f"earlier {name}", read_record(path, BEGIN_AGAIN) if there else None)
    if found is None:
        raise ValueError(f"{path} is gone, which says how the policy did on problems then: {BEGIN_AGAIN}")
    return found


def _shares_of_right(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of the graded answers to each problem."""
    graded: dict[str, list[bool]] = {}
    for one in trajectories:
        if one.grade.is_known:
            graded.setdefault(one.problem.id, []).append(one.grade.correct)
    return {id: sum(right) / len(right) for id, right in graded.items()}


def _share(session: Session, trajectories: list[Trajectory]) -> list[Tree]:
    """The part of stored answers that is this rank's, however many ranks had sampled them.

    They tell the problems themselves: a rollout may have asked more than the iteration began with.
    """
    problems = list(dict.fromkeys(trajectory.problem.id for trajectory in trajectories))
    own = set(contiguous_share(problems, session.ranks.rank, session.ranks.world_size))
    return trees_of(one for one in trajectories if one.problem.id in own)


def _credit(
    sampler: Sampler,
    iteration: int,
    trees: list[Tree],
    clock: Clock,
    memory: ShapingMemory,
    early: EarlyContinuations | None,
) -> tuple[list[Episode], Metrics]:
    """`memory` is brought up to this iteration; `early` was begun by the process that rolled out."""
    session, config = sampler.session, sampler.session.config
    folder = session.directory.iteration(iteration)
    with (
        _counted(sampler, "credit", clock),
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


def _remembers(session: Session) -> bool:
    return any(one.remembers for one in session.config.shaping)


def remembered(session: Session, iteration: int) -> ShapingMemory:
    """What was known when the iteration before had its credit; always read, so that a run that goes on
    knows what an undisturbed one knows. Collective.
    """
    if iteration == 0 or not _remembers(session):
        return ShapingMemory()
    path = session.directory.iteration(iteration - 1) / MEMORY
    there = session.ranks.is_first and path.is_file()
    memory = session.ranks.from_first("memory", read_record(path, BEGIN_AGAIN) if there else None)
    if memory is None:
        raise ValueError(
            f"{path} is gone, where shaping had kept what it knows of earlier answers: {BEGIN_AGAIN}"
        )
    return ShapingMemory(memory)


def _journal(sampler: Sampler, folder: Path, phase: str) -> Path | None:
    return (
        folder / "journal" / f"{phase}-{sampler.session.ranks.rank}.jsonl"
        if sampler.server.engine is not None
        else None
    )


def _record(path: Path, metrics: Metrics, clock: Clock, phase: str, *begun: str) -> None:
    """`begun` are phases of which a part was done."""
    counted = {one: {"seconds": clock.seconds[one], "tokens": clock.tokens[one]} for one in (phase, *begun)}
    write_record(path, counted.pop(phase) | {"metrics": metrics} | counted)


def _recorded(path: Path, clock: Clock, phase: str, begun: str | None = None) -> Metrics:
    """With `begun`, that phase's part too."""
    record = read_record(path, f"delete {path.parent} but for its journal/, and give the command again")
    # Runs of earlier versions didn't count tokens, nor what of a phase was done in another.
    counts = {phase: record} | ({begun: record.get(begun, {})} if begun else {})
    for name, counted in counts.items():
        clock.add_earlier(name, counted.get("seconds", 0.0))
        clock.tokens[name] += counted.get("tokens", 0)
    return record["metrics"]


def _write_tokens(session: Session) -> None:
    """What a reader of episodes looks the text of tokens up in; once in a run."""
    path, model = session.directory.path / TOKENS, session.model
    if not path.is_file():
        write_tokens(path, model.codec, 1 + max(model.tokenizer.get_vocab().values()))
