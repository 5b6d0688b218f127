"""One process's hold on an experiment: opened first, closed last."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.contracts import RANKS_MEET
from treetune.processes.lifetime import TERMINATED, Stopped
from treetune.runtime.base import PolicyIteration
from treetune.runtime.console import Console
from treetune.runtime.directory import ExperimentDirectory, Lock
from treetune.runtime.due import is_last
from treetune.runtime.manifest import begin
from treetune.runtime.start_model import StartModel
from treetune.store.files import own_folder
from treetune.store.timeline import SUFFIX, Timeline
from treetune.trainers.ranks import Meeting, Ranks
from treetune.vocabulary import Problem

if TYPE_CHECKING:
    from treetune.models.logprobs import Nucleus


LAST_START_ENDS_WITHIN_S = 120.0


@dataclass
class Session:
    """Who this process is among the ranks, the experiment's directory, the console, the start model.

    `purpose` names what the process is here for, apart from all others that are here at the same time:
    ``run``, ``analysis``, or ``evaluation-`` and a number. `iteration` is the one at work, where the loop
    is, and `last_row` the line of the last finished one.
    """

    config: PolicyIteration
    plain_config: Mapping[str, Any]
    directory: ExperimentDirectory
    ranks: Ranks
    console: Console
    model: StartModel
    purpose: str
    iteration: int | None = None
    last_row: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    @contextmanager
    def open(
        config: PolicyIteration, plain_config: Mapping[str, Any], lock: Lock = "run"
    ) -> Iterator[Session]:
        """Joins the ranks and takes the lock: several processes may measure a run, while one changes it
        and one looks into it. Collective.
        """
        with contextlib.ExitStack() as stack:
            directory = ExperimentDirectory(Path(config.directory) / config.experiment_name)

            def agree(meeting: Meeting) -> None:
                for check in RANKS_MEET:
                    check(meeting, directory.path, plain_config, share=config.share)

            ranks = Ranks.join(config.rank_deadline, agree)
            stack.callback(ranks.leave)
            purpose: str = lock
            remarks: list[str] = []
            if ranks.is_first:
                own_folder(directory.path, share=config.share)
            if ranks.is_first and lock == "evaluation":
                purpose = f"evaluation-{stack.enter_context(directory.evaluator())}"
            elif ranks.is_first:
                stack.enter_context(directory.locked(lock, patience_for_last_start()))
                if lock == "run":
                    remarks = begin(directory, config, plain_config, ranks.world_size)
            purpose = ranks.from_first("the experiment directory is ours", purpose)
            # All ranks do the same at the same time: the first one says when.
            times = Timeline(directory.logs / f"{purpose}{SUFFIX}" if ranks.is_first else None)
            log = directory.logs / "run.log" if ranks.is_first else None
            console = Console(log, ranks.is_first, times)
            stack.callback(console.close)
            stack.push(console.record_failure)
            for remark in remarks:
                console.say(remark)
            quiet_libraries()
            model = StartModel(config, ranks.device)
            session = Session(config, plain_config, directory, ranks, console, model, purpose)
            try:
                yield session
            except (Stopped, KeyboardInterrupt) as stop:
                where = "" if session.iteration is None else f" in iteration {session.iteration + 1}"
                if isinstance(stop, Stopped) and stop.code == TERMINATED:
                    console.say(f"ended by SIGTERM{where}")  # also the launcher's, where another rank failed
                else:
                    console.say(f"stopped{where}; the same command continues")
                raise

    def remaining_iterations(self, start: int) -> Iterator[int]:
        """Those that the experiment still lacks, after `start`."""
        iteration = start
        while not is_last(self.config, self.directory, iteration):
            self.iteration = iteration
            yield iteration
            iteration += 1

    def aside(self) -> Session:
        """The same one for a second thread of each rank, whose meetings are their own. Collective."""
        self.train_problems  # noqa: B018  made once for both
        session = copy.copy(self)
        session.ranks, session.console = self.ranks.for_thread(), self.console.aside()
        return session

    @cached_property
    def train_problems(self) -> list[Problem]:
        """Those that are trained on: the split's, without those whose prompts are too long."""
        problems = list(self.config.task.problems("train"))
        most = self.config.rollout.max_prompt_tokens
        if most is None:
            return problems
        kept = [p for p in problems if len(self.model.codec.encode_prompt(p)) <= most]
        if not kept:
            raise ValueError(
                f"all {len(problems)} training problems have prompts of more than rollout.max_prompt_tokens"
                f" = {most} tokens"
            )
        if len(kept) < len(problems):
            self.console.say(
                f"{len(problems) - len(kept)} of {len(problems)} training problems are left out: their"
                f" prompts are longer than max_prompt_tokens = {most}"
            )
        return kept

    @property
    def temperature(self) -> float:
        """Of the distribution whose log-probs the trainer computes: the rollout's."""
        sampling = self.config.rollout.sampling
        # At temperature 0 the distribution is a point; the trainer scores the untempered one.
        return sampling.temperature if sampling is not None and sampling.temperature > 0 else 1.0

    @property
    def nucleus(self) -> Nucleus | None:
        """What the rollout's top-p and top-k leave of that distribution; None where they leave it whole."""
        from treetune.models.logprobs import Nucleus

        sampling = self.config.rollout.sampling
        if sampling is None or sampling.temperature == 0:
            return None
        nucleus = Nucleus(sampling.top_p, sampling.top_k)
        return None if nucleus.is_all else nucleus


def patience_for_last_start() -> float:
    """How long (seconds) the ranks of this job's last start may take to end: SLURM may queue a job again
    while a node that it lost still ends them."""
    return LAST_START_ENDS_WITHIN_S if int(os.environ.get("SLURM_RESTART_COUNT", "0")) else 0.0


def quiet_libraries() -> None:
    """Libraries report their own progress on standard error, in the middle of our live line."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.WARNING)
