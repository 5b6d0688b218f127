"""The start model comes in the trainer's precision, and onto a device only where somebody computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.in_process import small
from treetune.runtime.session import Session, StartModel
from treetune.runtime.training import make_trainer
from treetune.runtime.weights_folder import WeightsFolder
from treetune.trainers.base import Trainer
from treetune.trainers.objectives.policy_gradient import ClippedPolicyGradient

if TYPE_CHECKING:
    from transformers import PreTrainedModel

A_GPU = torch.device("meta")
"""Stands for a device that tensors must not be taken to: what is there can't be read."""

BF16 = Trainer(
    objective=ClippedPolicyGradient(kl_coef=0.1), learning_rate=1e-3, precision="bfloat16", zero_stage=1
)


def floating_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in module.named_buffers() if b.is_floating_point()}


def test_in_bfloat16_parameters_are_cast_and_rotary_frequencies_are_not(tmp_path: Path) -> None:
    config = small(tmp_path, trainer=BF16)
    exact = config.model.load_model(config.seed, config.task.alphabet)
    model = StartModel(config, torch.device("cpu")).load()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    buffers = floating_buffers(model)
    assert buffers
    for name, buffer in floating_buffers(exact).items():
        assert torch.equal(buffers[name], buffer), name


def test_a_trainer_in_bfloat16_has_no_rounded_buffer(tmp_path: Path) -> None:
    """Neither its policy nor its reference, after all that DeepSpeed does to a model."""
    with Session.open(small(tmp_path, trainer=BF16), {}) as session:
        trainer = make_trainer(session)
        assert trainer.reference is not None
        with trainer.reference() as reference:
            for module in (trainer.policy.module, reference):
                assert isinstance(module, nn.Module)
                assert {b.dtype for b in floating_buffers(module).values()} == {torch.float32}


def test_start_weights_are_written_without_a_device(tmp_path: Path) -> None:
    from treetune.models.policy_files import read_policy

    with Session.open(small(tmp_path), {}) as session:
        session.model = StartModel(session.config, A_GPU)
        assert next(session.model.load().parameters()).device == A_GPU
        folder = WeightsFolder(session, None)
        try:
            written, _ = read_policy(folder.write_start())
            stored, _ = read_policy(folder.write_stored(0))
        finally:
            folder.remove()
    expected = session.config.model.load_model(session.config.seed, session.config.task.alphabet)
    for name, weight in expected.named_parameters():
        assert torch.equal(written[name], weight)
        assert torch.equal(stored[name], weight)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_tied_weights_stay_one(tmp_path: Path, precision: str) -> None:
    config = small(tmp_path, trainer=replace(BF16, precision=precision))
    config = replace(config, model=replace(config.model, tie_word_embeddings=True))  # type: ignore[type-var]
    model = StartModel(config, torch.device("cpu")).load()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_weights_that_would_not_fit_twice_are_refused_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treetune.runtime import weights_folder
    from treetune.runtime.policy_server import PolicyServer

    config = small(tmp_path)
    weights = config.model.load_model(config.seed, config.task.alphabet).parameters()
    size = sum(4 * weight.numel() for weight in weights)

    def free(bytes_: int) -> None:
        usage = SimpleNamespace(free=bytes_)
        monkeypatch.setattr(weights_folder.shutil, "disk_usage", lambda folder: usage)

    with Session.open(config, {}) as session:
        free(2 * size - 1)
        with pytest.raises(ValueError, match="2 versions at once") as error, PolicyServer.start(session):
            pass
        assert "--ipc=host" in str(error.value)
        assert config.engines.policy.engines == []  # type: ignore[attr-defined]
        free(2 * size)
        with PolicyServer.start(session):
            assert len(config.engines.policy.engines) == 1  # type: ignore[attr-defined]


def test_a_tied_head_is_written_out_and_adapters_need_one_whole_model(tmp_path: Path) -> None:
    from treetune.runtime.weights_folder import room_needed

    def model(tied: bool) -> PreTrainedModel:
        config = small(tmp_path)
        source = replace(config.model, tie_word_embeddings=tied)  # type: ignore[type-var]
        return StartModel(replace(config, model=source), torch.device("cpu")).load()

    whole = room_needed(model(tied=False), adapters_alone=False)
    assert room_needed(model(tied=True), adapters_alone=False) == whole
    assert room_needed(model(tied=False), adapters_alone=True) == whole / 2


def test_weights_that_are_dealt_out_are_never_whole_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy and reference begin on the CPU, where what came to the device `meta` could not be read, and
    DeepSpeed is given what is dealt out already."""
    import deepspeed

    dealt: list[bool] = []
    real = deepspeed.initialize

    def initialize(*, model: nn.Module, **rest: Any) -> Any:
        dealt.append(all(hasattr(p, "ds_tensor") and p.numel() <= 1 for p in model.parameters()))
        return real(model=model, **rest)

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    config = small(tmp_path, trainer=replace(BF16, zero_stage=3))
    with Session.open(config, {}) as session:
        session.model = StartModel(config, A_GPU)
        trainer = make_trainer(session)
        assert dealt == [True, True]
        assert trainer.reference is not None
        pairs = [((3, 4), (5, 6, 7))]
        before = trainer.score(pairs, 1.0)
        with trainer.reference() as reference:
            assert trainer.scorer.answer_logprobs(reference, pairs, 1.0) == before


def test_ranks_that_share_matrices_are_given_them_from_the_cpu() -> None:
    def deals(**settings: Any) -> bool:
        return replace(BF16, **settings).deals_weights_out

    assert deals(zero_stage=3) and deals(tensor_parallel_size=2)
    assert not deals(zero_stage=2)
