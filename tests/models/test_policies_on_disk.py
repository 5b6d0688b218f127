from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from treetune.models.policy_files import read_policy, write_for_engine, write_policy
from treetune.models.sources import TinyModel


def alphabet() -> str:
    return "0123456789+=#\n"


def tiny(tied: bool = False) -> TinyModel:
    return TinyModel(layers=1, hidden_size=64, heads=2, intermediate_size=64, tie_word_embeddings=tied)


@pytest.mark.parametrize("tied", [False, True])
def test_a_written_policy_is_read_back_and_loads_anywhere(tmp_path: Path, tied: bool) -> None:
    source = tiny(tied)
    model = source.load_model(0, alphabet)
    write_policy(model.state_dict(), model.config, source.load_tokenizer(alphabet), tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert loaded.config.tie_word_embeddings == tied
    expected = model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())
    weights, config = read_policy(tmp_path / "policy")
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    assert set(weights) == set(dict(model.named_parameters()))
    assert config.vocab_size == model.config.vocab_size


@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_always_gets_an_untied_head_of_its_own(tmp_path: Path, tied: bool) -> None:
    source = tiny(tied)
    model = source.load_model(0, alphabet)
    # Named parameters list shared weights once, state dicts twice: both must do.
    for name, weights in (("a", dict(model.named_parameters())), ("b", model.state_dict())):
        write_for_engine(weights, model.config, source.load_tokenizer(alphabet), tmp_path / name)
        written = load_file(tmp_path / name / "model.safetensors")
        assert torch.equal(written["lm_head.weight"], model.get_output_embeddings().weight)
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is False
        assert (tmp_path / name / "tokenizer.json").is_file()
        prompt = torch.tensor([[2, 3, 4]])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(loaded(prompt).logits, model(prompt).logits)
    assert model.config.tie_word_embeddings == tied


def test_weights_that_are_parts_of_one_buffer_are_written_whole(tmp_path: Path) -> None:
    source = tiny()
    model = source.load_model(0, alphabet)
    expected = dict(model.named_parameters())
    flat = torch.cat([weight.detach().flatten() for weight in expected.values()])  # as ZeRO keeps them
    ends = torch.tensor([0, *(weight.numel() for weight in expected.values())]).cumsum(0).tolist()
    parts = {
        name: flat[start:end].view_as(weight)
        for (name, weight), start, end in zip(expected.items(), ends, ends[1:], strict=False)
    }
    tokenizer = source.load_tokenizer(alphabet)
    write_policy(parts, model.config, tokenizer, tmp_path / "policy")
    write_for_engine(parts, model.config, tokenizer, tmp_path / "engine")
    for place in ("policy", "engine"):
        written = load_file(tmp_path / place / "model.safetensors")
        assert all(torch.equal(written[name], weight) for name, weight in expected.items())


def test_new_weights_take_the_place_of_the_old_ones_for_the_engine(tmp_path: Path) -> None:
    source = tiny()
    tokenizer = source.load_tokenizer(alphabet)
    for seed in (0, 1):
        model = source.load_model(seed, alphabet)
        write_for_engine(model.state_dict(), model.config, tokenizer, tmp_path / "engine")
        written = load_file(tmp_path / "engine" / "model.safetensors")
        assert torch.equal(written["lm_head.weight"], model.state_dict()["lm_head.weight"])
    assert not list(tmp_path.rglob(".*"))


def test_the_written_precision_is_the_weights_own(tmp_path: Path) -> None:
    source = tiny()
    model = source.load_model(0, alphabet).to(torch.bfloat16)
    tokenizer = source.load_tokenizer(alphabet)
    write_policy(model.state_dict(), model.config, tokenizer, tmp_path / "policy")
    write_for_engine(model.state_dict(), model.config, tokenizer, tmp_path / "engine")
    for name in ("policy", "engine"):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_policy_that_fails_to_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    source = tiny()
    model = source.load_model(0, alphabet)
    tokenizer = source.load_tokenizer(alphabet)
    write_policy(model.state_dict(), model.config, tokenizer, tmp_path / "policy")

    class FullDisk:
        def save_pretrained(self, directory: Path) -> None:
            raise OSError(28, "No space left on device")

    other = source.load_model(1, alphabet)
    with pytest.raises(OSError, match="No space left"):
        write_policy(other.state_dict(), other.config, FullDisk(), tmp_path / "policy")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    weights, _ = read_policy(tmp_path / "policy")
    assert torch.equal(weights["lm_head.weight"], model.state_dict()["lm_head.weight"])
    write_policy(other.state_dict(), other.config, tokenizer, tmp_path / "policy")
    weights, _ = read_policy(tmp_path / "policy")
    assert torch.equal(weights["lm_head.weight"], other.state_dict()["lm_head.weight"])


def test_a_directory_without_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no weights"):
        read_policy(tmp_path)
