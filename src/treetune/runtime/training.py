"""Trains an iteration, and with `choose_checkpoint` chooses among its epochs.

With a choice, training and measurement take turns on the accelerator::

    choice      measure the weights that the iteration begins with
    training    train to the end of an epoch            the engine sleeps
    choice      load the weights into the engine, measure them, keep the trainer's state of the best
    training    …, until no later candidate can change the choice
    choice      settle: the trainer gets the state of the chosen candidate back
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.credit.critic_prompts import CriticPrompts
from treetune.credit.episodes import make_scoring_row
from treetune.credit.gae import from_values_of
from treetune.credit.reward_models import RewardModelCredit, reward_model_of
from treetune.exceptions import Damaged
from treetune.rollouts.model_scores import (
    Critic,
    Deviation,
    Distributions,
    GroupDivergences,
    ModelScores,
    ReferenceDistances,
    ReferenceScores,
    ScoredText,
)
from treetune.rollouts.storage import SIGNALS, write_token_signals
from treetune.runtime.base import ChoiceRule, ChooseCheckpoint
from treetune.runtime.console import Clock
from treetune.runtime.directory import ANSWERS, MEASURE_AGAIN_REMEDY, SUMMARY, verify_answers
from treetune.runtime.evaluation import measure_set
from treetune.runtime.generation import gather_episodes_on_all
from treetune.runtime.machine import memory_in_use
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.resources import RunResources
from treetune.runtime.session import Session
from treetune.store.checksums import find_damage, read_record, seal_folder, write_record
from treetune.store.files import write_text
from treetune.vocabulary import Column, Episode, Metrics, Trajectory, are_sampled

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from treetune.trainer.core import FinishedStep, OnSignals, PolicyTrainer
    from treetune.trainer.ranks import Ranks
    from treetune.trainer.tokens import Sequences


def make_trainer(session: Session) -> PolicyTrainer:
    """Returns the trainer of the experiment, on the start weights. Collective."""
    from treetune.trainer.core import PolicyTrainer

    config, model = session.config, session.model
    credit = config.credit
    reference = credit.trainer_scores.reference_model
    reward_model = reward_model_of(credit)
    load_reward_model = None
    if reward_model is not None and reward_model.start is not None:
        load_reward_model = partial(model.load_like, reward_model.start)
    if config.trainer.reads_in_parts:
        load_model = model.load_in_parts  # ZeRO-3 shards the weights while they are read
    elif config.trainer.shards_weights:
        # `offload_parameters` is set: ZeRO-3 moves one weight after the other from the CPU to the device.
        load_model = model.load_on_cpu
    else:
        load_model = model.load
    return PolicyTrainer(
        config.trainer,
        load_model,
        ranks=session.ranks,
        seed=config.seed,
        temperature=session.temperature,
        nucleus=session.nucleus,
        iterations=config.iterations,
        critic=credit.critic_settings,
        from_values=from_values_of(credit),  # computes advantages from the critic's values
        restarts=config.restart == "every_iteration",
        load_reference=None if reference is None else partial(model.load_like, reference),
        reward_model=reward_model,
        load_reward_model=load_reward_model,
        from_implicit_rewards=credit.from_implicit_rewards if isinstance(credit, RewardModelCredit) else None,
    )


@contextmanager
def open_trainer(
    resources: RunResources, *, state_folder: Path | None = None, trains: bool = True
) -> Iterator[PolicyTrainer]:
    """Makes the trainer, and connects it with the server and the resources. Collective.

    The server gets the trainer because the engine may take turns with it in the accelerator's memory. The
    resources get the trainer's critic and reference, which credit asks for scores.

    Args:
        state_folder: The folder of a trainer's state; None begins with the start model.
        trains: Whether the trainer will train. If so, its reference may score answers while others are
            sampled (`PolicyTrainer.prefetch`).
    """
    session, server = resources.session, resources.server
    # On a GPU this waits for a server that is still starting; on a CPU, the server starts meanwhile.
    with server.asleep():
        server.trainer = trainer = make_trainer(session)
        if state_folder is not None:
            trainer.load(state_folder)
    with closing(trainer):
        # All scores are replaced, since those of an earlier trainer, which is closed, must not be used.
        resources.model_scores = make_scores_for_credit(session, server, trainer)
        if trains:
            resources.reference = trainer.prefetch
        yield trainer


def make_scores_for_credit(session: Session, server: PolicyServer, trainer: PolicyTrainer) -> ModelScores:
    """Returns the scores that the run's credit asks the trainer for."""
    credit, scores = session.config.credit, ModelScores()
    if credit.asks_critic:
        critic = make_critic_for_credit(session, server, trainer.values)
        scores = replace(scores, critic=critic)
    needed_scores = credit.trainer_scores
    if needed_scores.reference:
        reference = make_reference_for_credit(session, server, trainer.logprobs_of_reference)
        scores = replace(scores, reference=reference)
    if needed_scores.distributions:
        distributions = make_distributions_for_credit(session, server, trainer.distributions)
        divergences = make_divergences_for_credit(session, server, trainer.group_divergences)
        scores = replace(scores, distributions=distributions, group_divergences=divergences)
    if needed_scores.distributions and needed_scores.reference:
        distances = make_distances_for_credit(session, server, trainer.reference_distances)
        scores = replace(scores, reference_distances=distances)
    return scores


def make_critic_for_credit(
    session: Session, server: PolicyServer, values: Callable[[Sequences], Tensor]
) -> Critic:
    """Returns a critic for the credit. The engine frees its memory while values are computed, if so
    configured.

    Args:
        values: Computes the value of the state before each trained token. All ranks call it together, and
            every rank passes the answers of all ranks.
    """
    settings = session.config.credit.critic_settings
    assert settings is not None, "a credit that asks the critic has settings for it"
    codec, context_length = session.model.codec, session.config.context_length
    prompts = CriticPrompts(codec, settings.template, context_length)

    def critic_values(answers: Sequence[Trajectory]) -> list[Column]:
        """Returns a column of values for each of this rank's answers: NaN for tokens that weren't sampled."""
        import numpy as np

        from treetune.trainer.tokens import Sequences

        rows_of_rank = [prompts.add_to(make_scoring_row(answer), answer.problem) for answer in answers]
        rows, first_row = _rows_on_all(session.ranks, "critic", rows_of_rank)
        if not rows:  # no rank has an answer, so all ranks return here
            return []
        sequences = Sequences.of(rows)
        with server.asleep():
            values_N = values(sequences).double().numpy()  # of the trained tokens, row after row
        columns = []
        for row, answer in enumerate(answers, first_row):
            is_sampled = are_sampled(answer.segments)
            column = np.full(len(is_sampled), np.nan)  # only tokens that the policy has sampled have a value
            column[is_sampled] = values_N[sequences.starts[row] : sequences.starts[row + 1]]
            columns.append(column)
        return columns

    return Critic(critic_values)


def make_reference_for_credit(
    session: Session, server: PolicyServer, logprobs: Callable[[Sequences], Tensor]
) -> ReferenceScores:
    """Returns the reference's scores for the credit. The engine frees its memory while they are computed, if
    so configured.

    Args:
        logprobs: Computes the log-prob of each trained token. All ranks call it together, and every rank
            passes the rows of all ranks.
    """

    def reference_logprobs(texts: Sequence[ScoredText]) -> list[Column]:
        """Returns the log-probs of each of this rank's texts."""
        from treetune.trainer.tokens import Sequences

        rows_of_rank = [_row_of_text(text) for text in texts]
        rows, first_row = _rows_on_all(session.ranks, "reference", rows_of_rank)
        if not rows:  # no rank has a text, so all ranks return here
            return []
        sequences = Sequences.of(rows)
        with server.asleep():
            logprobs_N = logprobs(sequences).numpy()  # of the tokens of all texts, row after row
        columns = []
        for row in range(first_row, first_row + len(texts)):
            columns.append(logprobs_N[sequences.starts[row] : sequences.starts[row + 1]])
        return columns

    return ReferenceScores(reference_logprobs)


def _rows_on_all(ranks: Ranks, name: str, rows_of_rank: Sequence[Episode]) -> tuple[list[Episode], int]:
    """Returns the rows of all ranks, rank after rank, and the index of this rank's first row. Collective.

    All ranks run a model over all rows together, and each rank keeps the results of its own rows.
    """
    counts = ranks.exchange(f"{name}-counts", len(rows_of_rank))
    rows = gather_episodes_on_all(ranks, f"{name}-rows", rows_of_rank)
    return rows, sum(counts[: ranks.rank])


def _row_of_text(text: ScoredText) -> Episode:
    """Returns the row that a model runs over to score a text. It is not trained on."""
    import numpy as np

    return Episode(
        prompt_ids=text.prompt_ids,
        response_ids=text.text_ids,
        trained=np.ones(len(text.text_ids), bool),  # the trainer scores the tokens with this mark
        reward=0.0,
        group="",
        trajectory="",
        policy_version=0,
    )


def make_distributions_for_credit(
    session: Session, server: PolicyServer, score_distributions: Callable[[Sequences], tuple[Tensor, Tensor]]
) -> Distributions:
    """Returns the policy's distributions for the credit. The engine frees its memory while they are computed,
    if so configured.

    Args:
        score_distributions: Computes Σ π² and the entropy at each trained token. All ranks call it together,
            each with the rows of all ranks.
    """

    def squares_and_entropies(episodes: Sequence[Episode]) -> list[tuple[Column, Column]]:
        return _score_episodes(session, server, episodes, score_distributions)

    return Distributions(squares_and_entropies)


def make_distances_for_credit(
    session: Session, server: PolicyServer, score_distances: Callable[[Sequences], tuple[Tensor, Tensor]]
) -> ReferenceDistances:
    """Returns the policy's distances from the reference for the credit. The engine frees its memory while
    they are computed, if so configured.

    Args:
        score_distances: Computes, at each trained token, the distance, and the policy's entropy divided by
            the largest possible one. All ranks call it together, each with the rows of all ranks.
    """

    def deviations_along(episodes: Sequence[Episode]) -> list[Deviation]:
        columns_by_episode = _score_episodes(session, server, episodes, score_distances)
        return [Deviation(distances_T, entropies_T) for distances_T, entropies_T in columns_by_episode]

    return ReferenceDistances(deviations_along)


def make_divergences_for_credit(
    session: Session, server: PolicyServer, score_divergences: Callable[[Sequences, Tensor], Tensor]
) -> GroupDivergences:
    """Returns the divergences of the policy's distributions at each token, for the credit.

    A token's divergence is the Jensen-Shannon divergence between its distribution and the mean of the
    distributions that the answers to the problem have at the same position. The engine frees its memory
    while divergences are computed, if so configured.

    Args:
        score_divergences: Computes the divergence at each trained token, from rows and from the position of
            each trained token in its answer. All ranks call it together, each with the rows of all ranks.
    """

    def divergences_along(episodes: Sequence[Episode]) -> list[Column]:
        def score(sequences: Sequences, rows_of_all_ranks: Sequence[Episode]) -> tuple[Tensor]:
            """Returns the divergence at each trained token. The result is a tuple of one tensor, since
            `_score_rows` expects a tuple."""
            import numpy as np
            import torch

            # The position of each trained token in its answer.
            positions_N = np.concatenate([np.flatnonzero(row.trained) for row in rows_of_all_ranks])
            return (score_divergences(sequences, torch.from_numpy(positions_N)),)

        values_by_episode = _score_rows(session, server, episodes, score, column_count=1)  # each [1, T]
        return [values_1T[0] for values_1T in values_by_episode]

    return GroupDivergences(divergences_along)


def _score_episodes(
    session: Session,
    server: PolicyServer,
    episodes: Sequence[Episode],
    score: Callable[[Sequences], tuple[Tensor, Tensor]],
) -> list[tuple[Column, Column]]:
    """Returns two columns of values for each episode of this rank; see `_score_rows`."""

    def score_without_rows(sequences: Sequences, rows: Sequence[Episode]) -> tuple[Tensor, Tensor]:
        return score(sequences)

    values_by_episode = _score_rows(session, server, episodes, score_without_rows, column_count=2)
    return [(values_2T[0], values_2T[1]) for values_2T in values_by_episode]


def _score_rows(
    session: Session,
    server: PolicyServer,
    episodes: Sequence[Episode],
    score: Callable[[Sequences, Sequence[Episode]], tuple[Tensor, ...]],
    column_count: int,
) -> list[np.ndarray]:
    """Returns the values of each episode of this rank, as an array of shape [C, T]. Collective.

    C is `column_count`, and T is the number of the episode's response tokens. The values of a token that
    isn't trained are 0.

    Args:
        score: Computes C columns, with a value for each trained token. All ranks call it together, each with
            the rows of all ranks.
    """
    import numpy as np

    from treetune.trainer.tokens import Sequences

    # Rows without a trained token are left out, since the trainer takes none. In a tree there may be such
    # rows: all tokens of an answer may be trained in an earlier row.
    rows_of_rank = [_row_of_episode(episode) for episode in episodes if episode.trained.any()]
    rows, next_row = _rows_on_all(session.ranks, "distribution", rows_of_rank)
    values_of_episodes = [np.zeros((column_count, len(episode.response_ids))) for episode in episodes]
    if not rows:  # no rank has a row, so all ranks return here
        return values_of_episodes
    sequences = Sequences.of(rows)
    with server.asleep():
        # The columns, each with the trained tokens of all rows, one row after the other.
        scores_CN = np.stack([scores_N.double().numpy() for scores_N in score(sequences, rows)])
    for episode, values_CT in zip(episodes, values_of_episodes, strict=True):
        if not episode.trained.any():
            continue  # it has no row
        start, end = sequences.starts[next_row], sequences.starts[next_row + 1]
        values_CT[:, episode.trained] = scores_CN[:, start:end]
        next_row += 1
    return values_of_episodes


def _row_of_episode(episode: Episode) -> Episode:
    """Returns a copy of the episode that a model can run over.

    The copy is sent to all ranks, so it leaves out large fields that aren't needed: the advantages, the
    engine's log-probs and the text.
    """
    return Episode(
        prompt_ids=episode.prompt_ids,
        response_ids=episode.response_ids,
        trained=episode.trained,
        reward=episode.reward,
        group=episode.group,
        trajectory=episode.trajectory,
        policy_version=episode.policy_version,
        stretches=episode.stretches,
    )


def train(
    resources: RunResources,
    trainer: PolicyTrainer,
    iteration: int,
    episodes: Collection[Episode],
    clock: Clock,
) -> Metrics:
    """Trains on the episodes. Afterwards the trainer has the weights with which the iteration ends.
    Collective.

    Raises:
        RuntimeError: There are no episodes, or the engine's log-probs differ too much from the trainer's.
    """
    session, server = resources.session, resources.server
    config = session.config
    if not episodes:
        selection = type(config.selection).__name__
        message = f"iteration {iteration + 1}: the selection ({selection}) has left no episode to train on"
        if config.on_empty_selection == "stop":
            raise RuntimeError(
                f"{message}; the weights are unchanged. Choose another selection or a larger"
                " problems_per_iteration, or set on_empty_selection to 'skip'"
            )
        session.console.say(message + "; skipped")
        return trainer.train(iteration, episodes)  # takes no step, and counts 0 steps
    # Signals are the trainer's numbers about each trained token, such as its log-prob and entropy. Every rank
    # knows those of all tokens, and the first one writes them.
    path = session.directory.iteration_folder(iteration) / SIGNALS
    on_signals = partial(write_token_signals, path) if session.ranks.is_first else None
    # Metrics of the policy that sampled the episodes, if a restart abandons this policy.
    metrics_of_abandoned: Metrics = {}
    if config.restart == "every_iteration" and iteration > 0:
        with clock.phase("training"), server.asleep():
            metrics_of_abandoned = trainer.restart(episodes, on_signals)
        on_signals = None  # `restart` has written the signals of the policy that sampled the tokens
    if config.choose_checkpoint is None:
        with _training_phase(resources, iteration, clock) as show:
            metrics = trainer.train(iteration, episodes, progress=show, on_signals=on_signals)
            metrics["memory/training"] = memory_in_use()
    else:
        choice = _CheckpointChoice(resources, trainer, iteration, config.choose_checkpoint)
        metrics = _train_and_choose(choice, episodes, clock, on_signals)
    # After a restart, training measures how far the start weights are from the reference and the engine: with
    # a reference, the KL of the start weights to themselves, which is 0. The metrics of the policy that
    # sampled the episodes replace these.
    metrics |= metrics_of_abandoned
    if (problem := describe_gap_problem(session, iteration, episodes, metrics)) is not None:
        if stops_at_gap(session):
            raise RuntimeError(
                f"{problem}. This iteration's update is dropped. To train nevertheless, set"
                " trainer.on_logprob_gap to 'warn', or raise trainer.logprob_gap_limit"
            )
        session.console.say(problem)
    return metrics


@contextmanager
def _training_phase(
    resources: RunResources, iteration: int, clock: Clock
) -> Iterator[Callable[[int, int], None]]:
    """Lends the engine's memory to the trainer for a block, and yields the function that shows how many of
    the steps are done. Collective."""
    with (
        clock.phase("training"),
        # The engine may drop its weights, since it gets new ones after training.
        resources.server.asleep(weights_follow=True),
        resources.phase(f"iteration {iteration + 1}: training", "steps") as show,
    ):
        yield show


def _train_and_choose(
    choice: _CheckpointChoice, episodes: Collection[Episode], clock: Clock, on_signals: OnSignals | None
) -> Metrics:
    """Trains and measures in turns, until no later candidate can change the choice. Afterwards the trainer
    has the chosen weights. Collective."""
    with clock.phase("choice"):
        choice.consider(0)  # the weights before the training are a candidate, too
    training = choice.trainer.begin(choice.iteration, episodes)
    steps = training.steps()
    while True:
        with _training_phase(choice.resources, choice.iteration, clock) as show:
            point, is_last = choice.train_to_next_point(steps, show)
        # The engine is awake again, and samples from these weights.
        with clock.phase("choice"):
            choice.consider(point, is_last)
            if is_last or choice.is_made:
                choice_metrics = choice.settle()
                break
    return choice_metrics | training.finish(on_signals)


GAP_METRIC = "engine/logprob_gap_mean"
"""The metric of the mean difference between the engine's and the trainer's log-probs of sampled tokens, in
nats a token."""

GAP_LIMITS = {"quantised": 0.5, "bfloat16": 0.15, "float16": 0.15}
"""The largest mean gap by the precision of engine or trainer; see `Trainer.logprob_gap_limit`. In bfloat16,
gaps of 0.01 to 0.05 are typical, and larger ones for mixtures of experts, whose routers may choose other
experts."""


def describe_gap_problem(
    session: Session, iteration: int, episodes: Collection[Episode], metrics: Metrics
) -> str | None:
    """Returns a message if the log-probs of this iteration's tokens show that the engine did not sample from
    the trained model; None if they don't, or if they aren't comparable."""
    gap, limit = metrics.get(GAP_METRIC), gap_limit(session)
    if gap is None or gap <= limit or differs_by_design(session, iteration, episodes):
        return None
    return (
        f"iteration {iteration + 1}: the trainer's log-probs of the tokens that the engine sampled differ"
        f" from the engine's by {gap:.2g} nats a token in the mean ({GAP_METRIC}), more than the {limit:g}"
        " that rounding explains. The engine did not sample from the model that is trained. Likely causes: an"
        " attention or a position embedding that the two compute differently for longer texts than the"
        " canary's (sliding windows, extended contexts); settings of sampling that the trainer doesn't have"
        " (penalties or other engines.policy.extra_arguments); an engine with a lower precision than"
        " configured; or weights that were not loaded into it"
    )


def gap_limit(session: Session) -> float:
    """Returns the largest mean gap between log-probs of engine and trainer that is accepted."""
    config, device = session.config, session.ranks.device.type
    if config.trainer.logprob_gap_limit is not None:
        return config.trainer.logprob_gap_limit
    engine = config.engines.policy
    # The limits by precision are documented at `trainer.logprob_gap_limit`.
    limit_in_float32 = 1e-3 if device == "cpu" else 5e-3
    limit_of_engine = GAP_LIMITS.get(engine.computes_in(device), limit_in_float32)
    limit_of_trainer = GAP_LIMITS.get(config.trainer.precision, limit_in_float32)
    # A gap that the canary (the check of the engine's new weights) accepts must not end the run a moment
    # later. The canary compares few tokens, so it accepts a mean gap above its tolerance, too, if that may be
    # chance. Hence the factor 3.
    limit_by_canary = 3 * (engine.canary_tolerance or 0.0)
    return max(limit_of_engine, limit_of_trainer, limit_by_canary)


def differs_by_design(session: Session, iteration: int, episodes: Collection[Episode]) -> bool:
    """Returns whether the log-probs of engine and trainer aren't comparable.

    They aren't at temperature 0, whose distribution has no log-probs. Nor are they if the engine sampled the
    tokens from other weights than those of the trainer's log-probs.
    """
    config = session.config
    sampling = config.rollout.sampling
    if sampling is not None and sampling.temperature == 0:
        return True
    if config.restart == "every_iteration" and iteration > 0:
        return True  # training began with the start weights again, which did not sample these answers
    return any(episode.policy_version != iteration for episode in episodes)


def stops_at_gap(session: Session) -> bool:
    """Returns whether a large gap between the log-probs of engine and trainer ends the run.

    The run continues if the objective corrects for the gap by importance weights.
    """
    settings = session.config.trainer
    objective = settings.objective
    # The settings are read by `getattr`, since not every objective has them.
    corrections = ("importance_cap", "importance_band", "importance_sequence")
    is_corrected = any(getattr(objective, name, None) is not None for name in corrections)
    return settings.on_logprob_gap == "stop" and not is_corrected


class _CheckpointChoice:
    """Measures an iteration's candidates one after the other, and keeps the trainer's state of the best one.

    The measurements are in the iteration's folder. If a killed run trains the iteration again, it reads them,
    so that the same candidate is chosen and nothing is sampled again. The trainer's state is in that folder,
    too, until the choice is settled.

    Example: after two of four epochs, with ``first_maximum``, `points` are ``[0, 1, 2]``, and `accuracies`
    ``[0.41, 0.46, 0.45]``. Epoch 1 is chosen.
    """

    def __init__(
        self, resources: RunResources, trainer: PolicyTrainer, iteration: int, settings: ChooseCheckpoint
    ) -> None:
        self.session, self.resources, self.trainer = resources.session, resources, trainer
        self.iteration, self.rule = iteration, settings.rule
        self.every = settings.every
        """The number of steps between two candidates; None: there is one after each epoch."""
        self.unit = "epoch" if settings.every is None else "step"
        sets = self.session.config.evaluation.sets
        self.set = next(evaluation_set for evaluation_set in sets if evaluation_set.label == settings.set)
        """The evaluation set on which the candidates are measured."""
        self.points: list[int] = []
        """The number of epochs, or of steps, after which each candidate was measured."""
        self.accuracies: list[float] = []
        """The pass@1 of each candidate on the set."""
        self._measurements: list[Path] = []
        """The folder of each candidate's measurement."""
        self._best_state = self.session.directory.iteration_folder(iteration) / "candidates" / "state"
        """The folder of the trainer's state after the best candidate so far."""

    def train_to_next_point(
        self, steps: Iterator[FinishedStep], show: Callable[[int, int], None]
    ) -> tuple[int, bool]:
        """Trains to the next candidate: the end of the epoch, or `every` steps. Returns the number of epochs
        or steps so far, and whether the training is over. Collective."""
        for step in steps:
            show(step.number, step.total_steps)  # for example, 6 of 8
            if self.every is None:
                if step.epochs is not None:  # the step ends an epoch
                    return step.epochs, step.is_last
            elif step.number % self.every == 0 or step.is_last:
                return step.number, step.is_last
        raise AssertionError("the weights after the last step are a candidate")

    @property
    def chosen(self) -> int:
        """The index, in `points` and `accuracies`, of the best candidate so far by the rule."""
        return choose_candidate(self.accuracies, self.rule)

    @property
    def is_made(self) -> bool:
        """Whether no later candidate can change the choice. With ``first_maximum``, none can once a candidate
        is not better than the one before it. With ``best``, a later one may always be better."""
        return self.rule == "first_maximum" and self.chosen < len(self.accuracies) - 1

    def consider(self, point: int, is_last: bool = False) -> None:
        """Measures the trainer's present weights, and keeps the trainer's state if they are the best so far.
        Collective.

        Args:
            point: The number of epochs, or of steps, after which the weights are measured.
            is_last: Whether the training is over.
        """
        session = self.session
        iteration_number = self.iteration + 1  # from 1; `self.iteration` counts from 0
        folder = self._find_measurement(point)
        if folder is None:  # otherwise the weights were measured already
            self.resources.server.offer(self.trainer, iteration_number)
            folder = session.directory.candidate_folder(self.iteration, point)
            name = f"{self.set.label} after {self.unit} {point} of iteration {iteration_number}"
            measure_set(self.resources, iteration_number, self.set, folder, name)
        self._measurements.append(folder)
        self.points.append(point)
        self.accuracies.append(read_record(folder / SUMMARY, MEASURE_AGAIN_REMEDY)["pass_at_1"])
        is_best_so_far = self.chosen == len(self.accuracies) - 1  # `chosen` is the best candidate's index
        # The state of the last candidate isn't written: if it is chosen, the trainer still has it.
        if is_best_so_far and not is_last:
            if session.ranks.is_first:
                shutil.rmtree(self._best_state, ignore_errors=True)
            session.ranks.barrier("room for the candidate")
            # An engine that shares the accelerator sleeps meanwhile. While it is awake, a part of the
            # trainer's state is on the CPU.
            with self.resources.server.asleep():
                self.trainer.save(self._best_state)
            session.ranks.barrier("the candidate is written")
            if session.ranks.is_first:
                seal_folder(self._best_state)

    def _find_measurement(self, point: int) -> Path | None:
        """Returns the folder in which the weights after `point` epochs or steps were measured already.

        Returns None if there is no such folder. There is one if the run was interrupted after the
        measurement, or if an earlier iteration has measured the same start weights.
        """
        iterations = [self.iteration]
        if point == 0 and self.session.config.restart == "every_iteration":
            # Every iteration begins with the same start weights.
            iterations += range(self.iteration)
        for iteration in iterations:
            folder = self.session.directory.candidate_folder(iteration, point)
            if (folder / SUMMARY).is_file():
                return folder
        return None

    def settle(self) -> Metrics:
        """Gives the trainer the chosen weights, and returns the metrics of the choice. Collective."""
        session, chosen = self.session, self.chosen
        # If the last candidate is chosen, the trainer still has its state.
        is_last_chosen = chosen == len(self.accuracies) - 1
        if not is_last_chosen:
            damage = find_damage(self._best_state) if session.ranks.is_first else None
            damage = session.ranks.from_first("the candidate", damage)
            if damage is not None:
                raise Damaged(f"{damage}: run the same command again, which repeats the iteration's training")
            with self.resources.server.asleep():
                self.trainer.load(self._best_state)
        # The state is deleted only when all ranks have loaded it.
        session.ranks.barrier("the chosen weights are back")
        if session.ranks.is_first:
            shutil.rmtree(self._best_state, ignore_errors=True)
            self._copy_to_evaluations(self._measurements[chosen])
        session.ranks.barrier("the choice is settled")
        point = self.points[chosen]
        session.console.say(
            f"iteration {self.iteration + 1}: chose {self.unit} {point}, {self.set.label} "
            + " ".join(f"{accuracy:.3f}" for accuracy in self.accuracies)
        )
        metrics: Metrics = {}
        for candidate_point, accuracy in zip(self.points, self.accuracies, strict=True):
            metrics[f"choice/{self.unit}_{candidate_point}"] = accuracy
        metrics[f"choice/{self.unit}"] = float(point)
        metrics["choice/accuracy"] = self.accuracies[chosen]
        return metrics

    def _copy_to_evaluations(self, measurement: Path) -> None:
        """Copies the measurement of the chosen weights to the evaluations, as the evaluation after the
        iteration."""
        iteration_number = self.iteration + 1  # from 1; `self.iteration` counts from 0
        folder = self.session.directory.evaluation_folder(iteration_number, self.set.label)
        if (folder / SUMMARY).is_file():
            return
        summary = read_record(measurement / SUMMARY, MEASURE_AGAIN_REMEDY)
        verify_answers(measurement / ANSWERS)
        write_text(folder / ANSWERS, (measurement / ANSWERS).read_text())
        write_record(folder / SUMMARY, summary | {"iteration": iteration_number})


def choose_candidate(accuracies: Sequence[float], rule: ChoiceRule) -> int:
    """Returns the index of the chosen candidate; see `ChooseCheckpoint`.

    Example: ``choose_candidate([0.41, 0.46, 0.45, 0.48], "first_maximum")`` is 1, and with ``best`` it is 3.
    """
    if rule == "best":
        # Among equally good candidates the earliest wins, since `-number` is largest for it.
        return max(range(len(accuracies)), key=lambda number: (accuracies[number], -number))
    # Each candidate up to the chosen one is strictly better than the one before it.
    number = 0
    while number + 1 < len(accuracies) and accuracies[number + 1] > accuracies[number]:
        number += 1
    return number
