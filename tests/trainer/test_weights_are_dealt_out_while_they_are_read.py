"""Under ZeRO-3 a rank has its parts of the weights and one whole weight, and never the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.runs.in_process import small
from treetune.exceptions import NotInParts
from treetune.models.pretrained import PretrainedModel
from treetune.models.shards import InTurn, in_parts, is_in_file, read_whole, weight_files
from treetune.models.sources import TinyModel
from treetune.runtime import session as start_model
from treetune.runtime.session import StartModel

from . import dealing_program
from .helpers import launch


def written(folder: Path, **settings: object) -> Path:
    from transformers import LlamaForCausalLM

    source = TinyModel(**{"layers": 2, "hidden_size": 64, "heads": 2, **settings})  # type: ignore[arg-type]
    model = source.load_model(0, lambda: "0123456789")
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(folder)
    source.load_tokenizer(lambda: "0123456789").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_no_rank_of_two_ever_has_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at each weight, in bytes of the rank's own memory: half of the model and one weight, which is
    less than all. Gathered again, the parts are bit-identical to the files' weights."""
    # Or the allocator keeps what was freed, now and then a quarter of the model, and it counts as ours.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
    folder = written(tmp_path / "model", layers=24, hidden_size=512, heads=4, intermediate_size=1376)
    size = (folder / "model.safetensors").stat().st_size
    cuts = json.dumps([{"zero_stage": 3}])
    told = [cuts, str(written(tmp_path / "small")), str(folder), str(tmp_path / "taken.json")]
    launch(Path(dealing_program.__file__), told, 2)
    for taken in json.loads((tmp_path / "taken.json").read_text()):
        assert len(taken) == 2
        assert max(taken) < 0.65 * size, f"{taken} bytes, and the model has {size}"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_read_in_parts_is_what_is_read_whole(tmp_path: Path, tied: bool, dtype: str) -> None:
    source = PretrainedModel(name_or_path=str(written(tmp_path, tie_word_embeddings=tied)), dtype=dtype)  # type: ignore[arg-type]
    whole = source.load_model(0, lambda: "").to(torch.bfloat16)
    parts = source.load_in_parts(torch.bfloat16)
    assert all(map(is_in_file, parts.parameters()))
    for parameter in InTurn(parts, reads=True).parameters():
        assert not is_in_file(parameter)
    assert type(parts) is type(whole) and parts.training == whole.training
    found = dict(parts.named_parameters())
    assert found.keys() == dict(whole.named_parameters()).keys()
    for name, weight in whole.named_parameters():
        assert torch.equal(found[name], weight), name
    # Rotary frequencies were cast with the whole model here, which a trainer doesn't do.
    assert dict(parts.named_buffers()).keys() == dict(whole.named_buffers()).keys()
    assert (parts.get_output_embeddings().weight is parts.get_input_embeddings().weight) == tied
    assert vars(parts.generation_config) == vars(whole.generation_config)


def test_ranks_that_do_not_read_have_room_for_what_they_are_sent(tmp_path: Path) -> None:
    parts = PretrainedModel(name_or_path=str(written(tmp_path))).load_in_parts(torch.float32)
    shapes = [weight.shape for weight in parts.parameters()]
    found = list(InTurn(parts, reads=False).parameters())
    assert [weight.shape for weight in found] == shapes
    assert all(weight.data.is_contiguous() for weight in found)


def test_a_reference_of_its_own_is_read_whole(tmp_path: Path) -> None:
    source = PretrainedModel(name_or_path=str(written(tmp_path)))
    parts = source.load_in_parts(torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        logits = read_whole(parts)(ids).logits
        assert torch.equal(logits, source.load_model(0, lambda: "")(ids).logits)


def test_files_that_lack_a_weight_are_not_read_in_parts(tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = written(tmp_path)
    files = weight_files(str(folder), None)
    assert files is not None
    config = AutoConfig.from_pretrained(folder)
    types = (torch.float32, torch.float32)
    in_parts(config, files, types)
    config.hidden_size *= 2
    with pytest.raises(NotInParts, match="in its files, and"):
        in_parts(config, files, types)
    del files["lm_head.weight"]
    with pytest.raises(NotInParts, match=r"no lm_head\.weight"):
        in_parts(config, files, types)


def test_why_a_model_is_read_whole_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PretrainedModel(name_or_path=str(written(tmp_path / "model")), liger=True)
    with pytest.raises(NotInParts, match=r"model\.liger"):
        source.load_in_parts(torch.float32)
    model = StartModel(small(tmp_path), torch.device("cpu"))  # whose weights are drawn
    told: list[str] = []
    monkeypatch.setattr(start_model.log, "info", lambda words, *more: told.append(words % more))
    for _ in range(2):
        assert not any(map(is_in_file, model.load_in_parts().parameters()))
    assert len(told) == 1
    assert told[0].endswith("its weights are drawn, and not read from files")
