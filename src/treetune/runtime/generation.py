"""Makes an iteration's episodes from its problems, in two phases, each of which is written when it is done.

::

    problems ──rollout──► trees of graded answers ──shaping, credit, selection──► episodes
                          rollout.json                                            credit.json
                          trajectories.arrow                                      episodes.arrow

Each file that ends a phase is written last, so that its presence says that the phase is done.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from treetune.credit.base import ContinuingCredit
from treetune.credit.critic_prompts import with_critic_prompts
from treetune.credit.states.early import EarlyContinuations
from treetune.credit.teacher_prompts import with_teacher_prompts
from treetune.engine.journal import CallTimes, JournaledEngine
from treetune.engine.requests import (
    ANSWER_PRIORITY,
    CONTINUATION_PRIORITY,
    Completion,
    Request,
    SamplingParams,
)
from treetune.objectives.further_inputs import teacher_of
from treetune.rollouts import unavailable
from treetune.rollouts.answers import contiguous_share
from treetune.rollouts.context import CarryOver, FurtherProblems, RolloutContext, ShapingMemory
from treetune.rollouts.metrics import domain_advantages
from treetune.rollouts.shaping import apply_shaping
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
from treetune.runtime.base import PolicyIteration
from treetune.runtime.console import Clock, Progress
from treetune.runtime.directory import (
    CREDIT_METRICS,
    EPISODES,
    JOURNALS,
    ROLLOUT_METRICS,
    SAMPLED_TOKENS,
    TRAJECTORIES,
    is_generated,
    needs_sampling,
    refuse_misplaced,
)
from treetune.runtime.machine import memory_in_use
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.store.checksums import read_record, read_seal, write_record
from treetune.tasks.drawing import DrawingContext
from treetune.trainer.ranks import Ranks
from treetune.tree import Tree, answers_of, trees_of
from treetune.vocabulary import Episode, Metrics, Trajectory

PASS_RATES = "pass_rates.json"
"""In an iteration's folder: the share of correct answers to each of its problems, if later draws of problems
need it."""

MEMORY_FILE = "memory.json"
"""In an iteration's folder: what shaping remembers of that iteration and all before it."""

CARRIED_ANSWERS = "carried.arrow"
"""In an iteration's folder: the answers that a rollout carries over to the next iteration."""

BEGIN_AGAIN_REMEDY = "put it back, or begin again under another experiment_name"
"""The remedy for a record of an earlier iteration that is gone or damaged."""

POLL_FILE_EVERY_S = 0.2
"""Seconds between two checks for a file that another machine writes."""


def generate(resources: RunResources, iteration: int, clock: Clock) -> tuple[Collection[Episode], Metrics]:
    """Returns the iteration's episodes of all ranks, sampled now or by an interrupted run.

    A finished phase is read from disk. An unfinished phase continues with the requests that are not in its
    journal. A single rank gets the episodes in memory; several ranks read them from the file, one by one.
    Collective.
    """
    session = resources.session
    config, ranks = session.config, session.ranks
    folder = session.directory.iteration_folder(iteration)
    if needs_sampling(config, session.directory, iteration):
        # The start of the engine is not part of the iteration's time.
        with clock.stopped():
            resources.wait_until_ready()
    path = folder / EPISODES
    episodes: Collection[Episode]
    if is_generated(session.directory, iteration):
        refuse_another_iterations(path, iteration)  # raises if the file is of another iteration
        metrics = _read_phase(folder / ROLLOUT_METRICS, clock, "generation")
        metrics |= _read_phase(folder / CREDIT_METRICS, clock, "credit")
        episodes = read_episodes(path) if ranks.world_size == 1 else StoredEpisodes(path)
    else:
        rollout = _run_rollout_phase(resources, iteration, clock)
        metrics = rollout.metrics
        if ranks.device.type == "cuda":
            metrics["memory/generation"] = memory_in_use()
        shaping_memory = read_shaping_memory(session, iteration)
        selected, credit_metrics = _run_credit_phase(resources, iteration, rollout, clock, shaping_memory)
        metrics |= credit_metrics
        if ranks.is_first:
            _write_credit_phase(session, iteration, selected, metrics, clock, shaping_memory)
        episodes = selected if ranks.world_size == 1 else wait_for_stored_episodes(ranks, path)
    if config.rollout.needs_engine:
        # Only the seconds of phases that sampled count: credit without continuations samples no tokens.
        sampling_s = sum(clock.seconds[phase] for phase, tokens in clock.tokens.items() if tokens)
        metrics["engine/tokens_per_second"] = sum(clock.tokens.values()) / sampling_s if sampling_s else 0.0
    return episodes, metrics


@dataclass(frozen=True)
class RolloutPhase:
    """The results of an iteration's rollout."""

    trees: list[Tree]
    """This rank's trees, with graded answers."""
    metrics: Metrics
    """The metrics of all ranks."""
    early_continuations: EarlyContinuations | None
    """The continuations that credit has begun while answers were sampled. None if credit begins none, or if
    the trees were read from disk."""


def _run_rollout_phase(resources: RunResources, iteration: int, clock: Clock) -> RolloutPhase:
    """Samples and grades the answers of the iteration, or reads them from disk. Collective."""
    session = resources.session
    config, ranks = session.config, session.ranks
    folder = session.directory.iteration_folder(iteration)

    if (folder / TRAJECTORIES).is_file():
        # Raises if the file is of another iteration.
        refuse_another_iterations(folder / TRAJECTORIES, iteration)
        # An interrupted run may have sampled continuations of credit already: their seconds count, too.
        metrics = _read_phase(folder / ROLLOUT_METRICS, clock, "generation", begun_phase="credit")
        trees = trees_of_rank(ranks, read_trajectories(folder / TRAJECTORIES))
        return RolloutPhase(trees, metrics, early_continuations=None)

    # Draw the problems.
    all_problems = session.train_problems
    drawing = _make_drawing_context(session, iteration)
    drawing_rule = config.task.drawing_rule()
    problems = drawing_rule.draw(all_problems, config.problems_per_iteration or len(all_problems), drawing)

    # Sample the answers and grade them.
    samples_answers = config.rollout.needs_engine  # the answers of other rollouts are demonstrations
    early: EarlyContinuations | None = None
    with (
        _count_tokens(resources, "generation", clock),
        resources.phase(f"iteration {iteration + 1}: sampling", "answers") as show_progress,
    ):
        further_problems = FurtherProblems(lambda: drawing_rule.draw_further(all_problems, problems, drawing))
        context = _make_rollout_context(resources, iteration, further_problems, show_progress)
        rollout_context = context
        # A credit may begin to sample continuations of an answer while other answers are still sampled.
        # `attach` returns a context with an observer of the answers, by which `early` gets each answer as
        # soon as it is graded. Only the rollout needs this context.
        if samples_answers and isinstance(config.credit, ContinuingCredit):
            early = config.credit.early_continuations(context)
            if early is not None:
                rollout_context = early.attach(context)
        trees, metrics = config.rollout.run(rollout_context, problems)
        metrics |= drawing_rule.metrics(all_problems, drawing)
        # The services of graders count, for example, the questions to a judge.
        metrics |= resources.service_metrics(context.grader)
        if samples_answers:
            # `refuse_only_none` raises if no answer could be graded. No answer has been written yet, so the
            # next start asks the grader again.
            unavailable.report_ungraded(context, f"iteration {iteration + 1}", answers_of(trees))
            unavailable.refuse_only_none(context, answers_of(trees))
    if early is not None:
        # `resources.context` made such an engine, since it got the path of a journal.
        assert isinstance(context.engine, JournaledEngine), "a run's answers are kept"
        metrics |= _move_to_credit(ranks, clock, context.engine)

    # Write the files of the phase, the trajectories last.
    answers_of_all_ranks: list[Trajectory] = []  # on the first rank
    if samples_answers:  # demonstrations are cheaper to make again than to store
        tokens_of_rank = sum(tree.sampled_tokens for tree in trees)
        metrics[SAMPLED_TOKENS] = float(sum(ranks.exchange("tokens of answers", tokens_of_rank)))
        answers_of_all_ranks = gather_trajectories_on_first(ranks, "trajectories", answers_of(trees))
    if ranks.is_first:
        if drawing_rule.reads_pass_rates:
            write_record(folder / PASS_RATES, _compute_pass_rates(answers_of_all_ranks))
        # The seconds of continuations that credit has begun to sample are written, too. If this process is
        # killed during credit, the next process adds these seconds to its clock.
        _write_phase(folder / ROLLOUT_METRICS, metrics, clock, "generation", begun_phase="credit")
        if samples_answers:
            write_trajectories(folder / TRAJECTORIES, answers_of_all_ranks, iteration)
    ranks.barrier("trajectories written")
    return RolloutPhase(trees, metrics, early)


def _make_rollout_context(
    resources: RunResources, iteration: int, further_problems: FurtherProblems, show_progress: Progress
) -> RolloutContext:
    """Returns the context in which answers are sampled and graded."""
    session, config = resources.session, resources.session.config
    folder = session.directory.iteration_folder(iteration)
    context = resources.context(
        config.rollout,
        seed=config.seed,
        iteration=iteration,
        journal=_journal_path(resources, folder, "rollout"),
        continuations=_journal_path(resources, folder, "credit"),
        progress=show_progress,
        observe=partial(_check_answered, resources),
    )
    context = replace(context, further_problems=further_problems)
    if config.rollout.carries:  # such a rollout continues answers that the iteration before began
        context = replace(context, carry_over=_make_carry_over(session, iteration))
    return context


def _make_drawing_context(session: Session, iteration: int) -> DrawingContext:
    """Returns what a rule for drawing problems may read. Files of earlier iterations are read only if the
    rule asks for them, and each file once."""

    @cache
    def read_metrics(earlier_iteration: int) -> Metrics:
        return _read_earlier(session, earlier_iteration, ROLLOUT_METRICS, CONTENTS_FOR_DRAWING)["metrics"]

    @cache
    def read_pass_rates(earlier_iteration: int) -> dict[str, float]:
        return _read_earlier(session, earlier_iteration, PASS_RATES, CONTENTS_FOR_DRAWING)

    config = session.config
    return DrawingContext(config.seed, iteration, config.problem_sampling, read_metrics, read_pass_rates)


def _compute_pass_rates(answers: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the share of right answers of each problem, among those that could be graded."""
    correct_by_problem: dict[str, list[bool]] = {}
    for answer in answers:
        if answer.grade.is_known:
            correct_by_problem.setdefault(answer.problem.id, []).append(answer.grade.correct)
    return {problem: sum(correct) / len(correct) for problem, correct in correct_by_problem.items()}


def _write_credit_phase(
    session: Session,
    iteration: int,
    episodes: Sequence[Episode],
    metrics: Metrics,
    clock: Clock,
    shaping_memory: ShapingMemory,
) -> None:
    """Writes the files that end the second phase."""
    folder = session.directory.iteration_folder(iteration)
    _write_phase(folder / CREDIT_METRICS, metrics, clock, "credit")
    if _needs_memory(session.config):
        # Shaping has added this iteration to the memory.
        write_record(folder / MEMORY_FILE, shaping_memory)
    model = session.model
    tokens_file = session.directory.path / TOKENS
    if not tokens_file.is_file():  # readers of episodes look up the text of tokens there
        n_token_ids = 1 + max(model.tokenizer.get_vocab().values())  # ids begin with 0
        write_tokens(tokens_file, model.codec, n_token_ids)
    # A user may have deleted the episodes to have them made again. A file of token signals that is still
    # there then belongs to the deleted episodes.
    (folder / SIGNALS).unlink(missing_ok=True)
    # The episodes are written last, because their file says that both phases are done.
    write_episodes(folder / EPISODES, episodes, model.codec, iteration)


def _run_credit_phase(
    resources: RunResources,
    iteration: int,
    rollout: RolloutPhase,
    clock: Clock,
    shaping_memory: ShapingMemory,
) -> tuple[list[Episode], Metrics]:
    """Gives credit to the answers, and selects the rows to train; see `assign_credit`.

    Args:
        shaping_memory: What shaping remembers of earlier iterations. Shaping adds this iteration to it.
    """
    session, config = resources.session, resources.session.config
    folder = session.directory.iteration_folder(iteration)
    with (
        _count_tokens(resources, "credit", clock),
        resources.phase(f"iteration {iteration + 1}: credit", "continuations") as show_progress,
    ):
        context = resources.context(
            config.rollout,
            seed=config.seed,
            iteration=iteration,
            journal=_journal_path(resources, folder, "credit") if config.credit.needs_engine else None,
            # An environment's replies to early continuations are in the rollout's journal, with its replies
            # to answers.
            earlier=_journal_path(resources, folder, "rollout"),
            progress=show_progress,
        )
        context = replace(context, shaping_memory=shaping_memory)
        # If the trees were read from disk, this process has begun no continuations. The same ones are then
        # requested again here, and the journal has those that an earlier process has sampled.
        early = rollout.early_continuations
        if early is None and isinstance(config.credit, ContinuingCredit):
            early = config.credit.early_continuations(context)
        if early is not None:
            context = replace(context, early_continuations=early)
        try:
            selected, metrics = assign_credit(session.ranks, config, context, rollout.trees)
        except unavailable.NothingGraded:
            if session.ranks.is_first:  # so that the next start grades the answers again
                (folder / TRAJECTORIES).unlink(missing_ok=True)
            raise
        if config.credit.needs_engine:
            metrics |= resources.service_metrics(context.grader, name_prefix="values_")
    return selected, metrics


def assign_credit(
    ranks: Ranks, config: PolicyIteration, context: RolloutContext, trees: Sequence[Tree]
) -> tuple[list[Episode], Metrics]:
    """Applies shaping, credit and selection to the trees of all ranks. Collective.

    Returns:
        The selected episodes on the first rank and none on the others, and the metrics on every rank.

    Raises:
        NothingGraded: No problem has enough answers that could be graded.
    """
    metrics_of_ungraded: Metrics = {}
    # Without an engine, the answers are demonstrations, which are trained on whatever their grade.
    if config.rollout.needs_engine:
        trees, metrics_of_ungraded = unavailable.drop_ungraded(context, trees, config.credit)
    trees, shaping_metrics = apply_shaping(context, config.shaping, trees)
    episodes, credit_metrics = config.credit.assign(context, trees)
    for episode in episodes:
        if episode.advantages is not None and not np.isfinite(episode.advantages).all():
            raise ValueError(
                f"iteration {context.iteration + 1}: the credit {type(config.credit).__name__} gave the"
                f" answer {episode.trajectory!r} advantages that are NaN or infinite. No training was done:"
                " look for a division by zero in it"
            )
    critic = config.credit.critic_settings
    if critic is not None and critic.template is not None:
        episodes, prompt_metrics = with_critic_prompts(context, critic.template, trees, episodes)
        credit_metrics = credit_metrics | prompt_metrics
    teacher = teacher_of(config.trainer.objective)
    if teacher is not None:
        episodes, prompt_metrics = with_teacher_prompts(context, teacher, trees, episodes)
        credit_metrics = credit_metrics | prompt_metrics
    n_episodes = sum(ranks.exchange("number of episodes", len(episodes)))
    # Answers are left out if they could not be graded. They are also left out if their prompt has no value
    # ("credit/unvalued"), for example since none of the prompt's continuations could be graded.
    has_ungraded = bool(metrics_of_ungraded) or "credit/unvalued" in credit_metrics
    # If there are no episodes for another reason, `train` reports it.
    if n_episodes == 0 and has_ungraded:
        raise unavailable.NothingGraded(
            f"iteration {context.iteration + 1}: so few answers and continuations could be graded that no"
            " problem is left to learn from. The same command grades the stored answers again"
        )
    # The first rank selects, because a selection may compare episodes of all ranks.
    all_episodes = gather_episodes_on_first(ranks, "episodes", episodes)
    selected: list[Episode] = []
    selection_metrics: Metrics = {}
    if ranks.is_first:
        domain_metrics = domain_advantages(all_episodes)
        selected, selection_metrics = config.selection.select(context, all_episodes)
        selection_metrics = domain_metrics | selection_metrics
    selection_metrics = ranks.from_first("selection", selection_metrics)
    return selected, metrics_of_ungraded | shaping_metrics | credit_metrics | selection_metrics


@contextmanager
def _count_tokens(resources: RunResources, phase: str, clock: Clock) -> Iterator[None]:
    """Adds the seconds and sampled tokens of the block to a phase of the clock. Tokens that are read from a
    journal don't count. Collective."""
    engine = resources.server.engine
    tokens_before = 0 if engine is None else engine.tokens
    with clock.phase(phase):
        yield
        sampled = 0 if engine is None else engine.tokens - tokens_before
        clock.tokens[phase] += sum(resources.session.ranks.exchange("sampled tokens", sampled))


def _check_answered(resources: RunResources, request: Request, completions: Sequence[Completion]) -> None:
    """Checks answers as they arrive, and passes them to the reference model, which scores them while others
    are sampled.

    Raises:
        ValueError: The answers were sampled with other parameters than `rollout.sampling`. The trainer would
            compute their log-probs under another distribution than the one that they were sampled from.
    """
    # A rollout without `sampling` should sample with the default temperature, top_p and top_k. `max_tokens`
    # has no default and is not compared, so its value here doesn't matter.
    expected = resources.session.config.rollout.sampling or SamplingParams(max_tokens=1)
    if request.priority == ANSWER_PRIORITY:  # other samples aren't trained
        for key in ("temperature", "top_p", "top_k"):
            requested_value, expected_value = getattr(request.sampling, key), getattr(expected, key)
            if requested_value != expected_value:
                raise ValueError(
                    f"the rollout requested answers with {key} = {requested_value}, but its property"
                    f" `sampling` has {expected_value}, with which the trainer would compute their log-probs:"
                    " request answers with `sampling`, or samples that aren't trained with the priority"
                    " CONTINUATIONS"
                )
    if resources.reference is not None:
        resources.reference.on_result(request, completions)


def _move_to_credit(ranks: Ranks, clock: Clock, engine: JournaledEngine) -> Metrics:
    """Moves the cost of early continuations from the phase of generation to that of credit. Collective.

    Early continuations are those that credit began while answers were still sampled. Two things are moved:
    the tokens of these continuations, and the seconds after the last answer of all ranks, in which only
    continuations were sampled.

    Returns:
        ``credit/value_overlap_seconds``: the seconds in which a rank sampled both continuations and answers,
        the longest of all ranks. They stay with generation.
    """
    tokens_and_calls = (engine.sampled[CONTINUATION_PRIORITY], engine.calls)
    counts_by_rank = ranks.exchange("continuations among answers", tokens_and_calls)
    tokens = sum(tokens_of_rank for tokens_of_rank, _ in counts_by_rank)
    calls_by_rank = [calls for _, calls in counts_by_rank]
    # The times of calls are seconds since the engine was made; the clock wants seconds since 1970. All ranks
    # make their engines at about the same time, so the time of this rank's engine serves for all calls.
    engine_made_at = time.time() - engine.elapsed_s()
    # The rollout calls the engine once or several times. In each call, only continuations are sampled from
    # the time when the last rank has its last answer to the end of the slowest rank's call.
    spans = []
    # A rank may have made fewer calls than others. The times 0 of a missing call change no maximum.
    for calls in zip_longest(*calls_by_rank, fillvalue=CallTimes(0.0, 0.0, 0.0)):
        answers_end = max(call.answers_end for call in calls)
        end = max(call.end for call in calls)
        spans.append((engine_made_at + answers_end, engine_made_at + end))
    clock.move("generation", "credit", spans, tokens)
    # The timeline, which only the first rank writes, shows the overlaps of this rank's calls.
    for call in engine.calls:
        if call.overlap:
            answers_end = engine_made_at + call.answers_end
            clock.record_overlap("credit", "generation", answers_end - call.overlap, answers_end)
    overlap_by_rank = [sum(call.overlap for call in calls) for calls in calls_by_rank]
    return {"credit/value_overlap_seconds": max(overlap_by_rank)}


# Files of an iteration


def _journal_path(resources: RunResources, folder: Path, phase: str) -> Path | None:
    """Returns the file of this rank's answered requests in a phase; None if nothing is sampled."""
    if resources.server.engine is None:
        return None
    return folder / JOURNALS / f"{phase}-{resources.session.ranks.rank}.jsonl"


def _write_phase(
    path: Path, metrics: Metrics, clock: Clock, phase: str, begun_phase: str | None = None
) -> None:
    """Writes a finished phase's metrics, seconds and tokens, and the seconds and tokens of `begun_phase`.

    `begun_phase` is a phase that has begun within the finished one: credit, which may sample continuations of
    answers while other answers are still sampled.

    Example: ``{"seconds": 41.2, "tokens": 90112, "iteration": 3, "metrics": {…}, "credit": {"seconds": 2.0,
    "tokens": 4096}}``.
    """
    record: dict[str, Any] = {
        "seconds": clock.seconds[phase],
        "tokens": clock.tokens[phase],
        "iteration": int(path.parent.name),  # the folder's name is the iteration's number
        "metrics": metrics,
    }
    if begun_phase is not None:
        record[begun_phase] = {"seconds": clock.seconds[begun_phase], "tokens": clock.tokens[begun_phase]}
    write_record(path, record)


def _read_phase(path: Path, clock: Clock, phase: str, begun_phase: str | None = None) -> Metrics:
    """Returns the metrics of a finished phase, and adds to the clock the seconds and tokens that
    `_write_phase` has written."""
    record = read_record(path, f"delete {path.parent} but for its journal/, and give the command again")
    refuse_misplaced(record, path, int(path.parent.name))
    counts_by_phase = {phase: record}
    if begun_phase is not None:
        # Runs of earlier versions have no such entry, and no tokens.
        counts_by_phase[begun_phase] = record.get(begun_phase, {})
    for name, counts in counts_by_phase.items():
        clock.add_earlier(name, counts.get("seconds", 0.0))
        clock.tokens[name] += counts.get("tokens", 0)
    return record["metrics"]


CONTENTS_FOR_DRAWING = "which has the policy's results on earlier problems"
"""What the files have that the drawing of problems reads, for the message that one of them is gone."""


def _read_earlier(session: Session, iteration: int, name: str, contents: str) -> dict[str, Any]:
    """Returns a record of an earlier iteration. Collective.

    It is always read from disk, never kept in memory, so that a restarted run uses the same record as an
    uninterrupted one.

    Args:
        contents: What the record has, for the message that it is gone: ``which has the memory of shaping``.

    Raises:
        ValueError: The record is gone.
    """
    path = session.directory.iteration_folder(iteration) / name
    record = None
    if session.ranks.is_first and path.is_file():
        record = read_record(path, BEGIN_AGAIN_REMEDY)
    record = session.ranks.from_first(f"earlier {name}", record)
    if record is None:
        raise ValueError(f"{path} is gone, {contents}: {BEGIN_AGAIN_REMEDY}")
    return record


def _needs_memory(config: PolicyIteration) -> bool:
    """Returns whether a shaping remembers anything from one iteration to the next."""
    return any(part.remembers for part in config.shaping)


def read_shaping_memory(session: Session, iteration: int) -> ShapingMemory:
    """Returns what shaping remembers of all iterations before this one. Collective."""
    if iteration == 0 or not _needs_memory(session.config):
        return ShapingMemory()
    contents = "which has the memory of shaping"
    return ShapingMemory(_read_earlier(session, iteration - 1, MEMORY_FILE, contents))


def _make_carry_over(session: Session, iteration: int) -> CarryOver:
    """Returns the answers that the iteration before carried over, of all ranks, and a function that stores
    those of this iteration.

    Raises:
        ValueError: The file of the iteration before is gone.
    """
    answers: list[Trajectory] = []
    if iteration > 0:
        path = session.directory.iteration_folder(iteration - 1) / CARRIED_ANSWERS
        if not path.is_file():
            raise ValueError(
                f"{path} is gone, which has the answers that iteration {iteration + 1} continues: put it"
                " back, or begin again under another experiment_name"
            )
        answers = read_trajectories(path)

    def keep(carried: Sequence[Trajectory]) -> None:
        carried_by_all_ranks = gather_trajectories_on_first(session.ranks, "carried answers", carried)
        if session.ranks.is_first:
            folder = session.directory.iteration_folder(iteration)
            write_trajectories(folder / CARRIED_ANSWERS, carried_by_all_ranks)

    return CarryOver(answers, keep)


# Exchange of answers and episodes among ranks. They are sent as columns (Arrow): pickling each number as a
# Python object would be slow.


def trees_of_rank(ranks: Ranks, trajectories: list[Trajectory]) -> list[Tree]:
    """Returns this rank's share of stored answers, whatever the number of ranks that sampled them.

    The problems are those of the answers, because a rollout may have drawn more problems than the iteration
    began with.
    """
    problems = list(dict.fromkeys(trajectory.problem.id for trajectory in trajectories))
    problems_of_rank = set(contiguous_share(problems, ranks.rank, ranks.world_size))
    return trees_of(answer for answer in trajectories if answer.problem.id in problems_of_rank)


def gather_trajectories_on_first(ranks: Ranks, name: str, answers: Sequence[Trajectory]) -> list[Trajectory]:
    """Returns the answers of all ranks, rank after rank, on the first rank; none on the others.
    Collective."""
    if ranks.world_size == 1:
        return list(answers)
    all_answers: list[Trajectory] = []
    for answers_of_rank in ranks.to_first(name, trajectories_to_bytes(answers)):
        all_answers += trajectories_from_bytes(answers_of_rank)
    return all_answers


def gather_episodes_on_first(ranks: Ranks, name: str, episodes: Sequence[Episode]) -> list[Episode]:
    """Returns the episodes of all ranks, rank after rank, on the first rank; none on the others.
    Collective."""
    if ranks.world_size == 1:
        return list(episodes)
    all_episodes: list[Episode] = []
    for episodes_of_rank in ranks.to_first(name, episodes_to_bytes(episodes)):
        all_episodes += episodes_from_bytes(episodes_of_rank)
    return all_episodes


def send_episodes_of_first(ranks: Ranks, name: str, episodes: Sequence[Episode]) -> list[Episode]:
    """Returns the episodes of the first rank, on every rank. Collective."""
    if ranks.world_size == 1:
        return list(episodes)
    serialised = episodes_to_bytes(episodes) if ranks.is_first else b""
    return episodes_from_bytes(ranks.from_first(name, serialised))


def gather_episodes_on_all(ranks: Ranks, name: str, episodes: Sequence[Episode]) -> list[Episode]:
    """Returns the episodes of all ranks, rank after rank, on every rank. Collective."""
    if ranks.world_size == 1:
        return list(episodes)
    all_episodes: list[Episode] = []
    for episodes_of_rank in ranks.exchange(name, episodes_to_bytes(episodes)):
        all_episodes += episodes_from_bytes(episodes_of_rank)
    return all_episodes


def wait_for_stored_episodes(ranks: Ranks, path: Path) -> StoredEpisodes:
    """Waits until this rank's machine sees the episodes that the first rank has written to `path`, and
    returns them. A file system that machines share may show an older state for some seconds. Collective.

    Raises:
        RuntimeError: The machine doesn't see the file within the ranks' deadline.
    """
    # The seal is the end of the file, with the file's checksum. An older file of the same name has another
    # seal.
    seal = ranks.from_first("episodes are stored", read_seal(path) if ranks.is_first else None)
    deadline = time.monotonic() + ranks.deadline_s
    while read_seal(path) != seal:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{platform.node()} doesn't see {path} as the first rank has written it, after"
                f" {ranks.deadline_s:.0f} s: the experiment's folder must be on a file system that all"
                " machines share"
            )
        time.sleep(POLL_FILE_EVERY_S)
    return StoredEpisodes(path)
