"""Trains an iteration, and chooses among its epochs where a choice is made."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.credit.base import Critic
from treetune.credit.episodes import scoring_row
from treetune.exceptions import Damaged
from treetune.rollouts.storage import SIGNALS, write_token_signals
from treetune.runtime.base import ChoiceRule, ChooseCheckpoint
from treetune.runtime.console import Clock
from treetune.runtime.directory import ANSWERS, MEASURE_AGAIN, verify_answers
from treetune.runtime.evaluation import measure
from treetune.runtime.generation import episodes_everywhere
from treetune.runtime.machine import memory_in_use
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.sampler import Sampler
from treetune.runtime.session import Session
from treetune.store.checksums import damage_of, read_record, seal_folder, write_record
from treetune.store.files import write_text
from treetune.vocabulary import Column, Episode, Metrics, Trajectory, are_sampled

if TYPE_CHECKING:
    from torch import Tensor

    from treetune.trainer.core import OnSignals, PolicyTrainer, StepDone
    from treetune.trainer.tokens import Sequences


def make_trainer(session: Session) -> PolicyTrainer:
    """Returns the trainer of the experiment, on the start weights. Collective."""
    from treetune.trainer.core import PolicyTrainer

    config, model = session.config, session.model
    reference = config.credit.reference
    whole = model.on_cpu if config.trainer.deals_weights_out else model.load
    return PolicyTrainer(
        config.trainer,
        model.in_parts if config.trainer.reads_in_parts else whole,
        ranks=session.ranks,
        seed=config.seed,
        temperature=session.temperature,
        nucleus=session.nucleus,
        iterations=config.iterations,
        critic=config.credit.critic_settings,
        from_values=config.credit.from_values if config.credit.leaves_values_to_trainer else None,
        restarts=config.restart == "every_iteration",
        load_reference=None if reference is None else partial(model.load_like, reference),
    )


@contextmanager
def open_trainer(
    sampler: Sampler, *, state: Path | None = None, trains: bool = True
) -> Iterator[PolicyTrainer]:
    """Makes the trainer, from a stored `state` where one is given, and connects it: the server shares memory
    with it, and the sampler gets its critic and, where it `trains`, its reference. Collective."""
    session, server = sampler.session, sampler.server
    with server.asleep():  # on a CPU, the server is on its way up meanwhile
        server.trainer = trainer = make_trainer(session)
        if state is not None:
            trainer.load(state)
    with closing(trainer):
        if session.config.credit.asks_critic:
            sampler.critic = critic_for_credit(session, server, trainer.values)
        if trains:
            sampler.reference = trainer.prefetch
        yield trainer


def critic_for_credit(
    session: Session, server: PolicyServer, values: Callable[[Sequences], Tensor]
) -> Critic:
    """Returns a critic that credit can ask; `values` computes those of all ranks' answers on all ranks, of
    the state before each trained token.

    The engine gives its memory up while they are computed, if so configured.
    """

    def critic_values(answers: Sequence[Trajectory]) -> list[Column]:
        import numpy as np

        from treetune.trainer.tokens import Sequences

        ranks = session.ranks
        counts = [count for (count,) in ranks.exchange("critic-counts", [len(answers)])]
        rows = episodes_everywhere(ranks, "critic-answers", [scoring_row(answer) for answer in answers])
        if not rows:
            return []
        sequences = Sequences.of(rows)
        with server.asleep():
            values_N = values(sequences).double().numpy()
        first = sum(counts[: ranks.rank])
        bounds = list(pairwise(sequences.starts))[first : first + len(answers)]
        columns = []
        for answer, (start, end) in zip(answers, bounds, strict=True):
            trained = are_sampled(answer.segments)
            column = np.full(len(trained), np.nan)  # tokens that the policy didn't sample have no value
            column[trained] = values_N[start:end]
            columns.append(column)
        return columns

    return Critic(critic_values)


def train(
    sampler: Sampler, trainer: PolicyTrainer, iteration: int, episodes: Collection[Episode], clock: Clock
) -> Metrics:
    """Trains on the episodes, all epochs or those that the choice needs, and leaves the trainer with
    the weights that the iteration ends with. Without an episode, as `on_empty_selection` says. Collective.
    """
    session, server = sampler.session, sampler.server
    config = session.config
    if not episodes:
        selection = type(config.selection).__name__
        message = f"iteration {iteration + 1}: the selection ({selection}) kept no episode to train on"
        if config.on_empty_selection == "stop":
            raise RuntimeError(
                f"{message}; the weights are unchanged. Choose another selection or a larger"
                " problems_per_iteration, or set on_empty_selection to 'skip'"
            )
        session.console.say(message + "; skipped")
        return {}
    # Every rank knows the signals of all tokens, and the first one writes them.
    path = session.directory.iteration(iteration) / SIGNALS
    on_signals = partial(write_token_signals, path) if session.ranks.is_first else None
    metrics: Metrics = {}
    if config.restart == "every_iteration" and iteration > 0:
        with clock.phase("training"), server.asleep():
            metrics = trainer.restart(episodes, on_signals)
        on_signals = None  # the start weights, which are trained now, sampled none of these tokens
    if config.choose_checkpoint is None:
        with _training_phase(sampler, iteration, clock) as show:
            metrics |= trainer.train(iteration, episodes, progress=show, on_signals=on_signals)
            metrics["memory/training"] = memory_in_use()
    else:
        choice = _EpochChoice(sampler, trainer, iteration, config.choose_checkpoint)
        metrics |= _train_and_choose(choice, episodes, clock, on_signals)
    if (problem := gap_problem(session, iteration, episodes, metrics)) is not None:
        if stops_at_gap(session):
            raise RuntimeError(
                f"{problem}. To train all the same, set trainer.on_logprob_gap to 'warn', or"
                " trainer.logprob_gap_limit to what you expect; this iteration's update is dropped"
            )
        session.console.say(problem)
    return metrics


@contextmanager
def _training_phase(sampler: Sampler, iteration: int, clock: Clock) -> Iterator[Callable[[int, int], None]]:
    """Lends the engine's memory to the trainer for a block, and yields the function that shows how many of
    the steps are done. Collective."""
    with (
        clock.phase("training"),
        sampler.server.asleep(weights_follow=True),
        sampler.phase(f"iteration {iteration + 1}: training", "steps") as show,
    ):
        yield show


def _train_and_choose(
    choice: _EpochChoice, episodes: Collection[Episode], clock: Clock, on_signals: OnSignals | None
) -> Metrics:
    """Trains and measures in turns, until no later candidate can change the choice. Leaves the trainer with
    the chosen weights. Collective."""
    with clock.phase("choice"):
        choice.consider(0)
    training = choice.trainer.begin(choice.iteration, episodes)
    steps = training.steps()
    while True:
        with _training_phase(choice.sampler, choice.iteration, clock) as show:
            point, is_last = choice.train_to_next_point(steps, show)
        # The engine is awake again, and samples from these weights.
        with clock.phase("choice"):
            choice.consider(point, is_last)
            if is_last or choice.is_made:
                settled = choice.settle()
                break
    return settled | training.finish(on_signals)


GAP = "engine/logprob_gap_mean"

GAP_LIMITS = {"quantised": 0.5, "bfloat16": 0.15, "float16": 0.15}
"""Largest mean gap by what the engine or the trainer computes in; see `Trainer.logprob_gap_limit`. In
bfloat16 0.01 to 0.05 are usual, and more for mixtures of experts, whose routers flip."""


def gap_problem(
    session: Session, iteration: int, episodes: Collection[Episode], metrics: Metrics
) -> str | None:
    """Returns in words that the engine sampled from another model than the one that is trained, as far as the
    log-probs of this iteration's tokens say; None where all is well or nothing can be said."""
    gap, limit = metrics.get(GAP), gap_limit(session)
    if gap is None or gap <= limit or differs_by_design(session, iteration, episodes):
        return None
    return (
        f"iteration {iteration + 1}: the trainer's log-probs of the tokens that the engine sampled differ"
        f" from the engine's by {gap:.2g} nats a token in the mean ({GAP}), more than the {limit:g} that"
        " rounding explains: what is trained is not what was sampled. Likely causes: an attention or a"
        " position embedding that the two compute otherwise beyond the few tokens of the canary (sliding"
        " windows, stretched contexts), sampling that the trainer doesn't know of (penalties or other"
        " engines.policy.extra_arguments), an engine of less precision than it says, or weights that did not"
        " reach it"
    )


def gap_limit(session: Session) -> float:
    """The mean gap from which on a run's engine is not believed to have the trainer's model."""
    config, device = session.config, session.ranks.device.type
    if config.trainer.logprob_gap_limit is not None:
        return config.trainer.logprob_gap_limit
    engine = config.engines.policy
    in_float32 = 1e-3 if device == "cpu" else 5e-3
    by_precision = [
        GAP_LIMITS.get(precision, in_float32)
        for precision in (engine.computes_in(device), config.trainer.precision)
    ]
    return max(*by_precision, 3 * (engine.canary_tolerance or 0.0))


def differs_by_design(session: Session, iteration: int, episodes: Collection[Episode]) -> bool:
    """Returns whether trainer and engine aren't meant to agree on these tokens: at temperature 0, whose
    distribution has no log-probs, and where other weights sampled than the ones whose log-probs are known."""
    config = session.config
    sampling = config.rollout.sampling
    if sampling is not None and sampling.temperature == 0:
        return True
    if config.restart == "every_iteration" and iteration > 0:
        return True
    return any(episode.policy_version != iteration for episode in episodes)


def stops_at_gap(session: Session) -> bool:
    """Returns whether a large gap ends the run: not where the objective weighs tokens for it."""
    settings = session.config.trainer
    objective = settings.objective
    corrections = ("importance_cap", "importance_band", "importance_sequence")
    is_corrected = any(getattr(objective, name, None) is not None for name in corrections)
    return settings.on_logprob_gap == "stop" and not is_corrected


class _EpochChoice:
    """Measures an iteration's candidates one by one and keeps the state of the one to go on with. Their
    `points` are numbers of epochs, or of steps.

    Measurements lie in the iteration's folder and are read from there when the iteration is
    trained again: then the same candidates are trained, the same one is chosen, and nothing is sampled
    twice. The state of the trainer lies beside it until the choice is settled.
    """

    def __init__(
        self, sampler: Sampler, trainer: PolicyTrainer, iteration: int, settings: ChooseCheckpoint
    ) -> None:
        self.session, self.sampler, self.trainer = sampler.session, sampler, trainer
        self.iteration, self.rule, self.every = iteration, settings.rule, settings.every
        self.unit = "epoch" if settings.every is None else "step"
        sets = self.session.config.evaluation.sets
        self.set = next(candidate for candidate in sets if candidate.label == settings.set)
        self.points: list[int] = []
        self.accuracies: list[float] = []
        self._measured: list[Path] = []
        self._state = self.session.directory.iteration(iteration) / "candidates" / "state"

    def train_to_next_point(
        self, steps: Iterator[StepDone], show: Callable[[int, int], None]
    ) -> tuple[int, bool]:
        """Trains to the end of the epoch, or as many steps as lie between candidates. Returns the number of
        epochs or steps that are done, and whether these are all. Collective."""
        for step in steps:
            show(step.number, step.of)
            if self.every is None and step.epochs is not None:
                return step.epochs, step.is_last
            if self.every is not None and (step.number % self.every == 0 or step.is_last):
                return step.number, step.is_last
        raise AssertionError("the last step is a point of the choice")

    @property
    def chosen(self) -> int:
        """Returns the number of the best candidate so far."""
        return choose(self.accuracies, self.rule)

    @property
    def is_made(self) -> bool:
        """Returns whether no later candidate can change the choice."""
        return self.rule == "first_maximum" and self.chosen < len(self.accuracies) - 1

    def consider(self, point: int, is_last: bool = False) -> None:
        """Measures the trainer's present weights. Collective."""
        session, done = self.session, self.iteration + 1
        if (folder := self._measured_before(point)) is None:
            self.sampler.server.offer(self.trainer, done)
            folder = session.directory.candidate(self.iteration, point)
            name = f"{self.set.label} after {self.unit} {point} of iteration {done}"
            measure(self.sampler, done, self.set, folder, name)
        self._measured.append(folder)
        self.points.append(point)
        self.accuracies.append(read_record(folder / "summary.json", MEASURE_AGAIN)["pass_at_1"])
        if self.chosen == len(self.accuracies) - 1 and not is_last:
            if session.ranks.is_first:
                shutil.rmtree(self._state, ignore_errors=True)
            session.ranks.barrier("room for the candidate")
            with self.sampler.server.asleep():
                self.trainer.save(self._state)
            session.ranks.barrier("the candidate is written")
            if session.ranks.is_first:
                seal_folder(self._state)

    def _measured_before(self, point: int) -> Path | None:
        """The folder in which these weights were measured already, by a run that was interrupted or, with
        restarts, in an earlier iteration that began with the same ones."""
        again = point == 0 and self.session.config.restart == "every_iteration"
        for iteration in (self.iteration, *(range(self.iteration) if again else ())):
            folder = self.session.directory.candidate(iteration, point)
            if (folder / "summary.json").is_file():
                return folder
        return None

    def settle(self) -> Metrics:
        """Leaves the trainer with the chosen weights. Collective."""
        session, chosen = self.session, self.chosen
        if chosen < len(self.accuracies) - 1:
            damage = damage_of(self._state) if session.ranks.is_first else None
            if (damage := session.ranks.from_first("the candidate", damage)) is not None:
                raise Damaged(
                    f"{damage}: give the same command again, which trains the iteration's epochs again"
                )
            with self.sampler.server.asleep():
                self.trainer.load(self._state)
        session.ranks.barrier("the chosen weights are back")
        if session.ranks.is_first:
            shutil.rmtree(self._state, ignore_errors=True)
            self._keep_as_evaluation(self._measured[chosen])
        session.ranks.barrier("the choice is settled")
        point = self.points[chosen]
        session.console.say(
            f"iteration {self.iteration + 1}: went on with {self.unit} {point}, {self.set.label} "
            + " ".join(f"{accuracy:.3f}" for accuracy in self.accuracies)
        )
        pairs = zip(self.points, self.accuracies, strict=True)
        measured = {f"choice/{self.unit}_{at}": accuracy for at, accuracy in pairs}
        made = {f"choice/{self.unit}": float(point), "choice/accuracy": self.accuracies[chosen]}
        return measured | made

    def _keep_as_evaluation(self, measured: Path) -> None:
        """These weights are those after the iteration: they need not be measured again as such."""
        done = self.iteration + 1
        folder = self.session.directory.evaluation(done, self.set.label)
        if (folder / "summary.json").is_file():
            return
        summary = read_record(measured / "summary.json", MEASURE_AGAIN)
        verify_answers(measured / ANSWERS)
        write_text(folder / ANSWERS, (measured / ANSWERS).read_text())
        write_record(folder / "summary.json", summary | {"iteration": done})


def choose(accuracies: Sequence[float], rule: ChoiceRule) -> int:
    """The number of the candidate to go on with, from 0; see `ChooseCheckpoint`."""
    if rule == "best":
        return max(range(len(accuracies)), key=lambda number: (accuracies[number], -number))
    number = 0
    while number + 1 < len(accuracies) and accuracies[number + 1] > accuracies[number]:
        number += 1
    return number
