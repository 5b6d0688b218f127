"""Keeps the engine of a run on the newest weights, and checks by canaries that they arrived."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.engine.base import Canary, Engine, EngineLaunch, Rendezvous, TransferMethod
from treetune.engine.engine import start_engine
from treetune.engine.settings import VllmSettings
from treetune.models.control_tokens import special_tokens
from treetune.runtime.base import PolicyIteration
from treetune.runtime.console import Clock
from treetune.runtime.directory import samples_after
from treetune.runtime.fitting import sized_by_plan
from treetune.runtime.machine import SCORED_WITH_BYTES
from treetune.runtime.session import Session
from treetune.runtime.weights_folder import WeightsFolder
from treetune.trainer.ranks import Ranks
from treetune.vocabulary import Metrics, TokenIds

if TYPE_CHECKING:
    from treetune.trainer.core import PolicyTrainer

CANARY_PROMPTS = 4

Score = Callable[[Sequence[tuple[TokenIds, TokenIds]]], list[list[float]]]
"""Returns the log-probs of each answer's tokens, from prompts and answers."""


class PolicyServer:
    """Holds the engine on the newest weights that somebody samples from; `engine` is None where nobody does.

    Callers wait in `ready` before they sample: for a server that is still starting, and for weights that a
    trainer has offered and that nobody has needed so far.
    """

    def __init__(self, session: Session, engine: Engine | None, folder: WeightsFolder | None) -> None:
        self.engine, self.folder = engine, folder
        self.trainer: PolicyTrainer | None = None
        """The trainer that has the memory in turn with the engine."""
        self._session = session
        self._started = False
        self._offer: tuple[PolicyTrainer, int] | None = None

    @staticmethod
    @contextmanager
    def start(session: Session, *, needed: bool = True, trains: bool = False) -> Iterator[PolicyServer]:
        """Starts the server in the background, on the start model's weights. `trains` says whether a trainer
        is going to offer others: only a trainer can send adapters. Collective.
        """
        if not needed:
            yield PolicyServer(session, None, None)
            return
        config, ranks, directory = session.config, session.ranks, session.directory
        refuse_unreachable_server(config, ranks)
        lora = config.trainer.lora
        with contextlib.ExitStack() as stack:
            sent = lora if trains and lora is not None and lora.send == "adapters" else None
            policy = config.engines.policy
            if isinstance(policy, VllmSettings):
                policy = sized_by_plan(config, policy)
            transfer: TransferMethod = "file"
            if trains:
                transfer, why = policy.transfer_method(
                    device=ranks.device.type, machines=ranks.machines(), adapters=sent is not None
                )
                session.console.say(f"new weights go to the engine by {transfer}: {why}")
            folder = WeightsFolder(session, sent, transfer, in_memory=policy.weights_in_memory)
            stack.callback(folder.remove)
            launch = EngineLaunch(
                weights=folder.write_start(),
                logs=directory.logs if session.purpose == "run" else directory.logs / session.purpose,
                seed=config.seed,
                context_length=config.context_length,
                ranks=Rendezvous(ranks.rank, ranks.world_size, folder.meeting, ranks.barrier),
                device=ranks.device.type,
                end_ids=session.model.codec.end_ids,
                special_ids=special_tokens(session.model.tokenizer),
                trust_remote_code=getattr(config.model, "trust_remote_code", False),
                adapter_rank=sent.rank if sent is not None else None,
                transfer=transfer,
            )
            engine = start_engine(policy, launch)
            stack.callback(engine.close)
            yield PolicyServer(session, engine, folder)

    def ready(self) -> None:
        """Waits until the engine has sampled a token and has the newest weights. Collective."""
        self._wait()
        self._sync()

    def offer(self, trainer: PolicyTrainer, version: int) -> None:
        """Makes the trainer's present weights the newest: the next sample is from them."""
        self._offer = trainer, version

    def update(self, trainer: PolicyTrainer, version: int, clock: Clock) -> Metrics:
        """Offers the trainer's weights after `version` iterations, and puts them into the engine now if
        somebody is going to sample from them. Returns the metrics of that. Collective."""
        self.offer(trainer, version)
        if not samples_after(self._session.config, self._session.directory, version):
            return {}
        with clock.phase("waiting"):
            self._wait()
        with clock.phase("sync"):
            return self._sync()

    def load_checkpoint(self, number: int) -> None:
        """Loads a checkpoint's weights (0: the start weights), where no trainer holds them, verified. Raises
        CheckpointGone. Collective.
        """
        assert self.engine is not None and self.folder is not None
        self._wait()
        if number == self.engine.version:
            return
        with self._session.console.phase(f"weights after iteration {number} into the engine"):
            folder = self.folder.write_stored(number)
            trusted = getattr(self._session.config.model, "trust_remote_code", False)
            score = partial(
                stored_logprobs,
                self._session.ranks,
                folder,
                self._session.temperature,
                trust_remote_code=trusted,
            )
            self.engine.load(folder, number, _canary(self._session, score))
            self.folder.keep_only(number)

    @contextmanager
    def asleep(self, *, weights_follow: bool = False) -> Iterator[None]:
        """Gives the engine's memory to the trainer for a block, if so configured, and outside of it the
        trainer's to the engine. The trainer trains, saves and loads inside; `weights_follow` says that it
        offers others afterwards, whatever happens. Collective."""
        if self.engine is None or self.folder is None:
            yield
            return
        self.engine.wait_settled()
        # Adapters come without the model that they are on.
        keep_weights = not weights_follow or self.folder.adapters is not None
        with self.engine.asleep(keep_weights=keep_weights):
            if self.trainer is not None and self.engine.sleeps:
                self.trainer.reload()
            yield
            if self.trainer is not None and self.engine.sleeps:
                self.trainer.offload()

    def _wait(self) -> None:
        """Waits until the engine has sampled a token."""
        if self.engine is not None and not self._started:
            with self._session.console.phase("waiting for the engine"):
                self.engine.wait_ready()
            self._started = True

    def _sync(self) -> Metrics:
        """Puts offered weights into the live engine, verified."""
        if self.engine is None or self.folder is None or self._offer is None:
            return {}
        (trainer, version), self._offer = self._offer, None
        with self._session.console.phase(f"weights after iteration {version} into the engine"):
            chunks = None
            if self.folder.adapters is not None:
                self.folder.write_adapters(trainer, version)
            else:
                chunks = self.folder.send(trainer, version)
            temperature = self._session.temperature
            canary = _canary(self._session, lambda pairs: trainer.score(pairs, temperature))
            place = self.folder.of(version)
            report = self.engine.load(place, version, canary, chunks)
            self.folder.keep_only(version)
        if report.gave_up:
            self.folder.transfer = "file"
            self._session.console.say(report.gave_up)
        return {
            "engine/canary_gap": report.canary_gap,
            "engine/canary_mean_gap": report.canary_mean_gap,
            "engine/restarts": float(report.restarts),
            **{f"engine/sync_{part}": seconds for part, seconds in report.parts.items()},
        }


def refuse_unreachable_server(config: PolicyIteration, ranks: Ranks) -> None:
    """Raises ValueError where ranks on other machines would share a server, which listens on one alone."""
    machines = sorted(set(ranks.machines()))
    policy = config.engines.policy
    if getattr(policy, "addresses", None) is not None:
        return
    if getattr(policy, "servers", None) == "one" and len(machines) > 1:
        raise ValueError(
            f"engines.policy.servers is 'one', and the ranks are on {len(machines)} machines"
            f" ({', '.join(machines)}): a server listens on its own machine's loopback only; set it"
            " to 'per_rank', or name servers that all reach (engines.policy.addresses)"
        )


# Canaries: samples of the engine, scored by whoever has the weights that it should have


def _canary(session: Session, score: Score) -> Canary:
    """Returns the prompts that the engine answers, and `score`, which the log-probs of its answers are held
    to."""
    return Canary(
        prompts=[session.model.codec.encode_prompt(p) for p in session.train_problems[:CANARY_PROMPTS]],
        score=score,
        tolerance=session.config.engines.policy.tolerance(session.ranks.device.type),
        temperature=session.temperature,
    )


def stored_logprobs(
    ranks: Ranks,
    weights: Path,
    temperature: float,
    pairs: Sequence[tuple[TokenIds, TokenIds]],
    *,
    trust_remote_code: bool = False,
) -> list[list[float]]:
    """Returns the log-probs of each answer's tokens, in float32 on the CPU: the accelerator's memory is the
    engine's. The first rank scores what the servers of all ranks sampled, and what several sampled once.
    Collective."""
    own = [(tuple(map(int, prompt)), tuple(map(int, answer))) for prompt, answer in pairs]
    of_all = dict.fromkeys(itertools.chain.from_iterable(ranks.exchange("samples of a checkpoint", own)))
    scores: dict[Any, list[float]] = {}
    if ranks.is_first and of_all:
        import torch
        from transformers import AutoModelForCausalLM

        # Beyond the limit, a layer's weights are read from the files when it is computed, and dropped then.
        with tempfile.TemporaryDirectory() as aside, torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(
                weights,
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
                device_map="sequential",
                max_memory={"cpu": SCORED_WITH_BYTES},
                offload_folder=aside,  # for weights that are put together of several
            ).eval()
            # All in one batch, so that they are read once. What follows an answer changes nothing before it.
            longest = max(len(prompt) + len(answer) for prompt, answer in of_all)
            ids_BT = torch.tensor([[*p, *a] + [0] * (longest - len(p) - len(a)) for p, a in of_all])
            first = min(len(prompt) for prompt, _ in of_all) - 1
            logits_BTV = model(input_ids=ids_BT, logits_to_keep=longest - first).logits
        for (prompt, answer), logits_TV in zip(of_all, logits_BTV, strict=True):
            begin = len(prompt) - 1 - first
            logprobs_TV = (logits_TV[begin : begin + len(answer)] / temperature).log_softmax(-1)
            scores[prompt, answer] = logprobs_TV.gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
    scores = ranks.from_first("log-probs of a checkpoint", scores)
    return [scores[pair] for pair in own]
