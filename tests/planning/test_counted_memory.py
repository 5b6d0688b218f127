"""Plans of a trainer on a processor beside what PyTorch counts while it trains."""

from __future__ import annotations

import pytest

from tests.support.peak_memory import Case
from treetune.models.lora import Lora
from treetune.models.shapes import Shape
from treetune.trainers.base import Trainer
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient

WITHIN = 0.10

TINY = Shape(
    hidden=128,
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=32,
    intermediate=384,
    vocabulary=64,
    tied=False,
    source="",
)
WIDE = Shape(
    hidden=128, layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=256, vocabulary=4000, tied=True,
    source="", head_norms=True,
)  # fmt: skip
MUCH_VOCABULARY = Shape(
    hidden=256, layers=2, heads=4, kv_heads=4, head_dim=64, intermediate=512, vocabulary=16_000, tied=False,
    source="",
)  # fmt: skip
"""The head has most of the weights, and beside adapters no gradient."""

CASES = {
    "padded": (TINY, {}, {}),
    "checkpointing": (TINY, {"gradient_checkpointing": True}, {}),
    "packed": (TINY, {"layout": "packed", "measure_kl": False}, {}),
    "critic": (TINY, {}, {"critic": True}),
    "nucleus": (TINY, {"minibatch_size": 4}, {"top_p": 0.9}),
    "head_norms_and_vocabulary": (WIDE, {}, {}),
    "adapters": (MUCH_VOCABULARY, {"lora": Lora(rank=4), "tokens_per_micro_batch": 128}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_within_a_tenth_of_what_pytorch_counts(name):
    import torch

    torch.use_deterministic_algorithms(False)
    shape, settings, more = CASES[name]
    trainer = Trainer(
        objective=ClippedPolicyGradient(), learning_rate=1e-4, **{"tokens_per_micro_batch": 512} | settings
    )
    case = Case(
        name=name, shape=shape, trainer=trainer, answers=12, prompt_tokens=32, answer_tokens=96, **more
    )
    assert case.planned().peak == pytest.approx(case.measured(), rel=WITHIN)
