"""The memory that PyTorch counts on a CPU, and a trainer with random weights to count it of."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from treetune.credit.base import CriticSettings, TrainerScores
from treetune.models.shapes import Shape
from treetune.objectives.further_inputs import teacher_of
from treetune.runtime.machine import Machine
from treetune.runtime.planning.memory import IterationWork, TrainerMemory
from treetune.trainer.base import Trainer
from treetune.vocabulary import Episode, token_array


@dataclass(frozen=True)
class Counted:
    """Bytes: the most that was there at once beyond the beginning, and what has stayed of it."""

    peak: int
    stayed: int


def counted(work: Callable[[], Any]) -> Counted:
    """Of all tensors on the CPU that `work` makes and drops, as PyTorch's profiler reports them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Counted(peak, live)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer, a random model of some shape, and answers that are all as long."""

    name: str
    shape: Shape
    trainer: Trainer
    answers: int
    prompt_tokens: int
    answer_tokens: int
    critic: bool = False
    top_p: float = 1.0

    def planned(self) -> TrainerMemory:
        longest = self.prompt_tokens + self.answer_tokens
        experiment: Any = SimpleNamespace(
            trainer=self.trainer,
            context_length=longest,
            credit=SimpleNamespace(
                needs_critic=self.critic,
                trainer_scores=TrainerScores(),
                critic_settings=CriticSettings() if self.critic else None,
            ),
            rollout=SimpleNamespace(sampling=SimpleNamespace(temperature=1.0, top_p=self.top_p, top_k=-1)),
        )
        work = IterationWork(
            problems=1,
            is_known=True,
            answers=self.answers,
            answer_tokens=self.answer_tokens,
            prompt_tokens=self.prompt_tokens,
            longest=longest,
            longest_answer=self.answer_tokens,
            continuations=0,
            most_continuations=0,
            further_answers=0,
            rows=self.answers,
            steps=1,
            epochs=self.trainer.epochs,
            is_sampled=True,
        )
        return TrainerMemory(experiment, self.shape, Machine(device="cpu", ranks=1, cores=1), work)

    def episodes(self) -> list[Episode]:
        draw = random.Random(0)
        made = []
        for i in range(self.answers):
            prompt = tuple(draw.randrange(self.shape.vocabulary) for _ in range(self.prompt_tokens))
            answer = tuple(draw.randrange(self.shape.vocabulary) for _ in range(self.answer_tokens))
            made.append(
                Episode(
                    prompt_ids=token_array(prompt),
                    response_ids=token_array(answer),
                    trained=np.ones(len(answer), bool),
                    reward=float(i % 2),
                    group=f"p{i // 4}",
                    trajectory=f"p{i // 4}#{i % 4}",
                    policy_version=0,
                    advantages=None if self.critic else np.array([draw.gauss(0, 1) for _ in answer]),
                    behaviour_logprobs=np.full(len(answer), -3.0),
                    teacher_prompt_ids=token_array(prompt) if teacher_of(self.trainer.objective) else None,
                )
            )
        return made

    def measured(self) -> int:
        """Bytes at the peak of an iteration's training, the second, when all states are there."""
        from tests.support.tiny_trainer import critic_of
        from treetune.credit.gae import Gae
        from treetune.models.logprobs import Nucleus
        from treetune.trainer.core import PolicyTrainer
        from treetune.trainer.ranks import Ranks

        trainers: list[PolicyTrainer] = []

        def build() -> None:
            trainers.append(
                PolicyTrainer(
                    self.trainer,
                    lambda: random_model(self.shape, self.trainer.precision),
                    ranks=Ranks.join(deadline_s=60),
                    seed=0,
                    temperature=0.6,
                    iterations=2,
                    **critic_of(Gae() if self.critic else None),
                    nucleus=Nucleus(self.top_p, -1) if self.top_p < 1 else None,
                )
            )

        episodes = self.episodes()
        gc.collect()  # what an earlier case left must not go meanwhile
        there = counted(build).stayed + counted(lambda: trainers[0].train(0, episodes)).stayed
        return there + counted(lambda: trainers[0].train(1, episodes)).peak


def config_of(shape: Shape, **more: Any) -> Any:
    """A model's configuration in transformers, which writes its config.json."""
    import transformers

    kind = "Qwen3" if shape.head_norms else "Qwen2" if shape.biases else "Llama"
    return getattr(transformers, f"{kind}Config")(
        architectures=[f"{kind}ForCausalLM"],
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        **more,
    )


def random_model(shape: Shape, precision: str) -> Any:
    """A model of that shape from transformers; what it says is noise."""
    import torch
    import transformers

    config = config_of(shape, attn_implementation="sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, config.architectures[0])(config)
    return model.to(getattr(torch, precision))
