"""Opens the session of a process on an experiment: its ranks, directory, console and start model.

The session is opened first and closed last.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from treetune.contracts import innermost_rollout
from treetune.exceptions import Stopped
from treetune.rollouts.single_turn import adapt_to_fixed_problems
from treetune.runtime.base import PolicyIteration
from treetune.runtime.console import Console, name_iterations
from treetune.runtime.directory import ExperimentDirectory, LockPurpose, is_over_after
from treetune.runtime.manifest import begin_or_resume
from treetune.runtime.several_machines import refuse_machines_that_differ
from treetune.store.files import make_private_folder
from treetune.store.timeline import TIMELINE_SUFFIX, Timeline
from treetune.trainer.ranks import Meeting, Ranks
from treetune.vocabulary import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from treetune.models.logprobs import Nucleus
    from treetune.models.sources import ModelSource


LAST_START_ENDS_WITHIN_S = 120.0
"""The longest that ranks of a requeued job's earlier start may take to end."""

log = logging.getLogger(__name__)


@dataclass
class Session:
    """A process's knowledge of its run: the ranks, the experiment's directory, the console, the start model,
    and how far the run is."""

    config: PolicyIteration
    plain_config: Mapping[str, Any]
    """The same configuration before it was built, in JSON's types, as `config.json` has it."""
    directory: ExperimentDirectory
    ranks: Ranks
    console: Console
    model: StartModel
    purpose: str
    """``run``, ``analysis``, or ``evaluation-`` and a number: different for all running processes of an
    experiment."""
    iteration: int | None = None
    """The iteration that the loop is in."""
    finished_iterations: int = 0
    """The number of finished iterations."""
    checkpointed_iterations: int = 0
    """The number of iterations that the newest checkpoint holds. A killed run repeats the training of those
    after it. Example: with `finished_iterations` 7 and `checkpointed_iterations` 5, iterations 6 and 7."""
    last_row: Mapping[str, Any] = field(default_factory=dict)
    """The metrics of the last finished iteration."""

    @staticmethod
    @contextmanager
    def open(
        config: PolicyIteration, plain_config: Mapping[str, Any], purpose: LockPurpose = "run"
    ) -> Iterator[Session]:
        """Joins the ranks, takes a lock of the experiment, and yields the session. Collective.

        An experiment may have one process that runs it, one that analyses it, and several that evaluate it.

        Args:
            purpose: The purpose for which this process takes the lock: ``run``, ``analysis`` or
                ``evaluation``.
        """
        with contextlib.ExitStack() as stack:
            directory = ExperimentDirectory.of(config)

            def compare_machines(meeting: Meeting) -> None:
                refuse_machines_that_differ(meeting, directory.path, plain_config, share=config.share)

            ranks = Ranks.join(config.rank_deadline, compare_machines)
            stack.callback(ranks.leave)
            numbered_purpose: str = purpose
            remarks: list[str] = []
            # Only the first rank locks: a lock belongs to one process, and the ranks are several.
            if ranks.is_first:
                make_private_folder(directory.path, share=config.share)
                # The lock is held until the stack closes, when the process leaves the experiment.
                if purpose == "evaluation":
                    number = stack.enter_context(directory.hold_evaluator_number())
                    numbered_purpose = f"evaluation-{number}"
                else:
                    stack.enter_context(directory.locked(purpose, patience_for_last_start()))
                if purpose == "run":
                    remarks = begin_or_resume(directory, config, plain_config, ranks.world_size)
            # The other ranks wait here until the first one has the lock.
            numbered_purpose = ranks.from_first("the first rank has the experiment's lock", numbered_purpose)
            # Only the first rank keeps a timeline: all ranks do the same at the same time.
            timeline_file = directory.logs_folder / f"{numbered_purpose}{TIMELINE_SUFFIX}"
            timeline = Timeline(timeline_file if ranks.is_first else None)
            log_file = directory.run_log if ranks.is_first else None
            console = Console(log_file, ranks.is_first, timeline)
            stack.callback(console.close)
            stack.push(console.record_failure)  # called at the end of the block, with its exception
            for remark in remarks:
                console.say(remark)
            _silence_libraries()
            model = StartModel(config, ranks.device)
            session = Session(config, plain_config, directory, ranks, console, model, numbered_purpose)
            try:
                yield session
            except (Stopped, KeyboardInterrupt) as stop:
                console.say(session.describe_end(stop))
                raise

    def describe_end(self, stop: Stopped | KeyboardInterrupt) -> str:
        """Returns the last message of a run that a signal ends: where it was, and what the next start
        repeats."""
        position = ""
        if self.iteration is not None:
            # True if the iteration is finished, and the next one has not begun.
            at_boundary = self.finished_iterations == self.iteration + 1
            if at_boundary:
                position = f" after iteration {self.finished_iterations}"
            else:
                position = f" in iteration {self.iteration + 1}"
        repetition = ""
        if self.finished_iterations > self.checkpointed_iterations:
            last = self.checkpointed_iterations
            repeated = name_iterations(last + 1, self.finished_iterations)
            repetition = f" after iteration {last}, the last checkpoint, and does {repeated} again"
        if isinstance(stop, Stopped) and stop.code != 128 + signal.SIGINT:
            # This may be the launcher's SIGTERM after another rank has failed, and the same command may then
            # fail again. So the message mentions the command only to say which iterations it would repeat.
            continuation = f"; the same command continues{repetition}" if repetition else ""
            return f"ended by {stop.signal_name}{position}{continuation}"
        return f"stopped{position}; the same command continues{repetition}"

    def remaining_iterations(self, start: int) -> Iterator[int]:
        """Yields the iterations from `start` to the end of the run, which a budget may change on the way."""
        iteration = start
        # Iterations count from 0, so `iteration` is also the number of those before it.
        while not is_over_after(self.config, self.directory, iteration):
            self.iteration = iteration
            yield iteration
            iteration += 1

    def for_thread(self) -> Session:
        """Returns a copy for a second thread of each rank, with a process group of these threads.
        Collective."""
        session = copy.copy(self)
        session.train_problems = self.train_problems  # cached here, so that both threads share the list
        session.ranks, session.console = self.ranks.for_thread(), self.console.for_thread()
        return session

    @cached_property
    def train_problems(self) -> list[Problem]:
        """The problems of the training split, without those whose prompts are too long."""
        problems = list(self.config.task.problems("train"))
        max_tokens = self.config.rollout.max_prompt_tokens
        if max_tokens is None:
            return problems
        fitting = [p for p in problems if len(self.model.codec.encode_prompt(p)) <= max_tokens]
        if not fitting:
            # The rollout that has `max_prompt_tokens` may be inside another one, such as `until_mixed`.
            _, key = innermost_rollout(self.config.rollout, "rollout")
            raise ValueError(
                f"all {len(problems)} training problems have prompts of more than {key}.max_prompt_tokens ="
                f" {max_tokens} tokens"
            )
        if len(fitting) < len(problems):
            self.console.say(
                f"{len(problems) - len(fitting)} of {len(problems)} training problems are left out: their"
                f" prompts are longer than max_prompt_tokens = {max_tokens}"
            )
        return fitting

    @property
    def temperature(self) -> float:
        """The temperature of the distribution whose log-probs the trainer computes: the rollout's."""
        sampling = self.config.rollout.sampling
        # At temperature 0 one token has all probability, and the log-probs of all others are minus infinity.
        # The trainer then scores with temperature 1.
        return sampling.temperature if sampling is not None and sampling.temperature > 0 else 1.0

    @property
    def nucleus(self) -> Nucleus | None:
        """The rollout's top-p and top-k, with which the engine cuts the distribution before it samples.

        None if they cut nothing. The trainer's log-probs are of the distribution before the cut.
        """
        from treetune.models.logprobs import Nucleus

        sampling = self.config.rollout.sampling
        if sampling is None or sampling.temperature == 0:
            return None  # nothing is sampled, or always the most probable token
        nucleus = Nucleus(sampling.top_p, sampling.top_k)
        return None if nucleus.is_all else nucleus


def _silence_libraries() -> None:
    """Switches off the progress bars and messages that libraries write to standard error, where they would
    break the console's live line."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.WARNING)


def patience_for_last_start() -> float:
    """Returns how many seconds to wait for the experiment's lock, which this job's previous start may hold.

    SLURM may start a requeued job again while the ranks of its previous start are still ending on a node
    that SLURM had lost.
    """
    return LAST_START_ENDS_WITHIN_S if int(os.environ.get("SLURM_RESTART_COUNT", "0")) else 0.0


class StartModel:
    """The experiment's start model: its tokenizer and codec, and fresh copies of its weights.

    Raises:
        ValueError: Tools are called natively and the model has no chat; a stop string can never be found; or
            tokens were added to a model whose embeddings are not trained.
    """

    def __init__(self, config: PolicyIteration, device: torch.device) -> None:
        from treetune.models.control_tokens import refuse_hidden_stops

        self.source: ModelSource = config.model
        self.tokenizer = self.source.load_tokenizer(config.task.alphabet)
        self.codec = self.source.codec(self.tokenizer)
        # Training and evaluation use the same prompts, so the codec gets the tools of one rollout: the run's
        # or, if that has no tools, the evaluation's. A rollout of demonstrations has none, for example.
        for rollout in (config.rollout, config.evaluation.rollout or config.rollout):
            if tools := adapt_to_fixed_problems(rollout).tools(config.task):
                if self.codec.with_tools is None:
                    raise ValueError("tools are called natively in a chat, and model.chat is null: give one")
                self.codec = self.codec.with_tools(tools)
                break
        # A stop string that contains a special token is refused, since decoded text hides special tokens.
        refuse_hidden_stops(self.tokenizer, config.stop_strings())
        self._config, self._device = config, device
        # Whether the log has said why the model can't be loaded in parts.
        self._has_logged_reason = False
        # An added token's embedding begins as the mean of others, and adapters never change an embedding.
        if config.trainer.lora is not None and (unlearned := self.source.unlearned_tokens()):
            raise ValueError(
                f"model.added_tokens has {', '.join(map(repr, unlearned))}, which the model doesn't know yet,"
                " and trainer.lora trains no embeddings, so they would stay the mean of other tokens: train"
                " all weights (trainer.lora: null), or start from a checkpoint of a run that did"
            )

    def load(self, device: torch.device | None = None) -> PreTrainedModel:
        """Loads a fresh copy in the trainer's precision onto `device` (None: this rank's)."""
        import torch

        from treetune.trainer.deepspeed_model import cast_parameters

        config = self._config
        # A model without files draws its weights with the seed, and makes its tokenizer from the characters
        # of the task (`alphabet`).
        model = self.source.load_model(config.seed, config.task.alphabet)
        self._refuse_too_few_rows(model)
        cast_parameters(model, getattr(torch, config.trainer.precision))
        return model.to(device=device or self._device)

    def load_like(self, source: ModelSource) -> PreTrainedModel:
        """Loads another model of the same tokens, in the trainer's precision onto the CPU.

        Raises:
            ValueError: The model has other tokens.
        """
        import torch

        from treetune.trainer.deepspeed_model import cast_parameters

        alphabet = self._config.task.alphabet  # the task's characters, if the model makes a tokenizer of them
        if source.load_tokenizer(alphabet).get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                "the tokens of the reference, or of the reward model, aren't the start model's: give one with"
                " the same tokenizer"
            )
        model = source.load_model(self._config.seed, alphabet)
        cast_parameters(model, getattr(torch, self._config.trainer.precision))
        return model

    def load_on_cpu(self) -> PreTrainedModel:
        """Loads a fresh copy onto the CPU, to be written or sharded over the ranks."""
        import torch

        return self.load(torch.device("cpu"))

    def load_in_parts(self) -> PreTrainedModel:
        """Returns a fresh copy whose weights stay in their files until they are sharded over the ranks, one
        by one.

        If the model's format doesn't allow that, it is loaded whole onto the CPU, and the log says why once.
        """
        import torch

        from treetune.exceptions import NotInParts

        try:
            model = self.source.load_in_parts(getattr(torch, self._config.trainer.precision))
        except NotInParts as reason:
            if not self._has_logged_reason:
                log.info("each rank reads the whole model into the machine's memory at first: %s", reason)
                self._has_logged_reason = True
            return self.load_on_cpu()
        self._refuse_too_few_rows(model)
        return model

    def load_weights(self) -> tuple[dict[str, Tensor], PretrainedConfig]:
        """Returns a fresh copy of the weights by name, on the CPU, and the model's configuration."""
        from treetune.models.saved_weights import saved_weights

        model = self.load_on_cpu()
        return saved_weights(model), model.config

    def _refuse_too_few_rows(self, model: PreTrainedModel) -> None:
        """Raises ValueError if the embeddings have fewer rows than the tokenizer has tokens."""
        rows = model.get_input_embeddings().num_embeddings
        if len(self.tokenizer) > rows:
            raise ValueError(
                f"the tokenizer has {len(self.tokenizer)} tokens, and the model embeds only {rows}: they do"
                " not belong together, or tokens were added and the model's embeddings not resized"
            )
