"""Canaries: the engine's own samples, scored by whoever has the weights that it should have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from treetune.inference.base import Canary
from treetune.vocabulary import TokenIds

if TYPE_CHECKING:
    from treetune.runtime.session import Session
    from treetune.trainers.core import PolicyTrainer

PROMPTS = 4

Score = Callable[[Sequence[tuple[TokenIds, TokenIds]]], list[list[float]]]


def trainers_canary(session: Session, trainer: PolicyTrainer) -> Canary:
    """Scored by the trainer, on all ranks."""
    temperature = session.temperature
    return _canary(session, lambda pairs: trainer.score(pairs, temperature))


def stored_canary(session: Session, weights: Path) -> Canary:
    """Scored by the weights in a folder of Hugging Face's format, where no trainer holds them."""
    return _canary(session, partial(stored_logprobs, weights, session.temperature))


def _canary(session: Session, score: Score) -> Canary:
    return Canary(
        prompts=[session.model.codec.encode_prompt(p) for p in session.train_problems[:PROMPTS]],
        score=score,
        tolerance=session.config.engines.policy.tolerance(session.ranks.device.type),
        temperature=session.temperature,
    )


def stored_logprobs(
    weights: Path, temperature: float, pairs: Sequence[tuple[TokenIds, TokenIds]]
) -> list[list[float]]:
    """Log-probs of each answer's tokens, in float32 on the CPU: the accelerator's memory is the engine's."""
    if not pairs:
        return []
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    found = []
    for prompt, answer in pairs:
        ids_1T = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits_TV = model(input_ids=ids_1T).logits[0, len(prompt) - 1 : -1]
        logprobs_TV = (logits_TV / temperature).log_softmax(-1)
        found.append(logprobs_TV.gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist())
    return found
