"""Weights leave the trainer in chunks, and what lies in the folder at the end is what the trainer has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runtime.in_process import small
from treetune.inference.base import Chunk, TransferMethod
from treetune.models.lora import Lora
from treetune.models.shards import HEAD, INDEX, in_chunks, with_head
from treetune.runtime import weights_folder
from treetune.runtime.session import Session
from treetune.runtime.training import make_trainer
from treetune.runtime.weights_folder import WeightsFolder
from treetune.store.checksums import digest_of_weights

SMALL_CHUNK = 20_000


def sent(
    tmp_path: Path, transfer: TransferMethod = "shared_memory", **changes: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Chunk]]:
    """What the trainer has, what lies in the folder when all chunks were sent, and the chunks."""
    from treetune.models.policy_files import read_policy

    with Session.open(small(tmp_path, **changes), {}) as session:
        trainer = make_trainer(session)
        trainer_has = {name: weight.clone() for name, weight in trainer.weights().items()}
        folder = WeightsFolder(session, None, transfer)
        try:
            chunks = []
            for chunk in folder.send(trainer, 1):
                found = digest_of_weights(chunk.path)  # it is there when it is sent
                assert chunk.digest == (found if transfer == "shared_memory" else "")
                assert (folder.of(1) / INDEX).is_file() == chunk.last, "the last one makes it whole"
                chunks.append(chunk)
            weights, config = read_policy(folder.of(1))
            assert not config.tie_word_embeddings
            return trainer_has, weights, chunks
        finally:
            folder.remove()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_folder, "CHUNK_BYTES", SMALL_CHUNK)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"zero_stage": 3},
        {"zero_stage": 1, "precision": "bfloat16"},
        {"lora": Lora(rank=4)},
        {"lora": Lora(rank=4), "zero_stage": 3},
    ],
)
def test_the_folder_holds_the_trainers_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    config = small(tmp_path)
    expected, found, chunks = sent(tmp_path, trainer=replace(config.trainer, **settings))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight.cpu()), name
    assert len(chunks) > 2
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_nobody_waits_for_a_digest_that_is_not_checked(tmp_path: Path) -> None:
    _, _, chunks = sent(tmp_path, "file")
    assert len(chunks) > 2


def test_a_tied_head_is_sent_behind_the_embeddings(tmp_path: Path) -> None:
    model = replace(small(tmp_path).model, tie_word_embeddings=True)  # type: ignore[type-var]
    expected, found, _ = sent(tmp_path, model=model)
    assert HEAD not in expected
    assert torch.equal(found[HEAD], expected["model.embed_tokens.weight"])


def test_no_more_than_one_layer_is_ever_gathered(tmp_path: Path) -> None:
    """Under ZeRO-3 a rank holds its part; what is whole is what is just being sent."""
    settings = replace(small(tmp_path).trainer, zero_stage=3)
    with Session.open(small(tmp_path, trainer=settings), {}) as session:
        trainer = make_trainer(session)
        parameters = dict(trainer.policy.module.named_parameters())
        whole = sum(p.ds_numel for p in parameters.values())  # type: ignore[attr-defined]
        largest = max(p.ds_numel for p in parameters.values())  # type: ignore[attr-defined]
        gathered = [
            sum(p.numel() for p in parameters.values() if p.numel() > 1) for _ in trainer.weights_in_turn()
        ]
        assert max(gathered) <= largest < whole / 3


def test_a_chunk_has_no_more_than_it_may_and_a_larger_weight_is_one_by_itself() -> None:
    weights = [(str(n), torch.zeros(size)) for n, size in enumerate((2, 2, 9, 1, 1, 1))]
    chunks = list(in_chunks(weights, 4 * 4, lambda weight: weight))
    assert [list(chunk) for chunk, _ in chunks] == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert [last for _, last in chunks] == [False, False, True]


def test_a_head_that_is_tied_and_named_comes_once() -> None:
    weights = [("model.embed_tokens.weight", torch.ones(2)), (HEAD, torch.zeros(2))]
    found = list(with_head(weights, [name for name, _ in weights], tied=True))
    assert [name for name, _ in found] == ["model.embed_tokens.weight", HEAD]
    assert torch.equal(found[1][1], torch.ones(2))
