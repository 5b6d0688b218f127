from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from treetune.models.policy_files import resolve_policy, write_policy
from treetune.models.pretrained import PretrainedModel
from treetune.models.sources import TinyModel


def alphabet() -> str:
    return "0123456789+=#\n"


def no_alphabet() -> str:
    raise AssertionError("a pretrained model has a tokenizer of its own")


TINY = TinyModel(layers=1, hidden_size=64, heads=2, intermediate_size=64, context_length=32)


def make_policy(directory: Path, seed: int = 0) -> None:
    model = TINY.load_model(seed, alphabet)
    write_policy(model.state_dict(), model.config, TINY.load_tokenizer(alphabet), directory)


def test_the_default_tiny_model_is_small_and_untied_and_has_room_for_its_alphabet() -> None:
    model = TinyModel().load_model(0, alphabet)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.9e6
    assert not model.config.tie_word_embeddings
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.vocab_size == len(alphabet()) + 2
    assert model(torch.tensor([[2, 3, 4]])).logits.shape == (1, 3, 16)


def test_weights_depend_on_the_runs_seed_and_on_nothing_else() -> None:
    torch.manual_seed(1)
    first = TINY.load_model(7, alphabet).state_dict()
    torch.manual_seed(2)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    again = TINY.load_model(7, alphabet).state_dict()
    assert torch.equal(torch.rand(1), drawn), "the global generator is left alone"
    other = TINY.load_model(8, alphabet).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"hidden_size": 128, "heads": 8}, "is 16; .* at least 32: with 8 heads, a hidden_size of 256"),
        ({"hidden_size": 100, "heads": 3}, "no multiple"),
        ({"hidden_size": 99, "heads": 3}, "even head dimension"),
    ],
)
def test_heads_that_the_engine_cannot_serve_are_refused(sizes: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TinyModel(**sizes)


def test_a_directory_gives_the_model_and_the_tokenizer_that_were_written(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy", seed=3)
    source = PretrainedModel(name_or_path=str(tmp_path / "policy"))
    source.require()
    model = source.load_model(0, no_alphabet)
    expected = TINY.load_model(3, alphabet).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
    tokenizer = source.load_tokenizer(no_alphabet)
    assert tokenizer.get_vocab() == TINY.load_tokenizer(alphabet).get_vocab()
    assert (
        PretrainedModel(name_or_path=str(tmp_path / "policy"), dtype="bfloat16")
        .load_model(0, no_alphabet)
        .dtype
        == torch.bfloat16
    )


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


def test_a_checkpoint_that_is_not_there_yet_is_told_with_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = PretrainedModel(name_or_path="experiments/quickstart/sft/checkpoints/last/policy")
    with pytest.raises(
        ValueError, match=r"no complete checkpoint in .*experiments/quickstart/sft/checkpoints"
    ) as told:
        source.require()
    assert "Run the experiment 'sft'" in str(told.value)
    assert "run_iteration_loop" in str(told.value)
    (tmp_path / "configs" / "quickstart").mkdir(parents=True)
    (tmp_path / "configs" / "quickstart" / "sft.jsonnet").write_text("{}")
    with pytest.raises(ValueError, match=r"--configs configs/quickstart/sft\.jsonnet run_iteration_loop"):
        source.load_model(0, no_alphabet)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "models/../other"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        resolve_policy(name)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve_policy(str(tmp_path))


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B"])
def test_names_on_the_hub_are_left_as_they_are(name: str) -> None:
    assert resolve_policy(name) == name


def test_flash_attention_without_its_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        PretrainedModel(name_or_path="gpt2", attention="flash_attention_2")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"liger": True},
            "model.liger needs an NVIDIA GPU, and this machine has none: set model.liger to false",
        ),
        (
            {"attention": "flash_attention_2", "dtype": "bfloat16"},
            "model.attention 'flash_attention_2' needs an NVIDIA GPU, and this machine has none: set"
            " model.attention to 'sdpa'",
        ),
    ],
)
def test_kernels_for_gpus_are_refused_without_one(
    settings: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("treetune.models.pretrained._DEVICES", tmp_path)
    source = PretrainedModel(name_or_path="Qwen/Qwen3-0.6B", **settings)
    with pytest.raises(ValueError) as error:
        source.require()
    assert str(error.value) == told


def test_kernels_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("treetune.models.pretrained._DEVICES", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package liger-kernel \(in requirements.txt\)"):
        PretrainedModel(name_or_path="Qwen/Qwen3-0.6B", liger=True).require()


@pytest.mark.parametrize(
    ("environment", "cuda", "is_available", "gpu", "refused"),
    [
        ({}, "13.0", False, True, True),  # a driver that is too old
        ({"CUDA_VISIBLE_DEVICES": "0"}, "13.0", False, True, True),
        ({}, "13.0", True, True, False),
        ({}, None, False, True, False),  # the CPU's build was chosen
        ({}, "13.0", False, False, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, "13.0", False, True, False),
        ({"DS_ACCELERATOR": "cpu"}, "13.0", False, True, False),
    ],
)
def test_a_gpu_that_pytorch_cannot_use_is_no_reason_to_run_on_the_cpu_silently(
    environment: dict[str, str],
    cuda: str | None,
    is_available: bool,
    gpu: bool,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from treetune.trainers.ranks import refuse_unusable_gpu

    if gpu:
        (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("treetune.models.pretrained._DEVICES", tmp_path)
    if not refused:
        return refuse_unusable_gpu(environment, cuda, is_available)
    with pytest.raises(ValueError, match=r"built for CUDA 13.0, can't use it"):
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
