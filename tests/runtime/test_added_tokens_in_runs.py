from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models.chat_models import bpe_tokenizer, random_model, save_as_on_the_hub
from tests.runtime.in_process import directory_of, small, train
from treetune.models.lora import Lora
from treetune.models.policy_files import read_policy
from treetune.models.pretrained import PretrainedModel
from treetune.runtime import commands
from treetune.runtime.base import Evaluation, EvaluationSet
from treetune_threads.format import TAGS


def test_a_run_goes_on_from_the_checkpoint_of_one_that_added_tokens(tmp_path: Path) -> None:
    first = small(tmp_path, iterations=1)
    first = replace(first, model=replace(first.model, added_tokens=TAGS))
    policy = train(first).checkpoint(1) / "policy"
    source = PretrainedModel(name_or_path=str(policy), added_tokens=TAGS)
    sets = (EvaluationSet(split="test", problems=2),)
    second = replace(first, model=source, experiment_name="second", evaluation=Evaluation(every=1, sets=sets))
    train(second)
    commands.run_evaluation_on_baseline(second, {})
    assert directory_of(second).evaluation(0, "test").joinpath("summary.json").is_file()
    trained, _ = read_policy(policy)
    loaded = source.load_model(0, str)
    assert all(torch.equal(weight, trained[name]) for name, weight in loaded.named_parameters())
    again, _ = read_policy(directory_of(second).checkpoint(1) / "policy")
    assert {name: w.shape for name, w in again.items()} == {name: w.shape for name, w in trained.items()}
    tokenizer = PretrainedModel(name_or_path=str(directory_of(second).checkpoint(1) / "policy"))
    assert tokenizer.load_tokenizer(str).get_vocab() == source.load_tokenizer(str).get_vocab()


def test_adapters_are_refused_for_tokens_that_they_cannot_learn(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    folder = save_as_on_the_hub(tmp_path / "model", random_model("llama", len(tokenizer)), tokenizer)
    source = PretrainedModel(name_or_path=str(folder), added_tokens=("<Thread>", "</Thread>"))
    config = small(tmp_path, model=source)
    with pytest.raises(ValueError, match="'<Thread>', '</Thread>', which the model doesn't know yet"):
        train(replace(config, trainer=replace(config.trainer, lora=Lora())))
