"""Promises of a model's files:

* they hold all weights and buffers, under the names that `save_pretrained` gives them, and load to the same
  logits;
* files that lack a weight or have an unknown one are refused by name, when they are written and when
  loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from treetune.models.lora import Lora
from treetune.models.policy_files import read_policy, write_for_engine, write_policy
from treetune.models.pretrained import PretrainedModel
from treetune.models.saved_weights import Architecture, architecture_of, saved_weights
from treetune.models.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer("0123456789+= ", 64)
COMMON: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(TOKENIZER)},
    "apertus": {},
    "glm4_moe": dict(num_experts_per_tok=2, n_shared_experts=1, **ROUTED),
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
IDS = torch.arange(3, 13)[None]


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**COMMON, **KINDS[kind]})).float().eval()
    with torch.no_grad():
        for weight in saved_weights(model).values():
            if weight.is_floating_point():  # buffers too: training elsewhere has changed them
                weight.add_(torch.randn(weight.shape) * 0.1)
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def weights_in_files(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_model_is_the_model_and_its_files_have_the_names_of_save_pretrained(
    kind: str, tmp_path: Path
) -> None:
    model = make_model(kind)
    write_policy(saved_weights(model), model.config, TOKENIZER, tmp_path / "policy")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = weights_in_files(tmp_path / "policy"), weights_in_files(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    loaded = PretrainedModel(name_or_path=str(tmp_path / "policy")).load_model(0, str).eval()
    assert torch.equal(logits(loaded), logits(model))
    weights, config = read_policy(tmp_path / "policy")
    assert {n: w.shape for n, w in weights.items()} == {n: w.shape for n, w in saved_weights(model).items()}
    assert all(torch.equal(weight, weights[name]) for name, weight in saved_weights(model).items())
    write_for_engine(weights, config, TOKENIZER, tmp_path / "engine")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "engine", dtype=torch.float32).eval()
    assert torch.equal(logits(served), logits(model))


def test_weights_are_converted_to_their_saved_names_one_after_the_other() -> None:
    model = make_model("qwen3_moe")
    weights = saved_weights(model)
    in_turn = {}
    scratch = torch.empty(0)
    for name, weight in architecture_of(model.config).convert_to_saved(
        (n, scratch.new_tensor(w.detach().numpy())) for n, w in weights.items()
    ):
        in_turn[name] = weight.clone()
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in in_turn
    fused = weights["model.layers.0.mlp.experts.down_proj"][3]
    assert torch.equal(in_turn["model.layers.0.mlp.experts.3.down_proj.weight"], fused)


def test_incomplete_and_unknown_weights_are_not_written(tmp_path: Path) -> None:
    model = make_model("apertus")
    parameters = dict(model.named_parameters())
    for write in (write_policy, write_for_engine):
        with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.act_fn\.beta.* are missing"):
            write(parameters, model.config, TOKENIZER, tmp_path / "out")
        with pytest.raises(ValueError, match=r"extra\.weight are unexpected"):
            write({**saved_weights(model), "extra.weight": IDS}, model.config, TOKENIZER, tmp_path / "out")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_files_with_missing_and_unknown_weights_are_not_loaded(tmp_path: Path) -> None:
    model = make_model("llama")
    write_policy(saved_weights(model), model.config, TOKENIZER, tmp_path)
    file = tmp_path / "model.safetensors"
    all_weights = load_file(file)
    source = PretrainedModel(name_or_path=str(tmp_path))
    save_file({n: w for n, w in all_weights.items() if "layers.1.mlp" not in n}, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"don't have all weights of a LlamaForCausalLM: model\.layers\.1\.mlp"
    ):
        source.load_model(0, str)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp.* are missing"):
        read_policy(tmp_path)
    save_file({**all_weights, "visual.patch": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"doesn't have: visual\.patch.*unused_weights: \['visual\.'\]"):
        source.load_model(0, str)
    eyeless = PretrainedModel(name_or_path=str(tmp_path), unused_weights=("visual.",))
    assert torch.equal(logits(eyeless.load_model(0, str).eval()), logits(model))
    save_file({**all_weights, "lm_head.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="could not be loaded"):
        source.load_model(0, str)


@pytest.mark.parametrize("kind", ["gemma4_text", "apertus"])
def test_a_model_that_is_read_in_parts_has_its_buffers(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    write_policy(saved_weights(model), model.config, TOKENIZER, tmp_path)
    from treetune.models.shards import read_whole

    parts = PretrainedModel(name_or_path=str(tmp_path)).load_in_parts(torch.float32)
    assert torch.equal(logits(read_whole(parts).eval()), logits(model))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "glm4_moe"])
def test_adapters_on_experts_are_refused_and_those_on_layers_are_merged(kind: str) -> None:
    with pytest.raises(ValueError, match=r"puts adapters on model\.layers\.\d\.mlp.*name the layers"):
        Lora().apply(make_model(kind), 0)
    model = make_model(kind)
    names = set(saved_weights(model))
    lora = Lora(target_modules=("q_proj", "o_proj"))
    lora.apply(model, 0)
    assert set(lora.merged_weights(saved_weights(model))) == names


@pytest.mark.parametrize(("kind", "tied"), [("llama", set()), ("qwen2", {"lm_head.weight"})])
def test_further_names_of_tied_weights_may_be_missing_or_not(kind: str, tied: set[str]) -> None:
    model = make_model(kind)
    architecture = Architecture(model.config)
    assert architecture.unsaved_names == tied
    for passed in (set(saved_weights(model)), set(model.state_dict())):
        architecture.refuse_other_weights(passed, "a test")


def test_weights_that_transformers_does_not_save_may_be_missing_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model("llama")
    architecture = Architecture(model.config)
    ignored = "model.norm.weight"
    monkeypatch.setattr(architecture.skeleton, "_keys_to_ignore_on_save", [ignored])
    names = set(saved_weights(model))
    assert ignored in architecture.unsaved_names
    for passed in (names, names - {ignored}):
        architecture.refuse_other_weights(passed, "a test")
