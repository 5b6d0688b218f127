"""Everything that is alive during a run, built in the order in which it can overlap."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.episode_generators.base import GenerationContext, Rollout
from treetune.episode_generators.credit.gae import Gae
from treetune.inference.base import Canary, Engine, SyncReport
from treetune.inference.journal import JournaledEngine
from treetune.runtime.base import PolicyIteration
from treetune.runtime.console import Console
from treetune.runtime.directory import ExperimentDirectory, Lock
from treetune.runtime.handover import START_MODEL, export, sent_adapters, write_start
from treetune.runtime.manifest import begin, changed_modules
from treetune.tasks.base import Task
from treetune.tasks.graders.pool import GraderPool
from treetune.trainers.base import DeepSpeedTrainer
from treetune.trainers.ranks import Ranks
from treetune.vocabulary import Metrics, Problem, TextCodec

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import (
        GenerationConfig,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

    from treetune.trainers.core import PolicyTrainer

CANARY_PROMPTS = 4


@dataclass
class Run:
    """One process's hold on a run. Make it with `opened`, which also takes it down.

    `trainer` is None where nothing is trained (evaluation, generation alone), `engine` where
    nothing samples.
    """

    config: PolicyIteration
    plain_config: Mapping[str, Any]
    directory: ExperimentDirectory
    ranks: Ranks
    console: Console
    tokenizer: PreTrainedTokenizerBase
    codec: TextCodec
    grader: GraderPool
    weights_folder: Path
    engine: Engine | None = None
    trainer: PolicyTrainer | None = None
    trains: bool = False
    """Whether there is a trainer, or will be one: the engine is started first."""
    last_row: Mapping[str, Any] = field(default_factory=dict)
    """The line of the last finished iteration."""
    _engine_ready: bool = False

    @cached_property
    def train_problems(self) -> list[Problem]:
        """Those that are trained on: the split's, without those whose prompts are too long."""
        problems = list(self.config.task.problems("train"))
        most = self.config.rollout.max_prompt_tokens
        if most is None:
            return problems
        kept = [p for p in problems if len(self.codec.encode_prompt(p.prompt)) <= most]
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

    def news(self) -> str:
        """A few words for the live line: the engine's speed, and how the last iteration went."""
        words = []
        if self.engine is not None and self.engine.tokens_per_second:
            words.append(f"{self.engine.tokens_per_second:.0f} tokens/s")
        for name, key, form in (
            ("reward", "episodes/reward", "{:.3f}"),
            ("unfinished", "episodes/unfinished", "{:.0%}"),
            ("KL", "train/kl", "{:.4f}"),
        ):
            if key in self.last_row:
                words.append(f"{name} {form.format(self.last_row[key])}")
        return "  ".join(words)

    # Models

    def load_model(self) -> PreTrainedModel:
        """A fresh copy of the start model, in the trainer's precision, on this rank's device."""
        model = self.config.model.load_model(self.config.seed, self.config.task.alphabet)
        from treetune.trainers.optimisation import torch_dtype

        rows = model.get_input_embeddings().num_embeddings
        if len(self.tokenizer) > rows:
            raise ValueError(
                f"the tokenizer has {len(self.tokenizer)} tokens, and the model embeds only {rows}: they do"
                " not belong together, or tokens were added and the model's embeddings not resized"
            )
        precision = getattr(self.config.trainer, "precision", "float32")
        return model.to(device=self.ranks.device, dtype=torch_dtype(precision))

    def start_weights(self) -> tuple[dict[str, Tensor], PretrainedConfig]:
        """The start model's weights by name, and its architecture."""
        model = self.load_model()
        return dict(model.named_parameters()), model.config

    # Sampling

    def context(
        self,
        rollout: Rollout,
        *,
        seed: int,
        iteration: int,
        journal: Path | None,
        journals: Sequence[Path] = (),
        progress: Callable[[int, int], None] = lambda done, total: None,
        further: Callable[[], Sequence[Problem]] = tuple,
        task: Task | None = None,
        grader: GraderPool | None = None,
        memory: dict[str, Any] | None = None,
    ) -> GenerationContext:
        """What rollout and credit are lent. With `journal`, finished requests outlive a crash;
        `journals` have what others finished; `further` are the context's further problems. `task` and its
        `grader` are the run's unless given; `memory` is shaping's.
        """
        engine = self.engine
        if engine is not None and journal is not None:
            engine = JournaledEngine(engine, journal, journals)
        return GenerationContext(
            task=task or self.config.task,
            engine=engine,
            grader=grader or self.grader,
            codec=self.codec,
            seed=seed,
            iteration=iteration,
            context_length=self.config.context_length,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            exchange=self.ranks.exchange,
            progress=progress,
            further_problems=further,
            say=self.console.say,
            sampling=rollout.sampling,
            unfinished_reward=rollout.unfinished_reward,
            rollout=rollout.sampler,
            memory={} if memory is None else memory,
        )

    def wait_for_engine(self) -> None:
        """Until the engine has sampled a token; at once where it has before."""
        if self.engine is not None and not self._engine_ready:
            with self.console.phase("waiting for the engine"):
                self.engine.wait_ready()
            self._engine_ready = True

    def engine_asleep(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.engine is None else self.engine.asleep()

    # Weights

    def sync(self, version: int) -> Metrics:
        """The trainer's weights into the live engine, verified. Collective."""
        if self.engine is None or self.trainer is None:
            return {}
        folder = self.weights_folder / f"{version:04d}"
        export(self, folder)
        report = self._load(folder, version)
        if self.ranks.is_first:
            self._drop_older_weights(folder)
        return {
            "engine/canary_gap": report.canary_gap,
            "engine/restarts": float(report.restarts),
            **{f"engine/sync_{part}": seconds for part, seconds in report.parts.items()},
        }

    def load_checkpoint(self, number: int) -> None:
        """A checkpoint's weights (0: the start weights) into the live engine, where no trainer holds
        them. Raises CheckpointGone where a run that goes on has deleted it meanwhile. Collective.
        """
        assert self.engine is not None
        self.wait_for_engine()
        if number == self.engine.version:
            return
        folder = self.weights_folder / f"{number:04d}"
        there = True
        if self.ranks.is_first:
            from treetune.models.export import read_policy, write_for_engine

            try:
                if number == 0:
                    weights, architecture = self.start_weights()
                else:
                    weights, architecture = read_policy(self.directory.checkpoint(number) / "policy")
                write_for_engine(weights, architecture, self.tokenizer, folder)
            except (OSError, ValueError):
                if number == 0 or number in self.directory.checkpoints():
                    raise
                there = False
        if not self.ranks.from_first("checkpoint written for the engine", there):
            raise CheckpointGone(f"checkpoint {number} of {self.directory.path} was deleted meanwhile")
        self.engine.load(folder, number)
        if self.ranks.is_first:
            self._drop_older_weights(folder)

    def _drop_older_weights(self, newest: Path) -> None:
        """The engine may restart from the newest weights; older ones are only in the way."""
        for older in self.weights_folder.iterdir():
            if older != newest and older.name != START_MODEL:
                shutil.rmtree(older, ignore_errors=True)

    def _load(self, folder: Path, version: int) -> SyncReport:
        assert self.engine is not None and self.trainer is not None
        prompts = [self.codec.encode_prompt(p.prompt) for p in self.train_problems[:CANARY_PROMPTS]]
        trainer, temperature = self.trainer, self.sampling_temperature
        canary = Canary(
            prompts=prompts,
            score=lambda pairs: trainer.score(pairs, temperature),
            tolerance=self.config.engine.tolerance(self.ranks.device.type),
            temperature=temperature,
        )
        return self.engine.load(folder, version, canary)

    @property
    def sampling_temperature(self) -> float:
        sampling = self.config.rollout.sampling
        # At temperature 0 the distribution is a point; the trainer scores the untempered one.
        return sampling.temperature if sampling is not None and sampling.temperature > 0 else 1.0

    @property
    def policy_model(self) -> PreTrainedModel:
        """The model that is trained; under ZeRO-3 its weights are shards."""
        assert self.trainer is not None
        return self.trainer.policy.module.model

    @property
    def generation_config(self) -> GenerationConfig | None:
        """How the model says that it is sampled from, with the tokens that end an answer here."""
        described = copy.deepcopy(self.policy_model.generation_config)
        if described is not None:
            described.eos_token_id = list(self.codec.end_ids)
            described.pad_token_id = self.tokenizer.pad_token_id
        return described


class CheckpointGone(ValueError):
    """A run that goes on keeps not every checkpoint."""


@contextmanager
def opened(
    config: PolicyIteration,
    plain_config: Mapping[str, Any],
    *,
    with_engine: bool,
    with_trainer: bool,
    lock: Lock = "run",
) -> Iterator[Run]:
    """A run, ready to work; on the way out everything that it started is ended. `lock` says what
    for: several processes may measure it, while one changes it and one looks into it.

    The server starts in the background before the trainer is built, on the start model's weights,
    and is waited for by whoever samples first.
    """
    with contextlib.ExitStack() as stack:
        ranks = Ranks.join(config.rank_deadline)
        stack.callback(ranks.leave)
        directory = ExperimentDirectory(Path(config.directory) / config.experiment_name)
        place: str = lock
        if ranks.is_first and lock == "evaluation":
            place = f"evaluation-{stack.enter_context(directory.evaluator())}"
        elif ranks.is_first:
            stack.enter_context(directory.locked(lock))
            if lock == "run":
                begin(directory, config, plain_config)
        place = ranks.from_first("the experiment directory is ours", place)
        console = Console(directory.logs / "run.log" if ranks.is_first else None, ranks.is_first)
        stack.callback(console.close)
        stack.push(console.record_failure)
        if ranks.is_first and lock == "run" and (changed := changed_modules(directory)):
            console.say(
                f"your own code has changed since this experiment began ({', '.join(changed)}): from here on"
                " it is as it is now"
            )
        quiet_libraries()
        tokenizer = config.model.load_tokenizer(config.task.alphabet)
        codec = config.model.codec(tokenizer)
        refuse_unlearned_tokens(config)
        grader = stack.enter_context(
            GraderPool(config.task.grader, workers=config.grader_workers, deadline=config.grader_deadline)
        )
        folder = weights_folder(directory.path, place, ranks)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        run = Run(config, plain_config, directory, ranks, console, tokenizer, codec, grader, folder)
        run.trains = with_trainer
        if with_engine:
            refuse_unreachable_server(config, ranks)
            start = folder / "0000"
            if ranks.is_first:
                write_start(run, start)
            ranks.barrier("start weights written for the engine")
            run.engine = config.engine.start(
                start,
                directory.logs if lock == "run" else directory.logs / place,
                seed=config.seed,
                context_length=config.context_length,
                rank=ranks.rank,
                world_size=ranks.world_size,
                rendezvous=folder,
                barrier=ranks.barrier,
                device=ranks.device.type,
                end_ids=codec.end_ids,
                adapter_rank=adapters.rank if (adapters := sent_adapters(run)) is not None else None,
            )
            stack.callback(run.engine.close)
        if with_trainer:
            from treetune.trainers.core import PolicyTrainer

            assert isinstance(config.trainer, DeepSpeedTrainer)
            run.trainer = PolicyTrainer(
                config.trainer,
                run.load_model,
                ranks=ranks,
                seed=config.seed,
                temperature=run.sampling_temperature,
                iterations=config.iterations,
                gae=config.credit if isinstance(config.credit, Gae) else None,
                restarts=config.restart == "every_iteration",
            )
        yield run


def refuse_unlearned_tokens(config: PolicyIteration) -> None:
    """Raises ValueError where tokens are new to a model whose embeddings are not trained."""
    if getattr(config.trainer, "lora", None) is None:
        return
    if unlearned := config.model.unlearned_tokens():
        raise ValueError(
            f"model.added_tokens has {', '.join(map(repr, unlearned))}, which the model doesn't know yet, and"
            " trainer.lora trains no embeddings, so they would stay the mean of other tokens: train all"
            " weights (trainer.lora: null), or start from a checkpoint of a run that did"
        )


def refuse_unreachable_server(config: PolicyIteration, ranks: Ranks) -> None:
    """Raises ValueError where ranks on other machines would share a server, which listens on one alone."""
    machines = sorted(set(ranks.machines()))
    if getattr(config.engine, "servers", None) == "one" and len(machines) > 1:
        raise ValueError(
            f"engine.servers is 'one', and the ranks are on {len(machines)} machines ({', '.join(machines)}):"
            " a server listens on its own machine's loopback only; set it to 'per_rank'"
        )


def weights_folder(experiment: Path, purpose: str, ranks: Ranks) -> Path:
    """Where weights wait for the engines, and these agree: in memory where all ranks are on one machine
    that has /dev/shm, and otherwise beside the experiment, which all of them see.

    The name is the experiment's, so what a killed run left there is cleared by the next one.
    """
    machines = ranks.machines()
    place = f"{experiment.resolve()} {purpose}"
    if purpose != "run":  # evaluators on several machines may share the experiment's file system
        place += f" {machines[0]}"
    name = "treetune-" + hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
    memory = Path("/dev/shm")
    folder = (memory if len(set(machines)) == 1 and os.access(memory, os.W_OK) else experiment) / name
    if ranks.is_first:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    ranks.barrier("the weights folder is empty")
    return folder


def quiet_libraries() -> None:
    """Libraries report their own progress on standard error, in the middle of our live line."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.WARNING)
