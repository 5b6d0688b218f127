"""Keeps the engine of a run on the newest weights, and verifies by canaries that they arrived.

A canary is a small sample: the engine answers a few prompts with the new weights, and the process that has
these weights computes the log-probs of the answers itself. If the two differ by more than a tolerance, the
engine has other weights.

::

    trainer            PolicyServer                      engine
    ───────            ─────────────────────────         ─────────────────────────
    train(i)
       │  update(i+1)
       ├──────────────►  offer: remembers the trainer
       │                 _sync, if something will be sampled:
       │                   folder.send: chunks  ───────►  loads weights i+1
       │                   canary prompts  ────────────►  samples answers
       │  score answers  ◄────────────────────────────    log-probs
       ├──────────────►  compares: within tolerance
    train(i+1)
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.engine.base import Canary, Engine, EngineLaunch, Rendezvous, TransferMethod
from treetune.engine.engine import start_engine
from treetune.engine.settings import VllmSettings
from treetune.models.control_tokens import special_tokens
from treetune.runtime.base import PolicyIteration
from treetune.runtime.console import Clock
from treetune.runtime.directory import will_sample_from
from treetune.runtime.fitting import size_engine
from treetune.runtime.machine import SCORED_WITH_BYTES
from treetune.runtime.session import Session
from treetune.runtime.weights_folder import WeightsFolder
from treetune.trainer.ranks import Ranks
from treetune.vocabulary import Metrics, TokenIds

if TYPE_CHECKING:
    from treetune.trainer.core import PolicyTrainer

CANARY_PROMPTS = 4
"""The number of training problems that the canary samples an answer to."""

LogprobFunction = Callable[[Sequence[tuple[TokenIds, TokenIds]]], list[list[float]]]
"""Computes the log-probs of each answer's tokens, from pairs (prompt, answer)."""


class PolicyServer:
    """Keeps the engine on the newest weights; `engine` is None in a run that samples nothing.

    Call `wait_until_ready` before sampling. It waits for an engine that is still starting, and loads weights
    that a trainer has offered and that weren't needed so far.
    """

    def __init__(self, session: Session, engine: Engine | None, folder: WeightsFolder | None) -> None:
        self.engine, self.folder = engine, folder
        self.trainer: PolicyTrainer | None = None
        """The trainer that uses the accelerator's memory in turn with the engine."""
        self._session = session
        self._has_started = False
        self._offer: tuple[PolicyTrainer, int] | None = None
        """The trainer with the newest weights and their version, if the engine doesn't have them yet."""

    @staticmethod
    @contextmanager
    def start(session: Session, *, needs_engine: bool = True, trains: bool = False) -> Iterator[PolicyServer]:
        """Starts the engine in the background, on the start model's weights. Collective.

        Args:
            needs_engine: False starts no engine.
            trains: Whether a trainer will offer new weights.
        """
        if not needs_engine:
            yield PolicyServer(session, engine=None, folder=None)
            return
        config, ranks, directory = session.config, session.ranks, session.directory
        refuse_unreachable_server(config, ranks)
        lora = config.trainer.lora
        with contextlib.ExitStack() as stack:
            # Only a trainer has adapters to send; checkpoints hold whole weights.
            sends_adapters = trains and lora is not None and lora.send == "adapters"
            adapters = lora if sends_adapters else None
            policy = config.engines.policy
            if isinstance(policy, VllmSettings):
                policy = size_engine(config, policy)
            transfer: TransferMethod = "file"
            if trains:
                transfer, reason = policy.transfer_method(
                    device=ranks.device.type, machines=ranks.machines(), adapters=sends_adapters
                )
                session.console.note(f"new weights go to the engine by {transfer}: {reason}")
            folder = WeightsFolder(session, adapters, transfer, in_memory=policy.weights_in_memory)
            stack.callback(folder.remove)
            logs_folder = directory.logs_folder
            if session.purpose != "run":
                logs_folder /= session.purpose
            launch = EngineLaunch(
                weights=folder.write_start(),
                logs=logs_folder,
                seed=config.seed,
                context_length=config.context_length,
                ranks=Rendezvous(ranks.rank, ranks.world_size, folder.meeting, ranks.barrier),
                device=ranks.device.type,
                end_ids=session.model.codec.end_ids,
                special_ids=special_tokens(session.model.tokenizer),
                trust_remote_code=getattr(config.model, "trust_remote_code", False),
                adapter_rank=adapters.rank if adapters is not None else None,
                transfer=transfer,
                trains=trains,
            )
            engine = start_engine(policy, launch)
            stack.callback(engine.close)
            yield PolicyServer(session, engine, folder)

    def wait_until_ready(self) -> None:
        """Waits until the engine has started and has the newest weights. Collective."""
        self._wait_for_start()
        self._sync()

    def offer(self, trainer: PolicyTrainer, version: int) -> None:
        """Makes the trainer's present weights the newest, which the next `wait_until_ready` loads into the
        engine."""
        self._offer = trainer, version

    def update(self, trainer: PolicyTrainer, version: int, clock: Clock) -> Metrics:
        """Offers the trainer's weights after `version` iterations, and loads them into the engine now if a
        rollout or an evaluation will sample from them. Returns the metrics of loading them. Collective."""
        self.offer(trainer, version)
        if not will_sample_from(self._session.config, self._session.directory, version):
            return {}
        with clock.phase("waiting"):
            self._wait_for_start()
        with clock.phase("sync"):
            return self._sync()

    def load_checkpoint(self, number: int) -> None:
        """Loads the weights of a checkpoint (0: the start weights) into the engine, and verifies them.
        Collective.

        Raises:
            CheckpointGone: The checkpoint has been deleted.
        """
        assert self.engine is not None and self.folder is not None
        self._wait_for_start()
        if number == self.engine.version:
            return
        with self._session.console.phase(f"weights after iteration {number} into the engine"):
            folder = self.folder.write_stored(number)
            # The engine's log-probs are verified on a few sampled answers (the canary). No trainer has these
            # weights, so the answers are scored with the weights' files.
            trusted = getattr(self._session.config.model, "trust_remote_code", False)
            score = partial(
                compute_stored_logprobs,
                self._session.ranks,
                folder,
                self._session.temperature,
                trust_remote_code=trusted,
            )
            self.engine.load(folder, number, _make_canary(self._session, score))
            self.folder.keep_only(number)

    @contextmanager
    def asleep(self, *, weights_follow: bool = False) -> Iterator[None]:
        """Lets the engine sleep for a block in which the trainer needs the accelerator's memory, if so
        configured. Outside of such blocks the engine has the memory. Collective.

        Args:
            weights_follow: Whether the trainer will offer new weights after the block. The engine may then
                drop its own.
        """
        if self.engine is None or self.folder is None:
            yield
            return
        # While a server starts, it sizes its cache by the free memory. The trainer must not use more or less
        # memory meanwhile.
        self.engine.wait_settled()
        # An engine that is sent adapters keeps the model that they are added to.
        keep_weights = not weights_follow or self.folder.adapters is not None
        with self.engine.asleep(keep_weights=keep_weights):
            # An engine that sleeps takes turns with the trainer: whenever it is awake, the optimiser, the
            # gradients and the critic are on the CPU.
            if self.trainer is not None and self.engine.sleeps:
                self.trainer.reload()
            yield
            if self.trainer is not None and self.engine.sleeps:  # the block may have made the trainer
                self.trainer.offload()

    def _wait_for_start(self) -> None:
        """Waits until the engine has sampled a token."""
        if self.engine is not None and not self._has_started:
            with self._session.console.phase("waiting for the engine"):
                self.engine.wait_ready()
            self._has_started = True

    def _sync(self) -> Metrics:
        """Loads offered weights into the engine, and verifies them by a canary: the engine answers a few
        prompts, and its log-probs of these answers must equal the trainer's."""
        if self.engine is None or self.folder is None or self._offer is None:
            return {}
        trainer, version = self._offer
        self._offer = None
        with self._session.console.phase(f"weights after iteration {version} into the engine"):
            chunks = None  # None: the engine reads the files in the version's folder
            if self.folder.adapters is not None:
                self.folder.write_adapters(trainer, version)
            else:
                chunks = self.folder.send(trainer, version)
            temperature = self._session.temperature
            canary = _make_canary(self._session, lambda pairs: trainer.score(pairs, temperature))
            report = self.engine.load(self.folder.of(version), version, canary, chunks)
            self.folder.keep_only(version)
        if report.gave_up:
            # The faster transfer failed, and the weights were loaded from files, as all later ones are.
            self.folder.transfer = "file"
            self._session.console.say(report.gave_up)
        return {
            "engine/canary_gap": report.canary_gap,
            "engine/canary_mean_gap": report.canary_mean_gap,
            "engine/restarts": float(report.restarts),
            **{f"engine/sync_{part}": seconds for part, seconds in report.parts.items()},
        }


def refuse_unreachable_server(config: PolicyIteration, ranks: Ranks) -> None:
    """Raises ValueError if ranks on several machines would share a server that only one of them can reach."""
    machines = sorted(set(ranks.machines()))
    policy = config.engines.policy
    if getattr(policy, "addresses", None) is not None:
        return  # the user has started these servers
    if getattr(policy, "servers", None) == "one" and len(machines) > 1:
        raise ValueError(
            f"engines.policy.servers is 'one', and the ranks are on {len(machines)} machines"
            f" ({', '.join(machines)}). A server listens only on its own machine's loopback: set it to"
            " 'per_rank', or use servers that all machines can reach (engines.policy.addresses)"
        )


# Canaries


def _make_canary(session: Session, score: LogprobFunction) -> Canary:
    """Returns a canary, which checks the engine's weights.

    The engine answers a few prompts. Its log-probs of these answers must equal those that `score` computes.
    """
    return Canary(
        prompts=[session.model.codec.encode_prompt(p) for p in session.train_problems[:CANARY_PROMPTS]],
        score=score,
        tolerance=session.config.engines.policy.tolerance(session.ranks.device.type),
        temperature=session.temperature,
    )


def compute_stored_logprobs(
    ranks: Ranks,
    weights: Path,
    temperature: float,
    pairs: Sequence[tuple[TokenIds, TokenIds]],
    *,
    trust_remote_code: bool = False,
) -> list[list[float]]:
    """Computes the log-probs of each answer's tokens with stored weights. Collective.

    The first rank does it for the answers of all ranks, in float32 on the CPU, since the engine has the
    accelerator's memory.

    Args:
        weights: The folder of the model.
        pairs: The prompts and answers of this rank's server.
    """
    pairs_of_rank = [(tuple(map(int, prompt)), tuple(map(int, answer))) for prompt, answer in pairs]
    pairs_by_rank = ranks.exchange("samples of a checkpoint", pairs_of_rank)
    # Each pair is scored once: all ranks use the same prompts, and their servers often give the same answers.
    all_pairs = list(dict.fromkeys(itertools.chain.from_iterable(pairs_by_rank)))
    scores: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}  # by prompt and answer
    if ranks.is_first and all_pairs:
        import torch
        from transformers import AutoModelForCausalLM

        # A model larger than SCORED_WITH_BYTES is computed layer by layer: the weights of a layer are read
        # when it is computed, and dropped after it. All answers are one batch, so that this happens once.
        with tempfile.TemporaryDirectory() as offload_folder, torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(
                weights,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                device_map="sequential",
                max_memory={"cpu": SCORED_WITH_BYTES},
                offload_folder=offload_folder,  # gets weights that are merged from several ones in the files
            ).eval()
            # The rows are padded on the right, which changes no logits of prompt and answer.
            longest = max(len(prompt) + len(answer) for prompt, answer in all_pairs)
            rows = []
            for prompt, answer in all_pairs:
                padding = [0] * (longest - len(prompt) - len(answer))
                rows.append([*prompt, *answer, *padding])
            # Logits before the last token of the shortest prompt don't predict a token of any answer.
            first_position = min(len(prompt) for prompt, _ in all_pairs) - 1
            n_positions = longest - first_position
            logits_BTV = model(input_ids=torch.tensor(rows), logits_to_keep=n_positions).logits
        for (prompt, answer), logits_TV in zip(all_pairs, logits_BTV, strict=True):
            # The last token of the prompt predicts the first one of the answer.
            begin = len(prompt) - 1 - first_position
            logprobs_TV = (logits_TV[begin : begin + len(answer)] / temperature).log_softmax(-1)
            ids_T1 = torch.tensor(answer)[:, None]
            scores[prompt, answer] = logprobs_TV.gather(-1, ids_T1)[:, 0].tolist()
    scores = ranks.from_first("log-probs of a checkpoint", scores)
    return [scores[pair] for pair in pairs_of_rank]
