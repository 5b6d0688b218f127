"""A model whose classes come with it (`trust_remote_code`) trains and is measured as any other, its
checkpoints hold its code, and nobody is asked at a terminal whether to run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.small_run import TASK, evaluated, small, train
from treetune.engine.settings import InProcessSettings
from treetune.models.pretrained import PretrainedModel
from treetune.models.tokenizer import character_tokenizer
from treetune.runtime.base import Evaluation, EvaluationSet
from treetune.runtime.commands import run_evaluation

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODEL = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig
from .parts_own import scale

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = scale(output.logits)
        return output
"""
PARTS = """
def scale(logits):
    return logits * 0.5
"""
CODE = {"configuration_own.py": CONFIGURATION, "modeling_own.py": MODEL, "parts_own.py": PARTS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama whose logits its own code halves."""
    tokenizer = character_tokenizer(TASK.alphabet(), 64)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path / "own-model"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, text in CODE.items():
        (folder / name).write_text(text)
    path = folder / "config.json"
    own = {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return folder


def trusted(folder: Path) -> PretrainedModel:
    return PretrainedModel(name_or_path=str(folder), trust_remote_code=True)


def logits(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 13)[None]).logits


def test_it_is_sampled_trained_and_written_with_its_code_and_goes_on_from_there(
    folder: Path, tmp_path: Path
) -> None:
    directory = train(small(tmp_path, InProcessSettings(), model=trusted(folder)))
    policy = directory.checkpoint_folder(2) / "policy"
    assert {name: (policy / name).read_text() for name in CODE} == CODE
    assert [row["engine/logprob_gap_mean"] < 1e-4 for row in directory.read_metrics()] == [True, True]
    assert not torch.equal(logits(policy), logits(folder)), "it was trained"
    sets = Evaluation(sets=(EvaluationSet(split="test", problems=3),))
    run_evaluation(small(tmp_path, InProcessSettings(), model=trusted(folder), evaluation=sets), {})
    assert evaluated(small(tmp_path), 2, "test")[0]["n_problems"] == 3
    again = small(tmp_path, InProcessSettings(), model=trusted(policy), experiment_name="again")
    assert (train(again).checkpoint_folder(2) / "policy" / "modeling_own.py").read_text() == MODEL


def test_code_that_nobody_trusts_is_refused_without_a_question(folder: Path, tmp_path: Path) -> None:
    model = PretrainedModel(name_or_path=str(folder))
    with pytest.raises(ValueError, match="trust_remote_code"):
        train(small(tmp_path, InProcessSettings(), model=model))


@pytest.mark.parametrize("load", ["load_model", "load_in_parts"])
def test_no_way_of_loading_asks_at_the_terminal(
    folder: Path, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    model = PretrainedModel(name_or_path=str(folder))
    arguments = (1, TASK.alphabet) if load == "load_model" else (torch.float32,)
    with pytest.raises(ValueError, match=r"set model\.trust_remote_code to true if you trust it"):
        getattr(model, load)(*arguments)
