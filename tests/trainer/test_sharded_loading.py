"""Reading a model in parts under ZeRO-3.

These tests promise that no rank ever has the whole model in its memory, and that the parts are bit-identical
to the weights of the files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.small_run import small
from tests.support.tiny_trainer import launch
from tests.trainer import sharded_loading_program
from treetune.exceptions import NotInParts
from treetune.models.pretrained import PretrainedModel
from treetune.models.shards import InTurn, is_in_file, make_model_in_parts, read_whole, weight_files
from treetune.models.sources import TinyModel
from treetune.runtime import session as start_model
from treetune.runtime.session import StartModel


def write_model(folder: Path, **settings: object) -> Path:
    from transformers import LlamaForCausalLM

    source = TinyModel(**{"layers": 2, "hidden_size": 64, "heads": 2, **settings})  # type: ignore[arg-type]
    model = source.load_model(0, lambda: "0123456789")
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(folder)
    source.load_tokenizer(lambda: "0123456789").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_no_rank_of_two_ever_has_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is measured at each weight, in bytes of the rank's own memory. It is half of the model and one
    weight. Gathered again, the parts are bit-identical to the weights of the files."""
    # Otherwise the allocator keeps some freed memory, up to a quarter of the model, which would be counted.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
    folder = write_model(tmp_path / "model", layers=24, hidden_size=512, heads=4, intermediate_size=1376)
    size = (folder / "model.safetensors").stat().st_size
    cuts = json.dumps([{"zero_stage": 3}])
    arguments = [cuts, str(write_model(tmp_path / "small")), str(folder), str(tmp_path / "taken.json")]
    launch(Path(sharded_loading_program.__file__), arguments, 2)
    for peak_bytes in json.loads((tmp_path / "taken.json").read_text()):
        assert len(peak_bytes) == 2
        assert max(peak_bytes) < 0.65 * size, f"{peak_bytes} bytes, and the model has {size}"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_read_in_parts_equals_one_that_is_read_whole(
    tmp_path: Path, tied: bool, dtype: str
) -> None:
    source = PretrainedModel(name_or_path=str(write_model(tmp_path, tie_word_embeddings=tied)), dtype=dtype)  # type: ignore[arg-type]
    whole_model = source.load_model(0, lambda: "").to(torch.bfloat16)
    parts = source.load_in_parts(torch.bfloat16)
    assert all(map(is_in_file, parts.parameters()))
    for parameter in InTurn(parts, reads=True).parameters():
        assert not is_in_file(parameter)
    assert type(parts) is type(whole_model) and parts.training == whole_model.training
    weights_in_parts = dict(parts.named_parameters())
    assert weights_in_parts.keys() == dict(whole_model.named_parameters()).keys()
    for name, weight in whole_model.named_parameters():
        assert torch.equal(weights_in_parts[name], weight), name
    # Rotary frequencies were cast with the whole model here, which a trainer doesn't do.
    assert dict(parts.named_buffers()).keys() == dict(whole_model.named_buffers()).keys()
    assert (parts.get_output_embeddings().weight is parts.get_input_embeddings().weight) == tied
    assert vars(parts.generation_config) == vars(whole_model.generation_config)


def test_ranks_that_do_not_read_have_memory_for_the_weights_that_they_receive(tmp_path: Path) -> None:
    parts = PretrainedModel(name_or_path=str(write_model(tmp_path))).load_in_parts(torch.float32)
    shapes = [weight.shape for weight in parts.parameters()]
    weights = list(InTurn(parts, reads=False).parameters())
    assert [weight.shape for weight in weights] == shapes
    assert all(weight.data.is_contiguous() for weight in weights)


def test_a_separate_reference_is_read_whole(tmp_path: Path) -> None:
    source = PretrainedModel(name_or_path=str(write_model(tmp_path)))
    parts = source.load_in_parts(torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        logits = read_whole(parts)(ids).logits
        assert torch.equal(logits, source.load_model(0, lambda: "")(ids).logits)


def test_files_that_lack_a_weight_are_not_read_in_parts(tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = write_model(tmp_path)
    files = weight_files(str(folder), None)
    assert files is not None
    config = AutoConfig.from_pretrained(folder)
    types = (torch.float32, torch.float32)
    make_model_in_parts(config, files, types)
    config.hidden_size *= 2
    with pytest.raises(NotInParts, match="in its files, and"):
        make_model_in_parts(config, files, types)
    del files["lm_head.weight"]
    with pytest.raises(NotInParts, match=r"no lm_head\.weight"):
        make_model_in_parts(config, files, types)


def test_the_reason_for_reading_a_model_whole_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PretrainedModel(name_or_path=str(write_model(tmp_path / "model")), liger=True)
    with pytest.raises(NotInParts, match=r"model\.liger"):
        source.load_in_parts(torch.float32)
    model = StartModel(small(tmp_path), torch.device("cpu"))  # whose weights are drawn
    messages: list[str] = []
    monkeypatch.setattr(start_model.log, "info", lambda template, *values: messages.append(template % values))
    for _ in range(2):
        assert not any(map(is_in_file, model.load_in_parts().parameters()))
    assert len(messages) == 1
    assert messages[0].endswith("its weights are drawn, and not read from files")
