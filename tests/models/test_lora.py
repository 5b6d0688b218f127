"""Adapters say what peft's say, and merged weights say what adapters say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainers.helpers import tiny_model
from treetune.models.lora import Lora, adapters_off

IDS = torch.randint(0, 24, (2, 9), generator=torch.Generator().manual_seed(0))


def trained(lora: Lora, **model: object) -> torch.nn.Module:
    """A model whose adapters are not 0 any more."""
    changed = lora.apply(tiny_model(**model), seed=3)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in changed.named_parameters():
            if ".lora_B." in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return changed


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "lora",
    [
        Lora(rank=4, alpha=8.0),
        Lora(rank=4, alpha=3.0, rank_stabilised=True, target_modules=("q_proj", "down_proj")),
    ],
    ids=["all", "some"],
)
def test_merged_weights_say_what_the_adapters_say(lora: Lora, tied: bool) -> None:
    model = trained(lora, tied=tied)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    merged = lora.merged(dict(model.named_parameters()))
    plain = tiny_model(seed=9, tied=tied)
    assert set(merged) == set(dict(plain.named_parameters()))
    plain.load_state_dict(merged, strict=not tied)
    assert (logprobs(plain) - logprobs(model)).abs().max() <= 1e-5
    assert (logprobs(plain) - logprobs(tiny_model(tied=tied))).abs().max() > 1e-2, "they change nothing"
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_without_its_adapters_the_model_is_the_start_model() -> None:
    start = logprobs(tiny_model())
    lora = Lora(rank=2)
    assert torch.equal(logprobs(lora.apply(tiny_model(), seed=0)), start), "before any training"
    model = trained(lora)
    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert not torch.equal(logprobs(model), start)
    with adapters_off(model):
        assert torch.equal(logprobs(model), start)
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == trainable


def test_peft_reads_the_written_adapters(tmp_path: Path) -> None:
    from peft import PeftModel

    lora = Lora(rank=4, alpha=6.0)
    model = trained(lora)
    adapters = lora.adapters(dict(model.named_parameters()))
    lora.write(adapters, "start", tmp_path)
    assert torch.equal(logprobs(PeftModel.from_pretrained(tiny_model(), tmp_path)), logprobs(model))


def test_the_seed_alone_decides_on_the_first_adapters() -> None:
    one, same, other = (dict(Lora().apply(tiny_model(), seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(weight, same[name]) for name, weight in one.items())
    assert any(not torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.parametrize(
    ("target_modules", "told"),
    [
        (
            ("q_proj", "query"),
            "names 'query', and LlamaForCausalLM has no such layer; its linear ones are down",
        ),
        (("lm_head",), "other than the output head"),
        (("embed_tokens",), "linear layers"),
    ],
)
def test_layers_that_cannot_have_adapters_are_refused(target_modules: tuple[str, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Lora(target_modules=target_modules).apply(tiny_model(), seed=0)
