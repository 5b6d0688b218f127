"""Promises of models, their files and adapters:

* a policy is read back to the bit and loads without our code, and the engine gets an untied head;
* a write that fails leaves the old policy;
* a tiny model's weights depend on the run's seed alone, and settings that the engine can't serve are refused;
* `last` is the newest complete checkpoint, and a missing one is told with the command that makes it;
* merged adapters compute what the adapters compute, and without them the model is the start model;
* a GPU that can't be used is an error and no silent run on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_trainer import tiny_model
from treetune.models.lora import Lora, adapters_off
from treetune.models.policy_files import read_policy, resolve_policy, write_for_engine, write_policy
from treetune.models.pretrained import PretrainedModel
from treetune.models.sources import TinyModel
from treetune.trainer.ranks import refuse_unusable_gpu


def alphabet() -> str:
    return "0123456789+=#\n"


TINY = TinyModel(layers=1, hidden_size=64, heads=2, intermediate_size=64, context_length=32)
TOKENIZER = TINY.load_tokenizer(alphabet)


def tiny_policy(seed: int = 0, tied: bool = False) -> PreTrainedModel:
    return replace(TINY, tie_word_embeddings=tied).load_model(seed, alphabet)


def write_policy_files(
    directory: Path, model: PreTrainedModel, weights: dict[str, torch.Tensor] | None = None
) -> None:
    write_policy(model.state_dict() if weights is None else weights, model.config, TOKENIZER, directory)


def equal_weights(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Say whether all these weights equal the expected ones of the same names, to the bit."""
    return all(torch.equal(weight, expected[name]) for name, weight in weights.items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_written_policy_is_read_back_and_loads_anywhere(tmp_path: Path, tied: bool) -> None:
    model = tiny_policy(tied=tied)
    write_policy_files(tmp_path / "policy", model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    weights, config = read_policy(tmp_path / "policy")
    assert loaded.config.tie_word_embeddings == tied
    assert equal_weights(loaded.state_dict(), model.state_dict()) and equal_weights(
        weights, model.state_dict()
    )
    assert set(weights) == set(dict(model.named_parameters()))
    assert config.vocab_size == model.config.vocab_size


@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_always_gets_an_untied_head(tmp_path: Path, tied: bool) -> None:
    model = tiny_policy(tied=tied)
    # Named parameters list shared weights once, state dicts twice: both must do.
    for name, weights in (("a", dict(model.named_parameters())), ("b", model.state_dict())):
        write_for_engine(weights, model.config, TOKENIZER, tmp_path / name)
        engine_weights = load_file(tmp_path / name / "model.safetensors")
        assert torch.equal(engine_weights["lm_head.weight"], model.get_output_embeddings().weight)
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is False
        assert (tmp_path / name / "tokenizer.json").is_file()
        prompt = torch.tensor([[2, 3, 4]])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(loaded(prompt).logits, model(prompt).logits)
    assert model.config.tie_word_embeddings == tied


def test_weights_that_share_one_buffer_are_written_completely(tmp_path: Path) -> None:
    model = tiny_policy()
    expected = dict(model.named_parameters())
    # DeepSpeed's ZeRO keeps all weights in one buffer.
    flat = torch.cat([weight.detach().flatten() for weight in expected.values()])
    split = flat.split([weight.numel() for weight in expected.values()])
    parts = {name: part.view_as(expected[name]) for name, part in zip(expected, split, strict=True)}
    write_policy_files(tmp_path / "policy", model, parts)
    write_for_engine(parts, model.config, TOKENIZER, tmp_path / "engine")
    for folder in ("policy", "engine"):
        assert equal_weights(expected, load_file(tmp_path / folder / "model.safetensors"))


def test_new_weights_replace_the_old_ones_for_the_engine(tmp_path: Path) -> None:
    for seed in (0, 1):
        model = tiny_policy(seed)
        write_for_engine(model.state_dict(), model.config, TOKENIZER, tmp_path / "engine")
        assert equal_weights(load_file(tmp_path / "engine" / "model.safetensors"), model.state_dict())
    assert not list(tmp_path.rglob(".*"))


def test_the_precision_in_the_files_is_that_of_the_weights(tmp_path: Path) -> None:
    model = tiny_policy().to(torch.bfloat16)
    write_policy_files(tmp_path / "policy", model)
    write_for_engine(model.state_dict(), model.config, TOKENIZER, tmp_path / "engine")
    for name in ("policy", "engine"):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_policy_that_fails_to_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    model, new_model = tiny_policy(), tiny_policy(1)
    write_policy_files(tmp_path / "policy", model)

    class FullDisk:
        def save_pretrained(self, directory: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_policy(new_model.state_dict(), new_model.config, FullDisk(), tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert equal_weights(read_policy(tmp_path / "policy")[0], model.state_dict())
    write_policy_files(tmp_path / "policy", new_model)
    assert equal_weights(read_policy(tmp_path / "policy")[0], new_model.state_dict())


def test_a_directory_without_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no weights"):
        read_policy(tmp_path)


def no_alphabet() -> str:
    raise AssertionError("a pretrained model brings its tokenizer and needs no alphabet")


def test_the_default_tiny_model_is_small_and_untied_and_has_room_for_its_alphabet() -> None:
    model = TinyModel().load_model(0, alphabet)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.9e6
    assert not model.config.tie_word_embeddings
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.vocab_size == len(alphabet()) + 2
    assert model(torch.tensor([[2, 3, 4]])).logits.shape == (1, 3, 16)


def test_weights_depend_on_the_runs_seed_and_on_nothing_else() -> None:
    torch.manual_seed(1)
    weights = TINY.load_model(7, alphabet).state_dict()
    torch.manual_seed(2)
    next_number = torch.rand(1)
    torch.manual_seed(2)
    weights_of_second_load = TINY.load_model(7, alphabet).state_dict()
    assert torch.equal(torch.rand(1), next_number), "the global generator is left alone"
    assert equal_weights(weights, weights_of_second_load)
    assert not torch.equal(weights["lm_head.weight"], tiny_policy(8).state_dict()["lm_head.weight"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 128, "heads": 8}, "is 16; .* at least 32: with 8 heads, a hidden_size of 256"),
        ({"hidden_size": 100, "heads": 3}, "not a multiple"),
        ({"hidden_size": 99, "heads": 3}, "even head dimension"),
    ],
)
def test_heads_that_the_engine_cannot_serve_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyModel(**sizes)


def test_a_directory_gives_the_model_and_the_tokenizer_that_were_written(tmp_path: Path) -> None:
    write_policy_files(tmp_path / "policy", tiny_policy(3))
    source = PretrainedModel(name_or_path=str(tmp_path / "policy"))
    source.check_at_start()
    assert equal_weights(source.load_model(0, no_alphabet).state_dict(), tiny_policy(3).state_dict())
    assert source.load_tokenizer(no_alphabet).get_vocab() == TOKENIZER.get_vocab()
    assert replace(source, dtype="bfloat16").load_model(0, no_alphabet).dtype == torch.bfloat16


def test_last_is_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "sft" / "checkpoints"
    for number, complete in (("0000", True), ("0009", True), ("0010", True), ("0011", False)):
        (checkpoints / number / "policy").mkdir(parents=True)
        (checkpoints / number / "policy" / "config.json").write_text("{}")
        if complete:
            (checkpoints / number / "state.json").write_text("{}")
    (checkpoints / ".0012.partial" / "policy").mkdir(parents=True)
    assert resolve_policy(f"{checkpoints}/last/policy") == str(checkpoints / "0010" / "policy")
    assert resolve_policy(f"{checkpoints}/0009/policy") == str(checkpoints / "0009" / "policy")
    with pytest.raises(ValueError, match=r"no complete checkpoint .*0011"):
        resolve_policy(f"{checkpoints}/0011/policy")


def test_a_missing_checkpoint_is_told_with_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = PretrainedModel(name_or_path="experiments/quickstart/sft/checkpoints/last/policy")
    with pytest.raises(
        ValueError, match=r"no complete checkpoint in .*experiments/quickstart/sft/checkpoints"
    ) as error:
        source.check_at_start()
    assert "Run the experiment 'sft'" in str(error.value) and "treetune run --configs" in str(error.value)
    (tmp_path / "configs" / "quickstart").mkdir(parents=True)
    (tmp_path / "configs" / "quickstart" / "sft.jsonnet").write_text("{}")
    with pytest.raises(ValueError, match=r"treetune run --configs configs/quickstart/sft\.jsonnet"):
        source.load_model(0, no_alphabet)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "models/../other"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        resolve_policy(name)


def test_the_remedy_for_a_missing_checkpoint_names_the_shipped_experiment_and_no_namesake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft.jsonnet").write_text("{}")
    for experiment, config in {"quickstart/sft": "quickstart/sft.jsonnet", "mine/sft": "sft.jsonnet"}.items():
        with pytest.raises(ValueError, match=f"treetune run --configs {config}$"):
            resolve_policy(f"experiments/{experiment}/checkpoints/last/policy")


def test_a_directory_without_a_model_is_refused_and_names_on_the_hub_are_left_as_they_are(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_policy(str(tmp_path))
    assert [resolve_policy(name) for name in ("gpt2", "Qwen/Qwen2.5-0.5B")] == ["gpt2", "Qwen/Qwen2.5-0.5B"]


def test_flash_attention_without_its_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        PretrainedModel(name_or_path="gpt2", attention="flash_attention_2")


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Look for GPUs in an empty folder, and return it."""
    monkeypatch.setattr("treetune.models.pretrained._DEVICES", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "setting", "instead"),
    [
        ({"liger": True}, "model.liger", "model.liger to false"),
        (
            {"attention": "flash_attention_2", "dtype": "bfloat16"},
            "model.attention 'flash_attention_2'",
            "model.attention to 'sdpa'",
        ),
    ],
)
def test_kernels_for_gpus_are_refused_without_one(
    settings: dict[str, Any], setting: str, instead: str, devices: Path
) -> None:
    with pytest.raises(ValueError) as error:
        PretrainedModel(name_or_path="Qwen/Qwen3-0.6B", **settings).check_at_start()
    assert str(error.value) == f"{setting} needs an NVIDIA GPU, and this machine has none: set {instead}"


def test_kernels_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch, devices: Path) -> None:
    (devices / "nvidia0").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package liger-kernel \(in requirements.txt\)"):
        PretrainedModel(name_or_path="Qwen/Qwen3-0.6B", liger=True).check_at_start()


@pytest.mark.parametrize(
    ("environment", "cuda", "is_available", "gpu", "refused"),
    [
        ({}, "13.0", False, True, True),  # a driver that is too old
        ({"CUDA_VISIBLE_DEVICES": "0"}, "13.0", False, True, True),
        ({}, "13.0", True, True, False),
        ({}, None, False, True, True),  # the CPU's build, by accident or by choice
        ({"CUDA_VISIBLE_DEVICES": ""}, None, False, True, False),
        ({}, "13.0", False, False, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, "13.0", False, True, False),
        ({"DS_ACCELERATOR": "cpu"}, "13.0", False, True, False),
    ],
)
def test_a_gpu_that_pytorch_cannot_use_is_no_reason_to_run_on_the_cpu_silently(
    environment: dict[str, str], cuda: str | None, is_available: bool, gpu: bool, refused: bool, devices: Path
) -> None:
    if gpu:
        (devices / "nvidia0").touch()
    if not refused:
        return refuse_unusable_gpu(environment, cuda, is_available)
    reason = "too old for CUDA 13.0" if cuda else "for CPUs only. TREETUNE_DEVICE=nvidia"
    with pytest.raises(ValueError, match=reason):
        refuse_unusable_gpu(environment, cuda, is_available)


def test_sources_and_tasks_register_without_importing_anything_heavy() -> None:
    code = (
        "import sys, treetune.models.sources, treetune.models.pretrained, treetune.tasks.arithmetic,"
        " treetune.tasks.multiplication,"
        " treetune.tasks.graders.pool, treetune.models.tokenizer, treetune.models.policy_files;"
        "print({'torch', 'transformers', 'tokenizers', 'numpy', 'datasets'} & set(sys.modules))"
    )
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "set()", done.stderr


IDS = torch.randint(0, 24, (2, 9), generator=torch.Generator().manual_seed(0))


def model_with_trained_adapters(lora: Lora, **model: object) -> torch.nn.Module:
    """Make a model whose adapters are no longer 0, as after training."""
    changed = lora.apply(tiny_model(**model), seed=3)
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
def test_merged_weights_compute_what_the_adapters_compute(lora: Lora, tied: bool) -> None:
    model = model_with_trained_adapters(lora, tied=tied)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    merged = lora.merged_weights(dict(model.named_parameters()))
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
    model = model_with_trained_adapters(lora)
    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert not torch.equal(logprobs(model), start)
    with adapters_off(model):
        assert torch.equal(logprobs(model), start)
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == trainable


def test_peft_reads_the_written_adapters(tmp_path: Path) -> None:
    from peft import PeftModel

    lora = Lora(rank=4, alpha=6.0)
    model = model_with_trained_adapters(lora)
    adapters = lora.adapters(dict(model.named_parameters()))
    lora.write(adapters, "start", tmp_path)
    assert torch.equal(logprobs(PeftModel.from_pretrained(tiny_model(), tmp_path)), logprobs(model))


def test_the_seed_alone_decides_on_the_first_adapters() -> None:
    def parameters(seed: int) -> dict[str, torch.nn.Parameter]:
        return dict(Lora().apply(tiny_model(), seed).named_parameters())

    weights, same_seed, other_seed = parameters(1), parameters(1), parameters(2)
    assert all(torch.equal(weight, same_seed[name]) for name, weight in weights.items())
    assert any(not torch.equal(weight, other_seed[name]) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("target_modules", "message"),
    [
        (
            ("q_proj", "query"),
            "names 'query', and LlamaForCausalLM has no such layer; its linear layers are down",
        ),
        (("lm_head",), "other than the output head"),
        (("embed_tokens",), "linear layers"),
    ],
)
def test_layers_that_cannot_have_adapters_are_refused(target_modules: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lora(target_modules=target_modules).apply(tiny_model(), seed=0)
