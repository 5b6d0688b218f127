"""The weights that a run starts from, on their way to the engine, and on to another run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.engine.fake_cuda import FakeCuda
from tests.support.chat_models import bpe_tokenizer, random_model, save_as_on_the_hub
from tests.support.small_run import (
    MODEL,
    TASK,
    TRAINER,
    engines_of,
    evaluated,
    small,
    train,
)
from treetune.engine.base import Chunk, TransferMethod
from treetune.engine.settings import InProcessSettings
from treetune.models import shards
from treetune.models.lora import Lora
from treetune.models.policy_files import read_policy
from treetune.models.pretrained import PretrainedModel
from treetune.models.saved_weights import saved_weights
from treetune.models.shards import HEAD_WEIGHT, INDEX_FILE, add_head, split_into_chunks
from treetune.models.tokenizer import character_tokenizer
from treetune.objectives.policy_gradient import ClippedPolicyGradient
from treetune.runtime import commands, weights_folder
from treetune.runtime.base import Evaluation, EvaluationSet, PolicyIteration
from treetune.runtime.policy_server import PolicyServer
from treetune.runtime.session import Session, StartModel
from treetune.runtime.training import make_trainer
from treetune.runtime.weights_folder import WeightsFolder, count_needed_bytes
from treetune.store.checksums import digest_of_weights
from treetune.threads.format import TAGS

CPU = torch.device("cpu")
A_GPU = torch.device("meta")
"""Stands for a device that tensors must not be taken to: what is there can't be read."""
PENALISED = ClippedPolicyGradient(kl_coef=0.1)
BF16 = replace(TRAINER, objective=PENALISED, precision="bfloat16", zero_stage=1)
TIED = replace(MODEL, tie_word_embeddings=True)

# The start model: in the trainer's precision, and on a device only where somebody computes


def floating_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in module.named_buffers() if b.is_floating_point()}


def test_in_bfloat16_parameters_are_cast_and_rotary_frequencies_are_not(tmp_path: Path) -> None:
    """Also after all that DeepSpeed does to a model, of policy and reference alike."""
    config = small(tmp_path, trainer=BF16)
    exact = floating_buffers(config.model.load_model(config.seed, config.task.alphabet))
    model = StartModel(config, CPU).load()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    buffers = floating_buffers(model)
    assert buffers and all(torch.equal(buffers[name], buffer) for name, buffer in exact.items())
    with Session.open(config, {}) as session:
        trainer = make_trainer(session)
        assert trainer.reference is not None
        with trainer.reference() as reference:
            for module in (trainer.policy.module, reference):
                assert isinstance(module, nn.Module)
                assert {b.dtype for b in floating_buffers(module).values()} == {torch.float32}


def test_start_weights_are_written_without_a_device(tmp_path: Path) -> None:
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
    config = small(tmp_path, model=TIED, trainer=replace(BF16, precision=precision))
    model = StartModel(config, CPU).load()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_weights_that_would_not_fit_twice_are_refused_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path)
    weights = config.model.load_model(config.seed, config.task.alphabet).parameters()
    size = sum(4 * weight.numel() for weight in weights)

    def free(bytes_: int) -> None:
        usage = SimpleNamespace(free=bytes_)
        monkeypatch.setattr(weights_folder.shutil, "disk_usage", lambda folder: usage)

    with Session.open(config, {}) as session:
        free(2 * size - 1)
        with (
            pytest.raises(ValueError, match="2 versions at the same time") as error,
            PolicyServer.start(session),
        ):
            pass
        assert "--ipc=host" in str(error.value)
        assert not engines_of(config)
        free(2 * size)
        with PolicyServer.start(session):
            assert len(engines_of(config)) == 1


def test_a_tied_head_is_written_out_and_adapters_need_one_whole_model(tmp_path: Path) -> None:
    plain, tied = (StartModel(small(tmp_path, model=model), CPU).load() for model in (MODEL, TIED))
    whole = count_needed_bytes(plain, adapters_alone=False)
    assert count_needed_bytes(tied, adapters_alone=False) == whole
    assert count_needed_bytes(plain, adapters_alone=True) == whole / 2


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


# Chunks: what lies in the folder at the end is what the trainer has


def sent(
    config: PolicyIteration, transfer: TransferMethod = "shared_memory"
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Chunk]]:
    """What the trainer has, what lies in the folder when all chunks were sent, and the chunks."""
    with Session.open(config, {}) as session:
        trainer = make_trainer(session)
        trainer_has = {name: weight.clone() for name, weight in trainer.weights().items()}
        folder = WeightsFolder(session, None, transfer)
        try:
            chunks = []
            for chunk in folder.send(trainer, 1):
                if transfer == "shared_memory":
                    assert chunk.digest == digest_of_weights(chunk.path), "it is there when it is sent"
                is_whole = chunk.last and transfer != "nccl"
                assert (folder.of(1) / INDEX_FILE).is_file() == is_whole, "the last one makes it whole"
                chunks.append(chunk)
            weights, architecture = read_policy(folder.of(1))
            assert not architecture.tie_word_embeddings
            return trainer_has, weights, chunks
        finally:
            folder.remove()


@pytest.mark.parametrize(
    ("settings", "transfer"),
    [
        ({}, "shared_memory"),
        ({}, "file"),  # which is read when it is whole
        ({}, "nccl"),  # which takes them from where the trainer has them
        ({"zero_stage": 3}, "nccl"),
        ({"zero_stage": 3}, "shared_memory"),
        ({"zero_stage": 1, "precision": "bfloat16"}, "shared_memory"),
        ({"lora": Lora(rank=4)}, "shared_memory"),
        ({"lora": Lora(rank=4), "zero_stage": 3}, "shared_memory"),
    ],
)
def test_the_folder_holds_the_trainers_weights(
    settings: dict[str, Any], transfer: TransferMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_folder, "CHUNK_BYTES", 20_000)
    expected, found, chunks = sent(small(tmp_path, trainer=replace(TRAINER, **settings)), transfer)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight.cpu()), name
    assert len(chunks) > 2
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_chunk_is_whole_on_its_gpu_and_goes_to_the_engine_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes it may read it on a stream of his own."""
    cuda, engine_has_one = FakeCuda(monkeypatch), threading.Event()
    written_on: list[int] = []
    write_shard = shards.write_shard

    def write(weights: Mapping[str, Tensor], path: Path) -> None:
        assert engine_has_one.wait(20)
        written_on.append(cuda.current())
        write_shard(weights, path)

    monkeypatch.setattr(shards, "write_shard", write)
    monkeypatch.setattr(weights_folder, "CHUNK_BYTES", 20_000)
    with Session.open(small(tmp_path), {}) as session:
        trainer = make_trainer(session)
        session.ranks = replace(session.ranks, device=torch.device("cuda", 3))
        folder = WeightsFolder(session, None, "nccl")
        for number, chunk in enumerate(folder.send(trainer, 1), 1):
            assert cuda.done == [("synchronize", 3)] * number
            assert chunk.tensors
            engine_has_one.set()
        assert written_on == [3] * number
        assert (folder.of(1) / INDEX_FILE).is_file()
        folder.remove()


def test_a_disk_that_hangs_ends_the_run_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_answers = threading.Event()
    monkeypatch.setattr(shards, "write_shard", lambda *_: disk_answers.wait(20))
    with Session.open(small(tmp_path), {}) as session:
        session.ranks = replace(session.ranks, deadline_s=0.1)
        folder = WeightsFolder(session, None, "file")
        try:
            with pytest.raises(TimeoutError, match=r"was not written into .*0001 within .*rank_deadline"):
                list(folder.send(make_trainer(session), 1))
            writers = [thread for thread in threading.enumerate() if thread.name == "weights-writer"]
            assert writers and all(writer.daemon for writer in writers), "Python's exit would wait for them"
        finally:
            disk_answers.set()
            folder.remove()


def test_a_tied_head_is_sent_behind_the_embeddings(tmp_path: Path) -> None:
    expected, found, _ = sent(small(tmp_path, model=TIED))
    assert HEAD_WEIGHT not in expected
    assert torch.equal(found[HEAD_WEIGHT], expected["model.embed_tokens.weight"])


def test_no_more_than_one_layer_is_ever_gathered(tmp_path: Path) -> None:
    """Under ZeRO-3 a rank holds its part; what is whole is what is just being sent."""
    with Session.open(small(tmp_path, trainer=replace(TRAINER, zero_stage=3)), {}) as session:
        trainer = make_trainer(session)
        parameters = list(trainer.policy.module.parameters())
        sizes = [p.ds_numel for p in parameters]  # type: ignore[attr-defined]
        gathered = [sum(p.numel() for p in parameters if p.numel() > 1) for _ in trainer.weights_in_turn()]
        assert max(gathered) <= max(sizes) < sum(sizes) / 3


def test_a_chunk_has_no_more_than_it_may_and_a_larger_weight_is_one_by_itself() -> None:
    weights = [(str(n), torch.zeros(size)) for n, size in enumerate((2, 2, 9, 1, 1, 1))]
    chunks = list(split_into_chunks(weights, 4 * 4, lambda weight: weight))
    assert [(list(chunk), last) for chunk, last in chunks] == [
        (["0", "1"], False),
        (["2"], False),
        (["3", "4", "5"], True),
    ]


def test_a_head_that_is_tied_and_named_comes_once() -> None:
    weights = [("model.embed_tokens.weight", torch.ones(2)), (HEAD_WEIGHT, torch.zeros(2))]
    found = list(add_head(weights, [name for name, _ in weights], tied=True))
    assert [name for name, _ in found] == ["model.embed_tokens.weight", HEAD_WEIGHT]
    assert torch.equal(found[1][1], torch.ones(2))


# On to another run


def test_a_run_goes_on_from_the_checkpoint_of_one_that_added_tokens(tmp_path: Path) -> None:
    first = small(tmp_path, iterations=1, model=replace(MODEL, added_tokens=TAGS))
    policy = train(first).checkpoint_folder(1) / "policy"
    source = PretrainedModel(name_or_path=str(policy), added_tokens=TAGS)
    sets = (EvaluationSet(split="test", problems=2),)
    second = replace(first, model=source, experiment_name="second", evaluation=Evaluation(every=1, sets=sets))
    again = train(second).checkpoint_folder(1) / "policy"
    commands.run_evaluation_on_baseline(second, {})
    assert evaluated(second, 0, "test")[0]["n_problems"] == 2
    trained, _ = read_policy(policy)
    loaded = source.load_model(0, str)
    assert all(torch.equal(weight, trained[name]) for name, weight in loaded.named_parameters())
    shapes = [{name: weight.shape for name, weight in read_policy(one)[0].items()} for one in (policy, again)]
    assert shapes[0] == shapes[1]
    tokenizer = PretrainedModel(name_or_path=str(again)).load_tokenizer(str)
    assert tokenizer.get_vocab() == source.load_tokenizer(str).get_vocab()


def test_adapters_are_refused_for_tokens_that_they_cannot_learn(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    folder = save_as_on_the_hub(tmp_path / "model", random_model("llama", len(tokenizer)), tokenizer)
    source = PretrainedModel(name_or_path=str(folder), added_tokens=("<Thread>", "</Thread>"))
    with pytest.raises(ValueError, match="'<Thread>', '</Thread>', which the model doesn't know yet"):
        train(small(tmp_path, model=source, trainer=replace(TRAINER, lora=Lora())))


# Buffers that are learned elsewhere, and are no parameters

BUFFERS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 8},
    "apertus": {},
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    },
}  # fmt: skip


def write_model_with_buffers(kind: str, folder: Path) -> None:
    tokenizer = character_tokenizer(TASK.alphabet(), 64)
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
        "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "vocab_size_per_layer_input": len(tokenizer), **BUFFERS[kind],
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings)).float()
    with torch.no_grad():
        for name in kept_buffers(model):
            model.get_buffer(name).add_(0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def kept_buffers(model: Any) -> list[str]:
    """Returns the names of buffers that are saved with a model."""
    return sorted(saved_weights(model).keys() - dict(model.named_parameters()).keys())


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_run_samples_and_writes_the_buffers_of_its_start_model(
    kind: str, zero_stage: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "start-model"
    write_model_with_buffers(kind, folder)
    config = small(
        tmp_path,
        InProcessSettings(),
        model=PretrainedModel(name_or_path=str(folder)),
        trainer=replace(TRAINER, zero_stage=zero_stage),
    )
    directory = train(config)
    gaps = [row["engine/logprob_gap_mean"] for row in directory.read_metrics()]
    assert max(gaps) < 1e-4, gaps
    start, trained = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        for place in (folder, directory.checkpoint_folder(2) / "policy")
    )
    names = kept_buffers(start)
    assert names
    for name in names:
        assert torch.equal(start.get_buffer(name), trained.get_buffer(name)), name
    assert not torch.equal(start.get_input_embeddings().weight, trained.get_input_embeddings().weight)
