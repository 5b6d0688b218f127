"""Commits finished iterations, and resumes a run from its newest checkpoint.

The commit of iteration i, in this order::

    iterations/i/metrics.json    the iteration counts as finished work
    checkpoints/i+1/             if one is due: written under another name, sealed, renamed
    iterations/i/metrics.json    again, with the seconds of the checkpoint
    metrics.jsonl                one line more; sinks (W&B, trackio) get it too

If the run is killed before checkpoints/i+1/ is written, the next start repeats the training since the
previous checkpoint. If it is killed later, the next start repeats nothing: `resume` writes metrics.jsonl anew
from the iterations' own files, so that no line is lost or doubled.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.exceptions import Collapsed, Damaged, Stopped
from treetune.models.policy_files import STATE_FILE
from treetune.processes.lifetime import GracefulStop, stopping_gracefully
from treetune.processes.standard_error import patient_stream
from treetune.rollouts.metrics import split_domain
from treetune.rollouts.numbers import describe_numbers
from treetune.runtime.base import PolicyIteration
from treetune.runtime.checkpoint_schedule import CheckpointSchedule, tidy_checkpoints
from treetune.runtime.console import Clock, format_duration, name_iterations
from treetune.runtime.diagnostics import (
    REMEDY_OF_SIGN,
    CollapseSign,
    Sign,
    WatchedRun,
    describe_good_weights,
    diagnose,
    find_last_good,
    find_stopping_signs,
)
from treetune.runtime.directory import (
    ITERATION_METRICS,
    METRICS_REMEDY,
    ExperimentDirectory,
    is_generated,
    is_over_after,
    iterations_of,
    metrics_row,
    refuse_misplaced,
)
from treetune.runtime.mirrors import Mirrors
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.session import Session
from treetune.runtime.sinks import with_mirrors_of_environment
from treetune.store.checksums import (
    CHECKSUMS_FILE,
    config_hash,
    digest_of,
    find_damage,
    read_record,
    seal_folder,
    seal_record,
    write_record,
)
from treetune.store.files import replace_folder, why_not_written, write_text
from treetune.vocabulary import Metrics

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from treetune.trainer.core import PolicyTrainer


LEAST_SHOWN_SECONDS = 0.05
"""The line of an iteration leaves out phases of fewer seconds."""

MOST_SHOWN_DOMAINS = 8
"""The line of an iteration leaves out domains if there are more; the report has all."""


def resume(session: Session, server: PolicyServer, trainer: PolicyTrainer) -> int:
    """Loads the newest checkpoint into the trainer, and returns the number of the next iteration.

    Writes ``metrics.jsonl`` anew from the iterations' own files. Collective.
    """
    config, directory = session.config, session.directory
    # `train_problems` makes the problems, and keeps them. That takes seconds, which would count towards the
    # first iteration if it were not done here.
    n_problems = len(session.train_problems)
    start = 0
    if session.ranks.is_first:
        start = _newest_undamaged_checkpoint(session)
    start = session.ranks.from_first("newest checkpoint", start)
    if start:
        with server.asleep():  # the trainer needs the accelerator's memory while it loads
            trainer.load(directory.checkpoint_folder(start) / "trainer")
        server.offer(trainer, start)
    # Only the first rank writes messages, so only it reads the files for them.
    repetition = describe_repetition(directory, start) if session.ranks.is_first else ""
    is_new = not start and not repetition
    session.console.say(
        f"{'starting' if is_new else 'resuming'} {directory.path}: {n_problems} training problems,"
        f" {config.iterations} iterations"
    )
    if not is_new:
        session.console.say(f"continuing after iteration {start} of {config.iterations}{repetition}")
    session.finished_iterations = session.checkpointed_iterations = start
    if session.ranks.is_first:
        lines = [json.dumps(seal_record(row)) + "\n" for row in read_metrics_rows(directory, start)]
        write_text(directory.metrics_file, "".join(lines))
    return start


def describe_repetition(directory: ExperimentDirectory, start: int) -> str:
    """Describes the iterations that a resumed run repeats, as the end of a message.

    The run resumes after `start` iterations. The text is empty if it repeats none.

    Example: ``, the last checkpoint: iterations 4 to 5 had been finished after it and are trained again
    (about 3 min); what was sampled is kept``.
    """
    rows: list[dict[str, Any]] = []
    while (path := directory.iteration_folder(start + len(rows)) / ITERATION_METRICS).is_file():
        rows.append(read_record(path, METRICS_REMEDY))
    if not rows:
        return ""
    iterations = name_iterations(start + 1, start + len(rows))
    verb = "is" if len(rows) == 1 else "are"
    begin = f", the last checkpoint: {iterations} had been finished after it and {verb}"
    # Iterations whose episodes are stored are only trained again.
    if all(is_generated(directory, start + number) for number in range(len(rows))):
        seconds = sum(row.get("seconds/training", 0.0) for row in rows)
        return f"{begin} trained again (about {format_duration(seconds)}); what was sampled is kept"
    seconds = sum(row.get("seconds/total", 0.0) for row in rows)
    return f"{begin} done again (about {format_duration(seconds)})"


def _newest_undamaged_checkpoint(session: Session) -> int:
    """Returns the newest checkpoint whose trainer's state is undamaged; 0 if there is no checkpoint.

    Raises:
        Damaged: There are checkpoints, and all of them are damaged.
    """
    directory = session.directory
    damages: list[str] = []
    for number in reversed(directory.resumable_checkpoints()):
        directory.refuse_misplaced_checkpoint(number)
        damage = find_damage(directory.checkpoint_folder(number) / "trainer")
        if damage is None:
            # Damaged newer checkpoints are reported only now that an older one can take their place.
            for message in damages:
                session.console.say(f"{message}: resuming from the checkpoint before it, {number}")
            return number
        damages.append(damage)
    if damages:
        raise Damaged(
            f"{damages[-1]}, and no older checkpoint holds a trainer's state: delete"
            f" {directory.path / 'checkpoints'}, and the same command trains again from the beginning, on the"
            " episodes that are stored"
        )
    return 0


class Record:
    """Writes a run's record: metrics and their mirrors, checkpoints, signs of collapse."""

    def __init__(
        self,
        session: Session,
        server: PolicyServer,
        trainer: PolicyTrainer,
        watch: CollapseWatch,
        mirrors: Mirrors,
        stop: GracefulStop,
    ) -> None:
        self._session, self._server, self._trainer = session, server, trainer
        self._watch, self._mirrors, self._stop = watch, mirrors, stop
        self._schedule = CheckpointSchedule(session.config.checkpoints)
        self._iteration_s: float | None = None
        """The seconds of this process's last iteration; None before its first commit."""

    @staticmethod
    @contextmanager
    def open(session: Session, server: PolicyServer, trainer: PolicyTrainer, start: int) -> Iterator[Record]:
        """Opens the record of a run that resumes after `start` iterations. Collective.

        While it is open, a signal ends the run at the next boundary: before an iteration's training, or at
        its commit.
        """
        watch = CollapseWatch.of(session, start)
        config = session.config
        sinks = with_mirrors_of_environment(config.sinks) if session.ranks.is_first else ()
        if len(sinks) > len(config.sinks):
            session.console.say(
                "W&B mirrors this run, since WANDB_RUN_ID or WANDB_API_KEY is set (WANDB_MODE=disabled turns"
                " it off)"
            )
        directory, name = session.directory.path, config.experiment_name
        mirrors = Mirrors(sinks, directory, name, session.plain_config, finished_iterations=start)

        def say(message: str) -> None:
            # A signal's handler calls this, perhaps while the process is within a buffered write: `print` and
            # `logging` could then fail or deadlock.
            if not session.ranks.is_first:
                return
            stream = patient_stream()  # a standard error that signal handlers may write to, or None
            if stream is not None:
                stream.write(f"{message}\n")
            else:
                os.write(sys.stderr.fileno(), f"{message}\n".encode())

        stop = GracefulStop(config.checkpoints.grace, say)
        try:
            with stopping_gracefully(stop):
                yield Record(session, server, trainer, watch, mirrors, stop)
        except BaseException as error:
            is_preempted = is_stopped_for_a_while(error, stop, session.ranks.world_size)
            mirrors.close_failed(exit_code_of(error), is_preempted=is_preempted)
            raise
        mirrors.close()

    @contextmanager
    def before_training(self, iteration: int) -> Iterator[None]:
        """Ends the run before an iteration's training if a signal asks for the end. Collective.

        The caller samples the iteration's answers within the block. A single rank without `overlap` stops
        within the block, as soon as the signal comes. All other runs stop at the end of the block: several
        ranks have to stop at the same point, and with an `overlap`, a second thread samples while the first
        one trains. Nothing is lost then: the samples are on disk, and the weights, which are still those that
        the iteration began with, are written into a checkpoint.

        A signal that doesn't wait (`GracefulStop`) ends the runs that can't stop within the block at once,
        and without a checkpoint.

        Raises:
            Stopped: A signal asked for the end.
        """
        session, stop = self._session, self._stop
        self._expect_boundary(
            f"the end of iteration {iteration + 1}",
            finished_iterations=session.finished_iterations,
            expected_s=self._iteration_s,
        )
        may_interrupt = session.ranks.world_size == 1 and session.config.overlap == "none"
        try:
            with stop.interruptible() if may_interrupt else contextlib.nullcontext():
                yield
        except Stopped:
            if may_interrupt:
                self._write_missing_checkpoint()
            # Otherwise the signal ends the process at once (`GracefulStop`). The other ranks or the second
            # thread may be anywhere then, so no checkpoint can be written.
            raise
        if (signal_number := self._agree_to_stop()) is not None:
            self._write_missing_checkpoint()
            raise Stopped(128 + signal_number)

    def _expect_boundary(self, boundary: str, *, finished_iterations: int, expected_s: float | None) -> None:
        """Tells the graceful stop which boundary comes next, and what an end before the boundary would lose.

        A boundary is a point at which the run can end and lose nothing.

        Args:
            finished_iterations: An early end loses those after the last checkpoint.
            expected_s: The seconds until the boundary; None if unknown.
        """
        checkpointed_iterations = self._session.checkpointed_iterations
        would_lose = None
        if finished_iterations > checkpointed_iterations:
            repeated = name_iterations(checkpointed_iterations + 1, finished_iterations)
            would_lose = f"the next start does {repeated} again"
        self._stop.begin(boundary, would_lose, expected_s)

    def _agree_to_stop(self) -> int | None:
        """Returns the signal that any rank has received; None if none has. Collective."""
        signal_by_rank = self._session.ranks.exchange("signals", self._stop.asked_by)
        signals = [number for number in signal_by_rank if number is not None]
        if not signals:
            return None
        self._stop.reach_boundary()  # stops the timer that the signal has started
        return signals[0]

    def _write_missing_checkpoint(self) -> None:
        """Writes a checkpoint of the present weights, unless there is one. Collective."""
        session = self._session
        if session.finished_iterations == session.checkpointed_iterations:
            return
        try:
            self._write_timed_checkpoint(session.finished_iterations, regular=False)
        except (OSError, RuntimeError, ValueError) as error:
            # The process ends nevertheless, with the signal's exit code.
            session.console.say(f"no checkpoint could be written on the way out: {error}")

    def commit(self, iteration: int, metrics: Metrics, clock: Clock) -> None:
        """Writes the metrics of a finished iteration, and a checkpoint if one is due. Collective.

        A checkpoint is due by the settings (`checkpoints`), after the last iteration, and when the run stops.

        Raises:
            Collapsed: A sign of collapse stops the run.
            Stopped: A signal asked for the end.
        """
        session, watch = self._session, self._watch
        config, finished_iterations = session.config, iteration + 1
        # From here on, a signal that ended the process at once would lose this iteration. So a signal waits
        # for a boundary, a point at which nothing is lost. The next boundary is `_agree_to_stop` below. A
        # signal that comes later is noticed before the next iteration's training.
        self._expect_boundary(
            f"the end of iteration {finished_iterations}",
            finished_iterations=finished_iterations,
            expected_s=0.0,
        )
        metrics = metrics | watch.check_iteration(iteration, metrics)
        with clock.phase("commit"):
            # The metrics are written before the checkpoint. A run that resumes from the checkpoint doesn't
            # do this iteration again, so metrics that are missing then would stay missing.
            self._write_metrics(iteration, metrics | clock.metrics())
            is_end = is_over_after(config, session.directory, finished_iterations) or watch.stops_run
            is_regular = is_end or self._schedule.is_due_by_iterations(finished_iterations)
            iteration_s = clock.metrics()["seconds/total"]
            # The first rank decides, since the clocks of ranks differ.
            is_due_by_time = session.ranks.from_first(
                "a checkpoint is due", self._schedule.is_due_by_time(iteration_s)
            )
            stopped_by = self._agree_to_stop()  # the number of a signal; None without one
            session.finished_iterations = finished_iterations
            if is_regular or is_due_by_time or stopped_by is not None:
                self._write_timed_checkpoint(finished_iterations, regular=is_regular)
        # The row is written once more, now that the seconds of the commit are known.
        row = self._write_metrics(iteration, metrics | clock.metrics())
        if session.ranks.is_first:
            session.directory.append_metrics(row)
        self._mirrors.log(iteration, row)
        session.last_row = row
        session.console.say(
            format_summary_line(row, iterations_of(config, session.directory, finished_iterations))
        )
        self._iteration_s = iteration_s
        watch.stop_if_collapsed()
        # A run that is over ends as usual, with exit code 0.
        if stopped_by is not None and not is_end:
            raise Stopped(128 + stopped_by)

    def _write_metrics(self, iteration: int, metrics: Metrics) -> dict[str, Any]:
        """Writes the iteration's own file of metrics, and returns its row."""
        row = metrics_row(iteration, time.time(), metrics)
        if self._session.ranks.is_first:
            write_record(self._session.directory.iteration_folder(iteration) / ITERATION_METRICS, row)
        return row

    def _write_timed_checkpoint(self, finished_iterations: int, *, regular: bool) -> None:
        """Writes the checkpoint after `finished_iterations`, and passes its seconds to the schedule.
        Collective."""
        start = time.monotonic()
        with (
            self._server.asleep(),
            self._session.console.phase(f"iteration {finished_iterations}: checkpoint"),
        ):
            self._write_checkpoint(finished_iterations, regular=regular)
        self._session.checkpointed_iterations = finished_iterations
        self._schedule.note_written(time.monotonic() - start)

    def _write_checkpoint(self, finished_iterations: int, *, regular: bool) -> None:
        """Writes the checkpoint after `finished_iterations`.

        Args:
            regular: Whether it is due by iterations, and not by time or a signal.
        """
        from treetune.models.policy_files import write_critic, write_policy

        session, trainer = self._session, self._trainer
        final_folder = session.directory.checkpoint_folder(finished_iterations)
        # Everything is written into a hidden folder, which gets its name when it is complete.
        folder = final_folder.with_name(f".{final_folder.name}.partial")
        if session.ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)  # what a killed run has left
            folder.mkdir(parents=True)
        session.ranks.barrier("the checkpoint's folder is made")
        with _explain_failure(final_folder):
            # All ranks take part in gathering the weights, and the first one writes them.
            trainer.save(folder / "trainer")
            weights = trainer.weights()
            critic = trainer.critic_weights()
            reward_model = trainer.reward_model_weights()
            adapters = trainer.adapters()
            if session.ranks.is_first:
                architecture = trainer.model.config
                generation = make_generation_config(session, trainer)
                write_policy(weights, architecture, session.model.tokenizer, folder / "policy", generation)
                if trainer.settings.lora is not None:
                    base_model = str(getattr(architecture, "_name_or_path", ""))
                    trainer.settings.lora.write(adapters, base_model, folder / "adapter")
                if critic:
                    write_critic(critic, architecture, folder / "critic")
                if reward_model:
                    assert trainer.reward_model is not None
                    # `architecture` is the policy's configuration, and this is the reward model's.
                    architecture_of_reward_model = trainer.reward_model.model.module.model.config
                    write_policy(
                        reward_model,
                        architecture_of_reward_model,
                        session.model.tokenizer,
                        folder / "reward_model",
                    )
                digests = {}
                for part in folder.iterdir():
                    seal_folder(part)
                    digests[part.name] = digest_of(part / CHECKSUMS_FILE)
                state = {
                    "iteration": finished_iterations,
                    "config": config_hash(session.plain_config),
                    "regular": regular,
                    "parts": digests,
                }
                write_record(folder / STATE_FILE, state)
                replace_folder(folder, final_folder)
        if session.ranks.is_first:
            keep_every = session.config.checkpoints.keep_every
            tidy_checkpoints(session.directory, keep_every, self._watch.last_good)
        session.ranks.barrier("checkpoint written")


def exit_code_of(error: BaseException) -> int:
    """Returns 128 + the number of the signal that ends the run with this exception, or 1 for a failure."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return error.code if isinstance(error, Stopped) and isinstance(error.code, int) else 1


def is_stopped_for_a_while(error: BaseException, stop: GracefulStop, ranks: int) -> bool:
    """Returns whether a signal other than Ctrl-C ends the run with this exception. Such a signal comes from
    SLURM, for example, which continues the run later."""
    if not isinstance(error, Stopped) or error.code == 128 + signal.SIGINT:
        return False
    # If a rank fails, the launcher sends the others SIGTERM as well. But then they don't reach a boundary, at
    # which all ranks meet.
    return ranks == 1 or stop.has_reached_boundary


def make_generation_config(session: Session, trainer: PolicyTrainer) -> GenerationConfig | None:
    """Returns the model's sampling settings, with the tokens that end an answer in this run."""
    config = copy.deepcopy(trainer.model.generation_config)
    if config is not None:
        config.eos_token_id = list(session.model.codec.end_ids)
        config.pad_token_id = session.model.tokenizer.pad_token_id
    return config


@contextmanager
def _explain_failure(folder: Path) -> Iterator[None]:
    """Raises OSError with the reason, such as a full disk, if the block can't write a checkpoint.

    A full disk is OSError, RuntimeError or SafetensorError, depending on the library that writes.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(
            f"the checkpoint {folder} could not be written: {why_not_written(error, folder)}. Earlier"
            " checkpoints are untouched, and the same command resumes from the last one"
        ) from error


# The line of an iteration, for people


def format_summary_line(row: Mapping[str, Any], iterations: int) -> str:
    """Returns the line that the console shows of a finished iteration: rewards, loss, scores, seconds.

    Example::

        iteration 3/40  reward 0.412  (math 0.500, code 0.324)  unfinished 2.1%  loss 0.0031  KL 0.0008
        tokens/s 5120  test 0.480  12.4 s (generation 7.1, training 4.0)  8 min left
    """
    parts = [f"iteration {row['iteration'] + 1}/{iterations}"]
    # Without shaping, the reward is the score, and is shown alone.
    was_shaped = row.get("episodes/score") != row.get("episodes/reward")
    if was_shaped and "episodes/score" in row:
        parts.append(f"score {row['episodes/score']:.3f}")
    for name, key, form in (
        ("reward", "episodes/reward", "{:.3f}"),
        ("unfinished", "episodes/unfinished", "{:.1%}"),
        ("loss", "train/loss", "{:.4f}"),
        ("KL", "train/kl", "{:.4f}"),
        ("tokens/s", "engine/tokens_per_second", "{:.0f}"),
    ):
        if key in row:
            parts.append(f"{name} {form.format(row[key])}")
        if name == "reward":  # those of the domains come right after the mean of all
            parts += _rewards_of_domains(row)
    parts += describe_numbers(row)  # those that a rollout declares, such as "longest thread 312.4"
    for key, value in row.items():
        # ``evaluation/SET/pass_at_1``; the keys of single domains have more parts.
        key_parts = key.split("/")
        if key_parts[-1] == "pass_at_1" and len(key_parts) == 3:
            parts.append(f"{key_parts[1]} {value:.3f}")
    phases = {key.removeprefix("seconds/"): row[key] for key in row if key.startswith("seconds/")}
    total = phases.pop("total")
    times = [f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= LEAST_SHOWN_SECONDS]
    parts.append(f"{total:.1f} s ({', '.join(times)})")
    if remaining_s := (iterations - row["iteration"] - 1) * total:
        parts.append(f"{format_duration(remaining_s)} left")
    return "  ".join(parts)


def _rewards_of_domains(row: Mapping[str, Any]) -> list[str]:
    """Returns the mean rewards of all domains as one part of a line: ``["(math 0.500, code 0.324)"]``.

    Returns no part, an empty list, if there are no domains, or more than `MOST_SHOWN_DOMAINS`.
    """
    texts = []
    for key, value in row.items():
        domain_and_name = split_domain(key)
        if domain_and_name is None:  # a metric of all domains together
            continue
        domain, name = domain_and_name
        if name == "reward":
            texts.append(f"{domain} {value:.3f}")
    return [f"({', '.join(texts)})"] if 0 < len(texts) <= MOST_SHOWN_DOMAINS else []


# Signs of collapse


@dataclass
class CollapseWatch:
    """Watches a run for signs of collapse: holds its metrics so far, and the signs after the last of them."""

    session: Session
    rows: list[dict[str, Any]]
    signs: Mapping[Sign, CollapseSign] = field(default_factory=dict)

    @staticmethod
    def of(session: Session, start: int) -> CollapseWatch:
        """Reads the metrics of the iterations before `start`. Collective."""
        rows = session.ranks.from_first("the metrics so far", read_metrics_rows(session.directory, start))
        return CollapseWatch(session, rows, _find_signs(session.config, rows))

    def check_iteration(self, iteration: int, metrics: Metrics) -> Metrics:
        """Returns metrics that say which signs of collapse there are, and logs each that begins or ends.

        A sign is confirmed if enough iterations in a row show it. Collective.
        """
        signs_before = self.signs
        # `metrics_row` rounds the metrics as in the file, so that a restarted run finds the same signs. No
        # sign reads the time of the row, which is 0 here.
        self.rows.append(metrics_row(iteration, 0.0, metrics))
        # The first rank decides, so that all ranks stop in the same iteration.
        self.signs = self.session.ranks.from_first("diagnosis", _find_signs(self.session.config, self.rows))
        sign_metrics: Metrics = {}
        for sign, finding in self.signs.items():
            finding_before = signs_before.get(sign, CollapseSign(sign))
            if finding.is_confirmed and not finding_before.is_confirmed:
                assert finding.since is not None
                self.session.console.say(
                    f"warning: {sign} in iterations {finding.since + 1} to {iteration + 1}:"
                    f" {finding.description}; {REMEDY_OF_SIGN[sign]}"
                )
            elif finding_before.is_confirmed and not finding.is_confirmed:
                self.session.console.say(f"{sign} is over in iteration {iteration + 1}")
            sign_metrics[f"diagnostics/{sign}"] = float(finding.is_confirmed)
        if self.session.config.diagnostics.stops:
            sign_metrics["diagnostics/stop"] = float(self.stops_run)
        return sign_metrics

    @property
    def stops_run(self) -> bool:
        """Whether a sign ends the run here. A run that is finished anyway is not stopped."""
        config, finished_iterations = self.session.config, _count_finished(self.rows)
        is_finished = is_over_after(config, self.session.directory, finished_iterations)
        return not is_finished and bool(find_stopping_signs(config.diagnostics, self.signs))

    @property
    def last_good(self) -> int | None:
        """The newest number of finished iterations before any sign: see `diagnostics.find_last_good`."""
        last_iteration = _count_finished(self.rows) - 1
        return find_last_good(self.session.config.diagnostics, self.signs, last_iteration)

    def stop_if_collapsed(self) -> None:
        """Raises Collapsed if enough iterations in a row have shown a sign that may stop the run.

        It is called when the last of these iterations is written, so that the run can resume after it.
        """
        if self.stops_run:
            raise Collapsed(
                _describe_collapse(self.session.config, self.session.directory, self.rows, self.signs)
            )


def refuse_collapsed(config: PolicyIteration, directory: ExperimentDirectory) -> None:
    """Raises Collapsed if a sign of collapse has stopped the run.

    Also raises it if the run showed the sign, and was killed before the sign could stop the run.
    """
    rows = read_metrics_rows(directory, directory.newest_resumable() or 0)
    signs = _find_signs(config, rows)
    if find_stopping_signs(config.diagnostics, signs):
        raise Collapsed(_describe_collapse(config, directory, rows, signs))


def read_last_good(config: PolicyIteration, directory: ExperimentDirectory) -> int | None:
    """Returns the newest number of finished iterations before any sign of collapse; None if no sign may stop
    the run."""
    rows = read_metrics_rows(directory, directory.newest_resumable() or 0)
    return find_last_good(config.diagnostics, _find_signs(config, rows), _count_finished(rows) - 1)


def read_metrics_rows(directory: ExperimentDirectory, finished_iterations: int) -> list[dict[str, Any]]:
    """Returns the rows of the first `finished_iterations`, from the iterations' own files."""
    rows = []
    for i in range(finished_iterations):
        path = directory.iteration_folder(i) / ITERATION_METRICS
        if path.is_file():  # a user may have deleted a damaged one (`METRICS_REMEDY`)
            row = read_record(path, METRICS_REMEDY)
            refuse_misplaced(row, path, i)
            rows.append(row)
    return rows


def _count_finished(rows: list[dict[str, Any]]) -> int:
    """Returns the number of finished iterations."""
    return int(rows[-1]["iteration"]) + 1 if rows else 0


def _find_signs(config: PolicyIteration, rows: list[dict[str, Any]]) -> dict[Sign, CollapseSign]:
    """Returns the signs of collapse after the last of the rows."""
    sampling = config.rollout.sampling
    watched = WatchedRun(config.rollout.needs_engine, None if sampling is None else sampling.max_tokens)
    return diagnose(config.diagnostics, watched, rows)


def _describe_collapse(
    config: PolicyIteration,
    directory: ExperimentDirectory,
    rows: list[dict[str, Any]],
    signs: Mapping[Sign, CollapseSign],
) -> str:
    """Returns why the run is stopped, which weights are good, and how to continue it."""
    finished_iterations = _count_finished(rows)
    reasons = []
    for finding in find_stopping_signs(config.diagnostics, signs):
        assert finding.since is not None  # the iterations that show the sign make it a stopping one
        reasons.append(f"{finding.sign} since iteration {finding.since + 1}: {finding.description}")
    last_good = find_last_good(config.diagnostics, signs, finished_iterations - 1)
    assert last_good is not None  # None only if no sign may stop a run, and here one does
    checkpoints = {number: directory.checkpoint_folder(number) for number in directory.checkpoints()}
    good_weights = describe_good_weights(last_good, checkpoints)  # a text that says where they are
    return (
        f"{directory.path} was stopped after iteration {finished_iterations} of {config.iterations} by"
        f" diagnostics.on_collapse: {'; '.join(reasons)}. {good_weights[0].upper()}{good_weights[1:]}. To"
        f" continue from iteration {finished_iterations} nevertheless, set on_collapse to 'warn', or change"
        " the threshold"
    )
